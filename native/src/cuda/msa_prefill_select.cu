// Block selection of many consecutive queries. Keys are packed once as float16 with a power of two for each page,
// float32 keys in two parts; queries become two float16 parts, so that products lose less than 2^-20 of |q| |k|; four
// warpgroups, one a head, score 64 queries against one block after another and keep the best 16 of each row, so that
// scores never reach memory. What the second parts contribute is added only if the product of the first ones with a
// bound of it reaches the weakest kept score of some row.
#include <math.h>

#include "msa_launch.cuh"
#include "msa_wgmma.cuh"

namespace m3_msa {

namespace {

constexpr int TILE = 64;                       // queries
constexpr int CONSUMERS = HEADS * 128;         // threads
constexpr int PACKED_BYTES = PAGE_BYTES + 16;  // a page, or the first parts of its keys, and its factor and norm
constexpr int STAGE_BYTES = PAGE_BYTES + 1024, STAGES = 2;
constexpr int PART_BYTES = TILE * ROW_BYTES;  // one part of the queries of one head
constexpr int MAX_SPLITS = 16;
constexpr int LIST_ROWS = TILE * HEADS;

// Parts of a key, and bytes of a packed page.
template <class Key>
constexpr int key_parts = sizeof(Key) == 4 ? 2 : 1;
template <int PARTS>
constexpr int64_t page_stride = PACKED_BYTES + (PARTS - 1) * PAGE_BYTES;

struct pack_args {
  const char *index;
  const int32_t *table;
  char *packed;
  int32_t *not_finite, code;
};

struct score_args {
  const char *packed;
  const float *q;
  int64_t first_pos;
  int32_t n, local, splits, blocks_each, max_others;
  float *scores;  // [tiles, splits, TOP_K, LIST_ROWS]
  uint16_t *ids;  // the same
  int32_t *not_finite, code;
};

struct merge_args {
  const float *scores;
  const uint16_t *ids;
  int64_t first_pos;
  int32_t n, local, splits, blocks_each;
  int32_t *blocks;
};

struct alignas(1024) score_buffer {
  char q[HEADS][2][PART_BYTES];
  char key[STAGES][STAGE_BYTES];
  float slack[LIST_ROWS];  // what the second part of a query and rounding can change, for keys of norm 1
  float score[TOP_K][LIST_ROWS];
  uint16_t id[TOP_K][LIST_ROWS];
  uint64_t full[STAGES], empty[STAGES];
};

#if M3_MSA_HOPPER
__device__ __forceinline__ float square(float x) { return x * x; }
// Whether x is true in any of the 128 threads that use a barrier.
__device__ __forceinline__ bool group_any(int barrier, bool x) {
  uint32_t any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
               : "=r"(any)
               : "r"((uint32_t)x), "r"(barrier)
               : "memory");
  return any;
}
#endif

// Eight numbers of a key from the `at`-th on.
#if M3_MSA_HOPPER
template <class Key>
__device__ __forceinline__ void load_numbers(const char *page, int at, float (&y)[8]) {
  uint4 x = __ldcs(reinterpret_cast<const uint4 *>(page + at * 2));
#pragma unroll
  for (int j = 0; j < 8; j++) {
    uint32_t word = j < 2 ? x.x : j < 4 ? x.y : j < 6 ? x.z : x.w;
    uint16_t bits = (uint16_t)(j % 2 ? word >> 16 : word);
    y[j] = widen(*reinterpret_cast<const Key *>(&bits));
  }
}
template <>
__device__ __forceinline__ void load_numbers<float>(const char *page, int at, float (&y)[8]) {
  float4 a = __ldcs(reinterpret_cast<const float4 *>(page + at * 4)),
         b = __ldcs(reinterpret_cast<const float4 *>(page + at * 4) + 1);
  y[0] = a.x, y[1] = a.y, y[2] = a.z, y[3] = a.w, y[4] = b.x, y[5] = b.y, y[6] = b.z, y[7] = b.w;
}
#endif

// One thread block a page.
template <class Key>
__global__ void __launch_bounds__(256) pack_kernel(const __grid_constant__ pack_args args) {
#if M3_MSA_HOPPER
  constexpr int PARTS = key_parts<Key>;
  __shared__ uint32_t warp_largest[8], warp_norm[8];
  wait_previous();
  launch_next();
  int tid = threadIdx.x;
  const char *page = args.index + (int64_t)args.table[blockIdx.x] * BLOCK * DIM * (int)sizeof(Key);
  float y[8][8];
#pragma unroll
  for (int i = 0; i < 8; i++) load_numbers<Key>(page, (i * 256 + tid) * 8, y[i]);
  uint32_t largest = 0, norm = 0;  // bits of floats >= 0
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float square = 0;  // of the key that 16 lanes have
#pragma unroll
    for (int j = 0; j < 8; j++) {
      largest = max(largest, __float_as_uint(fabsf(y[i][j])));
      square = fmaf(y[i][j], y[i][j], square);
    }
#pragma unroll
    for (int x = 1; x < 16; x *= 2) square += __shfl_xor_sync(~0u, square, x);
    norm = max(norm, __float_as_uint(square));
  }
  largest = __reduce_max_sync(~0u, largest);
  norm = __reduce_max_sync(~0u, norm);
  if (tid % 32 == 0) warp_largest[tid / 32] = largest, warp_norm[tid / 32] = norm;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 8; w++) largest = max(largest, warp_largest[w]), norm = max(norm, warp_norm[w]);
  if (largest >= 0x7f800000u) atomicMin(args.not_finite, args.code);
  float scale = split_scale<__half>(largest);
  char *to = args.packed + (int64_t)blockIdx.x * page_stride<PARTS>;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int at = (i * 256 + tid) * 8, row = at / DIM, column = at % DIM;
    uint32_t w[4][PARTS];
