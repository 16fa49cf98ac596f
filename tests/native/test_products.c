/* Products in integers of every type and every instruction set that this machine has, against the scalar specification
 * and against the sum in double precision of the rounded activations. */
#include <float.h>
#include <stdlib.h>

#include "check.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "quant/blocks.h"
#include "quant/half.h"
#include "quant/traits.h"

enum { MOST_N = 1568, MOST_X = 11 };

/* ------------------------------------------------------------------------------------------------ rounding */

static void check_round(const m3_products *k, const char *name, const float *x, int64_t n) {
  int64_t bytes = m3_activation_bytes(n), padded = m3_padded_activations(n);
  char *got = malloc((size_t)bytes), *want = malloc((size_t)bytes);
  if (!got || !want) abort();
  memset(got, 0x55, (size_t)bytes);
  k->round(x, n, got);
  m3_products_scalar.round(x, n, want);
  m3_activations a = m3_activations_at(got, n), b = m3_activations_at(want, n);
  CHECK(memcmp(a.q, b.q, (size_t)padded * 2) == 0 && memcmp(a.total, b.total, (size_t)padded / 4) == 0,
        "%s: rounded activations differ", name);
  int64_t different = 0;
  for (int64_t i = 0; i < padded / 32 * 4; i++)
    different += memcmp(a.scale + i, b.scale + i, 4) != 0 && !(isnan(a.scale[i]) && isnan(b.scale[i]));
  CHECK(different == 0, "%s: %lld scales or sums of activations differ", name, (long long)different);
  for (int64_t g = 0; g < n / 32; g++) {
    double largest = 0, off = 0;
    for (int i = 0; i < 32; i++) {
      float value = x[32 * g + i];
      double read = (double)a.scale[g] * a.q[32 * g + i / 2 + i % 2 * 16];
      largest = fmax(largest, fabs((double)value));
      off = isfinite(value) ? fmax(off, fabs(read - (double)value)) : INFINITY;
    }
    bool held = isinf(off) ? isnan(a.scale[g]) && isnan(a.sum[g])
                           : off <= largest / 65534 * 1.02 || (largest < 0x1p-100 && a.scale[g] == 0);
    CHECK(held, "%s: group %lld: off by %g, largest %g", name, (long long)g, off, largest);
  }
  free(got);
  free(want);
}

static void check_rounding(const m3_products *k, const char *name) {
  static float x[MOST_N];
  static const float edges[] = {0.0f,      -0.0f,   0x1p-149f, 0x1p-101f, 0x1p-100f, 1.0f, -1.0f,
                                -0x1p127f, FLT_MAX, -FLT_MAX,  INFINITY,  -INFINITY, NAN,  -NAN};
  uint64_t seed = 3;
  for (int64_t n = 32; n <= MOST_N; n += 32) {
    fill_random(x, n, powf(10.0f, (float)(n / 32 % 60 - 30)), &seed);
    check_round(k, name, x, n);
  }
  for (size_t e = 0; e < sizeof edges / sizeof *edges; e++) {
    fill_random(x, 128, 1.0f, &seed);
    for (int i = 0; i < 32; i++) x[32 + i] = edges[e];
    x[64 + e] = edges[e];
    check_round(k, name, x, 128);
  }
  for (int i = 0; i < 32; i++) x[i] = (float)(2 * i - 31) * 0.5f; /* ties, once the largest is a power of two */
  x[7] = 32767.0f;
  check_round(k, name, x, 32);
}

/* ------------------------------------------------------------------------------------------------ products */

/* A case: rows of a type, rounded rows of activations, and what the specification says. */
typedef struct product_case {
  int32_t type;
  const m3_coding *coding;
  int64_t n, row_bytes;
  char *weights; /* [16, row_bytes], as large as they are, so that reads past them are seen */
  char *x;       /* [MOST_X, m3_activation_bytes(n)] */
} product_case;

/* Random codes with finite scales: blocks that have others are drawn again. */
static void fill_weights(product_case *c, uint64_t *seed) {
  const m3_type_traits *t = m3_traits(c->type);
  float values[M3_SUPERBLOCK];
  for (int64_t at = 0; at < 16 * c->row_bytes; at += t->block_bytes) {
    uint16_t block[256 / 2 + 8];
    bool usable = false;
    while (!usable) {
      for (int64_t i = 0; i < (t->block_bytes + 1) / 2; i++) block[i] = (uint16_t)next_random(seed);
      if (c->type == M3_TYPE_MXFP4) *(uint8_t *)block = (uint8_t)(100 + next_random(seed) % 40);
      t->to_f32(block, values, t->block);
      usable = true;
      for (int64_t i = 0; i < t->block; i++) usable &= fabsf(values[i]) <= 1e7f;
    }
    memcpy(c->weights + at, block, (size_t)t->block_bytes);
  }
}

