/* Blocks of 32 to float32. The specification: formulas and order of operations are those of blocks.h. */
#include "quant/blocks.h"
#include "quant/codebooks.h"
#include "quant/decode.h"
#include "quant/half.h"
#include "quant/scales.h"

/* The 16 elements of low halves of bytes come first, then those of the high halves. */
static inline int low(uint8_t byte) { return byte & 15; }
static inline int high(uint8_t byte) { return byte >> 4; }

/* Fifth bit of element j. */
static inline int fifth(uint32_t qh, int j) { return (int)(qh >> j & 1) << 4; }

void m3_decode_q4_0(const void *src, float *dst, int64_t n) {
  const m3_block_q4_0 *b = src;
  for (; n > 0; n -= M3_BLOCK, dst += M3_BLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int j = 0; j < 16; j++) {
      dst[j] = d * (float)(low(b->q[j]) - 8);
      dst[j + 16] = d * (float)(high(b->q[j]) - 8);
    }
  }
}

void m3_decode_q4_1(const void *src, float *dst, int64_t n) {
  const m3_block_q4_1 *b = src;
  for (; n > 0; n -= M3_BLOCK, dst += M3_BLOCK, b++) {
    float d = m3_f16_to_f32(b->d), m = m3_f16_to_f32(b->m);
    for (int j = 0; j < 16; j++) {
      dst[j] = d * (float)low(b->q[j]) + m;
      dst[j + 16] = d * (float)high(b->q[j]) + m;
    }
  }
}

void m3_decode_q5_0(const void *src, float *dst, int64_t n) {
  const m3_block_q5_0 *b = src;
  for (; n > 0; n -= M3_BLOCK, dst += M3_BLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    uint32_t qh = m3_word(b->qh);
    for (int j = 0; j < 16; j++) {
      dst[j] = d * (float)((low(b->q[j]) | fifth(qh, j)) - 16);
      dst[j + 16] = d * (float)((high(b->q[j]) | fifth(qh, j + 16)) - 16);
    }
  }
}

void m3_decode_q5_1(const void *src, float *dst, int64_t n) {
  const m3_block_q5_1 *b = src;
  for (; n > 0; n -= M3_BLOCK, dst += M3_BLOCK, b++) {
    float d = m3_f16_to_f32(b->d), m = m3_f16_to_f32(b->m);
    uint32_t qh = m3_word(b->qh);
    for (int j = 0; j < 16; j++) {
      dst[j] = d * (float)(low(b->q[j]) | fifth(qh, j)) + m;
      dst[j + 16] = d * (float)(high(b->q[j]) | fifth(qh, j + 16)) + m;
    }
  }
}

void m3_decode_q8_0(const void *src, float *dst, int64_t n) {
  const m3_block_q8_0 *b = src;
  for (; n > 0; n -= M3_BLOCK, dst += M3_BLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int j = 0; j < M3_BLOCK; j++) dst[j] = (float)b->q[j] * d;
  }
}

void m3_decode_iq4_nl(const void *src, float *dst, int64_t n) {
  const m3_block_iq4_nl *b = src;
  for (; n > 0; n -= M3_BLOCK, dst += M3_BLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int j = 0; j < 16; j++) {
      dst[j] = d * (float)m3_iq4_values[low(b->q[j])];
      dst[j + 16] = d * (float)m3_iq4_values[high(b->q[j])];
    }
  }
}

void m3_decode_mxfp4(const void *src, float *dst, int64_t n) {
  const m3_block_mxfp4 *b = src;
  for (; n > 0; n -= M3_BLOCK, dst += M3_BLOCK, b++) {
    /* 2^(e - 128): the exponent field of a normal number, or the one mantissa bit of a subnormal one. */
    float d = m3_float_of(b->e < 2 ? (uint32_t)0x00200000 << b->e : (uint32_t)(b->e - 1) << 23);
    for (int j = 0; j < 16; j++) {
      dst[j] = d * (float)m3_mxfp4_values[low(b->q[j])];
      dst[j + 16] = d * (float)m3_mxfp4_values[high(b->q[j])];
    }
  }
}
