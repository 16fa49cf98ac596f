/* Rows to blocks of 32. Scales of IQ4_NL and MXFP4 are searched for, eight blocks at a time; those of Q4_0 to Q5_1
 * where importance is given, else rounded; those of Q8_0 always rounded. */
#include <string.h>

#include "quant/blocks.h"
#include "quant/encode.h"
#include "quant/pack.h"
#include "quant/rounding.h"
#include "quant/scale_search.h"

/* ------------------------------------------------------------------------------------------------ blocks */

/* pack_TYPE: the k-th of the blocks that were searched together. */

static void pack_q4_0(const m3_single_blocks *s, int k, m3_block_q4_0 *b) {
  b->d = s->d[k];
  m3_pack_codes(s->code + k * M3_BLOCK, b->q);
}

static void pack_q4_1(const m3_single_blocks *s, int k, m3_block_q4_1 *b) {
  b->d = s->d[k];
  b->m = s->m[k];
  m3_pack_codes(s->code + k * M3_BLOCK, b->q);
}

static void pack_q5_0(const m3_single_blocks *s, int k, m3_block_q5_0 *b) {
  b->d = s->d[k];
  m3_pack_codes(s->code + k * M3_BLOCK, b->q);
  m3_pack_fifth(s->code + k * M3_BLOCK, b->qh);
}

static void pack_q5_1(const m3_single_blocks *s, int k, m3_block_q5_1 *b) {
  b->d = s->d[k];
  b->m = s->m[k];
  m3_pack_codes(s->code + k * M3_BLOCK, b->q);
  m3_pack_fifth(s->code + k * M3_BLOCK, b->qh);
}

static void pack_iq4_nl(const m3_single_blocks *s, int k, m3_block_iq4_nl *b) {
  b->d = s->d[k];
  m3_pack_codes(s->code + k * M3_BLOCK, b->q);
}

static void pack_mxfp4(const m3_single_blocks *s, int k, m3_block_mxfp4 *b) {
  b->e = (uint8_t)s->d[k];
  m3_pack_codes(s->code + k * M3_BLOCK, b->q);
}

/* ------------------------------------------------------------------------------------------------ rows */

/* Searches the up to eight blocks that start at column `at`; gives their number. The rest of eight is filled up with
 * zeros, whose blocks are not looked at. */
static int search_at(m3_single_search search, const float *src, const float *importance, int64_t at, int64_t n,
                     m3_single_blocks *out) {
  int64_t left = n - at;
  if (left >= M3_SUPERBLOCK) {
    search(src + at, importance ? importance + at : NULL, out);
    return M3_BLOCKS_AT_ONCE;
  }
  float x[M3_SUPERBLOCK] = {0}, w[M3_SUPERBLOCK] = {0};
  memcpy(x, src + at, (size_t)left * sizeof *x);
  if (importance) memcpy(w, importance + at, (size_t)left * sizeof *w);
  search(x, importance ? w : NULL, out);
  return (int)(left / M3_BLOCK);
}

/* Defines search_TYPE, an encoder. */
#define SEARCH(type)                                                                           \
  static void search_##type(const float *src, void *dst, int64_t n, const float *importance) { \
    m3_block_##type *b = dst;                                                                  \
    for (int64_t at = 0; at < n; at += M3_SUPERBLOCK) {                                        \
      m3_single_blocks found;                                                                  \
      int count = search_at(m3_machine_searches()->type, src, importance, at, n, &found);      \
      for (int k = 0; k < count; k++, b++) pack_##type(&found, k, b);                          \
    }                                                                                          \
  }

SEARCH(q4_0)
SEARCH(q4_1)
SEARCH(q5_0)
SEARCH(q5_1)
SEARCH(iq4_nl)
SEARCH(mxfp4)

void m3_encode_iq4_nl(const float *src, void *dst, int64_t n, const float *importance) {
  search_iq4_nl(src, dst, n, importance);
}

void m3_encode_mxfp4(const float *src, void *dst, int64_t n, const float *importance) {
  search_mxfp4(src, dst, n, importance);
}

/* Defines m3_encode_TYPE for a type that is searched with importance and else rounded. */
#define ENCODER(type)                                                                      \
  void m3_encode_##type(const float *src, void *dst, int64_t n, const float *importance) { \
    if (importance)                                                                        \
      search_##type(src, dst, n, importance);                                              \
    else                                                                                   \
      m3_machine_roundings()->type(src, dst, n);                                           \
  }

ENCODER(q4_0)
ENCODER(q4_1)
ENCODER(q5_0)
ENCODER(q5_1)

void m3_encode_q8_0(const float *src, void *dst, int64_t n, const float *importance) {
  (void)importance;
  m3_machine_roundings()->q8_0(src, dst, n);
}