static product_case new_case(int32_t type, int64_t n, uint64_t *seed) {
  static float x[MOST_N];
  product_case c = {.type = type, .coding = m3_coding_of(type), .n = n, .row_bytes = m3_row_bytes(type, n)};
  c.weights = malloc((size_t)(16 * c.row_bytes));
  c.x = malloc((size_t)(MOST_X * m3_activation_bytes(n)));
  if (!c.weights || !c.x) abort();
  fill_weights(&c, seed);
  for (int r = 0; r < MOST_X; r++) {
    fill_random(x, n, 1.0f, seed);
    for (int i = 0; r == 2 && i < 32; i++) x[i] = 0;
    m3_products_scalar.round(x, n, c.x + r * m3_activation_bytes(n));
  }
  return c;
}

static void free_case(product_case *c) {
  free(c->weights);
  free(c->x);
}

static const void *x_row(const product_case *c, int64_t r) { return c->x + r * m3_activation_bytes(c->n); }

/* acc[n_x][16] by tiles. `rows`: which rows of x, or NULL. */
static void tile_product(const m3_products *k, const product_case *c, int64_t n_rows, const int32_t *rows, int64_t n_x,
                         float *acc) {
  static m3_tile tile;
  m3_unpacker unpack = k->unpack[c->type] ? k->unpack[c->type] : m3_unpack;
  memset(acc, 0, (size_t)(n_x * M3_TILE_ROWS) * sizeof(float));
  for (int64_t column = 0; column < c->n; column += M3_TILE_COLUMNS) {
    int64_t n = c->n - column < M3_TILE_COLUMNS ? c->n - column : M3_TILE_COLUMNS;
    unpack(&(m3_weight_rows){c->coding, c->weights + m3_row_bytes(c->type, column), c->row_bytes, n_rows, n}, &tile);
    k->multiply(&(m3_tile_product){c->coding, &tile, column, n, c->x, c->n, rows, n_x, acc, {0}});
  }
}

/* Unpacked integers and scales must be those of the specification, to the bit. */
static void check_unpack(const m3_products *k, const char *name, const product_case *c, int64_t n_rows) {
  static m3_tile got, want;
  if (!k->unpack[c->type]) return;
  int64_t n = c->n < M3_TILE_COLUMNS ? c->n : M3_TILE_COLUMNS, different = 0;
  m3_weight_rows w = {c->coding, c->weights, c->row_bytes, n_rows, n};
  k->unpack[c->type](&w, &got);
  m3_unpack(&w, &want);
  for (int64_t i = 0; i < n / 2; i++) different += memcmp(got.q[i], want.q[i], (size_t)n_rows * 4) != 0;
  for (int64_t g = 0; g < n / c->coding->group; g++) {
    different += memcmp(got.scale[g], want.scale[g], (size_t)n_rows * 4) != 0;
    if (c->coding->minima) different += memcmp(got.min[g], want.min[g], (size_t)n_rows * 4) != 0;
  }
  CHECK(different == 0, "%s: %s: %lld unpacked pairs, scales or minima differ at n=%lld, %lld rows", name,
        m3_type_name(c->type), (long long)different, (long long)n, (long long)n_rows);
}

/* The exact sum of one output on the rounded activations, and the size of its terms. */
static double exact_product(const product_case *c, int64_t row, int64_t r, double *size) {
  static int8_t q[MOST_N];
  static float scale[MOST_N / 16], min[MOST_N / 16];
  m3_activations a = m3_activations_at((void *)x_row(c, r), c->n);
  c->coding->read(c->weights + row * c->row_bytes, q, scale, min, c->n);
  double sum = 0;
  *size = 0;
  for (int64_t i = 0; i < c->n; i++) {
    double x = (double)a.scale[i / 32] * a.q[i / 32 * 32 + i % 32 / 2 + i % 2 * 16];
    double scaled = (double)scale[i / c->coding->group] * q[i];
    double low = c->coding->minima ? (double)min[i / c->coding->group] : 0;
    sum += (scaled - low) * x;
    *size += (fabs(scaled) + fabs(low)) * fabs(x);
  }
  return sum;
}

