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

/* Four runs side by side. Broadcasts are loads alone, and blends run anywhere; insertions are two steps each. */
INLINE __m256i runs_of_8(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  __m256i low = _mm256_blend_epi32(_mm256_set1_epi64x((int64_t)a), _mm256_set1_epi64x((int64_t)b), 0x0c);
  __m256i high = _mm256_blend_epi32(_mm256_set1_epi64x((int64_t)c), _mm256_set1_epi64x((int64_t)d), 0xc0);
  return _mm256_blend_epi32(low, high, 0xf0);
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

/* By the 7 sign bits of a run, of which the eighth makes the number of negative ones even: 1 or -1 for each element. */
#define SIGN(n, bit) ((uint64_t)((bit) ? 0xff : 1) << 8 * (n))
#define BIT(i, n) ((i) >> (n) & 1)
#define PARITY(i) (BIT(i, 0) ^ BIT(i, 1) ^ BIT(i, 2) ^ BIT(i, 3) ^ BIT(i, 4) ^ BIT(i, 5) ^ BIT(i, 6))
#define SIGNS_1(i)                                                                                         \
  SIGN(0, BIT(i, 0)) | SIGN(1, BIT(i, 1)) | SIGN(2, BIT(i, 2)) | SIGN(3, BIT(i, 3)) | SIGN(4, BIT(i, 4)) | \
      SIGN(5, BIT(i, 5)) | SIGN(6, BIT(i, 6)) | SIGN(7, PARITY(i))
#define SIGNS_4(i) SIGNS_1(i), SIGNS_1((i) + 1), SIGNS_1((i) + 2), SIGNS_1((i) + 3)
#define SIGNS_16(i) SIGNS_4(i), SIGNS_4((i) + 4), SIGNS_4((i) + 8), SIGNS_4((i) + 12)
#define SIGNS_64(i) SIGNS_16(i), SIGNS_16((i) + 16), SIGNS_16((i) + 32), SIGNS_16((i) + 48)
_Alignas(64) static const uint64_t signs_of_run[128] = {SIGNS_64(0), SIGNS_64(64)};
#undef SIGN
#undef BIT
#undef PARITY
#undef SIGNS_1
#undef SIGNS_4
#undef SIGNS_16
#undef SIGNS_64

/* Of four runs by a word with four times 7 bits. */
INLINE __m256i signs_of_word(uint32_t w) {
  return runs_of_8(signs_of_run[w & 127], signs_of_run[w >> 7 & 127], signs_of_run[w >> 14 & 127],
                   signs_of_run[w >> 21 & 127]);
}

INLINE void codes_iq2_xxs(const void *src, int i, __m256i *v) {
  const m3_block_iq2_xxs *b = src;
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    const uint8_t *q = (const uint8_t *)(b->q + 8 * i + 4 * k);
    __m256i grid = runs_of_8(word64(m3_iq2_xxs_grid[q[0]]), word64(m3_iq2_xxs_grid[q[1]]),
                             word64(m3_iq2_xxs_grid[q[2]]), word64(m3_iq2_xxs_grid[q[3]]));
    split_signed(_mm256_sign_epi8(grid, signs_of_word(word32(q + 4))), v + 2 * k);
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
