/* Products in integers with NEON. */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "cpu/products.h"
#include "quant/blocks.h"

#define INLINE static inline __attribute__((always_inline))

/* ------------------------------------------------------------------------------------------------ many rows of x */

enum { X_ROWS = 4, QUARTERS = M3_TILE_ROWS / 4 };

/* Adds one element of 16 rows, of which the first eight are in a and the rest in b. */
#define ADD_ELEMENT(a, b, lane)                                          \
  _Pragma("GCC unroll 4") for (int r = 0; r < n; r++) {                  \
    sum[r][0] = vmlal_laneq_s16(sum[r][0], vget_low_s16(a), v[r], lane); \
    sum[r][1] = vmlal_high_laneq_s16(sum[r][1], a, v[r], lane);          \
    sum[r][2] = vmlal_laneq_s16(sum[r][2], vget_low_s16(b), v[r], lane); \
    sum[r][3] = vmlal_high_laneq_s16(sum[r][3], b, v[r], lane);          \
  }

#define ADD_PAIR(pair, lane)                                                     \
  do {                                                                           \
    int16x8x2_t low = vld2q_s16(t->q[pair][0]), high = vld2q_s16(t->q[pair][8]); \
    ADD_ELEMENT(low.val[0], high.val[0], lane)                                   \
    ADD_ELEMENT(low.val[1], high.val[1], (lane) + 1)                             \
  } while (0)

/* Adds four pairs from pair `pair` of the tile to the sums of n rows of x. */
INLINE void add_pairs(const m3_tile *t, int64_t pair, const int16_t *const *x, int64_t at, int n,
                      int32x4_t (*sum)[QUARTERS]) {
  int16x8_t v[X_ROWS];
#pragma GCC unroll 4
  for (int r = 0; r < n; r++) v[r] = vld1q_s16(x[r] + at);
  ADD_PAIR(pair, 0);
  ADD_PAIR(pair + 1, 2);
  ADD_PAIR(pair + 2, 4);
  ADD_PAIR(pair + 3, 6);
}

/* Adds the sums of a group, scaled, and takes away minima. */
INLINE void add_group(const m3_tile *t, int64_t group, const int32x4_t *sum, float scale, bool minima, float x_sum,
                      float *acc) {
#pragma GCC unroll 4
  for (int k = 0; k < QUARTERS; k++) {
    float32x4_t s = vmulq_n_f32(vld1q_f32(t->scale[group] + 4 * k), scale);
    float32x4_t a = vfmaq_f32(vld1q_f32(acc + 4 * k), vcvtq_f32_s32(sum[k]), s);
    if (minima) a = vfmsq_f32(a, vld1q_f32(t->min[group] + 4 * k), vdupq_n_f32(x_sum));
    vst1q_f32(acc + 4 * k, a);
  }
}

/* n rows of activations with a tile. */
INLINE void multiply_rows(const m3_tile_product *p, const m3_activations *a, int n, bool halved, bool minima,
                          float *acc) {
  const int16_t *x[X_ROWS];
  int64_t first = p->first / M3_ACTIVATION_GROUP;
  for (int r = 0; r < n; r++) x[r] = a[r].q + p->first;
  for (int64_t g = 0; g < p->n / M3_ACTIVATION_GROUP; g++)
    for (int h = 0; h < (halved ? 2 : 1); h++) {
      int64_t group = halved ? 2 * g + h : g;
      int32x4_t sum[X_ROWS][QUARTERS];
#pragma GCC unroll 4
      for (int r = 0; r < n; r++)
#pragma GCC unroll 4
        for (int k = 0; k < QUARTERS; k++) sum[r][k] = vdupq_n_s32(0);
      for (int part = 0; part < (halved ? 2 : 4); part++) {
        int place = halved ? 2 * part + h : part; /* of four pairs in the group */
        add_pairs(p->tile, 16 * g + 4 * place, x, 32 * g + 8 * place, n, sum);
      }
#pragma GCC unroll 4
      for (int r = 0; r < n; r++) {
        float x_sum = halved ? a[r].half_sum[2 * first + group] : a[r].sum[first + g];
        add_group(p->tile, group, sum[r], a[r].scale[first + g], minima, x_sum, acc + r * M3_TILE_ROWS);
      }
    }
}

INLINE void multiply_kind(const m3_tile_product *p, bool halved, bool minima) {
  m3_activations a[X_ROWS];
  int64_t r = 0;
  for (; r + X_ROWS <= p->n_x; r += X_ROWS) {
    for (int64_t k = 0; k < X_ROWS; k++) a[k] = m3_activations_of(p, r + k);
    multiply_rows(p, a, X_ROWS, halved, minima, p->acc + r * M3_TILE_ROWS);
  }
  for (; r < p->n_x; r++) {
    a[0] = m3_activations_of(p, r);
    multiply_rows(p, a, 1, halved, minima, p->acc + r * M3_TILE_ROWS);
  }
}

static void multiply(const m3_tile_product *p) {
  if (p->coding->group == 32)
    p->coding->minima ? multiply_kind(p, false, true) : multiply_kind(p, false, false);
  else
    p->coding->minima ? multiply_kind(p, true, true) : multiply_kind(p, true, false);
}

