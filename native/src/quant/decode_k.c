/* Blocks of 256 with a scale for each group of 16 or 32 elements, to float32. The specification: formulas and order of
 * operations are those of blocks.h. */
#include "quant/blocks.h"
#include "quant/codebooks.h"
#include "quant/decode.h"
#include "quant/half.h"
#include "quant/scales.h"

void m3_decode_q2_k(const void *src, float *dst, int64_t n) {
  const m3_block_q2_k *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d), dmin = m3_f16_to_f32(b->dmin);
    for (int g = 0; g < 16; g++) {
      float scale = d * (float)(b->scales[g] & 15), min = dmin * (float)(b->scales[g] >> 4);
      const uint8_t *q = b->q + 32 * (g / 8) + 16 * (g % 2);
      int shift = 2 * (g / 2 % 4);
      for (int j = 0; j < 16; j++) dst[16 * g + j] = scale * (float)(q[j] >> shift & 3) - min;
    }
  }
}

void m3_decode_q3_k(const void *src, float *dst, int64_t n) {
  const m3_block_q3_k *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 16; g++) {
      float scale = d * (float)m3_q3_k_scale(b, g);
      const uint8_t *q = b->q + 32 * (g / 8) + 16 * (g % 2), *hmask = b->hmask + 16 * (g % 2);
      int shift = 2 * (g / 2 % 4), bit = g / 2;
      for (int j = 0; j < 16; j++)
        dst[16 * g + j] = scale * (float)((q[j] >> shift & 3) - 4 + (hmask[j] >> bit & 1) * 4);
    }
  }
}

void m3_decode_q4_k(const void *src, float *dst, int64_t n) {
  const m3_block_q4_k *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d), dmin = m3_f16_to_f32(b->dmin);
    for (int g = 0; g < 8; g++) {
      float scale = d * (float)m3_k_scale(b->scales, g), min = dmin * (float)m3_k_min(b->scales, g);
      const uint8_t *q = b->q + 32 * (g / 2);
      int shift = 4 * (g % 2);
      for (int j = 0; j < 32; j++) dst[32 * g + j] = scale * (float)(q[j] >> shift & 15) - min;
    }
  }
}

void m3_decode_q5_k(const void *src, float *dst, int64_t n) {
  const m3_block_q5_k *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d), dmin = m3_f16_to_f32(b->dmin);
    for (int g = 0; g < 8; g++) {
      float scale = d * (float)m3_k_scale(b->scales, g), min = dmin * (float)m3_k_min(b->scales, g);
      const uint8_t *q = b->q + 32 * (g / 2);
      int shift = 4 * (g % 2);
      for (int j = 0; j < 32; j++)
        dst[32 * g + j] = scale * (float)((q[j] >> shift & 15) | (b->qh[j] >> g & 1) << 4) - min;
    }
  }
}

void m3_decode_q6_k(const void *src, float *dst, int64_t n) {
  const m3_block_q6_k *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 16; g++) {
      float scale = d * (float)b->scales[g];
      const uint8_t *ql = b->ql + 64 * (g / 8) + 16 * (g % 4), *qh = b->qh + 32 * (g / 8) + 16 * (g % 2);
      int low = 4 * (g / 4 % 2), high = 2 * (g / 2 % 4);
      for (int j = 0; j < 16; j++)
        dst[16 * g + j] = scale * (float)(((ql[j] >> low & 15) | (qh[j] >> high & 3) << 4) - 32);
    }
  }
}

void m3_decode_iq4_xs(const void *src, float *dst, int64_t n) {
  const m3_block_iq4_xs *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 8; g++) {
      float scale = d * (float)m3_iq4_xs_scale(b, g);
      const uint8_t *q = b->q + 16 * g;
      for (int j = 0; j < 16; j++) {
        dst[32 * g + j] = scale * (float)m3_iq4_values[q[j] & 15];
        dst[32 * g + 16 + j] = scale * (float)m3_iq4_values[q[j] >> 4];
      }
    }
  }
}
