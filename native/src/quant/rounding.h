/* rounding.h - rows to the types that only round. One table for each instruction set; all give the same bytes.
 *
 * src is what an encoder gets (traits.h); F16 and BF16 take NaN and infinity too, and any n. */
#ifndef M3_SRC_QUANT_ROUNDING_H
#define M3_SRC_QUANT_ROUNDING_H

#include <math.h>
#include <stdint.h>

typedef void (*m3_rounding)(const float *src, void *dst, int64_t n);

typedef struct m3_roundings {
  m3_rounding f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0;
} m3_roundings;

extern const m3_roundings m3_roundings_scalar;
#if defined(__x86_64__)
extern const m3_roundings m3_roundings_avx2;
#endif

/* The widest of this machine. */
const m3_roundings *m3_machine_roundings(void);

/* 1 / d, and 0 where that is no number: such a scale is below 2^-128 and stored as zero anyway. */
static inline float m3_inverse(float d) {
  float i = d != 0 ? 1.0f / d : 0.0f;
  return isinf(i) ? 0.0f : i;
}

#endif
