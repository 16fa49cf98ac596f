/* Selection and attention beyond the case table: what a row gets does not depend on who is computed with it, and the
 * low-bit scan gives the lists of the full scan on keys made to break it. */
#include <float.h>

#include "cpu/low_bit.h"
#include "world.h"

enum { F32 = M3_TYPE_F32, F16 = M3_TYPE_F16, BF16 = M3_TYPE_BF16, Q8 = M3_TYPE_Q8_0, Q4 = M3_TYPE_Q4_0 };

#define M3_HEADS .n_head = 8, .n_head_kv = 2, .head_dim = 128, .index_dim = 128, .n_rot = 64, .block_size = 128
#define SMALL_FFN \
  .n_embd = 16, .n_ff = 8, .n_ff_expert = 8, .n_ff_shared = 8, .n_expert = 2, .n_expert_used = 1, .n_vocab = 8

/* A backend with its kernels. */
typedef struct engine {
  const m3_backend *backend;
  const m3_kernels *kernels;
  int32_t threads;
} engine;

/* Lists, results and masses of selection and attention for the rows [first, first + n) of a world, as if they were the
 * whole chunk; dense results too. */
typedef struct msa_result {
  int32_t *blocks;
  float *sparse, *mass, *dense;
  int64_t n_lists, n_out, n_mass;
} msa_result;

static msa_result run_msa(const engine *e, world *w, int32_t first, int32_t n) {
  const op_case *c = &w->c;
  m3_scratch scratch = w->scratch;
  scratch.q += (int64_t)first * c->n_head * c->head_dim;
  scratch.index_q += (int64_t)first * c->n_head_kv * c->index_dim;
  m3_context x = {.hparams = &w->h, .kernels = e->kernels, .scratch = &scratch};
  m3_rows rows = w->rows;
  rows.n = n, rows.seq += first, rows.pos += first;
  msa_result r = {.n_lists = (int64_t)n * c->n_head_kv * c->top_k,
                  .n_out = (int64_t)n * c->n_head * c->head_dim,
                  .n_mass = (int64_t)n * c->n_head * c->top_k};
  r.blocks = keep(w, (size_t)r.n_lists * 4);
  r.sparse = keep(w, (size_t)r.n_out * 4), r.dense = keep(w, (size_t)r.n_out * 4);
  r.mass = keep(w, (size_t)r.n_mass * 4);
  m3_select_params s = {.rows = &rows, .cache = w->cache, .blocks = r.blocks, .max_blocks = blocks_of_case(c)};
  CHECK(e->backend->select(&x, &s), "%s: not finite", c->name);
  e->backend->attend(&x, &(m3_attend_params){&rows, w->cache, r.blocks, r.sparse, r.mass});
  e->backend->attend(&x, &(m3_attend_params){&rows, w->cache, NULL, r.dense, NULL});
  return r;
}

