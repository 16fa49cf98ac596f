/* Block selection as in MSA (arXiv 2606.13392), with ties to the lower block id: the specification of every other
 * backend.
 *
 * Many rows: a task takes neighboring rows of one sequence, goes over the blocks that they see, and keeps the best
 * blocks of each row and head as it goes. Few rows: the blocks of a row are shared out among the threads. Scores come
 * from the same products either way, so that the lists are the same. */
#include <math.h>

#include "cpu/low_bit.h"
#include "cpu/select.h"

#define KEYS 128    /* of a block that are converted together for many queries */
#define QUERIES 16  /* whose products with them are computed together */
#define MAX_ROWS 64 /* that one task takes together */

/* Rows that share the conversion of keys; their queries stay in the second cache. */
static int64_t rows_together(const m3_hparams *h) {
  int64_t rows = 128 / h->n_index_head;
  return rows < 1 ? 1 : rows > MAX_ROWS ? MAX_ROWS : rows;
}

/* Floats whose place the codes of a row's queries take. */
static int64_t query_floats(const m3_hparams *h) {
  return (h->n_index_head + 3) / 4 * 4 * m3_low_bit_stride(h->index_dim) / 2;
}

int64_t m3_select_floats(const m3_hparams *h, int64_t max_blocks) {
  int64_t queries = rows_together(h) * h->n_index_head;
  return (int64_t)KEYS * h->index_dim + QUERIES * KEYS + queries * (1 + h->top_k) + (h->n_index_head + 2) * max_blocks +
         query_floats(h);
}

m3_select_buffers m3_select_buffers_of(const m3_context *c, const m3_select_params *p, int64_t thread) {
  const m3_hparams *h = c->hparams;
  int64_t queries = rows_together(h) * h->n_index_head;
  m3_select_buffers b;
  b.keys = c->scratch->thread + thread * c->scratch->thread_floats;
  b.product = b.keys + (int64_t)KEYS * h->index_dim;
  b.best = b.product + QUERIES * KEYS;
  b.kept = b.best + queries;
  b.scores = b.kept + queries * h->top_k;
  b.queries = (int16_t *)(void *)(b.scores + (h->n_index_head + 2) * p->max_blocks);
  b.marks = (int32_t *)(void *)(b.scores + h->n_index_head * p->max_blocks);
  return b;
}

/* Without a choice every visible block is read, whatever its score. */
static bool chooses(const m3_context *c, const m3_select_params *p, int64_t row) {
  return m3_seen_blocks(c, p, row) > c->hparams->top_k || p->scores;
}

/* ---------------------------------------------------------------------------------------------- scores */

