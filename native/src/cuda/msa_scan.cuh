// Decode index scan: one pass over the index keys of each sequence, block maxima of all index heads of its rows.
#ifndef M3_SRC_CUDA_MSA_SCAN_CUH
#define M3_SRC_CUDA_MSA_SCAN_CUH

#include <math.h>

#include <type_traits>

#include "msa_device.cuh"
#include "msa_kernels.h"

namespace m3_msa {

constexpr int SCAN_WARPS = 4, SCAN_THREADS = SCAN_WARPS * 32;

struct scan_args {
  m3_msa_rows rows;
  const void *index;
  const float *q;
  float *scores;   // [n, HEADS, stride] maxima of units
  int64_t stride;  // floats
  int32_t *not_finite;
};

// Stages of shared memory and thread blocks of a multiprocessor: some 190 KB in flight.
template <class Key, int ROWS, int UNIT>
struct scan_shape {
  static constexpr int UNIT_BYTES = UNIT * DIM * (int)sizeof(Key);
  static constexpr int PER_SM = ROWS == 4 ? 2 : 3;
  static constexpr int STAGES = (ROWS == 4 ? 98304 : 65536) / UNIT_BYTES;
  static constexpr int SHARED = STAGES * UNIT_BYTES;
};

#if M3_MSA_HOPPER

// Queries of up to ROWS rows, made ready for dot products with keys of a type.
template <class Key, int ROWS>
struct scan_query {
  static constexpr int N = ROWS * HEADS, PITCH = DIM + 8, TILES = N == 4 ? 1 : N == 8 ? 2 : 3;
  struct shared {
    Key part[3][N][PITCH];  // q * scale = sum of the parts
    float unscale[N];
  };
  uint32_t a[TILES][8][4];  // rows of the tiles: N = 4: hi, mid, lo, 0; 8: hi, mid | lo, 0; 16: hi | mid | lo

  // The query of a lane's dot products, the first of two if N is 16.
  static __device__ int of(int lane) { return (lane >> 2) % N; }
  // q: [n, DIM], n up to N; the rest is zero.
  __device__ void split(const float *q, int n, shared &s) {
    int lane = threadIdx.x & 31;
    for (int h = threadIdx.x >> 5; h < N; h += SCAN_WARPS) {
      float4 x = h < n ? __ldcg(reinterpret_cast<const float4 *>(q + h * DIM) + lane) : float4{0, 0, 0, 0};
      float largest = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
      float scale = split_scale<Key>(__reduce_max_sync(~0u, __float_as_uint(largest)));
      uint32_t lo[3], hi[3];
      split_pair<Key>(x.x * scale, x.y * scale, lo);
      split_pair<Key>(x.z * scale, x.w * scale, hi);
#pragma unroll
      for (int p = 0; p < 3; p++) *reinterpret_cast<uint2 *>(&s.part[p][h][lane * 4]) = uint2{lo[p], hi[p]};
      if (lane == 0) s.unscale[h] = 1.0f / scale;
    }
  }
  // Channels 32 i + 8 t + {0..3} go into step 2 i, + {4..7} into step 2 i + 1, so that 16 bytes of a key are a
  // thread's.
  __device__ void load(const shared &s) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int row = tile * 16 + half * 8 + g;
#pragma unroll
        for (int i = 0; i < 8; i++) {
          uint2 x = {0, 0};
          if (row < 3 * N)
            x = *reinterpret_cast<const uint2 *>(&s.part[row / N][row % N][(i >> 1) * 32 + t * 8 + (i & 1) * 4]);
          a[tile][i][half] = x.x;
          a[tile][i][half + 2] = x.y;
        }
      }
  }
  // Dot products of 8 keys: out[i][c] is that of query g + 8 i (N = 4, 8: i = 0 only) and key 2 t + c; N = 4: the lanes
  // of g and g ^ 4 have the same. (hi + lo) + mid whatever N is.
  __device__ void dots(const char *keys, float (&out)[2][2]) const {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float d[TILES][4] = {};
    const uint4 *from = reinterpret_cast<const uint4 *>(keys + g * ROW_BYTES + t * 16);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint4 x = from[i * 4];
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        mma<Key>(d[tile], a[tile][2 * i], x.x, x.y);
        mma<Key>(d[tile], a[tile][2 * i + 1], x.z, x.w);
      }
    }
