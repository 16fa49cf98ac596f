/* The device sends what the router left, and works on the shared expert while the CPU works on the routed ones. Their
 * weighted sums go back: nothing of the weights ever travels. */
#include "host_experts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "paging.h"
#include "session.h"
#include "threads.h"

struct m3_host_experts {
  const m3_model *model;
  m3_device_state *state;
  void *pinned;      /* of host_alloc; what rows points to */
  m3_host_rows rows; /* of a whole chunk */
  m3_scratch scratch;
};

/* A buffer of the CPU's scratch: where its pointer goes, and its bytes. */
typedef struct buffer {
  void **pointer;
  uint64_t bytes;
} buffer;

enum { BUFFERS = 7, CACHE_LINE = 64 };

static uint64_t whole_lines(uint64_t bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

/* Places in `pinned`, which may be NULL; returns its bytes. */
static uint64_t lay_out(const m3_hparams *h, int64_t rows, char *pinned, m3_host_rows *out) {
  uint64_t states = whole_lines((uint64_t)(rows * h->n_embd) * sizeof(float));
  uint64_t pairs = whole_lines((uint64_t)(rows * h->n_expert_used) * sizeof(float));
  if (pinned)
    *out = (m3_host_rows){.normed = (float *)(void *)pinned,
                          .sums = (float *)(void *)(pinned + states),
                          .weights = (float *)(void *)(pinned + 2 * states),
                          .experts = (int32_t *)(void *)(pinned + 2 * states + pairs)};
  return 2 * (states + pairs);
}

static void list_buffers(const m3_hparams *h, int64_t rows, int32_t n_threads, m3_scratch *w, buffer list[BUFFERS]) {
  uint64_t pairs = (uint64_t)(rows * h->n_expert_used), width = (uint64_t)h->n_ff_expert, size = sizeof(float);
  w->n_threads = n_threads;
  w->thread_floats = m3_cpu_backend.thread_floats(h, 1);
  const buffer all[BUFFERS] = {
      {(void **)&w->gate, pairs * width * size},
      {(void **)&w->up, pairs * width * size},
      {(void **)&w->expert_in, pairs * (uint64_t)h->n_embd * size},
      {(void **)&w->expert_out, pairs * (uint64_t)h->n_embd * size},
      {(void **)&w->grouping, ((uint64_t)h->n_expert + 1 + 2 * pairs) * sizeof(int32_t)},
      {(void **)&w->rounded, (uint64_t)m3_cpu_backend.input_bytes(h, rows)},
      {(void **)&w->thread, (uint64_t)(w->thread_floats * n_threads) * size},
  };
  memcpy(list, all, sizeof all);
}

static uint64_t bytes_of(const m3_hparams *h, int64_t rows, int32_t n_threads, uint64_t *pinned) {
  m3_scratch blank = {0};
  buffer list[BUFFERS];
  list_buffers(h, rows, n_threads, &blank, list);
  uint64_t bytes = *pinned = lay_out(h, rows, NULL, NULL);
  for (int i = 0; i < BUFFERS; i++) bytes += list[i].bytes;
  return bytes;
}

uint64_t m3_host_experts_bytes(const m3_model *m, const m3_session_options *o, uint64_t *pinned) {
  int32_t threads = o->n_threads;
  int64_t rows = o->chunk ? o->chunk : M3_DEFAULT_CHUNK, most = o->context * (o->sequences ? o->sequences : 1);
  if (m3_resolve_threads(o->n_threads, &threads, NULL)) threads = 1;
  return bytes_of(&m->hparams, rows < most ? rows : most, threads, pinned);
}

m3_status m3_host_experts_open(const m3_model *m, const m3_session_options *o, m3_device_state *state,
                               m3_host_experts **out, m3_error *err) {
  *out = NULL;
  m3_host_experts *e = calloc(1, sizeof *e);
  if (!e) return m3_fail_memory(err, sizeof *e, "a session");
  e->model = m;
  e->state = state;
  uint64_t pinned;
  bytes_of(&m->hparams, o->chunk, o->n_threads, &pinned);
  m3_status status = m->backend->host_alloc(pinned, "rows of experts (a smaller chunk needs less)", &e->pinned, err);
  if (!status) lay_out(&m->hparams, o->chunk, e->pinned, &e->rows);
  buffer list[BUFFERS];
  list_buffers(&m->hparams, o->chunk, o->n_threads, &e->scratch, list);
  for (int i = 0; i < BUFFERS && !status; i++) {
    *list[i].pointer = m3_alloc(list[i].bytes, 1);
    if (!*list[i].pointer)
      status = m3_fail_memory(err, list[i].bytes, "work on experts on the CPU (a smaller chunk needs less)");
  }
  e->scratch.normed = e->rows.normed;
  e->scratch.experts = e->rows.experts;
  e->scratch.weights = e->rows.weights;
  if (status)
    m3_host_experts_close(e);
  else
    *out = e;
  return status;
}

void m3_host_experts_close(m3_host_experts *e) {
  if (!e) return;
  buffer list[BUFFERS];
  list_buffers(&e->model->hparams, 0, 0, &e->scratch, list);
  for (int i = 0; i < BUFFERS; i++) m3_free(*list[i].pointer);
  e->model->backend->host_free(e->state, e->pinned);
  free(e);
}

/* Whether the router left what can be computed with. Where it found a number that is broken its weights are NaN, and
 * `finish` will tell. */
static bool is_sound(const m3_host_rows *rows, const m3_hparams *h) {
  bool sound = true;
  for (int64_t i = 0; i < (int64_t)rows->n * h->n_expert_used; i++)
    sound &= isfinite(rows->weights[i]) && rows->experts[i] >= 0 && rows->experts[i] < h->n_expert;
  return sound;
}

void m3_host_experts_run(m3_host_experts *e, const m3_context *c, const m3_ffn_params *p) {
  const m3_backend *b = e->model->backend;
  m3_host_rows *rows = &e->rows;
  rows->n = p->n;
  b->send_rows(c, rows);
  if (p->with_shared) b->shared(c, p);
  if (!b->rows_sent(c) || !is_sound(rows, c->hparams)) return;
  m3_page_in(e->model, p->layer, rows->experts, (int64_t)p->n * c->hparams->n_expert_used);
  m3_context host = {.hparams = c->hparams, .kernels = e->model->kernels, .scratch = &e->scratch, .layer = c->layer};
  memset(rows->sums, 0, (size_t)p->n * (size_t)c->hparams->n_embd * sizeof(float));
  m3_cpu_backend.experts(&host, &(m3_ffn_params){p->layer, p->n, rows->sums, false});
  b->add_sums(c, rows, p->hidden);
}