/* A row selects and attends to the same bits alone, among neighbors, and with any number of threads. */
static void check_msa_independence(const engine *e) {
  static const int32_t types[][2] = {{F32, F32}, {F16, F16}, {BF16, BF16}, {Q8, Q8}, {Q4, F16}};
  for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
    op_case c = {"independent rows",
                 M3_HEADS,
                 SMALL_FFN,
                 .top_k = 7,
                 .local_blocks = 2,
                 .n_sequences = 2,
                 .n_rows = 13,
                 .context = 1300,
                 .kv_type = types[t][0],
                 .index_type = types[t][1]};
    if (t == 0) c.n_head = 4, c.n_head_kv = 4; /* no two query heads share a KV head */
    world *w = new_world(&c, e->backend, e->threads);
    msa_result all = run_msa(e, w, 0, w->n);
    for (int32_t row = 0; row < w->n; row += 5) {
      msa_result one = run_msa(e, w, row, 1);
      CHECK(memcmp(one.blocks, all.blocks + row * one.n_lists, (size_t)one.n_lists * 4) == 0 &&
                memcmp(one.sparse, all.sparse + row * one.n_out, (size_t)one.n_out * 4) == 0 &&
                memcmp(one.mass, all.mass + row * one.n_mass, (size_t)one.n_mass * 4) == 0 &&
                memcmp(one.dense, all.dense + row * one.n_out, (size_t)one.n_out * 4) == 0,
            "%s, types %d: row %d depends on its neighbors", e->kernels->name, (int)t, row);
    }
    world *v = new_world(&c, e->backend, 1);
    const engine single = {e->backend, e->kernels, 1};
    for (int32_t n = 1; n <= w->n; n += w->n - 1) {
      msa_result a = run_msa(e, w, 0, n), b = run_msa(&single, v, 0, n);
      CHECK(memcmp(a.blocks, b.blocks, (size_t)a.n_lists * 4) == 0 &&
                memcmp(a.sparse, b.sparse, (size_t)a.n_out * 4) == 0 &&
                memcmp(a.mass, b.mass, (size_t)a.n_mass * 4) == 0 && memcmp(a.dense, b.dense, (size_t)a.n_out * 4) == 0,
            "%s, types %d: %d rows depend on the number of threads", e->kernels->name, (int)t, n);
    }
    /* Where every visible block is listed, sparse attention is dense attention. */
    c.context = 7 * c.block_size, c.n_sequences = 1;
    world *short_one = new_world(&c, e->backend, e->threads);
    msa_result r = run_msa(e, short_one, 0, short_one->n);
    CHECK(memcmp(r.sparse, r.dense, (size_t)r.n_out * 4) == 0, "%s, types %d: all blocks are not dense attention",
          e->kernels->name, (int)t);
    free_world(w);
    free_world(v);
    free_world(short_one);
  }
}

/* ---------------------------------------------------------------------------------------------- low-bit scan */

/* Low-bit copies of all keys; pages that no token wrote hold NaN. */
static void add_low_bit(world *w) {
  size_t bytes = (size_t)(w->n_pages * m3_low_bit_page_bytes(&w->h));
  w->cache.low_bit = keep(w, bytes);
  memset(w->cache.low_bit, 0xff, bytes);
}

static void store_key(world *w, int32_t seq, int64_t pos, const float *key) {
  const op_case *c = &w->c;
  int64_t page = w->rows.tables[seq][pos / c->block_size], slot = pos % c->block_size;
  int64_t row = page * c->block_size + slot, bytes = m3_row_bytes(c->index_type, c->index_dim);
  float stored[M3_MAX_HEAD_DIM];
  store_row(c->index_type, w->cache.index, row, key, c->index_dim);
  m3_traits(c->index_type)->to_f32((const char *)w->cache.index + row * bytes, stored, c->index_dim);
  m3_low_bit_store(&w->h, w->cache.low_bit, page, slot, stored);
}

/* What the keys of a world are. */
typedef enum keys {
  RANDOM,
  CLUSTERED, /* blocks around a direction of their own */
  EQUAL,     /* every score a tie */
  FEW,       /* whole numbers: many exact ties, at the cut too */
  NEAR_TIES, /* one unit of the last place apart */
  OUTLIERS,  /* one channel so large that the others have no codes */
  WHOLE,     /* whole numbers up to 127: codes have no error, that of the query remains */
  ZEROS,
  SUBNORMAL,
  MIXED,     /* magnitudes from 1e-44 to 1e14 */
  HUGE_KEYS, /* whose products overflow with the queries of some cases */
  N_KEYS
} keys;

static const char *const key_names[] = {"random", "clustered", "equal",     "few values", "near ties", "outliers",
                                        "whole",  "zeros",     "subnormal", "mixed",      "huge"};

