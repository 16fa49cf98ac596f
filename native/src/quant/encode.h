/* encode.h - rows of float32 to the storage types (m3_encoder of traits.h). */
#ifndef M3_SRC_QUANT_ENCODE_H
#define M3_SRC_QUANT_ENCODE_H

#include <stdint.h>

/* plain.c; importance is not looked at */
void m3_encode_f32(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_f16(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_bf16(const float *src, void *dst, int64_t n, const float *importance);

/* encode_legacy.c: blocks of 32, rounding only; importance is not looked at */
void m3_encode_q4_0(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_q4_1(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_q5_0(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_q5_1(const float *src, void *dst, int64_t n, const float *importance);
void m3_encode_q8_0(const float *src, void *dst, int64_t n, const float *importance);

#endif
