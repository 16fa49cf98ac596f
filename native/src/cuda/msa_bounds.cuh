// Decode scan of low-bit index keys: upper bounds of scores for the pieces of every block, and for each thread block
// one lower bound of the score of a block.
#ifndef M3_SRC_CUDA_MSA_BOUNDS_CUH
#define M3_SRC_CUDA_MSA_BOUNDS_CUH

#include <math.h>

#include "m3.h"
#include "msa_low_bit.cuh"

namespace m3_msa {

constexpr int BOUNDS_WARPS = 4, BOUNDS_THREADS = BOUNDS_WARPS * 32, BOUNDS_STAGES = 2, BOUNDS_SEQUENCES = 16;

#if M3_MSA_HOPPER

template <int BITS>
__device__ __forceinline__ void mma_codes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (BITS == 4)
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four numbers of an index key, read past L1.
__device__ __forceinline__ float4 key_at(const void *index, int32_t type, int64_t at) {
  if (type == M3_TYPE_F32) return __ldcg(reinterpret_cast<const float4 *>(static_cast<const float *>(index) + at));
  uint2 x = __ldcg(reinterpret_cast<const uint2 *>(static_cast<const uint16_t *>(index) + at));
  if (type == M3_TYPE_BF16)
    return {__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u), __uint_as_float(x.y << 16),
            __uint_as_float(x.y & 0xffff0000u)};
  float2 lo = __half22float2(*reinterpret_cast<const __half2 *>(&x.x));
  float2 hi = __half22float2(*reinterpret_cast<const __half2 *>(&x.y));
  return {lo.x, lo.y, hi.x, hi.y};
}

// A query in the thread block's memory.
struct coded_query {
  uint32_t digits[2][DIM / 4];  // high and low ones, four channels a word
  float unit;                   // t
  float spread;                 // |q| / t, rounded up; infinite if the query cannot be trusted
  int32_t offset;               // what the offset of the keys' codes adds to D
};

// n queries [n, DIM], those from `given` on are zero. The warps take turns.
__device__ __forceinline__ void code_queries(const float *q, int given, int n, coded_query *out) {
  int lane = threadIdx.x & 31;
  for (int i = threadIdx.x >> 5; i < n; i += BOUNDS_WARPS) {
    float4 x = i < given ? __ldcg(reinterpret_cast<const float4 *>(q + i * DIM) + lane) : float4{0, 0, 0, 0};
    const float v[4] = {x.x, x.y, x.z, x.w};
    uint32_t largest = 0;  // as integers, numbers that are none are larger
#pragma unroll
    for (int j = 0; j < 4; j++) largest = max(largest, __float_as_uint(fabsf(v[j])));
    float most = __uint_as_float(__reduce_max_sync(~0u, largest));
    bool trusted = most == 0 || (most >= TRUSTED_LEAST && most <= TRUSTED_MOST);
    float inverse = trusted && most > 0 ? __frcp_rn(most) : 0, sum = 0;
    uint32_t high = 0, low = 0;
    int codes = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float y = v[j] * inverse;
      sum = fmaf(y, y, sum);
      int code = __float2int_rn(y * QUERY_LEVELS), digit = ((code + 128) & 255) - 128;
      low |= (uint32_t)(digit & 255) << j * 8;
      high |= (uint32_t)((code - digit) >> 8 & 255) << j * 8;
      codes += code;
    }
    codes = __reduce_add_sync(~0u, codes);
#pragma unroll
    for (int o = 16; o >= 1; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
    out[i].digits[0][lane] = high;
    out[i].digits[1][lane] = low;
    if (lane == 0) {
      out[i].unit = trusted && most > 0 ? most / QUERY_LEVELS : 1;
      out[i].spread = trusted ? fmaxf(sqrtf(sum) * (QUERY_LEVELS * 1.00025f), 1e-30f) : INFINITY;
      out[i].offset = codes * 15;
    }
  }
}

// Queries of ROWS rows in the tensor core's columns: 2 h and 2 h + 1 are the digits of head h, and its sums are those
// of lanes t = h.
template <int ROWS>
struct bounds_query {
  uint32_t b[ROWS][4][2];
  int offset[ROWS];
  float spread[ROWS];
  __device__ void load(const coded_query *q) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int i = 0; i < 8; i++) b[r][i >> 1][i & 1] = q[r * HEADS + g / 2].digits[g & 1][i * 4 + t];
      offset[r] = q[r * HEADS + t].offset;
      spread[r] = q[r * HEADS + t].spread;
    }
  }
};

// The largest upper bounds of the lane's piece, for a query.
struct piece_maxima {
  float most = -INFINITY, next = -INFINITY, least = -INFINITY;  // least: the largest lower bound
  int token = 0;                                                // of `most`, in the piece
  __device__ void take(float upper, float lower, int id) {
    next = fmaxf(next, fminf(most, upper));
    token = upper > most ? id : token;
    most = fmaxf(most, upper);
    least = fmaxf(least, lower);
  }
  // In units of scores.
  __device__ piece_bounds pack(float unit, float *upper) const {
    float u = most * unit, n = next * unit;
    u = u > -INFINITY ? fminf(fmaf(fabsf(u), 0x1p-18f, u), UNBOUNDED) : u;
    n = n > -INFINITY ? fminf(fmaf(fabsf(n), 0x1p-18f, n), UNBOUNDED) : n;
    *upper = u;
    return {__uint_as_float((__float_as_uint(u) & ~15u) | (uint32_t)token), n};
  }
};

