/* Quantized rows to float32 with AVX2. The operations on floats are those of the scalar decoders in the same order, so
 * the bits are theirs; only the unpacking of codes differs. */
#if defined(__x86_64__)
#include "cpu/decode_avx2.h"

#include <immintrin.h>
#include <string.h>

#include "quant/blocks.h"
#include "quant/codebooks.h"
#include "quant/half.h"
#include "quant/scales.h"

static inline __m128i load16(const void *p) { return _mm_loadu_si128(p); }
static inline __m128i low4(__m128i q) { return _mm_and_si128(q, _mm_set1_epi8(15)); }
static inline __m128i high4(__m128i q) { return low4(_mm_srli_epi16(q, 4)); }

/* Bits shift to shift + bits - 1 of each byte. */
static inline __m128i field(__m128i q, int shift, int bits) {
  return _mm_and_si128(_mm_srl_epi16(q, _mm_cvtsi32_si128(shift)), _mm_set1_epi8((char)((1 << bits) - 1)));
}

/* The first and the last 8 of 16 signed bytes as floats. */
static inline __m256 first8(__m128i q) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)); }
static inline __m256 last8(__m128i q) { return first8(_mm_unpackhi_epi64(q, q)); }

/* dst[0..15] = scale * q. */
static inline void scaled(float *dst, __m128i q, __m256 scale) {
  _mm256_storeu_ps(dst, _mm256_mul_ps(scale, first8(q)));
  _mm256_storeu_ps(dst + 8, _mm256_mul_ps(scale, last8(q)));
}

/* dst[0..15] = scale * q + offset; a subtraction of the scalar code is an addition of the negative, to the bit. */
static inline void shifted(float *dst, __m128i q, __m256 scale, __m256 offset) {
  _mm256_storeu_ps(dst, _mm256_add_ps(_mm256_mul_ps(scale, first8(q)), offset));
  _mm256_storeu_ps(dst + 8, _mm256_add_ps(_mm256_mul_ps(scale, last8(q)), offset));
}

static inline __m256 half8(uint16_t h) { return _mm256_set1_ps(m3_f16_to_f32(h)); }

/* ------------------------------------------------------------------------------------- blocks of 32 elements */

/* 16 where bit j of the two bytes is set, else 0, for j = 0..15. */
static inline __m128i fifth(const uint8_t *qh) {
  const __m128i bit = _mm_set1_epi64x((int64_t)0x8040201008040201u);
  __m128i bytes = _mm_unpacklo_epi64(_mm_set1_epi8((char)qh[0]), _mm_set1_epi8((char)qh[1]));
  return _mm_and_si128(_mm_cmpeq_epi8(_mm_and_si128(bytes, bit), bit), _mm_set1_epi8(16));
}

void m3_avx2_q4_0(const void *src, float *dst, int64_t n) {
  const m3_block_q4_0 *b = src;
  const __m128i zero = _mm_set1_epi8(8);
  for (; n > 0; n -= M3_BLOCK, dst += M3_BLOCK, b++) {
    __m128i q = load16(b->q);
    __m256 d = half8(b->d);
    scaled(dst, _mm_sub_epi8(low4(q), zero), d);
    scaled(dst + 16, _mm_sub_epi8(high4(q), zero), d);
  }
}

void m3_avx2_q4_1(const void *src, float *dst, int64_t n) {
  const m3_block_q4_1 *b = src;
  for (; n > 0; n -= M3_BLOCK, dst += M3_BLOCK, b++) {
    __m128i q = load16(b->q);
    __m256 d = half8(b->d), m = half8(b->m);
    shifted(dst, low4(q), d, m);
    shifted(dst + 16, high4(q), d, m);
  }
}

