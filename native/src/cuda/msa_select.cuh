// The part of selection that other launchers start.
#ifndef M3_SRC_CUDA_MSA_SELECT_CUH
#define M3_SRC_CUDA_MSA_SELECT_CUH

#include "msa_kernels.h"

namespace m3_msa {

// The index scan: maxima of quarters of blocks in p.work, [n, 4, max_blocks, 4].
m3_msa_result scan(const m3_msa_select &p, cudaStream_t stream);

}  // namespace m3_msa

#endif