static void make_key(world *w, keys kind, int64_t pos, float *key) {
  int64_t dim = w->c.index_dim;
  uint64_t block_seed = 77 + (uint64_t)(pos / w->c.block_size), fixed = 5;
  float center[M3_MAX_HEAD_DIM];
  fill_random(key, dim, 1.0f, &w->seed);
  switch (kind) {
    case RANDOM: break;
    case CLUSTERED:
      fill_random(center, dim, 1.0f, &block_seed);
      for (int64_t i = 0; i < dim; i++) key[i] = center[i] + 0.1f * key[i];
      break;
    case EQUAL: fill_random(key, dim, 1.0f, &fixed); break;
    case FEW:
      for (int64_t i = 0; i < dim; i++) key[i] = i < 2 ? (float)(next_random(&w->seed) % 3) : 1.0f;
      break;
    case NEAR_TIES:
      fill_random(key, dim, 1.0f, &fixed);
      key[pos % dim] = nextafterf(key[pos % dim], next_random(&w->seed) % 2 ? INFINITY : -INFINITY);
      break;
    case OUTLIERS: key[pos % 3] = (pos % 2 ? 1e6f : -1e6f) * (1 + fabsf(key[0])); break;
    case WHOLE:
      for (int64_t i = 0; i < dim; i++) key[i] = i == pos % dim ? 127 : (float)(next_random(&w->seed) % 255) - 127;
      break;
    case ZEROS:
      if (pos % 7) memset(key, 0, (size_t)dim * sizeof *key);
      break;
    case SUBNORMAL:
      for (int64_t i = 0; i < dim; i++) key[i] *= 1e-40f;
      break;
    case MIXED:
      for (int64_t i = 0; i < dim; i++) key[i] *= powf(10.0f, (float)(next_random(&w->seed) % 59) - 44.0f);
      break;
    default:
      for (int64_t i = 0; i < dim; i++) key[i] *= pos % 50 ? 1.0f : 1e37f;
  }
}

static int64_t last_bounded, last_rescored; /* blocks, by the last comparison */

/* Whether scores are finite. */
typedef enum expectation { FINITE, BROKEN, EITHER } expectation;

/* Lists of both scans of row `row`: equal, and equal in whether a score is not finite. The bounds are above the scores.
 */
static void compare_scans(const engine *e, world *w, int32_t row, const char *what, expectation expected) {
  const op_case *c = &w->c;
  m3_scratch scratch = w->scratch;
  scratch.index_q += (int64_t)row * c->n_head_kv * c->index_dim;
  m3_context x = {.hparams = &w->h, .kernels = e->kernels, .scratch = &scratch};
  m3_rows rows = w->rows;
  rows.n = 1, rows.seq += row, rows.pos += row;
  int64_t n = (int64_t)c->n_head_kv * c->top_k;
  int32_t *full = calloc((size_t)n, 4), *low = calloc((size_t)n, 4);
  m3_select_params p = {.rows = &rows, .cache = w->cache, .blocks = low, .max_blocks = blocks_of_case(c)};
  bool low_finite = e->backend->select(&x, &p);
  int64_t bounded = scratch.blocks_bounded, rescored = scratch.blocks_rescored;
  p.cache.low_bit = NULL, p.blocks = full;
  bool full_finite = e->backend->select(&x, &p);
  CHECK(low_finite == full_finite && (expected == EITHER || full_finite == (expected == FINITE)),
        "%s, %s, %s: finite by the low-bit scan: %d, by the full scan: %d", c->name, e->kernels->name, what, low_finite,
        full_finite);
  CHECK(memcmp(full, low, (size_t)n * 4) == 0 || !full_finite, "%s, %s, %s, type %d: other lists", c->name,
        e->kernels->name, what, (int)c->index_type);
  CHECK(scratch.blocks_bounded == bounded && rescored <= bounded, "%s: counted %lld of %lld blocks", what,
        (long long)rescored, (long long)bounded);
  last_bounded = bounded, last_rescored = rescored;
  free(full);
  free(low);
}

