// From the bounds of pieces to the lists: tokens that the bounds do not rule out are scored by the arithmetic of the
// exact scan, and the best blocks chosen. What is left out scores below the last block of the list, so that ties at the
// cut are all scored and the lists are those of the exact scan.
#ifndef M3_SRC_CUDA_MSA_RESCORE_CUH
#define M3_SRC_CUDA_MSA_RESCORE_CUH

#include "msa_low_bit.cuh"
#include "msa_scan.cuh"
#include "msa_topk.cuh"

namespace m3_msa {

constexpr int RESCORE_THREADS = 128, RESCORE_WARPS = RESCORE_THREADS / 32;
constexpr int RESCORE_LOADS = 4;         // block bounds that a thread loads at once
constexpr int RESCORE_QUADS = 4;         // of blocks, whose pieces a warp looks at at once
constexpr int RESCORE_LIST = 1024;       // tokens of a warp
constexpr int RESCORE_CANDIDATES = 512;  // blocks

// Shared memory of one of CLUSTER thread blocks. Eight blocks in a row are one thread block's, the next eight the
// next one's.
template <int CLUSTER>
struct rescore_buffer {
  static constexpr int MINE = M3_MSA_MAX_BLOCKS / CLUSTER;
  static constexpr int PAGES = MINE <= 1024 ? MINE : 1;  // kept if they fit
  uint64_t candidate[RESCORE_CANDIDATES], chosen[TOP_K];
  uint64_t gathered[CLUSTER * TOP_K];  // of the thread blocks of the cluster
  float q[HEADS * DIM], seed[RESCORE_THREADS];
  float warp_tau[RESCORE_WARPS];
  uint32_t list[RESCORE_WARPS][RESCORE_LIST];  // block of this thread block << 8 | piece << 4 | token of the piece
  uint16_t block[RESCORE_WARPS][MINE / RESCORE_WARPS];
  uint32_t score[MINE];  // `ordered`, 0: none
  int32_t page[PAGES];
  uint32_t candidates[RESCORE_CANDIDATES];
  int32_t n_gathered[CLUSTER], n_candidates, n_all;
};

#if M3_MSA_HOPPER

__device__ __forceinline__ float from_ordered(uint32_t x) {
  return __uint_as_float(x & 0x80000000u ? x & 0x7fffffffu : ~x);
}

// chosen gets the `room` largest of n keys (shared memory), none of them 0, in order, then zeros. All threads call it.
__device__ __forceinline__ void rank_largest(const uint64_t *keys, int n, int room, uint64_t *chosen) {
  int tid = threadIdx.x;
  if (tid < TOP_K) chosen[tid] = 0;
  __syncthreads();
  for (int i = tid; i < n; i += RESCORE_THREADS) {
    uint64_t key = keys[i];
    int above = 0;
#pragma unroll 4
    for (int j = 0; j < n; j++) above += keys[j] > key;
    if (above < room) chosen[above] = key;
  }
  __syncthreads();
}

// One (row, head) of a thread block.
template <int CLUSTER>
struct rescore {
  using buffer = rescore_buffer<CLUSTER>;
  static constexpr bool PAGES_KEPT = buffer::PAGES > 1;
  const rescore_args &args;
  buffer &s;
  int pair, rank, row, head, n_blocks, mine, competing, room;
  int64_t pos;
  const int32_t *table;
  float tau = 0, cut = 0, bad = 0;  // cut: what an exact score in the list cannot be below

  // Before the previous kernel has ended.
  __device__ rescore(const rescore_args &a, buffer &b, int pair_, int rank_)
      : args(a), s(b), pair(pair_), rank(rank_), row(pair_ / HEADS), head(pair_ % HEADS) {
    int tid = threadIdx.x;
    pos = __ldcg(args.rows.pos + row);
    table = args.rows.tables[__ldcg(args.rows.seq + row)];
    n_blocks = (int)(pos / BLOCK) + 1;
    int eights = (n_blocks + 7) / 8;
    mine = rank < eights ? (eights - rank + CLUSTER - 1) / CLUSTER * 8 : 0;
    // Blocks that are in the list anyway are scored only where a number may not be finite.
    competing = n_blocks <= TOP_K ? 0 : n_blocks - args.local;
    room = TOP_K - args.local;
    if (tid == 0) s.n_candidates = s.n_all = 0;
    for (int i = tid; i < mine; i += RESCORE_THREADS) {
      s.score[i] = 0;
      if (PAGES_KEPT && block_of(i) < n_blocks) s.page[i] = __ldcg(table + block_of(i));
    }
  }

