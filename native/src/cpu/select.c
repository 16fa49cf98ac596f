/* Block selection as in MSA (arXiv 2606.13392), with ties to the lower block id: the specification of every other
 * backend. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "cpu/cpu.h"

/* Where the scores of one block go: out[h * stride] for index head h. `converted` holds block_size * index_dim floats.
 */
typedef struct block_scores {
  float *out;
  int64_t stride;
  float *converted;
} block_scores;

/* Scores of one block for all index heads of a row: max over its visible tokens of q_h . k_j. False if a score is not
 * finite. */
static bool score_block(const m3_context *c, const m3_select_params *p, int32_t row, int64_t block, block_scores to) {
  const m3_hparams *h = c->hparams;
  const m3_rows *rows = p->rows;
  int64_t dim = h->index_dim, first = block * h->block_size;
  int64_t visible = rows->pos[row] + 1 - first;
  if (visible > h->block_size) visible = h->block_size;
  int64_t page = rows->tables[rows->seq[row]][block];
  const char *src = (const char *)p->cache.index + page * h->block_size * m3_row_bytes(p->cache.index_type, dim);
  const float *keys = (const float *)(const void *)src;
  if (p->cache.index_type != M3_TYPE_F32) {
    m3_convert_row(c->kernels, p->cache.index_type, src, to.converted, visible * dim);
    keys = to.converted;
  }
  bool finite = true;
  for (int32_t head = 0; head < h->n_index_head; head++) {
    const float *q = c->scratch->index_q + ((int64_t)row * h->n_index_head + head) * dim;
    float s[M3_MAX_BLOCK];
    c->kernels->dots(
        &(m3_dots){.rows = keys, .row_stride = dim, .n_rows = visible, .x = q, .n_x = 1, .n = dim, .out = s});
    to.out[head * to.stride] = c->kernels->largest(s, visible, &finite);
  }
  return finite;
}

static int ascending(const void *a, const void *b) {
  int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
  return (x > y) - (x < y);
}

/* The list of one head: the last local_blocks blocks, then the best of the rest; ties keep the lower id because
 * ids come in ascending order and only a strictly greater score moves ahead. `kept` holds top_k floats. */
static void choose_blocks(const m3_hparams *h, const float *scores, int64_t n_blocks, float *kept, int32_t *list) {
  int64_t local = n_blocks < h->local_blocks ? n_blocks : h->local_blocks;
  int64_t others = n_blocks - local, room = h->top_k - local, n = 0;
  for (int64_t b = 0; b < others; b++) {
    if (n == room && (room == 0 || !(scores[b] > kept[n - 1]))) continue;
    int64_t at = n < room ? n++ : n - 1;
    for (; at > 0 && scores[b] > kept[at - 1]; at--) {
      kept[at] = kept[at - 1];
      list[at] = list[at - 1];
    }
    kept[at] = scores[b];
    list[at] = (int32_t)b;
  }
  for (int64_t b = others; b < n_blocks; b++) list[n++] = (int32_t)b;
  qsort(list, (size_t)n, sizeof *list, ascending);
  for (; n < h->top_k; n++) list[n] = -1;
}

/* Work of one row. `buffer` holds the scores [n_index_head, max_blocks], the kept scores [top_k] and the
 * converted keys [block_size, index_dim]. */
static bool select_row(const m3_context *c, const m3_select_params *p, int32_t row, float *buffer) {
  const m3_hparams *h = c->hparams;
  int64_t n_blocks = p->rows->pos[row] / h->block_size + 1;
  float *kept = buffer + h->n_index_head * p->max_blocks;
  float *converted = kept + h->top_k;
  bool finite = true;
  /* Without a choice every visible block is read, whatever its score. */
  if (n_blocks > h->top_k || p->scores)
    for (int64_t b = 0; b < n_blocks; b++)
      finite &= score_block(c, p, row, b, (block_scores){buffer + b, p->max_blocks, converted});
  for (int32_t head = 0; head < h->n_index_head; head++) {
    const float *scores = buffer + head * p->max_blocks;
    int64_t out = (int64_t)row * h->n_index_head + head;
    if (p->scores)
      for (int64_t b = 0; b < p->n_blocks; b++) p->scores[out * p->n_blocks + b] = b < n_blocks ? scores[b] : -INFINITY;
    if (n_blocks > h->top_k)
      choose_blocks(h, scores, n_blocks, kept, p->blocks + out * h->top_k);
    else
      for (int32_t b = 0; b < h->top_k; b++) p->blocks[out * h->top_k + b] = b < n_blocks ? b : -1;
  }
  return finite;
}

/* One row, its blocks shared out among the threads: each writes its own scores, so the result is select_row's. */
static bool select_one(const m3_context *c, const m3_select_params *p) {
  const m3_hparams *h = c->hparams;
  m3_scratch *s = c->scratch;
  int64_t n_blocks = p->rows->pos[0] / h->block_size + 1;
  if (n_blocks <= h->top_k || p->scores) return select_row(c, p, 0, s->thread);
  float *scores = s->thread; /* thread 0's; the other threads only use the part for converted keys of their own */
  int64_t converted_at = h->n_index_head * p->max_blocks + h->top_k;
  bool finite = true;
#pragma omp parallel num_threads(m3_threads_for(c, n_blocks * h->block_size * h->index_dim * h->n_index_head)) \
    reduction(&& : finite)
  {
    float *converted = s->thread + m3_thread_index() * s->thread_floats + converted_at;
#pragma omp for schedule(static)
    for (int64_t b = 0; b < n_blocks; b++) {
      bool ok = score_block(c, p, 0, b, (block_scores){scores + b, p->max_blocks, converted});
      finite = finite && ok;
    }
  }
  float *kept = scores + h->n_index_head * p->max_blocks;
  for (int32_t head = 0; head < h->n_index_head; head++)
    choose_blocks(h, scores + head * p->max_blocks, n_blocks, kept, p->blocks + head * h->top_k);
  return finite;
}

bool m3_cpu_select(const m3_context *c, const m3_select_params *p) {
  m3_scratch *s = c->scratch;
  if (p->rows->n == 1) return select_one(c, p);
  bool finite = true;
#pragma omp parallel num_threads(s->n_threads) reduction(&& : finite)
  {
    float *buffer = s->thread + m3_thread_index() * s->thread_floats;
#pragma omp for schedule(dynamic, 4)
    for (int32_t row = 0; row < p->rows->n; row++) {
      bool ok = select_row(c, p, row, buffer);
      finite = finite && ok;
    }
  }
  return finite;
}
