/* decode_avx2.h - quantized rows to float32 with AVX2, bit for bit as the scalar decoders do. The tables of AVX2 and
 * AVX-512 both use them. */
#ifndef M3_SRC_CPU_DECODE_AVX2_H
#define M3_SRC_CPU_DECODE_AVX2_H

#include <stdint.h>

void m3_avx2_q4_0(const void *src, float *dst, int64_t n);
void m3_avx2_q4_1(const void *src, float *dst, int64_t n);
void m3_avx2_q5_0(const void *src, float *dst, int64_t n);
void m3_avx2_q5_1(const void *src, float *dst, int64_t n);
void m3_avx2_iq4_nl(const void *src, float *dst, int64_t n);
void m3_avx2_mxfp4(const void *src, float *dst, int64_t n);
void m3_avx2_q2_k(const void *src, float *dst, int64_t n);
void m3_avx2_q3_k(const void *src, float *dst, int64_t n);
void m3_avx2_q4_k(const void *src, float *dst, int64_t n);
void m3_avx2_q5_k(const void *src, float *dst, int64_t n);
void m3_avx2_q6_k(const void *src, float *dst, int64_t n);
void m3_avx2_iq4_xs(const void *src, float *dst, int64_t n);
void m3_avx2_iq2_xxs(const void *src, float *dst, int64_t n);
void m3_avx2_iq2_xs(const void *src, float *dst, int64_t n);
void m3_avx2_iq2_s(const void *src, float *dst, int64_t n);
void m3_avx2_iq3_xxs(const void *src, float *dst, int64_t n);
void m3_avx2_iq3_s(const void *src, float *dst, int64_t n);
void m3_avx2_iq1_s(const void *src, float *dst, int64_t n);
void m3_avx2_iq1_m(const void *src, float *dst, int64_t n);

/* Their places in m3_kernels.to_f32. */
#define M3_AVX2_DECODERS                                                                                   \
  [M3_TYPE_Q4_0] = m3_avx2_q4_0, [M3_TYPE_Q4_1] = m3_avx2_q4_1, [M3_TYPE_Q5_0] = m3_avx2_q5_0,             \
  [M3_TYPE_Q5_1] = m3_avx2_q5_1, [M3_TYPE_IQ4_NL] = m3_avx2_iq4_nl, [M3_TYPE_MXFP4] = m3_avx2_mxfp4,       \
  [M3_TYPE_Q2_K] = m3_avx2_q2_k, [M3_TYPE_Q3_K] = m3_avx2_q3_k, [M3_TYPE_Q4_K] = m3_avx2_q4_k,             \
  [M3_TYPE_Q5_K] = m3_avx2_q5_k, [M3_TYPE_Q6_K] = m3_avx2_q6_k, [M3_TYPE_IQ4_XS] = m3_avx2_iq4_xs,         \
  [M3_TYPE_IQ2_XXS] = m3_avx2_iq2_xxs, [M3_TYPE_IQ2_XS] = m3_avx2_iq2_xs, [M3_TYPE_IQ2_S] = m3_avx2_iq2_s, \
  [M3_TYPE_IQ3_XXS] = m3_avx2_iq3_xxs, [M3_TYPE_IQ3_S] = m3_avx2_iq3_s, [M3_TYPE_IQ1_S] = m3_avx2_iq1_s,   \
  [M3_TYPE_IQ1_M] = m3_avx2_iq1_m

#endif
