/* affine_search.h - scales and offsets of groups: value = a * code + b, code = 0 to top. Included by the files that
 * compile the searches for an instruction set.
 *
 * The error of a group is a quadratic form of (a, b) while the codes stay, so the best pair for given codes is known in
 * closed form, and the best codes for a given pair are the nearest ones. Taking turns goes down to a local minimum; it
 * starts from many ranges, narrower and wider than that of the values. */
#ifndef M3_SRC_QUANT_AFFINE_SEARCH_H
#define M3_SRC_QUANT_AFFINE_SEARCH_H

#include "quant/search_frame.h"

/* Starting ranges. The k-th is (high - low) / (top + first + k step) wide for a code, so its ends move by about step /
 * 2 codes from one to the next; each is tried centered on the values and moved by shares of a code. */
typedef struct affine_starts {
  int widths, shifts;
  float first, step;
} affine_starts;

typedef struct affine_shape {
  int vectors, n;  /* groups / 8, values of a group */
  float top;       /* greatest code */
  float scale_top; /* greatest scale and min of a group */
  affine_starts equal, weighted;
} affine_shape;

/* Weights are NULL where all are equal. Of the functions that end in _as there is a copy for `weighted` and one for
 * not; it says whether there are weights. */

/* Sums over a group with the nearest codes q for a pair (a, b); r = x - (a q + b) and w the weights. */
typedef struct affine_sums {
  m3_f8 q, qq, r, qr, rr; /* of w q, w q^2, w r, w q r, w r^2 */
} affine_sums;

M3_KERNEL affine_sums affine_try_as(const m3_f8 *x, const m3_f8 *w, bool weighted, int n, float top, m3_f8 a,
                                    m3_f8 inverse, m3_f8 b) {
  affine_sums s = {m3_splat(0), m3_splat(0), m3_splat(0), m3_splat(0), m3_splat(0)};
  for (int j = 0; j < n; j++) {
    m3_f8 above = x[j] - b;
    m3_f8 q = m3_clamp8(m3_round8(above * inverse), 0.0f, top);
    m3_f8 r = above - a * q;
    m3_f8 wq = weighted ? w[j] * q : q, wr = weighted ? w[j] * r : r;
    s.q += wq;
    s.qq += wq * q;
    s.r += wr;
    s.qr += wr * q;
    s.rr += wr * r;
  }
  return s;
}

static affine_sums affine_try(const m3_f8 *x, const m3_f8 *w, int n, float top, m3_f8 a, m3_f8 b) {
  m3_f8 inverse = m3_inverse8(a);
  return w ? affine_try_as(x, w, true, n, top, a, inverse, b) : affine_try_as(x, w, false, n, top, a, inverse, b);
}

/* Only the error. */
M3_KERNEL m3_f8 affine_error_as(const m3_f8 *x, const m3_f8 *w, bool weighted, int n, float top, m3_f8 a, m3_f8 b) {
  m3_f8 rr = m3_splat(0), inverse = m3_inverse8(a);
  for (int j = 0; j < n; j++) {
    m3_f8 above = x[j] - b;
    m3_f8 q = m3_clamp8(m3_round8(above * inverse), 0.0f, top);
    m3_f8 r = above - a * q;
    rr += weighted ? w[j] * r * r : r * r;
  }
  return rr;
}

static m3_f8 affine_error(const m3_f8 *x, const m3_f8 *w, int n, float top, m3_f8 a, m3_f8 b) {
  return w ? affine_error_as(x, w, true, n, top, a, b) : affine_error_as(x, w, false, n, top, a, b);
}

/* Steps (da, db) from the pair of the sums to the best pair for its codes, where b stays on its side of zero: below
 * with side -1, above with 1, anywhere with 0. Gives the error there. */
