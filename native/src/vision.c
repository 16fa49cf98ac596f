/* The vision tower of MiniMax-M3, as "minimax_m3_vl" of transformers computes it in float32:
 *     x = norm(W0 frame 0 + W1 frame 1)                     a patch in two frames
 *     x += Wo attend(rotated q, k, v of norm(x)), x += W2 gelu(W1 norm(x))      in each layer; every patch sees all
 *     token = M2 gelu(M1 [P2 gelu(P1 x) of 2 x 2 patches])
 * Every step is an operation of the backend. */
#include "vision.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "threads.h"

#define BLOCK 128 /* patches whose keys are read together */

/* Buffers for images of up to so many patches. What lies in host memory is marked. */
typedef struct work {
  const m3_vision *v;
  m3_device_state *state;
  m3_hparams shape; /* what the operations that the text model shares take of a model */
  m3_scratch scratch;
  m3_context context;
  float *hidden;    /* [n, n_embd] */
  float *inner;     /* [n, n_ff or n_projector], [n / 4, n_merger] */
  float *projected; /* [n, n_out] */
  float *tokens;    /* [n / 4, n_out] */
  float *frame;     /* [n, channels * patch_size^2] one frame of each patch */
  m3_layer_cache cache;
  float *gathered;       /* host: as frame */
  float *cos, *sin;      /* host: [n, n_rot / 2] */
  int32_t *seq, *table;  /* host: [n] zeros, [blocks] page of each */
  int64_t *pos;          /* host: [n] the last one */
  const int32_t *tables; /* host */
} work;

typedef struct buffer {
  void **pointer;
  int64_t count;
  size_t size;
  bool host;
} buffer;

#define MAX_BUFFERS 24

