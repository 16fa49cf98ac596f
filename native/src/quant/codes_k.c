/* Blocks of 256 with a scale for each group of 16 or 32 elements, as integers. The specification: formulas and order of
 * operations are those of blocks.h. */
#include "quant/blocks.h"
#include "quant/codebooks.h"
#include "quant/codes.h"
#include "quant/half.h"
#include "quant/scales.h"

#define EACH_BLOCK(type, groups) \
  for (const type *b = src; n > 0; n -= M3_SUPERBLOCK, q += M3_SUPERBLOCK, scale += (groups), min += (groups), b++)

/* Two bits of 16 elements of Q2_K and Q3_K. */
static inline void two_bits(const uint8_t *bytes, int g, int8_t *q) {
  const uint8_t *from = bytes + 32 * (g / 8) + 16 * (g % 2);
  for (int j = 0; j < 16; j++) q[j] = (int8_t)(from[j] >> 2 * (g / 2 % 4) & 3);
}

static void q2_k(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_q2_k, 16) {
    float d = m3_f16_to_f32(b->d), dmin = m3_f16_to_f32(b->dmin);
    for (int g = 0; g < 16; g++) {
      two_bits(b->q, g, q + 16 * g);
      scale[g] = d * (float)(b->scales[g] & 15);
      min[g] = dmin * (float)(b->scales[g] >> 4);
    }
  }
}

static void q3_k(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_q3_k, 16) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 16; g++) {
      int8_t *to = q + 16 * g;
      two_bits(b->q, g, to);
      for (int j = 0; j < 16; j++) to[j] = (int8_t)(to[j] - 4 + (b->hmask[16 * (g % 2) + j] >> g / 2 & 1) * 4);
      scale[g] = d * (float)m3_q3_k_scale(b, g);
    }
  }
}

/* Four bits of a group of 32 of Q4_K and Q5_K, the scales and the minima. */
static inline void four_bits(const uint8_t *bytes, int g, int8_t *q) {
  for (int j = 0; j < 32; j++) q[j] = (int8_t)(bytes[32 * (g / 2) + j] >> 4 * (g % 2) & 15);
}

static inline void scales_and_minima(uint16_t d, uint16_t dmin, const uint8_t *packed, float *scale, float *min) {
  for (int g = 0; g < 8; g++) {
    scale[g] = m3_f16_to_f32(d) * (float)m3_k_scale(packed, g);
    min[g] = m3_f16_to_f32(dmin) * (float)m3_k_min(packed, g);
  }
}

static void q4_k(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_q4_k, 8) {
    for (int g = 0; g < 8; g++) four_bits(b->q, g, q + 32 * g);
    scales_and_minima(b->d, b->dmin, b->scales, scale, min);
  }
}

static void q5_k(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_q5_k, 8) {
    for (int g = 0; g < 8; g++) {
      four_bits(b->q, g, q + 32 * g);
      for (int j = 0; j < 32; j++) q[32 * g + j] = (int8_t)(q[32 * g + j] | (b->qh[j] >> g & 1) << 4);
    }
    scales_and_minima(b->d, b->dmin, b->scales, scale, min);
  }
}

static void q6_k(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_q6_k, 16) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 16; g++) {
      const uint8_t *ql = b->ql + 64 * (g / 8) + 16 * (g % 4), *qh = b->qh + 32 * (g / 8) + 16 * (g % 2);
      int low = 4 * (g / 4 % 2), high = 2 * (g / 2 % 4);
      for (int j = 0; j < 16; j++) q[16 * g + j] = (int8_t)(((ql[j] >> low & 15) | (qh[j] >> high & 3) << 4) - 32);
      scale[g] = d * (float)b->scales[g];
    }
  }
}

static void iq4_xs(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_iq4_xs, 8) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 8; g++) {
      for (int j = 0; j < 16; j++) {
        q[32 * g + j] = m3_iq4_values[b->q[16 * g + j] & 15];
        q[32 * g + 16 + j] = m3_iq4_values[b->q[16 * g + j] >> 4];
      }
      scale[g] = d * (float)m3_iq4_xs_scale(b, g);
    }
  }
}

const m3_coding m3_codes_q2_k = {16, true, sizeof(m3_block_q2_k), q2_k};
const m3_coding m3_codes_q3_k = {16, false, sizeof(m3_block_q3_k), q3_k};
const m3_coding m3_codes_q4_k = {32, true, sizeof(m3_block_q4_k), q4_k};
const m3_coding m3_codes_q5_k = {32, true, sizeof(m3_block_q5_k), q5_k};
const m3_coding m3_codes_q6_k = {16, false, sizeof(m3_block_q6_k), q6_k};
const m3_coding m3_codes_iq4_xs = {32, false, sizeof(m3_block_iq4_xs), iq4_xs};
