/* world.h - a made-up layer with its cache, for tests of single operations: random weights in any storage type,
 * sequences whose pages lie in shuffled order, and NaN wherever no token was written. */
#ifndef M3_TESTS_WORLD_H
#define M3_TESTS_WORLD_H

#include <stdlib.h>

#ifdef M3_TEST_CUDA
#include <cuda_runtime_api.h>
#endif

#include "backend.h"
#include "check.h"
#include "cpu/kernels.h"
#include "model.h"
#include "quant/traits.h"

/* One line of the case table. */
typedef struct op_case {
  const char *name;
  int32_t n_head, n_head_kv, head_dim, index_dim, n_rot, block_size, top_k, local_blocks;
  int32_t n_embd, n_ff, n_ff_expert, n_ff_shared, n_expert, n_expert_used, n_vocab;
  int32_t weight_type, kv_type, index_type;
  int32_t n_sequences, n_rows; /* rows of each sequence in the chunk */
  int64_t context;             /* tokens of each sequence after the chunk */
  bool exact;                  /* as M3_SESSION_EXACT */
} op_case;

typedef struct world {
  op_case c;
  m3_hparams h;
  m3_layer layer;
  m3_weight embd, output_norm, head;
  m3_tensor tensors[M3_LAYER_ROLES + 3];
  void *owned[256];
  int n_owned;
  m3_layer_cache cache;
  int32_t n, n_pages;
  m3_rows rows;
  m3_scratch scratch;
  float *hidden;
  uint64_t seed;
  const m3_backend *backend;
  m3_device_state *state;
} world;

static inline bool on_gpu(const m3_backend *b) { return b->weight_load != NULL; }

/* Everything lies in memory that both sides reach under one address: a GPU reads and writes it in the host's memory, so
 * that a test looks at results where the CPU leaves them. */
static inline void *keep(world *w, size_t bytes) {
  void *p = NULL;
  bytes = bytes ? (bytes + 15) & ~(size_t)15 : 1; /* as the GPU's backend takes memory */
#ifdef M3_TEST_CUDA
  if (on_gpu(w->backend)) {
    if (cudaHostAlloc(&p, bytes, cudaHostAllocDefault)) abort();
    memset(p, 0, bytes);
  }
#endif
  if (!p) p = calloc(1, bytes);
  if (!p || w->n_owned == 256) abort();
  return w->owned[w->n_owned++] = p;
}

static inline float *keep_random(world *w, int64_t n, float scale) {
  float *p = keep(w, (size_t)n * sizeof(float));
  fill_random(p, n, scale, &w->seed);
  return p;
}

/* A random weight [ne2][ne1][ne0] of a type, with rows of about unit gain. In types that are searched for, all rows are
 * copies of a few, each at its own distance from the last one like it. */
static inline m3_weight new_weight(world *w, m3_tensor *t, int32_t type, int64_t ne0, int64_t ne1, int64_t ne2) {
  if (ne0 % m3_type_block_size(type)) type = M3_TYPE_F16;
  *t = (m3_tensor){.type = type, .n_dims = 3, .ne = {ne0, ne1, ne2, 1}};
  t->n_bytes = (uint64_t)(m3_row_bytes(type, ne0) * ne1 * ne2);
  float *values = keep_random(w, ne0 * ne1 * ne2, 1.0f / sqrtf((float)ne0));
  void *data = keep(w, t->n_bytes);
  int64_t row_bytes = m3_row_bytes(type, ne0), n_rows = ne1 * ne2, few = 5;
  bool copies = m3_type_block_size(type) == 256 && n_rows > few;
  float *equal = m3_type_needs_importance(type) ? keep(w, (size_t)ne0 * sizeof(float)) : NULL;
  for (int64_t i = 0; equal && i < ne0; i++) equal[i] = 1;
  m3_row_set rows = {.struct_size = sizeof rows,
                     .type = type,
                     .n_rows = copies ? few : n_rows,
                     .n_per_row = ne0,
                     .values = values,
                     .data = data,
                     .data_bytes = (copies ? few : n_rows) * row_bytes,
                     .n_threads = 1,
                     .importance = equal};
  if (m3_quantize(&rows, NULL)) abort();
  for (int64_t row = few; copies && row < n_rows; row++)
    memcpy((char *)data + row * row_bytes, (char *)data + (row + row / few) % few * row_bytes, (size_t)row_bytes);
  t->data = data;
  return (m3_weight){.tensor = t, .data = data, .device = data};
}

