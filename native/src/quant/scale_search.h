/* scale_search.h - the search for scales, offsets and codes with the least weighted squared error, apart from how a
 * type packs them. One table for each instruction set; all give the same bytes.
 *
 * x are the values of a superblock (256), or of eight blocks of 32; w their weights, not all zero in a block, or NULL:
 * all equal. Codes are in the order of the values. The functions that start from "groups" give one float16 scale (and
 * offset) for all and a small whole number for each group; the others a float16 scale for each block. */
#ifndef M3_SRC_QUANT_SCALE_SEARCH_H
#define M3_SRC_QUANT_SCALE_SEARCH_H

#include <stdint.h>

#include "quant/blocks.h"

enum { M3_MOST_GROUPS = 16, M3_BLOCKS_AT_ONCE = M3_SUPERBLOCK / M3_BLOCK };

/* value = (f16(d) * scale) * code - f16(dmin) * min */
typedef struct m3_affine_groups {
  uint16_t d, dmin;
  uint8_t scale[M3_MOST_GROUPS], min[M3_MOST_GROUPS];
  uint8_t code[M3_SUPERBLOCK];
} m3_affine_groups;

/* value = (f16(d) * scale) * number of the code: code - zero, or an entry of m3_iq4_values */
typedef struct m3_symmetric_groups {
  uint16_t d;
  int8_t scale[M3_MOST_GROUPS];
  uint8_t code[M3_SUPERBLOCK];
} m3_symmetric_groups;

/* value = f16(d) * code + f16(m), or f16(d) * number of the code, where m is not set. MXFP4 has its exponents in d. */
typedef struct m3_single_blocks {
  uint16_t d[M3_BLOCKS_AT_ONCE], m[M3_BLOCKS_AT_ONCE];
  uint8_t code[M3_SUPERBLOCK];
} m3_single_blocks;

typedef void (*m3_affine_search)(const float *x, const float *w, m3_affine_groups *out);
typedef void (*m3_symmetric_search)(const float *x, const float *w, m3_symmetric_groups *out);
typedef void (*m3_single_search)(const float *x, const float *w, m3_single_blocks *out);

typedef struct m3_searches {
  m3_affine_search q2_k, q4_k, q5_k;
  m3_symmetric_search q3_k, q6_k, iq4_xs;
  m3_single_search q4_0, q4_1, q5_0, q5_1, iq4_nl, mxfp4;
} m3_searches;

extern const m3_searches m3_searches_scalar;
#if defined(__x86_64__)
extern const m3_searches m3_searches_avx2;
#endif

/* The widest of this machine. */
const m3_searches *m3_machine_searches(void);

#endif
