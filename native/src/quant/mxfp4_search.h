/* mxfp4_search.h - the exponents of MXFP4. Included by the files that compile the searches for an instruction set.
 *
 * The exponent that the OCP text suggests cuts off what lies above 1.5 times the greatest power of two in the block, so
 * one more is often better; fewer pay where the greatest values do not matter. */
#ifndef M3_SRC_QUANT_MXFP4_SEARCH_H
#define M3_SRC_QUANT_MXFP4_SEARCH_H

#include "quant/search_frame.h"

/* The nearest of 0, 1, 2, 3, 4, 6, 8, 12. */
M3_INLINE m3_f8 mxfp4_nearest(m3_f8 magnitude) {
  m3_f8 fine = m3_round8(magnitude), middle = 2.0f * m3_round8(0.5f * magnitude);
  m3_f8 coarse = m3_min8(4.0f * m3_round8(0.25f * magnitude), m3_splat(12));
  return m3_select(magnitude < 4.0f, fine, m3_select(magnitude < 8.0f, middle, coarse));
}

M3_INLINE void mxfp4_blocks(const float *x, const float *w, m3_single_blocks *out) {
  m3_f8 v[1][M3_LONGEST_GROUP], weight[1][M3_LONGEST_GROUP];
  m3_deal(x, v, 1, M3_BLOCK);
  /* Magnitudes are brought to 1 to 2 (to 4 at the very top of float32, below 1 if they are subnormal). */
  m3_i8 exponent = (m3_i8)m3_greatest_magnitude(v, 1, M3_BLOCK, false) >> 23;
  exponent = m3_limit8(exponent, 1, 253);
  m3_f8 up = (m3_f8)((254 - exponent) << 23);
  for (int j = 0; j < M3_BLOCK; j++) v[0][j] *= up;
  if (w) {
    m3_deal(w, weight, 1, M3_BLOCK);
    m3_set_weights(weight, 1, M3_BLOCK, false);
  } else {
    for (int j = 0; j < M3_BLOCK; j++) weight[0][j] = m3_splat(1);
  }

  m3_f8 best = m3_splat(3e38f);
  m3_i8 chosen = exponent - exponent;
  static const int offsets[] = {0, 1, -1, -2, -3, -4};
  for (int k = 0; k < 6; k++) {
    m3_i8 e = m3_limit8(exponent - 2 + offsets[k], 0, 254);
    m3_f8 scale = (m3_f8)((e - 1 - exponent + 127) << 23), inverse = 1.0f / scale, error = m3_splat(0);
    for (int j = 0; j < M3_BLOCK; j++) {
      m3_f8 magnitude = m3_abs8(v[0][j]);
      m3_f8 r = magnitude - scale * mxfp4_nearest(magnitude * inverse);
      error += weight[0][j] * r * r;
    }
    m3_i8 better = error < best;
    best = m3_select(better, error, best);
    chosen = (e & better) | (chosen & ~better);
  }
  m3_f8 inverse = 1.0f / (m3_f8)((chosen - 1 - exponent + 127) << 23);
  for (int k = 0; k < M3_LANES; k++) out->d[k] = (uint16_t)chosen[k];
  for (int j = 0; j < M3_BLOCK; j += 4) {
    m3_f8 code[4];
    for (int i = 0; i < 4; i++) {
      m3_f8 value = v[0][j + i], q = mxfp4_nearest(m3_abs8(value) * inverse);
      m3_f8 number = m3_select(q <= 4.0f, q, m3_select(q <= 8.0f, 2.0f + 0.5f * q, m3_splat(7)));
      m3_i8 negative = (value < 0.0f) & (number > 0.0f);
      code[i] = number + m3_select(negative, m3_splat(8), m3_splat(0));
    }
    m3_put_codes(out->code + j, M3_BLOCK, code);
  }
}

#endif
