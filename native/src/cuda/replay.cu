/* Steps of decoding as CUDA graphs. The operations of a step are the same launches as those of an earlier step with as
 * many rows: what differs (positions, pages, token ids) lies in memory that begin fills before. The second step of a
 * kind is captured while it is called, and replayed from then on: one launch in place of hundreds. */
#include <stdlib.h>

#include "cuda/hopper.cuh"

/* Kinds of steps that are kept: numbers of rows, and bounds of blocks, which double. */
enum { MOST_REPLAYS = 16 };

struct replay {
  bool used;
  int32_t n;
  int64_t max_blocks;
  m3_step step;
  cudaGraphExec_t graph;  /* NULL: called once, not captured */
  int64_t low_bit_layers; /* selections by low-bit copies in it */
  uint64_t last;          /* when it was asked for */
};

struct m3_replays {
  replay list[MOST_REPLAYS];
  uint64_t asked;
  replay *capturing; /* NULL: the operations just run */
};

static bool is_kind(const replay *r, const m3_device_state *s, int32_t n, const m3_step *step) {
  return r->used && r->n == n && r->max_blocks == s->max_blocks && r->step.head == step->head &&
         r->step.bindings == step->bindings;
}

static void drop(replay *r) {
  if (r->graph) cudaGraphExecDestroy(r->graph);
  *r = replay{};
}

/* The entry of a kind, NULL if there is none. */
static replay *find(m3_device_state *s, int32_t n, const m3_step *step) {
  for (int i = 0; i < MOST_REPLAYS; i++)
    if (is_kind(&s->replays->list[i], s, n, step)) return &s->replays->list[i];
  return NULL;
}

/* An entry for it, in place of the one that was not asked for longest. */
static replay *enter(m3_device_state *s, int32_t n, const m3_step *step) {
  replay *oldest = s->replays->list;
  for (int i = 1; i < MOST_REPLAYS; i++)
    if (s->replays->list[i].last < oldest->last) oldest = &s->replays->list[i];
  drop(oldest);
  *oldest = replay{true, n, s->max_blocks, *step, NULL, 0, 0};
  return oldest;
}

bool m3_cuda_replay(const m3_context *c, const m3_step *step) {
  m3_device_state *s = c->state;
  if (!s->replays) s->replays = (m3_replays *)calloc(1, sizeof *s->replays);
  if (!s->replays) return false; /* the operations run one by one */
  s->replays->capturing = NULL;
  replay *r = find(s, s->n, step);
  bool seen = r != NULL;
  if (!r) r = enter(s, s->n, step);
  r->last = ++s->replays->asked;
  if (!seen) return false;
  if (r->graph) {
    m3_note(s, cudaGraphLaunch(r->graph, s->stream), "a step");
    m3_hopper_count_blocks(c, r->low_bit_layers);
    s->told = true;
    return true;
  }
  s->low_bit_layers = 0;
  /* Other threads may go on allocating. */
  cudaError_t error = cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal);
  m3_note(s, error, "recording a step");
  if (error == cudaSuccess) s->replays->capturing = r;
  return false;
}

void m3_cuda_recorded(const m3_context *c, bool whole) {
  m3_device_state *s = c->state;
  replay *r = s->replays ? s->replays->capturing : NULL;
  if (!r) return;
  s->replays->capturing = NULL;
  m3_cuda_tell_broken(s);
  cudaGraph_t graph = NULL;
  cudaError_t error = cudaStreamEndCapture(s->stream, &graph);
  if (error == cudaSuccess && whole) error = cudaGraphInstantiate(&r->graph, graph, 0);
  if (error == cudaSuccess && whole) error = cudaGraphLaunch(r->graph, s->stream);
  m3_note(s, error, "recording a step");
  r->low_bit_layers = s->low_bit_layers;
  if (graph) cudaGraphDestroy(graph);
  if (error != cudaSuccess) drop(r);
  s->told = error == cudaSuccess && whole;
}

void m3_cuda_close_replays(m3_replays *r) {
  if (!r) return;
  for (int i = 0; i < MOST_REPLAYS; i++) drop(&r->list[i]);
  free(r);
}
