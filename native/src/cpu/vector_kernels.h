/* vector_kernels.h - the float loops of the tables with vectors, once for all of them. A file that includes it has
 * defined the vector first:
 *     vec, LANES                    so many floats
 *     zero(), all(a)
 *     load(p), load_first(p, n)     the first n < LANES of p, and zeros; no other memory is touched
 *     store(p, v), store_first(p, v, n)
 *     multiply_add(a, b, c)                  a * b + c, rounded once
 *     add, subtract, multiply, larger(a, b)   larger: b where a is NaN
 *     sum(v), sum4(a, b, c, d, out) sums of lanes: sum4 gives the bits of four sums
 *     nearest(v), power_of_2(v)     2^v of a whole number that is an exponent
 *     bounded(low, v, high)         NaN stays
 *     all_finite(v)
 *
 * One output is one vector of partial sums, whatever is computed beside it: the grouping in tiles changes no bit. The
 * sizes of tiles are arguments that are constant where they are inlined, so that the sums stay in registers. */
#ifndef M3_SRC_CPU_VECTOR_KERNELS_H
#define M3_SRC_CPU_VECTOR_KERNELS_H

#include <math.h>

#include "cpu/exponential.h"
#include "cpu/kernels.h"

#define INLINE static inline __attribute__((always_inline))

/* ------------------------------------------------------------------------------------------------ dot products */

static float dot(const float *a, const float *b, int64_t n) {
  vec s = zero();
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) s = multiply_add(load(a + i), load(b + i), s);
  if (i < n) s = multiply_add(load_first(a + i, n - i), load_first(b + i, n - i), s);
  return sum(s);
}

/* Where the partial sums of one output lie between pieces. */
INLINE float *partial_of(const m3_dots *p, int64_t r, int64_t j) {
  return p->partial + (r * p->n_rows + j) * M3_DOT_LANES;
}

/* x rows r .. r + nx by rows j .. j + nw; nx * nw sums. */
INLINE void dots_tile(const m3_dots *p, int64_t r, int64_t j, const int nx, const int nw) {
  const float *x = p->x + r * p->x_stride, *w = p->rows + j * p->row_stride;
  vec s[12];
#pragma GCC unroll 12
  for (int t = 0; t < nx * nw; t++)
    s[t] = p->partial && !p->first ? load(partial_of(p, r + t / nw, j + t % nw)) : zero();
  int64_t i = 0;
  for (; i + LANES <= p->n; i += LANES) {
    /* The side with fewer rows is held, the other one passes: 12 sums, 3 held and 1 passing are 16 registers. */
    vec held[3];
    const int fewer = nx < nw ? nx : nw;
#pragma GCC unroll 3
    for (int a = 0; a < fewer; a++) held[a] = nx < nw ? load(x + a * p->x_stride + i) : load(w + a * p->row_stride + i);
#pragma GCC unroll 8
    for (int b = 0; b < nx + nw - fewer; b++) {
      vec passing = nx < nw ? load(w + b * p->row_stride + i) : load(x + b * p->x_stride + i);
#pragma GCC unroll 3
      for (int a = 0; a < fewer; a++) {
        int t = nx < nw ? a * nw + b : b * nw + a;
        s[t] = multiply_add(passing, held[a], s[t]);
      }
    }
  }
  if (i < p->n)
#pragma GCC unroll 12
    for (int t = 0; t < nx * nw; t++)
      s[t] = multiply_add(load_first(w + t % nw * p->row_stride + i, p->n - i),
                          load_first(x + t / nw * p->x_stride + i, p->n - i), s[t]);
  if (p->partial && !p->last) {
#pragma GCC unroll 12
    for (int t = 0; t < nx * nw; t++) store(partial_of(p, r + t / nw, j + t % nw), s[t]);
    return;
  }
  float *out = p->out + r * p->out_stride + j;
  if (nw % 4 == 0) {
#pragma GCC unroll 4
    for (int a = 0; a < nx; a++)
#pragma GCC unroll 2
      for (int b = 0; b < nw; b += 4)
        sum4(s[a * nw + b], s[a * nw + b + 1], s[a * nw + b + 2], s[a * nw + b + 3], out + a * p->out_stride + b);
  } else if (nx == 4) {
#pragma GCC unroll 3
    for (int b = 0; b < nw; b++) {
      float four[4];
      sum4(s[b], s[nw + b], s[2 * nw + b], s[3 * nw + b], four);
#pragma GCC unroll 4
      for (int a = 0; a < 4; a++) out[a * p->out_stride + b] = four[a];
    }
  } else {
#pragma GCC unroll 12
    for (int t = 0; t < nx * nw; t++) out[t / nw * p->out_stride + t % nw] = sum(s[t]);
  }
}