#endif

// The blocks of all sequences are shared out among the thread blocks in one row, whole ones to the warps.
template <int BITS, int ROWS>
__global__ void __launch_bounds__(BOUNDS_THREADS) bounds_kernel(const __grid_constant__ bounds_args args) {
#if M3_MSA_HOPPER
  using layout = low_bit_layout<BITS>;
  extern __shared__ __align__(128) char memory[];
  __shared__ uint64_t full[BOUNDS_WARPS][BOUNDS_STAGES];
  __shared__ uint64_t best_of_warp[BOUNDS_WARPS][ROWS * HEADS];  // a lower bound and its token in the cache
  __shared__ coded_query coded[ROWS * HEADS];
  __shared__ const int32_t *table[BOUNDS_SEQUENCES];
  __shared__ int32_t last[BOUNDS_SEQUENCES * 4], start[BOUNDS_SEQUENCES + 1];
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  int per = args.rows.per_sequence, n_seq = args.rows.n / per, stages = args.stages;
  launch_next();
  if (tid < BOUNDS_WARPS * BOUNDS_STAGES) barrier_init(&full[0][0] + tid, 1);
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
  char *stage_at = memory + warp * stages * layout::CHUNK_BYTES;

  // The pages of 32 items of the warp at a time lie in its lanes.
  int n_items = (end - begin - warp + BOUNDS_WARPS - 1) / BOUNDS_WARPS, n_loads = n_items * layout::LOADS, group = -1;
  int32_t page = 0, page_of_stage[BOUNDS_STAGES] = {};
  uint32_t settled = 0;  // blocks that the previous kernel does not write
  auto find = [&](int load) {
    int item = load / layout::LOADS;
    if (item / 32 != group) {
      group = item / 32;
      int mine = begin + warp + (group * 32 + lane) * BOUNDS_WARPS, s = 0;
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
    return __shfl_sync(~0u, page, item % 32);
  };
  auto issue = [&](int load) {
    int32_t at = find(load);
    int stage = stages == 1 ? 0 : load & 1;
    if (stage)
      page_of_stage[1] = at;
    else
      page_of_stage[0] = at;
    if (lane == 0) {
      barrier_expect(&full[warp][stage], layout::CHUNK_BYTES);
      bulk_load(stage_at + stage * layout::CHUNK_BYTES,
                args.low_bit + (int64_t)at * layout::PAGE + load % layout::LOADS * layout::CHUNK_BYTES,
                layout::CHUNK_BYTES, &full[warp][stage]);
    }
  };
  int early = 0;
  for (; early < stages && early < n_loads; early++) {
    find(early);
    if (!(settled >> early / layout::LOADS & 1)) break;
    issue(early);
  }
  wait_previous();
  for (; early < stages && early < n_loads; early++) issue(early);
  for (int i = tid; i < args.rows.n * HEADS; i += BOUNDS_THREADS) {
    int s = i / (per * HEADS);
    if (start[s + 1] <= begin || start[s] >= end) args.seeds[(int64_t)i * gridDim.x + blockIdx.x] = -INFINITY;
  }

  bounds_query<ROWS> q;
  int seq = 0, item = begin + warp, done = 0;
  while (start[seq + 1] <= begin) seq++;
  for (; seq < n_seq && start[seq] < end; seq++) {
    int segment_end = min(end, start[seq + 1]), least_seen = 0x7fffffff;
    code_queries(args.q + (int64_t)seq * per * HEADS * DIM, per * HEADS, ROWS * HEADS, coded);
    __syncthreads();
    q.load(coded);
    int32_t seen[ROWS];
    float best[ROWS];
    uint32_t best_at[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      seen[r] = last[seq * per + min(r, per - 1)];
      least_seen = min(least_seen, seen[r]);
      best[r] = -INFINITY;
      best_at[r] = 0;
    }
    for (; item < segment_end; item += BOUNDS_WARPS) {
      int block = item - start[seq];
      bool edge = block >= least_seen / BLOCK;
      int32_t this_page = 0;
      piece_maxima piece[ROWS];
#pragma unroll 1
      for (int load = 0; load < layout::LOADS; load++, done++) {
        int stage = stages == 1 ? 0 : done & 1;
        this_page = stage ? page_of_stage[1] : page_of_stage[0];
        barrier_wait(&full[warp][stage], (stages == 1 ? done : done >> 1) & 1);
        const char *chunk = stage_at + stage * layout::CHUNK_BYTES;
        const uint4 *codes = reinterpret_cast<const uint4 *>(chunk);
        const uint32_t *pairs = reinterpret_cast<const uint32_t *>(chunk + layout::PAIRS_AT);
#pragma unroll 2
        for (int tile = 0; tile < layout::TOKENS / 16; tile++) {
          int d[ROWS][4] = {};
#pragma unroll
          for (int plane = 0; plane < layout::PLANES; plane++) {
            uint4 lo = codes[(plane * layout::TOKENS + tile * 16 + g) * 4 + t];
            uint4 hi = codes[(plane * layout::TOKENS + tile * 16 + 8 + g) * 4 + t];
            const uint32_t x[4] = {lo.x, lo.y, lo.z, lo.w}, y[4] = {hi.x, hi.y, hi.z, hi.w};
            if constexpr (BITS == 4) {
#pragma unroll
              for (int w = 0; w < 4; w++) {
                const uint32_t a[4] = {x[w] & 0x0f0f0f0fu, y[w] & 0x0f0f0f0fu, x[w] >> 4 & 0x0f0f0f0fu,
                                       y[w] >> 4 & 0x0f0f0f0fu};
#pragma unroll
                for (int r = 0; r < ROWS; r++) mma_codes<BITS>(d[r], a, q.b[r][w][0], q.b[r][w][1]);
              }
            } else {
#pragma unroll
              for (int w = 0; w < 2; w++) {
                const uint32_t a[4] = {x[w * 2], y[w * 2], x[w * 2 + 1], y[w * 2 + 1]};
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                  mma_codes<BITS>(d[r], a, q.b[r][plane * 2 + w][0], q.b[r][plane * 2 + w][1]);
              }
            }
          }
#pragma unroll
          for (int half = 0; half < 2; half++) {
            int slot = tile * 16 + half * 8 + g, id = (load * layout::TOKENS + tile * 16) / 8 + half;
            uint32_t pair = pairs[slot];
            float step = __uint_as_float(pair << 16), spread = __uint_as_float(pair & 0xffff0000u);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
              int sum = d[r][half * 2] * 256 + d[r][half * 2 + 1];
              if (BITS == 4) sum = sum * 2 - q.offset[r];
              float near = step * (float)sum;
              float upper = fmaf(spread, q.spread[r], near), lower = fmaf(-spread, q.spread[r], near);
              if (edge && block * BLOCK + id * 8 + g > seen[r]) upper = lower = -INFINITY;
              piece[r].take(upper, lower, id);
            }
          }
        }
        __syncwarp();
        if (done + stages < n_loads) issue(done + stages);
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        int64_t pair = ((int64_t)seq * per + min(r, per - 1)) * HEADS + t, at = pair * args.rows.max_blocks + block;
        float upper;
        piece_bounds packed = piece[r].pack(coded[r * HEADS + t].unit, &upper);
#pragma unroll
        for (int o = 4; o <= 16; o *= 2) upper = fmaxf(upper, __shfl_xor_sync(~0u, upper, o));
        if (r < per) {
          args.bounds[at * PIECES + g] = packed;
          if (g == 0) args.block_bounds[at] = upper;
        }
        if (block <= seen[r] / BLOCK - args.local && piece[r].least > best[r]) {
          best[r] = piece[r].least;
          best_at[r] = (uint32_t)(this_page * BLOCK + piece[r].token * 8 + g);
        }
      }
    }
    // One seed of the thread block for each query: the largest lower bound, and the exact score of that token.
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      uint64_t most = (uint64_t)ordered(best[r]) << 32 | best_at[r];
#pragma unroll
      for (int o = 4; o <= 16; o *= 2) most = max(most, (uint64_t)__shfl_xor_sync(~0u, (unsigned long long)most, o));
      if (g == 0) best_of_warp[warp][r * HEADS + t] = most;
    }
    __syncthreads();
    for (int i = warp; i < per * HEADS; i += BOUNDS_WARPS) {
      uint64_t most = best_of_warp[0][i];
#pragma unroll
      for (int w = 1; w < BOUNDS_WARPS; w++) most = max(most, best_of_warp[w][i]);
      uint32_t order = (uint32_t)(most >> 32);
      float seed = __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
      int64_t pair = (int64_t)seq * per * HEADS + i;
      if (args.exact_seeds && seed > -INFINITY) {
        float4 x = __ldcg(reinterpret_cast<const float4 *>(args.q + pair * DIM) + lane);
        float4 k = key_at(args.index, args.index_type, (int64_t)(uint32_t)most * DIM + lane * 4);
        float dot = fmaf(x.w, k.w, fmaf(x.z, k.z, fmaf(x.y, k.y, x.x * k.x)));
        float square = fmaf(k.w, k.w, fmaf(k.z, k.z, fmaf(k.y, k.y, k.x * k.x)));
#pragma unroll
        for (int o = 16; o >= 1; o /= 2) {
          dot += __shfl_xor_sync(~0u, dot, o);
          square += __shfl_xor_sync(~0u, square, o);
        }
        seed = fmaxf(seed * coded[i].unit,
                     dot - coded[i].spread * coded[i].unit * (2 * SUM_ERROR * sqrtf(square) + UNDERFLOW));
      } else {
        seed *= coded[i].unit;
      }
      if (lane == 0) args.seeds[pair * gridDim.x + blockIdx.x] = seed;
    }
    __syncthreads();
  }
#endif
}

}  // namespace m3_msa

#endif
