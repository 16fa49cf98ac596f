// Exact top-k of block scores by one thread block of 128 threads.
#ifndef M3_SRC_CUDA_MSA_TOPK_CUH
#define M3_SRC_CUDA_MSA_TOPK_CUH

#include "msa_device.cuh"
#include "msa_kernels.h"

namespace m3_msa {

constexpr int TOPK_THREADS = 128;
// Blocks that can reach the best `room` are those of at most 16 of 32 groups, see below.
constexpr int TOPK_CANDIDATES = M3_MSA_MAX_BLOCKS / 2;

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

// s.chosen gets the `room` largest keys. WIDE: a thread takes four scores at a time; all threads must have some.
template <bool WIDE>
__device__ void largest_keys(const float *scores, int others, int room, topk_buffer &s) {
  constexpr int BATCH = 16, EACH = WIDE ? 4 : 1, STEP = TOPK_THREADS * EACH;  // loads in flight, scores of one
  int tid = threadIdx.x;
  float score[BATCH][EACH];
  auto load = [&](int from) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      int b = from + i * STEP;
      if (b >= others) continue;
      if constexpr (WIDE) {
        float4 x = __ldcg(reinterpret_cast<const float4 *>(scores + b));  // the row is padded to a multiple of 4
        score[i][0] = x.x, score[i][1] = x.y, score[i][2] = x.z, score[i][3] = x.w;
      } else {
        score[i][0] = __ldcg(scores + b);
      }
    }
  };
  auto each = [&](int from, auto &&f) {
#pragma unroll
    for (int i = 0; i < BATCH; i++)
#pragma unroll
      for (int c = 0; c < EACH; c++) {
        int b = from + i * STEP + c;
        if (b < others) f(topk_key(score[i][c], b));
      }
  };
  uint64_t mine = 0;
  for (int from = tid * EACH; from < others; from += BATCH * STEP) {
    load(from);
    each(from, [&](uint64_t key) { mine = key > mine ? key : mine; });
  }
  s.best[tid] = mine;
  if (tid == 0) s.n_candidates = 0;
  __syncthreads();
  if (others <= TOPK_THREADS) {  // one block a thread
    rank_keys(s.best, others, room, s);
    return;
  }
  // 32 groups of four threads: the room-th of their best keys is a lower bound of the room-th key, and what reaches it
  // lies in room groups. Each warp finds it for itself.
  int lane = tid % 32;
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
  if (mine >= bound)
    for (int from = tid * EACH; from < others; from += BATCH * STEP) {
      if (others > BATCH * STEP) load(from);
      each(from, [&](uint64_t key) {
        if (key >= bound) s.candidate[atomicAdd(&s.n_candidates, 1)] = key;
      });
    }
  __syncthreads();
  rank_keys(s.candidate, s.n_candidates, room, s);
}

// list[16] in shared memory gets the local blocks and the best of the others, ascending, padded with -1. All threads
// call it; the list can be read after it.
__device__ void choose_blocks(const float *scores, int n_blocks, int local, topk_buffer &s, int32_t *list) {
  int tid = threadIdx.x;
  if (n_blocks <= TOP_K) {
    if (tid < TOP_K) list[tid] = tid < n_blocks ? tid : -1;
    __syncthreads();
    return;
  }
  int others = n_blocks - local, room = TOP_K - local;
  if (others > 16 * TOPK_THREADS)
    largest_keys<true>(scores, others, room, s);
  else
    largest_keys<false>(scores, others, room, s);
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