  __device__ int block_of(int i) const { return (i / 8 * CLUSTER + rank) * 8 + i % 8; }
  __device__ static int slot_of(uint32_t entry) { return (int)(entry & 15) * 8 + (int)(entry >> 4 & 7); }
  __device__ bool sees(uint32_t entry) const {
    return (int64_t)block_of((int)(entry >> 8)) * BLOCK + slot_of(entry) <= pos;
  }
  __device__ int64_t key_of(uint32_t entry) const {
    int i = (int)(entry >> 8);
    return (int64_t)(PAGES_KEPT ? s.page[i] : __ldcg(table + block_of(i))) * BLOCK + slot_of(entry);
  }

  // The room-th largest of the seeds, each the largest of a group of them.
  __device__ void find_threshold(float seed) {
    s.seed[threadIdx.x] = seed;
    __syncthreads();
    int above = 0;
#pragma unroll 8
    for (int i = 0; i < RESCORE_THREADS / 4; i++) {
      float4 x = reinterpret_cast<const float4 *>(s.seed)[i];
      above += (x.x > seed) + (x.y > seed) + (x.z > seed) + (x.w > seed);
    }
    uint32_t least = __reduce_min_sync(~0u, above < room ? ordered(seed) : ~0u);
    if (threadIdx.x % 32 == 0) s.warp_tau[threadIdx.x / 32] = from_ordered(least);
    __syncthreads();
    tau = fminf(fminf(s.warp_tau[0], s.warp_tau[1]), fminf(s.warp_tau[2], s.warp_tau[3]));
    cut = tau > -INFINITY ? fmaf(fabsf(tau), -2e-6f, tau) : tau;
  }

  __device__ float limit(int i) const { return block_of(i) < competing ? tau : UNBOUNDED * 0.99f; }

  __device__ void take(uint32_t entry, float score, float scaled) {
    if (!sees(entry)) return;
    bad = fmaf(score, 0.0f, bad);
    int i = (int)(entry >> 8);
    if (!(scaled >= cut) || block_of(i) >= competing) return;
    if (atomicMax(&s.score[i], ordered(scaled)) == 0) {
      int at = atomicAdd(&s.n_candidates, 1);
      if (at < RESCORE_CANDIDATES) s.candidates[at] = (uint32_t)i;
    }
  }

  // Queries and scores of a type of keys.
  template <class Key, class = void>
  struct scorer {
    scan_query<Key, 1> q;
    __device__ void load(const rescore &r) {
      q.load_from([&](int at) { return *reinterpret_cast<const float4 *>(r.s.q + at); }, HEADS);
    }
    __device__ void score(rescore &r, const uint32_t *list, int n) const {
      constexpr int BATCHES = 2;
      int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
      for (int i = 0; i < n; i += BATCHES * 8) {
        uint4 x[BATCHES][4];
#pragma unroll
        for (int b = 0; b < BATCHES; b++) {
          const uint4 *from = reinterpret_cast<const uint4 *>(static_cast<const char *>(r.args.index) +
                                                              r.key_of(list[min(i + b * 8 + g, n - 1)]) * ROW_BYTES) +
                              t;
#pragma unroll
          for (int j = 0; j < 4; j++) x[b][j] = __ldcg(from + j * 4);
        }
#pragma unroll
        for (int b = 0; b < BATCHES; b++) {
          float d[1][2];
          q.dots_of([&](int j) { return x[b][j]; }, d);
          if (g != r.head) continue;
#pragma unroll
          for (int c = 0; c < 2; c++) {
            int v = i + b * 8 + t * 2 + c;
            if (v < n) r.take(list[v], d[0][c], d[0][c] * q.unscale[0]);
          }
        }
      }
    }
  };
  // A key spread over the warp: the sums of scan_query<float>.
  template <class Unused>
  struct scorer<float, Unused> {
    float4 x;
    __device__ void load(const rescore &r) {
      x = *reinterpret_cast<const float4 *>(r.s.q + r.head * DIM + threadIdx.x % 32 * 4);
    }
    __device__ void score(rescore &r, const uint32_t *list, int n) const {
      constexpr int EACH = 8;
      int lane = threadIdx.x & 31;
      for (int i = 0; i < n; i += EACH) {
        float4 k[EACH];
        float v[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++)
          k[j] = __ldcg(reinterpret_cast<const float4 *>(static_cast<const char *>(r.args.index) +
                                                         r.key_of(list[min(i + j, n - 1)]) * DIM * 4) +
                        lane);
#pragma unroll
        for (int j = 0; j < EACH; j++) v[j] = fmaf(x.w, k[j].w, fmaf(x.z, k[j].z, fmaf(x.y, k[j].y, x.x * k[j].x)));
#pragma unroll
        for (int o = 16; o >= 1; o /= 2)
#pragma unroll
          for (int j = 0; j < EACH; j++) v[j] += __shfl_xor_sync(~0u, v[j], o);
        float mine = v[0];
#pragma unroll
        for (int j = 1; j < EACH; j++) mine = lane == j ? v[j] : mine;
        if (lane < EACH && i + lane < n) r.take(list[i + lane], mine, mine);
      }
    }
  };

