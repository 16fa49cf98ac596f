/* Quantized rows to float32 with AVX2. The operations on floats are those of the scalar decoders in the same order, so
 * the bits are theirs. */
#if defined(__x86_64__)
#include "cpu/decode_avx2.h"

#include "cpu/unpack_codebooks_avx2.h"

/* dst[0..15] = q * scale - min. */
INLINE void store16(float *dst, __m256i q, float scale, float min, bool minima) {
  const __m128i half[2] = {_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1)};
  for (int k = 0; k < 2; k++) {
    __m256 x = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(half[k])), _mm256_set1_ps(scale));
    _mm256_storeu_ps(dst + 8 * k, minima ? _mm256_sub_ps(x, _mm256_set1_ps(min)) : x);
  }
}

/* 256 elements. The functions and the numbers are constant where this is inlined. */
INLINE void decode256(const void *src, float *dst, int groups, bool minima, int zero,
                      void (*codes)(const void *, int, __m256i *), void (*scales)(const void *, float *, float *)) {
  float s[16], m[16];
  scales(src, s, m);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m256i v[4];
    codes(src, i, v);
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
      __m256i offset = _mm256_set1_epi16((int16_t)zero);
      __m256i even = _mm256_sub_epi16(v[2 * k], offset), odd = _mm256_sub_epi16(v[2 * k + 1], offset);
      __m256i a = _mm256_unpacklo_epi16(even, odd), b = _mm256_unpackhi_epi16(even, odd);
      int g = 2 * i + k, first = groups == 8 ? g : 2 * g, second = groups == 8 ? g : 2 * g + 1;
      float *to = dst + 32 * g;
      store16(to, _mm256_permute2x128_si256(a, b, 0x20), s[first], m[first], minima);
      store16(to + 16, _mm256_permute2x128_si256(a, b, 0x31), s[second], m[second], minima);
    }
  }
}

#define DECODER_256(name, groups, minima)                                          \
  void m3_avx2_##name(const void *src, float *dst, int64_t n) {                    \
    const m3_block_##name *b = src;                                                \
    for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++)                   \
      decode256(b, dst, groups, minima, zero_##name, codes_##name, scales_##name); \
  }

/* Blocks of 32: 8 at a time, the last few by way of a copy. */
#define DECODER_32(name, minima)                                                  \
  void m3_avx2_##name(const void *src, float *dst, int64_t n) {                   \
    const m3_block_##name *b = src;                                               \
    for (; n >= M3_SUPERBLOCK; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b += 8)  \
      decode256(b, dst, 8, minima, zero_##name, codes_##name, scales_##name);     \
    if (n <= 0) return;                                                           \
    m3_block_##name rest[8] = {0};                                                \
    float values[M3_SUPERBLOCK];                                                  \
    memcpy(rest, b, (size_t)(n / M3_BLOCK) * sizeof *b);                          \
    decode256(rest, values, 8, minima, zero_##name, codes_##name, scales_##name); \
    memcpy(dst, values, (size_t)n * sizeof *dst);                                 \
  }

DECODER_32(q4_0, false)
DECODER_32(q4_1, true)
DECODER_32(q5_0, false)
DECODER_32(q5_1, true)
DECODER_32(iq4_nl, false)
DECODER_32(mxfp4, false)
DECODER_256(q2_k, 16, true)
DECODER_256(q3_k, 16, false)
DECODER_256(q4_k, 8, true)
DECODER_256(q5_k, 8, true)
DECODER_256(q6_k, 16, false)
DECODER_256(iq4_xs, 8, false)
DECODER_256(iq2_xxs, 8, false)
DECODER_256(iq2_xs, 16, false)
DECODER_256(iq2_s, 16, false)
DECODER_256(iq3_xxs, 8, false)
DECODER_256(iq3_s, 8, false)
DECODER_256(iq1_s, 8, false)
DECODER_256(iq1_m, 16, false)
#else
typedef int m3_no_avx2_decoders;
#endif
