/* Block selection as in MSA (arXiv 2606.13392), with ties to the lower block id: the specification of every other
 * backend.
 *
 * Many rows: a task takes neighboring rows of one sequence, goes over the blocks that they see, and keeps the best
 * blocks of each row and head as it goes. Few rows: the blocks of a row are shared out among the threads. Scores come
 * from the same products either way, so that the lists are the same. */
#include <math.h>

#include "cpu/block_list.h"
#include "cpu/cpu.h"

#define KEYS 128    /* of a block that are converted together for many queries */
#define FEW_KEYS 32 /* for the queries of one row: these stay in the first cache */
#define QUERIES 16  /* whose products with them are computed together */
#define MAX_ROWS 64 /* that one task takes together */

/* Rows that share the conversion of keys; their queries stay in the second cache. */
static int64_t rows_together(const m3_hparams *h) {
  int64_t rows = 128 / h->n_index_head;
  return rows < 1 ? 1 : rows > MAX_ROWS ? MAX_ROWS : rows;
}

/* A thread's buffers. */
typedef struct buffers {
  float *keys;    /* [KEYS, index_dim] converted */
  float *product; /* [QUERIES, KEYS] */
  float *best;    /* [rows_together, n_index_head] of the block at work */
  float *kept;    /* [rows_together, n_index_head, top_k] scores of the lists */
  float *scores;  /* [n_index_head, max_blocks] of a single row */
} buffers;

int64_t m3_select_floats(const m3_hparams *h, int64_t max_blocks) {
  int64_t queries = rows_together(h) * h->n_index_head;
  return (int64_t)KEYS * h->index_dim + QUERIES * KEYS + queries * (1 + h->top_k) + h->n_index_head * max_blocks;
}

static buffers buffers_of(const m3_context *c, int64_t thread) {
  const m3_hparams *h = c->hparams;
  int64_t queries = rows_together(h) * h->n_index_head;
  buffers b;
  b.keys = c->scratch->thread + thread * c->scratch->thread_floats;
  b.product = b.keys + (int64_t)KEYS * h->index_dim;
  b.best = b.product + QUERIES * KEYS;
  b.kept = b.best + queries;
  b.scores = b.kept + queries * h->top_k;
  return b;
}

static int64_t blocks_of(const m3_context *c, const m3_select_params *p, int64_t row) {
  return p->rows->pos[row] / c->hparams->block_size + 1;
}

/* Without a choice every visible block is read, whatever its score. */
static bool chooses(const m3_context *c, const m3_select_params *p, int64_t row) {
  return blocks_of(c, p, row) > c->hparams->top_k || p->scores;
}

/* Tokens of a block that a row sees, not positive if none. */
static int64_t visible(const m3_context *c, const m3_select_params *p, int64_t row, int64_t block) {
  int64_t size = c->hparams->block_size, n = p->rows->pos[row] + 1 - block * size;
  return n < size ? n : size;
}

static int32_t *list_of(const m3_context *c, const m3_select_params *p, int64_t row, int64_t head) {
  return p->blocks + (row * c->hparams->n_index_head + head) * c->hparams->top_k;
}

/* ---------------------------------------------------------------------------------------------- scores */

/* One block and the queries of rows [first, first + n) of one sequence, all their heads. */
typedef struct scoring {
  int64_t block, first, n;
  int64_t keys; /* converted together */
  const void *next;
} scoring;

/* best[row, head] = largest q . k of the block's tokens that the row sees, -infinity if it sees none. False if a
 * product is not finite. */
static bool score_block(const m3_context *c, const m3_select_params *p, scoring s, const buffers *b, float *best) {
  const m3_hparams *h = c->hparams;
  int64_t dim = h->index_dim, heads = h->n_index_head, queries = s.n * heads, tokens = 0;
  for (int64_t r = s.first; r < s.first + s.n; r++)
    if (visible(c, p, r, s.block) > tokens) tokens = visible(c, p, r, s.block);
  int64_t page = p->rows->tables[p->rows->seq[s.first]][s.block], row_bytes = m3_row_bytes(p->cache.index_type, dim);
  const char *src = (const char *)p->cache.index + page * h->block_size * row_bytes;
  const float *x = c->scratch->index_q + s.first * heads * dim;
  bool finite = true;
  for (int64_t i = 0; i < queries; i++) best[i] = -INFINITY;
  for (int64_t j = 0; j < tokens; j += s.keys) {
    int64_t n = tokens - j < s.keys ? tokens - j : s.keys;
    const float *keys = (const float *)(const void *)(src + j * row_bytes);
    if (p->cache.index_type != M3_TYPE_F32) {
      m3_convert_row(c->kernels, p->cache.index_type, keys, b->keys, n * dim);
      keys = b->keys;
    }
    for (int64_t first = 0; first < queries; first += QUERIES) {
      int64_t n_x = queries - first < QUERIES ? queries - first : QUERIES;
      c->kernels->dots(&(m3_dots){.rows = keys,
                                  .row_stride = dim,
                                  .n_rows = n,
                                  .x = x + first * dim,
                                  .x_stride = dim,
                                  .n_x = n_x,
                                  .n = dim,
                                  .out = b->product,
                                  .out_stride = KEYS,
                                  .next = s.next && j + n == tokens ? s.next : src + (j + n) * row_bytes,
                                  .next_bytes = first == 0 && (s.next || j + n < tokens) ? n * row_bytes : 0});
      for (int64_t i = first; i < first + n_x; i++) {
        int64_t seen = visible(c, p, s.first + i / heads, s.block) - j;
        if (seen <= 0) continue;
        float most = c->kernels->largest(b->product + (i - first) * KEYS, seen < n ? seen : n, &finite);
        if (most > best[i]) best[i] = most;
      }
    }
  }
  return finite;
}