#pragma unroll
    for (int j = 0; j < 4; j++) split_pair<__half>(y[i][2 * j] * scale, y[i][2 * j + 1] * scale, w[j]);
#pragma unroll
    for (int p = 0; p < PARTS; p++)
      *reinterpret_cast<uint4 *>(to + p * PACKED_BYTES + column / 64 * (PAGE_BYTES / 2) + swizzled(row, column % 64)) =
          uint4{w[0][p], w[1][p], w[2][p], w[3][p]};
  }
  if (tid == 0)
    *reinterpret_cast<float2 *>(to + PAGE_BYTES) = float2{1.0f / scale, sqrtf(__uint_as_float(norm)) * 1.001f};
#endif
}

// KEY_PARTS: parts of the keys, which go through the stages one after the other.
template <int KEY_PARTS>
__global__ void __launch_bounds__(CONSUMERS + 128, 1) score_kernel(const __grid_constant__ score_args args) {
#if M3_MSA_HOPPER
  extern __shared__ __align__(1024) char memory[];
  score_buffer &s = *reinterpret_cast<score_buffer *>(memory);
  int tid = threadIdx.x;
  // The last tiles see most: they start first.
  int tiles = gridDim.x / args.splits, tile = tiles - 1 - (int)blockIdx.x % tiles, split = (int)blockIdx.x / tiles;
  int64_t last_pos = args.first_pos + min(args.n, (tile + 1) * TILE) - 1;
  int first = split * args.blocks_each;
  int end = (int)min((int64_t)first + args.blocks_each, last_pos / BLOCK + 1 - args.local);
  if (first >= end) return;
  if (tid == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], CONSUMERS / 32);
  }
  barrier_init_done();
  wait_previous();
  if (tid < CONSUMERS) {
    // Queries in two parts. A warp takes a row at a time.
    int lane = tid % 32;
    for (int i = 0; i < LIST_ROWS / (CONSUMERS / 32); i += 4) {
      float4 x[4];
#pragma unroll
      for (int u = 0; u < 4; u++) {
        int r = (i + u) * (CONSUMERS / 32) + tid / 32, row = tile * TILE + r / HEADS;  // [query, head]
        x[u] = row < args.n
                   ? __ldcg(reinterpret_cast<const float4 *>(args.q + ((int64_t)row * HEADS + r % HEADS) * DIM) + lane)
                   : float4{0, 0, 0, 0};
      }
#pragma unroll
      for (int u = 0; u < 4; u++) {
        int r = (i + u) * (CONSUMERS / 32) + tid / 32;
        float m = fmaxf(fmaxf(fabsf(x[u].x), fabsf(x[u].y)), fmaxf(fabsf(x[u].z), fabsf(x[u].w)));
        float bad = (x[u].x + x[u].y + x[u].z + x[u].w) * 0.0f;
        if (bad != 0) atomicMin(args.not_finite, args.code);
        float scale = split_scale<__half>(__reduce_max_sync(~0u, __float_as_uint(m)));
        uint32_t lo[2], hi[2];
        split_pair<__half>(x[u].x * scale, x[u].y * scale, lo);
        split_pair<__half>(x[u].z * scale, x[u].w * scale, hi);
        // Norms of the query and of its second part.
        float2 e = __half22float2(*reinterpret_cast<__half2 *>(&lo[1])),
               f = __half22float2(*reinterpret_cast<__half2 *>(&hi[1]));
        float all = square(x[u].x * scale) + square(x[u].y * scale) + square(x[u].z * scale) + square(x[u].w * scale);
        float second = e.x * e.x + e.y * e.y + f.x * f.x + f.y * f.y;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) {
          all += __shfl_xor_sync(~0u, all, o);
          second += __shfl_xor_sync(~0u, second, o);
        }
        // The second part of a key is at most 2^-11 of it.
        float share = KEY_PARTS == 1 ? 0x1p-18f : 0x1p-11f + 0x1p-18f;
        if (lane == 0) s.slack[r % HEADS * TILE + r / HEADS] = (sqrtf(second) + share * sqrtf(all)) * 1.001f;
#pragma unroll
        for (int p = 0; p < 2; p++)
          *reinterpret_cast<uint2 *>(s.q[r % HEADS][p] + lane / 16 * (PART_BYTES / 2) +
                                     swizzled(r / HEADS, lane % 16 * 4)) = uint2{lo[p], hi[p]};
      }
    }
    for (int i = tid; i < TOP_K * LIST_ROWS; i += CONSUMERS) {
      int slot = i / LIST_ROWS;
      s.score[slot][i % LIST_ROWS] = slot < TOP_K - args.local ? -INFINITY : INFINITY;
      s.id[slot][i % LIST_ROWS] = 0xffff;
    }
    proxy_fence();
  }
  __syncthreads();
  if (tid >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (tid == CONSUMERS)
      for (int i = 0; i < (end - first) * KEY_PARTS; i++) {
        int stage = i % STAGES, part = i % KEY_PARTS, bytes = part ? PAGE_BYTES : PACKED_BYTES;
        if (i >= STAGES) barrier_wait(&s.empty[stage], (i / STAGES - 1) & 1);
        barrier_expect(&s.full[stage], bytes);
        bulk_load(s.key[stage],
                  args.packed + (first + i / KEY_PARTS) * page_stride<KEY_PARTS> + (int64_t)part * PACKED_BYTES, bytes,
                  &s.full[stage]);
      }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    int head = tid / 128, warp = tid / 32 % 4, lane = tid % 32, g = lane / 4, t = lane % 4;
    // Lanes 0 and 1 of a quad keep the lists of its two rows.
    int query = warp * 16 + g + (t & 1) * 8, list = head * TILE + query, row = tile * TILE + query;
    int64_t others = row < args.n && t < 2 ? (args.first_pos + row) / BLOCK + 1 - args.local : 0;
    int weakest = 0;
    float threshold = -INFINITY;
    float slack = s.slack[list];
    uint32_t q_at = shared_address(s.q[head][0]);
    float d[64];
    // Adds one part of the queries times the keys of a stage, or begins with it; the largest sum of the lane's row.
    auto product = [&](int part, uint32_t key_at, bool add) {
      hold(d);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < DIM / 16; k++)
        wgmma<__half>(d, operand(q_at + part * PART_BYTES + k / 4 * (PART_BYTES / 2) + k % 4 * 32),
                      operand(key_at + k / 4 * (PAGE_BYTES / 2) + k % 4 * 32), add || k > 0);
      wgmma_commit();
      wgmma_wait<0>();
      hold(d);
      float m0 = d[0], m1 = d[2];
#pragma unroll
      for (int j = 0; j < 16; j++) {
        m0 = fmaxf(m0, fmaxf(d[4 * j], d[4 * j + 1]));
        m1 = fmaxf(m1, fmaxf(d[4 * j + 2], d[4 * j + 3]));
      }
#pragma unroll
      for (int x = 1; x <= 2; x *= 2) {
        m0 = fmaxf(m0, __shfl_xor_sync(~0u, m0, x));
        m1 = fmaxf(m1, __shfl_xor_sync(~0u, m1, x));
      }
      return t & 1 ? m1 : m0;
    };
    int used = 0;  // stages
    auto next_stage = [&] {
      barrier_wait(&s.full[used % STAGES], used / STAGES & 1);
      return s.key[used % STAGES];
    };
    auto free_stage = [&] {
      __syncwarp();  // all lanes have read the factor
      if (lane == 0) barrier_arrive(&s.empty[used % STAGES]);
      used++;
    };
    for (int b = first; b < end; b++) {
      const char *keys = next_stage();
      float2 tail = *reinterpret_cast<const float2 *>(keys + PAGE_BYTES);
      float score = product(0, shared_address(keys), false) * tail.x;
      bool wanted = group_any(1 + head, b < others && score + slack * tail.y >= threshold);
      if (wanted) score = product(1, shared_address(keys), true) * tail.x;
      free_stage();
      if (KEY_PARTS == 2) {
        keys = next_stage();
        if (wanted) score = product(0, shared_address(keys), true) * tail.x;
        free_stage();
      }
      if (!wanted) continue;
      // Blocks come in ascending order: an equal score does not displace, and of equal ones the last is displaced.
      if (b < others && score > threshold) {
        s.score[weakest][list] = score;
        s.id[weakest][list] = (uint16_t)b;
        float low = INFINITY;
        int low_id = -1;
#pragma unroll
        for (int j = 0; j < TOP_K; j++) {
          float x = s.score[j][list];
          int id = s.id[j][list];
          if (x < low || (x == low && id > low_id)) low = x, low_id = id, weakest = j;
        }
        threshold = low;
      }
    }
    if (t < 2) {
      int64_t to = ((int64_t)tile * args.splits + split) * TOP_K * LIST_ROWS + list;
#pragma unroll
      for (int j = 0; j < TOP_K; j++) {
        args.scores[to + j * LIST_ROWS] = s.score[j][list];
        args.ids[to + j * LIST_ROWS] = s.id[j][list];
      }
    }
  }
