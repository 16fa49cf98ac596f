/* Compiled once for every instruction set; codebook_search_avx2.c names the table of its own. */
#include "quant/codebook_search.h"

#include <string.h>

#include "quant/codebooks.h"
#include "quant/grid_kernels.h"
#include "quant/scale_fit.h"

#ifndef M3_CODEBOOK_SEARCHES
#define M3_CODEBOOK_SEARCHES m3_codebook_searches_scalar
#endif

/* The parabola of codes whose levels have these sums over the group: of 2 w x l and of w l^2. */
M3_INLINE m3_fit fit_of(m3_f8 products, m3_f8 squares) {
  float b = 0.5f * m3_total(products), c = m3_total(squares);
  return (m3_fit){b, c, b > 0 ? b / c : 0.0f};
}

/* ------------------------------------------------------------------------------- IQ3: magnitudes, runs of 4 */

/* Levels of a run of 8 signs, which is two entries. */
M3_INLINE m3_f8 search_two4(const m3_grid4 *grid, const uint8_t (*entries)[4], const m3_values *v, int run,
                            m3_f8 levels, uint16_t *entry) {
  uint8_t level[8];
  for (int h = 0; h < 2; h++) {
    int at = 8 * run + 4 * h, e = m3_search4(grid, levels, v->w + at, v->twice + at);
    entry[h] = (uint16_t)e;
    memcpy(level + 4 * h, entries[e], 4);
  }
  return m3_unsigned8(level);
}

static m3_fit search_runs4(const m3_grid4 *grid, const uint8_t (*entries)[4], m3_values *v, int group, float scale,
                           m3_group_codes *codes) {
  m3_f8 levels = m3_load8(grid->level) * m3_splat(scale), products = m3_splat(0), squares = m3_splat(0);
  for (int k = 0; k < 4; k++) {
    int run = 4 * group + k;
    m3_f8 l = search_two4(grid, entries, v, run, levels, codes->entry + 2 * k);
    if (m3_move_wrong_sign(v, run, l)) l = search_two4(grid, entries, v, run, levels, codes->entry + 2 * k);
    products += l * m3_load8(v->twice + 8 * run);
    squares += l * l * m3_load8(v->w + 8 * run);
    codes->signs[k] = v->signs[run];
  }
  return fit_of(products, squares);
}

static m3_fit group_iq3_xxs(const m3_grids *grids, m3_values *v, int group, float scale, m3_group_codes *codes) {
  return search_runs4(&grids->iq3_xxs, m3_iq3_xxs_grid, v, group, scale, codes);
}

static m3_fit group_iq3_s(const m3_grids *grids, m3_values *v, int group, float scale, m3_group_codes *codes) {
  return search_runs4(&grids->iq3_s, m3_iq3_s_grid, v, group, scale, codes);
}

/* ------------------------------------------------------------------------------- IQ2: magnitudes, runs of 8 */

static m3_fit search_runs8(const m3_grid8 *grid, const uint8_t (*entries)[8], m3_values *v, int first, int runs,
                           float scale, m3_group_codes *codes) {
  const float level[3] = M3_IQ2_LEVELS, levels[3] = {level[0] * scale, level[1] * scale, level[2] * scale};
  m3_pair_levels pairs = m3_pair_levels_of(levels);
  m3_f8 products = m3_splat(0), squares = m3_splat(0);
  for (int r = 0; r < runs; r++) {
    const float *w = v->w + 8 * (first + r), *twice = v->twice + 8 * (first + r);
    float cost;
    int entry = m3_search8(grid, &pairs, w, twice, &cost);
    m3_f8 l = m3_unsigned8(entries[entry]);
    if (m3_move_wrong_sign(v, first + r, l)) {
      entry = m3_search8(grid, &pairs, w, twice, &cost);
      l = m3_unsigned8(entries[entry]);
    }
    products += l * m3_load8(twice);
    squares += l * l * m3_load8(w);
    codes->entry[r] = (uint16_t)entry;
    codes->signs[r] = v->signs[first + r];
  }
  return fit_of(products, squares);
}