/* Around `mean`. */
static inline m3_weight new_norm(world *w, m3_tensor *t, int64_t n, float mean) {
  float *values = keep(w, (size_t)n * sizeof(float));
  for (int64_t i = 0; i < n; i++) values[i] = mean * (1.0f + 0.2f * random_float(&w->seed));
  *t = (m3_tensor){.type = M3_TYPE_F32, .n_dims = 1, .ne = {n, 1, 1, 1}, .n_bytes = (uint64_t)n * 4, .data = values};
  return (m3_weight){.tensor = t, .data = values, .device = values};
}

static inline void new_weights(world *w) {
  const op_case *c = &w->c;
  m3_weight *l = w->layer.w;
  m3_tensor *t = w->tensors;
  int64_t q = (int64_t)c->n_head * c->head_dim, kv = (int64_t)c->n_head_kv * c->head_dim;
#define W(role, a, b, e) l[role] = new_weight(w, &t[role], c->weight_type, a, b, e)
#define F(role, a, b) l[role] = new_weight(w, &t[role], M3_TYPE_F32, a, b, 1)
#define N(role, a, mean) l[role] = new_norm(w, &t[role], a, mean)
  N(M3_ATTN_NORM, c->n_embd, 1.0f);
  W(M3_ATTN_Q, c->n_embd, q, 1);
  W(M3_ATTN_K, c->n_embd, kv, 1);
  W(M3_ATTN_V, c->n_embd, kv, 1);
  W(M3_ATTN_OUTPUT, q, c->n_embd, 1);
  N(M3_ATTN_Q_NORM, c->head_dim, 1.0f);
  N(M3_ATTN_K_NORM, c->head_dim, 1.0f);
  F(M3_INDEX_Q, c->n_embd, (int64_t)c->n_head_kv * c->index_dim);
  F(M3_INDEX_K, c->n_embd, c->index_dim);
  N(M3_INDEX_Q_NORM, c->index_dim, 1.0f);
  N(M3_INDEX_K_NORM, c->index_dim, 1.0f);
  /* So large that some lanes reach the clamp of SwiGLU. */
  N(M3_FFN_NORM, c->n_embd, 4.0f);
  W(M3_FFN_GATE, c->n_embd, c->n_ff, 1);
  W(M3_FFN_UP, c->n_embd, c->n_ff, 1);
  W(M3_FFN_DOWN, c->n_ff, c->n_embd, 1);
  F(M3_ROUTER, c->n_embd, c->n_expert);
  F(M3_ROUTER_BIAS, c->n_expert, 1);
  W(M3_GATE_EXPS, c->n_embd, c->n_ff_expert, c->n_expert);
  W(M3_UP_EXPS, c->n_embd, c->n_ff_expert, c->n_expert);
  W(M3_DOWN_EXPS, c->n_ff_expert, c->n_embd, c->n_expert);
  W(M3_GATE_SHEXP, c->n_embd, c->n_ff_shared, 1);
  W(M3_UP_SHEXP, c->n_embd, c->n_ff_shared, 1);
  W(M3_DOWN_SHEXP, c->n_ff_shared, c->n_embd, 1);
#undef W
#undef F
#undef N
  w->embd = new_weight(w, &t[M3_LAYER_ROLES], c->weight_type, c->n_embd, c->n_vocab, 1);
  w->output_norm = new_norm(w, &t[M3_LAYER_ROLES + 1], c->n_embd, 1.0f);
  w->head = new_weight(w, &t[M3_LAYER_ROLES + 2], c->weight_type, c->n_embd, c->n_vocab, 1);
}

static inline int64_t blocks_of_case(const op_case *c) { return (c->context + c->block_size - 1) / c->block_size; }

/* Rows of one head of one token; `per_page` rows stand in a page. */
static inline void store_row(int32_t type, void *base, int64_t row, const float *x, int64_t n) {
  m3_traits(type)->from_f32(x, (char *)base + row * m3_row_bytes(type, n), n, NULL);
}