M3_KERNEL m3_f8 affine_step(const affine_sums *s, m3_f8 sum_w, m3_f8 b, float side, m3_f8 *da, m3_f8 *db) {
  m3_f8 zero = m3_splat(0);
  m3_f8 det = s->qq * sum_w - s->q * s->q;
  m3_i8 singular = det <= s->qq * sum_w * 1e-5f;
  m3_f8 inverse = 1.0f / m3_select(singular, m3_splat(1), det);
  m3_f8 a1 = m3_select(singular, zero, (s->qr * sum_w - s->r * s->q) * inverse);
  m3_f8 b1 = m3_select(singular, s->r / sum_w, (s->r * s->qq - s->qr * s->q) * inverse);
  /* On the wrong side: b = 0 and the best a for it. */
  m3_i8 wrong = (b + b1) * side < zero;
  m3_i8 flat = s->qq <= zero;
  m3_f8 a0 = m3_select(flat, zero, (s->qr + b * s->q) / m3_select(flat, m3_splat(1), s->qq));
  *da = m3_select(wrong, a0, a1);
  *db = m3_select(wrong, -b, b1);
  m3_f8 gain = 2.0f * (*da * s->qr + *db * s->r) - (*da * *da * s->qq + 2.0f * *da * *db * s->q + *db * *db * sum_w);
  return s->rr - gain;
}

/* b, or 0 where it is on the wrong side. */
M3_INLINE m3_f8 affine_on_side(m3_f8 b, float side) {
  if (side < 0) return m3_min8(b, m3_splat(0));
  return side > 0 ? m3_max8(b, m3_splat(0)) : b;
}

/* What is known of the groups of a vector. */
typedef struct affine_fit {
  m3_f8 a, b; /* best pair of any numbers */
  m3_f8 bend; /* its error grows by bend * da^2 when b follows */
  m3_f8 low, high;
} affine_fit;

/* Measured pairs after the best start, each the best one for the codes of the pair before. */
enum { AFFINE_TURNS = 4 };

M3_KERNEL affine_fit affine_best_pair_as(const affine_shape *t, const m3_f8 *x, const m3_f8 *w, bool weighted,
                                         m3_f8 sum_w, float side, const affine_starts starts) {
  affine_fit f;
  m3_f8 low = x[0], high = x[0];
  for (int j = 1; j < t->n; j++) {
    low = m3_min8(x[j], low);
    high = m3_max8(x[j], high);
  }
  low = affine_on_side(low, side);
  high = m3_max8(high, low);
  f.low = low;
  f.high = high;
  f.a = m3_splat(0);
  f.b = low;
  m3_f8 best = m3_splat(3e38f);
  for (int k = 0; k < starts.widths; k++) {
    m3_f8 a = (high - low) * (1.0f / (t->top + (starts.first + (float)k * starts.step))), inverse = m3_inverse8(a);
    for (int i = 0; i < starts.shifts; i++) {
      float shift = ((float)i + 0.5f) / (float)starts.shifts - 0.5f;
      m3_f8 b = 0.5f * (low + high - a * t->top) + shift * a, da, db;
      b = affine_on_side(b, side);
      affine_sums s = affine_try_as(x, w, weighted, t->n, t->top, a, inverse, b);
      m3_f8 error = affine_step(&s, sum_w, b, side, &da, &db);
      m3_i8 better = error < best;
      best = m3_select(better, error, best);
      f.a = m3_select(better, a + da, f.a);
      f.b = m3_select(better, b + db, f.b);
    }
  }
  m3_f8 a = f.a, b = f.b;
  f.bend = m3_splat(1);
  for (int k = 0; k < AFFINE_TURNS; k++) {
    m3_f8 inverse = m3_inverse8(a), da, db;
    affine_sums s = affine_try_as(x, w, weighted, t->n, t->top, a, inverse, b);
    m3_i8 better = s.rr <= best;
    if (k == 0) f.bend = s.qq - s.q * s.q / sum_w;
    best = m3_select(better, s.rr, best);
    f.a = m3_select(better, a, f.a);
    f.b = m3_select(better, b, f.b);
    f.bend = m3_select(better, s.qq - s.q * s.q / sum_w, f.bend);
    if (k == AFFINE_TURNS - 1) break;
    affine_step(&s, sum_w, b, side, &da, &db);
    a += da;
    b += db;
  }
  return f;
}

static affine_fit affine_best_pair(const affine_shape *t, const m3_f8 *x, const m3_f8 *w, m3_f8 sum_w, float side,
                                   const affine_starts starts) {
  return w ? affine_best_pair_as(t, x, w, true, sum_w, side, starts)
           : affine_best_pair_as(t, x, w, false, sum_w, side, starts);
}

