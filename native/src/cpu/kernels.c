#include "cpu/kernels.h"

#include <string.h>

#include "quant/traits.h"

static bool machine_has(m3_isa isa) {
  switch (isa) {
    case M3_ISA_SCALAR: return true;
#if defined(__x86_64__)
    case M3_ISA_AVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case M3_ISA_AVX512:
      return machine_has(M3_ISA_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__aarch64__)
    case M3_ISA_NEON: return true;
#endif
    default: return false;
  }
}

m3_status m3_choose_isa(int32_t wanted, m3_isa *out, m3_error *err) {
  static const m3_isa widest_first[] = {M3_ISA_AVX512, M3_ISA_AVX2, M3_ISA_NEON, M3_ISA_SCALAR};
  static const char *const names[] = {"auto", "scalar", "avx2", "avx512", "neon"};
  if (wanted < M3_ISA_AUTO || wanted > M3_ISA_NEON)
    return m3_fail(err, M3_ERROR_ARGUMENT, "isa is %d, expected 0 to %d", (int)wanted, (int)M3_ISA_NEON);
  for (size_t i = 0; i < sizeof widest_first / sizeof *widest_first; i++) {
    if (wanted != M3_ISA_AUTO && (m3_isa)wanted != widest_first[i]) continue;
    if (!machine_has(widest_first[i])) continue;
    *out = widest_first[i];
    return M3_OK;
  }
  return m3_fail(err, M3_ERROR_UNSUPPORTED, "instruction set %s: this machine does not have it", names[wanted]);
}

const m3_kernels *m3_kernels_for(m3_isa isa) {
#if defined(__x86_64__)
  if (isa == M3_ISA_AVX2) return &m3_kernels_avx2;
  if (isa == M3_ISA_AVX512) return __builtin_cpu_supports("avx512vnni") ? &m3_kernels_avx512_vnni : &m3_kernels_avx512;
#elif defined(__aarch64__)
  if (isa == M3_ISA_NEON) return &m3_kernels_neon;
#endif
  (void)isa;
  return &m3_kernels_scalar;
}

void m3_convert_row(const m3_kernels *kernels, int32_t type, const void *src, float *dst, int64_t n) {
  m3_decoder decode = kernels->to_f32[type];
  (decode ? decode : m3_traits(type)->to_f32)(src, dst, n);
}
