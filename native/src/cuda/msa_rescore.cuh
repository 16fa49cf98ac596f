// From the bounds of pieces to the lists: tokens that the bounds do not rule out are scored by the arithmetic of the
// exact scan, and the best blocks chosen. What is left out scores below the last block of the list, so that ties at the
// cut are all scored and the lists are those of the exact scan.
#ifndef M3_SRC_CUDA_MSA_RESCORE_CUH
#define M3_SRC_CUDA_MSA_RESCORE_CUH

#include "msa_low_bit.cuh"
#include "msa_scan.cuh"
#include "msa_topk.cuh"

namespace m3_msa {

constexpr int RESCORE_THREADS = 128, RESCORE_LOADS = 16;  // pairs of pieces that a thread looks at in one round
constexpr int RESCORE_LIST = RESCORE_THREADS * RESCORE_LOADS * 2;
constexpr int RESCORE_CANDIDATES = 512;

// Shared memory of one of CLUSTER thread blocks, which has blocks rank, rank + CLUSTER, ...
template <int CLUSTER>
struct rescore_buffer {
  static constexpr int MINE = M3_MSA_MAX_BLOCKS / CLUSTER;
  static constexpr int PAGES = MINE <= 1024 ? MINE : 1;  // kept if they fit
  uint64_t candidate[RESCORE_CANDIDATES], final[TOP_K];
  float q[HEADS * DIM], seed[RESCORE_THREADS];
  float warp_tau[RESCORE_THREADS / 32];
  uint32_t score[MINE];  // `ordered`, 0: none
  int32_t page[PAGES];
  uint32_t list[RESCORE_LIST];  // block of this thread block << 8 | piece << 4 | token of the piece, from below;
                                // pieces of which all tokens count, from above
  int32_t n_single, n_full, n_candidates, n_tokens;
};

#if M3_MSA_HOPPER

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
  static constexpr bool PAGES_KEPT = rescore_buffer<CLUSTER>::PAGES > 1;
  const rescore_args &args;
  rescore_buffer<CLUSTER> &s;
  int pair, rank, row, head, n_blocks, mine, competing, room;
  int64_t pos;
  const int32_t *table;
  float bad = 0;

  // Before the previous kernel has ended.
  __device__ rescore(const rescore_args &a, rescore_buffer<CLUSTER> &buffer, int pair_, int rank_)
      : args(a), s(buffer), pair(pair_), rank(rank_), row(pair_ / HEADS), head(pair_ % HEADS) {
    int tid = threadIdx.x;
    pos = __ldcg(args.rows.pos + row);
    table = args.rows.tables[__ldcg(args.rows.seq + row)];
    n_blocks = (int)(pos / BLOCK) + 1;
    mine = rank < n_blocks ? (n_blocks - rank + CLUSTER - 1) / CLUSTER : 0;
    // Blocks that are in the list anyway are scored only where a number may not be finite.
    competing = n_blocks <= TOP_K ? 0 : n_blocks - args.local;
    room = TOP_K - args.local;
    if (tid == 0) s.n_single = s.n_full = s.n_candidates = s.n_tokens = 0;
    for (int i = tid; i < mine; i += RESCORE_THREADS) {
      s.score[i] = 0;
      if (PAGES_KEPT) s.page[i] = __ldcg(table + i * CLUSTER + rank);
    }
  }

  __device__ int64_t key_of(int i, int token) const {  // token of block number i of this thread block
    return (int64_t)(PAGES_KEPT ? s.page[i] : __ldcg(table + i * CLUSTER + rank)) * BLOCK + token;
  }

  // The room-th largest of the seeds, each the largest of a group of them.
  __device__ float threshold() {
    int tid = threadIdx.x;
    float seed = -INFINITY;
    const float *seeds = args.seeds + (int64_t)pair * args.n_seeds;
    for (int i = tid; i < args.n_seeds; i += RESCORE_THREADS) seed = fmaxf(seed, __ldcg(seeds + i));
    *reinterpret_cast<float4 *>(s.q + tid * 4) =
        __ldcg(reinterpret_cast<const float4 *>(args.q + (int64_t)row * HEADS * DIM) + tid);
    s.seed[tid] = seed;
    __syncthreads();
    int above = 0;
#pragma unroll 8
    for (int i = 0; i < RESCORE_THREADS / 4; i++) {
      float4 x = reinterpret_cast<const float4 *>(s.seed)[i];
      above += (x.x > seed) + (x.y > seed) + (x.z > seed) + (x.w > seed);
    }
    uint32_t least = __reduce_min_sync(~0u, above < room ? ordered(seed) : ~0u);
    if (tid % 32 == 0) s.warp_tau[tid / 32] = __uint_as_float(least & 0x80000000u ? least & 0x7fffffffu : ~least);
    __syncthreads();
    return fminf(fminf(s.warp_tau[0], s.warp_tau[1]), fminf(s.warp_tau[2], s.warp_tau[3]));
  }

