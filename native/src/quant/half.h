/* half.h - IEEE 754 binary16 and bfloat16. To float32 exact; from it to the nearest, ties to even. NaN stays NaN. */
#ifndef M3_SRC_QUANT_HALF_H
#define M3_SRC_QUANT_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t m3_bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

static inline float m3_float_of(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

float m3_f16_to_f32(uint16_t h);
uint16_t m3_f32_to_f16(float f);
float m3_bf16_to_f32(uint16_t h);
uint16_t m3_f32_to_bf16(float f);

#endif