  // Tokens that the bounds do not rule out are scored, those of each warp's blocks by itself.
  template <class Key>
  __device__ void score_blocks() {
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, n_found = 0, n_list = 0, n_scored = 0;
    uint32_t below = (1u << lane) - 1;
    uint32_t *list = s.list[warp];
    uint16_t *found = s.block[warp];
    const float *block_bounds = args.block_bounds + (int64_t)pair * args.rows.max_blocks;
    const piece_bounds *bounds = args.bounds + (int64_t)pair * args.rows.max_blocks * PIECES;
    float seed = -INFINITY, seeds[MOST_SEEDS / RESCORE_THREADS];
    float4 q = __ldcg(reinterpret_cast<const float4 *>(args.q + (int64_t)row * HEADS * DIM) + tid);
#pragma unroll
    for (int j = 0; j < MOST_SEEDS / RESCORE_THREADS; j++) {
      int i = tid + j * RESCORE_THREADS;
      seeds[j] = i < args.n_seeds ? __ldcg(args.seeds + (int64_t)pair * args.n_seeds + i) : -INFINITY;
    }
    for (int first = 0; first == 0 || first < mine; first += RESCORE_LOADS * RESCORE_THREADS) {
      float bound[RESCORE_LOADS];
      auto number = [&](int k) { return first + k * RESCORE_THREADS + lane * RESCORE_WARPS + warp; };
#pragma unroll
      for (int k = 0; k < RESCORE_LOADS; k++) {
        int i = number(k);
        bound[k] = i < mine && block_of(i) < n_blocks ? __ldcg(block_bounds + block_of(i)) : NAN;
      }
      if (first == 0) {
        *reinterpret_cast<float4 *>(s.q + tid * 4) = q;
#pragma unroll
        for (int j = 0; j < MOST_SEEDS / RESCORE_THREADS; j++) seed = fmaxf(seed, seeds[j]);
        find_threshold(seed);
      }
#pragma unroll
      for (int k = 0; k < RESCORE_LOADS; k++) {
        bool survives = bound[k] >= limit(number(k));
        uint32_t all = __ballot_sync(~0u, survives);
        if (survives) found[n_found + __popc(all & below)] = (uint16_t)number(k);
        n_found += __popc(all);
      }
    }
    __syncwarp();
    scorer<Key> score;
    piece_bounds pieces[RESCORE_QUADS];
    auto look = [&](int first) {
#pragma unroll
      for (int k = 0; k < RESCORE_QUADS; k++) {
        int at = first + k * 4 + lane / PIECES;
        pieces[k] = at < n_found ? __ldcg(bounds + block_of(found[at]) * PIECES + lane % PIECES) : float2{NAN, NAN};
      }
    };
    if (n_found) {
      look(0);
      score.load(*this);
    }
    for (int first = 0; first < n_found; first += RESCORE_QUADS * 4) {
      if (first) look(first);
#pragma unroll
      for (int k = 0; k < RESCORE_QUADS; k++) {
        int i = found[min(first + k * 4 + lane / PIECES, n_found - 1)];
        float least = limit(i);
        bool full = pieces[k].y >= least, single = pieces[k].x >= least && !full;
        uint32_t entry =
            (uint32_t)i << 8 | (uint32_t)(lane % PIECES) << 4 | (__float_as_uint(pieces[k].x) & (PIECE_TOKENS - 1));
        uint32_t singles = __ballot_sync(~0u, single), fulls = __ballot_sync(~0u, full);
        if (single) list[n_list + __popc(singles & below)] = entry;
        n_list += __popc(singles);
        if (full)
          for (int j = 0; j < PIECE_TOKENS; j++)
            list[n_list + __popc(fulls & below) * PIECE_TOKENS + j] = (entry & ~15u) | (uint32_t)j;
        n_list += __popc(fulls) * PIECE_TOKENS;
        if (n_list > RESCORE_LIST - 32 * PIECE_TOKENS) {
          __syncwarp();
          score.score(*this, list, n_list);
          __syncwarp();
          n_scored += n_list;
          n_list = 0;
        }
      }
    }
    __syncwarp();
    if (n_list) score.score(*this, list, n_list);
    n_scored += n_list;
    if (args.rescored && lane == 0)
      atomicAdd(reinterpret_cast<unsigned long long *>(args.rescored), (unsigned long long)n_scored);
    if (bad != 0) atomicMin(args.not_finite, args.code);
    __syncthreads();
  }

