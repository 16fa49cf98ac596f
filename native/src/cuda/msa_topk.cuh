// Exact top-k of block scores by one thread block of 128 threads, or by a cluster of them.
#ifndef M3_SRC_CUDA_MSA_TOPK_CUH
#define M3_SRC_CUDA_MSA_TOPK_CUH

#include "msa_device.cuh"
#include "msa_kernels.h"

namespace m3_msa {

constexpr int TOPK_THREADS = 128;
constexpr int TOPK_ALONE = 1024;  // up to so many blocks each thread block of a cluster chooses for itself
// Blocks that can reach the best `room` are those of at most 16 threads, see below.
constexpr int TOPK_CANDIDATES = TOP_K * (M3_MSA_MAX_BLOCKS / TOPK_THREADS);

struct alignas(16) topk_buffer {
  uint64_t best[TOPK_THREADS];
  uint64_t candidate[TOPK_CANDIDATES];
  uint64_t chosen[TOP_K];
  uint64_t bound;
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

// s.chosen gets the `room` largest keys among blocks [0, others) whose number / 128 is `rank` modulo `ranks`. scores:
// maxima of the quarters of each block.
__device__ void largest_keys(const float *scores, int others, int room, int rank, int ranks, topk_buffer &s) {
  constexpr int BATCH = 8;  // loads in flight
  int tid = threadIdx.x, step = ranks * TOPK_THREADS, first = rank * TOPK_THREADS + tid;
  float score[BATCH];
  auto load = [&](int from) {
    float4 x[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (from + i * step < others) x[i] = __ldcg(reinterpret_cast<const float4 *>(scores) + from + i * step);
#pragma unroll
    for (int i = 0; i < BATCH; i++) score[i] = fmaxf(fmaxf(x[i].x, x[i].y), fmaxf(x[i].z, x[i].w));
  };
  auto each = [&](int from, auto &&f) {
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (from + i * step < others) f(topk_key(score[i], from + i * step));
  };
  uint64_t mine = 0;
  for (int from = first; from < others; from += BATCH * step) {
    load(from);
    each(from, [&](uint64_t key) { mine = key > mine ? key : mine; });
  }
  s.best[tid] = mine;
  if (tid == 0) s.n_candidates = 0;
  __syncthreads();
  if (others <= step) {  // one block a thread
    rank_keys(s.best, min(TOPK_THREADS, others - rank * TOPK_THREADS), room, s);
    return;
  }
  // The room-th of the threads' best keys is a lower bound of the room-th key; what reaches it lies in room threads.
  int above = 0;
#pragma unroll 32
  for (int i = 0; i < TOPK_THREADS; i++) above += s.best[i] > mine;
  if (above == room - 1) s.bound = mine;  // keys differ, so the rank is one thread's
  __syncthreads();
  uint64_t bound = s.bound;
  if (mine >= bound)
    for (int from = first; from < others; from += BATCH * step) {
      if (others > BATCH * step) load(from);
      each(from, [&](uint64_t key) {
        if (key >= bound) s.candidate[atomicAdd(&s.n_candidates, 1)] = key;
      });
    }
  __syncthreads();
  rank_keys(s.candidate, s.n_candidates, room, s);
}

// list[16] in shared memory gets the local blocks and the best of the others, ascending, padded with -1. The thread
// blocks of a cluster, which all call it for the same scores, may share the work.
template <int CLUSTER>
__device__ void choose_blocks(const float *scores, int n_blocks, int local, topk_buffer &s, int32_t *list) {
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
