/* The inner loops of every instruction set that this machine has, against the scalar specification. */
#include <float.h>

#include "check.h"
#include "cpu/kernels.h"
#include "quant/blocks.h"
#include "quant/codebooks.h"
#include "quant/runs.h"
#include "quant/traits.h"

enum { MAX_N = 1100 };

static void fill(float *x, int64_t n, uint64_t *seed) { fill_random(x, n, 1.0f, seed); }

/* Sums may be taken in another order: the difference is bounded by n * eps * sum |a b|. */
static void check_sums(const m3_kernels *k, int64_t n, uint64_t *seed) {
  static float rows[4 * MAX_N], x[MAX_N], y[MAX_N], want[MAX_N];
  fill(rows, 4 * n, seed);
  fill(x, n, seed);
  float alone[4];
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
  fill(y, n, seed);
  memcpy(want, y, sizeof want);
  k->axpy(y, 0.37f, x, n);
  m3_kernels_scalar.axpy(want, 0.37f, x, n);
  CHECK_CLOSE("axpy", y, want, n, 1e-6);
}

/* Every tile shape: the bits are those of single dot products, whole or in pieces of columns, and nothing else is
 * written. */
static void check_dots(const m3_kernels *k, int64_t n, uint64_t *seed) {
  enum { MOST = 20, STRIDE = 24 };
  static float rows[MOST * 520], x[MOST * 520], out[MOST * STRIDE], partial[MOST * MOST * M3_DOT_LANES];
  fill(rows, MOST * (n + 3), seed);
  fill(x, MOST * (n + 5), seed);
  for (int64_t n_x = 1; n_x <= MOST; n_x++)
    for (int64_t n_rows = 1; n_rows <= MOST; n_rows += n_rows < 9 ? 1 : 4)
      for (int64_t piece = n; piece > 0; piece = piece == n && n > M3_DOT_LANES ? M3_DOT_LANES : 0) {
        for (int i = 0; i < MOST * STRIDE; i++) out[i] = 12345.0f;
        m3_dots d = {.row_stride = n + 3,
                     .n_rows = n_rows,
                     .x_stride = n + 5,
                     .n_x = n_x,
                     .out = out,
                     .out_stride = STRIDE,
                     .partial = piece < n ? partial : NULL};
        for (int64_t i = 0; i < n; i += piece) {
          d.rows = rows + i, d.x = x + i, d.n = n - i < piece ? n - i : piece;
          d.first = i == 0, d.last = i + piece >= n;
          k->dots(&d);
        }
        int64_t wrong = 0;
        for (int64_t r = 0; r < MOST; r++)
          for (int64_t j = 0; j < STRIDE; j++) {
            bool inside = r < n_x && j < n_rows;
            float want = inside ? k->dot(rows + j * (n + 3), x + r * (n + 5), n) : 12345.0f;
            wrong += memcmp(&out[r * STRIDE + j], &want, 4) != 0;
          }
        CHECK(wrong == 0, "%s: dots of %lld x %lld rows of %lld in pieces of %lld: %lld wrong", k->name, (long long)n_x,
              (long long)n_rows, (long long)n, (long long)piece, (long long)wrong);
      }
}

/* Weighted sums are added in order, whatever rows are computed together; rounding apart they are the scalar ones. */
static void check_accumulate(const m3_kernels *k, int64_t n, uint64_t *seed) {
  enum { MOST = 14, STRIDE = 160, N_V = 23 };
  static float p[MOST * 32], v[N_V * STRIDE], got[MOST * STRIDE], alone[MOST * STRIDE], want[MOST * STRIDE];
  fill(p, MOST * 32, seed);
  fill(v, N_V * STRIDE, seed);
  for (int64_t n_acc = 1; n_acc <= MOST; n_acc++) {
    fill(got, MOST * STRIDE, seed);
    memcpy(alone, got, sizeof got);
    memcpy(want, got, sizeof got);
    m3_accumulate a = {got, STRIDE, n_acc, p, 32, v, STRIDE, N_V, n, p, sizeof p};
    k->accumulate(&a);
    for (int64_t r = 0; r < n_acc; r++)
      for (int64_t j = 0; j < N_V; j++)
        k->accumulate(&(m3_accumulate){alone + r * STRIDE, 0, 1, p + r * 32 + j, 0, v + j * STRIDE, 0, 1, n, NULL, 0});
    a.acc = want;
    m3_kernels_scalar.accumulate(&a);
    CHECK(memcmp(got, alone, sizeof got) == 0, "%s: accumulate of %lld rows, n=%lld: depends on the grouping", k->name,
          (long long)n_acc, (long long)n);
    CHECK_CLOSE("accumulate", got, want, MOST * STRIDE, 2e-5);
  }
}

