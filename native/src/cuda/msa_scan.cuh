// Decode index scan: one pass over the index keys of each sequence, block maxima of all index heads of its rows.
#ifndef M3_SRC_CUDA_MSA_SCAN_CUH
#define M3_SRC_CUDA_MSA_SCAN_CUH

#include <math.h>

#include <type_traits>

#include "msa_device.cuh"
#include "msa_kernels.h"

namespace m3_msa {

constexpr int SCAN_WARPS = 4, SCAN_THREADS = SCAN_WARPS * 32, SCAN_STAGES = 2;
constexpr int64_t SCAN_FEW = 2048;     // blocks of all sequences
constexpr int SCAN_LOAD_BYTES = 8192;  // of one stage
constexpr int QUARTER = BLOCK / 4;     // tokens

struct scan_args {
  m3_msa_rows rows;
  const void *index;
  const float *q;
  float *scores;   // [n, HEADS, stride] maxima of blocks
  int64_t stride;  // floats
  int32_t *not_finite, code;
};

#if M3_MSA_HOPPER

// Queries of up to ROWS rows in a warp's registers, made ready for dot products with keys of a type.
template <class Key, int ROWS>
struct scan_query {
  static constexpr int N = ROWS * HEADS, TILES = N == 4 ? 1 : N == 8 ? 2 : 3, OUT = N == 16 ? 2 : 1, LANES = 4;
  // q * scale = hi + mid + lo. Rows of the tiles: N = 4: hi, mid, lo, 0; 8: hi, mid | lo, 0; 16: hi | mid | lo.
  // Channels 32 i + 8 t + {0..3} go into step 2 i, + {4..7} into step 2 i + 1: 16 bytes of a key are one thread's.
  uint32_t a[TILES][8][4];
  float unscale[OUT];  // of the lane's queries `of(i)`

  // The lane's dot products are with queries of(0) and, if N is 16, of(1).
  static __device__ int of(int i) { return ((threadIdx.x & 31) >> 2) % N + i * 8; }

  // q: [n, DIM], n up to N; the rest is zero.
  __device__ void load(const float *q, int n) {
    load_from([&](int at) { return __ldcg(reinterpret_cast<const float4 *>(q + at)); }, n);
  }
  // The same; fetch(at) gives numbers [at, at + 4) of q.
  template <class Fetch>
  __device__ void load_from(const Fetch &fetch, int n) {
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int o = 0; o < OUT; o++) {
      float4 x[8];
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 8; i++)
        x[i] = of(o) < n ? fetch(of(o) * DIM + (i >> 1) * 32 + t * 8 + (i & 1) * 4) : float4{0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float m = fmaxf(fmaxf(fabsf(x[i].x), fabsf(x[i].y)), fmaxf(fabsf(x[i].z), fabsf(x[i].w)));
        largest = max(largest, __float_as_uint(m));
      }
      largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
      float scale = split_scale<Key>(largest);
      unscale[o] = 1.0f / scale;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        uint32_t lo[3], hi[3];
        split_pair<Key>(x[i].x * scale, x[i].y * scale, lo);
        split_pair<Key>(x[i].z * scale, x[i].w * scale, hi);
        if (N == 4) {
          a[0][i][0] = g < 4 ? lo[0] : lo[1];
          a[0][i][2] = g < 4 ? hi[0] : hi[1];
          a[0][i][1] = g < 4 ? lo[2] : 0;
          a[0][i][3] = g < 4 ? hi[2] : 0;
        } else if (N == 8) {
          a[0][i][0] = lo[0], a[0][i][1] = lo[1], a[TILES - 1][i][0] = lo[2], a[TILES - 1][i][1] = 0;
          a[0][i][2] = hi[0], a[0][i][3] = hi[1], a[TILES - 1][i][2] = hi[2], a[TILES - 1][i][3] = 0;
        } else {
#pragma unroll
          for (int p = 0; p < TILES; p++) a[p][i][o] = lo[p], a[p][i][o + 2] = hi[p];
        }
      }
    }
  }

  // Dot products of 8 keys: out[i][c] is that of query of(i) and key 2 t + c. Always (hi + lo) + mid.
  __device__ void dots(const char *keys, float (&out)[OUT][2]) const {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint4 *from = reinterpret_cast<const uint4 *>(keys + g * ROW_BYTES + t * 16);
    dots_of([&](int i) { return from[i * 4]; }, out);
  }
  // The same; fetch(i) gives 16-byte chunk 4 i + t of the lane's key g.
  template <class Fetch>
  __device__ void dots_of(const Fetch &fetch, float (&out)[OUT][2]) const {
    float d[TILES][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint4 x = fetch(i);
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        mma<Key>(d[tile], a[tile][2 * i], x.x, x.y);
        mma<Key>(d[tile], a[tile][2 * i + 1], x.z, x.w);
      }
    }