/* The scale in whole multiples (up to top) of which the numbers p (at least 0) are best told, bend the price of squared
 * deviations: among candidates around the greatest over `top`, or that one itself if it is to be plain. */
static m3_f8 affine_common(const m3_frame *f, int vectors, const m3_f8 *p, const m3_f8 *bend, float top, bool plain) {
  m3_f8 most = p[0];
  for (int v = 1; v < vectors; v++) most = m3_max8(most, p[v]);
  float greatest = m3_greatest(most), step = top > 20 ? -0.5f : -0.25f;
  if (plain) return m3_stored8(f, m3_splat(greatest / top));
  m3_common_candidates candidates = {
      .greatest = greatest, .tries = 16, .first = top - 2 * step, .step = step, .low = 0, .high = top};
  return m3_splat(m3_best_common(f, vectors, p, bend, candidates).d);
}

/* A superblock as it would be stored, numbers of the frame. */
typedef struct affine_state {
  m3_f8 d, dmin; /* the same in all lanes; dmin has the sign that makes b = -dmin * min */
  m3_f8 scale[M3_MOST_VECTORS], min[M3_MOST_VECTORS], error[M3_MOST_VECTORS];
  float total;
} affine_state;

static void affine_measure(const affine_shape *t, const m3_frame *f, affine_state *s) {
  m3_f8 total = m3_splat(0);
  for (int v = 0; v < t->vectors; v++) {
    s->error[v] = affine_error(f->x[v], m3_weights(f, v), t->n, t->top, s->d * s->scale[v], -(s->dmin * s->min[v]));
    total += s->error[v];
  }
  s->total = m3_total(total);
}

/* Tries other scales and mins of each group, with the mins that fit them. */
M3_KERNEL void affine_neighbors_as(const affine_shape *t, const m3_frame *f, bool weighted, affine_state *s) {
  m3_f8 total = m3_splat(0), per_min = m3_inverse8(s->dmin);
  for (int v = 0; v < t->vectors; v++) {
    const m3_f8 *x = f->x[v], *w = m3_weights(f, v);
    m3_f8 scale0 = s->scale[v], min0 = s->min[v];
    for (int k = -1; k <= 1; k++) {
      m3_f8 scale = m3_clamp8(scale0 + (float)k, 0, t->scale_top);
      m3_f8 a = s->d * scale, inverse = m3_inverse8(a), b = -(s->dmin * min0);
      affine_sums sums = affine_try_as(x, w, weighted, t->n, t->top, a, inverse, b);
      m3_f8 b1 = b + sums.r / f->sum_w[v];
      m3_f8 min = m3_clamp8(m3_round8(-b1 * per_min), 0, t->scale_top);
      m3_f8 error = affine_error_as(x, w, weighted, t->n, t->top, a, -(s->dmin * min));
      m3_i8 keep = sums.rr <= error;
      error = m3_select(keep, sums.rr, error);
      min = m3_select(keep, min0, min);
      m3_i8 better = error < s->error[v];
      s->error[v] = m3_select(better, error, s->error[v]);
      s->scale[v] = m3_select(better, scale, s->scale[v]);
      s->min[v] = m3_select(better, min, s->min[v]);
    }
    total += s->error[v];
  }
  s->total = m3_total(total);
}

static void affine_neighbors(const affine_shape *t, const m3_frame *f, affine_state *s) {
  if (f->weighted)
    affine_neighbors_as(t, f, true, s);
  else
    affine_neighbors_as(t, f, false, s);
}