/* Pages in shuffled order, all bytes 0xff (NaN), then K, V and index keys of every token of the context. */
static inline void new_cache(world *w) {
  const op_case *c = &w->c;
  int64_t blocks = blocks_of_case(c);
  w->n_pages = (int32_t)(blocks * c->n_sequences) + 3;
  int32_t *order = keep(w, (size_t)w->n_pages * 4);
  for (int32_t i = 0; i < w->n_pages; i++) order[i] = i;
  for (int32_t i = w->n_pages - 1; i > 0; i--) {
    int32_t j = (int32_t)(next_random(&w->seed) % (uint64_t)(i + 1)), swap = order[i];
    order[i] = order[j], order[j] = swap;
  }
  const int32_t **tables = keep(w, (size_t)c->n_sequences * sizeof *tables);
  for (int32_t s = 0; s < c->n_sequences; s++) tables[s] = order + s * blocks;
  w->rows.tables = tables;
  size_t kv = (size_t)w->n_pages * (size_t)(c->n_head_kv * c->block_size * m3_row_bytes(c->kv_type, c->head_dim));
  size_t index = (size_t)w->n_pages * (size_t)(c->block_size * m3_row_bytes(c->index_type, c->index_dim));
  w->cache = (m3_layer_cache){keep(w, kv), keep(w, kv), keep(w, index), c->kv_type, c->index_type, NULL};
  memset(w->cache.k, 0xff, kv);
  memset(w->cache.v, 0xff, kv);
  memset(w->cache.index, 0xff, index);
  float x[M3_MAX_HEAD_DIM];
  for (int32_t s = 0; s < c->n_sequences; s++)
    for (int64_t pos = 0; pos < c->context; pos++) {
      int64_t page = tables[s][pos / c->block_size], slot = pos % c->block_size;
      for (int32_t head = 0; head < c->n_head_kv; head++) {
        int64_t row = (page * c->n_head_kv + head) * c->block_size + slot;
        fill_random(x, c->head_dim, 1.0f, &w->seed);
        store_row(c->kv_type, w->cache.k, row, x, c->head_dim);
        fill_random(x, c->head_dim, 1.0f, &w->seed);
        store_row(c->kv_type, w->cache.v, row, x, c->head_dim);
      }
      fill_random(x, c->index_dim, 1.0f, &w->seed);
      store_row(c->index_type, w->cache.index, page * c->block_size + slot, x, c->index_dim);
    }
}

/* The last n_rows positions of every sequence. */
static inline void new_rows(world *w) {
  const op_case *c = &w->c;
  w->n = c->n_sequences * c->n_rows;
  int32_t *seq = keep(w, (size_t)w->n * sizeof *seq);
  int64_t *pos = keep(w, (size_t)w->n * sizeof *pos);
  float *cosine = keep(w, (size_t)w->n * (size_t)c->n_rot * sizeof(float));
  float *sine = keep(w, (size_t)w->n * (size_t)c->n_rot * sizeof(float));
  for (int32_t i = 0; i < w->n; i++) {
    seq[i] = i / c->n_rows;
    pos[i] = c->context - c->n_rows + i % c->n_rows;
    for (int32_t j = 0; j < c->n_rot / 2; j++) {
      double angle = (double)pos[i] * pow(5e6, -2.0 * j / c->n_rot);
      cosine[i * (c->n_rot / 2) + j] = (float)cos(angle);
      sine[i * (c->n_rot / 2) + j] = (float)sin(angle);
    }
  }
  w->rows.n = w->n;
  w->rows.seq = seq;
  w->rows.pos = pos;
  w->rows.cos = cosine;
  w->rows.sin = sine;
  int32_t *ids = keep(w, (size_t)w->n * sizeof *ids);
  for (int32_t i = 0; i < w->n; i++) ids[i] = (i * 7 + 3) % c->n_vocab;
  w->rows.ids = ids;
}

