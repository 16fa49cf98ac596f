// The index scan as the other launchers start it.
#ifndef M3_SRC_CUDA_MSA_SELECT_CUH
#define M3_SRC_CUDA_MSA_SELECT_CUH

#include "msa_kernels.h"

namespace m3_msa {

// Up to so many blocks in all rows the scan works in quarters of blocks, which spread evenly and come sooner; with
// float32 keys always.
constexpr int64_t SPLIT_BLOCKS = 1024;

struct scan_plan {
  int units;       // parts of a block that have a maximum each
  int64_t stride;  // floats between the maxima of two heads
};

scan_plan plan_scan(int32_t n_rows, int64_t max_blocks, int32_t index_type);
// Leaves maxima in p.work.
m3_msa_result scan(const m3_msa_select &p, const scan_plan &plan, cudaStream_t stream);

}  // namespace m3_msa

#endif
