/* Block types to float32. */
#include "quant/decode.h"

#include "m3.h"
#include "quant/blocks.h"
#include "quant/codes.h"

/* n elements, a whole number of blocks. */
static inline void decode(const m3_coding *coding, const void *src, float *dst, int64_t n) {
  const char *b = src;
  for (; n > 0; n -= M3_SUPERBLOCK, dst += M3_SUPERBLOCK, b += coding->bytes) {
    int64_t count = n < M3_SUPERBLOCK ? n : M3_SUPERBLOCK;
    int8_t q[M3_SUPERBLOCK];
    float scale[16], min[16];
    coding->read(b, q, scale, min, count);
    for (int64_t g = 0; g * coding->group < count; g++)
      for (int64_t i = g * coding->group; i < (g + 1) * coding->group; i++) {
        float x = scale[g] * (float)q[i];
        dst[i] = coding->minima ? x - min[g] : x;
      }
  }
}

#define DECODER(name) \
  void m3_decode_##name(const void *src, float *dst, int64_t n) { decode(&m3_codes_##name, src, dst, n); }

DECODER(q4_0)
DECODER(q4_1)
DECODER(q5_0)
DECODER(q5_1)
DECODER(q8_0)
DECODER(iq4_nl)
DECODER(mxfp4)
DECODER(q2_k)
DECODER(q3_k)
DECODER(q4_k)
DECODER(q5_k)
DECODER(q6_k)
DECODER(iq4_xs)
DECODER(iq2_xxs)
DECODER(iq2_xs)
DECODER(iq2_s)
DECODER(iq3_xxs)
DECODER(iq3_s)
DECODER(iq1_s)
DECODER(iq1_m)

const m3_coding *m3_coding_of(int32_t type) {
  static const m3_coding *const codings[] = {
      [M3_TYPE_Q4_0] = &m3_codes_q4_0,     [M3_TYPE_Q4_1] = &m3_codes_q4_1,       [M3_TYPE_Q5_0] = &m3_codes_q5_0,
      [M3_TYPE_Q5_1] = &m3_codes_q5_1,     [M3_TYPE_Q8_0] = &m3_codes_q8_0,       [M3_TYPE_IQ4_NL] = &m3_codes_iq4_nl,
      [M3_TYPE_MXFP4] = &m3_codes_mxfp4,   [M3_TYPE_Q2_K] = &m3_codes_q2_k,       [M3_TYPE_Q3_K] = &m3_codes_q3_k,
      [M3_TYPE_Q4_K] = &m3_codes_q4_k,     [M3_TYPE_Q5_K] = &m3_codes_q5_k,       [M3_TYPE_Q6_K] = &m3_codes_q6_k,
      [M3_TYPE_IQ4_XS] = &m3_codes_iq4_xs, [M3_TYPE_IQ2_XXS] = &m3_codes_iq2_xxs, [M3_TYPE_IQ2_XS] = &m3_codes_iq2_xs,
      [M3_TYPE_IQ2_S] = &m3_codes_iq2_s,   [M3_TYPE_IQ3_XXS] = &m3_codes_iq3_xxs, [M3_TYPE_IQ3_S] = &m3_codes_iq3_s,
      [M3_TYPE_IQ1_S] = &m3_codes_iq1_s,   [M3_TYPE_IQ1_M] = &m3_codes_iq1_m,
  };
  return type >= 0 && (uint64_t)type < sizeof codings / sizeof *codings ? codings[type] : (void *)0;
}
