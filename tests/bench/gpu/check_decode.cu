// Decode kernels against definitions in double precision. Exit status 1 if anything differs by more than it may.
#include "cases.cuh"
#include "checks.h"
#include "compare.cuh"

namespace {

bool one(key_kind kind, std::vector<int64_t> lengths, int per, int index_type, int kv_type, int local, int64_t extra) {
  paged_case c;
  c.kind = kind;
  c.lengths = lengths;
  c.per_sequence = per;
  c.index_type = index_type;
  c.kv_type = kv_type;
  bool kv = kv_type != M3_TYPE_F32;
  c.make(lengths[0] * 31 + per + index_type, kv, [&](int s) {
    std::vector<int64_t> p;
    for (int i = per; i > 0; i--) p.push_back(std::max<int64_t>(0, lengths[s] - i));
    return p;
  });
  device_case d(c);
  d.rows.max_blocks += extra;
  device_array<int32_t> blocks(c.n() * HEADS * TOP_K), flag(1), fused(c.n() * HEADS * TOP_K);
  device_array<char> work(m3_msa_select_bytes(c.n(), d.rows.max_blocks));
  device_array<float> out(c.n() * N_HEAD * DIM), out2(c.n() * N_HEAD * DIM), dense(c.n() * N_HEAD * DIM);
  device_array<char> dense_work(m3_msa_dense_bytes(c.n()));
  flag.poison(1);
  blocks.poison(0x77);
  fused.poison(0x77);
  work.poison();
  out.poison();
  out2.poison();
  dense.poison();
  m3_msa_shape shape = SHAPE;
  shape.local_blocks = local;
  m3_msa_select s = {shape, d.rows, d.index.p, index_type, d.index_q.p, blocks.p, flag.p, work.p, 7};
  m3_msa_attend a = {shape, d.rows, d.k.p, d.v.p, kv_type, d.q.p, blocks.p, out.p};
  LAUNCHED(m3_msa_select_decode(&s, 0));
  if (kv) {
    LAUNCHED(m3_msa_attend_decode(&a, 0));
    CUDA(cudaDeviceSynchronize());
    work.poison();
    s.blocks = fused.p;
    a.blocks = nullptr;
    a.out = out2.p;
    LAUNCHED(m3_msa_decode(&s, &a, 0));
    a.out = dense.p;
    LAUNCHED(m3_msa_dense_decode(&a, dense_work.p, 0));
  }
  CUDA(cudaDeviceSynchronize());
  auto lists = blocks.host();
  tally t;
  compare_lists(c, lists, local, t);
  bool good = !t.wrong && flag.host()[0] == 0x01010101;
  double e = 0, e_dense = 0;
  if (kv) {
    auto x = out.host(), y = out2.host();
    good &= fused.host() == lists && memcmp(x.data(), y.data(), x.size() * 4) == 0;
    e = attend_error(c, x, lists.data());
    e_dense = attend_error(c, dense.host(), nullptr);
    good &= e < 3e-5 && e_dense < 3e-5;
  }
  if (!good || getenv("VERBOSE"))
    printf(
        "%-9s len %6ld x%zu rows %d index %-4s kv %-4s local %d: %d lists, %d equal, %d near ties, %d wrong; attention "
        "%.1e dense %.1e %s\n",
        KIND_NAMES[kind], (long)lengths[0], lengths.size(), per, type_name(index_type), kv ? type_name(kv_type) : "-",
        local, t.lists, t.equal, t.near_ties, t.wrong, e, e_dense, good ? "" : "FAILED");
  return good;
}

// A query or a key that is not finite is told.
bool not_finite() {
  bool good = true;
  for (int what = 0; what < 2; what++) {
    paged_case c;
    c.kind = RANDOM;
    c.lengths = {3000};
    c.per_sequence = 1;
    c.index_type = M3_TYPE_BF16;
    c.kv_type = M3_TYPE_F32;
    c.make(5, false, [](int) { return std::vector<int64_t>{2999}; });
    if (what == 0)
      c.index_q[200] = INFINITY;
    else
      c.index.put(((int64_t)c.tables[0][3] * BLOCK + 77) * DIM + 5, NAN);
    device_case d(c);
    device_array<int32_t> blocks(HEADS * TOP_K), flag(1);
    device_array<char> work(m3_msa_select_bytes(1, d.rows.max_blocks));
    flag.poison(1);
    m3_msa_select s = {SHAPE, d.rows, d.index.p, c.index_type, d.index_q.p, blocks.p, flag.p, work.p, 7};
    LAUNCHED(m3_msa_select_decode(&s, 0));
    CUDA(cudaDeviceSynchronize());
    good &= flag.host()[0] == 7;
  }
  if (!good) printf("not finite: FAILED\n");
  return good;
}

}  // namespace

bool check_decode() {
  const int BF = M3_TYPE_BF16, HF = M3_TYPE_F16, FL = M3_TYPE_F32;
  bool good = true;
  good &= one(RANDOM, {1}, 1, BF, BF, 1, 0);
  good &= one(RANDOM, {2047, 130}, 1, BF, BF, 1, 0);
  good &= one(RANDOM, {2177, 5000, 128}, 1, BF, BF, 1, 0);
  good &= one(CLUSTERED, {9001}, 4, BF, BF, 2, 5000);
  good &= one(RANDOM, {3333, 2900, 4100}, 2, BF, HF, 1, 0);
  good &= one(OUTLIERS, {6001, 3001}, 3, BF, FL, 1, 0);
  good &= one(INTEGERS, {9001, 7777}, 1, BF, FL, 1, 0);
  good &= one(INTEGERS, {7777, 5001}, 4, HF, FL, 3, 4000);
  good &= one(INTEGERS, {7777, 5001}, 2, FL, FL, 3, 0);
  good &= one(ZEROS, {9001}, 1, BF, FL, 1, 0);
  good &= one(RANDOM, {2500, 4000}, 1, HF, HF, 15, 0);
  good &= one(OUTLIERS, {4000, 3000}, 1, HF, FL, 1, 7000);
  good &= one(CLUSTERED, {4000, 3000}, 4, FL, FL, 1, 0);
  good &= one(RANDOM, {2177, 2200}, 1, BF, BF, 2, 7000);
  good &= one(RANDOM, {40001}, 1, BF, FL, 1, 7000);
  good &= one(INTEGERS, {150001}, 1, BF, FL, 1, 7000);
  good &= one(INTEGERS, {150001}, 2, BF, BF, 1, 10);
  good &= one(RANDOM, {140000}, 1, BF, BF, 1, 0);
  good &=
      one(RANDOM, {2600, 2500, 2400, 2300, 2200, 2100, 2000, 1900, 1800, 1700, 100, 200, 300, 400, 2900, 3000, 2700}, 1,
          BF, BF, 1, 0);
  good &= not_finite();
  return good;
}
