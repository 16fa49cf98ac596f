/* The scan of int8 index keys: every block gets an upper bound of its score for each head, the blocks with the highest
 * bounds are scored exactly, and then those whose bounds do not rule them out. What is left out scores below the last
 * block of the list, so that ties at the cut are all scored and the lists are those of the full scan. */
#include <math.h>
#include <string.h>

#include "cpu/low_bit.h"
#include "cpu/select.h"

/* Vectors of four queries that fit in the work of one row. */
typedef struct scan {
  const m3_context *c;
  const m3_select_params *p;
  int64_t row, n_blocks;
  m3_select_buffers shared; /* thread 0's scores: bounds, and exact scores where `scored` is set */
  int32_t *scored;          /* [n_blocks] 0 or 1 */
  int32_t *todo;            /* blocks to be scored */
  int64_t n_todo;
} scan;

static void bound_block(const scan *s, int64_t block, const m3_low_bit_queries *queries) {
  const m3_hparams *h = s->c->hparams;
  const int32_t *table = s->p->rows->tables[s->p->rows->seq[s->row]];
  m3_low_bit_tokens tokens = {s->p->cache.low_bit, table[block], m3_seen_tokens(s->c, s->p, s->row, block),
                              block + 1 < s->n_blocks ? table[block + 1] : -1};
  for (int64_t first = 0; first < h->n_index_head; first += 4) {
    float bounds[4];
    m3_low_bit_bounds(h, s->c->kernels, &tokens, &queries[first / 4], bounds);
    for (int64_t i = 0; i < 4 && first + i < h->n_index_head; i++)
      s->shared.scores[(first + i) * s->p->max_blocks + block] = bounds[i];
  }
}

/* Block number i of those to be scored. */
static bool score_block(const scan *s, int64_t i, const m3_select_buffers *b) {
  int64_t block = s->todo[i];
  const void *next = i + 1 < s->n_todo ? m3_index_keys(s->c, s->p, s->row, s->todo[i + 1]) : NULL;
  bool ok = m3_score_block(s->c, s->p, (m3_scoring){block, s->row, 1, M3_FEW_KEYS, next}, b, b->best);
  for (int64_t head = 0; head < s->c->hparams->n_index_head; head++)
    s->shared.scores[head * s->p->max_blocks + block] = b->best[head];
  return ok;
}

static void add_todo(scan *s, int64_t block) {
  if (s->scored[block]) return;
  s->scored[block] = 1;
  s->todo[s->n_todo++] = (int32_t)block;
}

/* The competing blocks with the best scores of one head, best first: of all or of the scored ones. */
static m3_block_list best_of(const scan *s, int64_t head, bool only_scored) {
  const m3_hparams *h = s->c->hparams;
  const float *scores = s->shared.scores + head * s->p->max_blocks;
  m3_block_list l = m3_block_list_start(h, s->n_blocks, m3_list_of(s->c, s->p, s->row, head), s->shared.kept);
  for (int64_t b = 0; b < m3_competing_blocks(h, s->n_blocks); b++)
    if (!only_scored || s->scored[b]) m3_block_list_add(&l, b, scores[b]);
  return l;
}

/* The blocks with the highest bounds. */
static void seed(scan *s) {
  memset(s->scored, 0, (size_t)s->n_blocks * sizeof *s->scored);
  s->n_todo = 0;
  for (int64_t head = 0; head < s->c->hparams->n_index_head; head++) {
    m3_block_list l = best_of(s, head, false);
    for (int64_t i = 0; i < l.n; i++) add_todo(s, l.ids[i]);
  }
}

/* The blocks that may score as high as the last one of a list so far, and those that have no bound. */
static void survivors(scan *s) {
  int64_t competing = m3_competing_blocks(s->c->hparams, s->n_blocks);
  int64_t heads = s->c->hparams->n_index_head;
  float *cut = s->shared.best; /* all of them first: what is added is marked before it is scored */
  for (int64_t head = 0; head < heads; head++) {
    m3_block_list l = best_of(s, head, true);
    cut[head] = l.room ? l.scores[l.n - 1] : INFINITY; /* the seeds have filled the list */
  }
  s->n_todo = 0;
  for (int64_t head = 0; head < heads; head++) {
    const float *bounds = s->shared.scores + head * s->p->max_blocks;
    for (int64_t b = 0; b < s->n_blocks; b++)
      if (!s->scored[b] && bounds[b] >= (b < competing ? cut[head] : INFINITY)) add_todo(s, b);
  }
}

bool m3_select_low_bit(const m3_context *c, const m3_select_params *p, int64_t row, bool *finite) {
  const m3_hparams *h = c->hparams;
  scan s = {c, p, row, m3_seen_blocks(c, p, row), m3_select_buffers_of(c, p, 0), NULL, NULL, 0};
  s.scored = s.shared.marks, s.todo = s.scored + p->max_blocks;
  m3_low_bit_queries queries[M3_MAX_HEADS / 4];
  const float *q = c->scratch->index_q + row * h->n_index_head * h->index_dim;
  for (int64_t i = 0; i < h->n_index_head; i += 4) {
    queries[i / 4].codes = s.shared.queries + i * m3_low_bit_stride(h->index_dim);
    if (!m3_low_bit_queries_of(h, q, i, &queries[i / 4])) return false;
  }
  bool ok = true;
#pragma omp parallel num_threads(m3_threads_for(c, s.n_blocks * h->block_size * h->index_dim)) reduction(&& : ok)
  {
    m3_select_buffers b = m3_select_buffers_of(c, p, m3_thread_index());
#pragma omp for schedule(static)
    for (int64_t block = 0; block < s.n_blocks; block++) bound_block(&s, block, queries);
    for (int step = 0; step < 2; step++) {
#pragma omp single
      {
        if (step == 0)
          seed(&s);
        else
          survivors(&s);
        c->scratch->blocks_rescored += s.n_todo;
      }
#pragma omp for schedule(static)
      for (int64_t i = 0; i < s.n_todo; i++) {
        bool good = score_block(&s, i, &b);
        ok = ok && good;
      }
    }
  }
  c->scratch->blocks_bounded += s.n_blocks;
  *finite &= ok;
  for (int64_t head = 0; head < h->n_index_head; head++) {
    m3_block_list l = best_of(&s, head, true);
    m3_block_list_finish(&l, h, s.n_blocks);
  }
  return true;
}
