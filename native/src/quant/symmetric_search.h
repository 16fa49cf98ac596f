/* symmetric_search.h - scales of groups: value = a * number of the code. The numbers are whole ones from `low` to
 * `high` or the 16 of m3_iq4_values. Included by the files that compile the searches for an instruction set.
 *
 * For given codes the best scale is known in closed form, and the other way round; both signs of the scale are tried,
 * because one end of the numbers reaches further. */
#ifndef M3_SRC_QUANT_SYMMETRIC_SEARCH_H
#define M3_SRC_QUANT_SYMMETRIC_SEARCH_H

#include "quant/codebooks.h"
#include "quant/search_frame.h"

/* Starting scales: the value of the greatest magnitude over `low` - c and over `high` + c, c = first + k step. */
typedef struct symmetric_starts {
  int tries; /* at each end */
  float first, step;
} symmetric_starts;

typedef struct symmetric_shape {
  int vectors, n;             /* groups / 8, values of a group */
  float low, high;            /* of the numbers */
  bool iq4;                   /* uneven numbers */
  float scale_low, scale_top; /* of the scales of groups */
  symmetric_starts equal, weighted;
} symmetric_shape;

/* Codes are looked for in a few steps through the bounds between neighbors. */
typedef struct uneven_numbers {
  m3_f8 first, last;             /* numbers 0..7 and 8..15 */
  m3_f8 bound_first, bound_last; /* bound k lies between numbers k and k + 1 (and 8 + k, 9 + k) */
} uneven_numbers;

M3_INLINE uneven_numbers symmetric_numbers(void) {
  uneven_numbers u;
  for (int k = 0; k < M3_LANES; k++) {
    u.first[k] = (float)m3_iq4_values[k];
    u.last[k] = (float)m3_iq4_values[8 + k];
    u.bound_first[k] = 0.5f * (float)(m3_iq4_values[k] + m3_iq4_values[k + 1]);
    u.bound_last[k] = k == 7 ? 1e30f : 0.5f * (float)(m3_iq4_values[8 + k] + m3_iq4_values[9 + k]);
  }
  return u;
}

/* Number of bounds that v is above: its code. */
M3_KERNEL m3_i8 symmetric_uneven_code(const uneven_numbers *u, m3_f8 v) {
  m3_i8 upper = v > m3_splat(u->bound_first[7]);
  m3_i8 code = (v > m3_select(upper, m3_splat(u->bound_last[3]), m3_splat(u->bound_first[3]))) & 4;
  for (int step = 2; step >= 1; step /= 2) {
    m3_i8 at = code + (step - 1);
    m3_f8 bound = m3_select(upper, m3_lookup8(u->bound_last, at), m3_lookup8(u->bound_first, at));
    code += (v > bound) & step;
  }
  return code | (upper & 8);
}

M3_INLINE m3_f8 symmetric_number(const uneven_numbers *u, m3_i8 code) {
  return m3_select((code & 8) != 0, m3_lookup8(u->last, code & 7), m3_lookup8(u->first, code & 7));
}

M3_INLINE m3_f8 symmetric_nearest(const symmetric_shape *t, const uneven_numbers *u, bool iq4, m3_f8 v) {
  if (iq4) return symmetric_number(u, symmetric_uneven_code(u, v));
  return m3_clamp8(m3_round8(v), t->low, t->high);
}

/* Weights are NULL where all are equal. Of the functions that end in _as there is a copy for each kind of numbers, with
 * weights and without. */

/* Sums over a group with the nearest numbers q for a scale a; r = x - a q. */
typedef struct symmetric_sums {
  m3_f8 qq, qr, rr; /* of w q^2, w q r, w r^2 */
} symmetric_sums;

M3_KERNEL symmetric_sums symmetric_try_as(const symmetric_shape *t, const uneven_numbers *u, const m3_f8 *x,
                                          const m3_f8 *w, bool iq4, bool weighted, m3_f8 a) {
  symmetric_sums s = {m3_splat(0), m3_splat(0), m3_splat(0)};
  m3_f8 inverse = m3_inverse8(a);
  for (int j = 0; j < t->n; j++) {
    m3_f8 q = symmetric_nearest(t, u, iq4, x[j] * inverse);
    m3_f8 r = x[j] - a * q;
    m3_f8 wq = weighted ? w[j] * q : q;
    s.qq += wq * q;
    s.qr += wq * r;
    s.rr += weighted ? w[j] * r * r : r * r;
  }
  return s;
}

