/* Rows to blocks of 32 whose scales are searched for, eight blocks at a time. */
#include <string.h>

#include "quant/blocks.h"
#include "quant/encode.h"
#include "quant/pack.h"
#include "quant/scale_search.h"

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

void m3_encode_iq4_nl(const float *src, void *dst, int64_t n, const float *importance) {
  m3_block_iq4_nl *b = dst;
  for (int64_t at = 0; at < n; at += M3_SUPERBLOCK) {
    m3_single_blocks s;
    int count = search_at(m3_machine_searches()->iq4_nl, src, importance, at, n, &s);
    for (int k = 0; k < count; k++, b++) {
      b->d = s.d[k];
      m3_pack_codes(s.code + k * M3_BLOCK, b->q);
    }
  }
}

void m3_encode_mxfp4(const float *src, void *dst, int64_t n, const float *importance) {
  m3_block_mxfp4 *b = dst;
  for (int64_t at = 0; at < n; at += M3_SUPERBLOCK) {
    m3_single_blocks s;
    int count = search_at(m3_machine_searches()->mxfp4, src, importance, at, n, &s);
    for (int k = 0; k < count; k++, b++) {
      b->e = (uint8_t)s.d[k];
      m3_pack_codes(s.code + k * M3_BLOCK, b->q);
    }
  }
}

void m3_search_q4_0(const float *src, void *dst, int64_t n, const float *importance) {
  m3_block_q4_0 *b = dst;
  for (int64_t at = 0; at < n; at += M3_SUPERBLOCK) {
    m3_single_blocks s;
    int count = search_at(m3_machine_searches()->q4_0, src, importance, at, n, &s);
    for (int k = 0; k < count; k++, b++) {
      b->d = s.d[k];
      m3_pack_codes(s.code + k * M3_BLOCK, b->q);
    }
  }
}

void m3_search_q4_1(const float *src, void *dst, int64_t n, const float *importance) {
  m3_block_q4_1 *b = dst;
  for (int64_t at = 0; at < n; at += M3_SUPERBLOCK) {
    m3_single_blocks s;
    int count = search_at(m3_machine_searches()->q4_1, src, importance, at, n, &s);
    for (int k = 0; k < count; k++, b++) {
      b->d = s.d[k];
      b->m = s.m[k];
      m3_pack_codes(s.code + k * M3_BLOCK, b->q);
    }
  }
}

void m3_search_q5_0(const float *src, void *dst, int64_t n, const float *importance) {
  m3_block_q5_0 *b = dst;
  for (int64_t at = 0; at < n; at += M3_SUPERBLOCK) {
    m3_single_blocks s;
    int count = search_at(m3_machine_searches()->q5_0, src, importance, at, n, &s);
    for (int k = 0; k < count; k++, b++) {
      b->d = s.d[k];
      m3_pack_codes(s.code + k * M3_BLOCK, b->q);
      m3_pack_fifth(s.code + k * M3_BLOCK, b->qh);
    }
  }
}

void m3_search_q5_1(const float *src, void *dst, int64_t n, const float *importance) {
  m3_block_q5_1 *b = dst;
  for (int64_t at = 0; at < n; at += M3_SUPERBLOCK) {
    m3_single_blocks s;
    int count = search_at(m3_machine_searches()->q5_1, src, importance, at, n, &s);
    for (int k = 0; k < count; k++, b++) {
      b->d = s.d[k];
      b->m = s.m[k];
      m3_pack_codes(s.code + k * M3_BLOCK, b->q);
      m3_pack_fifth(s.code + k * M3_BLOCK, b->qh);
    }
  }
}
