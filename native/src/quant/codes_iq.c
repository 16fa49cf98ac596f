/* Blocks of 256 whose elements come from a codebook, as integers. The specification: formulas and order of operations
 * are those of blocks.h. */
#include "quant/blocks.h"
#include "quant/codebooks.h"
#include "quant/codes.h"
#include "quant/half.h"
#include "quant/scales.h"

#define EACH_BLOCK(type, groups) \
  for (const type *b = src; n > 0; n -= M3_SUPERBLOCK, q += M3_SUPERBLOCK, scale += (groups), min += (groups), b++)

/* A run of n (4 or 8) magnitudes, negative where the bit is set. */
static inline void signed_run(int8_t *q, const uint8_t *grid, unsigned signs, int n) {
  for (int j = 0; j < n; j++) q[j] = (int8_t)(signs >> j & 1 ? -grid[j] : grid[j]);
}

static void iq2_xxs(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_iq2_xxs, 8) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 8; g++) {
      const uint16_t *from = b->q + 4 * g;
      uint32_t w = (uint32_t)from[2] | (uint32_t)from[3] << 16;
      scale[g] = d * (0.5f + (float)(w >> 28)) * 0.25f;
      for (int r = 0; r < 4; r++)
        signed_run(q + 32 * g + 8 * r, m3_iq2_xxs_grid[from[r / 2] >> 8 * (r % 2) & 255],
                   m3_sign_patterns[w >> 7 * r & 127], 8);
    }
  }
}

/* Of IQ2_XS and IQ2_S. */
static inline void scales_of_16(uint16_t d, const uint8_t *packed, float *scale) {
  for (int g = 0; g < 16; g++) scale[g] = m3_f16_to_f32(d) * (0.5f + (float)m3_nibble(packed, g)) * 0.25f;
}

static void iq2_xs(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_iq2_xs, 16) {
    scales_of_16(b->d, b->scales, scale);
    for (int r = 0; r < 32; r++)
      signed_run(q + 8 * r, m3_iq2_xs_grid[b->q[r] & 511], m3_sign_patterns[b->q[r] >> 9], 8);
  }
}

static void iq2_s(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_iq2_s, 16) {
    scales_of_16(b->d, b->scales, scale);
    for (int r = 0; r < 32; r++)
      signed_run(q + 8 * r, m3_iq2_s_grid[b->q[r] | (b->qh[r / 4] >> 2 * (r % 4) & 3) << 8], b->signs[r], 8);
  }
}

static void iq3_xxs(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_iq3_xxs, 8) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 8; g++) {
      uint32_t w = m3_word(b->gas + 4 * g);
      scale[g] = d * (0.5f + (float)(w >> 28)) * 0.5f;
      for (int r = 0; r < 8; r++)
        signed_run(q + 32 * g + 4 * r, m3_iq3_xxs_grid[b->q[8 * g + r]],
                   (unsigned)m3_sign_patterns[w >> 7 * (r / 2) & 127] >> 4 * (r % 2), 4);
    }
  }
}

static void iq3_s(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_iq3_s, 8) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 8; g++) scale[g] = d * (float)(1 + 2 * m3_nibble(b->scales, g));
    for (int r = 0; r < 64; r++)
      signed_run(q + 4 * r, m3_iq3_s_grid[b->q[r] | (b->qh[r / 8] >> r % 8 & 1) << 8], (unsigned)m3_nibble(b->signs, r),
                 4);
  }
}

/* scale * (entry + delta) = (scale / 8) * (8 * entry + 8 * delta): both sides exact but for the one rounding of the
 * product, as the scale is a float16 times a small integer. */
static inline void ternary_run(int8_t *q, const int8_t *grid, bool negative) {
  for (int j = 0; j < 8; j++) q[j] = (int8_t)(8 * grid[j] + (negative ? -1 : 1));
}

static void iq1_s(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_iq1_s, 8) {
    float d = m3_f16_to_f32(b->d);
    for (int g = 0; g < 8; g++) {
      uint16_t qh = b->qh[g];
      scale[g] = d * (float)(2 * (qh >> 12 & 7) + 1) * 0.125f;
      for (int r = 0; r < 4; r++)
        ternary_run(q + 32 * g + 8 * r, m3_iq1_grid[b->q[4 * g + r] | (qh >> 3 * r & 7) << 8], qh & 0x8000);
    }
  }
}

static void iq1_m(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_iq1_m, 16) {
    float d = m3_f16_to_f32(m3_iq1_m_d(b));
    for (int g = 0; g < 16; g++) scale[g] = d * (float)m3_iq1_m_scale(b, g) * 0.125f;
    for (int r = 0; r < 32; r++) {
      int h = m3_nibble(b->qh, r);
      ternary_run(q + 8 * r, m3_iq1_grid[b->q[r] | (h & 7) << 8], h & 8);
    }
  }
}

const m3_coding m3_codes_iq2_xxs = {32, false, sizeof(m3_block_iq2_xxs), iq2_xxs};
const m3_coding m3_codes_iq2_xs = {16, false, sizeof(m3_block_iq2_xs), iq2_xs};
const m3_coding m3_codes_iq2_s = {16, false, sizeof(m3_block_iq2_s), iq2_s};
const m3_coding m3_codes_iq3_xxs = {32, false, sizeof(m3_block_iq3_xxs), iq3_xxs};
const m3_coding m3_codes_iq3_s = {32, false, sizeof(m3_block_iq3_s), iq3_s};
const m3_coding m3_codes_iq1_s = {32, false, sizeof(m3_block_iq1_s), iq1_s};
const m3_coding m3_codes_iq1_m = {16, false, sizeof(m3_block_iq1_m), iq1_m};
