/* codes.h - every block type as small integers: the elements of a group share a scale and, in some types, a minimum,
 * and value = (scale * q) - min, float32 operations in this order, none fused. The formulas of blocks.h come to this,
 * to the bit; where they have a sign, q has it, and IQ1's 0.125 is in the scale. */
#ifndef M3_SRC_QUANT_CODES_H
#define M3_SRC_QUANT_CODES_H

#include <stdbool.h>
#include <stdint.h>

typedef struct m3_coding {
  int32_t group; /* 16 or 32 elements */
  bool minima;
  int64_t bytes; /* of 256 elements */
  /* n elements, a whole number of blocks: q [n], scale [n / group], min [n / group], which types without minima leave
   * alone. */
  void (*read)(const void *src, int8_t *q, float *scale, float *min, int64_t n);
} m3_coding;

/* NULL for F32, F16, BF16 and types that the engine does not know. */
const m3_coding *m3_coding_of(int32_t type);

/* By type, for m3_coding_of and the decoders. codes_legacy.c: blocks of 32. */
extern const m3_coding m3_codes_q4_0, m3_codes_q4_1, m3_codes_q5_0, m3_codes_q5_1, m3_codes_q8_0, m3_codes_iq4_nl,
    m3_codes_mxfp4;
/* codes_k.c: blocks of 256, each group with a scale. */
extern const m3_coding m3_codes_q2_k, m3_codes_q3_k, m3_codes_q4_k, m3_codes_q5_k, m3_codes_q6_k, m3_codes_iq4_xs;
/* codes_iq.c: blocks of 256, codebooks. */
extern const m3_coding m3_codes_iq2_xxs, m3_codes_iq2_xs, m3_codes_iq2_s, m3_codes_iq3_xxs, m3_codes_iq3_s,
    m3_codes_iq1_s, m3_codes_iq1_m;

#endif
