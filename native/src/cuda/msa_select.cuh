// The parts of selection as other launchers start them.
#ifndef M3_SRC_CUDA_MSA_SELECT_CUH
#define M3_SRC_CUDA_MSA_SELECT_CUH

#include "msa_kernels.h"

namespace m3_msa {

// Floats between the block scores of two heads.
inline int64_t stride_of(const m3_msa_rows &rows) { return (rows.max_blocks + 3) / 4 * 4; }

// The index scan: block scores in p.work, [n, 4, stride_of].
m3_msa_result scan(const m3_msa_select &p, cudaStream_t stream);
// The lists from these.
m3_msa_result choose(const m3_msa_select &p, cudaStream_t stream);

}  // namespace m3_msa

#endif
