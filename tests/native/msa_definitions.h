/* msa_definitions.h - selection and attention in double precision, written from the definition of MSA and not from the
 * engine's code, and what is checked by it. */
#ifndef M3_TESTS_MSA_DEFINITIONS_H
#define M3_TESTS_MSA_DEFINITIONS_H

#include "world.h"

/* A cached row as float32. */
static inline const float *read_row(int32_t type, const void *base, int64_t row, int64_t n) {
  static float x[M3_MAX_HEAD_DIM];
  m3_traits(type)->to_f32((const char *)base + row * m3_row_bytes(type, n), x, n);
  return x;
}

/* Block scores of one row and head in double precision; returns max |q| |k| for the rounding bound. */
static inline double exact_scores(const world *w, int32_t row, int32_t head, double *out) {
  const op_case *c = &w->c;
  const float *q = w->scratch.index_q + ((int64_t)row * c->n_head_kv + head) * c->index_dim;
  const int32_t *table = w->rows.tables[w->rows.seq[row]];
  double q_norm = 0, largest = 0;
  for (int32_t i = 0; i < c->index_dim; i++) q_norm += (double)q[i] * (double)q[i];
  for (int64_t pos = 0; pos <= w->rows.pos[row]; pos++) {
    int64_t block = pos / c->block_size, key = (int64_t)table[block] * c->block_size + pos % c->block_size;
    const float *k = read_row(c->index_type, w->cache.index, key, c->index_dim);
    double score = 0, k_norm = 0;
    for (int32_t i = 0; i < c->index_dim; i++) {
      score += (double)q[i] * (double)k[i];
      k_norm += (double)k[i] * (double)k[i];
    }
    if (pos % c->block_size == 0 || score > out[block]) out[block] = score;
    if (sqrt(q_norm * k_norm) > largest) largest = sqrt(q_norm * k_norm);
  }
  return largest;
}

/* A list is right if it is ascending and padded, holds the local blocks, and no block left out scores higher than one
 * taken in by more than rounding. score: as exact_scores gives them, with what rounding may change. */
static inline void check_list(const world *w, const char *who, int32_t row, int32_t head, const int32_t *list,
                              const double *score, double slack) {
  const op_case *c = &w->c;
  static bool taken[4096];
  int64_t visible = w->rows.pos[row] / c->block_size + 1, n = 0;
  memset(taken, 0, sizeof taken);
  bool formed = true;
  for (int32_t i = 0; i < c->top_k; i++) {
    if (list[i] < 0) continue;
    formed &= list[i] < visible && i == n && (n == 0 || list[i] > list[n - 1]);
    if (list[i] < visible) taken[list[i]] = true;
    n++;
  }
  CHECK(formed && n == (visible < c->top_k ? visible : c->top_k), "%s, %s: row %d head %d: malformed list of %lld",
        c->name, who, row, head, (long long)n);
  double lowest_taken = INFINITY, highest_left = -INFINITY;
  for (int64_t b = 0; b < visible; b++) {
    bool local = b >= visible - c->local_blocks;
    if (local)
      CHECK(taken[b], "%s, %s: row %d head %d: local block %lld left out", c->name, who, row, head, (long long)b);
    if (taken[b] && !local && score[b] < lowest_taken) lowest_taken = score[b];
    if (!taken[b] && score[b] > highest_left) highest_left = score[b];
  }
  CHECK(lowest_taken >= highest_left - slack,
        "%s, %s: row %d head %d: a block with score %g taken, one with %g left out", c->name, who, row, head,
        lowest_taken, highest_left);
}

/* Softmax attention of one query head over the tokens of the listed blocks (all blocks if list is NULL), and the share
 * of each listed block in it. */
static inline void exact_attention(const world *w, int32_t row, int32_t head, const int32_t *list, double *out,
                                   double *mass) {
  const op_case *c = &w->c;
  int32_t kv_head = head / (c->n_head / c->n_head_kv);
  const float *q = w->scratch.q + ((int64_t)row * c->n_head + head) * c->head_dim;
  const int32_t *table = w->rows.tables[w->rows.seq[row]];
  double sum = 0;
  for (int32_t i = 0; i < c->head_dim; i++) out[i] = 0;
  for (int32_t i = 0; i < c->top_k; i++) mass[i] = 0;
  for (int64_t pos = 0; pos <= w->rows.pos[row]; pos++) {
    int64_t block = pos / c->block_size;
    int32_t place = -1;
    for (int32_t i = 0; list && i < c->top_k; i++)
      if (list[i] == block) place = i;
    if (list && place < 0) continue;
    int64_t key = ((int64_t)table[block] * c->n_head_kv + kv_head) * c->block_size + pos % c->block_size;
    const float *k = read_row(c->kv_type, w->cache.k, key, c->head_dim);
    double score = 0;
    for (int32_t i = 0; i < c->head_dim; i++) score += (double)q[i] * (double)k[i];
    double p = exp(score / sqrt((double)c->head_dim)); /* scores here are far below the overflow of exp */
    const float *v = read_row(c->kv_type, w->cache.v, key, c->head_dim);
    sum += p;
    if (place >= 0) mass[place] += p;
    for (int32_t i = 0; i < c->head_dim; i++) out[i] += p * (double)v[i];
  }
  for (int32_t i = 0; i < c->head_dim; i++) out[i] /= sum;
  for (int32_t i = 0; i < c->top_k; i++) mass[i] /= sum;
}

/* mass: as attend gave it, or NULL. */
static inline void check_attention(const world *w, const char *who, const int32_t *blocks, const float *got,
                                   const float *mass) {
  const op_case *c = &w->c;
  static double exact[M3_MAX_HEAD_DIM], exact_mass[64];
  static float want[M3_MAX_HEAD_DIM], want_mass[64];
  for (int32_t row = 0; row < w->n; row++)
    for (int32_t head = 0; head < c->n_head; head++) {
      int32_t kv_head = head / (c->n_head / c->n_head_kv);
      exact_attention(w, row, head, blocks ? blocks + ((int64_t)row * c->n_head_kv + kv_head) * c->top_k : NULL, exact,
                      exact_mass);
      for (int32_t i = 0; i < c->head_dim; i++) want[i] = (float)exact[i];
      CHECK_CLOSE(who, got + ((int64_t)row * c->n_head + head) * c->head_dim, want, c->head_dim, 2e-5);
      for (int32_t i = 0; i < c->top_k; i++) want_mass[i] = (float)exact_mass[i];
      if (mass) CHECK_CLOSE("mass", mass + ((int64_t)row * c->n_head + head) * c->top_k, want_mass, c->top_k, 2e-6);
    }
}

#endif
