// Prefill kernels against definitions in double precision.
#include "checks.h"
#include "compare.cuh"

namespace {

bool one(key_kind kind, int64_t first_pos, int n, int index_type, int kv_type, int local) {
  paged_case c;
  c.kind = kind;
  c.lengths = {first_pos + n};
  c.per_sequence = 1;
  c.index_type = index_type;
  c.kv_type = kv_type;
  bool kv = kv_type != M3_TYPE_F32;
  c.make(first_pos * 31 + n + index_type, kv, [&](int) {
    std::vector<int64_t> p(n);
    std::iota(p.begin(), p.end(), first_pos);
    return p;
  });
  if (kind == ZEROS)
    for (size_t i = 0; i < c.index_q.size(); i++)
      if (i / (HEADS * DIM) % 2) c.index_q[i] = 0;
  if (kind == CLUSTERED)  // neighbors ask alike
    for (size_t i = HEADS * DIM; i < c.index_q.size(); i++)
      c.index_q[i] = 0.9f * c.index_q[i - HEADS * DIM] + 0.3f * c.index_q[i];
  device_case d(c);
  device_array<int32_t> blocks(n * HEADS * TOP_K), flag(1);
  device_array<float> out(kv ? (size_t)n * N_HEAD * DIM : 0), dense(out.n);
  device_array<char> work(m3_msa_prefill_select_bytes(n, (first_pos + n - 1) / BLOCK + 1, index_type));
  flag.poison(1);
  blocks.poison(0x77);
  work.poison();
  if (kv) out.poison(), dense.poison();
  m3_msa_shape shape = SHAPE;
  shape.local_blocks = local;
  m3_msa_prefill p = {shape, n,       first_pos, d.pages[0].p, d.index.p, index_type, d.index_q.p, d.k.p,
                      d.v.p, kv_type, d.q.p,     blocks.p,     out.p,     flag.p,     work.p,      7};
  LAUNCHED(m3_msa_prefill_select(&p, 0));
  if (kv) {
    LAUNCHED(m3_msa_prefill_attend(&p, 0));
    p.out = dense.p;
    LAUNCHED(m3_msa_prefill_dense(&p, 0));
  }
  CUDA(cudaDeviceSynchronize());
  auto lists = blocks.host();
  tally t;
  compare_lists(c, lists, local, t);
  bool good = !t.wrong && flag.host()[0] == 0x01010101;
  double e = 0, e_dense = 0;
  if (kv) {
    e = attend_error(c, out.host(), lists.data(), 1 + n / 40);
    e_dense = attend_error(c, dense.host(), nullptr, 1 + n / 20);
    double most = kv_type == M3_TYPE_BF16 ? 1.5e-2 : 2e-3;
    good &= e < most && e_dense < most;
  }
  if (!good || getenv("VERBOSE"))
    printf(
        "prefill %-9s from %6ld rows %4d index %-4s kv %-4s local %d: %d lists, %d equal, %d near ties, %d wrong; "
        "attention %.1e dense %.1e %s\n",
        KIND_NAMES[kind], (long)first_pos, n, type_name(index_type), kv ? type_name(kv_type) : "-", local, t.lists,
        t.equal, t.near_ties, t.wrong, e, e_dense, good ? "" : "FAILED");
  return good;
}

bool not_finite() {
  bool good = true;
  for (int what = 0; what < 2; what++) {
    paged_case c;
    c.kind = RANDOM;
    c.lengths = {3000};
    c.per_sequence = 1;
    c.index_type = M3_TYPE_BF16;
    c.kv_type = M3_TYPE_F32;
    c.make(5, false, [](int) {
      std::vector<int64_t> p(100);
      std::iota(p.begin(), p.end(), 2900);
      return p;
    });
    if (what == 0)
      c.index_q[2000] = NAN;
    else
      c.index.put(((int64_t)c.tables[0][3] * BLOCK + 77) * DIM + 5, INFINITY);
    device_case d(c);
    device_array<int32_t> blocks(100 * HEADS * TOP_K), flag(1);
    device_array<char> work(m3_msa_prefill_select_bytes(100, 24, M3_TYPE_BF16));
    flag.poison(1);
    m3_msa_prefill p = {};
    p.shape = SHAPE;
    p.n = 100;
    p.first_pos = 2900;
    p.table = d.pages[0].p;
    p.index = d.index.p;
    p.index_type = c.index_type;
    p.index_q = d.index_q.p;
    p.blocks = blocks.p;
    p.not_finite = flag.p;
    p.work = work.p;
    p.code = 7;
    LAUNCHED(m3_msa_prefill_select(&p, 0));
    CUDA(cudaDeviceSynchronize());
    good &= flag.host()[0] == 7;
  }
  if (!good) printf("prefill not finite: FAILED\n");
  return good;
}

}  // namespace

bool check_prefill() {
  const int BF = M3_TYPE_BF16, HF = M3_TYPE_F16, FL = M3_TYPE_F32;
  bool good = true;
  good &= one(RANDOM, 0, 1, BF, BF, 1);
  good &= one(RANDOM, 0, 300, BF, BF, 1);
  good &= one(RANDOM, 0, 2500, BF, BF, 1);
  good &= one(CLUSTERED, 3901, 333, BF, BF, 2);
  good &= one(RANDOM, 2940, 21, BF, BF, 1);  // rows on both sides of a block's end
  good &= one(RANDOM, 5000, 129, HF, HF, 1);
  good &= one(INTEGERS, 0, 4001, BF, FL, 1);
  good &= one(INTEGERS, 9001, 400, HF, FL, 15);
  good &= one(ZEROS, 3000, 400, BF, FL, 1);
  good &= one(OUTLIERS, 7000, 300, BF, FL, 3);
  good &= one(CLUSTERED, 30000, 70, BF, FL, 1);
  good &= one(OUTLIERS, 7000, 100, HF, FL, 1);
  good &= one(RANDOM, 39900, 101, BF, FL, 1);
  good &= one(INTEGERS, 39900, 101, BF, FL, 1);
  good &= one(RANDOM, 2300, 8, BF, HF, 1);
  good &= one(RANDOM, 0, 2500, FL, HF, 1);
  good &= one(CLUSTERED, 3901, 333, FL, HF, 2);
  good &= one(OUTLIERS, 7000, 300, FL, FL, 1);
  good &= one(INTEGERS, 9001, 400, FL, FL, 1);
  good &= one(ZEROS, 3000, 130, FL, FL, 1);
  good &= one(RANDOM, 39900, 101, FL, FL, 1);
  good &= not_finite();
  return good;
}
