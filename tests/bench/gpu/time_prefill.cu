// Times of the prefill kernels: medians of events around whole calls.
#include "cases.cuh"
#include "checks.h"
#include "timing.cuh"

namespace {

float event_us(int times, const std::function<void()> &f) {
  cudaEvent_t from, to;
  CUDA(cudaEventCreate(&from));
  CUDA(cudaEventCreate(&to));
  std::vector<float> us;
  for (int i = 0; i < times + 1; i++) {
    CUDA(cudaEventRecord(from));
    f();
    CUDA(cudaEventRecord(to));
    CUDA(cudaEventSynchronize(to));
    float ms;
    CUDA(cudaEventElapsedTime(&ms, from, to));
    if (i) us.push_back(ms * 1000);
  }
  CUDA(cudaEventDestroy(from));
  CUDA(cudaEventDestroy(to));
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

// Lists whose neighbors share blocks: each of the 15 free places is drawn anew from one row to the next with a chance.
__global__ void list_kernel(int32_t *blocks, int n, int64_t first_pos, float fresh) {
  int run = blockIdx.x * blockDim.x + threadIdx.x, head = run % HEADS;  // 64 rows of one head each
  int from = run / HEADS * 64;
  if (from >= n) return;
  uint64_t seed = (uint64_t)run * 0x9e3779b97f4a7c15ull + 12345;
  auto draw = [&]() {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return (uint32_t)(seed >> 32);
  };
  int32_t list[TOP_K];
  int have = 0;
  for (int row = from; row < n && row < from + 64; row++) {
    int last = (int)((first_pos + row) / BLOCK), room = TOP_K - 1;
    int32_t *to = blocks + ((int64_t)row * HEADS + head) * TOP_K;
    if (last < TOP_K) {
      for (int i = 0; i < TOP_K; i++) to[i] = i <= last ? i : -1;
      have = 0;
      continue;
    }
    for (int i = 0; i < room; i++)
      if (i >= have || (draw() >> 8) * 0x1p-24f < fresh) {
        bool again = true;
        while (again) {
          list[i] = (int32_t)(draw() % (uint32_t)last);
          again = false;
          for (int j = 0; j < (i >= have ? i : room); j++) again |= j != i && list[j] == list[i];
        }
      }
    have = room;
    int32_t sorted[TOP_K];
    for (int i = 0; i < room; i++) {
      int at = 0;
      for (int j = 0; j < room; j++) at += list[j] < list[i];
      sorted[at] = list[i];
    }
    sorted[room] = last;
    for (int i = 0; i < TOP_K; i++) to[i] = sorted[i];
  }
}

double mean_union(const std::vector<int32_t> &lists, int n, int rows) {
  double sum = 0;
  int64_t count = 0;
  for (int r = 0; r + rows <= n; r += 97 * rows)
    for (int h = 0; h < HEADS; h++) {
      std::vector<int32_t> u;
      for (int i = 0; i < rows; i++)
        for (int j = 0; j < TOP_K; j++) u.push_back(lists[((int64_t)(r + i) * HEADS + h) * TOP_K + j]);
      std::sort(u.begin(), u.end());
      u.erase(std::unique(u.begin(), u.end()), u.end());
      sum += (double)u.size(), count++;
    }
  return sum / (double)count;
}

void one(int64_t first_pos, int n, FILE *csv) {
  int64_t context = first_pos + n, n_blocks = (context + BLOCK - 1) / BLOCK;
  device_array<__nv_bfloat16> index(n_blocks * BLOCK * DIM), k(n_blocks * HEADS * BLOCK * DIM), v(k.n);
  fill_normal(index.p, index.n, 1);
  fill_normal(k.p, k.n, 2);
  fill_normal(v.p, v.n, 3);
  device_array<float> q((size_t)n * N_HEAD * DIM), index_q((size_t)n * HEADS * DIM), out(q.n);
  fill_normal(q.p, q.n, 4);
  fill_normal(index_q.p, index_q.n, 5);
  std::vector<int32_t> pages(n_blocks);
  std::iota(pages.begin(), pages.end(), 0);
  std::mt19937 rng(7);
  std::shuffle(pages.begin(), pages.end(), rng);
  device_array<int32_t> table(pages), blocks((size_t)n * HEADS * TOP_K), flag(1);
  device_array<char> work(m3_msa_prefill_select_bytes(n, n_blocks, M3_TYPE_F32));
  m3_msa_prefill p = {SHAPE,        n,   first_pos, table.p, index.p, M3_TYPE_BF16, index_q.p, k.p, v.p,
                      M3_TYPE_BF16, q.p, blocks.p,  out.p,   flag.p,  work.p,       0};
  double pairs = 0;
  for (int r = 0; r < n; r++) pairs += (double)((first_pos + r) / BLOCK) * BLOCK;
  double select_flop = pairs * HEADS * DIM * 2 * 2;  // two parts
  double attend_flop = 0;
  for (int r = 0; r < n; r++)
    attend_flop += (double)std::min<int64_t>(first_pos + r + 1, TOP_K * BLOCK) * N_HEAD * DIM * 4;
  auto show = [&](const char *name, double flop, float us) {
    printf("%-24s from %7ld rows %6d %11.1f us %6.0f TFLOP/s\n", name, (long)first_pos, n, us, flop / us / 1e6);
    fprintf(csv, "%s,%ld,%d,%.1f,%.0f,%.1f\n", name, (long)context, n, us, flop, flop / us / 1e6);
  };
  int times = context > 200000 ? 5 : 10;
  show("prefill select", select_flop, event_us(times, [&] { LAUNCHED(m3_msa_prefill_select(&p, 0)); }));
  {
    // Queries that turn slowly, so that neighbors choose alike.
    std::vector<float> slow((size_t)n * HEADS * DIM);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < slow.size(); i++)
      slow[i] = i < HEADS * DIM ? normal(rng) : 0.99f * slow[i - HEADS * DIM] + 0.14f * normal(rng);
    device_array<float> turning(slow);
    p.index_q = turning.p;
    show("prefill select turning", select_flop, event_us(times, [&] { LAUNCHED(m3_msa_prefill_select(&p, 0)); }));
    auto lists = blocks.host();
    char name[40];
    snprintf(name, sizeof name, "prefill turning %.1f %.1f", mean_union(lists, n, 4), mean_union(lists, n, 8));
    show(name, attend_flop, event_us(times, [&] { LAUNCHED(m3_msa_prefill_attend(&p, 0)); }));
    p.index_q = index_q.p;
    LAUNCHED(m3_msa_prefill_select(&p, 0));
  }
  if (context <= 40000)
    show("prefill attend random", attend_flop, event_us(times, [&] { LAUNCHED(m3_msa_prefill_attend(&p, 0)); }));
  for (float fresh : {0.0f, 0.1f}) {
    int runs = (n + 63) / 64 * HEADS;
    list_kernel<<<(runs + 63) / 64, 64>>>(blocks.p, n, first_pos, fresh);
    CUDA(cudaDeviceSynchronize());
    auto lists = blocks.host();
    char name[40];
    snprintf(name, sizeof name, "prefill attend %.1f %.1f", mean_union(lists, n, 4), mean_union(lists, n, 8));
    show(name, attend_flop, event_us(times, [&] { LAUNCHED(m3_msa_prefill_attend(&p, 0)); }));
  }
  {
    device_array<float> wide(index.n);
    fill_normal(wide.p, wide.n, 6);
    p.index = wide.p;
    p.index_type = M3_TYPE_F32;
    show("prefill select f32 keys", select_flop * 1.5,
         event_us(times, [&] { LAUNCHED(m3_msa_prefill_select(&p, 0)); }));
  }
  double dense_flop = 0;
  for (int r = 0; r < n; r++) dense_flop += (double)(first_pos + r + 1) * N_HEAD * DIM * 4;
  if (dense_flop < 1e14)
    show("prefill dense", dense_flop, event_us(times, [&] { LAUNCHED(m3_msa_prefill_dense(&p, 0)); }));
  CUDA(cudaDeviceSynchronize());
}

}  // namespace

void time_prefill(FILE *csv) {
  one(0, 8192, csv);
  one(0, 32768, csv);
  one(0, 131072, csv);
  one(131072 - 4096, 4096, csv);
  one(1048576 - 8192, 8192, csv);
}
