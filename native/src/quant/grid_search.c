#include "quant/grid_search.h"

#include <math.h>
#include <pthread.h>

#include "quant/codebooks.h"

static m3_grids grids;
static pthread_once_t made = PTHREAD_ONCE_INIT;

static const int iq2_levels[3] = M3_IQ2_LEVELS;
static const int iq1_levels[3] = {-1, 0, 1};

/* Number of entries. */
#define ENTRIES(codebook) ((int)(sizeof(codebook) / sizeof *(codebook)))

static int level_number(const int *levels, int value) {
  int n = 0;
  while (levels[n] != value) n++;
  return n;
}

static void clear8(m3_grid8 *grid) {
  for (int a = 0; a < M3_HALVES; a++)
    for (int b = 0; b < M3_HALF_LANES; b++) grid->absent[a][b] = INFINITY;
}

/* number: the levels of the run by their numbers. */
static void add8(m3_grid8 *grid, const int *number, int entry) {
  int half[2];
  for (int h = 0; h < 2; h++) {
    const int *n = number + 4 * h;
    int c = n[0] + 3 * n[1], r = n[2] + 3 * n[3];
    half[h] = c < 8 ? 8 * r + c : 72 + r;
  }
  grid->absent[half[0]][half[1]] = 0;
  grid->entry[half[0]][half[1]] = (uint16_t)entry;
}

static void make_iq2(m3_grid8 *grid, const uint8_t (*entries)[8], int n) {
  clear8(grid);
  for (int e = 0; e < n; e++) {
    int number[8];
    for (int j = 0; j < 8; j++) number[j] = level_number(iq2_levels, entries[e][j]);
    add8(grid, number, e);
  }
}

static void make_iq1(m3_grid8 *grid) {
  clear8(grid);
  for (int e = 0; e < ENTRIES(m3_iq1_grid); e++) {
    int number[8];
    for (int j = 0; j < 8; j++) number[j] = level_number(iq1_levels, m3_iq1_grid[e][j]);
    add8(grid, number, e);
  }
}

static void make_iq3(m3_grid4 *grid, const uint8_t (*entries)[4], int n, const int *levels) {
  for (int l = 0; l < 8; l++) grid->level[l] = (float)levels[l];
  for (int a = 0; a < M3_PAIRS; a++)
    for (int b = 0; b < M3_PAIRS; b++) grid->absent[a][b] = INFINITY;
  for (int e = 0; e < n; e++) {
    int number[4];
    for (int j = 0; j < 4; j++) number[j] = level_number(levels, entries[e][j]);
    int a = 8 * number[1] + number[0], b = 8 * number[3] + number[2];
    grid->absent[a][b] = 0;
    grid->entry[a][b] = (uint16_t)e;
  }
}

static void make(void) {
  static const int iq3_xxs_levels[8] = M3_IQ3_XXS_LEVELS;
  static const int iq3_s_levels[8] = M3_IQ3_S_LEVELS;
  make_iq2(&grids.iq2_xxs, m3_iq2_xxs_grid, ENTRIES(m3_iq2_xxs_grid));
  make_iq2(&grids.iq2_xs, m3_iq2_xs_grid, ENTRIES(m3_iq2_xs_grid));
  make_iq2(&grids.iq2_s, m3_iq2_s_grid, ENTRIES(m3_iq2_s_grid));
  make_iq1(&grids.iq1);
  make_iq3(&grids.iq3_xxs, m3_iq3_xxs_grid, ENTRIES(m3_iq3_xxs_grid), iq3_xxs_levels);
  make_iq3(&grids.iq3_s, m3_iq3_s_grid, ENTRIES(m3_iq3_s_grid), iq3_s_levels);
}

const m3_grids *m3_get_grids(void) {
  pthread_once(&made, make);
  return &grids;
}