#pragma unroll
    for (int c = 0; c < 2; c++) {
      if (N == 4) {
        float s = d[0][c] + d[0][c + 2];
        out[0][c] = s + __shfl_xor_sync(~0u, s, 16);
      } else if (N == 8) {
        out[0][c] = (d[0][c] + d[TILES - 1][c]) + d[0][c + 2];
      } else {
#pragma unroll
        for (int o = 0; o < OUT; o++) out[o][c] = (d[0][c + 2 * o] + d[TILES - 1][c + 2 * o]) + d[TILES / 2][c + 2 * o];
      }
    }
  }
};

// float32 keys: a key is spread over the warp, plain multiplications.
template <int ROWS>
struct scan_query<float, ROWS> {
  static constexpr int N = ROWS * HEADS, OUT = 1, LANES = 32 / N;
  float4 x[N];
  float unscale[OUT] = {1};

  static __device__ int of(int) { return (threadIdx.x & 31) / (32 / N); }
  __device__ void load(const float *q, int n) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < N; h++)
      x[h] = h < n ? __ldcg(reinterpret_cast<const float4 *>(q + h * DIM) + lane) : float4{0, 0, 0, 0};
  }
  // The dot product of one key with query of(0).
  __device__ float dot(const char *key) const {
    int lane = threadIdx.x & 31;
    float4 k = reinterpret_cast<const float4 *>(key)[lane];
    float v[N];
#pragma unroll
    for (int h = 0; h < N; h++) v[h] = fmaf(x[h].w, k.w, fmaf(x[h].z, k.z, fmaf(x[h].y, k.y, x[h].x * k.x)));
#pragma unroll
    for (int n = N / 2, off = 16; n >= 1; n /= 2, off /= 2)
#pragma unroll
      for (int i = 0; i < n; i++) {
        float keep = lane & off ? v[i + n] : v[i], send = lane & off ? v[i] : v[i + n];
        v[i] = keep + __shfl_xor_sync(~0u, send, off);
      }
#pragma unroll
    for (int off = 16 / N; off >= 1; off /= 2) v[0] += __shfl_xor_sync(~0u, v[0], off);
    return v[0];
  }
};

#endif

