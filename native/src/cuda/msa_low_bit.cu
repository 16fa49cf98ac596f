// Low-bit copies of index keys: writing them, and block selection of decode rows with them.
#include "msa_bounds.cuh"
#include "msa_launch.cuh"
#include "msa_rescore.cuh"
#include "msa_select.cuh"

namespace m3_msa {

namespace {

constexpr int STORE_THREADS = 256, STORE_LANES = 16;  // of one token

#if M3_MSA_HOPPER

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int o = STORE_LANES / 2; o >= 1; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

// bfloat16 bits of a number that is not below x >= 0.
__device__ __forceinline__ uint32_t up_to_bfloat16(float x) {
  return (uint32_t)__bfloat16_as_ushort(__float2bfloat16_ru(x));
}

#endif

// 16 lanes a token: lane 4 t + w has channels 32 w + 4 t + {0..3} and those 16 further on.
template <int BITS>
__global__ void __launch_bounds__(STORE_THREADS) store_kernel(const m3_msa_low_bit_store_params args) {
#if M3_MSA_HOPPER
  using layout = low_bit_layout<BITS>;
  int lane = threadIdx.x % STORE_LANES, t = lane / 4, w = lane % 4;
  int64_t token = (int64_t)blockIdx.x * (STORE_THREADS / STORE_LANES) + threadIdx.x / STORE_LANES;
  bool out = token < args.n;
  if (!out) token = args.n - 1;
  launch_next();
  wait_previous();
  int64_t pos = __ldcg(args.pos + token), page = __ldcg(args.tables[__ldcg(args.seq + token)] + pos / BLOCK);
  int slot = (int)(pos % BLOCK);
  int64_t at = (page * BLOCK + slot) * DIM + w * 32 + t * 4;
  float4 x[2] = {key_at(args.index, args.index_type, at), key_at(args.index, args.index_type, at + 16)};
  float v[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
  float most = 0, finite = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    most = fmaxf(most, fabsf(v[i]));
    finite = fmaf(v[i], 0.0f, finite);
  }
#pragma unroll
  for (int o = STORE_LANES / 2; o >= 1; o /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  bool trusted = sum_of_lanes(finite) == 0 && most <= TRUSTED_MOST, small = most < 1e-20f;
  // Numbers are scaled to at most 1 for their squares.
  float inverse = trusted && !small ? 1 / most : 0, step = 0, error = 0, norm = 0;
  int code[8] = {};
  if (BITS == 8) {
    step = __uint_as_float(up_to_bfloat16(most / layout::LARGEST) << 16);
#pragma unroll
    for (int i = 0; i < 8; i++) code[i] = max(-127, min(127, __float2int_rn(v[i] / step)));
  }
  // A smaller step is finer, but cuts off the largest numbers: the one of least error.
#pragma unroll 1
  for (int i = 0; i < (BITS == 8 ? 1 : 8); i++) {
    float s = BITS == 8 ? step : __uint_as_float(up_to_bfloat16(most * (1 - 0.05f * (float)i) / layout::LARGEST) << 16);
    float to = 1 / s, e = 0, n = 0;
    int c[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      c[j] = BITS == 8 ? code[j] : max(0, min(15, __float2int_rn(fmaf(v[j], to, 15.0f) * 0.5f)));
      float y = s * (float)(BITS == 8 ? c[j] : 2 * c[j] - 15), d = (v[j] - y) * inverse;
      e = fmaf(d, d, e);
      n = fmaf(y * inverse, y * inverse, n);
    }
    e = sum_of_lanes(e);
    n = sum_of_lanes(n);
    if (i == 0 || e < error) {
      step = s, error = e, norm = n;
#pragma unroll
      for (int j = 0; j < 8; j++) code[j] = c[j];
    }
  }
  float spread = (sqrtf(error) + sqrtf(norm) * (QUERY_ERROR + SUM_ERROR)) * most;
  if (small) {
    step = 0;
    spread = most * 11.4f;  // sqrt(DIM)
  }
  spread = fmaf(spread, 1.001f, 2 * UNDERFLOW);
  if (!trusted) {
    step = 0;
    spread = INFINITY;
  }
  if (!trusted || small)
#pragma unroll
    for (int j = 0; j < 8; j++) code[j] = 0;
  if (!out) return;
  char *chunk = static_cast<char *>(args.pages) + page * layout::PAGE + slot / layout::TOKENS * layout::CHUNK_BYTES;
  int in_chunk = slot % layout::TOKENS;
  uint32_t words[2] = {};
#pragma unroll
  for (int j = 0; j < 8; j++) words[j / 4] |= (uint32_t)(code[j] & 255) << j % 4 * 8;
  if (BITS == 4)
    *reinterpret_cast<uint32_t *>(chunk + in_chunk * 64 + lane * 4) = words[0] | words[1] << 4;
  else
    *reinterpret_cast<uint2 *>(chunk + w / 2 * layout::PLANE_BYTES + in_chunk * 64 + t * 16 + w % 2 * 8) =
        uint2{words[0], words[1]};
  if (lane == 0)
    *reinterpret_cast<uint32_t *>(chunk + layout::PAIRS_AT + in_chunk * 4) =
        __float_as_uint(step) >> 16 | up_to_bfloat16(spread) << 16;
#endif
}

struct choose_args {
  rescore_args rescored;
  int32_t *blocks;
};

template <int CLUSTER>
__global__ void __launch_bounds__(RESCORE_THREADS) choose_kernel(const __grid_constant__ choose_args args) {
#if M3_MSA_HOPPER
  extern __shared__ __align__(16) char memory[];
  __shared__ int32_t list[TOP_K];
  int pair = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  launch_next();
  if (CLUSTER > 1) cluster_arrive();
  rescore<CLUSTER> choice(args.rescored, *reinterpret_cast<rescore_buffer<CLUSTER> *>(memory), pair, rank);
  if (CLUSTER > 1) cluster_wait();
  wait_previous();
  choice.choose(list);
  if (rank == 0 && threadIdx.x < TOP_K) args.blocks[pair * TOP_K + threadIdx.x] = list[threadIdx.x];
#endif
}

template <int CLUSTER>
m3_msa_result launch_choose(const choose_args &args, cudaStream_t stream) {
  return launch(choose_kernel<CLUSTER>, args,
                {dim3((unsigned)(args.rescored.rows.n * HEADS * CLUSTER)), dim3(RESCORE_THREADS),
                 sizeof(rescore_buffer<CLUSTER>), CLUSTER, true},
                stream);
}

template <int BITS, int ROWS>
m3_msa_result launch_bounds(const bounds_args &args, int grid, cudaStream_t stream) {
  size_t shared = (size_t)(BOUNDS_WARPS * args.stages * low_bit_layout<BITS>::CHUNK_BYTES);
  return launch(bounds_kernel<BITS, ROWS>, args, {dim3((unsigned)grid), dim3(BOUNDS_THREADS), shared, 1, true}, stream);
}
template <int BITS>
m3_msa_result launch_rows(const bounds_args &args, int grid, cudaStream_t stream) {
  switch (args.rows.per_sequence) {
    case 1: return launch_bounds<BITS, 1>(args, grid, stream);
    case 2: return launch_bounds<BITS, 2>(args, grid, stream);
    default: return launch_bounds<BITS, 4>(args, grid, stream);
  }
}

bool type_taken(int32_t type) { return type == M3_TYPE_BF16 || type == M3_TYPE_F16 || type == M3_TYPE_F32; }

}  // namespace

m3_msa_result bounds(const m3_msa_low_bit &p, rescore_args *next, cudaStream_t stream) {
  const m3_msa_rows &rows = p.select.rows;
  int multiprocessors = hopper_multiprocessors();
  if (!multiprocessors || !shape_taken(p.select.shape) || !decode_rows_taken(rows) ||
      rows.n / rows.per_sequence > BOUNDS_SEQUENCES || !type_taken(p.select.index_type) || (p.bits != 4 && p.bits != 8))
    return M3_MSA_REFUSED;
  int64_t blocks = (int64_t)rows.n / rows.per_sequence * rows.max_blocks;
  int64_t grid = (int64_t)multiprocessors * 3;
  if (grid > MOST_SEEDS) grid = MOST_SEEDS;
  if (grid > blocks) grid = blocks;
  piece_bounds *of_pieces = static_cast<piece_bounds *>(p.select.work);
  int64_t n_bounds = (int64_t)rows.n * HEADS * rows.max_blocks;
  float *of_blocks = reinterpret_cast<float *>(of_pieces + n_bounds * PIECES), *seeds = of_blocks + n_bounds;
  // One load a warp leaves room for the next kernel to start early.
  int loads = p.bits == 4 ? 1 : 2;
  int stages = blocks * loads <= grid * BOUNDS_WARPS ? 1 : BOUNDS_STAGES;
  bounds_args args = {rows,
                      static_cast<const char *>(p.pages),
                      p.select.index,
                      p.select.index_type,
                      p.select.index_q,
                      of_pieces,
                      of_blocks,
                      seeds,
                      p.select.shape.local_blocks,
                      stages,
                      p.bits == 4};
  *next = {rows,  p.select.index, p.select.index_type,         p.select.index_q,    of_pieces,     of_blocks,
           seeds, (int32_t)grid,  p.select.shape.local_blocks, p.select.not_finite, p.select.code, p.rescored};
  return p.bits == 4 ? launch_rows<4>(args, (int)grid, stream) : launch_rows<8>(args, (int)grid, stream);
}

m3_msa_result choose_rescored(const rescore_args &rescored, int32_t *blocks, cudaStream_t stream) {
  choose_args args = {rescored, blocks};
  int pairs = rescored.rows.n * HEADS;
  return pairs <= 16    ? launch_choose<8>(args, stream)
         : pairs <= 64  ? launch_choose<4>(args, stream)
         : pairs <= 256 ? launch_choose<2>(args, stream)
                        : launch_choose<1>(args, stream);
}

}  // namespace m3_msa

using namespace m3_msa;

int64_t m3_msa_low_bit_page_bytes(int32_t bits) {
  return bits == 4 ? low_bit_layout<4>::PAGE : low_bit_layout<8>::PAGE;
}

m3_msa_result m3_msa_low_bit_store(const m3_msa_low_bit_store_params *p, cudaStream_t stream) {
  if (!hopper_multiprocessors() || p->n < 1 || !type_taken(p->index_type) || (p->bits != 4 && p->bits != 8))
    return M3_MSA_REFUSED;
  constexpr int EACH = STORE_THREADS / STORE_LANES;
  launch_shape shape = {dim3((unsigned)((p->n + EACH - 1) / EACH)), dim3(STORE_THREADS), 0, 1, true};
  return p->bits == 4 ? launch(store_kernel<4>, *p, shape, stream) : launch(store_kernel<8>, *p, shape, stream);
}

size_t m3_msa_low_bit_work_bytes(int32_t n_rows, int64_t max_blocks) {
  return (size_t)n_rows * HEADS *
         ((size_t)max_blocks * (PIECES * sizeof(piece_bounds) + sizeof(float)) + MOST_SEEDS * sizeof(float));
}

m3_msa_result m3_msa_low_bit_select(const m3_msa_low_bit *p, cudaStream_t stream) {
  rescore_args rescored;
  m3_msa_result result = bounds(*p, &rescored, stream);
  return result == M3_MSA_LAUNCHED ? choose_rescored(rescored, p->select.blocks, stream) : result;
}