static void record(const m3_context *c, const m3_select_params *p, int64_t row, int64_t block, const float *best) {
  for (int64_t head = 0; p->scores && head < c->hparams->n_index_head; head++)
    p->scores[(row * c->hparams->n_index_head + head) * p->n_blocks + block] = best[head];
}

/* ---------------------------------------------------------------------------------------------- many rows */

/* Rows [first, first + n) of one sequence, n at most rows_together. */
static bool select_rows(const m3_context *c, const m3_select_params *p, int64_t first, int64_t n, const buffers *b) {
  const m3_hparams *h = c->hparams;
  int64_t heads = h->n_index_head, end = 0;
  m3_block_list lists[M3_MAX_HEADS];
  bool finite = true;
  for (int64_t i = 0; i < n * heads; i++) {
    int64_t row = first + i / heads;
    lists[i] = m3_block_list_start(h, blocks_of(c, p, row), list_of(c, p, row, i % heads), b->kept + i * h->top_k);
    if (chooses(c, p, row) && blocks_of(c, p, row) > end) end = blocks_of(c, p, row);
    for (int64_t block = blocks_of(c, p, row); p->scores && block < p->n_blocks; block++)
      p->scores[(row * heads + i % heads) * p->n_blocks + block] = -INFINITY;
  }
  for (int64_t block = 0; block < end; block++) {
    int64_t from = 0; /* rows before it need no score of this block */
    while (block >= blocks_of(c, p, first + from) || !chooses(c, p, first + from)) from++;
    finite &= score_block(c, p, (scoring){block, first + from, n - from, KEYS, NULL}, b, b->best);
    for (int64_t r = from; r < n; r++) {
      const float *best = b->best + (r - from) * heads;
      if (block >= blocks_of(c, p, first + r)) continue;
      record(c, p, first + r, block, best);
      if (block >= m3_competing_blocks(h, blocks_of(c, p, first + r))) continue;
      for (int64_t head = 0; head < heads; head++) m3_block_list_add(&lists[r * heads + head], block, best[head]);
    }
  }
  for (int64_t i = 0; i < n * heads; i++) {
    int64_t n_blocks = blocks_of(c, p, first + i / heads);
    if (n_blocks > h->top_k)
      m3_block_list_finish(&lists[i], h, n_blocks);
    else
      m3_block_list_all(h, n_blocks, lists[i].ids);
  }
  return finite;
}

static bool select_tiles(const m3_context *c, const m3_select_params *p) {
  int64_t wanted = 4 * (int64_t)c->scratch->n_threads, size = p->rows->n / wanted, most = rows_together(c->hparams);
  size = size < 1 ? 1 : size > most ? most : size;
  bool finite = true;
#pragma omp parallel num_threads(c->scratch->n_threads) reduction(&& : finite)
  {
    buffers b = buffers_of(c, m3_thread_index());
#pragma omp for schedule(dynamic)
    for (int64_t first = 0; first < p->rows->n; first += size) {
      int64_t end = first + size < p->rows->n ? first + size : p->rows->n;
      for (int64_t from = first, to; from < end; from = to) { /* rows of one sequence */
        for (to = from + 1; to < end && p->rows->seq[to] == p->rows->seq[from];) to++;
        bool ok = select_rows(c, p, from, to - from, &b);
        finite = finite && ok;
      }
    }
  }
  return finite;
}

/* ---------------------------------------------------------------------------------------------- single rows */

/* One row, its blocks shared out among the threads. */
static bool select_single(const m3_context *c, const m3_select_params *p, int64_t row) {
  const m3_hparams *h = c->hparams;
  int64_t n_blocks = blocks_of(c, p, row), heads = h->n_index_head;
  buffers shared = buffers_of(c, 0); /* thread 0's scores and lists */
  const int32_t *table = p->rows->tables[p->rows->seq[row]];
  int64_t page_bytes = h->block_size * m3_row_bytes(p->cache.index_type, h->index_dim);
  bool finite = true;
#pragma omp parallel num_threads(m3_threads_for(c, n_blocks * h->block_size * h->index_dim * heads)) \
    reduction(&& : finite)
  {
    buffers b = buffers_of(c, m3_thread_index());
#pragma omp for schedule(static)
    for (int64_t block = 0; block < n_blocks; block++) {
      const char *next = block + 1 < n_blocks ? (const char *)p->cache.index + table[block + 1] * page_bytes : NULL;
      bool ok = score_block(c, p, (scoring){block, row, 1, FEW_KEYS, next}, &b, b.best);
      finite = finite && ok;
      for (int64_t head = 0; head < heads; head++) shared.scores[head * p->max_blocks + block] = b.best[head];
    }
  }
  for (int64_t head = 0; head < heads; head++) {
    const float *scores = shared.scores + head * p->max_blocks;
    m3_block_list list = m3_block_list_start(h, n_blocks, list_of(c, p, row, head), shared.kept);
    for (int64_t b = 0; b < m3_competing_blocks(h, n_blocks); b++) m3_block_list_add(&list, b, scores[b]);
    m3_block_list_finish(&list, h, n_blocks);
  }
  return finite;
}

bool m3_cpu_select(const m3_context *c, const m3_select_params *p) {
  if (p->scores || p->rows->n >= 2 * c->scratch->n_threads) return select_tiles(c, p);
  bool finite = true;
  for (int64_t row = 0; row < p->rows->n; row++) {
    if (chooses(c, p, row)) {
      finite &= select_single(c, p, row);
      continue;
    }
    for (int64_t head = 0; head < c->hparams->n_index_head; head++)
      m3_block_list_all(c->hparams, blocks_of(c, p, row), list_of(c, p, row, head));
  }
  return finite;
}
