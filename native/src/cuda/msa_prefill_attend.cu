// Attention of many consecutive rows over their listed blocks. A thread block takes 8 queries of one KV head: two
// warpgroups of 4 queries x 16 heads, 64 rows of a tensor core tile each. Blocks that any of the 8 queries lists are
// read once; a warp is one query, and weights of blocks that it does not list are 0. In a dense layer the union is all
// blocks. Queries and weights are rounded to the 16 bits of the cache for the products, sums are float32.
#include <math.h>

#include "msa_launch.cuh"
#include "msa_wgmma.cuh"

namespace m3_msa {

namespace {

constexpr int GROUPS = 2, GROUP_QUERIES = 4, QUERIES = GROUPS * GROUP_QUERIES;
constexpr int STAGES = 2, ENTRIES = QUERIES * TOP_K;
[[maybe_unused]] constexpr int HALF_PAGE = PAGE_BYTES / 2;
constexpr int ROWS_BYTES = 64 * ROW_BYTES;  // queries of a warpgroup

struct prefill_args {
  CUtensorMap k, v;
  const float *q;
  const int32_t *blocks, *table;
  int64_t first_pos;
  int32_t n;
  float *out;
};

struct alignas(1024) prefill_buffer {
  char k[STAGES][PAGE_BYTES], v[STAGES][PAGE_BYTES];
  char q[GROUPS][ROWS_BYTES];
  int32_t entry[ENTRIES];
  int32_t id[ENTRIES], token[ENTRIES], members[ENTRIES];  // of the union: block, row of the caches, queries as bits
  bool first[ENTRIES];
  int32_t n;
  uint64_t k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
};

#if M3_MSA_HOPPER

__device__ __forceinline__ void group_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

// 2^x to some 2 ulp; 0 far below 0.
__device__ __forceinline__ float exponent(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The union of the lists of the tile's queries, ascending. 128 threads.
__device__ void unite(const prefill_args &args, int tile, int head, prefill_buffer &s) {
  int e = threadIdx.x, row = tile * QUERIES + e / TOP_K;
  int id = row < args.n ? __ldcg(args.blocks + ((int64_t)row * HEADS + head) * TOP_K + e % TOP_K) : -1;
  int token = id >= 0 ? (args.table[id] * HEADS + head) * BLOCK : 0;
  s.entry[e] = id;
  if (e == 0) s.n = 0;
  group_sync(1);
  int members = 0;
  bool first = id >= 0;
#pragma unroll 16
  for (int j = 0; j < ENTRIES; j++)
    if (s.entry[j] == id) {
      members |= 1 << j / TOP_K;
      first &= j >= e;
    }
  s.first[e] = first;
  group_sync(1);
  if (!first) return;
  int at = 0;
#pragma unroll 16
  for (int j = 0; j < ENTRIES; j++) at += s.first[j] && s.entry[j] < id;
  s.id[at] = id;
  s.token[at] = token;
  s.members[at] = members;
  atomicAdd(&s.n, 1);
}

#endif

template <class T, bool DENSE>
__global__ void __launch_bounds__((GROUPS + 1) * 128, 1) prefill_kernel(const __grid_constant__ prefill_args args) {
#if M3_MSA_HOPPER
  extern __shared__ __align__(1024) char memory[];
  prefill_buffer &s = *reinterpret_cast<prefill_buffer *>(memory);
  int tid = threadIdx.x, group = tid / 128 - 1, warp = tid / 32 % 4, lane = tid % 32, g = lane / 4, t = lane % 4;
  int tile = blockIdx.x / HEADS, head = blockIdx.x % HEADS;
  if (DENSE) tile = gridDim.x / HEADS - 1 - tile;  // the last ones see most
  if (tid == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&s.k_full[i], 1);
      barrier_init(&s.v_full[i], 1);
      barrier_init(&s.k_empty[i], GROUPS * 4);
      barrier_init(&s.v_empty[i], GROUPS * 4);
    }
    tensor_prefetch(&args.k);
    tensor_prefetch(&args.v);
  }
  barrier_init_done();
  wait_previous();
  launch_next();
  int row = tile * QUERIES + group * GROUP_QUERIES + warp;  // of this warp
  float factor0 = 0, factor1 = 0;  // of rows g and g + 8: softmax scale in base 2 / split_scale
  if (group < 0) {
    if (!DENSE) unite(args, tile, head, s);
  } else {
    const float *q = args.q + ((int64_t)row * HEADS + head) * GROUP * DIM;
    float mine = 0;
#pragma unroll
    for (int i = 0; i < GROUP; i += 8) {
      float4 x[8];
#pragma unroll
      for (int u = 0; u < 8; u++)
        x[u] = row < args.n ? __ldcs(reinterpret_cast<const float4 *>(q + (i + u) * DIM) + lane) : float4{0, 0, 0, 0};
#pragma unroll
      for (int u = 0; u < 8; u++) {
        float m = fmaxf(fmaxf(fabsf(x[u].x), fabsf(x[u].y)), fmaxf(fabsf(x[u].z), fabsf(x[u].w)));
        float scale = split_scale<T>(__reduce_max_sync(~0u, __float_as_uint(m)));
        if (lane == i + u) mine = 0.08838834764831845f * 1.4426950408889634f / scale;
        uint32_t lo = pack(narrow<T>(x[u].x * scale), narrow<T>(x[u].y * scale));
        uint32_t hi = pack(narrow<T>(x[u].z * scale), narrow<T>(x[u].w * scale));
        *reinterpret_cast<uint2 *>(s.q[group] + lane / 16 * (ROWS_BYTES / 2) +
                                   swizzled(warp * 16 + i + u, lane % 16 * 4)) = uint2{lo, hi};
      }
    }
    factor0 = __shfl_sync(~0u, mine, g);
    factor1 = __shfl_sync(~0u, mine, g + 8);
    proxy_fence();
  }
  __syncthreads();
  int n = DENSE ? (int)((args.first_pos + min(args.n, (tile + 1) * QUERIES) - 1) / BLOCK) + 1 : s.n;
  if (group < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (tid == 0) {
      int32_t next = DENSE ? args.table[0] : 0;
      for (int i = 0; i < n; i++) {
        int stage = i % STAGES, token = DENSE ? (next * HEADS + head) * BLOCK : s.token[i];
        if (DENSE && i + 1 < n) next = args.table[i + 1];
        if (i >= STAGES) barrier_wait(&s.k_empty[stage], (i / STAGES - 1) & 1);
        barrier_expect(&s.k_full[stage], PAGE_BYTES);
        tensor_load(s.k[stage], &args.k, 0, token, &s.k_full[stage]);
        tensor_load(s.k[stage] + HALF_PAGE, &args.k, 64, token, &s.k_full[stage]);
        if (i >= STAGES) barrier_wait(&s.v_empty[stage], (i / STAGES - 1) & 1);
        barrier_expect(&s.v_full[stage], PAGE_BYTES);
        tensor_load(s.v[stage], &args.v, 0, token, &s.v_full[stage]);
        tensor_load(s.v[stage] + HALF_PAGE, &args.v, 64, token, &s.v_full[stage]);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    float o[64], max0 = -INFINITY, max1 = -INFINITY, sum0 = 0, sum1 = 0;
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = 0;
    uint32_t q_at = shared_address(s.q[group]);
    int64_t pos = args.first_pos + row;
    // Positions of the group's first row and its last one, from 0.
    int64_t from = args.first_pos + tile * QUERIES + group * GROUP_QUERIES;
    int rows = min(GROUP_QUERIES, args.n - tile * QUERIES - group * GROUP_QUERIES);
    for (int i = 0; i < n; i++) {
      int stage = i % STAGES, members;
      if (DENSE) {
        int64_t unseen = (int64_t)i * BLOCK - from;  // rows that stand before the block
        members = rows > 0 ? (1 << rows) - 1 : 0;
        if (unseen > 0) members = unseen < GROUP_QUERIES ? members >> unseen << unseen : 0;
      } else {
        members = s.members[i] >> (group * GROUP_QUERIES);
      }
      if (!(members & ((1 << GROUP_QUERIES) - 1))) {
        // A full barrier must have been seen in each phase, or its parity would say nothing.
        barrier_wait(&s.k_full[stage], i / STAGES & 1);
        if (lane == 0) barrier_arrive(&s.k_empty[stage]);
        barrier_wait(&s.v_full[stage], i / STAGES & 1);
        if (lane == 0) barrier_arrive(&s.v_empty[stage]);
        continue;
      }
      float d[64];
      barrier_wait(&s.k_full[stage], i / STAGES & 1);
      uint32_t k_at = shared_address(s.k[stage]), v_at = shared_address(s.v[stage]);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < DIM / 16; k++)
        wgmma<T>(d, operand(q_at + k / 4 * (ROWS_BYTES / 2) + k % 4 * 32),
                 operand(k_at + k / 4 * HALF_PAGE + k % 4 * 32), k > 0);
      wgmma_commit();
      int64_t first = (int64_t)(DENSE ? i : s.id[i]) * BLOCK;
      wgmma_wait<0>();
      hold(d);
      if (lane == 0) barrier_arrive(&s.k_empty[stage]);
      uint32_t p[BLOCK / 16][4];
      if (members >> warp & 1) {
        if (pos - first < BLOCK - 1) {
          int seen = (int)(pos - first);
#pragma unroll
          for (int j = 0; j < 16; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
              if (8 * j + 2 * t + c > seen) d[4 * j + c] = d[4 * j + 2 + c] = -INFINITY;
        }
        float top0 = d[0], top1 = d[2];
#pragma unroll
        for (int j = 0; j < 16; j++) {
          top0 = fmaxf(top0, fmaxf(d[4 * j], d[4 * j + 1]));
          top1 = fmaxf(top1, fmaxf(d[4 * j + 2], d[4 * j + 3]));
        }
#pragma unroll
        for (int x = 1; x <= 2; x *= 2) {
          top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, x));
          top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, x));
        }
        top0 = fmaxf(max0, top0 * factor0);
        top1 = fmaxf(max1, top1 * factor1);
        if (__any_sync(~0u, top0 > max0 || top1 > max1)) {
          float shrink0 = exp2f(max0 - top0), shrink1 = exp2f(max1 - top1);
          sum0 *= shrink0;
          sum1 *= shrink1;
#pragma unroll
          for (int j = 0; j < 16; j++) {
            o[4 * j] *= shrink0;
            o[4 * j + 1] *= shrink0;
            o[4 * j + 2] *= shrink1;
            o[4 * j + 3] *= shrink1;
          }
          max0 = top0;
          max1 = top1;
        }
        float part0 = 0, part1 = 0;
#pragma unroll
        for (int j = 0; j < 16; j++) {
          float a = exponent(fmaf(d[4 * j], factor0, -max0)), b = exponent(fmaf(d[4 * j + 1], factor0, -max0));
          float c = exponent(fmaf(d[4 * j + 2], factor1, -max1)), e = exponent(fmaf(d[4 * j + 3], factor1, -max1));
          part0 += a + b;
          part1 += c + e;
          p[j / 2][j % 2 * 2] = pack_pair<T>(a, b);
          p[j / 2][j % 2 * 2 + 1] = pack_pair<T>(c, e);
        }
        sum0 += part0;
        sum1 += part1;
      } else {
#pragma unroll
        for (int j = 0; j < BLOCK / 16; j++)
#pragma unroll
          for (int c = 0; c < 4; c++) p[j][c] = 0;
      }
      barrier_wait(&s.v_full[stage], i / STAGES & 1);
      int filled = (int)min((int64_t)BLOCK, args.first_pos + args.n - first);
      if (filled < BLOCK) {
        // What lies behind the last token is multiplied by 0 and must not be NaN. Both warpgroups write the same.
        if (tid % 128 >= filled)
#pragma unroll
          for (int c = 0; c < 16; c++)
            *reinterpret_cast<uint4 *>(s.v[stage] + c / 8 * HALF_PAGE + tid % 128 * 128 + c % 8 * 16) =
                uint4{0, 0, 0, 0};
        proxy_fence();
        group_sync(2 + group);
      }
      hold(o);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < BLOCK / 16; k++) wgmma_rows<T>(o, p[k], operand(v_at + k * 2048, HALF_PAGE));
      wgmma_commit();
      wgmma_wait<0>();
      hold(o);
      if (lane == 0) barrier_arrive(&s.v_empty[stage]);
    }
