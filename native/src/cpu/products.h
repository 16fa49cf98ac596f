/* products.h - products of weights of block types with activations, in integers; one table for each instruction set.
 *
 * products_scalar.c is the specification. For each output: the sum over its groups of weights (16 or 32 elements), from
 * the first to the last, of float(I) * (weight scale * activation scale) - minimum * activation sum, where I is the
 * exact sum of products of integers (below 2^31). Elsewhere each of these two steps may be one fused multiply-add.
 * Nothing depends on which outputs are computed together or on how columns are cut: within one table all ways give the
 * same bits. */
#ifndef M3_SRC_CPU_PRODUCTS_H
#define M3_SRC_CPU_PRODUCTS_H

#include <stdint.h>

#include "cpu/activations.h"
#include "m3.h"
#include "quant/codes.h"

enum {
  M3_TILE_ROWS = 16,     /* output rows that are multiplied together */
  M3_TILE_COLUMNS = 512, /* so that a tile stays in the first-level cache beside the activations */
};

/* Unpacked weights of up to 16 rows and 512 columns, a row in each lane. */
typedef struct m3_tile {
  /* Elements in the order of m3_activations.q, in pairs. */
  _Alignas(64) int16_t q[M3_TILE_COLUMNS / 2][M3_TILE_ROWS][2];
  float scale[M3_TILE_COLUMNS / 16][M3_TILE_ROWS]; /* by group of the type */
  float min[M3_TILE_COLUMNS / 16][M3_TILE_ROWS];   /* of types with minima */
} m3_tile;

/* Rows of a weight from some column on, which begins a block. */
typedef struct m3_weight_rows {
  const m3_coding *coding;
  const void *data;
  int64_t row_bytes; /* from one row to the next */
  int64_t n_rows;    /* 1 to 16 */
  int64_t n;         /* columns, a multiple of 32 */
} m3_weight_rows;

enum { M3_CACHE_LINE = 64, M3_MANY_STEPS = 12 };

/* Rows of memory that will be read next, from `line` of the first one on. */
typedef struct m3_ahead {
  const char *row;
  int64_t bytes, stride; /* of a row, and to the next */
  int64_t n_rows;
  const char *line;
} m3_ahead;

static inline const char *m3_line_of(const char *at) { return at - ((uintptr_t)at & (M3_CACHE_LINE - 1)); }

static inline m3_ahead m3_ahead_of(const char *row, int64_t bytes, int64_t stride, int64_t n_rows) {
  return (m3_ahead){row, bytes, stride, n_rows, m3_line_of(row)};
}

/* Lines to fetch in each of so many steps; all with the first one if there are many, among which that is little. */
static inline int64_t m3_ahead_lines(const m3_ahead *a, int64_t steps) {
  int64_t all = a->n_rows * (a->bytes / M3_CACHE_LINE + 2);
  return steps > M3_MANY_STEPS ? all : (all + steps - 1) / steps;
}

/* Asks for the next n lines. Many at once would wait for each other, and all that is read meanwhile for them. */
static inline void m3_fetch(m3_ahead *a, int64_t n) {
  for (; n > 0 && a->n_rows > 0; n--) {
    __builtin_prefetch(a->line, 0, 3);
    a->line += M3_CACHE_LINE;
    if (a->line < a->row + a->bytes) continue;
    a->row += a->stride;
    a->n_rows--;
    a->line = m3_line_of(a->row);
  }
}

/* Products of a tile with rows of activations: adds to acc [n_x, 16], lanes beyond the tile's rows undefined.
 * Activations are read only. */
typedef struct m3_tile_product {
  const m3_coding *coding;
  const m3_tile *tile;
  int64_t first, n; /* columns of the tile; first is a multiple of 256 */
  const char *x;    /* rounded rows of n_in elements */
  int64_t n_in;
  const int32_t *rows; /* [n_x] which rows of x, or NULL: the first n_x */
  int64_t n_x;
  float *acc;
  m3_ahead ahead; /* fetched meanwhile */
} m3_tile_product;

/* The r-th row of activations. */
static inline m3_activations m3_activations_of(const m3_tile_product *p, int64_t r) {
  int64_t row = p->rows ? p->rows[r] : r;
  return m3_activations_at((char *)p->x + row * m3_activation_bytes(p->n_in), p->n_in);
}

/* Unpacks up to 512 columns. */
typedef void (*m3_unpacker)(const m3_weight_rows *w, m3_tile *out);

/* out[j] = product of row j with one rounded row of activations; out has 16 places, those beyond n_rows undefined. */
typedef void (*m3_row_product)(const m3_weight_rows *w, const void *x, float *out);

typedef struct m3_products {
  /* Rounds n elements, a multiple of 32, to m3_activation_bytes(n) at out. */
  void (*round)(const float *x, int64_t n, void *out);
  void (*multiply)(const m3_tile_product *p);
  m3_unpacker unpack[M3_TYPE_MXFP4 + 1];         /* by type; NULL: m3_unpack */
  m3_row_product row_product[M3_TYPE_MXFP4 + 1]; /* by type; NULL: unpack and multiply */
} m3_products;

/* A table by type of PLACE(q4_0), PLACE(q4_1) and so on. */
#define M3_BY_BLOCK_TYPE(PLACE)                                                                            \
  {[M3_TYPE_Q4_0] = PLACE(q4_0),     [M3_TYPE_Q4_1] = PLACE(q4_1),       [M3_TYPE_Q5_0] = PLACE(q5_0),     \
   [M3_TYPE_Q5_1] = PLACE(q5_1),     [M3_TYPE_Q8_0] = PLACE(q8_0),       [M3_TYPE_IQ4_NL] = PLACE(iq4_nl), \
   [M3_TYPE_MXFP4] = PLACE(mxfp4),   [M3_TYPE_Q2_K] = PLACE(q2_k),       [M3_TYPE_Q3_K] = PLACE(q3_k),     \
   [M3_TYPE_Q4_K] = PLACE(q4_k),     [M3_TYPE_Q5_K] = PLACE(q5_k),       [M3_TYPE_Q6_K] = PLACE(q6_k),     \
   [M3_TYPE_IQ4_XS] = PLACE(iq4_xs), [M3_TYPE_IQ2_XXS] = PLACE(iq2_xxs), [M3_TYPE_IQ2_XS] = PLACE(iq2_xs), \
   [M3_TYPE_IQ2_S] = PLACE(iq2_s),   [M3_TYPE_IQ3_XXS] = PLACE(iq3_xxs), [M3_TYPE_IQ3_S] = PLACE(iq3_s),   \
   [M3_TYPE_IQ1_S] = PLACE(iq1_s),   [M3_TYPE_IQ1_M] = PLACE(iq1_m)}

extern const m3_products m3_products_scalar;
#if defined(__x86_64__)
extern const m3_products m3_products_avx2;
/* Of two sets with AVX-512; the second needs VNNI. All else in them is that of AVX2. */
void m3_multiply_avx512(const m3_tile_product *p);
void m3_multiply_avx512_vnni(const m3_tile_product *p);
extern const m3_products m3_products_avx512, m3_products_avx512_vnni;
#elif defined(__aarch64__)
extern const m3_products m3_products_neon;
#endif

/* For every type and machine. */
void m3_unpack(const m3_weight_rows *w, m3_tile *out);

#endif
