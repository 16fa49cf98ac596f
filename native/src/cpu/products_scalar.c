/* The specification of products in integers: plain C in source order, compiled with -ffp-contract=off. */
#include <math.h>
#include <string.h>

#include "cpu/products.h"
#include "quant/blocks.h"
#include "quant/half.h"

/* Place of element i of a group of 32. */
static inline int place(int i) { return i / 2 + i % 2 * 16; }

static void round_group(const float *x, int64_t g, const m3_activations *out) {
  uint32_t largest = 0; /* bits order magnitudes, and NaN above infinity above numbers */
  for (int i = 0; i < 32; i++) {
    uint32_t bits = m3_bits_of(x[i]) & 0x7fffffff;
    if (bits > largest) largest = bits;
  }
  int16_t *q = out->q + 32 * g;
  float max = m3_float_of(largest);
  int32_t sum[2] = {0};
  if (max >= M3_ACTIVATION_TINY && max < INFINITY) {
    float inverse = 32767.0f / max;
    for (int i = 0; i < 32; i++) {
      int16_t code = (int16_t)lrintf(x[i] * inverse);
      q[place(i)] = code;
      sum[i / 16] += code;
    }
    out->scale[g] = max / 32767.0f;
  } else {
    memset(q, 0, 32 * sizeof *q);
    out->scale[g] = max < M3_ACTIVATION_TINY ? 0.0f : NAN;
  }
  out->sum[g] = out->scale[g] * (float)(sum[0] + sum[1]);
  for (int h = 0; h < 2; h++) {
    out->half_sum[2 * g + h] = out->scale[g] * (float)sum[h];
    out->total[2 * g + h] = sum[h];
  }
}

static void round_row(const float *x, int64_t n, void *out) {
  m3_activations a = m3_activations_at(out, n);
  memset(out, 0, (size_t)m3_activation_bytes(n));
  for (int64_t g = 0; g < n / M3_ACTIVATION_GROUP; g++) round_group(x + 32 * g, g, &a);
}

void m3_unpack(const m3_weight_rows *w, m3_tile *out) {
  int64_t group = w->coding->group;
  for (int64_t j = 0; j < w->n_rows; j++) {
    int8_t q[M3_TILE_COLUMNS];
    float scale[M3_TILE_COLUMNS / 16], min[M3_TILE_COLUMNS / 16];
    w->coding->read((const char *)w->data + j * w->row_bytes, q, scale, min, w->n);
    for (int64_t first = 0; first < w->n; first += 32) {
      int16_t ordered[16][2];
      for (int i = 0; i < 32; i++) ordered[place(i) / 2][place(i) % 2] = q[first + i];
      for (int p = 0; p < 16; p++) memcpy(out->q[first / 2 + p][j], ordered[p], sizeof ordered[p]);
    }
    for (int64_t g = 0; g < w->n / group; g++) {
      out->scale[g][j] = scale[g];
      if (w->coding->minima) out->min[g][j] = min[g];
    }
  }
  if (w->n_rows == M3_TILE_ROWS) return;
  for (int64_t i = 0; i < w->n / 2; i++) /* so that what is undefined is no accident */
    memset(out->q[i][w->n_rows], 0, (size_t)(M3_TILE_ROWS - w->n_rows) * sizeof out->q[i][0]);
  for (int64_t g = 0; g < w->n / group; g++)
    for (int64_t j = w->n_rows; j < M3_TILE_ROWS; j++) out->scale[g][j] = out->min[g][j] = 0;
}

/* Exact product of `count` pairs from pair `pair` of a group. */
static int32_t integer_product(const m3_tile *t, int64_t g, int pair, int count, int j, const int16_t *x) {
  int32_t sum = 0;
  for (int p = pair; p < pair + count; p++)
    for (int k = 0; k < 2; k++) sum += t->q[16 * g + p][j][k] * x[2 * p + k];
  return sum;
}

static void multiply_lane(const m3_tile_product *p, const m3_activations *a, int j, float *acc) {
  const m3_tile *t = p->tile;
  for (int64_t g = 0; g < p->n / 32; g++) {
    int64_t at = p->first / 32 + g;
    const int16_t *x = a->q + 32 * at;
    if (p->coding->group == 32) {
      *acc += (float)integer_product(t, g, 0, 16, j, x) * (t->scale[g][j] * a->scale[at]);
      if (p->coding->minima) *acc -= t->min[g][j] * a->sum[at];
      continue;
    }
    for (int h = 0; h < 2; h++) {
      int32_t sum = integer_product(t, g, 4 * h, 4, j, x) + integer_product(t, g, 8 + 4 * h, 4, j, x);
      *acc += (float)sum * (t->scale[2 * g + h][j] * a->scale[at]);
      if (p->coding->minima) *acc -= t->min[2 * g + h][j] * a->half_sum[2 * at + h];
    }
  }
}

static void multiply(const m3_tile_product *p) {
  for (int64_t r = 0; r < p->n_x; r++) {
    m3_activations a = m3_activations_of(p, r);
    for (int j = 0; j < M3_TILE_ROWS; j++) multiply_lane(p, &a, j, p->acc + r * M3_TILE_ROWS + j);
  }
}

const m3_products m3_products_scalar = {.round = round_row, .multiply = multiply};
