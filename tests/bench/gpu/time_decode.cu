// Times of the decode kernels: graphs of several calls over rotated caches that together exceed L2, medians of 20.
#include "cases.cuh"
#include "checks.h"
#include "timing.cuh"

namespace {

// One pool of pages serves all contexts; every rotation has pages of its own.
struct pool {
  int64_t n_pages;
  device_array<char> index, k, v;
  explicit pool(int64_t pages)
      : n_pages(pages), index(pages * BLOCK * DIM * 2), k(pages * HEADS * BLOCK * DIM * 2), v(k.n) {
    fill_normal(reinterpret_cast<__nv_bfloat16 *>(index.p), index.n / 2, 1);
    fill_normal(reinterpret_cast<__nv_bfloat16 *>(k.p), k.n / 2, 2);
    fill_normal(reinterpret_cast<__nv_bfloat16 *>(v.p), v.n / 2, 3);
    CUDA(cudaDeviceSynchronize());
  }
};

void one(const pool &memory, int64_t context, int batch, int per, FILE *csv) {
  int64_t n_blocks = (context + BLOCK - 1) / BLOCK;
  int rotations = (int)std::min<int64_t>(32, memory.n_pages / (n_blocks * batch));
  int calls = std::max(rotations, 8), n = batch * per;
  std::mt19937 rng(7);
  // One table and several caches, as the layers of a model have them.
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
  std::normal_distribution<float> normal;
  std::vector<float> qs((size_t)n * N_HEAD * DIM), iqs((size_t)n * HEADS * DIM);
  for (auto &x : qs) x = normal(rng);
  for (auto &x : iqs) x = normal(rng);
  device_array<float> q(qs), index_q(iqs), out(qs.size());
  device_array<char> work(m3_msa_select_bytes(n, n_blocks)), dense_work(m3_msa_dense_bytes(n));
  m3_msa_rows rows = {n, per, seq.p, pos.p, tables.p, n_blocks};
  auto cache = [&](const device_array<char> &x, int64_t heads, int i) {
    return x.p + i % rotations * batch * n_blocks * heads * BLOCK * DIM * 2;
  };
  auto select = [&](int i) {
    return m3_msa_select{SHAPE, rows, cache(memory.index, 1, i), M3_TYPE_BF16, index_q.p, blocks.p, flag.p, work.p, 0};
  };
  auto attend = [&](int i) {
    return m3_msa_attend{SHAPE,    rows, cache(memory.k, HEADS, i), cache(memory.v, HEADS, i), M3_TYPE_BF16, q.p,
                         blocks.p, out.p};
  };
  double index_bytes = (double)batch * context * DIM * 2;
  double listed = (double)std::min<int64_t>(TOP_K, n_blocks) * BLOCK * HEADS * DIM * 4 * n;
  double dense_bytes = (double)context * HEADS * DIM * 4 * n;
  auto show = [&](const char *name, double bytes, float us) {
    printf("%-18s %8ld x%-3d rows %d %9.2f us %7.3f TB/s\n", name, (long)context, batch, per, us, bytes / us / 1e6);
    fprintf(csv, "%s,%ld,%d,%.2f,%.0f,%.3f\n", name, (long)context, n, us, bytes, bytes / us / 1e6);
  };
  if (batch == 1 && per == 1)
    show("read", index_bytes, graph_us(calls, [&](int i, cudaStream_t s) {
           read_all(memory.index.p + (int64_t)(i % rotations) * n_blocks * BLOCK * DIM * 2, n_blocks * BLOCK * DIM * 2,
                    s);
         }));
  if (n <= 32)
    show("select", index_bytes, graph_us(calls, [&](int i, cudaStream_t s) {
           auto p = select(i);
           LAUNCHED(m3_msa_select_decode(&p, s));
         }));
  {
    auto p = select(0);
    LAUNCHED(m3_msa_select_decode(&p, 0));
    CUDA(cudaDeviceSynchronize());
  }
  show("attend", listed, graph_us(calls, [&](int i, cudaStream_t s) {
         auto p = attend(i);
         LAUNCHED(m3_msa_attend_decode(&p, s));
       }));
  if (n <= 32)
    show("select+attend", index_bytes + listed, graph_us(calls, [&](int i, cudaStream_t s) {
           auto p = select(i);
           auto a = attend(i);
           LAUNCHED(m3_msa_decode(&p, &a, s));
         }));
  if (n == 1)
    show("dense", dense_bytes, graph_us(calls, [&](int i, cudaStream_t s) {
           auto a = attend(i);
           LAUNCHED(m3_msa_dense_decode(&a, dense_work.p, s));
         }));
}

}  // namespace

void time_decode(FILE *csv) {
  pool memory(65536);
  for (int64_t context : {8192, 16384, 32768, 131072, 524288, 1048576}) one(memory, context, 1, 1, csv);
  one(memory, 8192, 8, 1, csv);
  one(memory, 16384, 8, 1, csv);
  one(memory, 131072, 8, 1, csv);
  one(memory, 131072, 1, 4, csv);
  one(memory, 8192, 32, 1, csv);
  one(memory, 8192, 128, 1, csv);
}
