/* Blocks of 256 whose elements come from a codebook, to float32. The specification: formulas and order of operations
 * are those of blocks.h. */
#include "quant/blocks.h"
#include "quant/codebooks.h"
#include "quant/decode.h"
#include "quant/half.h"
#include "quant/scales.h"

/* A run of n (4 or 8) elements: scale * magnitude, its sign turned where the bit is set. */
static inline void signed_run(float *dst, float scale, const uint8_t *grid, unsigned signs, int n) {
  for (int j = 0; j < n; j++) {
    float x = scale * (float)grid[j];
    dst[j] = m3_float_of(m3_bits_of(x) ^ (uint32_t)(signs >> j & 1) << 31);
  }
}

void m3_decode_iq2_xxs(const void *src, float *dst, int64_t n) {
  const m3_block_iq2_xxs *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 8; g++) {
      const uint16_t *q = b->q + 4 * g;
      uint32_t w = (uint32_t)q[2] | (uint32_t)q[3] << 16;
      float scale = d * (0.5f + (float)(w >> 28)) * 0.25f;
      for (int r = 0; r < 4; r++) {
        int entry = q[r / 2] >> 8 * (r % 2) & 255;
        signed_run(dst + 32 * g + 8 * r, scale, m3_iq2_xxs_grid[entry], m3_sign_patterns[w >> 7 * r & 127], 8);
      }
    }
  }
}

void m3_decode_iq2_xs(const void *src, float *dst, int64_t n) {
  const m3_block_iq2_xs *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int r = 0; r < 32; r++) {
      float scale = d * (0.5f + (float)m3_nibble(b->scales, r / 2)) * 0.25f;
      signed_run(dst + 8 * r, scale, m3_iq2_xs_grid[b->q[r] & 511], m3_sign_patterns[b->q[r] >> 9], 8);
    }
  }
}

void m3_decode_iq2_s(const void *src, float *dst, int64_t n) {
  const m3_block_iq2_s *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int r = 0; r < 32; r++) {
      float scale = d * (0.5f + (float)m3_nibble(b->scales, r / 2)) * 0.25f;
      int entry = b->q[r] | (b->qh[r / 4] >> 2 * (r % 4) & 3) << 8;
      signed_run(dst + 8 * r, scale, m3_iq2_s_grid[entry], b->signs[r], 8);
    }
  }
}

void m3_decode_iq3_xxs(const void *src, float *dst, int64_t n) {
  const m3_block_iq3_xxs *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 8; g++) {
      uint32_t w = m3_word(b->gas + 4 * g);
      float scale = d * (0.5f + (float)(w >> 28)) * 0.5f;
      for (int r = 0; r < 8; r++) {
        unsigned signs = m3_sign_patterns[w >> 7 * (r / 2) & 127] >> 4 * (r % 2);
        signed_run(dst + 32 * g + 4 * r, scale, m3_iq3_xxs_grid[b->q[8 * g + r]], signs, 4);
      }
    }
  }
}

void m3_decode_iq3_s(const void *src, float *dst, int64_t n) {
  const m3_block_iq3_s *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int r = 0; r < 64; r++) {
      float scale = d * (float)(1 + 2 * m3_nibble(b->scales, r / 8));
      int entry = b->q[r] | (b->qh[r / 8] >> r % 8 & 1) << 8;
      signed_run(dst + 4 * r, scale, m3_iq3_s_grid[entry], (unsigned)m3_nibble(b->signs, r), 4);
    }
  }
}

static inline void ternary_run(float *dst, float scale, const int8_t *grid, float delta) {
  for (int j = 0; j < 8; j++) dst[j] = scale * ((float)grid[j] + delta);
}

void m3_decode_iq1_s(const void *src, float *dst, int64_t n) {
  const m3_block_iq1_s *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(b->d);
    for (int r = 0; r < 32; r++) {
      uint16_t qh = b->qh[r / 4];
      float scale = d * (float)(2 * (qh >> 12 & 7) + 1), delta = qh & 0x8000 ? -0.125f : 0.125f;
      int entry = b->q[r] | (qh >> 3 * (r % 4) & 7) << 8;
      ternary_run(dst + 8 * r, scale, m3_iq1_grid[entry], delta);
    }
  }
}

void m3_decode_iq1_m(const void *src, float *dst, int64_t n) {
  const m3_block_iq1_m *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b++) {
    float d = m3_f16_to_f32(m3_iq1_m_d(b));
    for (int r = 0; r < 32; r++) {
      int h = m3_nibble(b->qh, r);
      float scale = d * (float)m3_iq1_m_scale(b, r / 2), delta = h & 8 ? -0.125f : 0.125f;
      ternary_run(dst + 8 * r, scale, m3_iq1_grid[b->q[r] | (h & 7) << 8], delta);
    }
  }
}
