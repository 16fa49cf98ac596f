/* select.h - what the full scan and the low-bit scan of index keys share: work on single blocks and rows. */
#ifndef M3_SRC_CPU_SELECT_H
#define M3_SRC_CPU_SELECT_H

#include "cpu/block_list.h"
#include "cpu/cpu.h"

/* A thread's buffers. */
typedef struct m3_select_buffers {
  float *keys;      /* converted keys */
  float *product;   /* of queries and keys */
  float *best;      /* scores of the block at work */
  float *kept;      /* scores of lists */
  float *scores;    /* [n_index_head, max_blocks] of a single row */
  int32_t *marks;   /* [2, max_blocks] of a single row */
  int16_t *queries; /* [n_index_head up to a multiple of 4, index_dim up to one of 32] codes of a single row */
} m3_select_buffers;

m3_select_buffers m3_select_buffers_of(const m3_context *c, const m3_select_params *p, int64_t thread);

/* One block and the queries of rows [first, first + n) of one sequence, all their heads. */
typedef struct m3_scoring {
  int64_t block, first, n;
  int64_t keys;     /* converted together */
  const void *next; /* keys that are read after these, or NULL */
} m3_scoring;

/* Keys that are converted together for the queries of one row: they stay in the first cache. */
#define M3_FEW_KEYS 32

/* best[row, head] = largest q . k of the block's tokens that the row sees, -infinity if it sees none. False if a
 * product is not finite. */
bool m3_score_block(const m3_context *c, const m3_select_params *p, m3_scoring s, const m3_select_buffers *b,
                    float *best);

/* Blocks that a row sees, tokens of one of them, and the list of one head. */
static inline int64_t m3_seen_blocks(const m3_context *c, const m3_select_params *p, int64_t row) {
  return p->rows->pos[row] / c->hparams->block_size + 1;
}

static inline int64_t m3_seen_tokens(const m3_context *c, const m3_select_params *p, int64_t row, int64_t block) {
  int64_t size = c->hparams->block_size, n = p->rows->pos[row] + 1 - block * size;
  return n < size ? n : size;
}

/* Keys of a block of the row's sequence. */
static inline const char *m3_index_keys(const m3_context *c, const m3_select_params *p, int64_t row, int64_t block) {
  int64_t page = p->rows->tables[p->rows->seq[row]][block];
  return (const char *)p->cache.index +
         page * c->hparams->block_size * m3_row_bytes(p->cache.index_type, c->hparams->index_dim);
}

static inline int32_t *m3_list_of(const m3_context *c, const m3_select_params *p, int64_t row, int64_t head) {
  return p->blocks + (row * c->hparams->n_index_head + head) * c->hparams->top_k;
}

/* The lists of one row by bounds from low-bit keys; those of the full scan. *finite becomes false if a score is not
 * finite. False: the queries are so large that there are no bounds, and nothing is done. */
bool m3_select_low_bit(const m3_context *c, const m3_select_params *p, int64_t row, bool *finite);

#endif
