#include "quant/scale_search.h"

const m3_searches *m3_machine_searches(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return &m3_searches_avx2;
#endif
  return &m3_searches_scalar;
}
