/* pack.h - codes of blocks of 32 as blocks.h describes them. */
#ifndef M3_SRC_QUANT_PACK_H
#define M3_SRC_QUANT_PACK_H

#include <string.h>

#include "quant/blocks.h"

/* Low halves of the bytes hold the first 16 codes, high halves the others. */
static inline void m3_pack_codes(const uint8_t *code, uint8_t *q) {
  for (int j = 0; j < 16; j++) q[j] = (uint8_t)((code[j] & 15) | (code[j + 16] & 15) << 4);
}

static inline void m3_pack_fifth(const uint8_t *code, uint8_t *qh) {
  memset(qh, 0, 4);
  for (int j = 0; j < M3_BLOCK; j++) qh[j / 8] |= (uint8_t)((code[j] >> 4) << j % 8);
}

#endif
