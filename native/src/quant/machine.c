/* Which tables this machine can run. */
#include <stdbool.h>

#include "quant/codebook_search.h"
#include "quant/rounding.h"
#include "quant/scale_search.h"

#if defined(__x86_64__)
static bool has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }
#endif

const m3_searches *m3_machine_searches(void) {
#if defined(__x86_64__)
  if (has_avx2()) return &m3_searches_avx2;
#endif
  return &m3_searches_scalar;
}

const m3_codebook_searches *m3_machine_codebook_searches(void) {
#if defined(__x86_64__)
  if (has_avx2()) return &m3_codebook_searches_avx2;
#endif
  return &m3_codebook_searches_scalar;
}

const m3_roundings *m3_machine_roundings(void) {
#if defined(__x86_64__)
  if (has_avx2()) return &m3_roundings_avx2;
#endif
  return &m3_roundings_scalar;
}