#pragma unroll
    for (int x = 1; x <= 2; x *= 2) {
      sum0 += __shfl_xor_sync(~0u, sum0, x);
      sum1 += __shfl_xor_sync(~0u, sum1, x);
    }
    if (row < args.n) {
      float *out = args.out + (((int64_t)row * HEADS + head) * GROUP + g) * DIM + 2 * t;
      float share0 = 1.0f / sum0, share1 = 1.0f / sum1;
#pragma unroll
      for (int j = 0; j < 16; j++) {
        __stcs(reinterpret_cast<float2 *>(out + 8 * j), float2{o[4 * j] * share0, o[4 * j + 1] * share0});
        __stcs(reinterpret_cast<float2 *>(out + 8 * DIM + 8 * j), float2{o[4 * j + 2] * share1, o[4 * j + 3] * share1});
      }
    }
  }
#endif
}

template <class T, bool DENSE>
m3_msa_result launch_prefill(const prefill_args &args, cudaStream_t stream) {
  unsigned grid = (unsigned)((args.n + QUERIES - 1) / QUERIES * HEADS);
  return launch(prefill_kernel<T, DENSE>, args, {dim3(grid), dim3((GROUPS + 1) * 128), sizeof(prefill_buffer), 1, true},
                stream);
}

template <bool DENSE>
m3_msa_result prefill(const m3_msa_prefill &p, cudaStream_t stream) {
  if (!hopper_multiprocessors() || !shape_taken(p.shape) || p.n < 1 || p.first_pos < 0 ||
      p.first_pos + p.n > (int64_t)M3_MSA_MAX_BLOCKS * BLOCK || (p.kv_type != M3_TYPE_BF16 && p.kv_type != M3_TYPE_F16))
    return M3_MSA_REFUSED;
  prefill_args args = {};
  if (!map_pages(&args.k, p.k, p.kv_type) || !map_pages(&args.v, p.v, p.kv_type)) return M3_MSA_FAILED;
  args.q = p.q;
  args.blocks = p.blocks;
  args.table = p.table;
  args.first_pos = p.first_pos;
  args.n = p.n;
  args.out = p.out;
  return p.kv_type == M3_TYPE_BF16 ? launch_prefill<__nv_bfloat16, DENSE>(args, stream)
                                   : launch_prefill<__half, DENSE>(args, stream);
}

}  // namespace

}  // namespace m3_msa

using namespace m3_msa;

m3_msa_result m3_msa_prefill_attend(const m3_msa_prefill *p, cudaStream_t stream) { return prefill<false>(*p, stream); }

m3_msa_result m3_msa_prefill_dense(const m3_msa_prefill *p, cudaStream_t stream) { return prefill<true>(*p, stream); }