  __device__ uint64_t key_of_block(int i) const { return (uint64_t)s.score[i] << 32 | (uint32_t)~block_of(i); }

  // The room largest keys of this thread block's blocks, as far as there are, in keys: how many.
  __device__ int best_blocks(const uint64_t *&keys) {
    int tid = threadIdx.x, n = s.n_candidates;
    if (n <= RESCORE_CANDIDATES) {
      for (int i = tid; i < n; i += RESCORE_THREADS) s.candidate[i] = key_of_block((int)s.candidates[i]);
      __syncthreads();
      keys = s.candidate;
      if (n <= TOP_K) return n;
      rank_largest(s.candidate, n, room, s.chosen);
    } else {
      // Some at a time, with the best so far.
      constexpr int STEP = RESCORE_CANDIDATES - TOP_K;
      if (tid < TOP_K) s.chosen[tid] = 0;
      for (int first = 0; first < mine; first += STEP) {
        __syncthreads();
        if (tid == 0) s.n_candidates = 0;
        __syncthreads();
        if (tid < TOP_K && s.chosen[tid]) s.candidate[atomicAdd(&s.n_candidates, 1)] = s.chosen[tid];
        for (int i = first + tid; i < min(first + STEP, mine); i += RESCORE_THREADS)
          if (s.score[i]) s.candidate[atomicAdd(&s.n_candidates, 1)] = key_of_block(i);
        __syncthreads();
        rank_largest(s.candidate, s.n_candidates, room, s.chosen);
      }
    }
    keys = s.chosen;
    return room;
  }

  // The list of n keys, by all threads. Few are one warp's work.
  __device__ void list_of(const uint64_t *keys, int n, int32_t *list) {
    int tid = threadIdx.x;
    if (n > 32) {
      rank_largest(keys, n, room, s.chosen);
      keys = s.chosen;
      n = room;
    }
    if (tid < 32) {
      if (tid < room) list[tid] = tid;  // where too few scores are numbers
      __syncwarp();
      uint64_t key = tid < n ? keys[tid] : 0;
      int above = 0, at = 0;
      for (int j = 0; j < n; j++) above += __shfl_sync(~0u, (unsigned long long)key, j) > key;
      uint32_t taken = __ballot_sync(~0u, tid < n && above < room);
      for (int j = 0; j < n; j++)
        at += topk_id(__shfl_sync(~0u, (unsigned long long)key, j)) < topk_id(key) && (taken >> j & 1);
      if (taken >> tid & 1) list[at] = topk_id(key);
      if (tid >= room && tid < TOP_K) list[tid] = competing + tid - room;
    }
    __syncthreads();
  }

  // list[16] gets the list, in all thread blocks of the cluster.
  __device__ void choose(int32_t *list) {
    int tid = threadIdx.x;
    switch (args.index_type) {
      case M3_TYPE_BF16: score_blocks<__nv_bfloat16>(); break;
      case M3_TYPE_F16: score_blocks<__half>(); break;
      default: score_blocks<float>();
    }
    if (n_blocks <= TOP_K) {
      if (tid < TOP_K) list[tid] = tid < n_blocks ? tid : -1;
      __syncthreads();
      return;
    }
    const uint64_t *keys;
    int n = best_blocks(keys);
    if constexpr (CLUSTER > 1) {
      for (int i = tid; i < n * CLUSTER; i += RESCORE_THREADS)
        cluster_store(&s.gathered[rank * TOP_K + i / CLUSTER], i % CLUSTER, keys[i / CLUSTER]);
      if (tid < CLUSTER) cluster_store(&s.n_gathered[rank], tid, n);
      cluster_sync();
      for (int i = tid; i < CLUSTER * TOP_K; i += RESCORE_THREADS)
        if (i % TOP_K < s.n_gathered[i / TOP_K]) s.candidate[atomicAdd(&s.n_all, 1)] = s.gathered[i];
      __syncthreads();
      keys = s.candidate;
      n = s.n_all;
    }
    list_of(keys, n, list);
  }
};

#endif

}  // namespace m3_msa

#endif
