// Attention of decode rows: the blocks of a (row, KV head) are spread over a cluster of thread blocks, 16 query heads
// are the rows of a tensor core tile, and the parts meet in shared memory by their log-sum-exp.
#include <math.h>

#include "msa_bounds.cuh"
#include "msa_launch.cuh"
#include "msa_rescore.cuh"
#include "msa_select.cuh"
#include "msa_topk.cuh"

namespace m3_msa {

namespace {

constexpr int WARPS = 4, THREADS = WARPS * 32;
constexpr int PITCH = ROW_BYTES + 16;  // of rows of q and p in shared memory: ldmatrix meets no bank twice
[[maybe_unused]] constexpr int HALF_PAGE = PAGE_BYTES / 2;  // 64 channels of 128 tokens
constexpr int DENSE_PARTS = 64;                             // at most, of a (row, KV head) of a dense layer

// Thread blocks for each of so many (row, KV head): enough to fill the device, no more, as each reads alone.
int cluster_for(int pairs) { return pairs <= 4 ? 16 : pairs <= 16 ? 8 : pairs <= 64 ? 4 : pairs <= 256 ? 2 : 1; }

enum attend_mode { LISTED, CHOSEN, RESCORED, DENSE };

struct attend_args {
  m3_msa_rows rows;
  CUtensorMap k, v;
  const float *q;
  const int32_t *list;  // LISTED
  const float *scores;  // CHOSEN
  int64_t stride;
  int32_t local;
  rescore_args rescored;  // RESCORED
  int32_t *blocks;        // CHOSEN, RESCORED: out
  float *out;
  float *part;  // DENSE: out, [n, HEADS, DENSE_PARTS] of dense_part
};

struct dense_part {
  float max[GROUP], sum[GROUP], acc[GROUP][DIM];
};

struct alignas(1024) attend_buffer {
  union {
    struct {
      char k[PAGE_BYTES], v[PAGE_BYTES];
    };
    topk_buffer topk;
    rescore_buffer<8> rescore;  // of clusters of 8 or more
  };
  float acc[GROUP][DIM];  // of the heads that this thread block combines, [cluster, heads]
  float2 state[GROUP];    // their maximum and sum
  char q[2][GROUP * PITCH], p[2][GROUP * PITCH];
  float unscale[GROUP];
  float warp_max[WARPS][GROUP], warp_sum[WARPS][GROUP];
  int32_t list[TOP_K];
  uint64_t k_full, v_full;
};

#if M3_MSA_HOPPER

// Queries of the group in two parts, and the softmax scale in base 2.
struct query_rows {
  float4 x[GROUP / WARPS];
  __device__ void load(const float *q) {
#pragma unroll
    for (int i = 0; i < GROUP / WARPS; i++)
      x[i] = __ldcg(reinterpret_cast<const float4 *>(q + (threadIdx.x / 32 + i * WARPS) * DIM) + threadIdx.x % 32);
  }
  template <class T>
  __device__ void store(attend_buffer &s) const {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < GROUP / WARPS; i++) {
      int h = threadIdx.x / 32 + i * WARPS;
      float largest = fmaxf(fmaxf(fabsf(x[i].x), fabsf(x[i].y)), fmaxf(fabsf(x[i].z), fabsf(x[i].w)));
      float scale = split_scale<T>(__reduce_max_sync(~0u, __float_as_uint(largest)));
      uint32_t lo[2], hi[2];
      split_pair<T>(x[i].x * scale, x[i].y * scale, lo);
      split_pair<T>(x[i].z * scale, x[i].w * scale, hi);
#pragma unroll
      for (int p = 0; p < 2; p++) *reinterpret_cast<uint2 *>(&s.q[p][h * PITCH + lane * 8]) = uint2{lo[p], hi[p]};
      if (lane == 0) s.unscale[h] = 0.08838834764831845f * 1.4426950408889634f / scale;
    }
  }
};

// One head of a page to shared memory, as map_pages lays it out.
__device__ __forceinline__ void load_page(char *dst, const CUtensorMap *map, int token, uint64_t *full) {
  barrier_expect(full, PAGE_BYTES);
  tensor_load(dst, map, 0, token, full);
  tensor_load(dst + HALF_PAGE, map, DIM / 2, token, full);
}

#endif

// CLUSTER thread blocks share the blocks of a (row, KV head). DENSE: CLUSTER is 1 and gridDim.y parts share them.
template <class T, int CLUSTER, attend_mode MODE>
__global__ void __launch_bounds__(THREADS) attend_kernel(const __grid_constant__ attend_args args) {
#if M3_MSA_HOPPER
  extern __shared__ __align__(1024) char memory[];
  attend_buffer &s = *reinterpret_cast<attend_buffer *>(memory);
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  int pair = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, row = pair / HEADS, head = pair % HEADS;
  launch_next();
  if (tid == 0) {
    barrier_init(&s.k_full, 1);
    barrier_init(&s.v_full, 1);
    tensor_prefetch(&args.k);
    tensor_prefetch(&args.v);
  }
  barrier_init_done();
  cluster_arrive();  // this thread block runs: others may write to its shared memory
  int64_t pos = __ldcg(args.rows.pos + row);
  const int32_t *table = args.rows.tables[__ldcg(args.rows.seq + row)];
  int n_blocks = (int)(pos / BLOCK) + 1;
  query_rows query;
  auto begin = [&] {
    wait_previous();
    query.load(args.q + (int64_t)pair * GROUP * DIM);
  };
  if constexpr (MODE == RESCORED) {
    rescore<CLUSTER> choice(args.rescored, reinterpret_cast<rescore_buffer<CLUSTER> &>(s.rescore), pair, rank);
    cluster_wait();
    begin();
    choice.choose(s.list);
  } else {
    begin();
  }
  int first, n;  // of the list, of the sequence if DENSE
  if (MODE == DENSE) {
    int each = (n_blocks + gridDim.y - 1) / gridDim.y;
    first = blockIdx.y * each;
    n = max(0, min(each, n_blocks - first));
  } else {
    if (MODE == CHOSEN) {
      const float *scores = args.scores + pair * args.stride;
      choose_blocks<1>(scores, n_blocks, args.local, s.topk, s.list);
    } else if (MODE == LISTED) {
      if (tid < TOP_K) s.list[tid] = __ldcg(args.list + pair * TOP_K + tid);
      __syncthreads();
    }
    if (MODE != LISTED && rank == 0 && tid < TOP_K) args.blocks[pair * TOP_K + tid] = s.list[tid];
    first = rank * (TOP_K / CLUSTER);
    n = 0;
    while (n < TOP_K / CLUSTER && s.list[first + n] >= 0) n++;
  }
  // The top-k buffer has been read and written the ordinary way.
  proxy_fence();
  __syncthreads();
  auto block_at = [&](int i) { return MODE == DENSE ? first + i : s.list[first + i]; };
  auto visible_in = [&](int b) { return (int)min((int64_t)BLOCK, pos + 1 - (int64_t)b * BLOCK); };
  auto token_of = [&](int b) { return (__ldcg(table + b) * HEADS + head) * BLOCK; };  // row of the caches
  int visible = 0;
  if (n) {
    int b = block_at(0);
    visible = visible_in(b);
    if (tid == 0) {
      int token = token_of(b);
      load_page(s.k, &args.k, token, &s.k_full);
      load_page(s.v, &args.v, token, &s.v_full);
    }
  }
  query.store<T>(s);
  __syncthreads();
  uint32_t q_at = shared_address(s.q[0]) + (lane & 15) * PITCH + (lane >> 4) * 16;
  uint32_t p_at = shared_address(s.p[0]) + (lane & 15) * PITCH + (lane >> 4) * 16;
  // Chunks c of the rows that a lane names to ldmatrix are at k_at + (c ^ lane & 7) * 16 in a half page.
  uint32_t k_at = shared_address(s.k) + (warp * 32 + (lane & 7)) * 128;
  uint32_t v_at = shared_address(s.v) + (warp >> 1) * HALF_PAGE + (lane & 15) * 128;
  constexpr uint32_t PART = GROUP * PITCH;
  float o[4][4] = {}, o_low[4][4] = {}, max0 = -INFINITY, max1 = -INFINITY, sum0 = 0, sum1 = 0;
  for (int i = 0; i < n; i++) {
    int next_visible = 0, next_token = 0;
    if (i + 1 < n) {
      int next = block_at(i + 1);
      next_visible = visible_in(next);
      next_token = token_of(next);
    }
    // Scores of the warp's 32 keys.
    float d[4][4] = {}, e[4][4] = {};  // of the two parts: shorter chains
    barrier_wait(&s.k_full, i & 1);
#pragma unroll
    for (int c = 0; c < DIM / 32; c++) {
      uint32_t a[2][2][4];
#pragma unroll
      for (int part = 0; part < 2; part++)
#pragma unroll
        for (int h = 0; h < 2; h++) load_matrices(a[part][h], q_at + part * PART + (c * 2 + h) * 32);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint32_t x[4];
        load_matrices(x, k_at + c / 2 * HALF_PAGE + j * 1024 + ((c % 2 * 4 + (lane >> 3)) ^ (lane & 7)) * 16);
        mma<T>(d[j], a[0][0], x[0], x[1]);
        mma<T>(e[j], a[1][0], x[0], x[1]);
        mma<T>(d[j], a[0][1], x[2], x[3]);
        mma<T>(e[j], a[1][1], x[2], x[3]);
      }
    }
    float scale0 = s.unscale[g], scale1 = s.unscale[g + 8], top0 = -INFINITY, top1 = -INFINITY;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        bool seen = warp * 32 + j * 8 + t * 2 + c < visible;
        d[j][c] = seen ? (d[j][c] + e[j][c]) * scale0 : -INFINITY;
        d[j][c + 2] = seen ? (d[j][c + 2] + e[j][c + 2]) * scale1 : -INFINITY;
        top0 = fmaxf(top0, d[j][c]);
        top1 = fmaxf(top1, d[j][c + 2]);
      }
#pragma unroll
    for (int x = 1; x <= 2; x *= 2) {
      top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, x));
      top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, x));
    }
    if (t == 0) s.warp_max[warp][g] = top0, s.warp_max[warp][g + 8] = top1;
    __syncthreads();  // the keys have been read
    if (i + 1 < n && tid == 0) load_page(s.k, &args.k, next_token, &s.k_full);
    float before0 = max0, before1 = max1;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      max0 = fmaxf(max0, s.warp_max[w][g]);
      max1 = fmaxf(max1, s.warp_max[w][g + 8]);
    }
    // A score that is not finite shows as NaN.
    float shrink0 = exp2f(before0 - max0), shrink1 = exp2f(before1 - max1), part0 = 0, part1 = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float p00 = exp2f(d[j][0] - max0), p01 = exp2f(d[j][1] - max0);
      float p10 = exp2f(d[j][2] - max1), p11 = exp2f(d[j][3] - max1);
      part0 += p00 + p01;
      part1 += p10 + p11;
      uint32_t lo[2], hi[2];
      split_pair<T>(p00, p01, lo);
      split_pair<T>(p10, p11, hi);
      int at = g * PITCH + (warp * 32 + j * 8 + t * 2) * 2;
