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

template <int UNITS>
__global__ void __launch_bounds__(TOPK_THREADS) topk_kernel(const topk_args args) {
#if M3_MSA_HOPPER
  __shared__ topk_buffer buffer;
  __shared__ int32_t list[TOP_K];
  int row = blockIdx.x / HEADS;
  launch_next();
  wait_previous();
  int n_blocks = (int)(__ldcg(args.rows.pos + row) / BLOCK) + 1;
  choose_blocks<UNITS>(args.scores + blockIdx.x * args.stride, n_blocks, args.local, buffer, list);
  if (threadIdx.x < TOP_K) args.blocks[(int64_t)blockIdx.x * TOP_K + threadIdx.x] = list[threadIdx.x];
#endif
}

template <class Key, int ROWS, int UNIT>
m3_msa_result launch_scan(const scan_args &args, int multiprocessors, cudaStream_t stream) {
  using shape = scan_shape<Key, ROWS, UNIT>;
  int64_t units = (int64_t)args.rows.n / args.rows.per_sequence * args.rows.max_blocks * (BLOCK / UNIT);
  int64_t grid = (int64_t)multiprocessors * shape::PER_SM;
  if (grid > units) grid = units;
  return launch(scan_kernel<Key, ROWS, UNIT>, args, {dim3((unsigned)grid), dim3(SCAN_THREADS), shape::SHARED, 1, true},
                stream);
}

template <class Key, int UNIT>
m3_msa_result launch_scan(const scan_args &args, int multiprocessors, cudaStream_t stream) {
  switch (args.rows.per_sequence) {
    case 1: return launch_scan<Key, 1, UNIT>(args, multiprocessors, stream);
    case 2: return launch_scan<Key, 2, UNIT>(args, multiprocessors, stream);
    default: return launch_scan<Key, 4, UNIT>(args, multiprocessors, stream);
  }
}

}  // namespace

scan_plan plan_scan(int32_t n_rows, int64_t max_blocks, int32_t index_type) {
  scan_plan plan;
  plan.units = n_rows * max_blocks <= SPLIT_BLOCKS || index_type == M3_TYPE_F32 ? 4 : 1;
  plan.stride = plan.units == 4 ? max_blocks * 4 : (max_blocks + 3) / 4 * 4;
  return plan;
}

m3_msa_result scan(const m3_msa_select &p, const scan_plan &plan, cudaStream_t stream) {
  int multiprocessors = hopper_multiprocessors();
  if (!multiprocessors || !shape_taken(p.shape) || !decode_rows_taken(p.rows)) return M3_MSA_REFUSED;
  scan_args args = {p.rows, p.index, p.index_q, static_cast<float *>(p.work), plan.stride, p.not_finite};
  bool split = plan.units == 4;
  switch (p.index_type) {
    case M3_TYPE_BF16:
      return split ? launch_scan<__nv_bfloat16, 32>(args, multiprocessors, stream)
                   : launch_scan<__nv_bfloat16, 128>(args, multiprocessors, stream);
    case M3_TYPE_F16:
      return split ? launch_scan<__half, 32>(args, multiprocessors, stream)
                   : launch_scan<__half, 128>(args, multiprocessors, stream);
    case M3_TYPE_F32: return launch_scan<float, 32>(args, multiprocessors, stream);
    default: return M3_MSA_REFUSED;
  }
}

}  // namespace m3_msa

using namespace m3_msa;

size_t m3_msa_select_bytes(int32_t n_rows, int64_t max_blocks, int32_t index_type) {
  return (size_t)(n_rows * HEADS * plan_scan(n_rows, max_blocks, index_type).stride) * sizeof(float);
}

m3_msa_result m3_msa_select_decode(const m3_msa_select *p, cudaStream_t stream) {
  scan_plan plan = plan_scan(p->rows.n, p->rows.max_blocks, p->index_type);
  m3_msa_result result = scan(*p, plan, stream);
  if (result != M3_MSA_LAUNCHED) return result;
  topk_args args = {p->rows, static_cast<const float *>(p->work), plan.stride, p->shape.local_blocks, p->blocks};
  launch_shape shape = {dim3((unsigned)(p->rows.n * HEADS)), dim3(TOPK_THREADS), 0, 1, true};
  return plan.units == 4 ? launch(topk_kernel<4>, args, shape, stream) : launch(topk_kernel<1>, args, shape, stream);
}