/* ------------------------------------------------------------------------------------------------ one row of x */

/* Products of the halves of a group of 32. */
INLINE void half_products(const int8_t *q, const int16_t *x, int32_t out[2]) {
  int8x16_t low = vld1q_s8(q), high = vld1q_s8(q + 16);
  int8x16_t part[2] = {vuzp1q_s8(low, high), vuzp2q_s8(low, high)}; /* even and odd elements, as in x */
  int32x4_t sum[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
  for (int k = 0; k < 2; k++) {
    int16x8_t w[2] = {vmovl_s8(vget_low_s8(part[k])), vmovl_high_s8(part[k])};
    for (int h = 0; h < 2; h++) {
      int16x8_t v = vld1q_s16(x + 16 * k + 8 * h);
      sum[h] = vmlal_high_s16(vmlal_s16(sum[h], vget_low_s16(w[h]), vget_low_s16(v)), w[h], v);
    }
  }
  for (int h = 0; h < 2; h++) out[h] = vaddvq_s32(sum[h]);
}

/* 256 columns of one row, or what is left of them, added to its sum. */
static float multiply_row(const m3_coding *coding, const char *row, int64_t column, int64_t n, const m3_activations *a,
                          float acc) {
  int8_t q[M3_SUPERBLOCK];
  float scale[16], min[16];
  coding->read(row, q, scale, min, n);
  for (int64_t g = 0; g < n / M3_ACTIVATION_GROUP; g++) {
    int64_t at = column / M3_ACTIVATION_GROUP + g;
    int32_t half[2];
    half_products(q + 32 * g, a->q + 32 * at, half);
    if (coding->group == 32) {
      acc = fmaf((float)(half[0] + half[1]), scale[g] * a->scale[at], acc);
      if (coding->minima) acc = fmaf(-min[g], a->sum[at], acc);
      continue;
    }
    for (int h = 0; h < 2; h++) {
      acc = fmaf((float)half[h], scale[2 * g + h] * a->scale[at], acc);
      if (coding->minima) acc = fmaf(-min[2 * g + h], a->half_sum[2 * at + h], acc);
    }
  }
  return acc;
}

static void row_product(const m3_weight_rows *w, const void *x, float *out) {
  m3_activations a = m3_activations_at((void *)x, w->n);
  for (int64_t j = 0; j < w->n_rows; j++) {
    const char *row = (const char *)w->data + j * w->row_bytes;
    float acc = 0;
    for (int64_t column = 0; column < w->n; column += M3_SUPERBLOCK, row += w->coding->bytes) {
      int64_t n = w->n - column < M3_SUPERBLOCK ? w->n - column : M3_SUPERBLOCK;
      acc = multiply_row(w->coding, row, column, n, &a, acc);
    }
    out[j] = acc;
  }
}

/* ------------------------------------------------------------------------------------------------ rounding */

static void round_group(const float *from, int64_t g, const m3_activations *out) {
  uint32x4_t largest = vdupq_n_u32(0); /* bits order magnitudes, and NaN above infinity above numbers */
  for (int k = 0; k < 8; k++) largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(from + 4 * k))));
  uint32_t bits = vmaxvq_u32(largest);
  float max;
  memcpy(&max, &bits, 4);
  bool usable = max >= M3_ACTIVATION_TINY && max < INFINITY;
  out->scale[g] = usable ? max / 32767.0f : max < M3_ACTIVATION_TINY ? 0.0f : NAN;
  int16x8_t q[4];
  int32_t sum[2] = {0};
  for (int k = 0; k < 4; k++) {
    float inverse = 32767.0f / max;
    int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(from + 8 * k), inverse));
    int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(from + 8 * k + 4), inverse));
    q[k] = usable ? vcombine_s16(vmovn_s32(low), vmovn_s32(high)) : vdupq_n_s16(0);
    sum[k / 2] += vaddlvq_s16(q[k]);
  }
  for (int h = 0; h < 2; h++) {
    vst1q_s16(out->q + 32 * g + 8 * h, vuzp1q_s16(q[2 * h], q[2 * h + 1]));
    vst1q_s16(out->q + 32 * g + 16 + 8 * h, vuzp2q_s16(q[2 * h], q[2 * h + 1]));
    out->total[2 * g + h] = sum[h];
    out->half_sum[2 * g + h] = out->scale[g] * (float)sum[h];
  }
  out->sum[g] = out->scale[g] * (float)(sum[0] + sum[1]);
}

static void round_row(const float *x, int64_t n, void *out) {
  m3_activations a = m3_activations_at(out, n);
  memset(out, 0, (size_t)m3_activation_bytes(n));
  for (int64_t g = 0; g < n / M3_ACTIVATION_GROUP; g++) round_group(x + 32 * g, g, &a);
}

/* One function for all types: they differ in what reads their integers. */
#define ROW_PRODUCT(name) row_product

const m3_products m3_products_neon = {
    .round = round_row,
    .multiply = multiply,
    .row_product = M3_BY_BLOCK_TYPE(ROW_PRODUCT),
};
#else
typedef int m3_no_neon_products;
#endif
