/* search_frame.h - the values of a block as the searches see them: a group in each lane, magnitudes below 2, weights
 * at most about 1, so that no square overflows or vanishes. Scaling is by powers of two and loses nothing. */
#ifndef M3_SRC_QUANT_SEARCH_FRAME_H
#define M3_SRC_QUANT_SEARCH_FRAME_H

#include <stdbool.h>

#include "quant/lanes.h"
#include "quant/scale_search.h"

/* Magnitudes below it become zero in every type with a float16 scale: half the smallest float16. */
#define M3_LEAST_MAGNITUDE 0x1p-25f

/* Of the greatest weight of a block: so little that it decides only among codes that nothing else decides. */
#define M3_LEAST_WEIGHT 0x1p-40f

enum { M3_MOST_VECTORS = 2, M3_LONGEST_GROUP = 32 };

typedef struct m3_frame {
  m3_f8 x[M3_MOST_VECTORS][M3_LONGEST_GROUP]; /* value j of group 8 v + lane is x[v][j][lane] */
  m3_f8 w[M3_MOST_VECTORS][M3_LONGEST_GROUP]; /* not set without weights */
  m3_f8 up, down;                             /* x = up * value; 1 / up */
  m3_f8 sum_w[M3_MOST_VECTORS];
  bool weighted;
} m3_frame;

/* NULL: all equal. */
M3_INLINE const m3_f8 *m3_weights(const m3_frame *f, int v) { return f->weighted ? f->w[v] : NULL; }

/* n is a multiple of M3_LANES. */
static void m3_deal(const float *from, m3_f8 (*to)[M3_LONGEST_GROUP], int vectors, int n) {
  for (int v = 0; v < vectors; v++)
    for (int j = 0; j < n; j += M3_LANES) m3_transpose8(from + v * M3_LANES * n + j, n, to[v] + j);
}

/* The greatest magnitude of each lane; of all lanes in every lane if they share a scale. */
M3_KERNEL m3_f8 m3_greatest_magnitude(m3_f8 (*x)[M3_LONGEST_GROUP], int vectors, int n, bool shared) {
  m3_f8 most = m3_splat(0);
  for (int v = 0; v < vectors; v++)
    for (int j = 0; j < n; j++) most = m3_max8(most, m3_abs8(x[v][j]));
  return shared ? m3_splat(m3_greatest(most)) : most;
}

/* Weights as shares of the greatest one, equal where all are zero. */
M3_KERNEL void m3_set_weights(m3_f8 (*w)[M3_LONGEST_GROUP], int vectors, int n, bool shared) {
  m3_f8 most = m3_greatest_magnitude(w, vectors, n, shared);
  m3_i8 none = most == 0;
  most = m3_select(none, m3_splat(1), most);
  m3_f8 least = m3_select(none, m3_splat(1), m3_splat(M3_LEAST_WEIGHT));
  for (int v = 0; v < vectors; v++)
    for (int j = 0; j < n; j++) w[v][j] = w[v][j] / most + least;
}

/* Fills the frame. shared: the groups are of one block; otherwise each lane is a block of its own. */
M3_KERNEL void m3_set_frame(m3_frame *f, const float *x, const float *w, int vectors, int n, bool shared) {
  m3_deal(x, f->x, vectors, n);
  m3_f8 most = m3_greatest_magnitude(f->x, vectors, n, shared);
  /* The greatest power of two not above `most`: its exponent. Lanes that are all but zero are scaled to zero. */
  m3_i8 zero = most < m3_splat(M3_LEAST_MAGNITUDE), exponent = (m3_i8)most >> 23;
  f->up = m3_select(zero, m3_splat(0), (m3_f8)((254 - exponent) << 23));
  f->down = m3_select(zero, m3_splat(0), (m3_f8)(exponent << 23));
  for (int v = 0; v < vectors; v++) {
    for (int j = 0; j < n; j++) f->x[v][j] *= f->up;
    f->sum_w[v] = m3_splat((float)n);
  }
  f->weighted = w != NULL;
  if (!w) return;
  m3_deal(w, f->w, vectors, n);
  m3_set_weights(f->w, vectors, n, shared);
  for (int v = 0; v < vectors; v++) {
    f->sum_w[v] = m3_splat(0);
    for (int j = 0; j < n; j++) f->sum_w[v] += f->w[v][j];
  }
}

/* The float16 that stands for each lane of `a`, a number of the frame; and what that is in the frame. */
M3_INLINE m3_f8 m3_stored8(const m3_frame *f, m3_f8 a) { return m3_half8(a * f->down) * f->up; }

/* A scale that all groups of a superblock share, and the price of telling their own by multiples of it. */
typedef struct m3_common_scale {
  float d, error;
} m3_common_scale;

/* Candidates for it: float16 numbers near greatest / (first + k step). */
typedef struct m3_common_candidates {
  float greatest;
  int tries; /* a multiple of 8 */
  float first, step;
  float low, high; /* of the multiples */
} m3_common_candidates;

/* The candidate in whole multiples of which the numbers p are told best, bend the price of squared deviations. A
 * candidate in each lane. */
M3_KERNEL m3_common_scale m3_best_common(const m3_frame *f, int vectors, const m3_f8 *p, const m3_f8 *bend,
                                         m3_common_candidates c) {
  float group[M3_MOST_GROUPS], price[M3_MOST_GROUPS];
  memcpy(group, p, (size_t)vectors * sizeof *p);
  memcpy(price, bend, (size_t)vectors * sizeof *bend);
  m3_common_scale best = {0, 3e38f};
  for (int k = 0; k < c.tries; k += M3_LANES) {
    m3_f8 count = {0, 1, 2, 3, 4, 5, 6, 7};
    m3_f8 d = m3_stored8(f, c.greatest / (c.first + c.step * (count + (float)k))), inverse = m3_inverse8(d);
    m3_f8 error = m3_splat(0);
    for (int g = 0; g < vectors * M3_LANES; g++) {
      m3_f8 miss = group[g] - d * m3_clamp8(m3_round8(group[g] * inverse), c.low, c.high);
      error += price[g] * miss * miss;
    }
    for (int lane = 0; lane < M3_LANES; lane++)
      if (error[lane] < best.error) best = (m3_common_scale){d[lane], error[lane]};
  }
  return best;
}

/* Codes of four neighbors in each of eight groups, which are n codes apart. */
M3_INLINE void m3_put_codes(uint8_t *code, int n, const m3_f8 *q) {
  m3_i8 bytes = __builtin_convertvector(q[0], m3_i8) | __builtin_convertvector(q[1], m3_i8) << 8 |
                __builtin_convertvector(q[2], m3_i8) << 16 | __builtin_convertvector(q[3], m3_i8) << 24;
  int32_t four[M3_LANES];
  memcpy(four, &bytes, sizeof four);
  for (int k = 0; k < M3_LANES; k++) memcpy(code + k * n, &four[k], 4);
}

/* A code of each of eight groups. */
M3_INLINE void m3_put_group_codes(uint8_t *code, m3_f8 q) {
  m3_i8 whole = __builtin_convertvector(q, m3_i8);
  for (int k = 0; k < M3_LANES; k++) code[k] = (uint8_t)whole[k];
}

#endif