#pragma unroll
      for (int part = 0; part < 2; part++) {
        *reinterpret_cast<uint32_t *>(&s.p[part][at]) = lo[part];
        *reinterpret_cast<uint32_t *>(&s.p[part][at + 8 * PITCH]) = hi[part];
      }
    }
#pragma unroll
    for (int x = 1; x <= 2; x *= 2) {
      part0 += __shfl_xor_sync(~0u, part0, x);
      part1 += __shfl_xor_sync(~0u, part1, x);
    }
    if (t == 0) s.warp_sum[warp][g] = part0, s.warp_sum[warp][g + 8] = part1;
    __syncthreads();
    sum0 *= shrink0;
    sum1 *= shrink1;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum0 += s.warp_sum[w][g], sum1 += s.warp_sum[w][g + 8];
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        o[j][c] = (o[j][c] + o_low[j][c]) * (c < 2 ? shrink0 : shrink1);
        o_low[j][c] = 0;
      }
    // Weights times values, 32 channels a warp.
    barrier_wait(&s.v_full, i & 1);
    if (visible < BLOCK) {
      // Values that are not visible are multiplied by 0 and must not be NaN.
      if (tid >= visible)
#pragma unroll
        for (int c = 0; c < 16; c++)
          *reinterpret_cast<uint4 *>(s.v + c / 8 * HALF_PAGE + tid * 128 + c % 8 * 16) = uint4{0, 0, 0, 0};
      __syncthreads();
    }