#pragma unroll
    for (int c = 0; c < 2; c++) {
      if (TILES == 1) {
        float s = d[0][c] + d[0][c + 2];
        out[0][c] = s + __shfl_xor_sync(~0u, s, 16);
        out[1][c] = 0;
      } else if (TILES == 2) {
        out[0][c] = (d[0][c] + d[TILES - 1][c]) + d[0][c + 2];
        out[1][c] = 0;
      } else {
        out[0][c] = (d[0][c] + d[TILES - 1][c]) + d[TILES / 2][c];
        out[1][c] = (d[0][c + 2] + d[TILES - 1][c + 2]) + d[TILES / 2][c + 2];
      }
    }
  }
};

// float32 keys: a key is spread over a warp, plain multiplications.
template <int ROWS>
struct scan_query<float, ROWS> {
  static constexpr int N = ROWS * HEADS;
  struct shared {
    float unscale[N];
  };
  float4 x[N];

  __device__ void split(const float *q, int n, shared &s) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < N; h++)
      x[h] = h < n ? __ldcg(reinterpret_cast<const float4 *>(q + h * DIM) + lane) : float4{0, 0, 0, 0};
    if (threadIdx.x < N) s.unscale[threadIdx.x] = 1;
  }
  __device__ void load(const shared &) {}
  // The dot product of one key with query number `of(lane)`.
  static __device__ int of(int lane) { return lane >> (N == 4 ? 3 : N == 8 ? 2 : 1); }
  __device__ float dot(const char *key) const {
    int lane = threadIdx.x & 31;
    float4 k = reinterpret_cast<const float4 *>(key)[lane];
    float v[N];
#pragma unroll
    for (int h = 0; h < N; h++) v[h] = fmaf(x[h].w, k.w, fmaf(x[h].z, k.z, fmaf(x[h].y, k.y, x[h].x * k.x)));
    int off = 16;
#pragma unroll
    for (int n = N / 2; n >= 1; n /= 2, off /= 2)
#pragma unroll
      for (int i = 0; i < n; i++) {
        float keep = lane & off ? v[i + n] : v[i], send = lane & off ? v[i] : v[i + n];
        v[i] = keep + __shfl_xor_sync(~0u, send, off);
      }
    for (; off >= 1; off /= 2) v[0] += __shfl_xor_sync(~0u, v[0], off);
    return v[0];
  }
};

#endif

