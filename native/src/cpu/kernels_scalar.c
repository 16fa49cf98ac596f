/* The specification of every instruction set: plain C in source order. Compiled with -ffp-contract=off, so that
 * no multiplication and addition are fused behind its back. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "cpu/exponential.h"
#include "cpu/kernels.h"

/* Eight partial sums: shorter chains round less than one long one, and the compiler can use vectors. */
#define LANES 8

static void add_products(float sum[LANES], const float *a, const float *b, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int j = 0; j < LANES; j++) sum[j] += a[i + j] * b[i + j];
  for (int j = 0; i < n; i++, j++) sum[j] += a[i] * b[i];
}

static float total(const float sum[LANES]) {
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

static float dot(const float *a, const float *b, int64_t n) {
  float sum[LANES] = {0};
  add_products(sum, a, b, n);
  return total(sum);
}

static void dots(const m3_dots *p) {
  for (int64_t r = 0; r < p->n_x; r++)
    for (int64_t j = 0; j < p->n_rows; j++) {
      float sum[LANES] = {0}, *kept = p->partial ? p->partial + (r * p->n_rows + j) * M3_DOT_LANES : sum;
      if (p->partial && !p->first) memcpy(sum, kept, sizeof sum);
      add_products(sum, p->rows + j * p->row_stride, p->x + r * p->x_stride, p->n);
      if (!p->partial || p->last)
        p->out[r * p->out_stride + j] = total(sum);
      else
        memcpy(kept, sum, sizeof sum);
    }
}

static void axpy(float *y, float a, const float *x, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] += a * x[i];
}

static void accumulate(const m3_accumulate *p) {
  for (int64_t r = 0; r < p->n_acc; r++)
    for (int64_t j = 0; j < p->n_v; j++)
      axpy(p->acc + r * p->acc_stride, p->p[r * p->p_stride + j], p->v + j * p->v_stride, p->n);
}

static float largest(const float *x, int64_t n, bool *finite) {
  float best = -INFINITY;
  for (int64_t i = 0; i < n; i++) {
    *finite &= fabsf(x[i]) <= FLT_MAX;
    if (x[i] > best) best = x[i];
  }
  return best;
}

static float power_of_2(int32_t n) {
  uint32_t bits = (uint32_t)(n + 127) << 23;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static float exponential(float x) {
  if (isnan(x)) return x;
  x = x < M3_EXP_LOWEST ? M3_EXP_LOWEST : x > M3_EXP_HIGHEST ? M3_EXP_HIGHEST : x;
  float n = rintf(x * M3_EXP_LOG2_E);
  float r = (x - n * M3_EXP_LN2_HIGH) - n * M3_EXP_LN2_LOW;
  float q = (((M3_EXP_Q4 * r + M3_EXP_Q3) * r + M3_EXP_Q2) * r + M3_EXP_Q1) * r + M3_EXP_Q0;
  float y = (q * (r * r) + r) + 1.0f;
  /* In two steps: the power alone may have no float where the result has one. */
  int32_t k = (int32_t)n, half = k >> 1;
  return y * power_of_2(half) * power_of_2(k - half);
}

static float exp_sum(float *x, int64_t n, float shift, float scale) {
  float sum[LANES] = {0};
  for (int64_t i = 0; i < n; i++) {
    x[i] = exponential((x[i] - shift) * scale);
    sum[i % LANES] += x[i];
  }
  return total(sum);
}

static void bounds(const m3_bounds *p) {
  for (int i = 0; i < 4; i++) {
    float best = -INFINITY, t = p->factors[i], slack = p->factors[4 + i], norm = p->factors[8 + i];
    for (int64_t j = 0; j < p->n; j++) {
      int32_t d = 0;
      for (int64_t k = 0; k < p->stride; k++) d += p->codes[j * p->stride + k] * p->queries[i * p->stride + k];
      float bound = (p->pairs[2 * j] * (t * (float)d + slack) + p->pairs[2 * j + 1] * norm) + FLT_MIN;
      if (!(bound <= FLT_MAX)) bound = INFINITY;
      if (bound > best) best = bound;
    }
    p->out[i] = best;
  }
}

const m3_kernels m3_kernels_scalar = {
    .name = "scalar",
    .dot = dot,
    .dots = dots,
    .axpy = axpy,
    .accumulate = accumulate,
    .largest = largest,
    .exp_sum = exp_sum,
    .bounds = bounds,
    .products = &m3_products_scalar,
};
