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

/* A weight with where its product goes: y[r * ldy + j] = x[r] . w[j], j < rows of the weight. */
typedef struct m3_factor {
  const m3_weight *weight;
  float *y;
  int64_t ldy;
} m3_factor;

/* Products of one input with some weights of the same number of columns. Weights of block types are multiplied with the
 * input rounded as activations.h says, others in float32. */
typedef struct m3_matmul_params {
  const m3_factor *factors;
  int32_t n_factors;
  const float *x; /* [n, columns] */
  int32_t n;
  /* For stacked weights: rows start[e] to start[e + 1] - 1 of y belong to expert e. NULL: the first matrix and n rows.
   */
  const int32_t *start; /* [n_experts + 1] */
  int32_t n_experts;
  const int32_t *rows; /* [start[n_experts]] the row of x that each row of y is of; NULL: that of the same number.
                          Only where all weights are of block types */
  bool add;            /* to y, else y is written */
} m3_matmul_params;

void m3_matmul(const m3_context *c, const m3_matmul_params *p);

/* Floats of the per-thread buffer that it needs. */
int64_t m3_matmul_floats(void);

/* Floats of the per-thread buffer that attention and selection need. */
int64_t m3_attend_floats(const m3_hparams *h);
int64_t m3_select_floats(const m3_hparams *h, int64_t max_blocks);

/* out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i] for one row of n; out may be x. */
void m3_rms_norm(const m3_context *c, const float *x, const float *weight, int64_t n, float *out);

/* Adds the squares of n rows x [n, width of the input] to the sums of matrix `matrix`, if sums are kept. A column is
 * added up by one thread in the order of the rows, so that the result does not depend on how many threads there are. */
void m3_sum_squares(const m3_context *c, m3_input input, int32_t matrix, const float *x, int64_t n);

/* A norm or router weight, which is F32 by the loader's check. */
const float *m3_vector(const m3_weight *w);

void m3_cpu_embed(const m3_context *c, const m3_embed_params *p);
void m3_cpu_prepare(const m3_context *c, const m3_prepare_params *p);
void m3_cpu_rotate(const m3_context *c, const m3_rotate_params *p);
void m3_cpu_low_bit(const m3_context *c, const m3_rows *rows, m3_layer_cache cache);
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
void m3_cpu_linear(const m3_context *c, const m3_linear_params *p);
void m3_cpu_layer_norm(const m3_context *c, const m3_layer_norm_params *p);
void m3_cpu_turn(const m3_context *c, const m3_turn_params *p);

#endif
