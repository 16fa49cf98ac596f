// The parts of selection as other launchers start them.
#ifndef M3_SRC_CUDA_MSA_SELECT_CUH
#define M3_SRC_CUDA_MSA_SELECT_CUH

#include "msa_kernels.h"
#include "msa_low_bit.cuh"

namespace m3_msa {

// Floats between the block scores of two heads.
inline int64_t stride_of(const m3_msa_rows &rows) { return (rows.max_blocks + 3) / 4 * 4; }

// The index scan: block scores in p.work, [n, 4, stride_of].
m3_msa_result scan(const m3_msa_select &p, cudaStream_t stream);
// The lists from these.
m3_msa_result choose(const m3_msa_select &p, cudaStream_t stream);

// The scan of low-bit keys, and what the choice takes.
m3_msa_result bounds(const m3_msa_low_bit &p, rescore_args *next, cudaStream_t stream);
// The lists from these, in blocks.
m3_msa_result choose_rescored(const rescore_args &args, int32_t *blocks, cudaStream_t stream);

}  // namespace m3_msa

#endif