// A unit is a block or a part of one; units of all sequences are dealt out in turn.
template <class Key, int ROWS, int UNIT>
__global__ void __launch_bounds__(SCAN_THREADS) scan_kernel(const scan_args args) {
#if M3_MSA_HOPPER
  using shape = scan_shape<Key, ROWS, UNIT>;
  using query = scan_query<Key, ROWS>;
  constexpr int STAGES = shape::STAGES, BYTES = shape::UNIT_BYTES, PARTS = BLOCK / UNIT, KEYS = UNIT / SCAN_WARPS;
  extern __shared__ __align__(128) char stages[];
  __shared__ typename query::shared shared_query;
  __shared__ uint64_t full[STAGES];
  __shared__ float part_max[2][SCAN_WARPS][query::N];
  __shared__ const int32_t *table[M3_MSA_MAX_ROWS];
  __shared__ int32_t last[M3_MSA_MAX_ROWS], start[M3_MSA_MAX_ROWS + 1];
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  int per = args.rows.per_sequence, n_seq = args.rows.n / per;
  launch_next();
  if (tid < STAGES) barrier_init(&full[tid], 1);
  barrier_init_done();
  wait_previous();
  if (tid < args.rows.n) last[tid] = (int32_t)__ldcg(args.rows.pos + tid);
  if (tid < n_seq) table[tid] = args.rows.tables[__ldcg(args.rows.seq + tid * per)];
  __syncthreads();
  if (tid == 0) {
    int sum = 0;
    for (int s = 0; s < n_seq; s++) {
      int most = 0;
      for (int r = 0; r < per; r++) most = max(most, last[s * per + r]);
      start[s] = sum;
      sum += (most / BLOCK + 1) * PARTS;
    }
    start[n_seq] = sum;
  }
  __syncthreads();
  int total = start[n_seq];

  // Thread 0 runs ahead by STAGES units, and its table lookups by one more.
  int ahead = blockIdx.x, ahead_seq = 0, issued = 0;
  auto look_up = [&]() -> const char * {
    if (ahead >= total) return nullptr;
    while (ahead >= start[ahead_seq + 1]) ahead_seq++;
    int unit = ahead - start[ahead_seq];
    int64_t page = __ldcg(table[ahead_seq] + unit / PARTS);
    ahead += gridDim.x;
    return static_cast<const char *>(args.index) + page * PARTS * BYTES + unit % PARTS * BYTES;
  };
  const char *next = nullptr;
  auto issue = [&]() {
    if (!next) return;
    int stage = issued++ % STAGES;
    barrier_expect(&full[stage], BYTES);
    bulk_load(stages + stage * BYTES, next, BYTES, &full[stage]);
    next = look_up();
  };
  if (tid == 0) {
    next = look_up();
    for (int i = 0; i < STAGES; i++) issue();
  }

  query q;
  float bad = 0;
  int seq = -1, flip = 0, done = 0;
  int32_t last0 = 0, last1 = 0;
  for (int item = blockIdx.x; item < total; item += gridDim.x, flip ^= 1, done++) {
    if (seq < 0 || item >= start[seq + 1]) {
      do seq++;
      while (item >= start[seq + 1]);
      __syncthreads();  // the shared part of the last sequence has been read
      q.split(args.q + (int64_t)seq * per * HEADS * DIM, per * HEADS, shared_query);
      __syncthreads();
      q.load(shared_query);
      int row = query::of(lane) / HEADS;
      last0 = last[seq * per + min(row, per - 1)];
      last1 = last[seq * per + min(row + 2, per - 1)];
    }
    int stage = done % STAGES, unit = item - start[seq];
    barrier_wait(&full[stage], done / STAGES & 1);
    const char *keys = stages + stage * BYTES + warp * KEYS * DIM * (int)sizeof(Key);
    int at = unit * UNIT + warp * KEYS;
    float best0 = -INFINITY, best1 = -INFINITY;
    auto take = [&](float &best, float s, bool visible) {
      if (visible) {
        best = fmaxf(best, s);
        bad = fmaf(s, 0.0f, bad);
      }
    };
    if constexpr (std::is_same<Key, float>::value) {
#pragma unroll 4
      for (int i = 0; i < KEYS; i++) {
        float s = q.dot(keys + i * DIM * 4);
        take(best0, s, at + i <= last0);
      }
      if ((lane & (32 / query::N - 1)) == 0) part_max[flip][warp][query::of(lane)] = best0;
    } else {
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++) {
        float s[2][2];
        q.dots(keys + n * 8 * ROW_BYTES, s);
#pragma unroll
        for (int c = 0; c < 2; c++) {
          bool visible0 = at + n * 8 + t * 2 + c <= last0;
          take(best0, s[0][c], visible0);
          if (query::N == 16) take(best1, s[1][c], at + n * 8 + t * 2 + c <= last1);
        }
      }
#pragma unroll
      for (int x = 1; x <= 2; x *= 2) {
        best0 = fmaxf(best0, __shfl_xor_sync(~0u, best0, x));
        best1 = fmaxf(best1, __shfl_xor_sync(~0u, best1, x));
      }
      if (t == 0 && g < query::N) part_max[flip][warp][g] = best0;
      if (t == 0 && query::N == 16) part_max[flip][warp][query::N / 2 + g % (query::N / 2)] = best1;
    }
    __syncthreads();  // all have read the stage and written their maxima
    if (tid == 0) issue();
    if (tid < per * HEADS) {
      float m = part_max[flip][0][tid];
#pragma unroll
      for (int w = 1; w < SCAN_WARPS; w++) m = fmaxf(m, part_max[flip][w][tid]);
      args.scores[((int64_t)seq * per * HEADS + tid) * args.stride + unit] = m * shared_query.unscale[tid];
    }
  }
  if (bad != 0) *args.not_finite = 1;
#endif
}

}  // namespace m3_msa

#endif