/* A tile that may be cut at the edges: at least 8 sums, as many as hide the latency of a multiply-add, where there are
 * so many outputs. */
static void dots_4x(const m3_dots *p, int64_t r, int64_t j, int64_t nw) {
  if (nw == 3)
    dots_tile(p, r, j, 4, 3);
  else if (nw == 2)
    dots_tile(p, r, j, 4, 2);
  else
    dots_tile(p, r, j, 4, 1);
}

static void dots_few(const m3_dots *p, int64_t r, int64_t nx, int64_t j, int64_t nw) {
  if (nx == 1 && nw == 8) {
    dots_tile(p, r, j, 1, 8);
    return;
  }
  int64_t b = 0;
  for (; b + 4 <= nw; b += 4) {
    if (nx == 3)
      dots_tile(p, r, j + b, 3, 4);
    else if (nx == 2)
      dots_tile(p, r, j + b, 2, 4);
    else
      dots_tile(p, r, j + b, 1, 4);
  }
  for (; b < nw; b++)
    for (int64_t a = 0; a < nx; a++) dots_tile(p, r + a, j + b, 1, 1);
}

static void dots_block(const m3_dots *p, int64_t r, int64_t nx, int64_t j, int64_t nw) {
  if (nx == 4)
    dots_4x(p, r, j, nw);
  else
    dots_few(p, r, nx, j, nw);
}

INLINE int64_t at_most(int64_t n, int64_t limit) { return n < limit ? n : limit; }

static void dots(const m3_dots *p) {
  /* The smaller side stays in the cache while the larger one goes past. */
  if (p->n_x > p->n_rows) {
    for (int64_t r = 0; r < p->n_x; r += 4) {
      int64_t nx = at_most(p->n_x - r, 4), step = nx == 4 ? 3 : 8;
      for (int64_t next = r + nx; next < at_most(r + 8, p->n_x); next++)
        for (int64_t i = 0; i < p->n; i += 16) __builtin_prefetch(p->x + next * p->x_stride + i);
      for (int64_t j = 0; j < p->n_rows; j += step) dots_block(p, r, nx, j, at_most(p->n_rows - j, step));
    }
    return;
  }
  int64_t whole = p->n_x / 4 * 4, rest = p->n_x - whole;
  const char *next = p->next, *end = next + p->next_bytes;
  int64_t share = (p->next_bytes * 3 / p->n_rows + 63) / 64 * 64; /* with three rows */
  for (int64_t j = 0; whole && j < p->n_rows; j += 3) {
    for (const char *stop = end - next < share ? end : next + share; next < stop; next += 64)
      __builtin_prefetch(next, 0, 3);
    for (int64_t r = 0; r < whole; r += 4) dots_4x(p, r, j, at_most(p->n_rows - j, 3));
  }
  for (int64_t j = 0; rest && j < p->n_rows; j += 8) dots_few(p, whole, rest, j, at_most(p->n_rows - j, 8));
}

/* ------------------------------------------------------------------------------------------------ weighted sums */

static void axpy(float *y, float a, const float *x, int64_t n) {
  vec va = all(a);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(y + i, multiply_add(va, load(x + i), load(y + i)));
  if (i < n) store_first(y + i, multiply_add(va, load_first(x + i, n - i), load_first(y + i, n - i)), n - i);
}

/* Rows r .. r + na of acc, columns i .. i + nv * LANES. */
INLINE void accumulate_tile(const m3_accumulate *p, int64_t r, int64_t i, const int na, const int nv) {
  float *acc = p->acc + r * p->acc_stride + i;
  const float *weight = p->p + r * p->p_stride, *v = p->v + i;
  vec s[12];
#pragma GCC unroll 12
  for (int t = 0; t < na * nv; t++) s[t] = load(acc + t / nv * p->acc_stride + t % nv * LANES);
  for (int64_t j = 0; j < p->n_v; j++, v += p->v_stride) {
    vec vs[4];
#pragma GCC unroll 4
    for (int b = 0; b < nv; b++) vs[b] = load(v + b * LANES);
#pragma GCC unroll 6
    for (int a = 0; a < na; a++) {
      vec w = all(weight[a * p->p_stride + j]);
#pragma GCC unroll 4
      for (int b = 0; b < nv; b++) s[a * nv + b] = multiply_add(w, vs[b], s[a * nv + b]);
    }
  }
#pragma GCC unroll 12
  for (int t = 0; t < na * nv; t++) store(acc + t / nv * p->acc_stride + t % nv * LANES, s[t]);
}

