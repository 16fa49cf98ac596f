/* The roundings with AVX2 (and F16C): the float32 operations of rounding.c on eight values at a time, so its bytes. */
#include "quant/rounding.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "quant/blocks.h"
#include "quant/half.h"
#include "quant/lanes.h"

/* ------------------------------------------------------------------------------------------------ plain types */

static void round_f16(const float *src, void *dst, int64_t n) {
  uint16_t *d = dst;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i *)(d + i), _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; i++) d[i] = m3_f32_to_f16(src[i]);
}

/* Eight bfloat16 in the low halves. */
M3_INLINE __m256i bf16_of(__m256 x) {
  __m256i u = _mm256_castps_si256(x), high = _mm256_srli_epi32(u, 16);
  __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
  __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, nan);
}

static void round_bf16(const float *src, void *dst, int64_t n) {
  uint16_t *d = dst;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256i a = bf16_of(_mm256_loadu_ps(src + i)), b = bf16_of(_mm256_loadu_ps(src + i + 8));
    /* Packing goes by halves of the vectors. */
    _mm256_storeu_si256((__m256i *)(d + i), _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8));
  }
  for (; i < n; i++) d[i] = m3_f32_to_bf16(src[i]);
}

/* ------------------------------------------------------------------------------------- blocks of 32 elements */

/* The values of a block in their order; not an array, which GCC would keep in memory. */
typedef struct values {
  __m256 a, b, c, d;
} values;

M3_INLINE values load_block(const float *src) {
  return (values){_mm256_loadu_ps(src), _mm256_loadu_ps(src + 8), _mm256_loadu_ps(src + 16), _mm256_loadu_ps(src + 24)};
}

M3_INLINE __m256 magnitude(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

M3_INLINE values magnitudes(values x) {
  return (values){magnitude(x.a), magnitude(x.b), magnitude(x.c), magnitude(x.d)};
}

M3_INLINE float greatest(values x) {
  __m256 v = _mm256_max_ps(_mm256_max_ps(x.a, x.b), _mm256_max_ps(x.c, x.d));
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

M3_INLINE float least(values x) {
  __m256 v = _mm256_min_ps(_mm256_min_ps(x.a, x.b), _mm256_min_ps(x.c, x.d));
  __m128 m = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_min_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_min_ss(m, _mm_movehdup_ps(m)));
}

M3_INLINE uint32_t equal_bits(__m256 x, __m256 f) {
  return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x, f, _CMP_EQ_OQ));
}

/* The first of the values that is equal to f; one is. */
M3_INLINE int first_equal(values x, float f) {
  __m256 all = _mm256_set1_ps(f);
  return __builtin_ctz(equal_bits(x.a, all) | equal_bits(x.b, all) << 8 | equal_bits(x.c, all) << 16 |
                       equal_bits(x.d, all) << 24);
}

M3_INLINE uint16_t half_of(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }

/* The whole parts of 32 numbers as bytes, cut off at -128 and 127. */
M3_INLINE __m256i bytes_of(values x) {
  __m256i first = _mm256_packs_epi32(_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b));
  __m256i second = _mm256_packs_epi32(_mm256_cvttps_epi32(x.c), _mm256_cvttps_epi32(x.d));
  /* Packing goes by halves of the vectors. */
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* x id + half a unit away from zero. Of the half the last place is missing, so that what is just below a tie does not
 * become one. */
M3_INLINE __m256 scaled_outward(__m256 x, __m256 id) {
  const __m256 half = _mm256_set1_ps(0x1.fffffep-2f), sign = _mm256_set1_ps(-0.0f);
  __m256 scaled = _mm256_mul_ps(x, id);
  return _mm256_add_ps(scaled, _mm256_or_ps(half, _mm256_and_ps(sign, scaled)));
}

static void round_q8_0(const float *src, void *dst, int64_t n) {
  m3_block_q8_0 *b = dst;
  for (; n > 0; n -= M3_BLOCK, src += M3_BLOCK, b++) {
    values x = load_block(src);
    float d = greatest(magnitudes(x)) / 127.0f;
    __m256 id = _mm256_set1_ps(m3_inverse(d));
    values q = {scaled_outward(x.a, id), scaled_outward(x.b, id), scaled_outward(x.c, id), scaled_outward(x.d, id)};
    b->d = half_of(d);
    _mm256_storeu_si256((__m256i *)b->q, bytes_of(q));
  }
}

