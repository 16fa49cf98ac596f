/* Blocks of 256 whose elements come from a codebook: the searches of codebook_search.h, packed as blocks.h says. */
#include <string.h>

#include "quant/blocks.h"
#include "quant/codebook_search.h"
#include "quant/encode.h"

static const float *weights(const float *importance, int64_t at) { return importance ? importance + at : NULL; }

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

void m3_encode_iq3_xxs(const float *src, void *dst, int64_t n, const float *importance) {
  m3_codebook_search search = m3_machine_codebook_searches()->iq3_xxs;
  m3_block_iq3_xxs *b = dst;
  for (int64_t at = 0; at < n; at += M3_SUPERBLOCK, b++) {
    m3_coded_block coded;
    search(src + at, weights(importance, at), &coded);
    b->d = coded.d;
    for (int g = 0; g < 8; g++) {
      uint32_t word = pack_word(&coded, g);
      for (int k = 0; k < 4; k++) b->gas[4 * g + k] = (uint8_t)(word >> 8 * k);
      for (int r = 0; r < 8; r++) b->q[8 * g + r] = (uint8_t)coded.group[g].entry[r];
    }
  }
}

void m3_encode_iq3_s(const float *src, void *dst, int64_t n, const float *importance) {
  m3_codebook_search search = m3_machine_codebook_searches()->iq3_s;
  m3_block_iq3_s *b = dst;
  for (int64_t at = 0; at < n; at += M3_SUPERBLOCK, b++) {
    m3_coded_block coded;
    search(src + at, weights(importance, at), &coded);
    b->d = coded.d;
    pack_scales(&coded, 8, b->scales);
    for (int g = 0; g < 8; g++) {
      const m3_group_codes *codes = &coded.group[g];
      unsigned high = 0;
      for (int r = 0; r < 8; r++) {
        b->q[8 * g + r] = (uint8_t)codes->entry[r];
        high |= (unsigned)(codes->entry[r] >> 8) << r;
      }
      b->qh[g] = (uint8_t)high;
      memcpy(b->signs + 4 * g, codes->signs, 4);
    }
  }
}

void m3_encode_iq2_xxs(const float *src, void *dst, int64_t n, const float *importance) {
  m3_codebook_search search = m3_machine_codebook_searches()->iq2_xxs;
  m3_block_iq2_xxs *b = dst;
  for (int64_t at = 0; at < n; at += M3_SUPERBLOCK, b++) {
    m3_coded_block coded;
    search(src + at, weights(importance, at), &coded);
    b->d = coded.d;
    for (int g = 0; g < 8; g++) {
      const uint16_t *entry = coded.group[g].entry;
      uint32_t word = pack_word(&coded, g);
      b->q[4 * g] = (uint16_t)(entry[0] | entry[1] << 8);
      b->q[4 * g + 1] = (uint16_t)(entry[2] | entry[3] << 8);
      b->q[4 * g + 2] = (uint16_t)word;
      b->q[4 * g + 3] = (uint16_t)(word >> 16);
    }
  }
}

void m3_encode_iq2_xs(const float *src, void *dst, int64_t n, const float *importance) {
  m3_codebook_search search = m3_machine_codebook_searches()->iq2_xs;
  m3_block_iq2_xs *b = dst;
  for (int64_t at = 0; at < n; at += M3_SUPERBLOCK, b++) {
    m3_coded_block coded;
    search(src + at, weights(importance, at), &coded);
    b->d = coded.d;
    pack_scales(&coded, 16, b->scales);
    for (int r = 0; r < 32; r++) {
      const m3_group_codes *codes = &coded.group[r / 2];
      b->q[r] = (uint16_t)(codes->entry[r % 2] | (codes->signs[r % 2] & 127) << 9);
    }
  }
}

void m3_encode_iq2_s(const float *src, void *dst, int64_t n, const float *importance) {
  m3_codebook_search search = m3_machine_codebook_searches()->iq2_s;
  m3_block_iq2_s *b = dst;
  for (int64_t at = 0; at < n; at += M3_SUPERBLOCK, b++) {
    m3_coded_block coded;
    search(src + at, weights(importance, at), &coded);
    b->d = coded.d;
    pack_scales(&coded, 16, b->scales);
    memset(b->qh, 0, sizeof b->qh);
    for (int r = 0; r < 32; r++) {
      const m3_group_codes *codes = &coded.group[r / 2];
      b->q[r] = (uint8_t)codes->entry[r % 2];
      b->qh[r / 4] |= (uint8_t)((codes->entry[r % 2] >> 8) << 2 * (r % 4));
      b->signs[r] = codes->signs[r % 2];
    }
  }
}

void m3_encode_iq1_s(const float *src, void *dst, int64_t n, const float *importance) {
  m3_codebook_search search = m3_machine_codebook_searches()->iq1_s;
  m3_block_iq1_s *b = dst;
  for (int64_t at = 0; at < n; at += M3_SUPERBLOCK, b++) {
    m3_coded_block coded;
    search(src + at, weights(importance, at), &coded);
    b->d = coded.d;
    for (int g = 0; g < 8; g++) {
      const m3_group_codes *codes = &coded.group[g];
      unsigned high = (unsigned)(coded.multiple[g] / 2) << 12 | (unsigned)codes->signs[0] << 15;
      for (int r = 0; r < 4; r++) {
        b->q[4 * g + r] = (uint8_t)codes->entry[r];
        high |= (unsigned)(codes->entry[r] >> 8) << 3 * r;
      }
      b->qh[g] = (uint16_t)high;
    }
  }
}

void m3_encode_iq1_m(const float *src, void *dst, int64_t n, const float *importance) {
  m3_codebook_search search = m3_machine_codebook_searches()->iq1_m;
  m3_block_iq1_m *b = dst;
  for (int64_t at = 0; at < n; at += M3_SUPERBLOCK, b++) {
    m3_coded_block coded;
    search(src + at, weights(importance, at), &coded);
    for (int k = 0; k < 4; k++) b->scales[k] = (uint16_t)((coded.d >> 4 * k & 15) << 12);
    for (int g = 0; g < 16; g++) {
      const m3_group_codes *codes = &coded.group[g];
      unsigned high = 0;
      for (int r = 0; r < 2; r++) {
        b->q[2 * g + r] = (uint8_t)codes->entry[r];
        high |= ((unsigned)(codes->entry[r] >> 8) | (unsigned)codes->signs[r] << 3) << 4 * r;
      }
      b->qh[g] = (uint8_t)high;
      b->scales[g / 4] |= (uint16_t)(coded.multiple[g] / 2 << 3 * (g % 4));
    }
  }
}