static int64_t max2(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

/* Inputs of products in the form that the backend multiplies: those of all patches, and those of tokens, which are few
 * but wide. */
static int64_t rounded_bytes(const work *w, int64_t n) {
  const m3_vision_hparams *h = &w->v->hparams;
  m3_hparams patches = w->shape, tokens = w->shape;
  if (!w->v->backend->input_bytes) return 0;
  patches.n_ff = (int32_t)max2(h->n_ff, h->n_projector);
  tokens.n_ff = (int32_t)max2((int64_t)M3_VISION_MERGE * M3_VISION_MERGE * h->n_out, h->n_merger);
  return max2(w->v->backend->input_bytes(&patches, n),
              w->v->backend->input_bytes(&tokens, n / (M3_VISION_MERGE * M3_VISION_MERGE)));
}

static int list_buffers(work *w, int64_t n, int32_t threads, buffer list[MAX_BUFFERS]) {
  const m3_vision_hparams *h = &w->v->hparams;
  const m3_backend *b = w->v->backend;
  m3_scratch *s = &w->scratch;
  int64_t tokens = n / (M3_VISION_MERGE * M3_VISION_MERGE), frame = m3_patch_values(h) / M3_VISION_FRAMES;
  int64_t inner = max2(n * max2(h->n_ff, h->n_projector), tokens * h->n_merger);
  s->n_threads = threads;
  s->thread_floats = b->thread_floats(&w->shape, blocks_of(n));
  const buffer all[] = {
      {(void **)&s->normed, n * h->n_embd, sizeof(float), false},
      {(void **)&s->q, n * h->n_embd, sizeof(float), false},
      {(void **)&s->k, n * h->n_embd, sizeof(float), false},
      {(void **)&s->v, n * h->n_embd, sizeof(float), false},
      {(void **)&s->attended, n * h->n_embd, sizeof(float), false},
      {(void **)&s->rounded, rounded_bytes(w, n), 1, false},
      {(void **)&s->thread, s->thread_floats * threads, sizeof(float), false},
      {(void **)&w->hidden, n * h->n_embd, sizeof(float), false},
      {(void **)&w->inner, inner, sizeof(float), false},
      {(void **)&w->projected, n * h->n_out, sizeof(float), false},
      {(void **)&w->tokens, tokens * h->n_out, sizeof(float), false},
      {(void **)&w->frame, n * frame, sizeof(float), false},
      {&w->cache.k, blocks_of(n) * BLOCK * h->n_embd, sizeof(float), false},
      {&w->cache.v, blocks_of(n) * BLOCK * h->n_embd, sizeof(float), false},
      {(void **)&w->gathered, n * frame, sizeof(float), true},
      {(void **)&w->cos, n * (h->n_rot / 2), sizeof(float), true},
      {(void **)&w->sin, n * (h->n_rot / 2), sizeof(float), true},
      {(void **)&w->seq, n, sizeof(int32_t), true},
      {(void **)&w->table, blocks_of(n), sizeof(int32_t), true},
      {(void **)&w->pos, n, sizeof(int64_t), true},
  };
  memcpy(list, all, sizeof all);
  return (int)(sizeof all / sizeof *all);
}

/* The shape of a text model whose attention, products and buffers are those of the tower. */
static m3_hparams shape_of(const m3_vision_hparams *h) {
  return (m3_hparams){
      .n_layer = h->n_layer,
      .n_dense_layer = h->n_layer,
      .n_embd = h->n_embd,
      .n_head = h->n_head,
      .n_head_kv = h->n_head,
      .head_dim = h->head_dim,
      .n_rot = h->n_rot,
      .n_ff = h->n_ff,
      .n_ff_expert = 1,
      .n_expert = 1,
      .n_expert_used = 1,
      .n_index_head = h->n_head,
      .index_dim = 1,
      .top_k = 1,
      .block_size = BLOCK,
      .local_blocks = 1,
  };
}

static void close_work(work *w, int64_t n) {
  buffer list[MAX_BUFFERS];
  const m3_backend *b = w->v->backend;
  for (int i = list_buffers(w, n, w->scratch.n_threads, list) - 1; i >= 0; i--) {
    if (list[i].host)
      m3_free(*list[i].pointer);
    else
      b->free(w->state, *list[i].pointer);
  }
  b->close(w->state);
}

/* On an error nothing is left. */
static m3_status open_work(work *w, const m3_vision *v, int64_t n, int32_t threads, m3_error *err) {
  static const char *const purpose = "a work buffer of the vision tower";
  const m3_backend *b = v->backend;
  *w = (work){.v = v, .shape = shape_of(&v->hparams)};
  m3_state_params state = {.hparams = &w->shape, .sequences = 1, .chunk = (int32_t)n, .blocks = blocks_of(n)};
  m3_status status = b->open(&state, &w->state, err);
  if (status) return status;
  buffer list[MAX_BUFFERS];
  int count = list_buffers(w, n, threads, list);
  for (int i = 0; i < count && !status; i++) {
    uint64_t bytes = (uint64_t)list[i].count * list[i].size;
    if (!bytes) continue;
    if (!list[i].host)
      status = b->alloc(w->state, bytes, purpose, list[i].pointer, err);
    else if (!(*list[i].pointer = m3_alloc(bytes, 1)))
      status = m3_fail_memory(err, bytes, purpose);
  }
  if (status) {
    close_work(w, n);
    return status;
  }
  w->cache.kv_type = M3_TYPE_F32;
  for (int64_t i = 0; i < blocks_of(n); i++) w->table[i] = (int32_t)i;
  w->tables = w->table;
  w->context = (m3_context){.hparams = &w->shape, .kernels = v->kernels, .scratch = &w->scratch, .state = w->state};
  return M3_OK;
}

/* ---------------------------------------------------------------------------------------------- one image */

/* Angles of the patches, which stand in squares of 2 x 2. Frequencies and products are rounded to float32, as the
 * reference does. */
static void fill_angles(work *w, m3_vision_grid grid) {
  const m3_vision_hparams *h = &w->v->hparams;
  int64_t f = h->n_rot / 6, row = 0;
  for (int32_t t = 0; t < grid.t; t++)
    for (int32_t square = 0; square < grid.h / M3_VISION_MERGE * (grid.w / M3_VISION_MERGE); square++)
      for (int32_t in = 0; in < M3_VISION_MERGE * M3_VISION_MERGE; in++, row++) {
        int32_t across = grid.w / M3_VISION_MERGE;
        const int32_t place[3] = {t, square / across * M3_VISION_MERGE + in / M3_VISION_MERGE,
                                  square % across * M3_VISION_MERGE + in % M3_VISION_MERGE};
        for (int64_t axis = 0; axis < 3; axis++)
          for (int64_t i = 0; i < f; i++) {
            float frequency = 1.0f / powf(h->rope_theta, (float)(2 * i) / (float)(2 * f));
            float angle = (float)place[axis] * frequency;
            w->cos[row * 3 * f + axis * f + i] = (float)cos((double)angle);
            w->sin[row * 3 * f + axis * f + i] = (float)sin((double)angle);
          }
      }
}

static void apply(const work *w, const m3_affine *a, const float *x, int64_t n, float *y, bool gelu, bool add) {
  w->v->backend->linear(&w->context, &(m3_linear_params){&a->weight, &a->bias, x, (int32_t)n, y, gelu, add});
}

static void normalize(const work *w, const m3_affine *a, const float *x, int64_t n, float *out) {
  w->v->backend->layer_norm(&w->context,
                            &(m3_layer_norm_params){&a->weight, &a->bias, x, (int32_t)n, w->v->hparams.eps, out});
}

static void embed(work *w, const float *pixels, int64_t n) {
  const m3_vision *v = w->v;
  const m3_backend *b = v->backend;
  int64_t area = (int64_t)v->hparams.patch_size * v->hparams.patch_size, width = M3_VISION_CHANNELS * area;
  for (int32_t frame = 0; frame < M3_VISION_FRAMES; frame++) {
    for (int64_t i = 0; i < n * M3_VISION_CHANNELS; i++)
      memcpy(w->gathered + i * area, pixels + (i * M3_VISION_FRAMES + frame) * area, (size_t)area * sizeof(float));
    b->upload(w->state, w->frame, w->gathered, (uint64_t)(n * width) * sizeof(float));
    b->linear(&w->context, &(m3_linear_params){&v->patch[frame], NULL, w->frame, (int32_t)n, w->hidden, false, frame});
  }
  normalize(w, &v->outer[M3_VISION_PRE_LN], w->hidden, n, w->hidden);
}

static void run_layer(work *w, const m3_rows *rows, const m3_vision_layer *l) {
  const m3_backend *b = w->v->backend;
  const m3_scratch *s = &w->scratch;
  int64_t n = rows->n;
  normalize(w, &l->a[M3_VISION_LN1], w->hidden, n, s->normed);
  apply(w, &l->a[M3_VISION_Q], s->normed, n, s->q, false, false);
  apply(w, &l->a[M3_VISION_K], s->normed, n, s->k, false, false);
  apply(w, &l->a[M3_VISION_V], s->normed, n, s->v, false, false);
  b->turn(&w->context, &(m3_turn_params){rows, w->cache});
  b->attend(&w->context, &(m3_attend_params){rows, w->cache, NULL, s->attended, NULL});
  apply(w, &l->a[M3_VISION_OUT], s->attended, n, w->hidden, false, true);
  normalize(w, &l->a[M3_VISION_LN2], w->hidden, n, s->normed);
  apply(w, &l->a[M3_VISION_UP], s->normed, n, w->inner, true, false);
  apply(w, &l->a[M3_VISION_DOWN], w->inner, n, w->hidden, false, true);
}

/* Four patches of a square stand together: their projections are the input of its token. */
static void merge(work *w, int64_t n) {
  const m3_affine *a = w->v->outer;
  int64_t tokens = n / (M3_VISION_MERGE * M3_VISION_MERGE);
  apply(w, &a[M3_VISION_PROJECTOR_1], w->hidden, n, w->inner, true, false);
  apply(w, &a[M3_VISION_PROJECTOR_2], w->inner, n, w->projected, false, false);
  apply(w, &a[M3_VISION_MERGER_1], w->projected, tokens, w->inner, true, false);
  apply(w, &a[M3_VISION_MERGER_2], w->inner, tokens, w->tokens, false, false);
}

static m3_status encode_image(m3_vision *v, work *w, m3_vision_grid grid, const float *pixels, float *out,
                              m3_error *err) {
  const m3_backend *b = v->backend;
  int64_t n = (int64_t)grid.t * grid.h * grid.w, n_embd = v->hparams.n_embd;
  fill_angles(w, grid);
  for (int64_t i = 0; i < n; i++) w->pos[i] = n - 1;
  m3_rows rows = {(int32_t)n, w->seq, w->pos, &w->tables, w->cos, w->sin, NULL};
  b->begin(&w->context, &rows);
  embed(w, pixels, n);
  for (int32_t layer = 0; layer < v->hparams.n_layer; layer++) {
    if (atomic_load(&v->cancel)) return m3_fail(err, M3_ERROR_CANCELLED, "the encoding of images was cancelled");
    run_layer(w, &rows, &v->layers[layer]);
    if (!b->finite(&w->context, w->hidden, n * n_embd, M3_PART_OUTPUT))
      return m3_fail(err, M3_ERROR_NOT_FINITE, "vision layer %d: its output is NaN or infinite; its weights are broken",
                     (int)layer);
  }
  merge(w, n);
  int64_t count = n / (M3_VISION_MERGE * M3_VISION_MERGE) * v->hparams.n_out;
  if (!b->finite(&w->context, w->tokens, count, M3_PART_OUTPUT))
    return m3_fail(err, M3_ERROR_NOT_FINITE,
                   "the vision projector: its output is NaN or infinite; mm.1, mm.2 or mm.merger is broken");
  b->download(w->state, out, w->tokens, (uint64_t)count * sizeof(float));
  return M3_OK;
}

/* ---------------------------------------------------------------------------------------------- a batch */

/* Patches of all images and of the largest one. */
static m3_status check_batch(const m3_vision *v, const m3_vision_batch *p, int64_t *all, int64_t *most, m3_error *err) {
  if (!p || p->struct_size != sizeof *p)
    return m3_fail(err, M3_ERROR_ARGUMENT,
                   "m3_vision_batch has %u bytes, this library expects %zu: library and header do not belong together",
                   p ? p->struct_size : 0, sizeof *p);
  if (p->n_images < 1 || p->n_images > M3_MAX_IMAGES || !p->grids)
    return m3_fail(err, M3_ERROR_ARGUMENT, "a batch of %d images, expected 1 to %d", (int)p->n_images, M3_MAX_IMAGES);
  *all = *most = 0;
  for (int32_t i = 0; i < p->n_images; i++) {
    m3_vision_grid g = p->grids[i];
    int64_t n = (int64_t)g.h * g.w;
    bool whole = g.t > 0 && g.h > 0 && g.w > 0 && g.h % M3_VISION_MERGE == 0 && g.w % M3_VISION_MERGE == 0;
    if (!whole || n > M3_MAX_PATCHES || n * g.t > M3_MAX_PATCHES)
      return m3_fail(err, M3_ERROR_ARGUMENT,
                     "image %d: a grid of %d x %d x %d patches, expected even height and width and at most %d in all",
                     (int)i, (int)g.t, (int)g.h, (int)g.w, M3_MAX_PATCHES);
    *all += n * g.t;
    *most = max2(*most, n * g.t);
  }
  int64_t pixels = *all * m3_patch_values(&v->hparams);
  if (!p->pixels || p->pixels_count != pixels)
    return m3_fail(err, M3_ERROR_ARGUMENT, "pixels: %" PRId64 " values, expected %" PRId64 " in %" PRId64 " patches",
                   p->pixels ? p->pixels_count : 0, pixels, *all);
  for (int64_t i = 0; i < pixels; i++)
    if (!isfinite(p->pixels[i]))
      return m3_fail(err, M3_ERROR_ARGUMENT, "pixels: value %" PRId64 " is NaN or infinite", i);
  int64_t out = *all / (M3_VISION_MERGE * M3_VISION_MERGE) * v->hparams.n_out;
  if (!p->out || p->out_count != out)
    return m3_fail(err, M3_ERROR_ARGUMENT, "out is %s, it must hold %" PRId64 " values and holds %" PRId64,
                   p->out ? "there" : "NULL", out, p->out_count);
  return M3_OK;
}

m3_status m3_vision_encode(m3_vision *v, const m3_vision_batch *p, m3_error *err) {
  int64_t all = 0, most = 0;
  m3_status status = check_batch(v, p, &all, &most, err);
  if (status) return status;
  int32_t threads;
  status = m3_resolve_threads(p->n_threads, &threads, err);
  if (status) return status;
  atomic_store(&v->cancel, false);
  work w;
  status = open_work(&w, v, most, threads, err);
  if (status) return status;
  const float *pixels = p->pixels;
  float *out = p->out;
  for (int32_t i = 0; i < p->n_images && !status; i++) {
    int64_t n = (int64_t)p->grids[i].t * p->grids[i].h * p->grids[i].w;
    status = encode_image(v, &w, p->grids[i], pixels, out, err);
    pixels += n * m3_patch_values(&v->hparams);
    out += n / (M3_VISION_MERGE * M3_VISION_MERGE) * v->hparams.n_out;
  }
  close_work(&w, most);
  return status;
}
