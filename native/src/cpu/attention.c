/* Preparation of queries and keys, and softmax attention over blocks with a running maximum (flash attention):
 * no array of scores longer than one block. */
#include <math.h>
#include <string.h>

#include "cpu/cpu.h"
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

static void store(int32_t type, const float *src, void *base, int64_t index, int64_t n) {
  const m3_type_traits *t = m3_traits(type);
  int64_t bytes = m3_row_bytes(type, n);
  char *dst = (char *)base + index * bytes;
  /* Encoders of blocks take only what their type holds. All bits set is NaN, which shows in what reads it. */
  if (t->block > 1 && !holds(t, src, n))
    memset(dst, 0xff, (size_t)bytes);
  else
    t->from_f32(src, dst, n, NULL);
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

/* Running softmax of one query head: the sum so far is scaled to the maximum so far. */
typedef struct softmax_state {
  float max, sum;
} softmax_state;

/* Turns raw products of one block into weights relative to the new maximum, and rescales what was summed. mass: sums
 * of the `listed` blocks so far and room for this one, or NULL. */
static void absorb_scores(const m3_hparams *h, float *score, int64_t n, softmax_state *state, float *acc, float *mass,
                          int32_t listed) {
  float scale = 1.0f / sqrtf((float)h->head_dim), max = state->max;
  for (int64_t j = 0; j < n; j++) {
    score[j] *= scale;
    max = score[j] > max ? score[j] : max;
  }
  float shrink = expf(state->max - max);
  state->sum *= shrink;
  for (int32_t i = 0; i < h->head_dim; i++) acc[i] *= shrink;
  float before = state->sum;
  for (int64_t j = 0; j < n; j++) {
    score[j] = expf(score[j] - max);
    state->sum += score[j];
  }
  state->max = max;
  if (!mass) return;
  for (int32_t i = 0; i < listed; i++) mass[i] *= shrink;
  mass[listed] = state->sum - before;
}

static const float *block_rows(const m3_context *c, int32_t type, const void *base, int64_t first_row, int64_t n,
                               float *converted) {
  int64_t dim = c->hparams->head_dim;
  const char *src = (const char *)base + first_row * m3_row_bytes(type, dim);
  if (type == M3_TYPE_F32) return (const float *)(const void *)src;
  m3_convert_row(c->kernels, type, src, converted, n * dim);
  return converted;
}

/* One (row, KV head) and its buffers: `group` query heads share the keys and values. */
typedef struct attend_buffer {
  float *converted;     /* [block_size, head_dim] */
  float *score;         /* [group, block_size] */
  float *acc;           /* [group, head_dim] */
  softmax_state *state; /* [group] */
  float *mass;          /* [group, top_k] or NULL */
} attend_buffer;

/* Adds block `block`, which is number `listed` of the list. */
static void attend_block(const m3_context *c, const m3_attend_params *p, int32_t row, int32_t kv_head, int64_t block,
                         int32_t listed, attend_buffer *b) {
  const m3_hparams *h = c->hparams;
  int32_t group = h->n_head / h->n_head_kv;
  int64_t dim = h->head_dim;
  int64_t n = p->rows->pos[row] + 1 - block * h->block_size;
  if (n > h->block_size) n = h->block_size;
  int64_t page = p->rows->tables[p->rows->seq[row]][block];
  int64_t first_row = (page * h->n_head_kv + kv_head) * h->block_size;
  const float *k = block_rows(c, p->cache.kv_type, p->cache.k, first_row, n, b->converted);
  for (int32_t g = 0; g < group; g++) {
    const float *q = c->scratch->q + ((int64_t)row * h->n_head + kv_head * group + g) * dim;
    float *score = b->score + g * h->block_size;
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) c->kernels->dot4(k + j * dim, dim, q, dim, score + j);
    for (; j < n; j++) score[j] = c->kernels->dot(k + j * dim, q, dim);
    absorb_scores(h, score, n, &b->state[g], b->acc + g * dim, b->mass ? b->mass + (int64_t)g * h->top_k : NULL,
                  listed);
  }
  const float *v = block_rows(c, p->cache.kv_type, p->cache.v, first_row, n, b->converted);
  for (int32_t g = 0; g < group; g++)
    for (int64_t j = 0; j < n; j++)
      c->kernels->axpy(b->acc + g * dim, b->score[g * h->block_size + j], v + j * dim, dim);
}

static void attend_head(const m3_context *c, const m3_attend_params *p, int32_t row, int32_t kv_head,
                        attend_buffer *b) {
  const m3_hparams *h = c->hparams;
  int32_t group = h->n_head / h->n_head_kv;
  memset(b->acc, 0, (size_t)group * (size_t)h->head_dim * sizeof(float));
  for (int32_t g = 0; g < group; g++) b->state[g] = (softmax_state){-INFINITY, 0};
  int64_t visible = p->rows->pos[row] / h->block_size + 1;
  b->mass = p->mass ? p->mass + ((int64_t)row * h->n_head + kv_head * group) * h->top_k : NULL;
  if (b->mass) memset(b->mass, 0, (size_t)group * (size_t)h->top_k * sizeof(float));
  if (p->blocks) {
    const int32_t *list = p->blocks + ((int64_t)row * h->n_head_kv + kv_head) * h->top_k;
    for (int32_t i = 0; i < h->top_k && list[i] >= 0; i++) attend_block(c, p, row, kv_head, list[i], i, b);
  } else {
    for (int64_t block = 0; block < visible; block++) attend_block(c, p, row, kv_head, block, 0, b);
  }
  for (int32_t g = 0; g < group; g++) {
    float *out = p->out + ((int64_t)row * h->n_head + kv_head * group + g) * h->head_dim;
    for (int32_t i = 0; i < h->head_dim; i++) out[i] = b->acc[g * h->head_dim + i] / b->state[g].sum;
    for (int32_t i = 0; b->mass && i < h->top_k; i++) b->mass[g * h->top_k + i] /= b->state[g].sum;
  }
}

void m3_cpu_attend(const m3_context *c, const m3_attend_params *p) {
  const m3_hparams *h = c->hparams;
  m3_scratch *s = c->scratch;
  int64_t group = h->n_head / h->n_head_kv;
  int64_t read = h->top_k; /* blocks of the row that reads most */
  for (int32_t r = 0; r < p->rows->n && !p->blocks; r++)
    if (p->rows->pos[r] / h->block_size >= read) read = p->rows->pos[r] / h->block_size + 1;
  int64_t work = (int64_t)p->rows->n * h->n_head * h->head_dim * read * h->block_size;
#pragma omp parallel num_threads(m3_threads_for(c, work))
  {
    attend_buffer b;
    b.converted = s->thread + m3_thread_index() * s->thread_floats;
    b.score = b.converted + (int64_t)h->block_size * h->head_dim;
    b.acc = b.score + group * h->block_size;
    b.state = (softmax_state *)(void *)(b.acc + group * h->head_dim);
#pragma omp for collapse(2) schedule(dynamic)
    for (int32_t row = 0; row < p->rows->n; row++)
      for (int32_t kv_head = 0; kv_head < h->n_head_kv; kv_head++) attend_head(c, p, row, kv_head, &b);
  }
}

void m3_cpu_output(const m3_context *c, const m3_output_params *p) {
  m3_sum_squares(c, M3_INPUT_ATTENDED, 0, p->x, p->n);
  const m3_factor out = {p->weight, p->hidden, c->hparams->n_embd};
  m3_matmul(c, &(m3_matmul_params){.factors = &out, .n_factors = 1, .x = p->x, .n = p->n, .add = true});
}
