// Selection by low-bit copies of the index keys: the lists of the full scan, bit for bit.
#include "cases.cuh"
#include "checks.h"

namespace {

struct low_bit_case {
  key_kind kind;
  std::vector<int64_t> lengths;
  int per, index_type, kv_type, local;
  int64_t extra;  // blocks that max_blocks is above the truth
};

// All tokens of a case, for their copies.
device_array<char> copies_of(const paged_case &c, const device_case &d, int bits) {
  std::vector<int32_t> seq;
  std::vector<int64_t> pos;
  for (size_t s = 0; s < c.lengths.size(); s++)
    for (int64_t j = 0; j < c.lengths[s]; j++) seq.push_back((int32_t)s), pos.push_back(j);
  device_array<int32_t> seqs(seq);
  device_array<int64_t> poss(pos);
  device_array<char> pages(c.n_pages * m3_msa_low_bit_page_bytes(bits));
  pages.poison();
  m3_msa_low_bit_store_params p = {(int32_t)pos.size(), bits,      seqs.p,       poss.p,
                                   d.tables.p,          d.index.p, c.index_type, pages.p};
  LAUNCHED(m3_msa_low_bit_store(&p, 0));
  CUDA(cudaDeviceSynchronize());
  return pages;
}

// Every copy is as near to its key as it says, and not much nearer.
bool copies_hold(const paged_case &c, const device_array<char> &pages, int bits, double *error) {
  auto bytes = pages.host();
  int64_t page_bytes = m3_msa_low_bit_page_bytes(bits);
  int tokens = bits == 4 ? 128 : 64;
  double sum = 0;
  int64_t n = 0;
  bool good = true;
  for (size_t s = 0; s < c.lengths.size(); s++)
    for (int64_t j = 0; j < c.lengths[s]; j += 7, n++) {
      int64_t page = c.tables[s][j / BLOCK], slot = j % BLOCK;
      const char *chunk = &bytes[page * page_bytes + slot / tokens * (tokens * (bits * 16 + 4))];
      int at = (int)(slot % tokens);
      uint32_t pair, step_bits, spread_bits;
      memcpy(&pair, chunk + tokens * bits * 16 + at * 4, 4);
      step_bits = pair << 16, spread_bits = pair & 0xffff0000u;
      float step, spread;
      memcpy(&step, &step_bits, 4);
      memcpy(&spread, &spread_bits, 4);
      double off = 0, size = 0, copy = 0;
      for (int ch = 0; ch < DIM; ch++) {
        int w = ch / 32, high = ch / 16 % 2, t = ch / 4 % 4, i = ch % 4, code;
        if (bits == 4)
          code = 2 * ((uint8_t)chunk[at * 64 + 16 * t + 4 * w + i] >> 4 * high & 15) - 15;
        else
          code = (int8_t)chunk[w / 2 * tokens * 64 + at * 64 + 16 * t + w % 2 * 8 + high * 4 + i];
        double x = c.index.value[(page * BLOCK + slot) * DIM + ch], y = (double)step * code;
        off += (x - y) * (x - y);
        size += x * x;
        copy += y * y;
      }
      off = std::sqrt(off), size = std::sqrt(size);
      double least = off + 2.42e-4 * std::sqrt(copy);
      bool fine = size > 1e17 || (spread >= least && spread <= least * 1.02 + 0.5e-24 + (size < 1e-19 ? size * 12 : 0));
      if (!fine && good)
        printf("  copy of %d bits, |k| %g: error %g, spread %g, step %g FAILED\n", bits, size, off, spread, step);
      good &= fine;
      if (size > 0) sum += off / size;
    }
  *error = sum / (double)n;
  return good;
}

bool one(const low_bit_case &x) {
  paged_case c;
  c.kind = x.kind;
  c.lengths = x.lengths;
  c.per_sequence = x.per;
  c.index_type = x.index_type;
  c.kv_type = x.kv_type;
  bool kv = x.kv_type != M3_TYPE_F32, good = true;
  c.make((uint64_t)(x.lengths[0] * 31 + x.per + x.index_type), kv, [&](int s) {
    std::vector<int64_t> p;
    for (int i = x.per; i > 0; i--) p.push_back(std::max<int64_t>(0, x.lengths[s] - i));
    return p;
  });
  device_case d(c);
  d.rows.max_blocks += x.extra;
  size_t lists = (size_t)c.n() * HEADS * TOP_K;
  m3_msa_shape shape = SHAPE;
  shape.local_blocks = x.local;
  device_array<int32_t> exact(lists), flag(1);
  device_array<char> work(
      std::max(m3_msa_select_bytes(c.n(), d.rows.max_blocks), m3_msa_low_bit_work_bytes(c.n(), d.rows.max_blocks)));
  device_array<float> out(c.n() * N_HEAD * DIM), out2(c.n() * N_HEAD * DIM);
  CUDA(cudaMemset(flag.p, 0, 4));
  work.poison();
  m3_msa_select s = {shape, d.rows, d.index.p, x.index_type, d.index_q.p, exact.p, flag.p, work.p};
  m3_msa_attend a = {shape, d.rows, d.k.p, d.v.p, x.kv_type, d.q.p, exact.p, out.p};
  LAUNCHED(m3_msa_select_decode(&s, 0));
  if (kv) LAUNCHED(m3_msa_attend_decode(&a, 0));
  CUDA(cudaDeviceSynchronize());
  auto want = exact.host();
  for (int bits = 4; bits <= 8; bits += 4) {
    device_array<char> pages = copies_of(c, d, bits);
    double error;
    bool held = copies_hold(c, pages, bits, &error);
    device_array<int32_t> blocks(lists), fused(lists);
    device_array<uint64_t> count(1);
    CUDA(cudaMemset(count.p, 0, 8));
    blocks.poison(0x77);
    fused.poison(0x77);
    work.poison();
    out2.poison();
    m3_msa_low_bit l = {s, pages.p, bits, count.p};
    l.select.blocks = blocks.p;
    LAUNCHED(m3_msa_low_bit_select(&l, 0));
    CUDA(cudaDeviceSynchronize());
    uint64_t rescored = count.host()[0], all = 0;
    for (auto p : c.pos) all += (uint64_t)(p + 1) * HEADS;
    bool same = blocks.host() == want, attended = true;
    if (kv) {
      work.poison();
      l.select.blocks = fused.p;
      a.blocks = nullptr;
      a.out = out2.p;
      LAUNCHED(m3_msa_low_bit_decode(&l, &a, 0));
      CUDA(cudaDeviceSynchronize());
      auto y = out.host(), z = out2.host();
      attended = fused.host() == want && memcmp(y.data(), z.data(), y.size() * 4) == 0;
    }
    bool flagged = flag.host()[0] != 0;
    bool fine = held && same && attended && !flagged;
    if (!fine || getenv("VERBOSE"))
      printf("%-9s len %6ld x%zu rows %d index %-4s kv %-4s local %d, %d bits: error %.2f%%, rescored %.3f%%%s%s%s%s\n",
             KIND_NAMES[x.kind], (long)x.lengths[0], x.lengths.size(), x.per, type_name(x.index_type),
             kv ? type_name(x.kv_type) : "-", x.local, bits, error * 100, 100.0 * (double)rescored / (double)all,
             held ? "" : " COPIES", same ? "" : " LISTS", attended ? "" : " ATTENTION", flagged ? " FLAG" : "");
    good &= fine;
  }
  return good;
}

// A query or a key that is not finite is told, in a block of the list and in others.
bool not_finite(int what, int index_type, int64_t length) {
  bool good = true;
  paged_case c;
  c.kind = RANDOM;
  c.lengths = {length};
  c.per_sequence = 1;
  c.index_type = index_type;
  c.kv_type = M3_TYPE_F32;
  c.make(5, false, [&](int) { return std::vector<int64_t>{length - 1}; });
  auto at = [&](int64_t token, int ch) {
    return (size_t)(((int64_t)c.tables[0][token / BLOCK] * BLOCK + token % BLOCK) * DIM + ch);
  };
  if (what == 0) c.index_q[200] = INFINITY;
  if (what == 1) c.index_q[130] = NAN;
  if (what == 2) c.index.put(at(3 * BLOCK % length, 5), NAN);
  if (what == 3) c.index.put(at(length / 2, 127), -INFINITY);
  if (what == 4) c.index.put(at(length - 1, 0), NAN);
  device_case d(c);
  device_array<int32_t> blocks(HEADS * TOP_K), flag(1);
  device_array<char> work(m3_msa_low_bit_work_bytes(1, d.rows.max_blocks));
  for (int bits = 4; bits <= 8; bits += 4) {
    device_array<char> pages = copies_of(c, d, bits);
    flag.poison(1);
    m3_msa_low_bit l = {
        {SHAPE, d.rows, d.index.p, c.index_type, d.index_q.p, blocks.p, flag.p, work.p, 7}, pages.p, bits, nullptr};
    LAUNCHED(m3_msa_low_bit_select(&l, 0));
    CUDA(cudaDeviceSynchronize());
    bool told = flag.host()[0] == 7;
    if (!told)
      printf("not finite, case %d, %s, %ld tokens, %d bits: FAILED\n", what, type_name(index_type), (long)length, bits);
    good &= told;
  }
  return good;
}

}  // namespace

