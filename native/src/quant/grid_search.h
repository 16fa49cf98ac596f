/* grid_search.h - codebooks arranged for the search of the entry nearest to some values.
 *
 * With weights w, values x and a scale s the error of an entry of levels l is the sum over its elements of
 * w (x - s l)^2; less the constant w x^2 that is s l (s l w - 2 w x), called cost here. A cost adds up element by
 * element, so it is tabulated for parts of a run and looked up. */
#ifndef M3_SRC_QUANT_GRID_SEARCH_H
#define M3_SRC_QUANT_GRID_SEARCH_H

#include <stdint.h>

#include "quant/grid_lanes.h"

/* Levels that elements of the codebooks' entries have, ascending; IQ3_XXS and IQ3_S have a set each. */
#define M3_IQ2_LEVELS {8, 25, 43}
#define M3_IQ3_XXS_LEVELS {4, 12, 20, 28, 36, 44, 52, 62}
#define M3_IQ3_S_LEVELS {1, 3, 5, 7, 9, 11, 13, 15}

/* Runs of 8 elements of three levels each: a run has two halves of 81 combinations. Elements 0 and 1 of a half are at
 * levels c % 3 and c / 3, 2 and 3 at levels r % 3 and r / 3; the number of the combination is 8 r + c, for c = 8 it
 * is 72 + r. That puts all of them in 11 rows of lanes; numbers 81 to 87 stand for nothing. */
enum { M3_HALVES = 81, M3_HALF_ROWS = 11, M3_HALF_LANES = M3_HALF_ROWS * M3_LANES };

typedef struct m3_grid8 {
  /* 0 where the first half (row) and the second one (column) make an entry of the codebook, else infinite. */
  float absent[M3_HALVES][M3_HALF_LANES];
  uint16_t entry[M3_HALVES][M3_HALVES]; /* number of that entry */
} m3_grid8;

/* Runs of 4 elements of eight levels each: 64 combinations of a half, the number is 8 second + first. */
enum { M3_PAIRS = 64, M3_PAIR_ROWS = M3_PAIRS / M3_LANES };

typedef struct m3_grid4 {
  float level[8]; /* ascending */
  float absent[M3_PAIRS][M3_PAIRS];
  uint16_t entry[M3_PAIRS][M3_PAIRS];
} m3_grid4;

typedef struct m3_grids {
  m3_grid8 iq2_xxs, iq2_xs, iq2_s, iq1;
  m3_grid4 iq3_xxs, iq3_s;
} m3_grids;

/* Made by the first call, whichever thread it comes from; never freed. */
const m3_grids *m3_get_grids(void);

#endif
