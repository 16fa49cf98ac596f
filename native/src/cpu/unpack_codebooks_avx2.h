/* unpack_codebooks_avx2.h - what unpack_avx2.h declares, for the types whose elements come from a codebook. */
#ifndef M3_SRC_CPU_UNPACK_CODEBOOKS_AVX2_H
#define M3_SRC_CPU_UNPACK_CODEBOOKS_AVX2_H

#include "cpu/unpack_avx2.h"

enum {
  zero_iq2_xxs = 0,
  zero_iq2_xs = 0,
  zero_iq2_s = 0,
  zero_iq3_xxs = 0,
  zero_iq3_s = 0,
  zero_iq1_s = 0,
  zero_iq1_m = 0
};

INLINE __m256i runs_of_8(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  return _mm256_setr_epi64x((int64_t)a, (int64_t)b, (int64_t)c, (int64_t)d);
}

/* Magnitudes of 32 elements, negative where all bits of a byte are set. */
INLINE void split_signs(__m256i magnitudes, __m256i negative, __m256i *v) {
  split_signed(_mm256_sub_epi8(_mm256_xor_si256(magnitudes, negative), negative), v);
}

/* The sign bytes of 8 runs from their 7 bits, in the lowest byte of each lane. */
INLINE __m256i with_parity(__m256i seven) {
  const __m256i odd = twice(_mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
  __m256i half = _mm256_and_si256(_mm256_xor_si256(seven, _mm256_srli_epi32(seven, 4)), _mm256_set1_epi32(15));
  return _mm256_or_si256(seven, _mm256_shuffle_epi8(odd, half));
}

/* Of two words with four times 7 bits each. */
INLINE __m256i signs_of_words(__m256i words) {
  const __m256i shift = _mm256_setr_epi32(0, 7, 14, 21, 0, 7, 14, 21);
  return with_parity(_mm256_and_si256(_mm256_srlv_epi32(words, shift), _mm256_set1_epi32(127)));
}

/* The k-th four of 8 sign bytes spread to all bits of the 32 elements. */
INLINE __m256i spread_signs(__m256i signs, int k) {
  const __m256i from = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 12, 12,
                                        12, 12, 12, 12, 12, 12);
  const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201u);
  __m256i four = k ? _mm256_permute4x64_epi64(signs, 0xee) : _mm256_permute4x64_epi64(signs, 0x44);
  return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(four, from), bit), bit);
}

INLINE void codes_iq2_xxs(const void *src, int i, __m256i *v) {
  const m3_block_iq2_xxs *b = src;
  const __m256i words = _mm256_setr_epi32(1, 1, 1, 1, 3, 3, 3, 3);
  __m256i signs = signs_of_words(_mm256_permutevar8x32_epi32(twice(load16(b->q + 8 * i)), words));
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    uint32_t w = word32(b->q + 8 * i + 4 * k);
    __m256i grid = runs_of_8(word64(m3_iq2_xxs_grid[w & 255]), word64(m3_iq2_xxs_grid[w >> 8 & 255]),
                             word64(m3_iq2_xxs_grid[w >> 16 & 255]), word64(m3_iq2_xxs_grid[w >> 24]));
    split_signs(grid, spread_signs(signs, k), v + 2 * k);
  }
}

INLINE void scales_iq2_xxs(const void *src, float *s, float *m) {
  const m3_block_iq2_xxs *b = src;
  (void)m;
  __m256 odd = _mm256_shuffle_ps(_mm256_castsi256_ps(load32(b->q)), _mm256_castsi256_ps(load32(b->q + 16)), 0xdd);
  __m256i w = _mm256_permute4x64_epi64(_mm256_castps_si256(odd), 0xd8);
  between8(s, half8(b->d), _mm256_srli_epi32(w, 28), 0.25f);
}

/* Of IQ2_XS and IQ2_S. */
INLINE void between16(float *s, uint16_t d, const uint8_t *packed, float factor) {
  __m128i i = nibbles16(packed);
  between8(s, half8(d), _mm256_cvtepi8_epi32(i), factor);
  between8(s + 8, half8(d), _mm256_cvtepi8_epi32(_mm_srli_si128(i, 8)), factor);
}

INLINE void codes_iq2_xs(const void *src, int i, __m256i *v) {
  const m3_block_iq2_xs *b = src;
  __m256i signs = with_parity(_mm256_srli_epi32(_mm256_cvtepu16_epi32(load16(b->q + 8 * i)), 9));
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    const uint16_t *q = b->q + 8 * i + 4 * k;
    __m256i grid = runs_of_8(word64(m3_iq2_xs_grid[q[0] & 511]), word64(m3_iq2_xs_grid[q[1] & 511]),
                             word64(m3_iq2_xs_grid[q[2] & 511]), word64(m3_iq2_xs_grid[q[3] & 511]));
    split_signs(grid, spread_signs(signs, k), v + 2 * k);
  }
}

INLINE void scales_iq2_xs(const void *src, float *s, float *m) {
  const m3_block_iq2_xs *b = src;
  (void)m;
  between16(s, b->d, b->scales, 0.25f);
}

INLINE void codes_iq2_s(const void *src, int i, __m256i *v) {
  const m3_block_iq2_s *b = src;
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    const uint8_t *q = b->q + 8 * i + 4 * k;
    unsigned h = b->qh[2 * i + k];
    __m256i grid =
        runs_of_8(word64(m3_iq2_s_grid[q[0] | (h & 3) << 8]), word64(m3_iq2_s_grid[q[1] | (h >> 2 & 3) << 8]),
                  word64(m3_iq2_s_grid[q[2] | (h >> 4 & 3) << 8]), word64(m3_iq2_s_grid[q[3] | (h >> 6) << 8]));
    split_signs(grid, spread(word32(b->signs + 8 * i + 4 * k)), v + 2 * k);
  }
}