static inline void new_scratch(world *w, const m3_backend *b, int32_t threads) {
  const op_case *c = &w->c;
  int64_t n = w->n, pairs = n * c->n_expert_used, widest = n * (c->n_ff > c->n_ff_shared ? c->n_ff : c->n_ff_shared);
  if (widest < pairs * c->n_ff_expert) widest = pairs * c->n_ff_expert;
  m3_scratch *s = &w->scratch;
  s->n_threads = threads;
  s->thread_floats = b->thread_floats(&w->h, blocks_of_case(c));
  s->normed = keep_random(w, n * c->n_embd, 1.0f);
  s->q = keep_random(w, n * c->n_head * c->head_dim, 1.0f);
  s->k = keep_random(w, n * c->n_head_kv * c->head_dim, 1.0f);
  s->v = keep_random(w, n * c->n_head_kv * c->head_dim, 1.0f);
  s->index_q = keep_random(w, n * c->n_head_kv * c->index_dim, 1.0f);
  s->index_k = keep_random(w, n * c->index_dim, 1.0f);
  s->attended = keep_random(w, n * c->n_head * c->head_dim, 1.0f);
  s->gate = keep(w, (size_t)widest * sizeof(float));
  s->up = keep(w, (size_t)widest * sizeof(float));
  s->expert_in = keep(w, (size_t)(pairs * c->n_embd) * sizeof(float));
  s->expert_out = keep(w, (size_t)(pairs * c->n_embd) * sizeof(float));
  s->logits = keep(w, (size_t)(n * c->n_expert) * sizeof(float));
  s->experts = keep(w, (size_t)pairs * sizeof(int32_t));
  s->weights = keep(w, (size_t)pairs * sizeof(float));
  s->blocks = keep(w, (size_t)(n * c->n_head_kv * c->top_k) * sizeof(int32_t));
  s->grouping = keep(w, (size_t)(c->n_expert + 1 + 2 * pairs) * sizeof(int32_t));
  s->rounded = keep(w, b->input_bytes ? (size_t)b->input_bytes(&w->h, n) : 1);
  s->thread = keep(w, (size_t)(s->thread_floats * threads) * sizeof(float));
  w->hidden = keep_random(w, n * c->n_embd, 1.0f);
}

/* Everything of one case from one seed: the same numbers whatever backend it is made for. */
static inline world *new_world(const op_case *c, const m3_backend *b, int32_t threads) {
  world *w = calloc(1, sizeof *w);
  if (!w) abort();
  w->c = *c;
  w->seed = 42;
  w->backend = b;
  w->h = (m3_hparams){.n_layer = 1,
                      .n_embd = c->n_embd,
                      .n_head = c->n_head,
                      .n_head_kv = c->n_head_kv,
                      .head_dim = c->head_dim,
                      .n_rot = c->n_rot,
                      .n_ff = c->n_ff,
                      .n_ff_expert = c->n_ff_expert,
                      .n_ff_shared = c->n_ff_shared,
                      .n_expert = c->n_expert,
                      .n_expert_used = c->n_expert_used,
                      .n_vocab = c->n_vocab,
                      .n_index_head = c->n_head_kv,
                      .index_dim = c->index_dim,
                      .top_k = c->top_k,
                      .block_size = c->block_size,
                      .local_blocks = c->local_blocks,
                      .context_train = 1 << 20,
                      .rope_theta = 5e6f,
                      .rms_eps = 1e-6f,
                      .expert_scale = 2,
                      .swiglu_alpha = 1.702f,
                      .swiglu_limit = 7};
  new_weights(w);
  new_cache(w);
  new_rows(w);
  new_scratch(w, b, threads);
  m3_state_params state = {.hparams = &w->h,
                           .sequences = c->n_sequences,
                           .chunk = w->n,
                           .blocks = blocks_of_case(c),
                           .kv_type = c->kv_type,
                           .index_type = c->index_type,
                           .exact = c->exact};
  if (b->open(&state, &w->state, NULL)) abort();
  b->begin(&(m3_context){.hparams = &w->h, .scratch = &w->scratch, .state = w->state}, &w->rows);
  return w;
}

static inline void free_world(world *w) {
  w->backend->close(w->state);
  for (int i = 0; i < w->n_owned; i++) {
#ifdef M3_TEST_CUDA
    if (on_gpu(w->backend)) {
      cudaFreeHost(w->owned[i]);
      continue;
    }
#endif
    free(w->owned[i]);
  }
  free(w);
}

#endif
