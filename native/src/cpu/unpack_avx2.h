/* unpack_avx2.h - the integers of every block type with AVX2, 256 elements of a row at a time: a superblock, or 8
 * blocks of 32. For each type codes_T(src, i, v)    elements 64 i to 64 i + 63 plus zero_T as 16-bit lanes: v[0] the
 * even ones of the first 32, v[1] the odd ones, v[2] and v[3] likewise of the second 32 scales_T(src, s, m)   scales of
 * the 8 or 16 groups, and minima where the type has them as codes.h defines them, to the bit. i is constant where they
 * are inlined. zero_T makes lanes of types without signs positive, which is cheaper; whoever uses them takes it away
 * again. */
#ifndef M3_SRC_CPU_UNPACK_AVX2_H
#define M3_SRC_CPU_UNPACK_AVX2_H

#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "quant/blocks.h"
#include "quant/codebooks.h"
#include "quant/scales.h"

#define INLINE static inline __attribute__((always_inline))

/* ------------------------------------------------------------------------------------------------ bytes and lanes */

INLINE __m128i load16(const void *p) { return _mm_loadu_si128(p); }
INLINE __m256i load32(const void *p) { return _mm256_loadu_si256(p); }
INLINE __m256i twice(__m128i a) { return _mm256_broadcastsi128_si256(a); }
INLINE __m256i bytes_of(int b) { return _mm256_set1_epi8((char)b); }

/* `bits` bits from bit `shift` on of each byte. */
INLINE __m256i field(__m256i a, int shift, int bits) {
  return _mm256_and_si256(_mm256_srli_epi16(a, shift), bytes_of((1 << bits) - 1));
}

/* The same, moved to bit `to` of each byte. */
INLINE __m256i moved_field(__m256i a, int shift, int bits, int to) {
  a = to < shift ? _mm256_srli_epi16(a, shift - to) : _mm256_slli_epi16(a, to - shift);
  return _mm256_and_si256(a, bytes_of(((1 << bits) - 1) << to));
}

/* Those of the even and the odd bytes, as 16-bit lanes. */
INLINE void split_field(__m256i a, int shift, int bits, __m256i v[2]) {
  const __m256i mask = _mm256_set1_epi16((int16_t)((1 << bits) - 1));
  v[0] = _mm256_and_si256(_mm256_srli_epi16(a, shift), mask);
  v[1] = _mm256_srli_epi16(a, 8 + shift);
  if (shift + bits < 8) v[1] = _mm256_and_si256(v[1], mask);
}

INLINE void split_unsigned(__m256i a, __m256i v[2]) {
  v[0] = _mm256_and_si256(a, _mm256_set1_epi16(255));
  v[1] = _mm256_srli_epi16(a, 8);
}

INLINE void split_signed(__m256i a, __m256i v[2]) {
  v[0] = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8);
  v[1] = _mm256_srai_epi16(a, 8);
}

/* The low halves of 16 bytes, then the high ones. */
INLINE __m256i nibbles(const uint8_t *p) {
  __m128i q = load16(p);
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(q, 4), q), bytes_of(15));
}

/* Byte j is 0xff where bit j of `bits` is set. */
INLINE __m256i spread(uint32_t bits) {
  const __m256i from =
      _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201u);
  __m256i all = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), from);
  return _mm256_cmpeq_epi8(_mm256_and_si256(all, bit), bit);
}

/* ------------------------------------------------------------------------------------------------ scales */

INLINE __m256 half8(uint16_t h) { return _mm256_set1_ps(_cvtsh_ss(h)); }

/* s[0..7] = d * the number in each lane. */
INLINE void scaled8(float *s, __m256 d, __m256i i) { _mm256_storeu_ps(s, _mm256_mul_ps(d, _mm256_cvtepi32_ps(i))); }

/* d * 16 signed bytes. */
INLINE void scaled16(float *s, __m256 d, __m128i i) {
  scaled8(s, d, _mm256_cvtepi8_epi32(i));
  scaled8(s + 8, d, _mm256_cvtepi8_epi32(_mm_srli_si128(i, 8)));
}

/* s[0..7] = d * (0.5 + i) * factor. */
INLINE void between8(float *s, __m256 d, __m256i i, float factor) {
  __m256 x = _mm256_mul_ps(d, _mm256_add_ps(_mm256_set1_ps(0.5f), _mm256_cvtepi32_ps(i)));
  _mm256_storeu_ps(s, _mm256_mul_ps(x, _mm256_set1_ps(factor)));
}

/* The float16 at the head of 8 blocks. */
INLINE __m256 halves(const void *src, size_t block, size_t offset) {
  const char *p = (const char *)src + offset;
  uint16_t h[8];
  for (size_t i = 0; i < 8; i++) memcpy(&h[i], p + i * block, 2);
  return _mm256_cvtph_ps(_mm_setr_epi16((int16_t)h[0], (int16_t)h[1], (int16_t)h[2], (int16_t)h[3], (int16_t)h[4],
                                        (int16_t)h[5], (int16_t)h[6], (int16_t)h[7]));
}

