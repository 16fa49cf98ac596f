#include "threads.h"

#include <omp.h>

int32_t m3_max_threads(void) {
  int32_t cores = omp_get_num_procs();
  return cores > M3_FEW_THREADS ? cores : M3_FEW_THREADS;
}

m3_status m3_resolve_threads(int32_t wanted, int32_t *out, m3_error *err) {
  int32_t cores = omp_get_num_procs(), most = m3_max_threads();
  if (wanted < 0 || wanted > most)
    return m3_fail(err, M3_ERROR_ARGUMENT, "threads is %d, expected 0 (all %d cores) to %d", (int)wanted, (int)cores,
                   (int)most);
  *out = wanted ? wanted : cores;
  return M3_OK;
}
