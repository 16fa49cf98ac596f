/* scale_fit.h - scales of a block of 256 of a codebook type: a float16 for all, an odd multiple of it for each group.
 *
 * While the codes of a group stay as they are its error is a parabola of its scale. Codes found at several trial scales
 * give a set of parabolas; the block's scale is the one that has, over all groups, the lowest sum of the lowest
 * parabola at the best multiple. Then the codes are searched again at the scales that are stored, and those parabolas
 * join the others. */
#ifndef M3_SRC_QUANT_SCALE_FIT_H
#define M3_SRC_QUANT_SCALE_FIT_H

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "quant/blocks.h"
#include "quant/codebook_search.h"
#include "quant/grid_lanes.h"
#include "quant/grid_search.h"
#include "quant/half.h"

enum { M3_TRIALS_MOST = 6, M3_LEVELS_MOST = 8, M3_ROUNDS = 3 };
enum { M3_FITS_MOST = M3_TRIALS_MOST + M3_LEVELS_MOST + M3_ROUNDS };

/* Error of a group at its scale s, less the error of zeros: c s^2 - 2 b s. */
typedef struct m3_fit {
  float b, c;
  float vertex; /* b / c, at least 0 */
} m3_fit;

/* A block. Values are divided by a power of two so that the greatest magnitude is in 1..2, weights by the greatest. */
typedef struct m3_values {
  float power;
  float x[M3_SUPERBLOCK], w[M3_SUPERBLOCK];
  float twice[M3_SUPERBLOCK];       /* 2 w x, x being negative if the sign that is stored is not the value's own */
  uint8_t signs[M3_SUPERBLOCK / 8]; /* bit set: negative */
  int8_t wrong[M3_SUPERBLOCK / 8];  /* element of the run with the wrong sign, or -1 */
} m3_values;

/* How a type treats signs: levels have them; they are stored apart; so, and an even number of eight is negative. */
typedef enum m3_sign_rule { M3_SIGNED_LEVELS, M3_FREE_SIGNS, M3_EVEN_SIGNS } m3_sign_rule;

/* Finds the codes of a group that cost least at a scale. */
typedef m3_fit (*m3_group_search)(const m3_grids *grids, m3_values *v, int group, float scale, m3_group_codes *codes);

typedef struct m3_codebook_type {
  int groups;    /* of a block: 8 or 16 */
  int multiples; /* the scale of a group is 1, 3, .. 2 * multiples - 1 times the unit */
  m3_sign_rule sign_rule;
  float unit;      /* over the float16 scale; a power of two */
  float reference; /* over the weighted root mean square of a group: where the trials are made about */
  int trials;
  float trial[M3_TRIALS_MOST]; /* of the reference */
  float little;                /* magnitudes up to this times their root mean square differ little */
  int levels;                  /* magnitudes that elements of an entry have */
  float level[M3_LEVELS_MOST];
  m3_group_search search;
} m3_codebook_type;

/* Columns without any weight beside the greatest of the block still get codes that suit them. */
#define M3_LEAST_FIT_WEIGHT 1e-9f

