/* A guard against slow paths: operations with the widest instruction set of this machine against the scalar
 * specification, both in this run. Only the ratio counts, in processor time of one thread, so that other programs on
 * the machine disturb it little. The least ratios are about a third of what an idle machine with AVX2 gives; an
 * operation that falls back to plain code lies near 1. */
#include <stdlib.h>
#include <time.h>

#include "world.h"

#if defined(__SANITIZE_ADDRESS__)
static void check_all(m3_isa isa) {
  (void)isa;
  printf("not run here: sanitizers slow both sides by other factors\n");
}
#else
enum { RUNS = 5 };

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef enum operation { MLP, SELECT, ATTEND } operation;

static void run(const m3_kernels *kernels, world *w, operation what) {
  m3_context x = {.hparams = &w->h, .kernels = kernels, .scratch = &w->scratch};
  m3_select_params s = {
      .rows = &w->rows, .cache = w->cache, .blocks = w->scratch.blocks, .max_blocks = blocks_of_case(&w->c)};
  m3_attend_params a = {&w->rows, w->cache, w->scratch.blocks, w->scratch.attended, NULL};
  switch (what) {
    case MLP: m3_cpu_backend.mlp(&x, &(m3_ffn_params){&w->layer, w->n, w->hidden, false}); break;
    case SELECT: m3_cpu_backend.select(&x, &s); break;
    case ATTEND: m3_cpu_backend.attend(&x, &a); break;
  }
}

/* The best of some runs: what disturbs a run makes it longer. */
static double best_time(const m3_kernels *kernels, world *w, operation what) {
  double best = 1e9;
  for (int i = 0; i < RUNS; i++) {
    double start = seconds();
    run(kernels, w, what);
    best = fmin(best, seconds() - start);
  }
  return best;
}

static void check(const m3_kernels *fast, int32_t weight_type, int32_t n_rows, operation what, double least) {
  op_case c = {.name = "speed",
               .n_head = 16,
               .n_head_kv = 4,
               .head_dim = 128,
               .index_dim = 128,
               .n_rot = 64,
               .block_size = 128,
               .top_k = 8,
               .local_blocks = 1,
               .n_embd = 512,
               .n_ff = 512,
               .n_ff_expert = 256,
               .n_ff_shared = 256,
               .n_expert = 2,
               .n_expert_used = 1,
               .n_vocab = 32,
               .weight_type = weight_type,
               .kv_type = M3_TYPE_F16,
               .index_type = M3_TYPE_F16,
               .n_sequences = 1,
               .n_rows = n_rows,
               .context = 4096};
  static const char *const names[] = {"products", "selection", "attention"};
  world *w = new_world(&c, &m3_cpu_backend, 1);
  run(fast, w, SELECT); /* the lists that attention reads */
  double ratio = best_time(&m3_kernels_scalar, w, what) / best_time(fast, w, what);
  printf("%-9s %-7s %2d rows: %s is %.1f times as fast as the scalar code\n", names[what], m3_type_name(weight_type),
         (int)n_rows, fast->name, ratio);
  CHECK(ratio >= least, "%s, %s weights, %d rows: only %.2f times as fast as scalar, expected %.1f", names[what],
        m3_type_name(weight_type), (int)n_rows, ratio, least);
  free_world(w);
}

static void check_all(m3_isa isa) {
  static const int32_t types[] = {M3_TYPE_Q8_0,  M3_TYPE_Q4_0,  M3_TYPE_Q6_K,   M3_TYPE_Q5_K,  M3_TYPE_Q4_K,
                                  M3_TYPE_Q3_K,  M3_TYPE_Q2_K,  M3_TYPE_IQ4_XS, M3_TYPE_IQ3_S, M3_TYPE_IQ2_XXS,
                                  M3_TYPE_IQ1_M, M3_TYPE_MXFP4, M3_TYPE_F16};
  const m3_kernels *fast = m3_kernels_for(isa);
  if (isa != M3_ISA_AVX2 && isa != M3_ISA_AVX512) {
    printf("not run here: the ratios are those of AVX2 and AVX-512\n");
    return;
  }
  for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
    check(fast, types[i], 1, MLP, 6);
    check(fast, types[i], 32, MLP, 6);
  }
  check(fast, M3_TYPE_F16, 1, SELECT, 6);
  check(fast, M3_TYPE_F16, 32, SELECT, 6);
  check(fast, M3_TYPE_F16, 1, ATTEND, 6);
  check(fast, M3_TYPE_F16, 32, ATTEND, 6);
}
#endif

int main(void) {
  m3_isa isa;
  m3_error err;
  CHECK(m3_choose_isa(M3_ISA_AUTO, &isa, &err) == M3_OK, "%s", err.message);
  check_all(isa);
  return finish("test_speed");
}