void m3_avx2_q5_0(const void *src, float *dst, int64_t n) {
  const m3_block_q5_0 *b = src;
  const __m128i zero = _mm_set1_epi8(16);
  for (; n > 0; n -= M3_BLOCK, dst += M3_BLOCK, b++) {
    __m128i q = load16(b->q);
    __m256 d = half8(b->d);
    scaled(dst, _mm_sub_epi8(_mm_or_si128(low4(q), fifth(b->qh)), zero), d);
    scaled(dst + 16, _mm_sub_epi8(_mm_or_si128(high4(q), fifth(b->qh + 2)), zero), d);
  }
}

void m3_avx2_q5_1(const void *src, float *dst, int64_t n) {
  const m3_block_q5_1 *b = src;
  for (; n > 0; n -= M3_BLOCK, dst += M3_BLOCK, b++) {
    __m128i q = load16(b->q);
    __m256 d = half8(b->d), m = half8(b->m);
    shifted(dst, _mm_or_si128(low4(q), fifth(b->qh)), d, m);
    shifted(dst + 16, _mm_or_si128(high4(q), fifth(b->qh + 2)), d, m);
  }
}

void m3_avx2_iq4_nl(const void *src, float *dst, int64_t n) {
  const m3_block_iq4_nl *b = src;
  const __m128i values = load16(m3_iq4_values);
  for (; n > 0; n -= M3_BLOCK, dst += M3_BLOCK, b++) {
    __m128i q = load16(b->q);
    __m256 d = half8(b->d);
    scaled(dst, _mm_shuffle_epi8(values, low4(q)), d);
    scaled(dst + 16, _mm_shuffle_epi8(values, high4(q)), d);
  }
}

void m3_avx2_mxfp4(const void *src, float *dst, int64_t n) {
  const m3_block_mxfp4 *b = src;
  const __m128i values = load16(m3_mxfp4_values);
  for (; n > 0; n -= M3_BLOCK, dst += M3_BLOCK, b++) {
    __m128i q = load16(b->q);
    __m256 d = _mm256_set1_ps(m3_float_of(b->e < 2 ? (uint32_t)0x00200000 << b->e : (uint32_t)(b->e - 1) << 23));
    scaled(dst, _mm_shuffle_epi8(values, low4(q)), d);
    scaled(dst + 16, _mm_shuffle_epi8(values, high4(q)), d);
  }
}

/* ------------------------------------------------------------------------------------ blocks of 256 elements */

void m3_avx2_q2_k(const void *src, float *dst, int64_t n) {
  const m3_block_q2_k *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d), dmin = m3_f16_to_f32(b->dmin);
    for (int g = 0; g < 16; g++) {
      __m128i q = field(load16(b->q + 32 * (g / 8) + 16 * (g % 2)), 2 * (g / 2 % 4), 2);
      float scale = d * (float)(b->scales[g] & 15), min = dmin * (float)(b->scales[g] >> 4);
      shifted(dst + 16 * g, q, _mm256_set1_ps(scale), _mm256_set1_ps(-min));
    }
  }
}

void m3_avx2_q3_k(const void *src, float *dst, int64_t n) {
  const m3_block_q3_k *b = src;
  const __m128i four = _mm_set1_epi8(4);
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 16; g++) {
      __m128i q = field(load16(b->q + 32 * (g / 8) + 16 * (g % 2)), 2 * (g / 2 % 4), 2);
      __m128i high = _mm_slli_epi16(field(load16(b->hmask + 16 * (g % 2)), g / 2, 1), 2);
      float scale = d * (float)m3_q3_k_scale(b, g);
      scaled(dst + 16 * g, _mm_sub_epi8(_mm_or_si128(q, high), four), _mm256_set1_ps(scale));
    }
  }
}

void m3_avx2_q4_k(const void *src, float *dst, int64_t n) {
  const m3_block_q4_k *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d), dmin = m3_f16_to_f32(b->dmin);
    for (int g = 0; g < 8; g++) {
      __m256 scale = _mm256_set1_ps(d * (float)m3_k_scale(b->scales, g));
      __m256 offset = _mm256_set1_ps(-(dmin * (float)m3_k_min(b->scales, g)));
      for (int j = 0; j < 32; j += 16)
        shifted(dst + 32 * g + j, field(load16(b->q + 32 * (g / 2) + j), 4 * (g % 2), 4), scale, offset);
    }
  }
}

