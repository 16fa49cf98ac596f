// Paged caches, queries and their definitions in double precision, for the checks and timings of the MSA kernels.
#ifndef M3_BENCH_GPU_CASES_CUH
#define M3_BENCH_GPU_CASES_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "../../../native/src/cuda/msa_kernels.h"
#include "m3.h"

#define CUDA(x)                                                                 \
  do {                                                                          \
    cudaError_t e_ = (x);                                                       \
    if (e_ != cudaSuccess) {                                                    \
      printf("%s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
      exit(1);                                                                  \
    }                                                                           \
  } while (0)
#define LAUNCHED(x)                                                                                    \
  do {                                                                                                 \
    int r_ = (x);                                                                                      \
    if (r_ != M3_MSA_LAUNCHED) {                                                                       \
      printf("%s:%d %s: %d %s\n", __FILE__, __LINE__, #x, r_, cudaGetErrorString(cudaGetLastError())); \
      exit(1);                                                                                         \
    }                                                                                                  \
  } while (0)

constexpr int DIM = 128, BLOCK = 128, HEADS = 4, GROUP = 16, TOP_K = 16, N_HEAD = HEADS * GROUP;
static const m3_msa_shape SHAPE = {N_HEAD, HEADS, DIM, HEADS, DIM, BLOCK, TOP_K, 1};

inline size_t type_bytes(int type) { return type == M3_TYPE_F32 ? 4 : 2; }
inline const char *type_name(int type) { return type == M3_TYPE_F32 ? "f32" : type == M3_TYPE_F16 ? "f16" : "bf16"; }

// Device memory that goes with its owner.
template <class T>
struct device_array {
  T *p = nullptr;
  size_t n = 0;
  explicit device_array(size_t count = 0) : n(count) {
    if (n) CUDA(cudaMalloc(&p, n * sizeof(T)));
  }
  explicit device_array(const std::vector<T> &v) : device_array(v.size()) {
    if (n) CUDA(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
  }
  device_array(device_array &&o) noexcept : p(o.p), n(o.n) { o.p = nullptr; }
  device_array(const device_array &) = delete;
  device_array &operator=(const device_array &) = delete;
  ~device_array() { cudaFree(p); }
  void poison(int byte = 0xff) { CUDA(cudaMemset(p, byte, n * sizeof(T))); }
  std::vector<T> host() const {
    std::vector<T> v(n);
    CUDA(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
};

inline void parallel(int64_t n, const std::function<void(int64_t)> &f) {
  int threads = (int)std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; t++)
    pool.emplace_back([=, &f] {
      for (int64_t i = t; i < n; i += threads) f(i);
    });
  for (auto &t : pool) t.join();
}

// Numbers of a type and what they stand for.
struct typed {
  int type = M3_TYPE_F32;
  std::vector<char> bytes;
  std::vector<float> value;
  void set(size_t n, int new_type) {
    type = new_type;
    bytes.assign(n * type_bytes(type), (char)0xff);  // NaN in every type
    value.assign(n, NAN);
  }
  void put(size_t i, float x) {
    if (type == M3_TYPE_BF16) {
      __nv_bfloat16 y = __float2bfloat16_rn(x);
      memcpy(&bytes[i * 2], &y, 2);
      value[i] = __bfloat162float(y);
    } else if (type == M3_TYPE_F16) {
      __half y = __float2half_rn(x);
      memcpy(&bytes[i * 2], &y, 2);
      value[i] = __half2float(y);
    } else {
      memcpy(&bytes[i * 4], &x, 4);
      value[i] = x;
    }
  }
};

// EQUAL: all keys are one; NEAR: but for their last bits; SCALES: of lengths from 1e-30 to 1e20; SPIKES: one channel
// holds most of a key.
enum key_kind { RANDOM, CLUSTERED, INTEGERS, ZEROS, OUTLIERS, EQUAL, NEAR, SCALES, SPIKES, KINDS };
static const char *const KIND_NAMES[KINDS] = {"random", "clustered", "integers", "zeros", "outliers",
                                              "equal",  "near",      "scales",   "spikes"};

// Sequences in shuffled pages, the rows that ask, and their queries. Slots past a sequence's end hold NaN.
struct paged_case {
  std::vector<int64_t> lengths;
  int per_sequence, kv_type, index_type;
  key_kind kind;
  std::vector<int32_t> seq;
  std::vector<int64_t> pos;
  std::vector<std::vector<int32_t>> tables;
  int64_t n_pages = 0, max_blocks = 0;
  typed k, v, index;
  std::vector<float> q, index_q;

  int n() const { return (int)seq.size(); }

  // rows_of(sequence): positions that ask. heads_kv: make K and V too.
  void make(uint64_t seed, bool heads_kv, const std::function<std::vector<int64_t>(int)> &rows_of) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal;
    std::vector<float> drawn(1 << 16);  // keys and values draw from these: many draws of their own take long
    for (auto &x : drawn) x = normal(rng);
    auto draw = [&] { return drawn[rng() >> 48]; };
    for (int64_t l : lengths)
      n_pages += (l + BLOCK - 1) / BLOCK, max_blocks = std::max(max_blocks, (l + BLOCK - 1) / BLOCK);
    n_pages += 3;
    std::vector<int32_t> order(n_pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    index.set(n_pages * BLOCK * DIM, index_type);
    if (heads_kv) k.set(n_pages * HEADS * BLOCK * DIM, kv_type), v.set(n_pages * HEADS * BLOCK * DIM, kv_type);
    int used = 0;
    for (size_t s = 0; s < lengths.size(); s++) {
      tables.emplace_back();
      for (int64_t b = 0; b * BLOCK < lengths[s]; b++) tables[s].push_back(order[used++]);
      std::vector<float> center(DIM), one(DIM);
      for (auto &x : one) x = normal(rng);
      for (int64_t j = 0; j < lengths[s]; j++) {
        if (j % 64 == 0)
          for (auto &x : center) x = normal(rng);
        int64_t page = tables[s][j / BLOCK], slot = j % BLOCK;
        float size = kind == OUTLIERS ? std::exp(2 * normal(rng)) : 1;
        if (kind == SCALES) size = std::pow(10.0f, std::max(-30.0f, std::min(19.0f, 12 * normal(rng))));
        int spike = kind == SPIKES ? (int)(rng() % DIM) : -1;
        for (int c = 0; c < DIM; c++) {
          float x = kind == ZEROS       ? 0
                    : kind == INTEGERS  ? (float)((int)(rng() % 3) - 1)
                    : kind == CLUSTERED ? center[c] + 0.02f * normal(rng)
                    : kind == EQUAL     ? one[c]
                    : kind == NEAR      ? one[c] * (1 + 1e-7f * (float)(rng() % 16))
                    : c == spike        ? 100 * normal(rng)
                                        : size * normal(rng);
          index.put((page * BLOCK + slot) * DIM + c, x);
          if (heads_kv)
            for (int h = 0; h < HEADS; h++) {
              k.put(((page * HEADS + h) * BLOCK + slot) * DIM + c, draw());
              v.put(((page * HEADS + h) * BLOCK + slot) * DIM + c, draw());
            }
        }
      }
      for (int64_t p : rows_of((int)s)) seq.push_back((int32_t)s), pos.push_back(p);
    }
    q.resize((size_t)n() * N_HEAD * DIM);
    index_q.resize((size_t)n() * HEADS * DIM);
    for (auto &x : q) x = normal(rng) * 1.3f;
    for (auto &x : index_q) x = kind == INTEGERS ? (float)((int)(rng() % 5) - 2) : normal(rng);
  }

  double key(int row, int64_t j, const float *to) const {
    int64_t page = tables[seq[row]][j / BLOCK];
    const float *x = &index.value[(page * BLOCK + j % BLOCK) * DIM];
    double d = 0;
    for (int c = 0; c < DIM; c++) d += (double)x[c] * to[c];
    return d;
  }
  // Block maxima of (row, head), and 2^-18 |q| |k| with the largest |k|: what float32 sums may be off by.
  std::vector<double> block_scores(int row, int head, double *slack) const {
    const float *to = &index_q[((size_t)row * HEADS + head) * DIM];
    int64_t n_blocks = pos[row] / BLOCK + 1;
    std::vector<double> best(n_blocks, -INFINITY);
    double k2 = 0, q2 = 0;
    for (int c = 0; c < DIM; c++) q2 += (double)to[c] * to[c];
    for (int64_t j = 0; j <= pos[row]; j++) {
      best[j / BLOCK] = std::max(best[j / BLOCK], key(row, j, to));
      const float *x = &index.value[((int64_t)tables[seq[row]][j / BLOCK] * BLOCK + j % BLOCK) * DIM];
      double s = 0;
      for (int c = 0; c < DIM; c++) s += (double)x[c] * x[c];
      k2 = std::max(k2, s);
    }
    *slack = std::ldexp(std::sqrt(k2 * q2), -18);
    return best;
  }
  static std::vector<int32_t> choose(const std::vector<double> &scores, int local) {
    int n = (int)scores.size();
    local = std::min(local, n);
    std::vector<int32_t> ids(n - local);
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return scores[a] > scores[b]; });
    ids.resize(std::min<size_t>(ids.size(), TOP_K - local));
    for (int b = n - local; b < n; b++) ids.push_back(b);
    std::sort(ids.begin(), ids.end());
    ids.resize(TOP_K, -1);
    return ids;
  }
  // Attention of one query head over a list (NULL: all blocks).
  std::vector<double> attend(int row, int head, const int32_t *list) const {
    int kv = head / GROUP;
    const float *to = &q[((size_t)row * N_HEAD + head) * DIM];
    std::vector<double> score, out(DIM, 0.0);
    std::vector<int64_t> at;
    int64_t n_blocks = pos[row] / BLOCK + 1;
    for (int64_t i = 0; i < (list ? TOP_K : n_blocks); i++) {
      int64_t b = list ? list[i] : i;
      if (b < 0) break;
      for (int64_t j = b * BLOCK; j < (b + 1) * BLOCK && j <= pos[row]; j++) {
        int64_t r = (((int64_t)tables[seq[row]][b] * HEADS + kv) * BLOCK + j % BLOCK) * DIM;
        double d = 0;
        for (int c = 0; c < DIM; c++) d += (double)k.value[r + c] * to[c];
        score.push_back(d / std::sqrt((double)DIM));
        at.push_back(r);
      }
    }
    double most = *std::max_element(score.begin(), score.end()), sum = 0;
    for (auto &s : score) sum += s = std::exp(s - most);
    for (size_t i = 0; i < score.size(); i++)
      for (int c = 0; c < DIM; c++) out[c] += score[i] / sum * v.value[at[i] + c];
    return out;
  }
};

// The case in device memory.
struct device_case {
  device_array<char> k, v, index;
  device_array<int32_t> seq;
  device_array<int64_t> pos;
  device_array<float> q, index_q;
  std::vector<device_array<int32_t>> pages;
  device_array<const int32_t *> tables;
  m3_msa_rows rows;

  explicit device_case(const paged_case &c)
      : k(c.k.bytes),
        v(c.v.bytes),
        index(c.index.bytes),
        seq(c.seq),
        pos(c.pos),
        q(c.q),
        index_q(c.index_q),
        tables(0) {
    std::vector<const int32_t *> at;
    for (auto &t : c.tables) pages.emplace_back(t), at.push_back(pages.back().p);
    new (&tables) device_array<const int32_t *>(at);
    rows = {c.n(), c.per_sequence, seq.p, pos.p, tables.p, c.max_blocks};
  }
};

#endif
