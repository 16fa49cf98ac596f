/* kernels.h - inner loops of the CPU backend, one table for each instruction set.
 *
 * kernels_scalar.c is the specification. Conversions must agree with it bit for bit; sums may be taken in another
 * order, but within one table what one output gets must not depend on which others are computed with it: dot and dots
 * give the same bits for the same rows, however they are grouped and cut. */
#ifndef M3_SRC_CPU_KERNELS_H
#define M3_SRC_CPU_KERNELS_H

#include <stdint.h>

#include "cpu/products.h"
#include "error.h"
#include "m3.h"
#include "quant/traits.h"

/* The most lanes that a table sums in. */
#define M3_DOT_LANES 16

/* out[r * out_stride + j] = dot(rows + j * row_stride, x + r * x_stride, n) for r < n_x, j < n_rows. */
typedef struct m3_dots {
  const float *rows;
  int64_t row_stride, n_rows;
  const float *x;
  int64_t x_stride, n_x;
  int64_t n;
  float *out; /* written with the last columns only */
  int64_t out_stride;
  /* For rows that come in pieces of columns: [n_x, n_rows, M3_DOT_LANES] partial sums, left by all pieces but the last
   * and taken up by all but the first. These have a multiple of M3_DOT_LANES columns. NULL: the rows are whole. */
  float *partial;
  bool first, last;
  /* Memory that will be read next, or NULL: it is fetched while these are computed. */
  const void *next;
  int64_t next_bytes;
} m3_dots;

/* acc[r * acc_stride + i] += p[r * p_stride + j] * v[j * v_stride + i], added for j = 0, 1, ... n_v - 1 in this order,
 * for r < n_acc, i < n. */
typedef struct m3_accumulate {
  float *acc;
  int64_t acc_stride, n_acc;
  const float *p;
  int64_t p_stride;
  const float *v;
  int64_t v_stride, n_v;
  int64_t n;
  /* Memory that will be read next, or NULL: it is fetched meanwhile. */
  const void *next;
  int64_t next_bytes;
} m3_accumulate;

/* out[i] = largest over n keys of s (t D + slack) + e norm + FLT_MIN, in these steps of float32, for four queries: (s,
 * e) = pairs[j], (t, slack, norm) = factors[i, 4 + i, 8 + i], D = the exact sum of products of codes of key j and query
 * i, which fits in 32 bits. Infinite if one of them is NaN or infinite. See low_bit.h. */
typedef struct m3_bounds {
  const int8_t *codes;    /* [n, stride] */
  const float *pairs;     /* [n, 2] */
  int64_t n, stride;      /* a multiple of 32 */
  const int16_t *queries; /* [4, stride] */
  const float *factors;   /* [3, 4] */
  float *out;             /* [4] */
  const void *next;       /* memory that is read next, or NULL: it is fetched towards the end */
} m3_bounds;

typedef struct m3_kernels {
  const char *name;

  /* Sum of a[i] * b[i], n >= 0. */
  float (*dot)(const float *a, const float *b, int64_t n);

  void (*dots)(const m3_dots *p);

  /* y[i] += a * x[i]. */
  void (*axpy)(float *y, float a, const float *x, int64_t n);

  void (*accumulate)(const m3_accumulate *p);

  /* The largest of x, which NaN is not; -infinity if there is none. *finite becomes false if one is NaN or infinite. */
  float (*largest)(const float *x, int64_t n, bool *finite);

  /* x[i] = exp((x[i] - shift) * scale) within 2 units of the last place, and their sum. NaN stays NaN. */
  float (*exp_sum)(float *x, int64_t n, float shift, float scale);

  void (*bounds)(const m3_bounds *p);

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
