/* AVX2 + FMA + F16C. */
#if defined(__x86_64__)
#include <float.h>
#include <immintrin.h>
#include <math.h>

#include "cpu/decode_avx2.h"
#include "cpu/kernels.h"
#include "quant/blocks.h"
#include "quant/half.h"

/* Bytes of codes between those at work and those that are fetched. */
#define FETCH_AHEAD 4096

typedef __m256 vec;
enum { LANES = 8 };

static inline __m256i mask(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vec zero(void) { return _mm256_setzero_ps(); }
static inline vec all(float a) { return _mm256_set1_ps(a); }
static inline vec load(const float *p) { return _mm256_loadu_ps(p); }
static inline vec load_first(const float *p, int64_t n) { return _mm256_maskload_ps(p, mask(n)); }
static inline void store(float *p, vec v) { _mm256_storeu_ps(p, v); }
static inline void store_first(float *p, vec v, int64_t n) { _mm256_maskstore_ps(p, mask(n), v); }
static inline vec multiply_add(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec subtract(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec multiply(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec larger(vec a, vec b) { return _mm256_max_ps(a, b); } /* the second one if either is NaN */
static inline vec bounded(vec low, vec v, vec high) { return _mm256_min_ps(high, _mm256_max_ps(low, v)); }
static inline vec nearest(vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

static inline vec power_of_2(vec v) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(127)), 23));
}

static inline bool all_finite(vec v) {
  vec size = _mm256_andnot_ps(all(-0.0f), v);
  return _mm256_movemask_ps(_mm256_cmp_ps(size, all(INFINITY), _CMP_LT_OQ)) == 0xff;
}

/* ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)) of the lanes, as the scalar code. */
static inline float sum(vec v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  s = _mm_add_ss(s, _mm_movehdup_ps(s));
  return _mm_cvtss_f32(s);
}

static inline void sum4(vec a, vec b, vec c, vec d, float *out) {
  vec ac = add(_mm256_permute2f128_ps(a, c, 0x20), _mm256_permute2f128_ps(a, c, 0x31));
  vec bd = add(_mm256_permute2f128_ps(b, d, 0x20), _mm256_permute2f128_ps(b, d, 0x31));
  vec s = add(_mm256_unpacklo_ps(ac, bd), _mm256_unpackhi_ps(ac, bd)); /* even lanes of a b, odd ones, then of c d */
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
static inline __m128i sums_of(__m256i a, __m256i b, __m256i c, __m256i d) {
  __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  return _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
}

static inline __m256i codes16(const int8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }

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
    __m256i s[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) s[i] = _mm256_setzero_si256();
    for (int64_t i = 0; i < p->stride; i += 16) {
      __m256i a = codes16(k0 + i), b = codes16(k1 + i);
      _mm_prefetch(ahead + i * 2, _MM_HINT_T0);
#pragma GCC unroll 4
      for (int h = 0; h < 4; h++) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(q + h * p->stride + i));
        s[h] = _mm256_add_epi32(s[h], _mm256_madd_epi16(a, x));
        s[4 + h] = _mm256_add_epi32(s[4 + h], _mm256_madd_epi16(b, x));
      }
    }
    take_bound(p, j, sums_of(s[0], s[1], s[2], s[3]), &best, &bad);
    if (two) take_bound(p, j + 1, sums_of(s[4], s[5], s[6], s[7]), &best, &bad);
  }
  store_bounds(p->out, best, bad);
}

static void f16_to_f32(const void *src, float *dst, int64_t n) {
  const uint16_t *s = src;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + i))));
  for (; i < n; i++) dst[i] = m3_f16_to_f32(s[i]);
}

static void bf16_to_f32(const void *src, float *dst, int64_t n) {
  const uint16_t *s = src;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(s + i)));
    _mm256_storeu_ps(dst + i, _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)));
  }
  for (; i < n; i++) dst[i] = m3_bf16_to_f32(s[i]);
}

static void q8_0_to_f32(const void *src, float *dst, int64_t n) {
  const m3_block_q8_0 *b = src;
  for (int64_t i = 0; i < n / M3_BLOCK; i++, dst += M3_BLOCK) {
    __m256 d = _mm256_set1_ps(m3_f16_to_f32(b[i].d));
    for (int j = 0; j < M3_BLOCK; j += 8) {
      __m256i q = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(b[i].q + j)));
      _mm256_storeu_ps(dst + j, _mm256_mul_ps(_mm256_cvtepi32_ps(q), d));
    }
  }
}

const m3_kernels m3_kernels_avx2 = {
    .name = "avx2",
    VECTOR_KERNELS,
    .bounds = bounds,
    .products = &m3_products_avx2,
    .to_f32 = {[M3_TYPE_F16] = f16_to_f32,
               [M3_TYPE_BF16] = bf16_to_f32,
               [M3_TYPE_Q8_0] = q8_0_to_f32,
               M3_AVX2_DECODERS},
};
#else
typedef int m3_no_avx2;
#endif