bool m3_score_block(const m3_context *c, const m3_select_params *p, m3_scoring s, const m3_select_buffers *b,
                    float *best) {
  const m3_hparams *h = c->hparams;
  int64_t dim = h->index_dim, heads = h->n_index_head, queries = s.n * heads, tokens = 0;
  for (int64_t r = s.first; r < s.first + s.n; r++)
    if (m3_seen_tokens(c, p, r, s.block) > tokens) tokens = m3_seen_tokens(c, p, r, s.block);
  int64_t row_bytes = m3_row_bytes(p->cache.index_type, dim);
  const char *src = m3_index_keys(c, p, s.first, s.block);
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
        int64_t seen = m3_seen_tokens(c, p, s.first + i / heads, s.block) - j;
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
static bool select_rows(const m3_context *c, const m3_select_params *p, int64_t first, int64_t n,
                        const m3_select_buffers *b) {
  const m3_hparams *h = c->hparams;
  int64_t heads = h->n_index_head, end = 0;
  m3_block_list lists[M3_MAX_HEADS];
  bool finite = true;
  for (int64_t i = 0; i < n * heads; i++) {
    int64_t row = first + i / heads;
    lists[i] =
        m3_block_list_start(h, m3_seen_blocks(c, p, row), m3_list_of(c, p, row, i % heads), b->kept + i * h->top_k);
    if (chooses(c, p, row) && m3_seen_blocks(c, p, row) > end) end = m3_seen_blocks(c, p, row);
    for (int64_t block = m3_seen_blocks(c, p, row); p->scores && block < p->n_blocks; block++)
      p->scores[(row * heads + i % heads) * p->n_blocks + block] = -INFINITY;
  }
  for (int64_t block = 0; block < end; block++) {
    int64_t from = 0; /* rows before it need no score of this block */
    while (block >= m3_seen_blocks(c, p, first + from) || !chooses(c, p, first + from)) from++;
    finite &= m3_score_block(c, p, (m3_scoring){block, first + from, n - from, KEYS, NULL}, b, b->best);
    for (int64_t r = from; r < n; r++) {
      const float *best = b->best + (r - from) * heads;
      if (block >= m3_seen_blocks(c, p, first + r)) continue;
      record(c, p, first + r, block, best);
      if (block >= m3_competing_blocks(h, m3_seen_blocks(c, p, first + r))) continue;
      for (int64_t head = 0; head < heads; head++) m3_block_list_add(&lists[r * heads + head], block, best[head]);
    }
  }
  for (int64_t i = 0; i < n * heads; i++) {
    int64_t n_blocks = m3_seen_blocks(c, p, first + i / heads);
    if (n_blocks > h->top_k)
      m3_block_list_finish(&lists[i], h, n_blocks);
    else
      m3_block_list_all(h, n_blocks, lists[i].ids);
  }
  return finite;
}

static bool select_tiles(const m3_context *c, const m3_select_params *p, int32_t threads) {
  int64_t wanted = 4 * (int64_t)threads, size = p->rows->n / wanted, most = rows_together(c->hparams);
  size = size < 1 ? 1 : size > most ? most : size;
  bool finite = true;
#pragma omp parallel num_threads(threads) reduction(&& : finite)
  {
    m3_select_buffers b = m3_select_buffers_of(c, p, m3_thread_index());
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
  int64_t n_blocks = m3_seen_blocks(c, p, row), heads = h->n_index_head;
  m3_select_buffers shared = m3_select_buffers_of(c, p, 0); /* thread 0's scores and lists */
  bool finite = true;
#pragma omp parallel num_threads(m3_threads_for(c, n_blocks * h->block_size * h->index_dim * heads)) \
    reduction(&& : finite)
  {
    m3_select_buffers b = m3_select_buffers_of(c, p, m3_thread_index());
#pragma omp for schedule(static)
    for (int64_t block = 0; block < n_blocks; block++) {
      const void *next = block + 1 < n_blocks ? m3_index_keys(c, p, row, block + 1) : NULL;
      bool ok = m3_score_block(c, p, (m3_scoring){block, row, 1, M3_FEW_KEYS, next}, &b, b.best);
      finite = finite && ok;
      for (int64_t head = 0; head < heads; head++) shared.scores[head * p->max_blocks + block] = b.best[head];
    }
  }
  for (int64_t head = 0; head < heads; head++) {
    const float *scores = shared.scores + head * p->max_blocks;
    m3_block_list list = m3_block_list_start(h, n_blocks, m3_list_of(c, p, row, head), shared.kept);
    for (int64_t b = 0; b < m3_competing_blocks(h, n_blocks); b++) m3_block_list_add(&list, b, scores[b]);
    m3_block_list_finish(&list, h, n_blocks);
  }
  return finite;
}

/* Rows that the low-bit scan takes one by one; for more the full scan shares keys among them. */
#define LOW_BIT_ROWS 8

bool m3_cpu_select(const m3_context *c, const m3_select_params *p) {
  bool low_bit = p->cache.low_bit && p->rows->n <= LOW_BIT_ROWS && p->max_blocks >= p->low_bit_from;
  const m3_hparams *h = c->hparams;
  int64_t keys = p->max_blocks > h->top_k || p->scores ? p->max_blocks * h->block_size : 0;
  int32_t threads = m3_threads_for(c, (int64_t)p->rows->n * h->n_index_head * h->index_dim * keys);
  if (p->scores || (p->rows->n >= 2 * threads && !low_bit)) return select_tiles(c, p, threads);
  bool finite = true;
  for (int64_t row = 0; row < p->rows->n; row++) {
    int64_t n_blocks = m3_seen_blocks(c, p, row);
    if (!chooses(c, p, row)) {
      for (int64_t head = 0; head < h->n_index_head; head++)
        m3_block_list_all(h, n_blocks, m3_list_of(c, p, row, head));
      continue;
    }
    if (low_bit && n_blocks >= p->low_bit_from && m3_select_low_bit(c, p, row, &finite)) continue;
    finite &= select_single(c, p, row);
  }
  return finite;
}
