// Exact top-k of block scores by one thread block of 128 threads, or a cluster of 8.
#ifndef M3_SRC_CUDA_MSA_TOPK_CUH
#define M3_SRC_CUDA_MSA_TOPK_CUH

#include "msa_device.cuh"
#include "msa_kernels.h"

namespace m3_msa {

constexpr int TOPK_THREADS = 128, TOPK_EACH = 8;
constexpr int TOPK_ALONE = TOPK_THREADS * TOPK_EACH;  // blocks that one thread block looks through
// Blocks that can reach the best `room` are those of at most 15 of 32 groups of threads, see below.
constexpr int TOPK_CANDIDATES = TOPK_ALONE / 2;

struct alignas(16) topk_buffer {
  uint64_t best[TOPK_THREADS];
  uint64_t group[TOPK_THREADS];
  uint64_t candidate[TOPK_CANDIDATES];
  uint64_t chosen[TOP_K];
  int32_t n_candidates;
};

#if M3_MSA_HOPPER

// One number that sorts as (score, lower id first), never 0.
__device__ __forceinline__ uint64_t topk_key(float score, int id) {
  return (uint64_t)ordered(score) << 32 | (uint32_t)~id;
}
__device__ __forceinline__ int topk_id(uint64_t key) { return ~(int32_t)(uint32_t)key; }

// s.chosen gets the `room` largest keys of the n in keys (shared memory), or all of them and zeros, in order.
__device__ __forceinline__ void rank_keys(const uint64_t *keys, int n, int room, topk_buffer &s) {
  int tid = threadIdx.x;
  if (tid < TOP_K) s.chosen[tid] = 0;
  __syncthreads();
  for (int i = tid; i < n; i += TOPK_THREADS) {
    uint64_t key = keys[i];
    int above = 0;
#pragma unroll 8
    for (int j = 0; j < n; j++) above += keys[j] > key;
    if (key && above < room) s.chosen[above] = key;
  }
  __syncthreads();
}

// s.chosen gets the `room` largest keys among blocks [0, others) that are `rank` modulo `ranks` in steps of 128 blocks,
// at most TOPK_ALONE.
__device__ __forceinline__ void largest_keys(const float *scores, int others, int room, int rank, int ranks,
                                             topk_buffer &s) {
  int tid = threadIdx.x, lane = tid % 32, step = ranks * TOPK_THREADS, first = rank * TOPK_THREADS + tid, id = first;
  float score[TOPK_EACH], top = -INFINITY;
#pragma unroll
  for (int i = 0; i < TOPK_EACH; i++)
    score[i] = first + i * step < others ? __ldcg(scores + first + i * step) : -INFINITY;
  top = score[0];
#pragma unroll
  for (int i = 1; i < TOPK_EACH; i++)
    if (score[i] > top) top = score[i], id = first + i * step;
  uint64_t mine = first < others ? topk_key(top, id) : 0;
  s.best[tid] = mine;
  if (tid == 0) s.n_candidates = 0;
  __syncthreads();
  if (others <= step) {  // one block a thread
    rank_keys(s.best, TOPK_THREADS, room, s);
    return;
  }
  // 32 groups of four threads: the room-th of their best keys is a lower bound of the room-th key, and what reaches it
  // lies in room groups. Each warp finds it for itself.
  uint64_t best = s.best[lane];
#pragma unroll
  for (int w = 1; w < TOPK_THREADS / 32; w++) best = max(best, s.best[w * 32 + lane]);
  s.group[tid] = best;
  __syncwarp();
  int above = 0;
#pragma unroll
  for (int i = 0; i < 32; i++) above += s.group[tid - lane + i] > best;
  // Keys differ, so a rank is one lane's.
  uint64_t bound = __shfl_sync(~0u, best, __ffs(__ballot_sync(~0u, above == room - 1)) - 1);
  if (mine >= bound) {
#pragma unroll
    for (int i = 0; i < TOPK_EACH; i++) {
      uint64_t key = topk_key(score[i], first + i * step);
      if (first + i * step < others && key >= bound) s.candidate[atomicAdd(&s.n_candidates, 1)] = key;
    }
  }
  __syncthreads();
  rank_keys(s.candidate, s.n_candidates, room, s);
}

// list[16] in shared memory gets the local blocks and the best of the others, ascending, padded with -1. All threads
// call it; the list can be read after it. More than TOPK_ALONE blocks need a CLUSTER of 8, whose thread blocks all call
// it for the same scores.
template <int CLUSTER>
__device__ __forceinline__ void choose_blocks(const float *scores, int n_blocks, int local, topk_buffer &s,
                                              int32_t *list) {
  int tid = threadIdx.x;
  if (n_blocks <= TOP_K) {
    if (tid < TOP_K) list[tid] = tid < n_blocks ? tid : -1;
    __syncthreads();
    return;
  }
  int others = n_blocks - local, room = TOP_K - local;
  if (CLUSTER == 1 || others <= TOPK_ALONE) {
    largest_keys(scores, others, room, 0, 1, s);
  } else {
    largest_keys(scores, others, room, (int)(blockIdx.x % CLUSTER), CLUSTER, s);
    cluster_sync();
#pragma unroll
    for (int i = tid; i < CLUSTER * TOP_K; i += TOPK_THREADS)
      s.candidate[i] = cluster_load(&s.chosen[i % TOP_K], i / TOP_K);
    cluster_sync();  // all have read s.chosen
    rank_keys(s.candidate, CLUSTER * TOP_K, room, s);
  }
  if (tid < room) {
    uint64_t key = s.chosen[tid];
    int at = 0;
#pragma unroll
    for (int j = 0; j < TOP_K; j++) at += j < room && topk_id(s.chosen[j]) < topk_id(key);
    list[at] = topk_id(key);
  } else if (tid < TOP_K) {
    list[tid] = others + tid - room;
  }
  __syncthreads();
}

#endif

}  // namespace m3_msa

#endif