void m3_avx2_q5_k(const void *src, float *dst, int64_t n) {
  const m3_block_q5_k *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d), dmin = m3_f16_to_f32(b->dmin);
    for (int g = 0; g < 8; g++) {
      __m256 scale = _mm256_set1_ps(d * (float)m3_k_scale(b->scales, g));
      __m256 offset = _mm256_set1_ps(-(dmin * (float)m3_k_min(b->scales, g)));
      for (int j = 0; j < 32; j += 16) {
        __m128i q = field(load16(b->q + 32 * (g / 2) + j), 4 * (g % 2), 4);
        __m128i high = _mm_slli_epi16(field(load16(b->qh + j), g, 1), 4);
        shifted(dst + 32 * g + j, _mm_or_si128(q, high), scale, offset);
      }
    }
  }
}

void m3_avx2_q6_k(const void *src, float *dst, int64_t n) {
  const m3_block_q6_k *b = src;
  const __m128i zero = _mm_set1_epi8(32);
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 16; g++) {
      __m128i q = field(load16(b->ql + 64 * (g / 8) + 16 * (g % 4)), 4 * (g / 4 % 2), 4);
      __m128i high = field(load16(b->qh + 32 * (g / 8) + 16 * (g % 2)), 2 * (g / 2 % 4), 2);
      q = _mm_sub_epi8(_mm_or_si128(q, _mm_slli_epi16(high, 4)), zero);
      scaled(dst + 16 * g, q, _mm256_set1_ps(d * (float)b->scales[g]));
    }
  }
}

void m3_avx2_iq4_xs(const void *src, float *dst, int64_t n) {
  const m3_block_iq4_xs *b = src;
  const __m128i values = load16(m3_iq4_values);
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 8; g++) {
      __m128i q = load16(b->q + 16 * g);
      __m256 scale = _mm256_set1_ps(d * (float)m3_iq4_xs_scale(b, g));
      scaled(dst + 32 * g, _mm_shuffle_epi8(values, low4(q)), scale);
      scaled(dst + 32 * g + 16, _mm_shuffle_epi8(values, high4(q)), scale);
    }
  }
}

/* ---------------------------------------------------------------------------------------------- codebooks */

/* dst[0..7] = scale * magnitude, its sign turned where the bit is set. */
static inline void signed_run(float *dst, float scale, __m128i grid, unsigned signs) {
  const __m256i to_top = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  __m256i sign = _mm256_sllv_epi32(_mm256_set1_epi32((int)signs), to_top);
  __m256 x = _mm256_mul_ps(_mm256_set1_ps(scale), first8(grid));
  _mm256_storeu_ps(dst, _mm256_xor_ps(x, _mm256_and_ps(_mm256_castsi256_ps(sign), _mm256_set1_ps(-0.0f))));
}

static inline __m128i entry8(const void *grid) { return _mm_loadl_epi64(grid); }

/* Two entries of 4 side by side. */
static inline __m128i entries4(const uint8_t *a, const uint8_t *b) {
  int32_t x, y;
  memcpy(&x, a, 4);
  memcpy(&y, b, 4);
  return _mm_insert_epi32(_mm_cvtsi32_si128(x), y, 1);
}

void m3_avx2_iq2_xxs(const void *src, float *dst, int64_t n) {
  const m3_block_iq2_xxs *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 8; g++) {
      const uint16_t *q = b->q + 4 * g;
      uint32_t w = (uint32_t)q[2] | (uint32_t)q[3] << 16;
      float scale = d * (0.5f + (float)(w >> 28)) * 0.25f;
      for (int r = 0; r < 4; r++)
        signed_run(dst + 32 * g + 8 * r, scale, entry8(m3_iq2_xxs_grid[q[r / 2] >> 8 * (r % 2) & 255]),
                   m3_sign_patterns[w >> 7 * r & 127]);
    }
  }
}

