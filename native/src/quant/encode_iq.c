/* Blocks of 256 whose elements come from a codebook: the searches of codebook_search.h, packed as blocks.h says. */
#include <string.h>

#include "quant/blocks.h"
#include "quant/codebook_search.h"
#include "quant/encode.h"
#include "quant/pack.h"

/* The four bits that a scale has: its multiple is 2 k + 1. */
static void pack_scales(const m3_coded_block *coded, int groups, uint8_t *scales) {
  for (int g = 0; g < groups; g += 2)
    scales[g / 2] = (uint8_t)(coded->multiple[g] / 2 | coded->multiple[g + 1] / 2 << 4);
}

/* Four sign bytes without their eighth bits, and the scale above them. */
static uint32_t pack_word(const m3_coded_block *coded, int g) {
  uint32_t word = (uint32_t)(coded->multiple[g] / 2) << 28;
  for (int k = 0; k < 4; k++) word |= (uint32_t)(coded->group[g].signs[k] & 127) << 7 * k;
  return word;
}

static void pack_iq3_xxs(const m3_coded_block *coded, m3_block_iq3_xxs *b) {
  b->d = coded->d;
  for (int g = 0; g < 8; g++) {
    uint32_t word = pack_word(coded, g);
    for (int k = 0; k < 4; k++) b->gas[4 * g + k] = (uint8_t)(word >> 8 * k);
    for (int r = 0; r < 8; r++) b->q[8 * g + r] = (uint8_t)coded->group[g].entry[r];
  }
}

static void pack_iq3_s(const m3_coded_block *coded, m3_block_iq3_s *b) {
  b->d = coded->d;
  pack_scales(coded, 8, b->scales);
  for (int g = 0; g < 8; g++) {
    const m3_group_codes *codes = &coded->group[g];
    unsigned high = 0;
    for (int r = 0; r < 8; r++) {
      b->q[8 * g + r] = (uint8_t)codes->entry[r];
      high |= (unsigned)(codes->entry[r] >> 8) << r;
    }
    b->qh[g] = (uint8_t)high;
    memcpy(b->signs + 4 * g, codes->signs, 4);
  }
}

static void pack_iq2_xxs(const m3_coded_block *coded, m3_block_iq2_xxs *b) {
  b->d = coded->d;
  for (int g = 0; g < 8; g++) {
    const uint16_t *entry = coded->group[g].entry;
    uint32_t word = pack_word(coded, g);
    b->q[4 * g] = (uint16_t)(entry[0] | entry[1] << 8);
    b->q[4 * g + 1] = (uint16_t)(entry[2] | entry[3] << 8);
    b->q[4 * g + 2] = (uint16_t)word;
    b->q[4 * g + 3] = (uint16_t)(word >> 16);
  }
}

static void pack_iq2_xs(const m3_coded_block *coded, m3_block_iq2_xs *b) {
  b->d = coded->d;
  pack_scales(coded, 16, b->scales);
  for (int r = 0; r < 32; r++) {
    const m3_group_codes *codes = &coded->group[r / 2];
    b->q[r] = (uint16_t)(codes->entry[r % 2] | (codes->signs[r % 2] & 127) << 9);
  }
}

static void pack_iq2_s(const m3_coded_block *coded, m3_block_iq2_s *b) {
  b->d = coded->d;
  pack_scales(coded, 16, b->scales);
  memset(b->qh, 0, sizeof b->qh);
  for (int r = 0; r < 32; r++) {
    const m3_group_codes *codes = &coded->group[r / 2];
    b->q[r] = (uint8_t)codes->entry[r % 2];
    b->qh[r / 4] |= (uint8_t)((codes->entry[r % 2] >> 8) << 2 * (r % 4));
    b->signs[r] = codes->signs[r % 2];
  }
}

static void pack_iq1_s(const m3_coded_block *coded, m3_block_iq1_s *b) {
  b->d = coded->d;
  for (int g = 0; g < 8; g++) {
    const m3_group_codes *codes = &coded->group[g];
    unsigned high = (unsigned)(coded->multiple[g] / 2) << 12 | (unsigned)codes->signs[0] << 15;
    for (int r = 0; r < 4; r++) {
      b->q[4 * g + r] = (uint8_t)codes->entry[r];
      high |= (unsigned)(codes->entry[r] >> 8) << 3 * r;
    }
    b->qh[g] = (uint16_t)high;
  }
}

static void pack_iq1_m(const m3_coded_block *coded, m3_block_iq1_m *b) {
  for (int k = 0; k < 4; k++) b->scales[k] = (uint16_t)((coded->d >> 4 * k & 15) << 12);
  for (int g = 0; g < 16; g++) {
    const m3_group_codes *codes = &coded->group[g];
    unsigned high = 0;
    for (int r = 0; r < 2; r++) {
      b->q[2 * g + r] = (uint8_t)codes->entry[r];
      high |= ((unsigned)(codes->entry[r] >> 8) | (unsigned)codes->signs[r] << 3) << 4 * r;
    }
    b->qh[g] = (uint8_t)high;
    b->scales[g / 4] |= (uint16_t)(coded->multiple[g] / 2 << 3 * (g % 4));
  }
}

#define ENCODER(type) M3_SUPERBLOCK_ENCODER(type, m3_codebook_search, m3_coded_block, m3_machine_codebook_searches())

ENCODER(iq3_xxs)
ENCODER(iq3_s)
ENCODER(iq2_xxs)
ENCODER(iq2_xs)
ENCODER(iq2_s)
ENCODER(iq1_s)
ENCODER(iq1_m)