#endif
}

// One warp a (row, head): the best of the splits and the local blocks, ascending.
__global__ void __launch_bounds__(256) merge_kernel(const __grid_constant__ merge_args args) {
#if M3_MSA_HOPPER
  wait_previous();
  int lane = threadIdx.x % 32;
  int64_t pair = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
  if (pair >= (int64_t)args.n * HEADS) return;
  int row = (int)(pair / HEADS), head = (int)(pair % HEADS), tile = row / TILE;
  int n_blocks = (int)((args.first_pos + row) / BLOCK) + 1, list = -1;
  if (n_blocks <= TOP_K) {
    if (lane < n_blocks) list = lane;
  } else {
    int others = n_blocks - args.local, room = TOP_K - args.local;
    int splits = (others + args.blocks_each - 1) / args.blocks_each;
    constexpr int EACH = MAX_SPLITS * TOP_K / 32;
    uint32_t score[EACH], id[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      int at = i * 32 + lane, split = at / TOP_K, slot = at % TOP_K;
      score[i] = id[i] = 0;
      if (split < splits && slot < room) {
        int64_t from = (((int64_t)tile * args.splits + split) * TOP_K + slot) * LIST_ROWS + head * TILE + row % TILE;
        int b = args.ids[from];
        if (b != 0xffff) score[i] = ordered(args.scores[from]), id[i] = (uint32_t)~b;
      }
    }
    for (int taken = 0; taken < room; taken++) {
      uint32_t best = 0, best_id = 0;
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (score[i] > best || (score[i] == best && id[i] > best_id)) best = score[i], best_id = id[i];
      uint32_t top = __reduce_max_sync(~0u, best), top_id = __reduce_max_sync(~0u, best == top ? best_id : 0);
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (id[i] == top_id) score[i] = id[i] = 0;
      if (lane == taken) list = (int)~top_id;
    }
    if (lane >= room && lane < TOP_K) list = others + lane - room;
    int at = 0;
#pragma unroll
    for (int j = 0; j < TOP_K; j++) at += __shfl_sync(~0u, list, j) < list;
    if (lane < TOP_K) args.blocks[pair * TOP_K + at] = list;
    return;
  }
  if (lane < TOP_K) args.blocks[pair * TOP_K + lane] = list;
#endif
}