#pragma unroll
    for (int c = 0; c < BLOCK / 16; c++) {
      uint32_t a[2][4], x[2][4];
#pragma unroll
      for (int part = 0; part < 2; part++) load_matrices(a[part], p_at + part * PART + c * 32);
#pragma unroll
      for (int h = 0; h < 2; h++)
        load_matrices_transposed(x[h], v_at + c * 2048 + ((warp % 2 * 4 + h * 2 + (lane >> 4)) ^ (lane & 7)) * 16);
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int part = 0; part < 2; part++)
          mma<T>(part ? o_low[j] : o[j], a[part], x[j / 2][j % 2 * 2], x[j / 2][j % 2 * 2 + 1]);
    }
    visible = next_visible;
    if (i + 1 < n) {
      __syncthreads();  // the values have been read
      if (tid == 0) load_page(s.v, &args.v, next_token, &s.v_full);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int c = 0; c < 4; c++) o[j][c] += o_low[j][c];
  if constexpr (MODE == DENSE) {
    cluster_wait();
    dense_part &part = reinterpret_cast<dense_part *>(args.part)[(int64_t)pair * gridDim.y + blockIdx.y];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      *reinterpret_cast<float2 *>(&part.acc[g][warp * 32 + j * 8 + t * 2]) = float2{o[j][0], o[j][1]};
      *reinterpret_cast<float2 *>(&part.acc[g + 8][warp * 32 + j * 8 + t * 2]) = float2{o[j][2], o[j][3]};
    }
    if (warp == 0 && t == 0) part.max[g] = max0, part.max[g + 8] = max1, part.sum[g] = sum0, part.sum[g + 8] = sum1;
  } else {
    // Each thread block combines some heads, which all send it.
    constexpr int MINE = GROUP / CLUSTER;
    if (MODE != RESCORED) cluster_wait();
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int h = g + half * 8, to = h / MINE, at = rank * MINE + h % MINE;
#pragma unroll
      for (int j = 0; j < 4; j++)
        cluster_store(reinterpret_cast<float2 *>(&s.acc[at][warp * 32 + j * 8 + t * 2]), to,
                      float2{o[j][half * 2], o[j][half * 2 + 1]});
      if (warp == 0 && t == 0) cluster_store(&s.state[at], to, half ? float2{max1, sum1} : float2{max0, sum0});
    }
    cluster_sync();
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      float most = -INFINITY, total = 0, x = 0;
#pragma unroll
      for (int c = 0; c < CLUSTER; c++) most = fmaxf(most, s.state[c * MINE + i].x);
