/* pack.h - from what the searches find to blocks as blocks.h describes them. */
#ifndef M3_SRC_QUANT_PACK_H
#define M3_SRC_QUANT_PACK_H

#include <string.h>

#include "quant/blocks.h"

/* The low four bits of the codes of a block of 32: those of the first 16 in the low halves of the bytes. */
static inline void m3_pack_codes(const uint8_t *code, uint8_t *q) {
  for (int j = 0; j < 16; j++) q[j] = (uint8_t)((code[j] & 15) | (code[j + 16] & 15) << 4);
}

/* The fifth bits of the codes of a block of 32. */
static inline void m3_pack_fifth(const uint8_t *code, uint8_t *qh) {
  memset(qh, 0, 4);
  for (int j = 0; j < M3_BLOCK; j++) qh[j / 8] |= (uint8_t)((code[j] >> 4) << j % 8);
}

/* Defines m3_encode_TYPE for blocks of 256. search_type: of the member TYPE of `table`; found_type: what such a search
 * fills; pack_TYPE(found, block) writes all bytes of a block. */
#define M3_SUPERBLOCK_ENCODER(type, search_type, found_type, table)                        \
  void m3_encode_##type(const float *src, void *dst, int64_t n, const float *importance) { \
    search_type search = (table)->type;                                                    \
    m3_block_##type *b = dst;                                                              \
    for (int64_t at = 0; at < n; at += M3_SUPERBLOCK, b++) {                               \
      found_type found;                                                                    \
      search(src + at, importance ? importance + at : NULL, &found);                       \
      pack_##type(&found, b);                                                              \
    }                                                                                      \
  }

#endif
