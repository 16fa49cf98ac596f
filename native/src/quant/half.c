#include "quant/half.h"

float m3_f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16;
  uint32_t exponent = (h >> 10) & 0x1f;
  uint32_t mantissa = h & 0x3ff;
  if (exponent == 0x1f) return m3_float_of(sign | 0x7f800000 | mantissa << 13);
  if (exponent) return m3_float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  /* Subnormal: mantissa * 2^-24, exact in float32. */
  float f = (float)mantissa * 0x1p-24f;
  return m3_float_of(sign | m3_bits_of(f));
}

uint16_t m3_f32_to_f16(float f) {
  uint32_t u = m3_bits_of(f);
  uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7e00 | (uint16_t)(u >> 13 & 0x1ff); /* NaN, quiet */
  if (u >= 0x477ff000) return sign | 0x7c00;                              /* 65520 and above round to infinity */
  if (u < 0x38800000) {
    /* Subnormal result: adding 0.5 puts the unit of the last place at 2^-24, and the addition rounds. */
    float shifted = m3_float_of(u) + 0.5f;
    return sign | (uint16_t)(m3_bits_of(shifted) - m3_bits_of(0.5f));
  }
  uint32_t odd = u >> 13 & 1;
  return sign | (uint16_t)((u - 0x38000000 + 0xfff + odd) >> 13);
}

float m3_bf16_to_f32(uint16_t h) { return m3_float_of((uint32_t)h << 16); }

uint16_t m3_f32_to_bf16(float f) {
  uint32_t u = m3_bits_of(f);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40); /* NaN, quiet */
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
