// Block selection of decode rows: index scan, then the best blocks.
#include "msa_launch.cuh"
#include "msa_scan.cuh"
#include "msa_select.cuh"
#include "msa_topk.cuh"

namespace m3_msa {

namespace {

struct topk_args {
  m3_msa_rows rows;
  const float *scores;
  int64_t stride;
  int32_t local;
  int32_t *blocks;
};

template <int CLUSTER>
__global__ void __launch_bounds__(TOPK_THREADS) topk_kernel(const topk_args args) {
#if M3_MSA_HOPPER
  __shared__ topk_buffer buffer;
  __shared__ int32_t list[TOP_K];
  int pair = blockIdx.x / CLUSTER, row = pair / HEADS;
  launch_next();
  int n_blocks = (int)(__ldcg(args.rows.pos + row) / BLOCK) + 1;
  wait_previous();
  choose_blocks<CLUSTER>(args.scores + pair * args.stride, n_blocks, args.local, buffer, list);
  if (blockIdx.x % CLUSTER == 0 && threadIdx.x < TOP_K) args.blocks[pair * TOP_K + threadIdx.x] = list[threadIdx.x];
#endif
}

template <class Key, int ROWS>
m3_msa_result launch_rows(const scan_args &args, int multiprocessors, cudaStream_t stream) {
  int64_t blocks = (int64_t)args.rows.n / args.rows.per_sequence * args.rows.max_blocks;
  // Two thread blocks leave room for the next kernel to start early, three read faster.
  int64_t grid = (int64_t)multiprocessors * (blocks <= SCAN_FEW ? 2 : 3);
  if (grid > blocks) grid = blocks;
  return launch(scan_kernel<Key, ROWS>, args,
                {dim3((unsigned)grid), dim3(SCAN_THREADS), SCAN_WARPS * SCAN_STAGES * SCAN_LOAD_BYTES, 1, true},
                stream);
}

template <class Key>
m3_msa_result launch_typed(const scan_args &args, int multiprocessors, cudaStream_t stream) {
  switch (args.rows.per_sequence) {
    case 1: return launch_rows<Key, 1>(args, multiprocessors, stream);
    case 2: return launch_rows<Key, 2>(args, multiprocessors, stream);
    default: return launch_rows<Key, 4>(args, multiprocessors, stream);
  }
}

}  // namespace

m3_msa_result scan(const m3_msa_select &p, cudaStream_t stream) {
  int multiprocessors = hopper_multiprocessors();
  if (!multiprocessors || !shape_taken(p.shape) || !decode_rows_taken(p.rows)) return M3_MSA_REFUSED;
  scan_args args = {p.rows, p.index, p.index_q, static_cast<float *>(p.work), stride_of(p.rows), p.not_finite, p.code};
  switch (p.index_type) {
    case M3_TYPE_BF16: return launch_typed<__nv_bfloat16>(args, multiprocessors, stream);
    case M3_TYPE_F16: return launch_typed<__half>(args, multiprocessors, stream);
    case M3_TYPE_F32: return launch_typed<float>(args, multiprocessors, stream);
    default: return M3_MSA_REFUSED;
  }
}

m3_msa_result choose(const m3_msa_select &p, cudaStream_t stream) {
  topk_args args = {p.rows, static_cast<const float *>(p.work), stride_of(p.rows), p.shape.local_blocks, p.blocks};
  int cluster = p.rows.max_blocks > TOPK_ALONE ? 8 : 1;
  launch_shape shape = {dim3((unsigned)(p.rows.n * HEADS * cluster)), dim3(TOPK_THREADS), 0, cluster, true};
  return cluster == 1 ? launch(topk_kernel<1>, args, shape, stream) : launch(topk_kernel<8>, args, shape, stream);
}

}  // namespace m3_msa

using namespace m3_msa;

size_t m3_msa_select_bytes(int32_t n_rows, int64_t max_blocks) {
  return (size_t)(n_rows * HEADS * ((max_blocks + 3) / 4 * 4)) * sizeof(float);
}

m3_msa_result m3_msa_select_decode(const m3_msa_select *p, cudaStream_t stream) {
  m3_msa_result result = scan(*p, stream);
  return result == M3_MSA_LAUNCHED ? choose(*p, stream) : result;
}