/* The best d and dmin for the codes, scales and mins as they are; true if the error went down. */
static bool affine_common_step(const affine_shape *t, const m3_frame *f, affine_state *s) {
  m3_f8 pp = m3_splat(0), pm = pp, mm = pp, pr = pp, mr = pp;
  for (int v = 0; v < t->vectors; v++) {
    m3_f8 scale = s->scale[v], min = s->min[v];
    affine_sums sums = affine_try(f->x[v], m3_weights(f, v), t->n, t->top, s->d * scale, -(s->dmin * min));
    pp += scale * scale * sums.qq;
    pm += scale * min * sums.q;
    mm += min * min * f->sum_w[v];
    pr += scale * sums.qr;
    mr += min * sums.r;
  }
  /* x = d p - dmin m + r: the step (dd, -ddmin) solves the normal equations. */
  float a = m3_total(pp), b = m3_total(pm), c = m3_total(mm), u = m3_total(pr), z = m3_total(mr);
  float det = a * c - b * b, dd = 0, dm = 0;
  if (det > 1e-5f * a * c) {
    dd = (u * c - z * b) / det;
    dm = (z * a - u * b) / det;
  } else if (a > 0) {
    dd = u / a;
  }
  affine_state next = *s;
  next.d = m3_stored8(f, s->d + dd);
  next.dmin = m3_stored8(f, s->dmin - dm);
  affine_measure(t, f, &next);
  if (!(next.total < s->total)) return false;
  *s = next;
  return true;
}

/* A pair (a, b) of any numbers for each group, and the price of other scales (see affine_fit). */
typedef struct affine_pairs {
  m3_f8 a[M3_MOST_VECTORS], b[M3_MOST_VECTORS], bend[M3_MOST_VECTORS];
} affine_pairs;

/* Whole scales and mins for pairs; plain: as they are, rounded. */
static void affine_settle(const affine_shape *t, const m3_frame *f, const affine_pairs *p, float side, bool plain,
                          affine_state *s) {
  m3_f8 depth[M3_MOST_VECTORS] = {m3_splat(0)};
  s->d = affine_common(f, t->vectors, p->a, p->bend, t->scale_top, plain);
  m3_f8 inverse = m3_inverse8(s->d);
  for (int v = 0; v < t->vectors; v++) {
    s->scale[v] = m3_clamp8(m3_round8(p->a[v] * inverse), 0, t->scale_top);
    m3_f8 best_b = p->b[v];
    if (!plain) { /* b for the scale as it is stored */
      affine_sums sums = affine_try(f->x[v], m3_weights(f, v), t->n, t->top, s->d * s->scale[v], best_b);
      best_b += sums.r / f->sum_w[v];
    }
    depth[v] = m3_max8(best_b * side, m3_splat(0));
  }
  s->dmin = affine_common(f, t->vectors, depth, f->sum_w, t->scale_top, plain) * -side;
  inverse = m3_inverse8(s->dmin * -side);
  for (int v = 0; v < t->vectors; v++) s->min[v] = m3_clamp8(m3_round8(depth[v] * inverse), 0, t->scale_top);
  affine_measure(t, f, s);
}

static affine_state affine_one_side(const affine_shape *t, const m3_frame *f, float side) {
  affine_state s, plain;
  affine_pairs best, range;
  for (int v = 0; v < t->vectors; v++) {
    affine_fit fit =
        affine_best_pair(t, f->x[v], m3_weights(f, v), f->sum_w[v], side, f->weighted ? t->weighted : t->equal);
    best.a[v] = m3_max8(fit.a, m3_splat(0));
    best.b[v] = fit.b;
    best.bend[v] = range.bend[v] = fit.bend;
    range.a[v] = (fit.high - fit.low) / t->top;
    range.b[v] = fit.low;
  }
  affine_settle(t, f, &best, side, false, &s);
  affine_neighbors(t, f, &s);
  if (affine_common_step(t, f, &s)) affine_neighbors(t, f, &s);
  affine_common_step(t, f, &s);
  /* Ranges as they are, rounded: what a search must never fall behind. */
  affine_settle(t, f, &range, side, true, &plain);
  return plain.total < s.total ? plain : s;
}

/* Whether some group lies above zero by more than half its extent, so that an offset above zero may serve better. */
static bool affine_far_above(const affine_shape *t, const m3_frame *f) {
  m3_f8 far = m3_splat(0);
  for (int v = 0; v < t->vectors; v++) {
    m3_f8 low = f->x[v][0], high = low;
    for (int j = 1; j < t->n; j++) {
      low = m3_min8(f->x[v][j], low);
      high = m3_max8(f->x[v][j], high);
    }
    far = m3_max8(far, m3_select(low > 0.5f * (high - low), m3_splat(1), m3_splat(0)));
  }
  return m3_greatest(far) > 0;
}