// The blocks of all sequences are shared out among the thread blocks in one row, a quarter of a block to each warp: a
// page is read as a whole, and few thread blocks see two sequences.
template <class Key, int ROWS>
__global__ void __launch_bounds__(SCAN_THREADS) scan_kernel(const __grid_constant__ scan_args args) {
#if M3_MSA_HOPPER
  using query = scan_query<Key, ROWS>;
  constexpr int KEYS = SCAN_LOAD_BYTES / (DIM * (int)sizeof(Key)), LOADS = QUARTER / KEYS;
  extern __shared__ __align__(128) char memory[];
  __shared__ float part_max[2][SCAN_WARPS][query::N];
  __shared__ uint64_t full[SCAN_WARPS][SCAN_STAGES];
  __shared__ const int32_t *table[M3_MSA_MAX_ROWS];
  __shared__ int32_t last[M3_MSA_MAX_ROWS], start[M3_MSA_MAX_ROWS + 1];
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, t = lane & 3;
  int per = args.rows.per_sequence, n_seq = args.rows.n / per;
  launch_next();
  if (tid < SCAN_WARPS * SCAN_STAGES) barrier_init(&full[0][0] + tid, 1);
  barrier_init_done();
  if (tid < args.rows.n) last[tid] = (int32_t)__ldcg(args.rows.pos + tid);
  if (tid < n_seq) table[tid] = args.rows.tables[__ldcg(args.rows.seq + tid * per)];
  __syncthreads();
  if (tid == 0) {
    int sum = 0;
    for (int s = 0; s < n_seq; s++) {
      int most = 0;
      for (int r = 0; r < per; r++) most = max(most, last[s * per + r]);
      start[s] = sum;
      sum += most / BLOCK + 1;
    }
    start[n_seq] = sum;
  }
  __syncthreads();
  int64_t total = start[n_seq];
  int begin = (int)(total * blockIdx.x / gridDim.x), end = (int)(total * (blockIdx.x + 1) / gridDim.x);
  char *stages = memory + warp * SCAN_STAGES * SCAN_LOAD_BYTES;
  uint64_t *ready = full[warp];

  // The pages of 32 blocks at a time lie in the lanes of a warp.
  int n_loads = (end - begin) * LOADS, chunk = -1;
  int32_t page = 0;
  uint32_t settled = 0;  // blocks that the previous kernel does not write
  auto find = [&](int load) {
    int item = load / LOADS;
    if (item / 32 != chunk) {
      chunk = item / 32;
      int mine = begin + chunk * 32 + lane, s = 0;
      bool early = false;
      if (mine < end) {
        while (mine >= start[s + 1]) s++;
        int block = mine - start[s], least = last[s * per];
        for (int r = 1; r < per; r++) least = min(least, last[s * per + r]);
        early = block < least / BLOCK;
        page = __ldcg(table[s] + block);
      }
      settled = __ballot_sync(~0u, early);
    }
    int64_t at = (int64_t)__shfl_sync(~0u, page, item % 32) * 4 + warp;
    return static_cast<const char *>(args.index) + (at * LOADS + load % LOADS) * SCAN_LOAD_BYTES;
  };
  auto issue = [&](int load) {
    const char *from = find(load);
    int stage = load % SCAN_STAGES;
    if (lane == 0) {
      barrier_expect(&ready[stage], SCAN_LOAD_BYTES);
      bulk_load(stages + stage * SCAN_LOAD_BYTES, from, SCAN_LOAD_BYTES, &ready[stage]);
    }
  };
  int early = 0;
  for (; early < SCAN_STAGES && early < n_loads; early++) {
    find(early);
    if (!(settled >> early / LOADS & 1)) break;
    issue(early);
  }
  wait_previous();
  for (; early < SCAN_STAGES && early < n_loads; early++) issue(early);

  query q;
  float bad = 0;
  int seq = -1, done = 0;
  int32_t seen[query::OUT];
  for (int item = begin; item < end; item++) {
    if (seq < 0 || item >= start[seq + 1]) {
      do seq++;
      while (item >= start[seq + 1]);
      q.load(args.q + (int64_t)seq * per * HEADS * DIM, per * HEADS);
#pragma unroll
      for (int o = 0; o < query::OUT; o++) seen[o] = last[seq * per + min(query::of(o) / HEADS, per - 1)];
    }
    int block = item - start[seq];
    float best[query::OUT];
#pragma unroll
    for (int o = 0; o < query::OUT; o++) best[o] = -INFINITY;
    auto take = [&](int o, float s, int at) {
      if (at <= seen[o]) {
        best[o] = fmaxf(best[o], s);
        bad = fmaf(s, 0.0f, bad);
      }
    };
#pragma unroll 1
    for (int load = 0; load < LOADS; load++, done++) {
      int stage = done % SCAN_STAGES, at = block * BLOCK + warp * QUARTER + load * KEYS;
      barrier_wait(&ready[stage], done / SCAN_STAGES & 1);
      const char *keys = stages + stage * SCAN_LOAD_BYTES;
      if constexpr (std::is_same<Key, float>::value) {
#pragma unroll 4
        for (int i = 0; i < KEYS; i++) take(0, q.dot(keys + i * DIM * 4), at + i);
      } else {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
          float s[query::OUT][2];
          q.dots(keys + n * 8 * ROW_BYTES, s);
#pragma unroll
          for (int o = 0; o < query::OUT; o++)
#pragma unroll
            for (int c = 0; c < 2; c++) take(o, s[o][c], at + n * 8 + t * 2 + c);
        }
      }
      __syncwarp();
      if (done + SCAN_STAGES < n_loads) issue(done + SCAN_STAGES);
    }
    int flip = item & 1;
#pragma unroll
    for (int o = 0; o < query::OUT; o++) {
      if (!std::is_same<Key, float>::value) {
        best[o] = fmaxf(best[o], __shfl_xor_sync(~0u, best[o], 1));
        best[o] = fmaxf(best[o], __shfl_xor_sync(~0u, best[o], 2));
      }
      if (lane % query::LANES == 0) part_max[flip][warp][query::of(o)] = best[o] * q.unscale[o];
    }
    __syncthreads();
    if (tid < per * HEADS) {
      float m = part_max[flip][0][tid];
#pragma unroll
      for (int w = 1; w < SCAN_WARPS; w++) m = fmaxf(m, part_max[flip][w][tid]);
      args.scores[((int64_t)seq * per * HEADS + tid) * args.stride + block] = m;
    }
  }
  if (bad != 0) atomicMin(args.not_finite, args.code);
#endif
}

}  // namespace m3_msa

#endif
