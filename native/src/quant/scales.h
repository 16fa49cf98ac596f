/* scales.h - the packed integer scales of groups in blocks of 256, as blocks.h describes them. */
#ifndef M3_SRC_QUANT_SCALES_H
#define M3_SRC_QUANT_SCALES_H

#include "quant/blocks.h"
#include "quant/half.h"

/* The i-th half byte, low ones first. */
M3_BLOCK_FUNCTION int m3_nibble(const uint8_t *bytes, int i) { return bytes[i / 2] >> 4 * (i % 2) & 15; }

/* The 32-bit number at any address. */
M3_BLOCK_FUNCTION uint32_t m3_word(const uint8_t *b) {
  return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

/* 2^(e - 128): the exponent field of a normal number, or the one mantissa bit of a subnormal one. */
static inline float m3_mxfp4_scale(const m3_block_mxfp4 *b) {
  return m3_float_of(b->e < 2 ? (uint32_t)0x00200000 << b->e : (uint32_t)(b->e - 1) << 23);
}

/* -32 to 31, g = 0..15. */
M3_BLOCK_FUNCTION int m3_q3_k_scale(const m3_block_q3_k *b, int g) {
  return ((b->scales[g % 8] >> 4 * (g / 8) & 15) | (b->scales[8 + g % 4] >> 2 * (g / 4) & 3) << 4) - 32;
}

/* Of Q4_K and Q5_K: 0 to 63, g = 0..7. */
M3_BLOCK_FUNCTION int m3_k_scale(const uint8_t *scales, int g) {
  return g < 4 ? scales[g] & 63 : (scales[4 + g] & 15) | (scales[g - 4] >> 6) << 4;
}

M3_BLOCK_FUNCTION int m3_k_min(const uint8_t *scales, int g) {
  return g < 4 ? scales[4 + g] & 63 : (scales[4 + g] >> 4) | (scales[g] >> 6) << 4;
}

/* -32 to 31, g = 0..7. */
M3_BLOCK_FUNCTION int m3_iq4_xs_scale(const m3_block_iq4_xs *b, int g) {
  return (m3_nibble(b->scales_l, g) | (b->scales_h >> 2 * g & 3) << 4) - 32;
}

/* The float16 that IQ1_M keeps in the high bits of its scales. */
M3_BLOCK_FUNCTION uint16_t m3_iq1_m_d(const m3_block_iq1_m *b) {
  const uint16_t *s = b->scales;
  return (uint16_t)(s[0] >> 12 | (s[1] >> 12) << 4 | (s[2] >> 12) << 8 | (s[3] >> 12) << 12);
}

/* Odd, 1 to 15, g = 0..15. */
M3_BLOCK_FUNCTION int m3_iq1_m_scale(const m3_block_iq1_m *b, int g) {
  return 2 * (b->scales[g / 4] >> 3 * (g % 4) & 7) + 1;
}

#endif