#pragma unroll
      for (int c = 0; c < CLUSTER; c++) {
        float weight = exp2f(s.state[c * MINE + i].x - most);
        total = fmaf(s.state[c * MINE + i].y, weight, total);
        x = fmaf(s.acc[c * MINE + i][tid], weight, x);
      }
      args.out[((int64_t)pair * GROUP + rank * MINE + i) * DIM + tid] = x / total;
    }
  }
#endif
}

struct combine_args {
  const float *part;
  int n_parts;
  float *out;
};

// One thread block a (row, query head).
__global__ void __launch_bounds__(DIM) combine_kernel(const combine_args args) {
#if M3_MSA_HOPPER
  __shared__ float weight[DENSE_PARTS], sum[DENSE_PARTS];
  int pair = blockIdx.x / GROUP, h = blockIdx.x % GROUP, tid = threadIdx.x;
  launch_next();
  wait_previous();
  const dense_part *part = reinterpret_cast<const dense_part *>(args.part) + (int64_t)pair * args.n_parts;
  if (tid < args.n_parts) {
    weight[tid] = __ldcg(&part[tid].max[h]);
    sum[tid] = __ldcg(&part[tid].sum[h]);
  }
  float most = -INFINITY, total = 0, x = 0;
  __syncthreads();
  for (int i = 0; i < args.n_parts; i++) most = fmaxf(most, weight[i]);
#pragma unroll 16
  for (int i = 0; i < args.n_parts; i++) {
    float w = exp2f(weight[i] - most);
    total = fmaf(sum[i], w, total);
    x = fmaf(__ldcg(&part[i].acc[h][tid]), w, x);
  }
  args.out[(int64_t)blockIdx.x * DIM + tid] = x / total;
#endif
}