static symmetric_sums symmetric_try(const symmetric_shape *t, const uneven_numbers *u, const m3_f8 *x, const m3_f8 *w,
                                    m3_f8 a) {
  if (t->iq4) return w ? symmetric_try_as(t, u, x, w, true, true, a) : symmetric_try_as(t, u, x, w, true, false, a);
  return w ? symmetric_try_as(t, u, x, w, false, true, a) : symmetric_try_as(t, u, x, w, false, false, a);
}

M3_KERNEL m3_f8 symmetric_error_as(const symmetric_shape *t, const uneven_numbers *u, const m3_f8 *x, const m3_f8 *w,
                                   bool iq4, bool weighted, m3_f8 a) {
  m3_f8 rr = m3_splat(0), inverse = m3_inverse8(a);
  for (int j = 0; j < t->n; j++) {
    m3_f8 r = x[j] - a * symmetric_nearest(t, u, iq4, x[j] * inverse);
    rr += weighted ? w[j] * r * r : r * r;
  }
  return rr;
}

static m3_f8 symmetric_error(const symmetric_shape *t, const uneven_numbers *u, const m3_f8 *x, const m3_f8 *w,
                             m3_f8 a) {
  if (t->iq4) return w ? symmetric_error_as(t, u, x, w, true, true, a) : symmetric_error_as(t, u, x, w, true, false, a);
  return w ? symmetric_error_as(t, u, x, w, false, true, a) : symmetric_error_as(t, u, x, w, false, false, a);
}

/* What is known of the groups of a vector. */
typedef struct symmetric_fit {
  m3_f8 a;    /* best scale of any */
  m3_f8 bend; /* its error grows by bend * da^2 */
} symmetric_fit;

/* The value of the greatest magnitude of each group. */
static m3_f8 symmetric_extreme(const m3_f8 *x, int n) {
  m3_f8 low = x[0], high = x[0];
  for (int j = 1; j < n; j++) {
    low = m3_min8(x[j], low);
    high = m3_max8(x[j], high);
  }
  return m3_select(-low > high, low, high);
}

/* Measured scales after the best start, each the best one for the codes of the scale before. */
enum { SYMMETRIC_TURNS = 3 };

M3_KERNEL symmetric_fit symmetric_best_scale_as(const symmetric_shape *t, const uneven_numbers *u, const m3_f8 *x,
                                                const m3_f8 *w, bool iq4, bool weighted) {
  const symmetric_starts starts = weighted ? t->weighted : t->equal;
  symmetric_fit f = {m3_splat(0), m3_splat(1)};
  m3_f8 extreme = symmetric_extreme(x, t->n), best = m3_splat(3e38f);
  for (int k = 0; k < 2 * starts.tries; k++) {
    bool low = k < starts.tries;
    float c = starts.first + (float)(low ? k : k - starts.tries) * starts.step;
    m3_f8 a = extreme * (1.0f / (low ? t->low - c : t->high + c));
    symmetric_sums s = symmetric_try_as(t, u, x, w, iq4, weighted, a);
    m3_i8 flat = s.qq <= m3_splat(0);
    m3_f8 da = m3_select(flat, m3_splat(0), s.qr / m3_select(flat, m3_splat(1), s.qq));
    m3_f8 error = s.rr - da * s.qr;
    m3_i8 better = error < best;
    best = m3_select(better, error, best);
    f.a = m3_select(better, a + da, f.a);
  }
  m3_f8 a = f.a;
  for (int k = 0; k < SYMMETRIC_TURNS; k++) {
    symmetric_sums s = symmetric_try_as(t, u, x, w, iq4, weighted, a);
    m3_i8 better = s.rr <= best;
    best = m3_select(better, s.rr, best);
    f.a = m3_select(better, a, f.a);
    f.bend = k == 0 ? s.qq : m3_select(better, s.qq, f.bend);
    m3_i8 flat = s.qq <= m3_splat(0);
    a += m3_select(flat, m3_splat(0), s.qr / m3_select(flat, m3_splat(1), s.qq));
  }
  return f;
}