/* exp over the whole range against double precision, and what is no number. */
static void check_exp(const m3_kernels *k, uint64_t *seed) {
  enum { N = 200000 };
  static float x[N + 1], before[N];
  for (int i = 0; i < N; i++) x[i] = before[i] = i < N / 2 ? -110.0f + 200.0f * (float)i / (N / 2) : random_float(seed);
  x[N] = 77.0f;
  k->exp_sum(x, N, 0, 1);
  double worst = 0;
  for (int i = 0; i < N; i++) {
    double exact = exp((double)before[i]);
    if (exact > (double)FLT_MAX) {
      CHECK(isinf(x[i]) || x[i] > 0.999f * FLT_MAX, "%s: exp(%g) = %g", k->name, (double)before[i], (double)x[i]);
      continue;
    }
    double unit = fmax(ldexp(1.0, (int)floor(log2(exact)) - 23), 0x1p-149);
    worst = fmax(worst, fabs((double)x[i] - exact) / unit);
  }
  CHECK(worst <= 2.0 && x[N] == 77.0f, "%s: exp is %.2f units off", k->name, worst);
  static const float special[] = {0, -0.0f, -INFINITY, INFINITY, NAN, -1e30f};
  static const float want[] = {1, 1, 0, INFINITY, NAN, 0};
  for (int64_t n = 1; n <= 40; n++)
    for (int i = 0; i < 6; i++) {
      float y[41];
      for (int64_t j = 0; j < n; j++) y[j] = j == n / 2 ? special[i] : -1.0f;
      y[n] = 77.0f;
      float sum = k->exp_sum(y, n, 0, 1), one = y[n / 2], expected = want[i] + (float)(n - 1) * 0.36787944f;
      CHECK((isnan(want[i]) ? isnan(one) && isnan(sum) : one == want[i]) && y[n] == 77.0f, "%s: exp(%g) = %g", k->name,
            (double)special[i], (double)one);
      if (isfinite(want[i]))
        CHECK(fabsf(sum - expected) <= 1e-5f * expected, "%s: sum of exp, n=%lld", k->name, (long long)n);
    }
  float shifted[] = {3.0f, 5.0f, -INFINITY};
  k->exp_sum(shifted, 3, 5.0f, 0.5f);
  CHECK(fabsf(shifted[0] - 0.36787944f) < 1e-6f && shifted[1] == 1 && shifted[2] == 0, "%s: shift and scale", k->name);
}

static void check_largest(const m3_kernels *k, uint64_t *seed) {
  static const float special[] = {1e30f, NAN, INFINITY, -INFINITY};
  for (int64_t n = 0; n <= 40; n++)
    for (int64_t at = 0; at < (n ? n : 1); at++)
      for (int i = 0; i < 4; i++) {
        float x[40], want = -INFINITY;
        fill(x, 40, seed);
        if (n) x[at] = special[i];
        for (int64_t j = 0; j < n; j++) want = x[j] > want ? x[j] : want;
        bool finite = true;
        CHECK(k->largest(x, n, &finite) == want && finite == (n == 0 || i == 0), "%s: largest of %lld with %g", k->name,
              (long long)n, (double)special[i]);
      }
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

/* What a lane of a GPU decodes at a time is what the decoders give, for the same random bytes; plain rows of any length
 * end in zeros. */
static void check_runs(void) {
  enum { N_BLOCKS = 1000, LARGEST = M3_SUPERBLOCK };
  static uint16_t data[N_BLOCKS * LARGEST * 2];
  static float got[N_BLOCKS * LARGEST], want[N_BLOCKS * LARGEST];
  uint64_t seed = 5;
  for (size_t i = 0; i < sizeof data / sizeof *data; i++) data[i] = (uint16_t)next_random(&seed);
  for (int32_t type = 0; type <= M3_TYPE_MXFP4; type++) {
    if (!m3_traits(type)) continue;
    int64_t block = m3_type_block_size(type), n = block == 1 ? 8 * N_BLOCKS : block * N_BLOCKS, different = 0;
    m3_traits(type)->to_f32(data, want, n);
    for (uint32_t run = 0; run < n / M3_RUN; run++) m3_decode_run(type, data, run, n, got + run * M3_RUN);
    for (int64_t i = 0; i < n; i++)
      different += !(isnan(got[i]) && isnan(want[i])) && memcmp(&got[i], &want[i], 4) != 0;
    CHECK(different == 0, "runs of %s: %lld of %lld elements differ", m3_type_name(type), (long long)different,
          (long long)n);
    for (int64_t length = 1; length < M3_RUN && block == 1; length++) {
      m3_decode_run(type, data, 1, M3_RUN + length, got);
      bool right = true;
      for (int64_t j = 0; j < M3_RUN; j++)
        right &= j < length ? isnan(got[j]) == isnan(want[M3_RUN + j]) && (isnan(got[j]) || got[j] == want[M3_RUN + j])
                            : got[j] == 0;
      CHECK(right, "%s: the last %lld elements", m3_type_name(type), (long long)length);
    }
  }
}

int main(void) {
  check_runs();
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
    for (int64_t n = 1; n <= 500; n += n < 40 ? 3 : 61) check_dots(k, n, &seed);
    for (int64_t n = 1; n <= 150; n += n < 40 ? 1 : 11) check_accumulate(k, n, &seed);
    check_exp(k, &seed);
    check_largest(k, &seed);
    for (int64_t n = 120; n <= MAX_N; n += 77) check_sums(k, n, &seed);
    check_conversions(k);
    check_blocks(k);
  }
  return finish("test_kernels");
}
