/* The inner loops of every instruction set that this machine has, against the scalar specification. */
#include "check.h"
#include "cpu/kernels.h"
#include "quant.h"

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

/* Conversions must agree bit for bit: every 16-bit code (NaN by being NaN), and blocks of every scale. */
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
  static m3_block_q8_0 blocks[512];
  uint64_t seed = 5;
  for (int i = 0; i < 512; i++) {
    blocks[i].d = (uint16_t)(next_random(&seed) % 0x7c00 | (next_random(&seed) & 1) << 15); /* finite scales */
    for (int j = 0; j < M3_Q8_0_BLOCK; j++) blocks[i].q[j] = (int8_t)next_random(&seed);
  }
  m3_convert_row(k, M3_TYPE_Q8_0, blocks, got, 512 * M3_Q8_0_BLOCK);
  m3_traits(M3_TYPE_Q8_0)->to_f32(blocks, want, 512 * M3_Q8_0_BLOCK);
  CHECK(memcmp(got, want, 512 * M3_Q8_0_BLOCK * 4) == 0, "%s: Q8_0 differs", k->name);
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
  }
  return finish("test_kernels");
}
