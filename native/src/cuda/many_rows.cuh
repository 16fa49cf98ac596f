/* many_rows.cuh - products of weights of block types with many rows, on the tensor cores of integers. */
#ifndef M3_SRC_CUDA_MANY_ROWS_CUH
#define M3_SRC_CUDA_MANY_ROWS_CUH

#include "cuda/state.cuh"

/* Rows of x as products take them, to scratch `rounded`. */
void m3_cuda_round(const m3_context *c, const float *x, int64_t n, int32_t n_in);

/* The same of SwiGLU of gate and up. */
void m3_cuda_round_swiglu(const m3_context *c, const float *gate, const float *up, int64_t n, int32_t n_in);

/* Whether m3_cuda_many_rows multiplies with such a weight: all block types. */
static inline bool m3_cuda_has_units(const m3_weight *w) { return m3_type_block_size(w->tensor->type) > 1; }

/* m3_product of rounded rows (x is not read), whose weights all have block types. */
void m3_cuda_many_rows(const m3_context *c, const m3_product *p);

/* Rows of a group of a grouping, from which m3_cuda_many_rows takes its tile. */
int32_t m3_cuda_many_group_rows(int64_t rows, int32_t matrices);

/* Bytes of scratch `rounded` for a chunk of so many rows. */
int64_t m3_cuda_input_bytes(const m3_hparams *h, int64_t rows);

/* Once for a process, before the first product. */
cudaError_t m3_cuda_many_rows_setup();

#endif
