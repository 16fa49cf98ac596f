/* Time of selection and attention of one layer with M3's heads, on one thread: 64 query and 4 KV heads of 128 channels,
 * 4 index heads, blocks of 128, top-k 16; K and V in F16, index keys in F32 and F16, all random.
 *
 *     make bench-msa [> tests/bench/msa.csv]
 *
 * Times are medians of processor time, so that other programs on the machine disturb them little; the last level of the
 * cache is swept before each run, as the rest of a model would do. Beside them stand two speeds of the same run: of
 * multiply-adds on data in the first cache (`peak`) and of reading memory (`read`). `flop_share` is the share of the
 * first, `read_share` that of the second for the index keys that a full scan reads: above 1 where low-bit copies are
 * read in their place. `rescored` is the share of blocks that the low-bit scan scored exactly. */
#include <stdlib.h>
#include <time.h>

#include "cpu/low_bit.h"
#include "world.h"

enum { RUNS = 7, SWEEP = 64 << 20 };

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static uint64_t *memory;

static uint64_t sweep(void) {
  uint64_t sum[4] = {0};
  for (int64_t i = 0; i < SWEEP / 8; i += 4)
    for (int k = 0; k < 4; k++) sum[k] += memory[i + k];
  return sum[0] + sum[1] + sum[2] + sum[3];
}

/* Bytes a second. */
static double read_speed(void) {
  double best = 1e9;
  uint64_t sum = 0;
  for (int i = 0; i < RUNS; i++) {
    double start = seconds();
    sum += sweep();
    best = fmin(best, seconds() - start);
  }
  return sum == 1 ? 0 : SWEEP / best;
}

/* Operations a second, a multiply-add being two. */
static double peak_speed(const m3_kernels *k) {
  static float acc[6 * 16], p[6 * 64], v[64 * 16];
  double best = 1e9;
  for (int i = 0; i < 200; i++) {
    double start = seconds();
    for (int n = 0; n < 100; n++) k->accumulate(&(m3_accumulate){acc, 16, 6, p, 64, v, 16, 64, 16});
    best = fmin(best, seconds() - start);
  }
  return 100.0 * 2 * 6 * 64 * 16 / best;
}

typedef enum operation { SELECT, SELECT_LOW_BIT, ATTEND, ATTEND_DENSE } operation;

static const char *const names[] = {"select", "select, low-bit", "attend", "attend, dense"};

static void copy_keys(world *w) {
  int64_t dim = w->c.index_dim, size = w->c.block_size, bytes = m3_row_bytes(w->c.index_type, dim);
  w->cache.low_bit = keep(w, (size_t)(w->n_pages * m3_low_bit_page_bytes(&w->h)));
  for (int64_t pos = 0; pos < w->c.context; pos++) {
    float key[128];
    int64_t page = w->rows.tables[0][pos / size];
    m3_traits(w->c.index_type)->to_f32((const char *)w->cache.index + (page * size + pos % size) * bytes, key, dim);
    m3_low_bit_store(&w->h, w->cache.low_bit, page, pos % size, key);
  }
}

static void measure(const m3_kernels *k, world *w, operation what, double peak, double read) {
  m3_context x = {.hparams = &w->h, .kernels = k, .scratch = &w->scratch};
  m3_select_params s = {
      .rows = &w->rows, .cache = w->cache, .blocks = w->scratch.blocks, .max_blocks = blocks_of_case(&w->c)};
  if (what != SELECT_LOW_BIT) s.cache.low_bit = NULL;
  m3_attend_params a = {&w->rows, w->cache, what == ATTEND_DENSE ? NULL : w->scratch.blocks, w->scratch.attended, NULL};
  m3_cpu_backend.select(&x, &s);
  double times[RUNS], flop = 0, keys = 0;
  for (int i = 0; i < RUNS; i++) {
    if (sweep() == 1) return;
    double start = seconds();
    if (what == SELECT || what == SELECT_LOW_BIT)
      m3_cpu_backend.select(&x, &s);
    else
      m3_cpu_backend.attend(&x, &a);
    times[i] = seconds() - start;
  }
  qsort(times, RUNS, sizeof *times, ascending);
  double median = times[RUNS / 2];
  for (int32_t r = 0; r < w->n; r++) {
    double seen = (double)w->rows.pos[r] + 1, own = (double)(w->rows.pos[r] % w->c.block_size) + 1;
    double most = (double)((w->c.top_k - 1) * w->c.block_size) + own;
    flop += what == SELECT || what == SELECT_LOW_BIT ? 2.0 * 4 * 128 * seen
                                                     : 4.0 * 64 * 128 * (what == ATTEND && seen > most ? most : seen);
    keys = seen * (double)m3_row_bytes(w->c.index_type, 128);
  }
  double rescored = what == SELECT_LOW_BIT ? (double)w->scratch.blocks_rescored / (double)w->scratch.blocks_bounded : 1;
  bool scan = w->n == 1 && (what == SELECT || what == SELECT_LOW_BIT);
  printf("\"%s\",%s,%s,%d,%lld,%.1f,%.3f,", names[what], k->name, m3_type_name(w->c.index_type), (int)w->n,
         (long long)(w->c.context - w->n), median * 1e6, flop / median / peak);
  scan ? printf("%.3f,%.3f\n", keys / median / read, rescored) : printf(",\n");
  fflush(stdout);
}

int main(void) {
  m3_isa isa;
  if (m3_choose_isa(M3_ISA_AUTO, &isa, NULL)) return 1;
  const m3_kernels *k = m3_kernels_for(isa);
  memory = malloc(SWEEP);
  if (!memory) return 1;
  memset(memory, 1, SWEEP);
  double peak = peak_speed(k), read = read_speed();
  fprintf(stderr, "%s: peak %.1f GFLOP/s, read %.1f GB/s\n", k->name, peak * 1e-9, read * 1e-9);
  printf("operation,isa,index_type,rows,depth,median_us,flop_share,read_share,rescored\n");
  static const int64_t depths[] = {0, 4096, 16384, 32768, 131072};
  for (size_t d = 0; d < sizeof depths / sizeof *depths; d++)
    for (int32_t rows = 1; rows <= 512; rows += 511)
      for (int32_t type = M3_TYPE_F32; type <= M3_TYPE_F16; type++) {
        if ((rows > 1 && depths[d] > 16384) || (rows == 1 && depths[d] == 0)) continue;
        op_case c = {"bench",
                     .n_head = 64,
                     .n_head_kv = 4,
                     .head_dim = 128,
                     .index_dim = 128,
                     .n_rot = 64,
                     .block_size = 128,
                     .n_embd = 8,
                     .n_ff = 8,
                     .n_ff_expert = 8,
                     .n_ff_shared = 8,
                     .n_expert = 1,
                     .n_expert_used = 1,
                     .n_vocab = 8,
                     .top_k = 16,
                     .local_blocks = 1,
                     .n_sequences = 1,
                     .n_rows = rows,
                     .context = depths[d] + rows,
                     .kv_type = M3_TYPE_F16,
                     .index_type = type};
        world *w = new_world(&c, &m3_cpu_backend, 1);
        measure(k, w, SELECT, peak, read);
        if (rows == 1) copy_keys(w), measure(k, w, SELECT_LOW_BIT, peak, read);
        if (type == M3_TYPE_F16) measure(k, w, ATTEND, peak, read);
        if (type == M3_TYPE_F16 && depths[d] <= 4096) measure(k, w, ATTEND_DENSE, peak, read);
        free_world(w);
      }
  free(memory);
  return 0;
}
