/* The inner loops of every instruction set that this machine has, against the scalar specification. */
#include "check.h"
#include "cpu/kernels.h"
#include "quant/blocks.h"
#include "quant/traits.h"

enum { MAX_N = 1100 };

static void fill(float *x, int64_t n, uint64_t *seed) { fill_random(x, n, 1.0f, seed); }

/* Sums may be taken in another order: the difference is bounded by n * eps * sum |a b|. */
static void check_sums(const m3_kernels *k, int64_t n, uint64_t *seed) {
  static float rows[4 * MAX_N], x[MAX_N], y[MAX_N], want[MAX_N];
  fill(rows, 4 * n, seed);
  fill(x, n, seed);
  float out[4], alone[4];
  k->dot4(rows, n, x, n, out);
  for (int r = 0; r < 4; r++) {
    double exact = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
      exact += (double)rows[r * n + i] * (double)x[i];
      size += fabs((double)rows[r * n + i] * (double)x[i]);
    }
    alone[r] = k->dot(rows + r * n, x, n);
    CHECK(fabs((double)alone[r] - exact) <= 0x1p-20 * size + 1e-30, "%s dot n=%lld: %.9g, exact %.9g", k->name,
          (long long)n, (double)alone[r], exact);
  }
  CHECK(memcmp(out, alone, sizeof out) == 0, "%s: dot4 and dot differ at n=%lld", k->name, (long long)n);
  fill(y, n, seed);
  memcpy(want, y, sizeof want);
  k->axpy(y, 0.37f, x, n);
  m3_kernels_scalar.axpy(want, 0.37f, x, n);
  CHECK_CLOSE("axpy", y, want, n, 1e-6);
}

/* Guard words: a kernel must not read or write past n. Reads are seen by AddressSanitizer, writes here too. */
static void check_guards(const m3_kernels *k, int64_t n, uint64_t *seed) {
  float x[80], y[80];
  fill(x, 80, seed);
  for (int i = 0; i < 80; i++) y[i] = 12345.0f;
  k->axpy(y, 1.0f, x, n);
  bool intact = true;
  for (int64_t i = n; i < 80; i++) intact &= y[i] == 12345.0f;
  CHECK(intact, "%s: axpy wrote past n=%lld", k->name, (long long)n);
}

/* Conversions must agree bit for bit: every 16-bit code (NaN by being NaN). */
static void check_conversions(const m3_kernels *k) {
  static uint16_t codes[65536];
  static float got[65536], want[65536];
  for (int i = 0; i < 65536; i++) codes[i] = (uint16_t)i;
  static const int32_t types[] = {M3_TYPE_F16, M3_TYPE_BF16};
  for (int t = 0; t < 2; t++) {
    m3_convert_row(k, types[t], codes, got, 65536);
    m3_traits(types[t])->to_f32(codes, want, 65536);
    int64_t different = 0;
    for (int i = 0; i < 65536; i++) {
      bool both_nan = isnan(got[i]) && isnan(want[i]);
      different += !both_nan && memcmp(&got[i], &want[i], 4) != 0;
    }
    CHECK(different == 0, "%s: %lld codes of %s differ", k->name, (long long)different, m3_type_name(types[t]));
    for (int64_t n = 0; n < 40; n++) { /* tails */
      float tail[41], guard = 77.0f;
      tail[n] = guard;
      m3_convert_row(k, types[t], codes + 15000, tail, n);
      CHECK(memcmp(tail, want + 15000, (size_t)n * 4) == 0 && tail[n] == guard, "%s: %s tail n=%lld", k->name,
            m3_type_name(types[t]), (long long)n);
    }
  }
}

/* Random bytes of every type: all codes with scales of every size, infinite and NaN ones among them. */
static void check_blocks(const m3_kernels *k) {
  enum { N_BLOCKS = 1000, LARGEST = M3_SUPERBLOCK };
  static uint16_t data[N_BLOCKS * LARGEST * 2]; /* aligned; at most 4 bytes an element */
  static float got[N_BLOCKS * LARGEST + 1], want[N_BLOCKS * LARGEST];
  uint64_t seed = 5;
  for (size_t i = 0; i < sizeof data / sizeof *data; i++) data[i] = (uint16_t)next_random(&seed);
  int n_types = 0;
  for (int32_t type = 0; type <= M3_TYPE_MXFP4; type++) {
    if (!m3_traits(type)) continue;
    n_types++;
    for (int64_t blocks = 0; blocks <= N_BLOCKS; blocks += blocks < 3 ? 1 : N_BLOCKS - 3) {
      int64_t n = blocks * m3_type_block_size(type), different = 0, at = -1;
      got[n] = 77.0f;
      m3_convert_row(k, type, data, got, n);
      m3_traits(type)->to_f32(data, want, n);
      for (int64_t i = 0; i < n; i++) {
        if ((isnan(got[i]) && isnan(want[i])) || memcmp(&got[i], &want[i], 4) == 0) continue;
        if (!different++) at = i;
      }
      CHECK(different == 0 && got[n] == 77.0f,
            "%s: %lld of %lld elements of %s differ, the first at %lld: %a, expected %a", k->name, (long long)different,
            (long long)n, m3_type_name(type), (long long)at, at < 0 ? 0.0 : (double)got[at],
            at < 0 ? 0.0 : (double)want[at]);
    }
  }
  CHECK(n_types == 23, "%d types", n_types);
}

int main(void) {
  static const m3_isa isas[] = {M3_ISA_SCALAR, M3_ISA_AVX2, M3_ISA_AVX512, M3_ISA_NEON};
  for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
    m3_isa isa;
    m3_error err;
    if (m3_choose_isa((int32_t)isas[i], &isa, &err)) {
      printf("not run here: %s\n", err.message);
      continue;
    }
    const m3_kernels *k = m3_kernels_for(isa);
    printf("instruction set %s\n", k->name);
    uint64_t seed = 1;
    for (int64_t n = 0; n <= 70; n++) check_sums(k, n, &seed), check_guards(k, n, &seed);
    for (int64_t n = 120; n <= MAX_N; n += 77) check_sums(k, n, &seed);
    check_conversions(k);
    check_blocks(k);
  }
  return finish("test_kernels");
}
