// Exact top-k of block scores by one thread block of 128 threads.
#ifndef M3_SRC_CUDA_MSA_TOPK_CUH
#define M3_SRC_CUDA_MSA_TOPK_CUH

#include "msa_device.cuh"
#include "msa_kernels.h"

namespace m3_msa {

constexpr int TOPK_THREADS = 128;
// Blocks that can reach the best `room` are those of at most 16 threads, see below.
constexpr int TOPK_CANDIDATES = TOP_K * (M3_MSA_MAX_BLOCKS / TOPK_THREADS);

struct alignas(16) topk_buffer {
  uint64_t best[TOPK_THREADS];
  uint64_t candidate[TOPK_CANDIDATES];
  uint64_t bound;
  int32_t n_candidates;
  int32_t chosen[TOP_K];
};

#if M3_MSA_HOPPER

// One number that sorts as (score, lower id first).
__device__ __forceinline__ uint64_t topk_key(float score, int id) {
  return (uint64_t)ordered(score) << 32 | (uint32_t)~id;
}
template <int UNITS>
__device__ __forceinline__ float block_score(const float *scores, int b) {
  if (UNITS == 1) return __ldcg(scores + b);
  float4 s = __ldcg(reinterpret_cast<const float4 *>(scores) + b);
  return fmaxf(fmaxf(s.x, s.y), fmaxf(s.z, s.w));
}

// list[16] in shared memory gets the local blocks and the best of the others, ascending, padded with -1. scores: maxima
// of UNITS parts of each block. All threads call it; the list can be read after it.
template <int UNITS>
__device__ void choose_blocks(const float *scores, int n_blocks, int local, topk_buffer &s, int32_t *list) {
  int tid = threadIdx.x;
  if (n_blocks <= TOP_K) {
    if (tid < TOP_K) list[tid] = tid < n_blocks ? tid : -1;
    __syncthreads();
    return;
  }
  int others = n_blocks - local, room = TOP_K - local;
  // The room-th of the threads' best keys is a lower bound of the room-th key; what reaches it lies in room threads.
  uint64_t mine = 0;
  for (int b = tid; b < others; b += TOPK_THREADS) {
    uint64_t key = topk_key(block_score<UNITS>(scores, b), b);
    mine = key > mine ? key : mine;
  }
  s.best[tid] = mine;
  if (tid == 0) s.n_candidates = 0;
  __syncthreads();
  int rank = 0;
#pragma unroll 16
  for (int i = 0; i < TOPK_THREADS; i++) rank += s.best[i] > mine;
  if (rank == room - 1 && mine) s.bound = mine;  // keys differ, so the rank is one thread's
  __syncthreads();
  uint64_t bound = s.bound;
  if (mine >= bound)
    for (int b = tid; b < others; b += TOPK_THREADS) {
      uint64_t key = topk_key(block_score<UNITS>(scores, b), b);
      if (key >= bound) s.candidate[atomicAdd(&s.n_candidates, 1)] = key;
    }
  __syncthreads();
  int n = s.n_candidates;
  for (int i = tid; i < n; i += TOPK_THREADS) {
    uint64_t key = s.candidate[i];
    int above = 0;
    for (int j = 0; j < n; j++) above += s.candidate[j] > key;
    if (above < room) s.chosen[above] = ~(int32_t)(uint32_t)key;
  }
  __syncthreads();
  if (tid < room) {
    int id = s.chosen[tid], at = 0;
    for (int j = 0; j < room; j++) at += s.chosen[j] < id;
    list[at] = id;
  } else if (tid < TOP_K) {
    list[tid] = others + tid - room;
  }
  __syncthreads();
}

#endif

}  // namespace m3_msa

#endif
