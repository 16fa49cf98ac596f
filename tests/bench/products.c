/* Speed of matrix products with weights of block types, on one thread: of one row, and of many with one matrix or with
 * the experts of a layer.
 *
 *     make bench-products [> tests/bench/products.csv]
 *     build/release/bench/products [TYPE ...]
 *
 * Times are medians of processor time, so that other programs on the machine disturb them little. Weights of one row
 * of x are read from memory: the last level of the cache is swept before. The column `a cycle` divides by the clock of
 * this run, which a chain of additions counts, so that it holds for other clocks too. */
#include <stdlib.h>
#include <strings.h>
#include <time.h>

#include "cpu/cpu.h"
#include "world.h"

enum { MOST_RUNS = 64, SWEEP = 48 << 20 };

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static uint64_t *memory;

static uint64_t sweep(void) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < SWEEP / 8; i += 8) sum += memory[i];
  return sum;
}

/* Cycles a second: each addition of the chain takes one. */
static double clock_rate(void) {
  enum { STEPS = 1 << 21 };
  double best = 1e9;
  for (int i = 0; i < 20; i++) {
    double start = seconds();
    uint64_t x = 1;
#pragma GCC unroll 16
    for (int n = 0; n < STEPS; n++) {
      x += 3;
      __asm__ volatile("" : "+r"(x)); /* else the compiler adds all at once */
    }
    best = fmin(best, seconds() - start);
  }
  return STEPS / best;
}

/* Which rows are multiplied with which matrix. */
typedef struct shape {
  const char *name;
  int64_t n_in, n_out;
  int32_t rows, experts; /* rows of each expert */
} shape;

static const shape shapes[] = {
    {"one row", 6144, 2048, 1, 1},
    {"one row, narrow", 768, 16384, 1, 1},
    {"512 rows, width 6144", 6144, 2048, 512, 1},
    {"512 rows, width 2048", 2048, 2048, 512, 1},
    {"16 rows of an expert", 6144, 1024, 16, 4},
    {"16 rows of an expert, down", 3072, 1024, 16, 4},
    {"4 rows of an expert", 6144, 1024, 4, 4},
    {"256 rows of an expert", 2048, 768, 256, 2},
};

static m3_weight weight_of(world *w, m3_tensor *t, int32_t type, const shape *s) {
  return new_weight(w, t, type, s->n_in, s->n_out, s->experts);
}

static void measure(const m3_kernels *k, int32_t type, const shape *s, double rate) {
  world w = {.seed = 5, .backend = &m3_cpu_backend};
  m3_tensor t;
  m3_weight weight = weight_of(&w, &t, type, s);
  int32_t n = s->rows * s->experts;
  float *x = keep_random(&w, n * s->n_in, 1.0f), *y = keep(&w, (size_t)(n * s->n_out) * sizeof(float));
  int32_t *start = keep(&w, (size_t)(s->experts + 1) * sizeof(int32_t));
  for (int32_t e = 0; e <= s->experts; e++) start[e] = e * s->rows;
  m3_scratch scratch = {.n_threads = 1, .thread_floats = m3_matmul_floats()};
  scratch.thread = keep(&w, (size_t)scratch.thread_floats * sizeof(float));
  scratch.rounded = keep(&w, (size_t)(n * m3_activation_bytes(s->n_in)) + 4096);
  m3_context c = {.kernels = k, .scratch = &scratch};
  m3_factor f = {&weight, y, s->n_out};
  m3_matmul_params p = {.factors = &f, .n_factors = 1, .x = x, .n = n};
  if (s->experts > 1) p.start = start, p.n_experts = s->experts;
  double times[MOST_RUNS], all = 0;
  int runs = 0;
  uint64_t sum = 0;
  for (int i = -1; i < MOST_RUNS && (i < 5 || all < 0.3); i++) {
    if (n == 1) sum += sweep();
    double begin = seconds();
    m3_matmul(&c, &p);
    double taken = seconds() - begin;
    if (i >= 0) times[runs++] = taken, all += taken;
  }
  if (sum == 1) printf("\n");
  qsort(times, (size_t)runs, sizeof *times, ascending);
  double time = times[runs / 2], macs = (double)n * (double)s->n_in * (double)s->n_out;
  printf("%s,\"%s\",%.2f,%.2f,%.1f\n", m3_type_name(type), s->name, macs / time * 1e-9, macs / time / rate,
         (double)t.n_bytes / time * 1e-9);
  fflush(stdout);
  for (int i = 0; i < w.n_owned; i++) free(w.owned[i]);
}

int main(int argc, char **argv) {
  m3_isa isa;
  m3_error err;
  if (m3_choose_isa(M3_ISA_AUTO, &isa, &err) != M3_OK) return 1;
  const m3_kernels *k = m3_kernels_for(isa);
  memory = calloc(1, SWEEP);
  if (!memory) return 1;
  memset(memory, 1, SWEEP);
  double rate = clock_rate();
  printf("# %s; %.2f GHz\ntype,product,G multiply-adds/s,a cycle,GB of weights/s\n", k->name, rate * 1e-9);
  for (int32_t type = 0; type <= M3_TYPE_MXFP4; type++) {
    if (!m3_coding_of(type)) continue;
    bool wanted = argc == 1;
    for (int i = 1; i < argc; i++) wanted |= strcasecmp(argv[i], m3_type_name(type)) == 0;
    if (!wanted) continue;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) measure(k, type, &shapes[i], rate);
  }
  free(memory);
  return 0;
}