INLINE void scales_iq2_s(const void *src, float *s, float *m) {
  const m3_block_iq2_s *b = src;
  (void)m;
  between16(s, b->d, b->scales, 0.25f);
}

INLINE __m256i runs_of_4(const uint8_t (*grid)[4], const uint8_t *q, unsigned high) {
#define RUN(r) (int)word32(grid[q[r] | (high >> (r) & 1) << 8])
  return _mm256_setr_epi32(RUN(0), RUN(1), RUN(2), RUN(3), RUN(4), RUN(5), RUN(6), RUN(7));
#undef RUN
}

INLINE void codes_iq3_xxs(const void *src, int i, __m256i *v) {
  const m3_block_iq3_xxs *b = src;
  const __m256i words = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
  __m256i two = _mm256_castsi128_si256(_mm_cvtsi64_si128((int64_t)word64(b->gas + 8 * i)));
  __m256i signs = signs_of_words(_mm256_permutevar8x32_epi32(two, words));
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    int g = 2 * i + k;
    split_signs(runs_of_4(m3_iq3_xxs_grid, b->q + 8 * g, 0), spread_signs(signs, k), v + 2 * k);
  }
}

INLINE void scales_iq3_xxs(const void *src, float *s, float *m) {
  const m3_block_iq3_xxs *b = src;
  (void)m;
  between8(s, half8(b->d), _mm256_srli_epi32(load32(b->gas), 28), 0.5f);
}

INLINE void codes_iq3_s(const void *src, int i, __m256i *v) {
  const m3_block_iq3_s *b = src;
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    int g = 2 * i + k;
    split_signs(runs_of_4(m3_iq3_s_grid, b->q + 8 * g, b->qh[g]), spread(word32(b->signs + 4 * g)), v + 2 * k);
  }
}

INLINE void scales_iq3_s(const void *src, float *s, float *m) {
  const m3_block_iq3_s *b = src;
  (void)m;
  __m256i n = fields8(word32(b->scales), 4);
  scaled8(s, half8(b->d), _mm256_add_epi32(_mm256_add_epi32(n, n), _mm256_set1_epi32(1)));
}

/* 8 * entry + or - 1 by the sign bits of runs, all bits of a byte each. */
INLINE void split_ternary(__m256i grid, __m256i negative, __m256i *v) {
  __m256i eight = _mm256_and_si256(_mm256_slli_epi16(grid, 3), bytes_of(0xf8));
  split_signed(_mm256_add_epi8(eight, _mm256_or_si256(negative, bytes_of(1))), v);
}

INLINE void codes_iq1_s(const void *src, int i, __m256i *v) {
  const m3_block_iq1_s *b = src;
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    int g = 2 * i + k;
    const uint8_t *q = b->q + 4 * g;
    unsigned h = b->qh[g];
    __m256i grid =
        runs_of_8(word64(m3_iq1_grid[q[0] | (h & 7) << 8]), word64(m3_iq1_grid[q[1] | (h >> 3 & 7) << 8]),
                  word64(m3_iq1_grid[q[2] | (h >> 6 & 7) << 8]), word64(m3_iq1_grid[q[3] | (h >> 9 & 7) << 8]));
    split_ternary(grid, bytes_of(-(int)(h >> 15)), v + 2 * k);
  }
}

/* d * (2 * i + 1) / 8. */
INLINE void odd8(float *s, __m256 d, __m256i i) {
  __m256 x = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_add_epi32(i, i), _mm256_set1_epi32(1)));
  _mm256_storeu_ps(s, _mm256_mul_ps(_mm256_mul_ps(d, x), _mm256_set1_ps(0.125f)));
}

INLINE void scales_iq1_s(const void *src, float *s, float *m) {
  const m3_block_iq1_s *b = src;
  (void)m;
  __m256i h = _mm256_cvtepu16_epi32(load16(b->qh));
  odd8(s, half8(b->d), _mm256_and_si256(_mm256_srli_epi32(h, 12), _mm256_set1_epi32(7)));
}

INLINE void codes_iq1_m(const void *src, int i, __m256i *v) {
  const m3_block_iq1_m *b = src;
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    const uint8_t *q = b->q + 8 * i + 4 * k;
    unsigned h = b->qh[4 * i + 2 * k] | (unsigned)b->qh[4 * i + 2 * k + 1] << 8;
    __m256i grid =
        runs_of_8(word64(m3_iq1_grid[q[0] | (h & 7) << 8]), word64(m3_iq1_grid[q[1] | (h >> 4 & 7) << 8]),
                  word64(m3_iq1_grid[q[2] | (h >> 8 & 7) << 8]), word64(m3_iq1_grid[q[3] | (h >> 12 & 7) << 8]));
    const __m256i bit = runs_of_8(1u << 3, 1u << 7, 1u << 11, 1u << 15);
    __m256i negative = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(h), bit), bit);
    split_ternary(grid, negative, v + 2 * k);
  }
}

INLINE void scales_iq1_m(const void *src, float *s, float *m) {
  const m3_block_iq1_m *b = src;
  (void)m;
  const __m256i shift = _mm256_setr_epi32(0, 3, 6, 9, 0, 3, 6, 9), seven = _mm256_set1_epi32(7);
  __m256 d = half8(m3_iq1_m_d(b));
  for (int k = 0; k < 2; k++) {
    __m256i w = _mm256_set_m128i(_mm_set1_epi32(b->scales[2 * k + 1]), _mm_set1_epi32(b->scales[2 * k]));
    odd8(s + 8 * k, d, _mm256_and_si256(_mm256_srlv_epi32(w, shift), seven));
  }
}

#endif