template <class T, attend_mode MODE>
m3_msa_result launch_listed(const attend_args &args, cudaStream_t stream) {
  int pairs = args.rows.n * HEADS;
  auto shape = [&](int cluster) {
    return launch_shape{dim3((unsigned)(pairs * cluster)), dim3(THREADS), sizeof(attend_buffer), cluster, true};
  };
  switch (cluster_for(pairs)) {
    case 16: return launch(attend_kernel<T, 16, MODE>, args, shape(16), stream);
    case 8: return launch(attend_kernel<T, 8, MODE>, args, shape(8), stream);
  }
  if constexpr (MODE == RESCORED)
    return M3_MSA_REFUSED;  // the caller has few rows
  else
    switch (cluster_for(pairs)) {
      case 4: return launch(attend_kernel<T, 4, MODE>, args, shape(4), stream);
      case 2: return launch(attend_kernel<T, 2, MODE>, args, shape(2), stream);
      default: return launch(attend_kernel<T, 1, MODE>, args, shape(1), stream);
    }
}

template <attend_mode MODE>
m3_msa_result launch_typed(int32_t type, const attend_args &args, cudaStream_t stream) {
  return type == M3_TYPE_BF16 ? launch_listed<__nv_bfloat16, MODE>(args, stream)
                              : launch_listed<__half, MODE>(args, stream);
}

bool attend_taken(const m3_msa_attend &p) {
  return hopper_multiprocessors() && shape_taken(p.shape) && decode_rows_taken(p.rows) &&
         (p.kv_type == M3_TYPE_BF16 || p.kv_type == M3_TYPE_F16);
}

bool make_args(const m3_msa_attend &p, attend_args &args) {
  args = {};
  args.rows = p.rows;
  args.q = p.q;
  args.out = p.out;
  return map_pages(&args.k, p.k, p.kv_type) && map_pages(&args.v, p.v, p.kv_type);
}

}  // namespace

}  // namespace m3_msa

using namespace m3_msa;

m3_msa_result m3_msa_attend_decode(const m3_msa_attend *p, cudaStream_t stream) {
  if (!attend_taken(*p)) return M3_MSA_REFUSED;
  attend_args args;
  if (!make_args(*p, args)) return M3_MSA_FAILED;
  args.list = p->blocks;
  return launch_typed<LISTED>(p->kv_type, args, stream);
}