  // Number v of the tokens to be scored.
  __device__ uint32_t entry(int v) const {
    if (v < s.n_single) return s.list[v];
    v -= s.n_single;
    return (s.list[RESCORE_LIST - 1 - v / PIECE_TOKENS] & ~15u) | (uint32_t)(v % PIECE_TOKENS);
  }
  __device__ static int slot_of(uint32_t entry) { return (int)(entry & 15) * 8 + (int)(entry >> 4 & 7); }
  __device__ bool sees(uint32_t entry) const {
    return ((int64_t)(entry >> 8) * CLUSTER + rank) * BLOCK + slot_of(entry) <= pos;
  }
  __device__ int64_t key_at_entry(uint32_t entry) const { return key_of((int)(entry >> 8), slot_of(entry)); }
  __device__ void take(uint32_t entry, float score, float scaled) {
    bad = fmaf(score, 0.0f, bad);
    atomicMax(&s.score[entry >> 8], ordered(scaled));
  }

  template <class Key>
  __device__ void score_tokens() {
    using query = scan_query<Key, 1>;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    int n = s.n_single + s.n_full * PIECE_TOKENS;
    if (warp * 8 >= n) return;
    query q;
    q.load_from([&](int at) { return *reinterpret_cast<const float4 *>(s.q + at); }, HEADS);
    for (int i = warp * 8; i < n; i += 2 * RESCORE_THREADS / 4) {
      uint4 x[2][4];
#pragma unroll
      for (int b = 0; b < 2; b++) {
        int64_t key = key_at_entry(entry(min(i + b * (RESCORE_THREADS / 4) + g, n - 1)));
        const uint4 *from =
            reinterpret_cast<const uint4 *>(static_cast<const char *>(args.index) + key * ROW_BYTES) + t;
#pragma unroll
        for (int j = 0; j < 4; j++) x[b][j] = __ldcg(from + j * 4);
      }
#pragma unroll
      for (int b = 0; b < 2; b++) {
        float d[1][2];
        q.dots_of([&](int j) { return x[b][j]; }, d);
        if (g != head) continue;
#pragma unroll
        for (int c = 0; c < 2; c++) {
          int v = i + b * (RESCORE_THREADS / 4) + t * 2 + c;
          if (v >= n) continue;
          uint32_t e = entry(v);
          if (sees(e)) take(e, d[0][c], d[0][c] * q.unscale[0]);
        }
      }
    }
  }