/* The 8 half bytes of a 32-bit number, and the like with other widths. */
INLINE __m256i fields8(uint32_t word, int bits) {
  const __m256i shift = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(bits));
  return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int)word), shift), _mm256_set1_epi32((1 << bits) - 1));
}

INLINE uint64_t word64(const void *p) {
  uint64_t w;
  memcpy(&w, p, 8);
  return w;
}

INLINE uint16_t word16(const void *p) {
  uint16_t w;
  memcpy(&w, p, 2);
  return w;
}

INLINE uint32_t word32(const void *p) {
  uint32_t w;
  memcpy(&w, p, 4);
  return w;
}

/* The 16 half bytes of 8 bytes, as bytes. */
INLINE __m128i nibbles16(const uint8_t *p) {
  __m128i q = _mm_cvtsi64_si128((int64_t)word64(p)), mask = _mm_set1_epi8(15);
  return _mm_unpacklo_epi8(_mm_and_si128(q, mask), _mm_and_si128(_mm_srli_epi16(q, 4), mask));
}

/* ------------------------------------------------------------------------------------------------ blocks of 32 */

#define CODES_32(type, split)                                               \
  INLINE void codes_##type(const void *src, int i, __m256i *v) {            \
    const m3_block_##type *b = (const m3_block_##type *)src + 2 * i;        \
    _Pragma("GCC unroll 2") for (int k = 0; k < 2; k++, b++, v += 2) split; \
  }

#define SCALES_32(type)                                            \
  INLINE void scales_##type(const void *src, float *s, float *m) { \
    (void)m;                                                       \
    _mm256_storeu_ps(s, halves(src, sizeof(m3_block_##type), 0));  \
  }

#define SCALES_AND_MINIMA_32(type)                                                                      \
  INLINE void scales_##type(const void *src, float *s, float *m) {                                      \
    _mm256_storeu_ps(s, halves(src, sizeof(m3_block_##type), 0));                                       \
    _mm256_storeu_ps(m, _mm256_xor_ps(halves(src, sizeof(m3_block_##type), 2), _mm256_set1_ps(-0.0f))); \
  }

INLINE __m256i fives(const uint8_t *q, const uint8_t *qh) {
  return _mm256_or_si256(nibbles(q), _mm256_and_si256(spread(word32(qh)), bytes_of(16)));
}

enum { zero_q4_0 = 8, zero_q4_1 = 0, zero_q5_0 = 16, zero_q5_1 = 0, zero_q8_0 = 0, zero_iq4_nl = 0, zero_mxfp4 = 0 };

CODES_32(q4_0, split_unsigned(nibbles(b->q), v))
CODES_32(q4_1, split_unsigned(nibbles(b->q), v))
CODES_32(q5_0, split_unsigned(fives(b->q, b->qh), v))
CODES_32(q5_1, split_unsigned(fives(b->q, b->qh), v))
CODES_32(q8_0, split_signed(load32(b->q), v))
CODES_32(iq4_nl, split_signed(_mm256_shuffle_epi8(twice(load16(m3_iq4_values)), nibbles(b->q)), v))
CODES_32(mxfp4, split_signed(_mm256_shuffle_epi8(twice(load16(m3_mxfp4_values)), nibbles(b->q)), v))
SCALES_32(q4_0)
SCALES_AND_MINIMA_32(q4_1)
SCALES_32(q5_0)
SCALES_AND_MINIMA_32(q5_1)
SCALES_32(q8_0)
SCALES_32(iq4_nl)

INLINE void scales_mxfp4(const void *src, float *s, float *m) {
  const m3_block_mxfp4 *b = src;
  (void)m;
  __m256i e = _mm256_setr_epi32(b[0].e, b[1].e, b[2].e, b[3].e, b[4].e, b[5].e, b[6].e, b[7].e);
  __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  __m256i subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
  __m256i is_normal = _mm256_cmpgt_epi32(e, _mm256_set1_epi32(1));
  _mm256_storeu_ps(s, _mm256_castsi256_ps(_mm256_blendv_epi8(subnormal, normal, is_normal)));
}

/* ------------------------------------------------------------------------------------------------ blocks of 256 */

enum { zero_q2_k = 0, zero_q3_k = 4, zero_q4_k = 0, zero_q5_k = 0, zero_q6_k = 32, zero_iq4_xs = 0 };

INLINE void codes_q2_k(const void *src, int i, __m256i *v) {
  const m3_block_q2_k *b = src;
  __m256i q = load32(b->q + 32 * (i / 2));
  split_field(q, 4 * (i % 2), 2, v);
  split_field(q, 4 * (i % 2) + 2, 2, v + 2);
}

INLINE void scales_q2_k(const void *src, float *s, float *m) {
  const m3_block_q2_k *b = src;
  __m128i packed = load16(b->scales), mask = _mm_set1_epi8(15);
  scaled16(s, half8(b->d), _mm_and_si128(packed, mask));
  scaled16(m, half8(b->dmin), _mm_and_si128(_mm_srli_epi16(packed, 4), mask));
}

INLINE void codes_q3_k(const void *src, int i, __m256i *v) {
  const m3_block_q3_k *b = src;
  __m256i q = load32(b->q + 32 * (i / 2)), high = load32(b->hmask);
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++, v += 2) {
    split_unsigned(_mm256_or_si256(field(q, 4 * (i % 2) + 2 * k, 2), moved_field(high, 2 * i + k, 1, 2)), v);
  }
}

INLINE void scales_q3_k(const void *src, float *s, float *m) {
  const m3_block_q3_k *b = src;
  (void)m;
  uint32_t low[2] = {word32(b->scales), word32(b->scales + 4)}, high = word32(b->scales + 8);
  uint32_t w[4];
  for (int k = 0; k < 4; k++) w[k] = (low[k % 2] >> 4 * (k / 2) & 0x0f0f0f0f) | (high >> 2 * k & 0x03030303) << 4;
  __m128i i = _mm_setr_epi32((int)w[0], (int)w[1], (int)w[2], (int)w[3]);
  scaled16(s, half8(b->d), _mm_sub_epi8(i, _mm_set1_epi8(32)));
}

INLINE void codes_q4_k(const void *src, int i, __m256i *v) {
  const m3_block_q4_k *b = src;
  __m256i q = load32(b->q + 32 * i);
  split_field(q, 0, 4, v);
  split_field(q, 4, 4, v + 2);
}

/* Of Q4_K and Q5_K. */
INLINE void six_bits(uint16_t d, uint16_t dmin, const uint8_t *packed, float *s, float *m) {
  uint64_t a = word32(packed), b = word32(packed + 4), c = word32(packed + 8);
  uint64_t scales = (a & 0x3f3f3f3f) | ((c & 0x0f0f0f0f) | (a >> 6 & 0x03030303) << 4) << 32;
  uint64_t minima = (b & 0x3f3f3f3f) | ((c >> 4 & 0x0f0f0f0f) | (b >> 6 & 0x03030303) << 4) << 32;
  scaled8(s, half8(d), _mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)scales)));
  scaled8(m, half8(dmin), _mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)minima)));
}

INLINE void scales_q4_k(const void *src, float *s, float *m) {
  const m3_block_q4_k *b = src;
  six_bits(b->d, b->dmin, b->scales, s, m);
}

INLINE void codes_q5_k(const void *src, int i, __m256i *v) {
  const m3_block_q5_k *b = src;
  __m256i q = load32(b->q + 32 * i), high = load32(b->qh);
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++)
    split_unsigned(_mm256_or_si256(field(q, 4 * k, 4), moved_field(high, 2 * i + k, 1, 4)), v + 2 * k);
}