size_t packed_bytes(int64_t blocks, int32_t index_type) {
  return ((size_t)(blocks * (index_type == M3_TYPE_F32 ? page_stride<2> : page_stride<1>)) + 255) / 256 * 256;
}

struct prefill_plan {
  int tiles, splits, blocks_each, others;  // others: candidates of the last row
  size_t packed_bytes, score_bytes, id_bytes;
};

prefill_plan make_plan(const m3_msa_prefill &p, int multiprocessors) {
  prefill_plan plan;
  int64_t n = p.n, first_pos = p.first_pos, blocks = (first_pos + n - 1) / BLOCK + 1;
  plan.tiles = (int)((n + TILE - 1) / TILE);
  plan.others = blocks <= TOP_K ? 0 : (int)blocks - p.shape.local_blocks;  // no choice, no scores
  // Some six thread blocks for each multiprocessor, each of at least 16 blocks of keys.
  int64_t work = 0;
  for (int i = 0; i < plan.tiles; i++) work += (first_pos + (int64_t)(i + 1) * TILE) / BLOCK;
  int64_t each = work / (multiprocessors * 6), least = (plan.others + MAX_SPLITS - 1) / MAX_SPLITS;
  each = each < 16 ? 16 : each;
  each = each < least ? least : each;
  plan.blocks_each = (int)each;
  plan.splits = plan.others ? (int)((plan.others + each - 1) / each) : 1;
  plan.packed_bytes = packed_bytes(plan.others, p.index_type);
  size_t entries = (size_t)plan.tiles * (size_t)plan.splits * TOP_K * LIST_ROWS;
  plan.score_bytes = entries * sizeof(float);
  plan.id_bytes = entries * sizeof(uint16_t);
  return plan;
}

}  // namespace

}  // namespace m3_msa

