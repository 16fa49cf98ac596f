/* The specification of every instruction set: plain C in source order. Compiled with -ffp-contract=off, so that
 * no multiplication and addition are fused behind its back. */
#include "cpu/kernels.h"

static float dot(const float *a, const float *b, int64_t n) {
  /* Eight partial sums: shorter chains round less than one long one, and the compiler can use vectors. */
  float sum[8] = {0};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; j++) sum[j] += a[i + j] * b[i + j];
  for (int j = 0; i < n; i++, j++) sum[j] += a[i] * b[i];
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

static void dot4(const float *rows, int64_t stride, const float *x, int64_t n, float out[4]) {
  for (int r = 0; r < 4; r++) out[r] = dot(rows + r * stride, x, n);
}

static void axpy(float *y, float a, const float *x, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] += a * x[i];
}

const m3_kernels m3_kernels_scalar = {"scalar", dot, dot4, axpy, &m3_products_scalar, {0}};