  // float32 keys, a key spread over the warp: the sums of scan_query<float>.
  __device__ void score_float_tokens() {
    constexpr int EACH = 8;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = s.n_single + s.n_full * PIECE_TOKENS;
    float4 x = *reinterpret_cast<const float4 *>(s.q + head * DIM + lane * 4);
    for (int i = warp * EACH; i < n; i += RESCORE_THREADS / 32 * EACH) {
      float4 k[EACH];
      float v[EACH];
#pragma unroll
      for (int j = 0; j < EACH; j++)
        k[j] = __ldcg(reinterpret_cast<const float4 *>(static_cast<const char *>(args.index) +
                                                       key_at_entry(entry(min(i + j, n - 1))) * DIM * 4) +
                      lane);
#pragma unroll
      for (int j = 0; j < EACH; j++)
        v[j] = fmaf(x.w, k[j].w, fmaf(x.z, k[j].z, fmaf(x.y, k[j].y, x.x * k[j].x)));
#pragma unroll
      for (int o = 16; o >= 1; o /= 2)
#pragma unroll
        for (int j = 0; j < EACH; j++) v[j] += __shfl_xor_sync(~0u, v[j], o);
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        if (lane != j || i + j >= n) continue;
        uint32_t e = entry(i + j);
        if (sees(e)) take(e, v[j], v[j]);
      }
    }
  }

  // The tokens whose upper bounds reach `tau`, those of pieces [first, first + RESCORE_LIST) of this thread block.
  __device__ void find(int first, const float4 (&bound)[RESCORE_LOADS], float tau) {
#pragma unroll
    for (int k = 0; k < RESCORE_LOADS; k++) {
      int i = first / 2 + k * RESCORE_THREADS + (int)threadIdx.x;
      if (i >= mine * (PIECES / 2)) continue;
      float limit = (i / (PIECES / 2)) * CLUSTER + rank < competing ? tau : UNBOUNDED * 0.99f;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float most = half ? bound[k].z : bound[k].x, next = half ? bound[k].w : bound[k].y;
        if (!(most >= limit)) continue;
        uint32_t e = (uint32_t)(i / (PIECES / 2)) << 8 | (uint32_t)(i % (PIECES / 2) * 2 + half) << 4 |
                     (__float_as_uint(most) & 15);
        if (next >= limit)
          s.list[RESCORE_LIST - 1 - atomicAdd(&s.n_full, 1)] = e;
        else
          s.list[atomicAdd(&s.n_single, 1)] = e;
      }
    }
  }

  // The room largest keys of this thread block's blocks.
  __device__ void best_blocks(uint64_t *chosen) {
    int tid = threadIdx.x;
    auto key = [&](int i) {
      int block = i * CLUSTER + rank;
      return block < competing && s.score[i] ? (uint64_t)s.score[i] << 32 | (uint32_t)~block : 0;
    };
    for (int i = tid; i < mine; i += RESCORE_THREADS) {
      uint64_t x = key(i);
      if (!x) continue;
      int at = atomicAdd(&s.n_candidates, 1);
      if (at < RESCORE_CANDIDATES) s.candidate[at] = x;
    }
    __syncthreads();
    int n = s.n_candidates;
    if (n <= RESCORE_CANDIDATES) {
      rank_largest(s.candidate, n, room, chosen);
      return;
    }
    // Some at a time, with the best so far.
    constexpr int STEP = RESCORE_CANDIDATES - TOP_K;
    if (tid < TOP_K) chosen[tid] = 0;
    for (int first = 0; first < mine; first += STEP) {
      __syncthreads();
      if (tid == 0) s.n_candidates = 0;
      __syncthreads();
      if (tid < TOP_K && chosen[tid]) s.candidate[atomicAdd(&s.n_candidates, 1)] = chosen[tid];
      for (int i = first + tid; i < min(first + STEP, mine); i += RESCORE_THREADS)
        if (key(i)) s.candidate[atomicAdd(&s.n_candidates, 1)] = key(i);
      __syncthreads();
      rank_largest(s.candidate, s.n_candidates, room, chosen);
    }
  }

  // list[16] gets the list, in all thread blocks of the cluster. chosen: [16] in shared memory that the others read;
  // the thread block must not end, nor others write it, before the cluster meets again.
  __device__ void choose(uint64_t *chosen, int32_t *list) {
    int tid = threadIdx.x;
    const float4 *bounds =
        reinterpret_cast<const float4 *>(args.bounds + (int64_t)pair * args.rows.max_blocks * PIECES);
    float tau = 0;
    for (int first = 0; first == 0 || first < mine * PIECES; first += RESCORE_LIST) {
      float4 bound[RESCORE_LOADS];
#pragma unroll
      for (int k = 0; k < RESCORE_LOADS; k++) {
        int i = first / 2 + k * RESCORE_THREADS + tid;
        if (i < mine * (PIECES / 2))
          bound[k] = __ldcg(bounds + (i / (PIECES / 2) * CLUSTER + rank) * (PIECES / 2) + i % (PIECES / 2));
      }
      if (first == 0)
        tau = threshold();
      else
        __syncthreads();  // the list has been read
      if (first && tid == 0) s.n_single = s.n_full = 0;
      if (first) __syncthreads();
      find(first, bound, tau);
      __syncthreads();
      if (tid == 0) s.n_tokens += s.n_single + s.n_full * PIECE_TOKENS;
      switch (args.index_type) {
        case M3_TYPE_BF16: score_tokens<__nv_bfloat16>(); break;
        case M3_TYPE_F16: score_tokens<__half>(); break;
        default: score_float_tokens();
      }
    }
    __syncthreads();
    if (bad != 0) *args.not_finite = 1;
    if (tid == 0 && args.rescored) atomicAdd(reinterpret_cast<unsigned long long *>(args.rescored), s.n_tokens);
    if (n_blocks <= TOP_K) {
      if (tid < TOP_K) list[tid] = tid < n_blocks ? tid : -1;
      __syncthreads();
      return;
    }
    best_blocks(CLUSTER == 1 ? s.final : chosen);
    if constexpr (CLUSTER > 1) {
      if (tid == 0) s.n_candidates = 0;
      cluster_sync();
      for (int i = tid; i < CLUSTER * TOP_K; i += RESCORE_THREADS) {
        uint64_t key = cluster_load(&chosen[i % TOP_K], i / TOP_K);
        if (key) s.candidate[atomicAdd(&s.n_candidates, 1)] = key;
      }
      __syncthreads();
      rank_largest(s.candidate, s.n_candidates, room, s.final);
    }
    if (tid < room) {
      uint64_t key = s.final[tid];
      int at = 0;
#pragma unroll
      for (int j = 0; j < TOP_K; j++) at += j < room && topk_id(s.final[j]) < topk_id(key);
      list[at] = topk_id(key);
    } else if (tid < TOP_K) {
      list[tid] = competing + tid - room;
    }
    __syncthreads();
  }
};

#endif

}  // namespace m3_msa

#endif
