/* What stands before and after attention: norms, projections and rotation of queries and keys, the write of the cache,
 * the rotation of what is cached, and the projection of the result. */
#include <math.h>
#include <string.h>

#include "cpu/cpu.h"
#include "cpu/low_bit.h"
#include "quant/traits.h"

/* RoPE, NeoX halves: channels i and i + n_rot / 2 turn together, the rest stay. */
static void rotate(const m3_hparams *h, const float *cos, const float *sin, float *x) {
  int32_t half = h->n_rot / 2;
  for (int32_t i = 0; i < half; i++) {
    float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

static void norm_and_rotate(const m3_context *c, const m3_rows *rows, int32_t row, const m3_weight *norm, int64_t n,
                            float *x) {
  int64_t half = c->hparams->n_rot / 2;
  m3_rms_norm(c, x, m3_vector(norm), n, x);
  rotate(c->hparams, rows->cos + row * half, rows->sin + row * half, x);
}

static bool holds(const m3_type_traits *t, const float *x, int64_t n) {
  bool held = true;
  for (int64_t i = 0; i < n; i++) held &= fabsf(x[i]) <= t->largest;
  return held;
}

static void encode(int32_t type, const float *src, void *dst, int64_t n) {
  const m3_type_traits *t = m3_traits(type);
  /* Encoders of blocks take only what their type holds. All bits set is NaN, which shows in what reads it. */
  if (t->block > 1 && !holds(t, src, n))
    memset(dst, 0xff, (size_t)m3_row_bytes(type, n));
  else
    t->from_f32(src, dst, n, NULL);
}

static void store(int32_t type, const float *src, void *base, int64_t index, int64_t n) {
  encode(type, src, (char *)base + index * m3_row_bytes(type, n), n);
}

/* The low-bit copy of an index key: of what the exact scan reads, and not of the key before it was rounded. */
static void copy_low_bit(const m3_context *c, const m3_layer_cache *cache, int64_t page, int64_t slot) {
  const m3_hparams *h = c->hparams;
  if (!cache->low_bit) return;
  float stored[M3_MAX_HEAD_DIM];
  int64_t bytes = m3_row_bytes(cache->index_type, h->index_dim);
  const char *at = (const char *)cache->index + (page * h->block_size + slot) * bytes;
  m3_convert_row(c->kernels, cache->index_type, at, stored, h->index_dim);
  m3_low_bit_store(h, cache->low_bit, page, slot, stored);
}

/* Norms, rotation and cache write of one row. */
static void finish_row(const m3_context *c, const m3_prepare_params *p, int32_t row) {
  const m3_hparams *h = c->hparams;
  const m3_scratch *s = c->scratch;
  const m3_rows *rows = p->rows;
  const m3_weight *w = p->layer->w;
  int64_t pos = rows->pos[row], dim = h->head_dim;
  int64_t page = rows->tables[rows->seq[row]][pos / h->block_size], slot = pos % h->block_size;
  for (int32_t i = 0; i < h->n_head; i++)
    norm_and_rotate(c, rows, row, &w[M3_ATTN_Q_NORM], dim, s->q + ((int64_t)row * h->n_head + i) * dim);
  for (int32_t i = 0; i < h->n_head_kv; i++) {
    float *k = s->k + ((int64_t)row * h->n_head_kv + i) * dim;
    int64_t index = (page * h->n_head_kv + i) * h->block_size + slot;
    norm_and_rotate(c, rows, row, &w[M3_ATTN_K_NORM], dim, k);
    store(p->cache.kv_type, k, p->cache.k, index, dim);
    store(p->cache.kv_type, s->v + ((int64_t)row * h->n_head_kv + i) * dim, p->cache.v, index, dim);
  }
  if (!p->cache.index) return;
  for (int32_t i = 0; i < h->n_index_head; i++)
    norm_and_rotate(c, rows, row, &w[M3_INDEX_Q_NORM], h->index_dim,
                    s->index_q + ((int64_t)row * h->n_index_head + i) * h->index_dim);
  float *k = s->index_k + (int64_t)row * h->index_dim;
  norm_and_rotate(c, rows, row, &w[M3_INDEX_K_NORM], h->index_dim, k);
  store(p->cache.index_type, k, p->cache.index, page * h->block_size + slot, h->index_dim);
  copy_low_bit(c, &p->cache, page, slot);
}

/* q, k, v and, in a sparse layer, index q and k. */
static void project(const m3_context *c, const m3_prepare_params *p) {
  const m3_scratch *s = c->scratch;
  const m3_weight *w = p->layer->w;
  const struct {
    m3_role role;
    float *y;
  } outputs[] = {
      {M3_ATTN_Q, s->q}, {M3_ATTN_K, s->k}, {M3_ATTN_V, s->v}, {M3_INDEX_Q, s->index_q}, {M3_INDEX_K, s->index_k}};
  m3_factor factors[5];
  int32_t n = p->cache.index ? 5 : 3;
  for (int32_t i = 0; i < n; i++)
    factors[i] = (m3_factor){&w[outputs[i].role], outputs[i].y, w[outputs[i].role].tensor->ne[1]};
  m3_matmul(c, &(m3_matmul_params){.factors = factors, .n_factors = n, .x = s->normed, .n = p->rows->n});
}

void m3_cpu_prepare(const m3_context *c, const m3_prepare_params *p) {
  const m3_hparams *h = c->hparams;
  m3_scratch *s = c->scratch;
  const m3_weight *w = p->layer->w;
  int32_t n = p->rows->n;
#pragma omp parallel for num_threads(m3_threads_for(c, (int64_t)n * h->n_embd)) schedule(static)
  for (int32_t r = 0; r < n; r++)
    m3_rms_norm(c, p->hidden + (int64_t)r * h->n_embd, m3_vector(&w[M3_ATTN_NORM]), h->n_embd,
                s->normed + (int64_t)r * h->n_embd);
  m3_sum_squares(c, M3_INPUT_ATTENTION, 0, s->normed, n);
  project(c, p);
#pragma omp parallel for num_threads(m3_threads_for(c, (int64_t)n * h->n_head * h->head_dim)) schedule(static)
  for (int32_t r = 0; r < n; r++) finish_row(c, p, r);
}

/* A cached key: of its channels those that turn, up to the end of a block of the type. */
static void rotate_stored(const m3_context *c, const m3_rows *rows, int32_t row, int32_t type, void *key) {
  const m3_hparams *h = c->hparams;
  int64_t half = h->n_rot / 2, block = m3_type_block_size(type), n = (h->n_rot + block - 1) / block * block;
  float x[M3_MAX_HEAD_DIM];
  m3_convert_row(c->kernels, type, key, x, n);
  rotate(h, rows->cos + row * half, rows->sin + row * half, x);
  encode(type, x, key, n);
}

static void rotate_row(const m3_context *c, const m3_rotate_params *p, int32_t row) {
  const m3_hparams *h = c->hparams;
  const m3_rows *rows = p->rows;
  const m3_layer_cache *cache = &p->cache;
  int64_t page = rows->tables[rows->seq[row]][rows->pos[row] / h->block_size], slot = rows->pos[row] % h->block_size;
  int64_t kv_bytes = m3_row_bytes(cache->kv_type, h->head_dim);
  for (int32_t i = 0; i < h->n_head_kv; i++)
    rotate_stored(c, rows, row, cache->kv_type,
                  (char *)cache->k + ((page * h->n_head_kv + i) * h->block_size + slot) * kv_bytes);
  if (!cache->index) return;
  int64_t index_bytes = m3_row_bytes(cache->index_type, h->index_dim);
  rotate_stored(c, rows, row, cache->index_type, (char *)cache->index + (page * h->block_size + slot) * index_bytes);
  copy_low_bit(c, cache, page, slot);
}

void m3_cpu_rotate(const m3_context *c, const m3_rotate_params *p) {
  const m3_hparams *h = c->hparams;
  int32_t n = p->rows->n;
#pragma omp parallel for num_threads(m3_threads_for(c, (int64_t)n * h->n_head_kv * h->n_rot * 8)) schedule(static)
  for (int32_t r = 0; r < n; r++) rotate_row(c, p, r);
}

void m3_cpu_low_bit(const m3_context *c, const m3_rows *rows, m3_layer_cache cache) {
  const m3_hparams *h = c->hparams;
#pragma omp parallel for num_threads(m3_threads_for(c, (int64_t)rows->n * h->index_dim * 8)) schedule(static)
  for (int32_t r = 0; r < rows->n; r++)
    copy_low_bit(c, &cache, rows->tables[rows->seq[r]][rows->pos[r] / h->block_size], rows->pos[r] % h->block_size);
}

void m3_cpu_output(const m3_context *c, const m3_output_params *p) {
  m3_sum_squares(c, M3_INPUT_ATTENDED, 0, p->x, p->n);
  const m3_factor out = {p->weight, p->hidden, c->hparams->n_embd};
  m3_matmul(c, &(m3_matmul_params){.factors = &out, .n_factors = 1, .x = p->x, .n = p->n, .add = true});
}