static symmetric_fit symmetric_best_scale(const symmetric_shape *t, const uneven_numbers *u, const m3_f8 *x,
                                          const m3_f8 *w) {
  if (t->iq4)
    return w ? symmetric_best_scale_as(t, u, x, w, true, true) : symmetric_best_scale_as(t, u, x, w, true, false);
  return w ? symmetric_best_scale_as(t, u, x, w, false, true) : symmetric_best_scale_as(t, u, x, w, false, false);
}

/* ------------------------------------------------------------------------------ a scale for all, one for each group */

/* A superblock as it would be stored, numbers of the frame. */
typedef struct symmetric_state {
  m3_f8 d; /* the same in all lanes */
  m3_f8 scale[M3_MOST_VECTORS], error[M3_MOST_VECTORS];
  float total;
} symmetric_state;

static void symmetric_measure(const symmetric_shape *t, const uneven_numbers *u, const m3_frame *f,
                              symmetric_state *s) {
  m3_f8 total = m3_splat(0);
  for (int v = 0; v < t->vectors; v++) {
    s->error[v] = symmetric_error(t, u, f->x[v], m3_weights(f, v), s->d * s->scale[v]);
    total += s->error[v];
  }
  s->total = m3_total(total);
}

static void symmetric_neighbors(const symmetric_shape *t, const uneven_numbers *u, const m3_frame *f,
                                symmetric_state *s) {
  m3_f8 total = m3_splat(0);
  for (int v = 0; v < t->vectors; v++) {
    m3_f8 scale0 = s->scale[v];
    for (int k = -1; k <= 1; k += 2) {
      m3_f8 scale = m3_clamp8(scale0 + (float)k, t->scale_low, t->scale_top);
      m3_f8 error = symmetric_error(t, u, f->x[v], m3_weights(f, v), s->d * scale);
      m3_i8 better = error < s->error[v];
      s->error[v] = m3_select(better, error, s->error[v]);
      s->scale[v] = m3_select(better, scale, s->scale[v]);
    }
    total += s->error[v];
  }
  s->total = m3_total(total);
}

/* The best d for the codes and scales as they are; true if the error went down. */
static bool symmetric_common_step(const symmetric_shape *t, const uneven_numbers *u, const m3_frame *f,
                                  symmetric_state *s) {
  m3_f8 pp = m3_splat(0), pr = pp;
  for (int v = 0; v < t->vectors; v++) {
    symmetric_sums sums = symmetric_try(t, u, f->x[v], m3_weights(f, v), s->d * s->scale[v]);
    pp += s->scale[v] * s->scale[v] * sums.qq;
    pr += s->scale[v] * sums.qr;
  }
  float a = m3_total(pp), b = m3_total(pr);
  if (!(a > 0)) return false;
  symmetric_state next = *s;
  next.d = m3_stored8(f, s->d + b / a);
  symmetric_measure(t, u, f, &next);
  if (!(next.total < s->total)) return false;
  *s = next;
  return true;
}

/* The scale in whole multiples of which the scales a are best told. */
static m3_f8 symmetric_common(const symmetric_shape *t, const m3_frame *f, const m3_f8 *a, const m3_f8 *bend) {
  m3_f8 top = m3_abs8(a[0]);
  for (int v = 1; v < t->vectors; v++) top = m3_max8(top, m3_abs8(a[v]));
  float greatest = m3_greatest(top);
  m3_common_candidates candidates = {.greatest = greatest,
                                     .tries = 8,
                                     .first = t->scale_low - 1,
                                     .step = 0.5f,
                                     .low = t->scale_low,
                                     .high = t->scale_top};
  m3_common_scale one = m3_best_common(f, t->vectors, a, bend, candidates);
  candidates.first = t->scale_top + 1;
  candidates.step = -0.5f;
  m3_common_scale other = m3_best_common(f, t->vectors, a, bend, candidates);
  return m3_splat(one.error <= other.error ? one.d : other.d);
}