static m3_fit group_iq2_xxs(const m3_grids *grids, m3_values *v, int group, float scale, m3_group_codes *codes) {
  return search_runs8(&grids->iq2_xxs, m3_iq2_xxs_grid, v, 4 * group, 4, scale, codes);
}

static m3_fit group_iq2_xs(const m3_grids *grids, m3_values *v, int group, float scale, m3_group_codes *codes) {
  return search_runs8(&grids->iq2_xs, m3_iq2_xs_grid, v, 2 * group, 2, scale, codes);
}

static m3_fit group_iq2_s(const m3_grids *grids, m3_values *v, int group, float scale, m3_group_codes *codes) {
  return search_runs8(&grids->iq2_s, m3_iq2_s_grid, v, 2 * group, 2, scale, codes);
}

/* ------------------------------------------------------------------- IQ1: -1, 0 and 1, all shifted up or down */

/* The cheapest entries for some runs that are all shifted by delta. */
typedef struct shifted_runs {
  float delta;
  uint16_t entry[4];
  float cost;
  m3_f8 products, squares; /* see fit_of */
} shifted_runs;

/* Fills `out` for its delta. */
static void search_shifted(const m3_grid8 *grid, const m3_values *v, int first, int runs, float scale,
                           shifted_runs *out) {
  float delta = out->delta;
  const float levels[3] = {(-1 + delta) * scale, delta * scale, (1 + delta) * scale};
  m3_pair_levels pairs = m3_pair_levels_of(levels);
  out->cost = 0;
  out->products = out->squares = m3_splat(0);
  for (int r = 0; r < runs; r++) {
    const float *w = v->w + 8 * (first + r), *twice = v->twice + 8 * (first + r);
    float cost;
    int entry = m3_search8(grid, &pairs, w, twice, &cost);
    m3_f8 l = m3_signed8(m3_iq1_grid[entry]) + m3_splat(delta);
    out->products += l * m3_load8(twice);
    out->squares += l * l * m3_load8(w);
    out->entry[r] = (uint16_t)entry;
    out->cost += cost;
  }
}

/* Shifts `runs` runs together up and down; gives which is better: 1 for down, the index into `shifts`. */
static uint8_t search_both_shifts(const m3_grid8 *grid, const m3_values *v, int first, int runs, float scale,
                                  shifted_runs shifts[2]) {
  shifts[0].delta = 0.125f;
  shifts[1].delta = -0.125f;
  for (int k = 0; k < 2; k++) search_shifted(grid, v, first, runs, scale, &shifts[k]);
  return shifts[1].cost < shifts[0].cost;
}

static m3_fit group_iq1_s(const m3_grids *grids, m3_values *v, int group, float scale, m3_group_codes *codes) {
  shifted_runs shifts[2];
  codes->signs[0] = search_both_shifts(&grids->iq1, v, 4 * group, 4, scale, shifts);
  const shifted_runs *better = &shifts[codes->signs[0]];
  memcpy(codes->entry, better->entry, sizeof better->entry);
  return fit_of(better->products, better->squares);
}

static m3_fit group_iq1_m(const m3_grids *grids, m3_values *v, int group, float scale, m3_group_codes *codes) {
  m3_f8 products = m3_splat(0), squares = m3_splat(0);
  for (int r = 0; r < 2; r++) {
    shifted_runs shifts[2];
    codes->signs[r] = search_both_shifts(&grids->iq1, v, 2 * group + r, 1, scale, shifts);
    const shifted_runs *better = &shifts[codes->signs[r]];
    codes->entry[r] = better->entry[0];
    products += better->products;
    squares += better->squares;
  }
  return fit_of(products, squares);
}

/* -------------------------------------------------------------------------------------------------- the table */

