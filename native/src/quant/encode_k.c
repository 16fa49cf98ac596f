/* Rows to the K types: what the searches find, packed as blocks.h describes. */
#include <string.h>

#include "quant/blocks.h"
#include "quant/encode.h"
#include "quant/pack.h"
#include "quant/scale_search.h"

/* ------------------------------------------------------------------------------------------------ codes */

/* Bits shift and shift + 1 of four runs of 32 codes, in 32 bytes; each run takes two bits of every byte. */
static void pack2(const uint8_t *code, uint8_t *q, int shift) {
  for (int half = 0; half < 2; half++, code += 128, q += 32)
    for (int i = 0; i < 32; i++)
      q[i] = (uint8_t)((code[i] >> shift & 3) | (code[i + 32] >> shift & 3) << 2 | (code[i + 64] >> shift & 3) << 4 |
                       (code[i + 96] >> shift & 3) << 6);
}

/* Four bits of codes that lie `run` apart: the first run in the low halves. */
static void pack4(const uint8_t *code, uint8_t *q, int run) {
  for (int at = 0; at < M3_SUPERBLOCK; at += 2 * run, code += 2 * run, q += run)
    for (int i = 0; i < run; i++) q[i] = (uint8_t)((code[i] & 15) | (code[i + run] & 15) << 4);
}

/* Bit `bit` of the eight runs of 32 codes, a bit of 32 bytes for each run. */
static void pack1(const uint8_t *code, uint8_t *q, int bit) {
  memset(q, 0, 32);
  for (int run = 0; run < 8; run++, code += 32)
    for (int i = 0; i < 32; i++) q[i] |= (uint8_t)((code[i] >> bit & 1) << run);
}

/* ------------------------------------------------------------------------------------------------ blocks */

/* Scales and mins of Q4_K and Q5_K. */
static void pack_k_scales(const m3_affine_groups *s, uint8_t *scales) {
  for (int g = 0; g < 4; g++) {
    scales[g] = (uint8_t)(s->scale[g] | (s->scale[g + 4] >> 4) << 6);
    scales[4 + g] = (uint8_t)(s->min[g] | (s->min[g + 4] >> 4) << 6);
    scales[8 + g] = (uint8_t)((s->scale[g + 4] & 15) | (s->min[g + 4] & 15) << 4);
  }
}

static void pack_q4_k(const m3_affine_groups *s, m3_block_q4_k *b) {
  b->d = s->d;
  b->dmin = s->dmin;
  pack_k_scales(s, b->scales);
  pack4(s->code, b->q, 32);
}

static void pack_q5_k(const m3_affine_groups *s, m3_block_q5_k *b) {
  b->d = s->d;
  b->dmin = s->dmin;
  pack_k_scales(s, b->scales);
  pack4(s->code, b->q, 32);
  pack1(s->code, b->qh, 4);
}

static void pack_q2_k(const m3_affine_groups *s, m3_block_q2_k *b) {
  b->d = s->d;
  b->dmin = s->dmin;
  for (int g = 0; g < 16; g++) b->scales[g] = (uint8_t)(s->scale[g] | s->min[g] << 4);
  pack2(s->code, b->q, 0);
}

static void pack_q3_k(const m3_symmetric_groups *s, m3_block_q3_k *b) {
  b->d = s->d;
  memset(b->scales, 0, sizeof b->scales);
  for (int g = 0; g < 16; g++) {
    int scale = s->scale[g] + 32;
    b->scales[g % 8] |= (uint8_t)((scale & 15) << 4 * (g / 8));
    b->scales[8 + g % 4] |= (uint8_t)((scale >> 4) << 2 * (g / 4));
  }
  pack2(s->code, b->q, 0);
  pack1(s->code, b->hmask, 2);
}

static void pack_q6_k(const m3_symmetric_groups *s, m3_block_q6_k *b) {
  b->d = s->d;
  memcpy(b->scales, s->scale, sizeof b->scales);
  pack4(s->code, b->ql, 64);
  pack2(s->code, b->qh, 4);
}

static void pack_iq4_xs(const m3_symmetric_groups *s, m3_block_iq4_xs *b) {
  b->d = s->d;
  b->scales_h = 0;
  memset(b->scales_l, 0, sizeof b->scales_l);
  for (int g = 0; g < 8; g++) {
    int scale = s->scale[g] + 32;
    b->scales_l[g / 2] |= (uint8_t)((scale & 15) << 4 * (g % 2));
    b->scales_h |= (uint16_t)((scale >> 4) << 2 * g);
  }
  pack4(s->code, b->q, 16);
}

/* ------------------------------------------------------------------------------------------------ rows */

/* kind: affine or symmetric, as the type stands in m3_searches. */
#define ENCODER(type, kind) M3_SUPERBLOCK_ENCODER(type, m3_##kind##_search, m3_##kind##_groups, m3_machine_searches())

ENCODER(q2_k, affine)
ENCODER(q4_k, affine)
ENCODER(q5_k, affine)
ENCODER(q3_k, symmetric)
ENCODER(q6_k, symmetric)
ENCODER(iq4_xs, symmetric)
