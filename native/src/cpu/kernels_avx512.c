/* AVX-512 F, BW, VL, DQ. */
#if defined(__x86_64__)
#include <float.h>
#include <immintrin.h>
#include <math.h>

#include "cpu/decode_avx2.h"
#include "cpu/kernels.h"
#include "quant/blocks.h"
#include "quant/half.h"

/* The first n of 16 lanes; the others read as zero and touch no memory. */
static inline __mmask16 lanes(int64_t n) { return (__mmask16)((1u << n) - 1); }

/* Bytes of codes between those at work and those that are fetched. */
#define FETCH_AHEAD 4096

typedef __m512 vec;
enum { LANES = 16 };

static inline vec zero(void) { return _mm512_setzero_ps(); }
static inline vec all(float a) { return _mm512_set1_ps(a); }
static inline vec load(const float *p) { return _mm512_loadu_ps(p); }
static inline vec load_first(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(lanes(n), p); }
static inline void store(float *p, vec v) { _mm512_storeu_ps(p, v); }
static inline void store_first(float *p, vec v, int64_t n) { _mm512_mask_storeu_ps(p, lanes(n), v); }
static inline vec multiply_add(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec subtract(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec multiply(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec larger(vec a, vec b) { return _mm512_max_ps(a, b); } /* the second one if either is NaN */
static inline vec bounded(vec low, vec v, vec high) { return _mm512_min_ps(high, _mm512_max_ps(low, v)); }
static inline vec nearest(vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

static inline vec power_of_2(vec v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(127)), 23));
}

static inline bool all_finite(vec v) {
  return _mm512_cmp_ps_mask(_mm512_abs_ps(v), all(INFINITY), _CMP_LT_OQ) == 0xffff;
}

static inline __m256 halves(vec v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }

static inline float sum(vec v) {
  __m256 h = halves(v);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  s = _mm_add_ss(s, _mm_movehdup_ps(s));
  return _mm_cvtss_f32(s);
}

static inline void sum4(vec a, vec b, vec c, vec d, float *out) {
  __m256 ha = halves(a), hb = halves(b), hc = halves(c), hd = halves(d);
  __m256 ac = _mm256_add_ps(_mm256_permute2f128_ps(ha, hc, 0x20), _mm256_permute2f128_ps(ha, hc, 0x31));
  __m256 bd = _mm256_add_ps(_mm256_permute2f128_ps(hb, hd, 0x20), _mm256_permute2f128_ps(hb, hd, 0x31));
  __m256 s = _mm256_add_ps(_mm256_unpacklo_ps(ac, bd), _mm256_unpackhi_ps(ac, bd));
  __m128 low = _mm256_castps256_ps128(s), high = _mm256_extractf128_ps(s, 1);
  _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(low, high), _mm_movehl_ps(high, low)));
}

#include "cpu/vector_kernels.h"

/* The bounds of one key for four queries, whose products are d, taken into best; bad becomes all ones where one is
 * none. */
static inline void take_bound(const m3_bounds *p, int64_t j, __m128i d, __m128 *best, __m128 *bad) {
  __m128 t = _mm_mul_ps(_mm_loadu_ps(p->factors), _mm_cvtepi32_ps(d));
  __m128 bound = _mm_mul_ps(_mm_set1_ps(p->pairs[2 * j]), _mm_add_ps(t, _mm_loadu_ps(p->factors + 4)));
  bound = _mm_add_ps(bound, _mm_mul_ps(_mm_set1_ps(p->pairs[2 * j + 1]), _mm_loadu_ps(p->factors + 8)));
  bound = _mm_add_ps(bound, _mm_set1_ps(FLT_MIN));
  *bad = _mm_or_ps(*bad, _mm_cmpnle_ps(bound, _mm_set1_ps(FLT_MAX)));
  *best = _mm_max_ps(*best, bound);
}

static inline void store_bounds(float *out, __m128 best, __m128 bad) {
  _mm_storeu_ps(out, _mm_blendv_ps(best, _mm_set1_ps(INFINITY), bad));
}

