/* F32, F16 and BF16: one element a block. */
#include <string.h>

#include "quant/decode.h"
#include "quant/encode.h"
#include "quant/half.h"
#include "quant/rounding.h"

void m3_decode_f32(const void *src, float *dst, int64_t n) { memcpy(dst, src, (size_t)n * 4); }

void m3_decode_f16(const void *src, float *dst, int64_t n) {
  const uint16_t *s = src;
  for (int64_t i = 0; i < n; i++) dst[i] = m3_f16_to_f32(s[i]);
}

void m3_decode_bf16(const void *src, float *dst, int64_t n) {
  const uint16_t *s = src;
  for (int64_t i = 0; i < n; i++) dst[i] = m3_bf16_to_f32(s[i]);
}

void m3_encode_f32(const float *src, void *dst, int64_t n, const float *importance) {
  (void)importance;
  memcpy(dst, src, (size_t)n * 4);
}

void m3_encode_f16(const float *src, void *dst, int64_t n, const float *importance) {
  (void)importance;
  m3_machine_roundings()->f16(src, dst, n);
}

void m3_encode_bf16(const float *src, void *dst, int64_t n, const float *importance) {
  (void)importance;
  m3_machine_roundings()->bf16(src, dst, n);
}
