/* How many threads a number of 0 stands for, by what the kernel says of processors and time. */
#include "threads.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

static char folder[] = "/tmp/m3-threads-XXXXXX";

static void write_file(const char *path, const char *content) {
  FILE *file = fopen(path, "w");
  if (!file) {
    CHECK(false, "%s cannot be written", path);
    return;
  }
  fputs(content, file);
  fclose(file);
}

/* Says of every processor which ones share its core. */
static void write_siblings(int cpu, const char *list) {
  char path[128];
  snprintf(path, sizeof path, "%s/cpu%d", folder, cpu);
  mkdir(path, 0700);
  snprintf(path, sizeof path, "%s/cpu%d/topology", folder, cpu);
  mkdir(path, 0700);
  snprintf(path, sizeof path, "%s/cpu%d/topology/thread_siblings_list", folder, cpu);
  write_file(path, list);
}

/* The lowest processors that this process may use; the number of those found. */
static int find_processors(int *found, int most) {
  cpu_set_t allowed;
  CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0, "no affinity");
  int n = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE && n < most; cpu++)
    if (CPU_ISSET((size_t)cpu, &allowed)) found[n++] = cpu;
  return n;
}

static void check_cores(void) {
  int cpu[2];
  cpu_set_t before, two;
  sched_getaffinity(0, sizeof before, &before);
  int n = find_processors(cpu, 2);
  CPU_ZERO(&two);
  for (int i = 0; i < n; i++) CPU_SET((size_t)cpu[i], &two);
  sched_setaffinity(0, sizeof two, &two);
  CHECK(m3_physical_cores(folder) == n, "%d processors of which nothing is said", n);
  if (n == 2) {
    char list[64];
    for (int i = 0; i < 2; i++) {
      snprintf(list, sizeof list, "%d,%d\n", cpu[i], cpu[i] + 64);
      write_siblings(cpu[i], list);
    }
    CHECK(m3_physical_cores(folder) == 2, "siblings that this process may not use count");
    snprintf(list, sizeof list, "%d-%d\n", cpu[0], cpu[1]);
    for (int i = 0; i < 2; i++) write_siblings(cpu[i], list);
    CHECK(m3_physical_cores(folder) == 1, "a core of two threads is counted twice");
    snprintf(list, sizeof list, "%d,%d\n", cpu[0], cpu[1]);
    for (int i = 0; i < 2; i++) write_siblings(cpu[i], list);
    CHECK(m3_physical_cores(folder) == 1, "a core of two threads in a list is counted twice");
    for (int i = 0; i < 2; i++) write_siblings(cpu[i], "nonsense\n");
    CHECK(m3_physical_cores(folder) == 2, "a list that cannot be read is believed");
  }
  sched_setaffinity(0, sizeof before, &before);
}

static void check_share(const char *content, int32_t want) {
  char path[128];
  snprintf(path, sizeof path, "%s/cpu.max", folder);
  write_file(path, content);
  int32_t got = m3_time_share(path);
  CHECK(got == want, "cpu.max '%s' gives %d", content, (int)got);
}

int main(void) {
  CHECK(mkdtemp(folder) != NULL, "no folder");
  check_cores();
  check_share("max 100000\n", 0);
  check_share("200000 100000\n", 2);
  check_share("150000 100000\n", 2);
  check_share("50000 100000\n", 1);
  check_share("", 0);
  check_share("5 0\n", 0);
  CHECK(m3_time_share("/nonexistent/cpu.max") == 0, "a limit that nobody set");
  CHECK(m3_default_threads() >= 1 && m3_default_threads() <= m3_max_threads(), "%d threads", (int)m3_default_threads());
  char command[64];
  snprintf(command, sizeof command, "rm -r %s", folder);
  CHECK(system(command) == 0, "%s stays", folder);
  return finish("test_threads");
}