static void symmetric_settle(const symmetric_shape *t, const uneven_numbers *u, const m3_frame *f, const m3_f8 *a,
                             m3_f8 d, symmetric_state *s) {
  s->d = d;
  m3_f8 inverse = m3_inverse8(d);
  for (int v = 0; v < t->vectors; v++) s->scale[v] = m3_clamp8(m3_round8(a[v] * inverse), t->scale_low, t->scale_top);
  symmetric_measure(t, u, f, s);
}

static void symmetric_put(const symmetric_shape *t, const uneven_numbers *u, const m3_f8 *x, m3_f8 a, uint8_t *code) {
  m3_f8 inverse = m3_inverse8(a);
  for (int j = 0; j < t->n; j += 4) {
    m3_f8 q[4];
    for (int i = 0; i < 4; i++) {
      m3_f8 v = x[j + i] * inverse;
      q[i] = t->iq4 ? __builtin_convertvector(symmetric_uneven_code(u, v), m3_f8)
                    : m3_clamp8(m3_round8(v), t->low, t->high) - t->low;
    }
    m3_put_codes(code + j, t->n, q);
  }
}

static void symmetric_groups(const symmetric_shape *t, const float *x, const float *w, m3_symmetric_groups *out) {
  m3_frame f;
  m3_set_frame(&f, x, w, t->vectors, t->n, true);
  uneven_numbers u = symmetric_numbers();
  symmetric_state s, plain;
  m3_f8 a[M3_MOST_VECTORS] = {m3_splat(0)}, bend[M3_MOST_VECTORS], range[M3_MOST_VECTORS];
  for (int v = 0; v < t->vectors; v++) {
    symmetric_fit fit = symmetric_best_scale(t, &u, f.x[v], m3_weights(&f, v));
    a[v] = fit.a;
    bend[v] = fit.bend;
    range[v] = symmetric_extreme(f.x[v], t->n) / t->low;
  }
  symmetric_settle(t, &u, &f, a, symmetric_common(t, &f, a, bend), &s);
  symmetric_neighbors(t, &u, &f, &s);
  if (symmetric_common_step(t, &u, &f, &s)) symmetric_neighbors(t, &u, &f, &s);
  symmetric_common_step(t, &u, &f, &s);
  /* Extremes as they are, rounded: what a search must never fall behind. */
  m3_f8 most = m3_abs8(range[0]);
  for (int v = 1; v < t->vectors; v++) most = m3_max8(most, m3_abs8(range[v]));
  symmetric_settle(t, &u, &f, range, m3_stored8(&f, m3_splat(m3_greatest(most) / t->scale_top)), &plain);
  if (plain.total < s.total) s = plain;

  for (int v = 0; v < t->vectors; v++) {
    m3_i8 whole = __builtin_convertvector(s.scale[v], m3_i8);
    for (int k = 0; k < M3_LANES; k++) out->scale[v * M3_LANES + k] = (int8_t)whole[k];
    symmetric_put(t, &u, f.x[v], s.d * s.scale[v], out->code + v * M3_LANES * t->n);
  }
  m3_f8 d = s.d * f.down;
  out->d = m3_f32_to_f16(d[0]);
}

/* ------------------------------------------------------------------------------------------ a scale for each block */

static void symmetric_blocks(const symmetric_shape *t, const float *x, const float *w, m3_single_blocks *out) {
  m3_frame f;
  m3_set_frame(&f, x, w, 1, t->n, false);
  uneven_numbers u = symmetric_numbers();
  /* The extreme as it is, rounded, is what a search must never fall behind. */
  m3_f8 plain = m3_stored8(&f, symmetric_extreme(f.x[0], t->n) / t->low);
  m3_f8 d = m3_stored8(&f, symmetric_best_scale(t, &u, f.x[0], m3_weights(&f, 0)).a);
  m3_f8 plain_error = symmetric_error(t, &u, f.x[0], m3_weights(&f, 0), plain);
  m3_f8 error = symmetric_error(t, &u, f.x[0], m3_weights(&f, 0), d);
  d = m3_select(error <= plain_error, d, plain);
  m3_f8 real_d = d * f.down;
  for (int k = 0; k < M3_LANES; k++) out->d[k] = m3_f32_to_f16(real_d[k]);
  symmetric_put(t, &u, f.x[0], d, out->code);
}

#endif
