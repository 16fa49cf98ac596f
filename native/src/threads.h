/* threads.h - how many threads a call may use. */
#ifndef M3_SRC_THREADS_H
#define M3_SRC_THREADS_H

#include "error.h"
#include "m3.h"

/* Resolves a caller's n_threads: 0 is all cores. Refuses more than the machine has (M3_FEW_THREADS on a smaller one): a
 * thread that cannot be created ends the process inside the OpenMP runtime, where no error can be returned. */
m3_status m3_resolve_threads(int32_t wanted, int32_t *out, m3_error *err);

#endif
