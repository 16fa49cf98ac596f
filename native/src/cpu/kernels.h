/* kernels.h - inner loops of the CPU backend, one table for each instruction set.
 *
 * kernels_scalar.c is the specification. Conversions must agree with it bit for bit; sums may be taken in another
 * order, but within one table dot and dot4 must give the same bits for the same row, so that a result
 * does not depend on how rows were grouped. */
#ifndef M3_SRC_CPU_KERNELS_H
#define M3_SRC_CPU_KERNELS_H

#include <stdint.h>

#include "cpu/products.h"
#include "error.h"
#include "m3.h"
#include "quant/traits.h"

typedef struct m3_kernels {
  const char *name;

  /* Sum of a[i] * b[i], n >= 0. */
  float (*dot)(const float *a, const float *b, int64_t n);

  /* out[r] = dot(rows + r * stride, x, n) for r = 0..3. */
  void (*dot4)(const float *rows, int64_t stride, const float *x, int64_t n, float out[4]);

  /* y[i] += a * x[i]. */
  void (*axpy)(float *y, float a, const float *x, int64_t n);

  /* Products with weights of block types. */
  const m3_products *products;

  /* Rows of a storage type to float32 by its number; NULL: the type's own decoder is used. */
  m3_decoder to_f32[M3_TYPE_MXFP4 + 1];
} m3_kernels;

extern const m3_kernels m3_kernels_scalar;
#if defined(__x86_64__)
extern const m3_kernels m3_kernels_avx2;
extern const m3_kernels m3_kernels_avx512, m3_kernels_avx512_vnni; /* the second with dot product instructions */
#elif defined(__aarch64__)
extern const m3_kernels m3_kernels_neon;
#endif

/* Resolves AUTO to the widest set of this machine; M3_ERROR_UNSUPPORTED if the machine lacks the one asked for. */
m3_status m3_choose_isa(int32_t wanted, m3_isa *out, m3_error *err);

/* The table of a set that m3_choose_isa gave. */
const m3_kernels *m3_kernels_for(m3_isa isa);

/* Converts n elements of `type` (one the engine knows) to float32. */
void m3_convert_row(const m3_kernels *kernels, int32_t type, const void *src, float *dst, int64_t n);

#endif