/* The last columns, fewer than LANES. */
static void accumulate_last(const m3_accumulate *p, int64_t r, int64_t i) {
  float *acc = p->acc + r * p->acc_stride + i;
  vec s = load_first(acc, p->n - i);
  for (int64_t j = 0; j < p->n_v; j++)
    s = multiply_add(all(p->p[r * p->p_stride + j]), load_first(p->v + j * p->v_stride + i, p->n - i), s);
  store_first(acc, s, p->n - i);
}

static void accumulate(const m3_accumulate *p) {
  int64_t i = 0,
          share = p->next ? (p->next_bytes * 2 * LANES / p->n + 63) / 64 * 64 : 0; /* with two vectors of columns */
  const char *next = p->next, *end = next + (p->next ? p->next_bytes : 0);
  for (; p->n_acc >= 3 && i + 2 * LANES <= p->n; i += 2 * LANES) {
    int64_t r = 0;
    for (const char *stop = end - next < share ? end : next + share; next < stop; next += 64)
      __builtin_prefetch(next, 0, 3);
    for (; r + 6 <= p->n_acc; r += 6) accumulate_tile(p, r, i, 6, 2);
    for (; r + 4 <= p->n_acc; r += 4) accumulate_tile(p, r, i, 4, 2);
    for (; r + 2 <= p->n_acc; r += 2) accumulate_tile(p, r, i, 2, 2);
    for (; r < p->n_acc; r++) accumulate_tile(p, r, i, 1, 2);
  }
  for (; i + 4 * LANES <= p->n; i += 4 * LANES) {
    int64_t r = 0;
    for (; r + 2 <= p->n_acc; r += 2) accumulate_tile(p, r, i, 2, 4);
    for (; r < p->n_acc; r++) accumulate_tile(p, r, i, 1, 4);
  }
  for (; i + LANES <= p->n; i += LANES)
    for (int64_t r = 0; r < p->n_acc; r++) accumulate_tile(p, r, i, 1, 1);
  for (int64_t r = 0; i < p->n && r < p->n_acc; r++) accumulate_last(p, r, i);
}

/* ------------------------------------------------------------------------------------------------ softmax */

static float largest(const float *x, int64_t n, bool *finite) {
  vec best = all(-INFINITY);
  bool good = true;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    vec v = load(x + i);
    good &= all_finite(v);
    best = larger(v, best);
  }
  float lanes[LANES], most = -INFINITY;
  store(lanes, best);
  for (int j = 0; j < LANES; j++) most = lanes[j] > most ? lanes[j] : most;
  for (; i < n; i++) {
    good &= fabsf(x[i]) < INFINITY;
    most = x[i] > most ? x[i] : most;
  }
  *finite &= good;
  return most;
}

INLINE vec exponential(vec x) {
  x = bounded(all(M3_EXP_LOWEST), x, all(M3_EXP_HIGHEST));
  vec n = nearest(multiply(x, all(M3_EXP_LOG2_E)));
  vec r = multiply_add(n, all(-M3_EXP_LN2_LOW), multiply_add(n, all(-M3_EXP_LN2_HIGH), x));
  vec q = multiply_add(all(M3_EXP_Q4), r, all(M3_EXP_Q3));
  q = multiply_add(q, r, all(M3_EXP_Q2));
  q = multiply_add(q, r, all(M3_EXP_Q1));
  q = multiply_add(q, r, all(M3_EXP_Q0));
  vec y = add(multiply_add(q, multiply(r, r), r), all(1.0f));
  vec half = nearest(multiply(n, all(0.5f)));
  return multiply(multiply(y, power_of_2(half)), power_of_2(subtract(n, half)));
}

static float exp_sum(float *x, int64_t n, float shift, float scale) {
  vec s = zero(), from = all(shift), by = all(scale);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    vec y = exponential(multiply(subtract(load(x + i), from), by));
    store(x + i, y);
    s = add(s, y);
  }
  if (i < n) {
    store_first(x + i, exponential(multiply(subtract(load_first(x + i, n - i), from), by)), n - i);
    s = add(s, load_first(x + i, n - i));
  }
  return sum(s);
}

/* Their places in a table. */
#define VECTOR_KERNELS \
  .dot = dot, .dots = dots, .axpy = axpy, .accumulate = accumulate, .largest = largest, .exp_sum = exp_sum

#endif
