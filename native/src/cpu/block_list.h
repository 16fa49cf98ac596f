/* block_list.h - the blocks that one query reads, found as scores arrive in ascending order of blocks. */
#ifndef M3_SRC_CPU_BLOCK_LIST_H
#define M3_SRC_CPU_BLOCK_LIST_H

#include <stdint.h>

#include "m3.h"

/* The best blocks so far beside the local ones. */
typedef struct m3_block_list {
  int32_t *ids;  /* [top_k] best first until it is finished */
  float *scores; /* [top_k] of them */
  int64_t n, room;
} m3_block_list;

/* An empty list for a query that sees n_blocks blocks, with room for top_k less its local blocks. */
m3_block_list m3_block_list_start(const m3_hparams *h, int64_t n_blocks, int32_t *ids, float *scores);

/* Adds a block above all that were added. Only a strictly greater score moves ahead: ties keep the lower id. */
static inline void m3_block_list_add(m3_block_list *l, int64_t block, float score) {
  if (l->n == l->room && (l->room == 0 || !(score > l->scores[l->n - 1]))) return;
  int64_t at = l->n < l->room ? l->n++ : l->n - 1;
  for (; at > 0 && score > l->scores[at - 1]; at--) {
    l->scores[at] = l->scores[at - 1];
    l->ids[at] = l->ids[at - 1];
  }
  l->scores[at] = score;
  l->ids[at] = (int32_t)block;
}

/* Blocks of n_blocks that compete: those before the local ones. */
int64_t m3_competing_blocks(const m3_hparams *h, int64_t n_blocks);

/* Adds the local blocks; ids are ascending then, and padded with -1. */
void m3_block_list_finish(m3_block_list *l, const m3_hparams *h, int64_t n_blocks);

/* The list of a query that reads all n_blocks <= top_k blocks that it sees. */
void m3_block_list_all(const m3_hparams *h, int64_t n_blocks, int32_t *ids);

#endif