static void affine_put(const affine_shape *t, const m3_f8 *x, m3_f8 b, m3_f8 inverse, uint8_t *code) {
  for (int j = 0; j < t->n; j += 4) {
    m3_f8 q[4];
    for (int i = 0; i < 4; i++) q[i] = m3_clamp8(m3_round8((x[j + i] - b) * inverse), 0, t->top);
    m3_put_codes(code + j, t->n, q);
  }
}

static void affine_codes(const affine_shape *t, const m3_frame *f, const affine_state *s, m3_affine_groups *out) {
  for (int v = 0; v < t->vectors; v++) {
    m3_f8 a = s->d * s->scale[v], b = -(s->dmin * s->min[v]), inverse = m3_inverse8(a);
    m3_put_group_codes(out->scale + v * M3_LANES, s->scale[v]);
    m3_put_group_codes(out->min + v * M3_LANES, s->min[v]);
    affine_put(t, f->x[v], b, inverse, out->code + v * M3_LANES * t->n);
  }
  m3_f8 d = s->d * f->down, dmin = s->dmin * f->down;
  out->d = m3_f32_to_f16(d[0]);
  out->dmin = m3_f32_to_f16(dmin[0]);
}

static void affine_search(const affine_shape *t, const float *x, const float *w, m3_affine_groups *out) {
  m3_frame f;
  m3_set_frame(&f, x, w, t->vectors, t->n, true);
  affine_state s = affine_one_side(t, &f, -1);
  if (affine_far_above(t, &f)) {
    affine_state other = affine_one_side(t, &f, 1);
    if (other.total < s.total) s = other;
  }
  affine_codes(t, &f, &s, out);
}

/* --------------------------------------------------------------------------- blocks with a scale and an offset each */

/* The best pair of float16 so far. */
typedef struct affine_stored {
  m3_f8 d, m, error;
} affine_stored;

/* Takes the pair (d, m) of float16 where its error is less. */
static void affine_keep(const affine_shape *t, const m3_frame *f, m3_f8 d, m3_f8 m, affine_stored *best) {
  m3_f8 error = affine_error(f->x[0], m3_weights(f, 0), t->n, t->top, d, m);
  m3_i8 better = error < best->error;
  best->error = m3_select(better, error, best->error);
  best->d = m3_select(better, d, best->d);
  best->m = m3_select(better, m, best->m);
}

static void affine_blocks(const affine_shape *t, const float *x, const float *w, m3_single_blocks *out) {
  m3_frame f;
  m3_set_frame(&f, x, w, 1, t->n, false);
  affine_fit fit = affine_best_pair(t, f.x[0], m3_weights(&f, 0), f.sum_w[0], 0, f.weighted ? t->weighted : t->equal);
  affine_stored best = {m3_splat(0), m3_splat(0), m3_splat(3e38f)};
  /* The range as it is, rounded: what a search must never fall behind. */
  affine_keep(t, &f, m3_stored8(&f, (fit.high - fit.low) / t->top), m3_stored8(&f, fit.low), &best);
  /* An offset far from zero is stored coarsely: the numbers beside it too, each with the scale that fits it. */
  for (int k = -1; k <= 1; k++) {
    m3_f8 try_m = m3_stored8(&f, fit.b + (float)k * 0x1p-11f * m3_abs8(fit.b));
    affine_sums s = affine_try(f.x[0], m3_weights(&f, 0), t->n, t->top, fit.a, try_m);
    m3_i8 flat = s.qq <= m3_splat(0);
    m3_f8 da = m3_select(flat, m3_splat(0), s.qr / m3_select(flat, m3_splat(1), s.qq));
    affine_keep(t, &f, m3_stored8(&f, fit.a + da), try_m, &best);
  }
  m3_f8 inverse = m3_inverse8(best.d), real_d = best.d * f.down, real_m = best.m * f.down;
  for (int k = 0; k < M3_LANES; k++) {
    out->d[k] = m3_f32_to_f16(real_d[k]);
    out->m[k] = m3_f32_to_f16(real_m[k]);
  }
  affine_put(t, f.x[0], best.m, inverse, out->code);
}

#endif
