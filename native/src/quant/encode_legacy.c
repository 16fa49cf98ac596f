/* Blocks of 32 that are rounded where no importance is given, and searched where it is; Q8_0 is always rounded. */
#include "quant/encode.h"
#include "quant/rounding.h"

void m3_encode_q8_0(const float *src, void *dst, int64_t n, const float *importance) {
  (void)importance;
  m3_machine_roundings()->q8_0(src, dst, n);
}

void m3_encode_q4_0(const float *src, void *dst, int64_t n, const float *importance) {
  if (importance)
    m3_search_q4_0(src, dst, n, importance);
  else
    m3_machine_roundings()->q4_0(src, dst, n);
}

void m3_encode_q4_1(const float *src, void *dst, int64_t n, const float *importance) {
  if (importance)
    m3_search_q4_1(src, dst, n, importance);
  else
    m3_machine_roundings()->q4_1(src, dst, n);
}

void m3_encode_q5_0(const float *src, void *dst, int64_t n, const float *importance) {
  if (importance)
    m3_search_q5_0(src, dst, n, importance);
  else
    m3_machine_roundings()->q5_0(src, dst, n);
}

void m3_encode_q5_1(const float *src, void *dst, int64_t n, const float *importance) {
  if (importance)
    m3_search_q5_1(src, dst, n, importance);
  else
    m3_machine_roundings()->q5_1(src, dst, n);
}