M3_INLINE __m256 scaled_up(__m256 x, __m256 id, __m256 shift) { return _mm256_add_ps(_mm256_mul_ps(x, id), shift); }

/* Codes: the whole parts of x id + shift, which are at least 0, at most `top`. */
M3_INLINE __m256i codes_of(values x, float id, float shift, int top) {
  __m256 i = _mm256_set1_ps(id), s = _mm256_set1_ps(shift);
  values q = {scaled_up(x.a, i, s), scaled_up(x.b, i, s), scaled_up(x.c, i, s), scaled_up(x.d, i, s)};
  return _mm256_min_epu8(bytes_of(q), _mm256_set1_epi8((char)top));
}

M3_INLINE void put_codes(__m256i codes, uint8_t *q) {
  const __m128i low = _mm_set1_epi8(15);
  __m128i first = _mm_and_si128(_mm256_castsi256_si128(codes), low);
  __m128i second = _mm_and_si128(_mm256_extracti128_si256(codes, 1), low);
  _mm_storeu_si128((__m128i *)q, _mm_or_si128(first, _mm_slli_epi16(second, 4)));
}

M3_INLINE void put_fifth(__m256i codes, uint8_t *qh) {
  int bits = _mm256_movemask_epi8(_mm256_slli_epi16(codes, 3));
  memcpy(qh, &bits, 4);
}

/* As symmetric_codes of rounding.c. */
M3_INLINE __m256i symmetric_codes(const float *src, int zero, float *d) {
  values x = load_block(src), m = magnitudes(x);
  *d = src[first_equal(m, greatest(m))] / -(float)zero;
  return codes_of(x, m3_inverse(*d), (float)zero + 0.5f, 2 * zero - 1);
}

/* As range_codes of rounding.c. */
M3_INLINE __m256i range_codes(const float *src, int top, float *d, float *min) {
  values x = load_block(src);
  float max = greatest(x);
  *min = least(x);
  /* Of zeros of both signs the first one counts. */
  if (*min == 0) *min = src[first_equal(x, 0)];
  if (max == *min) max = *min;
  *d = (max - *min) / (float)top;
  __m256 m = _mm256_set1_ps(*min);
  values above = {_mm256_sub_ps(x.a, m), _mm256_sub_ps(x.b, m), _mm256_sub_ps(x.c, m), _mm256_sub_ps(x.d, m)};
  return codes_of(above, m3_inverse(*d), 0.5f, top);
}

static void round_q4_0(const float *src, void *dst, int64_t n) {
  m3_block_q4_0 *b = dst;
  for (; n > 0; n -= M3_BLOCK, src += M3_BLOCK, b++) {
    float d;
    put_codes(symmetric_codes(src, 8, &d), b->q);
    b->d = half_of(d);
  }
}

static void round_q5_0(const float *src, void *dst, int64_t n) {
  m3_block_q5_0 *b = dst;
  for (; n > 0; n -= M3_BLOCK, src += M3_BLOCK, b++) {
    float d;
    __m256i codes = symmetric_codes(src, 16, &d);
    put_codes(codes, b->q);
    put_fifth(codes, b->qh);
    b->d = half_of(d);
  }
}

static void round_q4_1(const float *src, void *dst, int64_t n) {
  m3_block_q4_1 *b = dst;
  for (; n > 0; n -= M3_BLOCK, src += M3_BLOCK, b++) {
    float d, min;
    put_codes(range_codes(src, 15, &d, &min), b->q);
    b->d = half_of(d);
    b->m = half_of(min);
  }
}

static void round_q5_1(const float *src, void *dst, int64_t n) {
  m3_block_q5_1 *b = dst;
  for (; n > 0; n -= M3_BLOCK, src += M3_BLOCK, b++) {
    float d, min;
    __m256i codes = range_codes(src, 31, &d, &min);
    put_codes(codes, b->q);
    put_fifth(codes, b->qh);
    b->d = half_of(d);
    b->m = half_of(min);
  }
}

const m3_roundings m3_roundings_avx2 = {.f16 = round_f16,
                                        .bf16 = round_bf16,
                                        .q4_0 = round_q4_0,
                                        .q4_1 = round_q4_1,
                                        .q5_0 = round_q5_0,
                                        .q5_1 = round_q5_1,
                                        .q8_0 = round_q8_0};
#endif
