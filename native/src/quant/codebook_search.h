/* codebook_search.h - the search for scales and codebook entries with the least weighted squared error, apart from how
 * a type packs them. One table for each instruction set; all give the same bytes. */
#ifndef M3_SRC_QUANT_CODEBOOK_SEARCH_H
#define M3_SRC_QUANT_CODEBOOK_SEARCH_H

#include <stdint.h>

enum { M3_CODEBOOK_GROUPS = 16, M3_CODEBOOK_RUNS = 8 };

/* Codes of a group of 16 or 32 elements. */
typedef struct m3_group_codes {
  uint16_t entry[M3_CODEBOOK_RUNS]; /* by run of 8, IQ3: of 4 */
  uint8_t signs[4];                 /* IQ2, IQ3: sign byte by run of 8, where the format wants so with an even number of
                                       bits; IQ1: 1 where delta is negative, by run, IQ1_S: the first one only */
} m3_group_codes;

/* A block of 256: the scale of group g is f16(d) times multiple[g] (odd) times a constant of the type. */
typedef struct m3_coded_block {
  uint16_t d;
  uint8_t multiple[M3_CODEBOOK_GROUPS];
  m3_group_codes group[M3_CODEBOOK_GROUPS];
} m3_coded_block;

/* x: 256 values; w: their weights, or NULL: all equal. */
typedef void (*m3_codebook_search)(const float *x, const float *w, m3_coded_block *out);

typedef struct m3_codebook_searches {
  m3_codebook_search iq3_xxs, iq3_s, iq2_xxs, iq2_xs, iq2_s, iq1_s, iq1_m;
} m3_codebook_searches;

extern const m3_codebook_searches m3_codebook_searches_scalar;
#if defined(__x86_64__)
extern const m3_codebook_searches m3_codebook_searches_avx2;
#endif

/* The widest of this machine. */
const m3_codebook_searches *m3_machine_codebook_searches(void);

#endif
