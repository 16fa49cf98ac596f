// Times of selection by low-bit copies beside the full scan and dense attention: graphs of several calls over rotated
// caches that together exceed L2, medians of 20.
#include "cases.cuh"
#include "checks.h"
#include "timing.cuh"

namespace {

// Keys around a mean that they share, as keys of trained models have one: `bias` times as long as what differs.
template <class T>
__global__ void fill_biased(T *x, int64_t n, float bias) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
    x[i] = (T)(normal_at((uint64_t)i + (1ull << 40)) + bias * normal_at((uint64_t)(i % DIM) + (77ull << 40)));
}

struct pool {
  int index_type;
  float bias;
  int64_t n_pages;
  device_array<char> index, k, v, low[2];
  pool(int64_t pages, int type, float bias_)
      : index_type(type),
        bias(bias_),
        n_pages(pages),
        index(pages * BLOCK * DIM * type_bytes(type)),
        k(pages * HEADS * BLOCK * DIM * 2),
        v(k.n),
        low{device_array<char>(pages * m3_msa_low_bit_page_bytes(4)),
            device_array<char>(pages * m3_msa_low_bit_page_bytes(8))} {
    int64_t n = pages * BLOCK * DIM;
    if (type == M3_TYPE_F32)
      fill_biased<<<2048, 256>>>(reinterpret_cast<float *>(index.p), n, bias);
    else
      fill_biased<<<2048, 256>>>(reinterpret_cast<__nv_bfloat16 *>(index.p), n, bias);
    fill_normal(reinterpret_cast<__nv_bfloat16 *>(k.p), k.n / 2, 2);
    fill_normal(reinterpret_cast<__nv_bfloat16 *>(v.p), v.n / 2, 3);
    std::vector<int32_t> seqs(pages * BLOCK), table(pages);
    std::vector<int64_t> poss(pages * BLOCK);
    std::iota(poss.begin(), poss.end(), 0);
    std::iota(table.begin(), table.end(), 0);
    device_array<int32_t> seq(seqs), page(table);
    device_array<int64_t> pos(poss);
    device_array<const int32_t *> tables(std::vector<const int32_t *>{page.p});
    for (int i = 0; i < 2; i++) {
      m3_msa_low_bit_store_params p = {(int32_t)poss.size(), 4 + 4 * i, seq.p, pos.p, tables.p, index.p,
                                       index_type,           low[i].p};
      LAUNCHED(m3_msa_low_bit_store(&p, 0));
    }
    CUDA(cudaDeviceSynchronize());
  }
};

