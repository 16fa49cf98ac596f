#include "cpu/block_list.h"

#include <stdlib.h>

int64_t m3_competing_blocks(const m3_hparams *h, int64_t n_blocks) {
  return n_blocks < h->local_blocks ? 0 : n_blocks - h->local_blocks;
}

m3_block_list m3_block_list_start(const m3_hparams *h, int64_t n_blocks, int32_t *ids, float *scores) {
  return (m3_block_list){ids, scores, 0, h->top_k - (n_blocks - m3_competing_blocks(h, n_blocks))};
}

static int ascending(const void *a, const void *b) {
  int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
  return (x > y) - (x < y);
}

void m3_block_list_finish(m3_block_list *l, const m3_hparams *h, int64_t n_blocks) {
  qsort(l->ids, (size_t)l->n, sizeof *l->ids, ascending);
  for (int64_t b = m3_competing_blocks(h, n_blocks); b < n_blocks; b++) l->ids[l->n++] = (int32_t)b;
  for (int64_t i = l->n; i < h->top_k; i++) l->ids[i] = -1;
}

void m3_block_list_all(const m3_hparams *h, int64_t n_blocks, int32_t *ids) {
  for (int64_t b = 0; b < h->top_k; b++) ids[b] = b < n_blocks ? (int32_t)b : -1;
}
