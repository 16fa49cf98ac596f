/* many_rows.cuh - products with many rows on tensor cores: weights of block types in many_rows.cu, others in
 * many_rows_float.cu. */
#ifndef M3_SRC_CUDA_MANY_ROWS_CUH
#define M3_SRC_CUDA_MANY_ROWS_CUH

#include "cuda/state.cuh"

/* Weights that one launch multiplies with rows of x, in tiles. */
struct m3_many_part {
  const char *weight;
  int64_t expert_bytes, row_bytes;
  int32_t type, n_out;
  unsigned first_block; /* of those of a group */
  float *y;
  int64_t ldy;
};

struct m3_many_params {
  m3_many_part parts[M3_PRODUCT_PARTS];
  int32_t n_parts, n_in, n;
  bool add;
  const char *x;              /* rounded rows, or rows of floats */
  const int32_t *gather;      /* or NULL */
  const m3_row_group *groups; /* or NULL */
  const int32_t *n_groups;
  int32_t max_groups;
};

/* The parts `members` of a product in tiles of bm rows of weights and bn rows of x; returns the blocks. */
unsigned m3_cuda_many_params(const m3_product *p, const int *members, int n, int32_t bm, int32_t bn,
                             m3_many_params *out);

/* Rows of x as products take them, to scratch `rounded`. */
void m3_cuda_round(const m3_context *c, const float *x, int64_t n, int32_t n_in);

/* The same of SwiGLU of gate and up. */
void m3_cuda_round_swiglu(const m3_context *c, const float *gate, const float *up, int64_t n, int32_t n_in);

/* Whether such a weight is multiplied with rounded rows. */
static inline bool m3_cuda_has_units(const m3_weight *w) { return m3_type_block_size(w->tensor->type) > 1; }

static inline bool m3_cuda_any_units(const m3_product *p) {
  bool any = false;
  for (int i = 0; i < p->n_parts; i++) any |= m3_cuda_has_units(p->parts[i].weight);
  return any;
}

/* m3_product, for weights of block types of the rounded rows in place of those of x. */
void m3_cuda_many_rows(const m3_context *c, const m3_product *p);

/* The part of it of weights of F32, F16 and BF16: x in three parts of 8 bits, weights in one (BF16),
 * two or three, products of parts exact but for those below float32's precision, and float32 sums. */
void m3_cuda_many_floats(const m3_context *c, const m3_product *p);

/* Rows of a group of a grouping of so many rows, from which m3_cuda_many_rows takes its tile. */
int32_t m3_cuda_many_group_rows(const m3_product *p, int64_t rows, int32_t matrices);

/* Bytes of scratch `rounded` for a chunk of so many rows. */
int64_t m3_cuda_input_bytes(const m3_hparams *h, int64_t rows);

/* Once for a process, before the first product. */
cudaError_t m3_cuda_many_rows_setup();

#endif