/* Groups, multiples and units are those of blocks.h: f16(d) (0.5 + k) / 4 is the odd multiple 2 k + 1 of f16(d) / 8.
 * The reference is about the inverse root mean square of the codebook's levels. The trials were chosen by measurement:
 * more levels make more dips in the error, and trials below and above these ones found little. IQ2_XS and IQ2_S need
 * the bound of 1.4 for values about a constant, where rounding did better with a lower one. */
#define IQ3_TRIALS 6, {0.75f, 0.86f, 0.98f, 1.12f, 1.28f, 1.46f}
#define IQ3_XXS_LEVELS 8, M3_IQ3_XXS_LEVELS
#define IQ3_S_LEVELS 8, M3_IQ3_S_LEVELS
#define IQ2_LEVELS 3, M3_IQ2_LEVELS
#define IQ1_LEVELS 2, {1.125f, 0.875f}

static const m3_codebook_type iq3_xxs = {8,          16,   M3_EVEN_SIGNS,  0.25f,        1 / 31.0f,
                                         IQ3_TRIALS, 1.1f, IQ3_XXS_LEVELS, group_iq3_xxs};
static const m3_codebook_type iq3_s = {8,          16,   M3_FREE_SIGNS, 1.0f,       1 / 7.6f,
                                       IQ3_TRIALS, 1.1f, IQ3_S_LEVELS,  group_iq3_s};
static const m3_codebook_type iq2_xxs = {
    8, 16, M3_EVEN_SIGNS, 0.125f, 1 / 23.0f, 5, {0.7f, 0.82f, 0.95f, 1.1f, 1.3f}, 1.1f, IQ2_LEVELS, group_iq2_xxs};
static const m3_codebook_type iq2_xs = {
    16,   16,         M3_EVEN_SIGNS, 0.125f, 1 / 24.0f, 6, {0.75f, 0.86f, 0.98f, 1.12f, 1.28f, 1.46f},
    1.4f, IQ2_LEVELS, group_iq2_xs};
static const m3_codebook_type iq2_s = {
    16, 16, M3_FREE_SIGNS, 0.125f, 1 / 24.0f, 4, {0.75f, 0.9f, 1.05f, 1.25f}, 1.4f, IQ2_LEVELS, group_iq2_s};
static const m3_codebook_type iq1_s = {8,    8,          M3_SIGNED_LEVELS, 1.0f, 1 / 0.78f, 3, {0.85f, 1.0f, 1.2f},
                                       1.1f, IQ1_LEVELS, group_iq1_s};
static const m3_codebook_type iq1_m = {16,   8,          M3_SIGNED_LEVELS, 1.0f, 1 / 0.78f, 2, {0.9f, 1.13f},
                                       1.1f, IQ1_LEVELS, group_iq1_m};

static void search_iq3_xxs(const float *x, const float *w, m3_coded_block *out) { m3_fit_block(&iq3_xxs, x, w, out); }
static void search_iq3_s(const float *x, const float *w, m3_coded_block *out) { m3_fit_block(&iq3_s, x, w, out); }
static void search_iq2_xxs(const float *x, const float *w, m3_coded_block *out) { m3_fit_block(&iq2_xxs, x, w, out); }
static void search_iq2_xs(const float *x, const float *w, m3_coded_block *out) { m3_fit_block(&iq2_xs, x, w, out); }
static void search_iq2_s(const float *x, const float *w, m3_coded_block *out) { m3_fit_block(&iq2_s, x, w, out); }
static void search_iq1_s(const float *x, const float *w, m3_coded_block *out) { m3_fit_block(&iq1_s, x, w, out); }
static void search_iq1_m(const float *x, const float *w, m3_coded_block *out) { m3_fit_block(&iq1_m, x, w, out); }

const m3_codebook_searches M3_CODEBOOK_SEARCHES = {search_iq3_xxs, search_iq3_s, search_iq2_xxs, search_iq2_xs,
                                                   search_iq2_s,   search_iq1_s, search_iq1_m};
