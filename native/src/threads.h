/* threads.h - how many threads a call may use. */
#ifndef M3_SRC_THREADS_H
#define M3_SRC_THREADS_H

#include "error.h"
#include "m3.h"

/* Resolves a caller's n_threads: 0 is all cores. Refuses more than m3_max_threads. */
m3_status m3_resolve_threads(int32_t wanted, int32_t *out, m3_error *err);

/* Processors that this process may use, less those that share a core with a lower one by what the kernel says in
 * folder/cpuN/topology/thread_siblings_list; one of which it says nothing has a core of its own. */
int32_t m3_physical_cores(const char *folder);

/* Processors' worth of time that a control group leaves, rounded up, by its cpu.max; 0 without a limit. */
int32_t m3_time_share(const char *file);

#endif