/* False if all values are nearer to zero than to any other number of the types, the least of which is 2^-27. */
static bool m3_load_values(m3_values *v, const float *x, const float *w) {
  float most = 0, heaviest = 0;
  for (int i = 0; i < M3_SUPERBLOCK; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
  if (most < 0x1p-28f) return false;
  for (int i = 0; w && i < M3_SUPERBLOCK; i++) heaviest = w[i] > heaviest ? w[i] : heaviest;
  v->power = m3_float_of(m3_bits_of(most) & 0x7f800000);
  for (int i = 0; i < M3_SUPERBLOCK; i++) {
    float weight = heaviest > 0 ? w[i] / heaviest : 1.0f;
    v->x[i] = x[i] / v->power;
    v->w[i] = weight > M3_LEAST_FIT_WEIGHT ? weight : M3_LEAST_FIT_WEIGHT;
  }
  return true;
}

/* Sets `signs` and `twice`. A run of eight that has to have an even number of negative ones and has not gets the wrong
 * sign at one element. At level l and scale s that adds 4 s l w |x| to the error, and l can be the lowest level, so it
 * is the element with the least w |x|. */
static void m3_set_signs(m3_values *v, m3_sign_rule rule) {
  for (int i = 0; i < M3_SUPERBLOCK; i++)
    v->twice[i] = 2 * (v->w[i] * (rule == M3_SIGNED_LEVELS ? v->x[i] : fabsf(v->x[i])));
  for (int r = 0; rule != M3_SIGNED_LEVELS && r < M3_SUPERBLOCK / 8; r++) {
    float *twice = v->twice + 8 * r;
    unsigned signs = 0;
    v->wrong[r] = -1;
    for (int j = 0; j < 8; j++) signs |= (m3_bits_of(v->x[8 * r + j]) >> 31) << j;
    if (rule == M3_EVEN_SIGNS && __builtin_parity(signs)) {
      int cheapest = 0;
      for (int j = 1; j < 8; j++)
        if (twice[j] < twice[cheapest]) cheapest = j;
      signs ^= 1u << cheapest;
      twice[cheapest] = -twice[cheapest];
      v->wrong[r] = (int8_t)cheapest;
    }
    v->signs[r] = (uint8_t)signs;
  }
}

/* Once the levels of a run are known the wrong sign may be cheaper at another element: moves it there. */
static bool m3_move_wrong_sign(m3_values *v, int run, m3_f8 levels) {
  int from = v->wrong[run];
  if (from < 0) return false;
  float *twice = v->twice + 8 * run, cost[M3_LANES];
  m3_f8 costs = levels * m3_abs8(m3_load8(twice));
  m3_store8(cost, costs);
  float least = m3_least(costs);
  if (!(least < cost[from])) return false;
  int to = __builtin_ctz(m3_not_above8(costs, m3_splat(least)));
  twice[from] = -twice[from];
  twice[to] = -twice[to];
  v->signs[run] ^= (uint8_t)(1u << from | 1u << to);
  v->wrong[run] = (int8_t)to;
  return true;
}

/* The unit, in terms of the values as loaded, that a float16 scale gives, and the float16 nearest to a unit. It is not
 * zero: a scale that is too small for float16 can be the multiple of one that is not. */
static float m3_unit_of(const m3_codebook_type *type, const m3_values *v, uint16_t d) {
  return m3_f16_to_f32(d) / v->power * type->unit;
}

static uint16_t m3_d_of(const m3_codebook_type *type, const m3_values *v, float unit) {
  float d = unit / type->unit * v->power;
  uint16_t h = m3_f32_to_f16(d < 65504.0f ? d : 65504.0f);
  return h ? h : 1;
}

static float m3_error_at(m3_fit fit, float s) { return s * (fit.c * s - 2 * fit.b); }

typedef struct m3_fits {
  int n[M3_CODEBOOK_GROUPS];
  m3_fit fit[M3_CODEBOOK_GROUPS][M3_FITS_MOST];
} m3_fits;

/* Of a group, the multiple with the lowest error. */
static int m3_best_multiple(const m3_fits *fits, int g, int multiples, float unit) {
  float least = INFINITY, top = (float)(multiples - 1);
  int best = 1;
  for (int f = 0; f < fits->n[g]; f++) {
    m3_fit fit = fits->fit[g][f];
    float k = fit.vertex / unit * 0.5f;
    int m = 2 * (int)(k < top ? k : top) + 1; /* the odd number nearest to vertex / unit */
    float error = m3_error_at(fit, unit * (float)m);
    if (error < least) {
      least = error;
      best = m;
    }
  }
  return best;
}

/* The error of a block for eight units: each group has its best multiple. */
M3_INLINE m3_f8 m3_errors_of(const m3_codebook_type *type, const m3_fits *fits, m3_f8 unit) {
  m3_f8 sum = m3_splat(0), half_inverse = m3_splat(0.5f) / unit, top = m3_splat((float)(type->multiples - 1));
  for (int g = 0; g < type->groups; g++) {
    m3_f8 least = m3_splat(INFINITY);
    for (int f = 0; f < fits->n[g]; f++) {
      m3_fit fit = fits->fit[g][f];
      m3_f8 k = m3_whole8(m3_min8(m3_splat(fit.vertex) * half_inverse, top));
      m3_f8 s = unit * (k + k + m3_splat(1));
      least = m3_min8(least, s * (m3_splat(fit.c) * s - m3_splat(2 * fit.b)));
    }
    sum += least;
  }
  return sum;
}

/* The best float16 scale of those about the one with which the greatest scale of a group gets the greatest multiple:
 * from 0.75 to 1.5 times as large. */
static uint16_t m3_choose_d(const m3_codebook_type *type, const m3_values *v, const m3_fits *fits, float about) {
  enum { TRIED = 48 };
  float unit[TRIED], error[TRIED];
  uint16_t d[TRIED];
  for (int i = 0; i < TRIED; i++) {
    d[i] = m3_d_of(type, v, about * (0.75f + (float)i * (1.0f / 64)));
    unit[i] = m3_unit_of(type, v, d[i]);
  }
  for (int i = 0; i < TRIED; i += M3_LANES) m3_store8(error + i, m3_errors_of(type, fits, m3_load8(unit + i)));
  int best = 0;
  for (int i = 1; i < TRIED; i++)
    if (error[i] < error[best]) best = i;
  return d[best];
}

/* The share of a group's weighted squares above which one value alone decides about the scale. */
#define M3_DECIDING_SHARE 0.35f

/* Codes of a group at all trial scales; gives the scale of the best ones. */
static float m3_try_scales(const m3_codebook_type *type, const m3_grids *grids, m3_values *v, int g, m3_fits *fits) {
  int size = M3_SUPERBLOCK / type->groups, n = 0, decides = g * size;
  float sum = 0, weight = 0, greatest_square = 0, most = 0;
  for (int i = g * size; i < (g + 1) * size; i++) {
    float square = v->w[i] * (v->x[i] * v->x[i]);
    sum += square;
    weight += v->w[i];
    most = fabsf(v->x[i]) > most ? fabsf(v->x[i]) : most;
    if (square > greatest_square) {
      greatest_square = square;
      decides = i;
    }
  }
  float rms = sqrtf(sum / weight), reference = (rms > 0x1p-20f ? rms : 0x1p-20f) * type->reference;
  float scales[M3_TRIALS_MOST + M3_LEVELS_MOST];
  for (int t = 0; t < type->trials; t++) scales[n++] = reference * type->trial[t];
  /* One value that decides, or magnitudes that differ little: scales with which a level meets them, far though they may
   * be from the others. */
  if (sum > 0 && (greatest_square > M3_DECIDING_SHARE * sum || most < type->little * rms))
    for (int l = 0; l < type->levels; l++) scales[n++] = fabsf(v->x[decides]) / type->level[l];
  float least = 0, scale = 0;
  m3_group_codes codes;
  for (int t = 0; t < n; t++) {
    m3_fit fit = type->search(grids, v, g, scales[t], &codes);
    float error = m3_error_at(fit, fit.vertex);
    if (error < least) {
      least = error;
      scale = fit.vertex;
    }
    fits->fit[g][t] = fit;
  }
  fits->n[g] = n;
  return scale;
}

/* Codes of all groups at the multiples of d that suit them best; d may change to what suits these codes better. The
 * error comes back, and the parabolas join fits. */
static float m3_code_groups(const m3_codebook_type *type, const m3_grids *grids, m3_values *v, uint16_t d,
                            m3_fits *fits, m3_coded_block *out) {
  float unit = m3_unit_of(type, v, d);
  m3_fit all = {0, 0, 0}; /* by the unit */
  for (int g = 0; g < type->groups; g++) {
    int multiple = m3_best_multiple(fits, g, type->multiples, unit);
    m3_fit fit = type->search(grids, v, g, unit * (float)multiple, &out->group[g]);
    fits->fit[g][fits->n[g]++] = fit;
    all.b += fit.b * (float)multiple;
    all.c += fit.c * (float)(multiple * multiple);
    out->multiple[g] = (uint8_t)multiple;
  }
  out->d = all.b > 0 ? m3_d_of(type, v, all.b / all.c) : d;
  float before = m3_error_at(all, unit), after = m3_error_at(all, m3_unit_of(type, v, out->d));
  if (after < before) return after;
  out->d = d;
  return before;
}

static void m3_fit_block(const m3_codebook_type *type, const float *x, const float *w, m3_coded_block *out) {
  const m3_grids *grids = m3_get_grids();
  m3_values v;
  m3_fits fits;
  memset(out, 0, sizeof *out);
  if (!m3_load_values(&v, x, w)) return;
  m3_set_signs(&v, type->sign_rule);
  float greatest = 0;
  for (int g = 0; g < type->groups; g++) {
    float scale = m3_try_scales(type, grids, &v, g, &fits);
    greatest = scale > greatest ? scale : greatest;
  }
  uint16_t d = m3_choose_d(type, &v, &fits, greatest / (float)(2 * type->multiples - 1));
  float least = m3_code_groups(type, grids, &v, d, &fits, out);
  for (int round = 1; round < M3_ROUNDS; round++) {
    m3_coded_block again;
    memset(&again, 0, sizeof again);
    float error = m3_code_groups(type, grids, &v, out->d, &fits, &again);
    if (!(error < least)) break;
    least = error;
    *out = again;
  }
  if (!(least < 0)) out->d = 0; /* not better than zeros */
}

#endif