static void check_low_bit(const engine *e) {
  static const op_case cases[] = {
      {"M3 heads", M3_HEADS, SMALL_FFN, .top_k = 4, .local_blocks = 1, .n_sequences = 1, .n_rows = 2, .context = 2001},
      {"odd heads", .n_head = 5, .n_head_kv = 5, .head_dim = 8, .index_dim = 40, .n_rot = 8, .block_size = 16,
       SMALL_FFN, .top_k = 6, .local_blocks = 2, .n_sequences = 1, .n_rows = 2, .context = 1500},
      {"only local", .n_head = 2, .n_head_kv = 2, .head_dim = 8, .index_dim = 24, .n_rot = 8, .block_size = 16,
       SMALL_FFN, .top_k = 3, .local_blocks = 3, .n_sequences = 1, .n_rows = 1, .context = 500},
      {"1024 channels", .n_head = 1, .n_head_kv = 1, .head_dim = 8, .index_dim = 1024, .n_rot = 8, .block_size = 16,
       SMALL_FFN, .top_k = 3, .local_blocks = 1, .n_sequences = 1, .n_rows = 1, .context = 400}};
  static const int32_t types[] = {F32, F16, BF16, Q8};
  for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
      op_case c = cases[k];
      c.index_type = types[t];
      if (c.index_dim % m3_type_block_size(c.index_type) || (e->threads > 1 && t > 0)) continue;
      world *w = new_world(&c, e->backend, e->threads);
      add_low_bit(w);
      for (int kind = 0; kind < N_KEYS; kind++) {
        /* Beyond what the 16-bit and 8-bit types hold. */
        if (c.index_type != F32 && c.index_type != BF16 && (kind == OUTLIERS || kind == MIXED || kind == HUGE_KEYS))
          continue;
        float key[M3_MAX_HEAD_DIM];
        for (int64_t pos = 0; pos < c.context; pos++) make_key(w, (keys)kind, pos, key), store_key(w, 0, pos, key);
        double bounded = 0, rescored = 0; /* for queries as they are */
        for (int32_t row = 0; row < w->n; row++) {
          /* Queries as they are, one of them zero, all tiny, all large, and one that ties everything. */
          for (int q = 0; q < (row ? 1 : 5); q++) {
            float *x = w->scratch.index_q + (int64_t)row * c.n_head_kv * c.index_dim, before[M3_MAX_HEAD_DIM * 5];
            int64_t n = (int64_t)c.n_head_kv * c.index_dim;
            memcpy(before, x, (size_t)n * 4);
            for (int64_t i = 0; i < n; i++)
              x[i] = q == 0   ? x[i]
                     : q == 1 ? (i < c.index_dim ? 0 : x[i])
                     : q == 2 ? x[i] * 1e-42f
                     : q == 3 ? x[i] * 3e4f
                              : i % 3 == 0;
            compare_scans(e, w, row, key_names[kind], kind == HUGE_KEYS ? EITHER : FINITE);
            if (q == 0) bounded += (double)last_bounded, rescored += (double)last_rescored;
            memcpy(x, before, (size_t)n * 4);
          }
        }
        if (e->kernels == &m3_kernels_scalar && e->threads == 1 && c.index_type == F32)
          printf("%s, %s keys: %.0f%% of the blocks rescored\n", c.name, key_names[kind], 100 * rescored / bounded);
      }
      free_world(w);
    }
}

/* NaN and infinity in any visible key or query are refused as by the full scan; in keys that the row does not see they
 * are not. */
static void check_low_bit_not_finite(const engine *e) {
  static const float bad[] = {NAN, INFINITY, -INFINITY};
  op_case c = {"not finite",      M3_HEADS,         SMALL_FFN,   .top_k = 4,
               .local_blocks = 2, .n_sequences = 1, .n_rows = 1, .context = 1500};
  static const struct {
    int64_t pos;
    bool seen;
  } places[] = {{3, true}, {700, true}, {1300, true}, {1499, true}, {1500, false}};
  for (int b = 0; b < 3; b++)
    for (int i = 0; i < 5; i++) {
      world *w = new_world(&c, e->backend, e->threads);
      add_low_bit(w);
      float key[128];
      for (int64_t pos = 0; pos < c.context; pos++) fill_random(key, 128, 1.0f, &w->seed), store_key(w, 0, pos, key);
      key[77] = bad[b];
      store_key(w, 0, places[i].pos, key);
      compare_scans(e, w, 0, "a broken key", places[i].seen ? BROKEN : FINITE);
      if (!places[i].seen) {
        w->scratch.index_q[200] = bad[b];
        compare_scans(e, w, 0, "a broken query", BROKEN);
      }
      free_world(w);
    }
}

