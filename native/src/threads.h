/* threads.h - how many threads a call may use. */
#ifndef M3_SRC_THREADS_H
#define M3_SRC_THREADS_H

#include "error.h"
#include "m3.h"

/* Resolves a caller's n_threads: 0 is all cores. Refuses more than m3_max_threads. */
m3_status m3_resolve_threads(int32_t wanted, int32_t *out, m3_error *err);

#endif