static void check_product(const m3_products *k, const char *name, const product_case *c, int64_t n_rows) {
  static float all[MOST_X * M3_TILE_ROWS], spec[MOST_X * M3_TILE_ROWS], some[MOST_X * M3_TILE_ROWS];
  tile_product(k, c, n_rows, NULL, MOST_X, all);
  tile_product(&m3_products_scalar, c, n_rows, NULL, MOST_X, spec);
  for (int64_t r = 0; r < MOST_X; r++)
    for (int64_t j = 0; j < n_rows; j++) {
      double size, exact = exact_product(c, j, r, &size), allowed = size * 0x1p-21 + 1e-30;
      float got = all[r * M3_TILE_ROWS + j], want = spec[r * M3_TILE_ROWS + j];
      CHECK(fabs((double)got - exact) <= allowed && fabs((double)want - exact) <= allowed,
            "%s: %s n=%lld: %.9g, specification %.9g, exact %.9g", name, m3_type_name(c->type), (long long)c->n,
            (double)got, (double)want, exact);
    }
  /* The same bits however rows are grouped and chosen. */
  for (int64_t n_x = 1; n_x <= MOST_X; n_x++) {
    int32_t rows[MOST_X];
    for (int64_t i = 0; i < n_x; i++) rows[i] = (int32_t)((7 * i + n_x) % MOST_X);
    tile_product(k, c, n_rows, rows, n_x, some);
    bool equal = true;
    for (int64_t i = 0; i < n_x; i++)
      equal &= memcmp(some + i * M3_TILE_ROWS, all + rows[i] * M3_TILE_ROWS, (size_t)n_rows * 4) == 0;
    CHECK(equal, "%s: %s n=%lld: a product depends on its neighbours among %lld", name, m3_type_name(c->type),
          (long long)c->n, (long long)n_x);
  }
  if (!k->row_product[c->type]) return;
  for (int64_t r = 0; r < MOST_X; r++) {
    float out[M3_TILE_ROWS];
    k->row_product[c->type](&(m3_weight_rows){c->coding, c->weights, c->row_bytes, n_rows, c->n}, x_row(c, r), out);
    CHECK(memcmp(out, all + r * M3_TILE_ROWS, (size_t)n_rows * 4) == 0,
          "%s: %s n=%lld, %lld rows: one row of x gives other bits than many: %.9g, %.9g", name, m3_type_name(c->type),
          (long long)c->n, (long long)n_rows, (double)out[0], (double)all[r * M3_TILE_ROWS]);
  }
}

/* NaN and infinity on either side must not be lost. */
static void check_not_finite(const m3_products *k, const char *name, product_case *c) {
  static float x[MOST_N], acc[M3_TILE_ROWS];
  static const float bad[] = {NAN, INFINITY, -INFINITY};
  for (int i = 0; i < 3; i++) {
    for (int64_t j = 0; j < c->n; j++) x[j] = 1;
    x[c->n - 3] = bad[i];
    k->round(x, c->n, c->x);
    tile_product(k, c, 16, NULL, 1, acc);
    for (int j = 0; j < 16; j++)
      CHECK(isnan(acc[j]), "%s: %s: %g in x gives %g", name, m3_type_name(c->type), (double)bad[i], (double)acc[j]);
    if (!k->row_product[c->type]) continue;
    k->row_product[c->type](&(m3_weight_rows){c->coding, c->weights, c->row_bytes, 16, c->n}, c->x, acc);
    for (int j = 0; j < 16; j++)
      CHECK(isnan(acc[j]), "%s: %s: %g in x gives %g", name, m3_type_name(c->type), (double)bad[i], (double)acc[j]);
  }
}

/* ------------------------------------------------------------------------------------------------ matrices */

enum { OUT = 300, ROWS = 150, EXPERTS = 3, COLUMNS = 768 };

/* The product of a matrix, in which tiles and rows of x are worked on in an order of its own, must have the bits of
 * tiles multiplied one by one; with experts, chosen rows, sums that are added to, and several threads. */
