/* cpu.h - what the files of the CPU backend share. Operations are documented in backend.h. */
#ifndef M3_SRC_CPU_CPU_H
#define M3_SRC_CPU_CPU_H

#include <omp.h>

#include "backend.h"
#include "cpu/kernels.h"
#include "model.h"

/* Which of the scratch's per-thread buffers belongs to the calling thread. */
static inline int64_t m3_thread_index(void) { return omp_get_thread_num(); }

/* Threads for a piece of work of so many multiply-adds (or the like): one below the size at which waking the others
 * costs more than it saves. */
static inline int32_t m3_threads_for(const m3_context *c, int64_t work) {
  return work < 65536 ? 1 : c->scratch->n_threads;
}

/* y[r * ldy + j] = x[r] . w[j] for r < n, j < rows of the weight; x is [n, columns of the weight], contiguous.
 * `expert` picks a matrix of a stacked weight, 0 for a plain one. With `add` the product is added to y. */
typedef struct m3_matmul_params {
  const m3_weight *weight;
  int32_t expert;
  const float *x;
  int32_t n;
  float *y;
  int64_t ldy;
  bool add;
} m3_matmul_params;

void m3_matmul(const m3_context *c, const m3_matmul_params *p);

/* Floats of the per-thread buffer that it needs. */
int64_t m3_matmul_floats(void);

/* out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i] for one row of n; out may be x. */
void m3_rms_norm(const m3_context *c, const float *x, const float *weight, int64_t n, float *out);

/* Adds the squares of n rows x [n, width of the input] to the sums of matrix `matrix`, if sums are kept. A column is
 * added up by one thread in the order of the rows, so that the result does not depend on how many threads there are. */
void m3_sum_squares(const m3_context *c, m3_input input, int32_t matrix, const float *x, int64_t n);

/* A norm or router weight, which is F32 by the loader's check. */
const float *m3_vector(const m3_weight *w);

void m3_cpu_embed(const m3_context *c, const m3_embed_params *p);
void m3_cpu_prepare(const m3_context *c, const m3_prepare_params *p);
bool m3_cpu_select(const m3_context *c, const m3_select_params *p);
void m3_cpu_attend(const m3_context *c, const m3_attend_params *p);
void m3_cpu_output(const m3_context *c, const m3_output_params *p);
void m3_cpu_mlp(const m3_context *c, const m3_ffn_params *p);
bool m3_cpu_router(const m3_context *c, const m3_ffn_params *p);
void m3_cpu_experts(const m3_context *c, const m3_ffn_params *p);
void m3_cpu_shared(const m3_context *c, const m3_ffn_params *p);
void m3_cpu_head(const m3_context *c, const m3_head_params *p);
bool m3_cpu_head_input(const m3_context *c, const m3_head_input_params *p);
bool m3_cpu_finite(const m3_context *c, const float *x, int64_t n, m3_part part);

#endif