void m3_avx2_iq2_xs(const void *src, float *dst, int64_t n) {
  const m3_block_iq2_xs *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int r = 0; r < 32; r++) {
      float scale = d * (0.5f + (float)m3_nibble(b->scales, r / 2)) * 0.25f;
      signed_run(dst + 8 * r, scale, entry8(m3_iq2_xs_grid[b->q[r] & 511]), m3_sign_patterns[b->q[r] >> 9]);
    }
  }
}

void m3_avx2_iq2_s(const void *src, float *dst, int64_t n) {
  const m3_block_iq2_s *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int r = 0; r < 32; r++) {
      float scale = d * (0.5f + (float)m3_nibble(b->scales, r / 2)) * 0.25f;
      int entry = b->q[r] | (b->qh[r / 4] >> 2 * (r % 4) & 3) << 8;
      signed_run(dst + 8 * r, scale, entry8(m3_iq2_s_grid[entry]), b->signs[r]);
    }
  }
}

void m3_avx2_iq3_xxs(const void *src, float *dst, int64_t n) {
  const m3_block_iq3_xxs *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 8; g++) {
      uint32_t w = m3_word(b->gas + 4 * g);
      float scale = d * (0.5f + (float)(w >> 28)) * 0.5f;
      for (int r = 0; r < 4; r++) {
        const uint8_t *q = b->q + 8 * g + 2 * r;
        signed_run(dst + 32 * g + 8 * r, scale, entries4(m3_iq3_xxs_grid[q[0]], m3_iq3_xxs_grid[q[1]]),
                   m3_sign_patterns[w >> 7 * r & 127]);
      }
    }
  }
}

void m3_avx2_iq3_s(const void *src, float *dst, int64_t n) {
  const m3_block_iq3_s *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int r = 0; r < 32; r++) {
      float scale = d * (float)(1 + 2 * m3_nibble(b->scales, r / 4));
      int high = b->qh[r / 4] >> 2 * (r % 4);
      int first = b->q[2 * r] | (high & 1) << 8, second = b->q[2 * r + 1] | (high >> 1 & 1) << 8;
      signed_run(dst + 8 * r, scale, entries4(m3_iq3_s_grid[first], m3_iq3_s_grid[second]), b->signs[r]);
    }
  }
}

static inline void ternary_run(float *dst, float scale, __m128i grid, float delta) {
  __m256 x = _mm256_add_ps(first8(grid), _mm256_set1_ps(delta));
  _mm256_storeu_ps(dst, _mm256_mul_ps(_mm256_set1_ps(scale), x));
}

void m3_avx2_iq1_s(const void *src, float *dst, int64_t n) {
  const m3_block_iq1_s *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int r = 0; r < 32; r++) {
      uint16_t qh = b->qh[r / 4];
      float scale = d * (float)(2 * (qh >> 12 & 7) + 1), delta = qh & 0x8000 ? -0.125f : 0.125f;
      ternary_run(dst + 8 * r, scale, entry8(m3_iq1_grid[b->q[r] | (qh >> 3 * (r % 4) & 7) << 8]), delta);
    }
  }
}

void m3_avx2_iq1_m(const void *src, float *dst, int64_t n) {
  const m3_block_iq1_m *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(m3_iq1_m_d(b));
    for (int r = 0; r < 32; r++) {
      int h = m3_nibble(b->qh, r);
      float scale = d * (float)m3_iq1_m_scale(b, r / 2), delta = h & 8 ? -0.125f : 0.125f;
      ternary_run(dst + 8 * r, scale, entry8(m3_iq1_grid[b->q[r] | (h & 7) << 8]), delta);
    }
  }
}
#else
typedef int m3_no_avx2_decoders;
#endif