void one(const pool &memory, int64_t context, int batch, int per, bool dense, FILE *csv) {
  int64_t n_blocks = (context + BLOCK - 1) / BLOCK;
  int rotations = (int)std::min<int64_t>(64, memory.n_pages / (n_blocks * batch));
  int calls = std::max(rotations, 8), n = batch * per;
  std::mt19937 rng(7);
  std::vector<int32_t> pages(batch * n_blocks);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), rng);
  device_array<int32_t> page(pages);
  std::vector<const int32_t *> at;
  for (int i = 0; i < batch; i++) at.push_back(page.p + i * n_blocks);
  device_array<const int32_t *> tables(at);
  std::vector<int32_t> seqs;
  std::vector<int64_t> poss;
  for (int b = 0; b < batch; b++)
    for (int i = 0; i < per; i++) seqs.push_back(b), poss.push_back(context - per + i);
  device_array<int32_t> seq(seqs), blocks(n * HEADS * TOP_K), flag(1);
  device_array<int64_t> pos(poss);
  device_array<uint64_t> count(1);
  std::normal_distribution<float> normal;
  std::vector<float> qs((size_t)n * N_HEAD * DIM), iqs((size_t)n * HEADS * DIM);
  for (auto &x : qs) x = normal(rng);
  for (auto &x : iqs) x = normal(rng);
  device_array<float> q(qs), index_q(iqs), out(qs.size());
  device_array<char> work(std::max(m3_msa_select_bytes(n, n_blocks), m3_msa_low_bit_work_bytes(n, n_blocks)));
  device_array<char> dense_work(m3_msa_dense_bytes(n));
  m3_msa_rows rows = {n, per, seq.p, pos.p, tables.p, n_blocks};
  CUDA(cudaMemset(flag.p, 0, 4));
  auto cache = [&](const device_array<char> &x, int i) {
    return x.p + (int64_t)(i % rotations) * batch * n_blocks * (int64_t)(x.n / memory.n_pages);
  };
  auto exact = [&](int i) {
    return m3_msa_select{SHAPE, rows, cache(memory.index, i), memory.index_type, index_q.p, blocks.p, flag.p, work.p};
  };
  auto low = [&](int i, int bits, uint64_t *counted) {
    return m3_msa_low_bit{exact(i), cache(memory.low[bits / 4 - 1], i), bits, counted};
  };
  auto attend = [&](int i) {
    return m3_msa_attend{SHAPE, rows, cache(memory.k, i), cache(memory.v, i), M3_TYPE_BF16, q.p, blocks.p, out.p};
  };
  std::string index = std::string(type_name(memory.index_type)) + (memory.bias ? " biased" : "");
  auto show = [&](const char *name, double bytes, double share, float us) {
    printf("%-14s %-12s %8ld x%-3d rows %d %9.2f us %7.3f TB/s", name, index.c_str(), (long)context, batch, per, us,
           bytes / us / 1e6);
    if (share) printf(" rescored %.4f%%", share * 100);
    printf("\n");
    fprintf(csv, "%s (%s),%ld,%d,%.2f,%.0f,%.3f,%.6f\n", name, index.c_str(), (long)context, n, us, bytes,
            bytes / us / 1e6, share);
  };
  double key = (double)DIM * (double)type_bytes(memory.index_type), tokens = (double)batch * (double)context;
  double listed = (double)std::min<int64_t>(TOP_K, n_blocks) * BLOCK * HEADS * DIM * 4 * n;
  show("full", tokens * key + listed, 0, graph_us(calls, [&](int i, cudaStream_t s) {
         auto p = exact(i);
         auto a = attend(i);
         LAUNCHED(m3_msa_decode(&p, &a, s));
       }));
  std::vector<int32_t> want;
  for (int bits = 0; bits <= 8; bits += 4) {
    if (!bits) {
      auto p = exact(1);
      LAUNCHED(m3_msa_select_decode(&p, 0));
      CUDA(cudaDeviceSynchronize());
      want = blocks.host();
      continue;
    }
    blocks.poison();
    CUDA(cudaMemset(count.p, 0, 8));
    auto p = low(1, bits, count.p);
    LAUNCHED(m3_msa_low_bit_select(&p, 0));
    CUDA(cudaDeviceSynchronize());
    double rescored = (double)count.host()[0], share = rescored / (tokens * per * HEADS);
    double bytes = tokens * (bits * 16 + 4) + rescored * key + (double)n * HEADS * (double)n_blocks * 128;
    if (blocks.host() != want) printf("LISTS DIFFER\n");
    show(bits == 4 ? "select 4 bits" : "select 8 bits", bytes, share, graph_us(calls, [&](int i, cudaStream_t s) {
           auto l = low(i, bits, nullptr);
           LAUNCHED(m3_msa_low_bit_select(&l, s));
         }));
    show(bits == 4 ? "4 bits" : "8 bits", bytes + listed, share, graph_us(calls, [&](int i, cudaStream_t s) {
           auto l = low(i, bits, nullptr);
           auto a = attend(i);
           LAUNCHED(m3_msa_low_bit_decode(&l, &a, s));
         }));
  }
  if (dense)
    show("dense", (double)context * HEADS * DIM * 4 * n, 0, graph_us(calls, [&](int i, cudaStream_t s) {
           auto a = attend(i);
           LAUNCHED(m3_msa_dense_decode(&a, dense_work.p, s));
         }));
}

}  // namespace

void time_low_bit(FILE *csv) {
  for (int type : {M3_TYPE_BF16, M3_TYPE_F32})
    for (float bias : {0.0f, 1.0f}) {
      pool memory(32768, type, bias);
      for (int64_t context : {32768, 65536, 131072, 262144, 524288, 1048576})
        one(memory, context, 1, 1, type == M3_TYPE_BF16 && !bias, csv);
      one(memory, 131072, 1, 4, false, csv);
      one(memory, 131072, 8, 1, false, csv);
    }
}
