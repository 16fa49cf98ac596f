/* The searches of every instruction set write the same bytes: those of the scalar code, whose hash stands here. */
#include "check.h"
#include "quant/scale_search.h"

enum { N_CASES = 60 };

static uint64_t hash;

static void add_bytes(const void *bytes, size_t n) {
  const uint8_t *b = bytes;
  for (size_t i = 0; i < n; i++) hash = (hash ^ b[i]) * 0x100000001b3u;
}

/* Values of one magnitude, of one far out, all equal, all zero, all above zero, or of many magnitudes. */
static void make_case(int k, float *x, float *w, uint64_t *seed) {
  static const float scales[] = {1.0f, 0.02f, 1e-6f, 2e4f, 1e-9f};
  fill_random(x, M3_SUPERBLOCK, scales[k % 5], seed);
  for (int i = 0; i < M3_SUPERBLOCK; i++) {
    float r = random_float(seed);
    w[i] = k % 7 == 0 && i < 64 ? 0.0f : r * r * (k % 3 == 0 && i % 50 == 0 ? 1e4f : 1.0f);
    if (k % 6 == 1) x[i] = fabsf(x[i]) + scales[k % 5];
    if (k % 6 == 2) x[i] *= i / 32 == 3 ? 1.0f : 0.01f;
    if (k % 12 == 3) x[i] = scales[k % 5];
    if (k % 12 == 9) x[i] = 0;
    if (k % 6 == 4) x[i] = i == 77 ? 100 * x[i] : x[i];
    if (!(fabsf(x[i]) <= 65504.0f)) x[i] = 65504.0f;
  }
}

typedef void (*run_search)(const m3_searches *s, const float *x, const float *w, void *out);

#define RUN(name, result)                                                                   \
  static void run_##name(const m3_searches *s, const float *x, const float *w, void *out) { \
    s->name(x, w, (result *)out);                                                           \
  }
RUN(q2_k, m3_affine_groups)
RUN(q4_k, m3_affine_groups)
RUN(q5_k, m3_affine_groups)
RUN(q3_k, m3_symmetric_groups)
RUN(q6_k, m3_symmetric_groups)
RUN(iq4_xs, m3_symmetric_groups)
RUN(q4_0, m3_single_blocks)
RUN(q4_1, m3_single_blocks)
RUN(q5_0, m3_single_blocks)
RUN(q5_1, m3_single_blocks)
RUN(iq4_nl, m3_single_blocks)
RUN(mxfp4, m3_single_blocks)

static void check_search(const char *name, run_search run, size_t size, uint64_t expected) {
  uint64_t seed = 7;
  hash = 0xcbf29ce484222325u;
  for (int k = 0; k < N_CASES; k++) {
    float x[M3_SUPERBLOCK], w[M3_SUPERBLOCK];
    make_case(k, x, w, &seed);
    for (int weighted = 0; weighted < 2; weighted++) {
      uint8_t want[512] = {0}, got[512] = {0};
      run(&m3_searches_scalar, x, weighted ? w : NULL, want);
      run(m3_machine_searches(), x, weighted ? w : NULL, got);
      CHECK(memcmp(got, want, size) == 0, "%s: case %d, weighted %d", name, k, weighted);
      add_bytes(want, size);
    }
  }
  CHECK(hash == expected, "%s: hash 0x%llx, expected 0x%llx", name, (unsigned long long)hash,
        (unsigned long long)expected);
}

int main(void) {
#if defined(__x86_64__)
  if (m3_machine_searches() == &m3_searches_scalar) printf("not run here: AVX2\n");
#endif
#define SEARCH(name, result, expected) check_search(#name, run_##name, sizeof(result), expected)
  SEARCH(q2_k, m3_affine_groups, 0x574643aca5cfd925u);
  SEARCH(q4_k, m3_affine_groups, 0x6ab6379cc3afaeecu);
  SEARCH(q5_k, m3_affine_groups, 0x4d9aad99a230d5a7u);
  SEARCH(q3_k, m3_symmetric_groups, 0x49de7afe7057d104u);
  SEARCH(q6_k, m3_symmetric_groups, 0xf1b171628884666eu);
  SEARCH(iq4_xs, m3_symmetric_groups, 0x854525b314d792deu);
  SEARCH(q4_0, m3_single_blocks, 0x55305ab6eba56c7du);
  SEARCH(q4_1, m3_single_blocks, 0x2c32f04ca97a12bfu);
  SEARCH(q5_0, m3_single_blocks, 0xaa6cf622deb544b6u);
  SEARCH(q5_1, m3_single_blocks, 0x9544dfcfe65dbbfeu);
  SEARCH(iq4_nl, m3_single_blocks, 0x810d3fb0d2c514a5u);
  SEARCH(mxfp4, m3_single_blocks, 0x707cabade95aaef2u);
  return finish("test_encode");
}