/* A query along the error of a key, which is the worst one for it. */
static void align(world *w, int64_t pos, const float *key, float *query) {
  int64_t dim = w->c.index_dim, size = w->c.block_size, page = w->rows.tables[0][0];
  const char *base = (const char *)w->cache.low_bit + page * m3_low_bit_page_bytes(&w->h);
  const float *pairs = (const float *)(const void *)base;
  const int8_t *codes = (const int8_t *)(pairs + 2 * size) + pos * m3_low_bit_stride(dim);
  for (int64_t i = 0; i < dim; i++) query[i] = 50 * (key[i] - pairs[2 * pos] * (float)codes[i]);
}

/* Bounds of one page: the same bits in every table, and above the scores in double precision. */
static void check_bounds(const engine *e) {
  for (int kind = 0; kind < HUGE_KEYS; kind++)
    for (int32_t heads = 1; heads <= 6; heads++) {
      op_case c = {"bounds",         .n_head = heads,  .n_head_kv = heads, .head_dim = 8, .index_dim = 72,
                   .n_rot = 8,       .block_size = 16, SMALL_FFN,          .top_k = 2,    .local_blocks = 1,
                   .n_sequences = 1, .n_rows = 1,      .context = 16};
      world *w = new_world(&c, e->backend, 1);
      add_low_bit(w);
      float keys_of[16][72];
      for (int64_t pos = 0; pos < 16; pos++)
        make_key(w, (keys)kind, pos, keys_of[pos]), store_key(w, 0, pos, keys_of[pos]);
      for (int32_t h = 1; h < heads; h++) align(w, h, keys_of[h], w->scratch.index_q + h * 72);
      int16_t codes[4 * 96];
      m3_low_bit_queries queries = {.codes = codes};
      for (int64_t first = 0; first < heads; first += 4)
        for (int64_t n = 1; n <= 16; n += 5) {
          float got[4], want[4];
          m3_low_bit_tokens tokens = {w->cache.low_bit, w->rows.tables[0][0], n, -1};
          CHECK(m3_low_bit_queries_of(&w->h, w->scratch.index_q, first, &queries), "queries without bounds");
          m3_low_bit_bounds(&w->h, e->kernels, &tokens, &queries, got);
          m3_low_bit_bounds(&w->h, &m3_kernels_scalar, &tokens, &queries, want);
          CHECK(memcmp(got, want, sizeof got) == 0, "%s: bounds of %s keys differ from the scalar ones",
                e->kernels->name, key_names[kind]);
          for (int64_t h = 0; h < 4 && first + h < heads; h++)
            for (int64_t j = 0; j < n; j++) {
              double score = 0;
              for (int i = 0; i < 72; i++)
                score += (double)w->scratch.index_q[(first + h) * 72 + i] * (double)keys_of[j][i];
              CHECK((double)got[h] >= score, "%s keys: bound %g of a score %g", key_names[kind], (double)got[h], score);
            }
        }
      free_world(w);
    }
}

int main(void) {
  static const m3_isa isas[] = {M3_ISA_SCALAR, M3_ISA_AVX2, M3_ISA_AVX512, M3_ISA_NEON};
  for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
    m3_isa isa;
    m3_error err;
    if (m3_choose_isa((int32_t)isas[i], &isa, &err)) {
      printf("not run here: %s\n", err.message);
      continue;
    }
    for (int32_t threads = 1; threads <= 3; threads += 2) {
      engine e = {&m3_cpu_backend, m3_kernels_for(isa), threads};
      printf("cpu, %s, %d threads\n", e.kernels->name, (int)threads);
      check_msa_independence(&e);
      check_low_bit(&e);
      check_low_bit_not_finite(&e);
      check_bounds(&e);
    }
  }
  return finish("test_msa");
}
