/* encode.h - rows of float32 to the storage types (m3_encoder of traits.h). */
#ifndef M3_SRC_QUANT_ENCODE_H
#define M3_SRC_QUANT_ENCODE_H

#include <stdint.h>

/* plain.c; importance is not looked at */
void m3_encode_f32(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_f16(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_bf16(const float *src, void *dst, int64_t n, const float *importance);

/* encode_legacy.c: blocks of 32. Scales of Q4_0 to Q5_1 are searched for with importance, else rounded; Q8_0 does not
 * look at importance. */
void m3_encode_q4_0(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_q4_1(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_q5_0(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_q5_1(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_q8_0(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_iq4_nl(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_mxfp4(const float *src, void *dst, int64_t n, const float *importance);

/* encode_k.c: blocks of 256, scales searched for */
void m3_encode_iq4_xs(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_q2_k(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_q3_k(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_q4_k(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_q5_k(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_q6_k(const float *src, void *dst, int64_t n, const float *importance);

/* encode_iq.c: blocks of 256 of codebook entries, searched for; importance is never NULL for IQ2_XXS, IQ2_XS, IQ1 */
void m3_encode_iq3_xxs(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_iq3_s(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_iq2_xxs(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_iq2_xs(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_iq2_s(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_iq1_s(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_iq1_m(const float *src, void *dst, int64_t n, const float *importance);

#endif