bool check_low_bit() {
  const int BF = M3_TYPE_BF16, HF = M3_TYPE_F16, FL = M3_TYPE_F32;
  bool good = true;
  good &= one({RANDOM, {1}, 1, BF, BF, 1, 0});
  good &= one({RANDOM, {2047, 130}, 1, FL, BF, 1, 0});
  good &= one({RANDOM, {2177, 5000, 128}, 1, HF, BF, 1, 0});
  if (getenv("FEW")) {  // for compute-sanitizer
    good &= one({CLUSTERED, {5001, 3333}, 2, BF, HF, 2, 100});
    good &= one({RANDOM, {9001}, 4, FL, BF, 1, 0});
    good &= not_finite(3, HF, 3000);
    return good;
  }
  for (int type : {BF, HF, FL})
    for (key_kind kind : {RANDOM, CLUSTERED, INTEGERS, ZEROS, OUTLIERS, EQUAL, NEAR, SPIKES}) {
      good &= one({kind, {12001}, 1, type, BF, 1, 0});
      good &= one({kind, {5001, 3333}, kind % 4 + 1, type, kind % 2 ? FL : HF, kind % 3 + 1, 3000});
    }
  good &= one({SCALES, {9001}, 1, FL, FL, 1, 0});
  good &= one({SCALES, {9001}, 2, BF, FL, 2, 0});
  good &= one({RANDOM, {2500, 4000}, 1, HF, HF, 15, 0});
  good &= one({RANDOM, {150001}, 1, BF, BF, 1, 7000});
  good &= one({RANDOM, {150001}, 1, FL, FL, 1, 0});
  good &= one({ZEROS, {150001}, 1, FL, FL, 1, 0});
  good &= one({CLUSTERED, {140000}, 3, FL, FL, 1, 0});
  good &= one({RANDOM, {60000, 300, 40000, 20000}, 4, BF, FL, 1, 0});
  good &= one({RANDOM,
               {2600, 2500, 2400, 2300, 2200, 2100, 2000, 1900, 1800, 1700, 100, 200, 300, 400, 2900, 3000},
               1,
               BF,
               BF,
               1,
               0});
  for (int type : {BF, FL})
    for (int what = 0; what < 5; what++) good &= not_finite(what, type, 6000) && not_finite(what, type, 700);
  return good;
}
