#include "threads.h"

#include <omp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#if defined(__linux__)
#include <sched.h>

/* The first line of a file; false if it cannot be read. */
static bool read_line(const char *path, char *line, int size) {
  FILE *file = fopen(path, "r");
  if (!file) return false;
  bool read = fgets(line, size, file) != NULL;
  fclose(file);
  return read;
}

/* True if a processor below `cpu` that this process may use is in a list as the kernel writes it: "0-3,8". */
static bool has_lower(const char *list, int cpu, const cpu_set_t *allowed) {
  for (char *end; *list; list = *end ? end + 1 : end) {
    long first = strtol(list, &end, 10), last = first;
    if (end == list) return false;
    if (*end == '-') last = strtol(end + 1, &end, 10);
    for (long i = first; i <= last && i < cpu; i++)
      if (i >= 0 && i < CPU_SETSIZE && CPU_ISSET((size_t)i, allowed)) return true;
  }
  return false;
}

int32_t m3_physical_cores(const char *folder) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return omp_get_num_procs();
  int32_t cores = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET((size_t)cpu, &allowed)) continue;
    char path[512], siblings[256];
    snprintf(path, sizeof path, "%s/cpu%d/topology/thread_siblings_list", folder, cpu);
    cores += !read_line(path, siblings, sizeof siblings) || !has_lower(siblings, cpu, &allowed);
  }
  return cores > 0 ? cores : omp_get_num_procs();
}

int32_t m3_time_share(const char *file) {
  char line[64], *end;
  if (!read_line(file, line, sizeof line)) return 0;
  long long quota = strtoll(line, &end, 10), period = strtoll(end, NULL, 10);
  if (end == line || quota <= 0 || period <= 0 || quota / period >= INT32_MAX) return 0; /* "max" has no number */
  return (int32_t)((quota + period - 1) / period);
}
#else
int32_t m3_physical_cores(const char *folder) {
  (void)folder;
  return omp_get_num_procs();
}
int32_t m3_time_share(const char *file) {
  (void)file;
  return 0;
}
#endif

int32_t m3_default_threads(void) {
  int32_t cores = m3_physical_cores("/sys/devices/system/cpu"), share = m3_time_share("/sys/fs/cgroup/cpu.max");
  return share && share < cores ? share : cores;
}

int32_t m3_max_threads(void) {
  int32_t processors = omp_get_num_procs();
  return processors > M3_FEW_THREADS ? processors : M3_FEW_THREADS;
}

m3_status m3_resolve_threads(int32_t wanted, int32_t *out, m3_error *err) {
  int32_t most = m3_max_threads();
  if (wanted < 0 || wanted > most)
    return m3_fail(err, M3_ERROR_ARGUMENT, "threads is %d, expected 0 (all %d cores) to %d", (int)wanted,
                   (int)m3_default_threads(), (int)most);
  *out = wanted ? wanted : m3_default_threads();
  return M3_OK;
}
