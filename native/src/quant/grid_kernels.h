/* grid_kernels.h - the cheapest entry of a codebook for one run of values, exactly: no entry costs less as float32 adds
 * it up. Of equal ones the same is taken by every instruction set. */
#ifndef M3_SRC_QUANT_GRID_KERNELS_H
#define M3_SRC_QUANT_GRID_KERNELS_H

#include <math.h>

#include "quant/grid_search.h"

/* s l (s l w - 2 w x), with `level` = s l and twice = 2 w x. */
M3_INLINE m3_f8 m3_cost_of(m3_f8 level, m3_f8 w, m3_f8 twice) { return level * (level * w - twice); }

/* Three levels as the combinations of two elements need them: of the first one (c % 3) and of the second one (c / 3).
 */
typedef struct m3_pair_levels {
  m3_f8 first, second;
  float last; /* both elements of combination 8 */
} m3_pair_levels;

M3_INLINE m3_pair_levels m3_pair_levels_of(const float *l) {
  const float first[M3_LANES] = {l[0], l[1], l[2], l[0], l[1], l[2], l[0], l[1]};
  const float second[M3_LANES] = {l[0], l[0], l[0], l[1], l[1], l[1], l[2], l[2]};
  return (m3_pair_levels){m3_load8(first), m3_load8(second), l[2]};
}

/* Costs of the nine combinations of two elements, the first eight as lanes. */
M3_KERNEL m3_f8 m3_pair_costs(const m3_pair_levels *l, const float *w, const float *twice, float *ninth) {
  m3_f8 a = m3_cost_of(l->first, m3_splat(w[0]), m3_splat(twice[0]));
  m3_f8 b = m3_cost_of(l->second, m3_splat(w[1]), m3_splat(twice[1]));
  *ninth = l->last * (l->last * w[0] - twice[0]) + l->last * (l->last * w[1] - twice[1]);
  return a + b;
}

M3_INLINE float m3_lesser(float a, float b) { return a < b ? a : b; }

/* Costs of the combinations of a half, infinite for those that do not exist; gives the least. */
M3_KERNEL float m3_half_costs(const m3_pair_levels *l, const float *w, const float *twice, float *cost) {
  float c8, r[M3_LANES + 1];
  m3_f8 c = m3_pair_costs(l, w, twice, &c8), rows = m3_pair_costs(l, w + 2, twice + 2, &r[8]);
  m3_store8(r, rows);
  for (int k = 0; k < 9; k++) m3_store8(cost + M3_LANES * k, c + m3_splat(r[k]));
  m3_store8(cost + 72, m3_splat(c8) + rows);
  m3_store8(cost + 80, m3_splat(INFINITY));
  cost[80] = c8 + r[8];
  return m3_lesser(m3_least(c), c8) + m3_lesser(m3_least(rows), r[8]);
}

/* The first number with the least cost. */
M3_KERNEL int m3_find_least(const float *cost, float least, int rows) {
  for (int k = 0; k < rows; k++) {
    unsigned bits = m3_not_above8(m3_load8(cost + M3_LANES * k), m3_splat(least));
    if (bits) return M3_LANES * k + __builtin_ctz(bits);
  }
  return 0;
}

/* The least cost of the second halves that go with a first half, of which `absent` is the row. */
M3_KERNEL float m3_least_partner(const float *absent, const float *cost, int rows) {
  m3_f8 least = m3_load8(absent) + m3_load8(cost);
  for (int k = 1; k < rows; k++)
    least = m3_min8(least, m3_load8(absent + M3_LANES * k) + m3_load8(cost + M3_LANES * k));
  return m3_least(least);
}

/* The pair of halves with the lowest sum of costs that `absent` (rows * 8 columns) lets pass. */
M3_KERNEL float m3_search_halves(const float *absent, const float *first, float least1, const float *second,
                                 float least2, int rows, int pair[2]) {
  int columns = rows * M3_LANES, a = m3_find_least(first, least1, rows);
  float partner = m3_least_partner(absent + a * columns, second, rows), best = least1 + partner;
  /* A first half is of use only if it is cheaper than the best pair even with the cheapest second half. */
  for (int k = 0; k < rows; k++) {
    unsigned bits = m3_not_above8(m3_load8(first + M3_LANES * k) + m3_splat(least2), m3_splat(best));
    for (; bits; bits &= bits - 1) {
      int i = M3_LANES * k + __builtin_ctz(bits);
      if (i == a || first[i] + least2 >= best) continue;
      float p = m3_least_partner(absent + i * columns, second, rows), sum = first[i] + p;
      if (sum < best) {
        best = sum;
        partner = p;
        a = i;
      }
    }
  }
  const float *row = absent + a * columns;
  int b = 0;
  for (int k = 0; k < rows; k++) {
    unsigned bits = m3_not_above8(m3_load8(row + M3_LANES * k) + m3_load8(second + M3_LANES * k), m3_splat(partner));
    if (!bits) continue;
    b = M3_LANES * k + __builtin_ctz(bits);
    break;
  }
  pair[0] = a;
  pair[1] = b;
  return best;
}

/* Entry for a run of 8 of three levels (already times the scale); w and twice = 2 w x hold eight. */
M3_KERNEL int m3_search8(const m3_grid8 *grid, const m3_pair_levels *l, const float *w, const float *twice,
                         float *cost) {
  float first[M3_HALF_LANES], second[M3_HALF_LANES];
  float least1 = m3_half_costs(l, w, twice, first), least2 = m3_half_costs(l, w + 4, twice + 4, second);
  int pair[2];
  *cost = m3_search_halves(grid->absent[0], first, least1, second, least2, M3_HALF_ROWS, pair);
  return grid->entry[pair[0]][pair[1]];
}

/* Costs of two elements of eight levels; gives the least. */
M3_KERNEL float m3_two_costs(m3_f8 levels, const float *w, const float *twice, float *cost) {
  float r[M3_LANES];
  m3_f8 c = m3_cost_of(levels, m3_splat(w[0]), m3_splat(twice[0]));
  m3_f8 rows = m3_cost_of(levels, m3_splat(w[1]), m3_splat(twice[1]));
  m3_store8(r, rows);
  for (int k = 0; k < M3_LANES; k++) m3_store8(cost + M3_LANES * k, c + m3_splat(r[k]));
  return m3_least(c) + m3_least(rows);
}

/* Entry for a run of 4 of eight levels (already times the scale). */
M3_KERNEL int m3_search4(const m3_grid4 *grid, m3_f8 levels, const float *w, const float *twice) {
  float first[M3_PAIRS], second[M3_PAIRS];
  float least1 = m3_two_costs(levels, w, twice, first), least2 = m3_two_costs(levels, w + 2, twice + 2, second);
  int pair[2];
  m3_search_halves(grid->absent[0], first, least1, second, least2, M3_PAIR_ROWS, pair);
  return grid->entry[pair[0]][pair[1]];
}

#endif
