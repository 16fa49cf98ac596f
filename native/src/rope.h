/* rope.h - the angles of RoPE as the reference computes them: the frequency and its product with the position are
 * rounded to float32. At a million tokens that rounding is visible in the result, so it belongs to the model. */
#ifndef M3_SRC_ROPE_H
#define M3_SRC_ROPE_H

#include <math.h>

#include "m3.h"

/* Of the pair of channels i and i + n_rot / 2. */
static inline float m3_rope_frequency(const m3_hparams *h, int32_t i) {
  float exponent = (float)(2 * i) / (float)h->n_rot;
  return 1.0f / powf(h->rope_theta, exponent);
}

static inline float m3_rope_angle(float frequency, int64_t pos) { return (float)pos * frequency; }

#endif
