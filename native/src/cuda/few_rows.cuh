/* few_rows.cuh - products of weights of any type with few rows: what decoding is made of. Bound by reading weights. */
#ifndef M3_SRC_CUDA_FEW_ROWS_CUH
#define M3_SRC_CUDA_FEW_ROWS_CUH

#include "cuda/state.cuh"

/* The most rows. */
enum { M3_FEW_ROWS = 8 };

/* y[r * ldy + j] = x[r] . weight[j]; with `up`, of the same shape: SwiGLU of that and x[r] . up[j]. */
struct m3_few_part {
  const m3_weight *weight;
  float *y;
  int64_t ldy;
  const m3_weight *up = NULL;
  bool shared = false; /* not of an expert, in a product with `experts`: of row 0 for row 0 of y */
};

/* Which rows are multiplied with which matrix: rows 0 to n - 1 with the one there is; or with `experts`, which is of
 * one token, `used` matrices with row 0 of x for the k-th place of y, or, if `sum_weights`, with the k-th row of x, for
 * y += the sum of the results weighted by sum_weights[k]; or with `grouping` as in m3_product. */
struct m3_few_product {
  m3_few_part parts[M3_PRODUCT_PARTS];
  int32_t n_parts;
  const float *x; /* rows of the weights' columns */
  int32_t n;
  bool add = false;
  const m3_weight *norm = NULL; /* RMSNorm of the rows of x first */
  float *normed = NULL;         /* out: its result, or NULL */
  const int32_t *experts = NULL;
  int32_t used = 0;
  const float *sum_weights = NULL;
  const m3_grouping *grouping = NULL;
  const int32_t *gather = NULL;
  int32_t group_rows = 0, max_groups = 0;
};

static inline m3_few_product m3_one_few_product(const m3_weight *weight, const float *x, int32_t n, float *y,
                                                bool add) {
  return m3_few_product{{{weight, y, weight->tensor->ne[1]}}, 1, x, n, add};
}

/* Products are taken with x rounded as the CPU rounds it where the weight's type is one of blocks, with float32 else.
 * Sums have one order, whatever other rows are there. False, and nothing is done, if there are more than M3_FEW_ROWS
 * rows, the session is exact, or rows are too long or of odd length. */
bool m3_cuda_few_rows(const m3_context *c, const m3_few_product *p);

/* Whether m3_cuda_few_rows multiplies n rows with a weight, where a block holds so many rows of x at once. */
bool m3_cuda_takes_few_rows(const m3_context *c, const m3_weight *weight, int32_t n, int32_t held);

/* Once for a process, before the first product. */
cudaError_t m3_cuda_few_rows_setup();

#endif