INLINE void scales_q5_k(const void *src, float *s, float *m) {
  const m3_block_q5_k *b = src;
  six_bits(b->d, b->dmin, b->scales, s, m);
}

INLINE void codes_q6_k(const void *src, int i, __m256i *v) {
  const m3_block_q6_k *b = src;
  __m256i high = load32(b->qh + 32 * (i / 2));
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    __m256i low = field(load32(b->ql + 64 * (i / 2) + 32 * k), 4 * (i % 2), 4);
    split_unsigned(_mm256_or_si256(low, moved_field(high, 4 * (i % 2) + 2 * k, 2, 4)), v + 2 * k);
  }
}

INLINE void scales_q6_k(const void *src, float *s, float *m) {
  const m3_block_q6_k *b = src;
  (void)m;
  scaled16(s, half8(b->d), load16(b->scales));
}

INLINE void codes_iq4_xs(const void *src, int i, __m256i *v) {
  const m3_block_iq4_xs *b = src;
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++)
    split_signed(_mm256_shuffle_epi8(twice(load16(m3_iq4_values)), nibbles(b->q + 32 * i + 16 * k)), v + 2 * k);
}

INLINE void scales_iq4_xs(const void *src, float *s, float *m) {
  const m3_block_iq4_xs *b = src;
  (void)m;
  __m256i high = _mm256_slli_epi32(fields8(b->scales_h, 2), 4);
  __m256i i = _mm256_or_si256(fields8(word32(b->scales_l), 4), high);
  scaled8(s, half8(b->d), _mm256_sub_epi32(i, _mm256_set1_epi32(32)));
}

#undef CODES_32
#undef SCALES_32
#undef SCALES_AND_MINIMA_32

#endif
