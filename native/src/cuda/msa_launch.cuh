// What the launchers share.
#ifndef M3_SRC_CUDA_MSA_LAUNCH_CUH
#define M3_SRC_CUDA_MSA_LAUNCH_CUH

#include <cuda.h>
#include <cuda_runtime.h>

#include "m3.h"
#include "msa_device.cuh"
#include "msa_kernels.h"

namespace m3_msa {

// Multiprocessors of the current device, 0 if it is not of compute capability 9.0.
inline int hopper_multiprocessors() {
  int device, major, minor, count;
  if (cudaGetDevice(&device) || cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device))
    return 0;
  return major == 9 && minor == 0 ? count : 0;
}

inline bool shape_taken(const m3_msa_shape &s) {
  return s.n_head == HEADS * GROUP && s.n_head_kv == HEADS && s.head_dim == DIM && s.n_index_head == HEADS &&
         s.index_dim == DIM && s.block_size == BLOCK && s.top_k == TOP_K && s.local_blocks >= 1 &&
         s.local_blocks < TOP_K;
}
inline bool decode_rows_taken(const m3_msa_rows &r) {
  return r.n >= 1 && r.n <= M3_MSA_MAX_ROWS && r.per_sequence >= 1 && r.per_sequence <= 4 &&
         r.n % r.per_sequence == 0 && r.max_blocks >= 1 && r.max_blocks <= M3_MSA_MAX_BLOCKS;
}

// Map of a 16-bit cache for boxes of one page and half a head: [64 channels, 128 tokens] in the 128-byte swizzle, in
// which 16-byte chunk c of row r lies at place c ^ (r & 7). Rows are not counted: only pages of tables are read.
inline bool map_pages(CUtensorMap *map, const void *pages, int32_t type) {
  void *entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found) !=
          cudaSuccess ||
      found != cudaDriverEntryPointSuccess)
    return false;
  auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  cuuint64_t size[2] = {DIM, 0x7fffffff}, stride[1] = {ROW_BYTES};
  cuuint32_t box[2] = {DIM / 2, BLOCK}, step[2] = {1, 1};
  return encode(map, type == M3_TYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                const_cast<void *>(pages), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

struct launch_shape {
  dim3 grid, block;
  size_t shared;
  int cluster;      // thread blocks of a cluster, 1: none
  bool overlapped;  // may start before the previous kernel of the stream has ended; it waits itself
};

template <class Args>
m3_msa_result launch(void (*kernel)(Args), const Args &args, const launch_shape &s, cudaStream_t stream) {
  if (s.shared > 48 * 1024 &&
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)s.shared) != cudaSuccess)
    return M3_MSA_FAILED;
  if (s.cluster > 8 && cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess)
    return M3_MSA_FAILED;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = s.grid;
  config.blockDim = s.block;
  config.dynamicSmemBytes = s.shared;
  config.stream = stream;
  config.attrs = attributes;
  if (s.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = (unsigned)s.cluster;
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  if (s.overlapped) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, args) == cudaSuccess ? M3_MSA_LAUNCHED : M3_MSA_FAILED;
}

}  // namespace m3_msa

#endif