m3_msa_result m3_msa_decode(const m3_msa_select *s, const m3_msa_attend *a, cudaStream_t stream) {
  attend_args args;
  if (!attend_taken(*a)) return M3_MSA_REFUSED;
  if (!make_args(*a, args)) return M3_MSA_FAILED;
  m3_msa_result result = scan(*s, stream);
  if (result != M3_MSA_LAUNCHED) return result;
  if (s->rows.max_blocks > TOPK_ALONE) {
    result = choose(*s, stream);
    if (result != M3_MSA_LAUNCHED) return result;
    args.list = s->blocks;
    return launch_typed<LISTED>(a->kv_type, args, stream);
  }
  args.scores = static_cast<const float *>(s->work);
  args.stride = stride_of(s->rows);
  args.local = s->shape.local_blocks;
  args.blocks = s->blocks;
  return launch_typed<CHOSEN>(a->kv_type, args, stream);
}

namespace {

// Thread blocks of a (row, KV head): twice the multiprocessors in all, two of which one holds.
unsigned dense_parts(unsigned pairs, int multiprocessors) {
  unsigned parts = (unsigned)(2 * multiprocessors) / pairs;
  return parts < 1 ? 1 : parts > DENSE_PARTS ? DENSE_PARTS : parts;
}

}  // namespace

size_t m3_msa_dense_bytes(int32_t n_rows) {
  int multiprocessors = hopper_multiprocessors(), pairs = n_rows * HEADS;
  if (!multiprocessors) return 0;
  return (size_t)(pairs > 2 * multiprocessors ? pairs : 2 * multiprocessors) * sizeof(dense_part);
}

m3_msa_result m3_msa_low_bit_decode(const m3_msa_low_bit *p, const m3_msa_attend *a, cudaStream_t stream) {
  attend_args args;
  if (!attend_taken(*a)) return M3_MSA_REFUSED;
  if (!make_args(*a, args)) return M3_MSA_FAILED;
  m3_msa_result result = bounds(*p, &args.rescored, stream);
  if (result != M3_MSA_LAUNCHED) return result;
  if (cluster_for(p->select.rows.n * HEADS) < 8) {
    result = choose_rescored(args.rescored, p->select.blocks, stream);
    if (result != M3_MSA_LAUNCHED) return result;
    args.list = p->select.blocks;
    return launch_typed<LISTED>(a->kv_type, args, stream);
  }
  args.blocks = p->select.blocks;
  return launch_typed<RESCORED>(a->kv_type, args, stream);
}

m3_msa_result m3_msa_dense_decode(const m3_msa_attend *p, void *work, cudaStream_t stream) {
  int multiprocessors = hopper_multiprocessors();
  if (!attend_taken(*p)) return M3_MSA_REFUSED;
  attend_args args;
  if (!make_args(*p, args)) return M3_MSA_FAILED;
  args.part = static_cast<float *>(work);
  unsigned pairs = (unsigned)(p->rows.n * HEADS);
  unsigned parts = dense_parts(pairs, multiprocessors);
  if (parts > p->rows.max_blocks) parts = (unsigned)p->rows.max_blocks;
  launch_shape shape = {dim3(pairs, parts), dim3(THREADS), sizeof(attend_buffer), 1, true};
  m3_msa_result result = p->kv_type == M3_TYPE_BF16
                             ? launch(attend_kernel<__nv_bfloat16, 1, DENSE>, args, shape, stream)
                             : launch(attend_kernel<__half, 1, DENSE>, args, shape, stream);
  if (result != M3_MSA_LAUNCHED) return result;
  combine_args combine = {args.part, (int)parts, p->out};
  return launch(combine_kernel, combine, {dim3(pairs * GROUP), dim3(DIM), 0, 1, true}, stream);
}
