/* panels_avx2.h - scales and minima of eight rows at a time, a row in each lane: panel_T(rows, s, m) for the types T
 * where that is cheaper than scales_T of each row; the same numbers, to the bit. */
#ifndef M3_SRC_CPU_PANELS_AVX2_H
#define M3_SRC_CPU_PANELS_AVX2_H

#include "cpu/unpack_avx2.h"

typedef void panel_scales(const char *const *rows, __m256 *s, __m256 *m);

/* The float16 at an offset of eight rows. */
INLINE __m256 halves_of_rows(const char *const *rows, size_t offset) {
  __m128i h = _mm_setzero_si128();
#define PUT(j) h = _mm_insert_epi16(h, (int16_t)word16(rows[j] + offset), j)
  PUT(0), PUT(1), PUT(2), PUT(3), PUT(4), PUT(5), PUT(6), PUT(7);
#undef PUT
  return _mm256_cvtph_ps(h);
}

/* 16 bytes at an offset of eight rows as four vectors of 32-bit words, a row in each lane. */
INLINE void words_of_rows(const char *const *rows, size_t offset, __m256i *w) {
  __m256i a[4], b[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++)
    a[j] = _mm256_inserti128_si256(_mm256_castsi128_si256(load16(rows[j] + offset)), load16(rows[j + 4] + offset), 1);
#pragma GCC unroll 2
  for (int j = 0; j < 4; j += 2) {
    b[j] = _mm256_unpacklo_epi32(a[j], a[j + 1]);
    b[j + 1] = _mm256_unpackhi_epi32(a[j], a[j + 1]);
  }
  w[0] = _mm256_unpacklo_epi64(b[0], b[2]);
  w[1] = _mm256_unpackhi_epi64(b[0], b[2]);
  w[2] = _mm256_unpacklo_epi64(b[1], b[3]);
  w[3] = _mm256_unpackhi_epi64(b[1], b[3]);
}

/* The float16 in the low half of each word. */
INLINE __m256 low_halves(__m256i w) {
  w = _mm256_and_si256(w, _mm256_set1_epi32(0xffff));
  return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}

/* s[0..3] = d * each of the four bytes of a word. */
INLINE void scaled_bytes(__m256 *s, __m256 d, __m256i w) {
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    __m256i i = _mm256_srli_epi32(w, 8 * g);
    if (g < 3) i = _mm256_and_si256(i, _mm256_set1_epi32(255));
    s[g] = _mm256_mul_ps(d, _mm256_cvtepi32_ps(i));
  }
}

/* The same of signed bytes, less `zero`. */
INLINE void scaled_signed_bytes(__m256 *s, __m256 d, __m256i w, int zero) {
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    __m256i i = _mm256_srai_epi32(_mm256_slli_epi32(w, 24 - 8 * g), 24);
    s[g] = _mm256_mul_ps(d, _mm256_cvtepi32_ps(zero ? _mm256_sub_epi32(i, _mm256_set1_epi32(zero)) : i));
  }
}

/* ------------------------------------------------------------------------------------------------ blocks of 32 */

#define PANEL_32(type, minima)                                              \
  INLINE void panel_##type(const char *const *rows, __m256 *s, __m256 *m) { \
    for (size_t g = 0; g < 8; g++) {                                        \
      s[g] = halves_of_rows(rows, g * sizeof(m3_block_##type));             \
      if (!(minima)) continue;                                              \
      __m256 min = halves_of_rows(rows, g * sizeof(m3_block_##type) + 2);   \
      m[g] = _mm256_xor_ps(min, _mm256_set1_ps(-0.0f));                     \
    }                                                                       \
  }

PANEL_32(q4_0, false)
PANEL_32(q4_1, true)
PANEL_32(q5_0, false)
PANEL_32(q5_1, true)
PANEL_32(q8_0, false)
PANEL_32(iq4_nl, false)

#undef PANEL_32

/* ------------------------------------------------------------------------------------------------ blocks of 256 */

INLINE void panel_q2_k(const char *const *rows, __m256 *s, __m256 *m) {
  __m256i w[4];
  words_of_rows(rows, offsetof(m3_block_q2_k, scales), w);
  __m256 d = halves_of_rows(rows, offsetof(m3_block_q2_k, d));
  __m256 dmin = halves_of_rows(rows, offsetof(m3_block_q2_k, dmin));
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {
    scaled_bytes(s + 4 * k, d, field(w[k], 0, 4));
    scaled_bytes(m + 4 * k, dmin, field(w[k], 4, 4));
  }
}

INLINE void panel_q3_k(const char *const *rows, __m256 *s, __m256 *m) {
  __m256i w[4]; /* the last bytes of q, scales and d, which are the last of the block */
  (void)m;
  words_of_rows(rows, sizeof(m3_block_q3_k) - 16, w);
  __m256 d = low_halves(_mm256_srli_epi32(w[3], 16));
#pragma GCC unroll 3
  for (int k = 0; k < 3; k++) w[k] = _mm256_or_si256(_mm256_srli_epi32(w[k], 16), _mm256_slli_epi32(w[k + 1], 16));
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {
    __m256i i = _mm256_or_si256(field(w[k % 2], 4 * (k / 2), 4), moved_field(w[2], 2 * k, 2, 4));
    scaled_signed_bytes(s + 4 * k, d, i, 32);
  }
}

/* Of Q4_K and Q5_K, whose blocks begin with the same 16 bytes. */
INLINE void six_bits_of_rows(const char *const *rows, __m256 *s, __m256 *m) {
  __m256i w[4]; /* d and dmin, then scales[0..3], [4..7], [8..11] */
  words_of_rows(rows, 0, w);
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) { /* scales, minima */
    __m256 d = low_halves(k ? _mm256_srli_epi32(w[0], 16) : w[0]), *to = k ? m : s;
    scaled_bytes(to, d, _mm256_and_si256(w[1 + k], bytes_of(63)));
    scaled_bytes(to + 4, d, _mm256_or_si256(field(w[3], 4 * k, 4), moved_field(w[1 + k], 6, 2, 4)));
  }
}

INLINE void panel_q4_k(const char *const *rows, __m256 *s, __m256 *m) { six_bits_of_rows(rows, s, m); }
INLINE void panel_q5_k(const char *const *rows, __m256 *s, __m256 *m) { six_bits_of_rows(rows, s, m); }

INLINE void panel_q6_k(const char *const *rows, __m256 *s, __m256 *m) {
  __m256i w[4];
  (void)m;
  words_of_rows(rows, offsetof(m3_block_q6_k, scales), w);
  __m256 d = halves_of_rows(rows, offsetof(m3_block_q6_k, d));
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) scaled_signed_bytes(s + 4 * k, d, w[k], 0);
}

INLINE void panel_iq4_xs(const char *const *rows, __m256 *s, __m256 *m) {
  __m256i w[4]; /* d and scales_h, then scales_l */
  (void)m;
  words_of_rows(rows, 0, w);
  __m256 d = low_halves(w[0]);
#pragma GCC unroll 8
  for (int g = 0; g < 8; g++) {
    __m256i low = _mm256_and_si256(_mm256_srli_epi32(w[1], 4 * g), _mm256_set1_epi32(15));
    __m256i high = _mm256_and_si256(_mm256_srli_epi32(w[0], 12 + 2 * g), _mm256_set1_epi32(48));
    __m256i i = _mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32));
    s[g] = _mm256_mul_ps(d, _mm256_cvtepi32_ps(i));
  }
}

#endif