/* Sums of the lanes of four vectors. */
static inline __m128i sums_of(__m512i a, __m512i b, __m512i c, __m512i d) {
  __m256i ha = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  __m256i hb = _mm256_add_epi32(_mm512_castsi512_si256(b), _mm512_extracti64x4_epi64(b, 1));
  __m256i hc = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
  __m256i hd = _mm256_add_epi32(_mm512_castsi512_si256(d), _mm512_extracti64x4_epi64(d, 1));
  __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(ha, hb), _mm256_hadd_epi32(hc, hd));
  return _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
}

static inline __m512i codes32(const int8_t *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)); }

/* What is fetched while key j is worked on. */
static inline const char *fetched(const m3_bounds *p, int64_t j) {
  int64_t at = j * p->stride + FETCH_AHEAD, beyond = at - p->n * p->stride;
  return beyond >= 0 && p->next ? (const char *)p->next + beyond : (const char *)p->codes + at;
}

static void bounds(const m3_bounds *p) {
  __m128 best = _mm_set1_ps(-INFINITY), bad = _mm_setzero_ps();
  const int16_t *q = p->queries;
  for (int64_t j = 0; j < p->n; j += 2) { /* two keys share the loads of the queries */
    bool two = j + 1 < p->n;
    const char *ahead = fetched(p, j);
    const int8_t *k0 = p->codes + j * p->stride, *k1 = two ? k0 + p->stride : k0;
    __m512i s[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) s[i] = _mm512_setzero_si512();
    for (int64_t i = 0; i < p->stride; i += 32) {
      __m512i a = codes32(k0 + i), b = codes32(k1 + i);
      _mm_prefetch(ahead + i * 2, _MM_HINT_T0);
#pragma GCC unroll 4
      for (int h = 0; h < 4; h++) {
        __m512i x = _mm512_loadu_si512(q + h * p->stride + i);
        s[h] = _mm512_add_epi32(s[h], _mm512_madd_epi16(a, x));
        s[4 + h] = _mm512_add_epi32(s[4 + h], _mm512_madd_epi16(b, x));
      }
    }
    take_bound(p, j, sums_of(s[0], s[1], s[2], s[3]), &best, &bad);
    if (two) take_bound(p, j + 1, sums_of(s[4], s[5], s[6], s[7]), &best, &bad);
  }
  store_bounds(p->out, best, bad);
}

static void f16_to_f32(const void *src, float *dst, int64_t n) {
  const uint16_t *s = src;
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 m = n - i >= 16 ? 0xffff : lanes(n - i);
    _mm512_mask_storeu_ps(dst + i, m, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, s + i)));
  }
}

static void bf16_to_f32(const void *src, float *dst, int64_t n) {
  const uint16_t *s = src;
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 m = n - i >= 16 ? 0xffff : lanes(n - i);
    __m512i v = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, s + i)), 16);
    _mm512_mask_storeu_ps(dst + i, m, _mm512_castsi512_ps(v));
  }
}

static void q8_0_to_f32(const void *src, float *dst, int64_t n) {
  const m3_block_q8_0 *b = src;
  for (int64_t i = 0; i < n / M3_BLOCK; i++, dst += M3_BLOCK) {
    __m512 d = _mm512_set1_ps(m3_f16_to_f32(b[i].d));
    for (int j = 0; j < M3_BLOCK; j += 16) {
      __m512i q = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(b[i].q + j)));
      _mm512_storeu_ps(dst + j, _mm512_mul_ps(_mm512_cvtepi32_ps(q), d));
    }
  }
}

#define TABLE(integers)                        \
  {                                            \
      .name = "avx512",                        \
      VECTOR_KERNELS,                          \
      .bounds = bounds,                        \
      .products = integers,                    \
      .to_f32 = {[M3_TYPE_F16] = f16_to_f32,   \
                 [M3_TYPE_BF16] = bf16_to_f32, \
                 [M3_TYPE_Q8_0] = q8_0_to_f32, \
                 M3_AVX2_DECODERS},            \
  }

const m3_kernels m3_kernels_avx512 = TABLE(&m3_products_avx512);
const m3_kernels m3_kernels_avx512_vnni = TABLE(&m3_products_avx512_vnni);
#else
typedef int m3_no_avx512;
#endif