using namespace m3_msa;

size_t m3_msa_prefill_select_bytes(int32_t n, int64_t max_blocks, int32_t index_type) {
  int multiprocessors = hopper_multiprocessors();
  if (!multiprocessors) return 0;
  // A split has at least 1/6 of a multiprocessor's share of the work (give or take 1/16), and the work of all tiles is
  // at least a third of what it were if each saw as much as the last: tiles * splits <= 20 multiprocessors + tiles.
  size_t tiles = ((size_t)n + TILE - 1) / TILE, parts = tiles * MAX_SPLITS, most = (size_t)multiprocessors * 20 + tiles;
  return packed_bytes(max_blocks, index_type) +
         (parts < most ? parts : most) * TOP_K * LIST_ROWS * (sizeof(float) + sizeof(uint16_t));
}

template <class Key>
static m3_msa_result score_blocks(const m3_msa_prefill &p, const prefill_plan &plan, float *scores, uint16_t *ids,
                                  cudaStream_t stream) {
  char *packed = static_cast<char *>(p.work);
  pack_args pack = {static_cast<const char *>(p.index), p.table, packed, p.not_finite, p.code};
  m3_msa_result result = launch(pack_kernel<Key>, pack, {dim3((unsigned)plan.others), dim3(256), 0, 1, true}, stream);
  if (result != M3_MSA_LAUNCHED) return result;
  score_args score = {packed,           p.index_q,   p.first_pos, p.n, p.shape.local_blocks, plan.splits,
                      plan.blocks_each, plan.others, scores,      ids, p.not_finite,         p.code};
  return launch(score_kernel<key_parts<Key>>, score,
                {dim3((unsigned)(plan.tiles * plan.splits)), dim3(CONSUMERS + 128), sizeof(score_buffer), 1, true},
                stream);
}

m3_msa_result m3_msa_prefill_select(const m3_msa_prefill *p, cudaStream_t stream) {
  int multiprocessors = hopper_multiprocessors();
  if (!multiprocessors || !shape_taken(p->shape) || p->n < 1 || p->first_pos < 0 ||
      p->first_pos + p->n > (int64_t)M3_MSA_MAX_BLOCKS * BLOCK ||
      (p->index_type != M3_TYPE_BF16 && p->index_type != M3_TYPE_F16 && p->index_type != M3_TYPE_F32))
    return M3_MSA_REFUSED;
  prefill_plan plan = make_plan(*p, multiprocessors);
  float *scores = reinterpret_cast<float *>(static_cast<char *>(p->work) + plan.packed_bytes);
  uint16_t *ids = reinterpret_cast<uint16_t *>(reinterpret_cast<char *>(scores) + plan.score_bytes);
  if (plan.others) {
    m3_msa_result result = p->index_type == M3_TYPE_F32   ? score_blocks<float>(*p, plan, scores, ids, stream)
                           : p->index_type == M3_TYPE_F16 ? score_blocks<__half>(*p, plan, scores, ids, stream)
                                                          : score_blocks<__nv_bfloat16>(*p, plan, scores, ids, stream);
    if (result != M3_MSA_LAUNCHED) return result;
  }
  merge_args merge = {scores, ids, p->first_pos, p->n, p->shape.local_blocks, plan.splits, plan.blocks_each, p->blocks};
  return launch(merge_kernel, merge, {dim3((unsigned)((p->n * (int64_t)HEADS + 7) / 8)), dim3(256), 0, 1, true},
                stream);
}
