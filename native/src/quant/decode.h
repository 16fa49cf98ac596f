/* decode.h - rows of every storage type to float32 (m3_decoder of traits.h); formulas in blocks.h. */
#ifndef M3_SRC_QUANT_DECODE_H
#define M3_SRC_QUANT_DECODE_H

#include <stdint.h>

/* plain.c */
void m3_decode_f32(const void *src, float *dst, int64_t n);
void m3_decode_f16(const void *src, float *dst, int64_t n);
void m3_decode_bf16(const void *src, float *dst, int64_t n);

/* decode.c: block types, from the integers of codes.h */
void m3_decode_q4_0(const void *src, float *dst, int64_t n);
void m3_decode_q4_1(const void *src, float *dst, int64_t n);
void m3_decode_q5_0(const void *src, float *dst, int64_t n);
void m3_decode_q5_1(const void *src, float *dst, int64_t n);
void m3_decode_q8_0(const void *src, float *dst, int64_t n);
void m3_decode_iq4_nl(const void *src, float *dst, int64_t n);
void m3_decode_mxfp4(const void *src, float *dst, int64_t n);
void m3_decode_q2_k(const void *src, float *dst, int64_t n);
void m3_decode_q3_k(const void *src, float *dst, int64_t n);
void m3_decode_q4_k(const void *src, float *dst, int64_t n);
void m3_decode_q5_k(const void *src, float *dst, int64_t n);
void m3_decode_q6_k(const void *src, float *dst, int64_t n);
void m3_decode_iq4_xs(const void *src, float *dst, int64_t n);
void m3_decode_iq2_xxs(const void *src, float *dst, int64_t n);
void m3_decode_iq2_xs(const void *src, float *dst, int64_t n);
void m3_decode_iq2_s(const void *src, float *dst, int64_t n);
void m3_decode_iq3_xxs(const void *src, float *dst, int64_t n);
void m3_decode_iq3_s(const void *src, float *dst, int64_t n);
void m3_decode_iq1_s(const void *src, float *dst, int64_t n);
void m3_decode_iq1_m(const void *src, float *dst, int64_t n);

#endif