static void check_matrix(const m3_kernels *k, int32_t type, int32_t threads, bool experts, uint64_t *seed) {
  static float x[ROWS * COLUMNS], y[ROWS * OUT], tile[ROWS * M3_TILE_ROWS];
  /* Many rows, some, and few, each of which goes its own way. */
  static const int32_t start[EXPERTS + 1] = {0, 100, 148, ROWS};
  int32_t n_matrix = experts ? EXPERTS : 1, rows[ROWS];
  product_case c = {.type = type, .coding = m3_coding_of(type), .n = COLUMNS, .row_bytes = m3_row_bytes(type, COLUMNS)};
  int64_t matrix_bytes = OUT * c.row_bytes;
  char *weights = malloc((size_t)(n_matrix * matrix_bytes + 16 * c.row_bytes)), *floats;
  for (int64_t j = 0; weights && j < n_matrix * OUT; j += 16) {
    c.weights = weights + j * c.row_bytes;
    fill_weights(&c, seed);
  }
  fill_random(x, ROWS * COLUMNS, 1.0f, seed);
  for (int i = 0; i < ROWS * OUT; i++) y[i] = 1;
  for (int i = 0; i < ROWS; i++) rows[i] = (7 * i + 3) % ROWS;
  m3_tensor t = {.type = type, .ne = {COLUMNS, OUT, n_matrix, 1}, .n_bytes = (uint64_t)(n_matrix * matrix_bytes)};
  m3_weight w = {.tensor = &t, .data = weights};
  m3_scratch scratch = {.n_threads = threads, .thread_floats = m3_matmul_floats()};
  floats = malloc((size_t)(threads * scratch.thread_floats) * sizeof(float));
  c.x = malloc((size_t)(ROWS * m3_activation_bytes(COLUMNS)));
  if (!weights || !floats || !c.x) abort();
  scratch.thread = (float *)(void *)floats;
  scratch.rounded = c.x;
  m3_context context = {.kernels = k, .scratch = &scratch};
  m3_factor f = {&w, y, OUT};
  m3_matmul_params p = {.factors = &f, .n_factors = 1, .x = x, .n = ROWS, .add = experts};
  if (experts) p.start = start, p.n_experts = EXPERTS, p.rows = rows;
  m3_matmul(&context, &p);
  int64_t different = 0;
  for (int32_t e = 0; e < n_matrix; e++)
    for (int64_t j = 0; j < OUT; j += M3_TILE_ROWS) {
      int64_t n_rows = OUT - j < M3_TILE_ROWS ? OUT - j : M3_TILE_ROWS;
      int32_t first = experts ? start[e] : 0, n = (experts ? start[e + 1] : ROWS) - first;
      c.weights = weights + e * matrix_bytes + j * c.row_bytes;
      tile_product(k->products, &c, n_rows, experts ? rows + first : NULL, n, tile);
      for (int64_t r = 0; r < n; r++)
        for (int64_t i = 0; i < n_rows; i++) {
          float want = tile[r * M3_TILE_ROWS + i] + (experts ? 1.0f : 0.0f);
          different += memcmp(&y[(first + r) * OUT + j + i], &want, sizeof want) != 0;
        }
    }
  CHECK(different == 0, "%s: %s, %d threads, %d matrices: %lld products differ", k->name, m3_type_name(type),
        (int)threads, (int)n_matrix, (long long)different);
  free(weights);
  free(floats);
  free(c.x);
}

static void check_matrices(const m3_kernels *k) {
  static const int32_t types[] = {M3_TYPE_Q4_K, M3_TYPE_Q6_K, M3_TYPE_Q8_0};
  uint64_t seed = 17;
  for (size_t i = 0; i < sizeof types / sizeof *types; i++)
    for (int32_t threads = 1; threads <= 3; threads += 2)
      for (int experts = 0; experts < 2; experts++) check_matrix(k, types[i], threads, experts, &seed);
}

static void check_set(const m3_products *k, const char *name) {
  static const int64_t columns[] = {32, 96, 224, 256, 288, 480, 512, 544, 768, 1280, 1568};
  static const int64_t rows[] = {16, 1, 7, 8, 9};
  uint64_t seed = 11;
  int n_types = 0;
  printf("instruction set %s\n", name);
  check_rounding(k, name);
  for (int32_t type = 0; type <= M3_TYPE_MXFP4; type++) {
    if (!m3_coding_of(type)) continue;
    n_types++;
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
      if (columns[i] % m3_type_block_size(type)) continue;
      product_case c = new_case(type, columns[i], &seed);
      for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        check_unpack(k, name, &c, rows[r]);
        check_product(k, name, &c, rows[r]);
      }
      check_not_finite(k, name, &c);
      free_case(&c);
    }
  }
  CHECK(n_types == 20, "%d types", n_types);
}

int main(void) {
  static const m3_isa isas[] = {M3_ISA_SCALAR, M3_ISA_AVX2, M3_ISA_AVX512, M3_ISA_NEON};
  for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
    m3_isa isa;
    m3_error err;
    if (m3_choose_isa((int32_t)isas[i], &isa, &err)) {
      printf("not run here: %s\n", err.message);
      continue;
    }
    check_set(m3_kernels_for(isa)->products, m3_kernels_for(isa)->name);
    check_matrices(m3_kernels_for(isa));
#if defined(__x86_64__)
    if (m3_kernels_for(isa) == &m3_kernels_avx512_vnni) check_set(&m3_products_avx512, "avx512 without VNNI");
#endif
  }
  return finish("test_products");
}
