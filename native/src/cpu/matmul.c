#include <string.h>

#include "cpu/cpu.h"

/* Integers: rows of x with which a tile is multiplied before its sums are written, and rows of x up to which weights
 * are multiplied as they are unpacked; above, unpacking once for all is cheaper. */
#define MOST_ROWS 512
#define UNPACKED_ROWS 2

/* Floats: output rows that one piece of work computes; fewer where there are few rows of x, for the threads' sake. */
#define FLOAT_TILE 24
#define FEW_FLOAT_TILE 8

/* Rows of x whose partial sums are kept between pieces of columns. */
#define X_ROWS 128

/* Columns of a piece. Many rows of x: a tile of weights fits in the first cache and so does what passes it. Few rows:
 * the weights are read once and in long stretches. Both are whole blocks of every type. */
#define MANY_COLUMNS 256
#define FEW_COLUMNS 512
#define FEW_ROWS 4

#define CACHE_LINE 64

/* What a thread holds of a product in integers, and in floats. */
typedef struct integer_buffer {
  m3_tile tile;
  float acc[MOST_ROWS][M3_TILE_ROWS];
} integer_buffer;

typedef struct float_buffer {
  float product[X_ROWS * FLOAT_TILE];
  float partial[X_ROWS * FLOAT_TILE * M3_DOT_LANES];
  float weights[FLOAT_TILE * FEW_COLUMNS];
} float_buffer;

int64_t m3_matmul_floats(void) {
  size_t bytes = sizeof(integer_buffer) + CACHE_LINE;
  return (int64_t)((bytes > sizeof(float_buffer) ? bytes : sizeof(float_buffer)) / sizeof(float));
}

/* Some output rows of one matrix, and the rows of x that they are multiplied with. */
typedef struct piece {
  const m3_factor *factor;
  const m3_coding *coding; /* NULL: float */
  const char *weights;     /* of output row `first` */
  int64_t row_bytes, n_in;
  int64_t first, count;
  int64_t first_row, n; /* rows of y */
} piece;

static const void *matrix(const m3_weight *w, int32_t expert) {
  if (w->experts) return w->experts[expert];
  return (const char *)w->data + (uint64_t)expert * (w->tensor->n_bytes / (uint64_t)w->tensor->ne[2]);
}

static void write_row(const m3_matmul_params *p, const piece *w, int64_t row, const float *out) {
  float *y = w->factor->y + (w->first_row + row) * w->factor->ldy + w->first;
  for (int64_t j = 0; j < w->count; j++) y[j] = p->add ? y[j] + out[j] : out[j];
}

/* Rows [r, r + n_x) of the piece, n_x at most X_ROWS. */
static void multiply_rows(const m3_context *c, const m3_matmul_params *p, const piece *w, int64_t r, int64_t n_x,
                          float_buffer *buffer) {
  int32_t type = w->factor->weight->tensor->type;
  int64_t columns = n_x <= FEW_ROWS ? FEW_COLUMNS : MANY_COLUMNS;
  m3_dots d = {.n_rows = w->count, .x_stride = w->n_in, .n_x = n_x, .out = buffer->product, .out_stride = FLOAT_TILE};
  d.partial = w->n_in > columns ? buffer->partial : NULL;
  for (int64_t i = 0; i < w->n_in; i += columns) {
    d.first = i == 0;
    d.last = w->n_in - i <= columns;
    d.n = d.last ? w->n_in - i : columns;
    d.x = p->x + (w->first_row + r) * w->n_in + i;
    const char *weights = w->weights + m3_row_bytes(type, i);
    d.rows = (const float *)(const void *)weights;
    d.row_stride = w->n_in;
    /* Many passes over rows that lie far apart would contend for the same lines of the cache. */
    if (type != M3_TYPE_F32 || n_x > FEW_ROWS) {
      for (int64_t j = 0; j < w->count; j++)
        m3_convert_row(c->kernels, type, weights + j * w->row_bytes, buffer->weights + j * d.n, d.n);
      d.rows = buffer->weights;
      d.row_stride = d.n;
    }
    c->kernels->dots(&d);
  }
  for (int64_t k = 0; k < n_x; k++) write_row(p, w, r + k, buffer->product + k * FLOAT_TILE);
}

static void multiply_floats(const m3_context *c, const m3_matmul_params *p, const piece *w, float *buffer) {
  for (int64_t r = 0; r < w->n; r += X_ROWS)
    multiply_rows(c, p, w, r, w->n - r < X_ROWS ? w->n - r : X_ROWS, (float_buffer *)buffer);
}

/* Asks for columns from `column` on that will be unpacked next: behind the last ones those of the next tile, whose rows
 * follow in memory. */
static void fetch_tile(const piece *w, int32_t type, int64_t column) {
  const char *from = w->weights + m3_row_bytes(type, column);
  if (column >= w->n_in) from = w->weights + w->count * w->row_bytes, column = 0;
  int64_t columns = w->n_in - column < M3_TILE_COLUMNS ? w->n_in - column : M3_TILE_COLUMNS;
  int64_t bytes = m3_row_bytes(type, columns);
  for (int64_t j = 0; j < w->count; j++)
    for (int64_t i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch(from + j * w->row_bytes + i, 0, 3);
}

static void multiply_tile(const m3_context *c, const m3_matmul_params *p, const piece *w, integer_buffer *buffer) {
  const m3_products *products = c->kernels->products;
  int32_t type = w->factor->weight->tensor->type;
  m3_unpacker unpack = products->unpack[type] ? products->unpack[type] : m3_unpack;
  const char *x = c->scratch->rounded;
  for (int64_t r = 0; r < w->n; r += MOST_ROWS) {
    int64_t n = w->n - r < MOST_ROWS ? w->n - r : MOST_ROWS, first = w->first_row + r;
    memset(buffer->acc, 0, (size_t)n * sizeof buffer->acc[0]);
    for (int64_t column = 0; column < w->n_in; column += M3_TILE_COLUMNS) {
      int64_t columns = w->n_in - column < M3_TILE_COLUMNS ? w->n_in - column : M3_TILE_COLUMNS;
      const char *data = w->weights + m3_row_bytes(type, column);
      unpack(&(m3_weight_rows){w->coding, data, w->row_bytes, w->count, columns}, &buffer->tile);
      fetch_tile(w, type, column + columns);
      products->multiply(&(m3_tile_product){
          .coding = w->coding,
          .tile = &buffer->tile,
          .first = column,
          .n = columns,
          .x = p->rows ? x : x + first * m3_activation_bytes(w->n_in),
          .n_in = w->n_in,
          .rows = p->rows ? p->rows + first : NULL,
          .n_x = n,
          .acc = buffer->acc[0],
      });
    }
    for (int64_t k = 0; k < n; k++) write_row(p, w, r + k, buffer->acc[k]);
  }
}

static void multiply_integers(const m3_context *c, const m3_matmul_params *p, const piece *w, float *buffer) {
  m3_row_product row_product = c->kernels->products->row_product[w->factor->weight->tensor->type];
  if (!row_product || w->n > UNPACKED_ROWS) {
    uintptr_t aligned = ((uintptr_t)buffer + CACHE_LINE - 1) & ~(uintptr_t)(CACHE_LINE - 1);
    multiply_tile(c, p, w, (integer_buffer *)aligned);
    return;
  }
  for (int64_t r = 0; r < w->n; r++) {
    float out[M3_TILE_ROWS];
    int64_t row = p->rows ? p->rows[w->first_row + r] : w->first_row + r;
    const char *x = (const char *)c->scratch->rounded + row * m3_activation_bytes(w->n_in);
    row_product(&(m3_weight_rows){w->coding, w->weights, w->row_bytes, w->count, w->n_in}, x, out);
    write_row(p, w, r, out);
  }
}

/* All pieces of a product, numbered: experts that have rows, of each the factors, of each the tiles. */
typedef struct pieces {
  int64_t of_expert; /* pieces of one expert */
  int64_t n;
  int32_t n_active;
  int32_t active[M3_MAX_EXPERTS];
} pieces;

static int64_t rows_of_tile(const m3_matmul_params *p, const m3_factor *f) {
  if (m3_coding_of(f->weight->tensor->type)) return M3_TILE_ROWS;
  return p->n <= FEW_ROWS ? FEW_FLOAT_TILE : FLOAT_TILE;
}

static int64_t tiles_of(const m3_matmul_params *p, const m3_factor *f) {
  int64_t rows = rows_of_tile(p, f);
  return (f->weight->tensor->ne[1] + rows - 1) / rows;
}

static void list_pieces(const m3_matmul_params *p, pieces *out) {
  out->of_expert = out->n_active = 0;
  for (int32_t f = 0; f < p->n_factors; f++) out->of_expert += tiles_of(p, &p->factors[f]);
  if (!p->start) out->active[out->n_active++] = 0;
  for (int32_t e = 0; p->start && e < p->n_experts; e++)
    if (p->start[e + 1] > p->start[e]) out->active[out->n_active++] = e;
  out->n = out->n_active * out->of_expert;
}

static piece piece_at(const m3_matmul_params *p, const pieces *all, int64_t index) {
  int32_t expert = all->active[index / all->of_expert];
  const m3_factor *f = p->factors;
  for (index %= all->of_expert; index >= tiles_of(p, f); f++) index -= tiles_of(p, f);
  int64_t rows = rows_of_tile(p, f);
  const m3_tensor *t = f->weight->tensor;
  piece w = {.factor = f, .coding = m3_coding_of(t->type), .n_in = t->ne[0], .first = index * rows};
  w.row_bytes = m3_row_bytes(t->type, w.n_in);
  w.weights = (const char *)matrix(f->weight, expert) + w.first * w.row_bytes;
  w.count = t->ne[1] - w.first < rows ? t->ne[1] - w.first : rows;
  w.first_row = p->start ? p->start[expert] : 0;
  w.n = p->start ? p->start[expert + 1] - w.first_row : p->n;
  return w;
}

/* Multiply-adds. */
static int64_t work_of(const m3_matmul_params *p) {
  int64_t rows = p->start ? p->start[p->n_experts] : p->n, work = 0;
  for (int32_t f = 0; f < p->n_factors; f++)
    work += rows * p->factors[f].weight->tensor->ne[0] * p->factors[f].weight->tensor->ne[1];
  return work;
}

void m3_matmul(const m3_context *c, const m3_matmul_params *p) {
  m3_scratch *s = c->scratch;
  int64_t n_in = p->factors[0].weight->tensor->ne[0];
  bool rounded = false;
  for (int32_t f = 0; f < p->n_factors; f++) rounded |= m3_coding_of(p->factors[f].weight->tensor->type) != NULL;
  pieces all;
  list_pieces(p, &all);
  int32_t threads = m3_threads_for(c, work_of(p) / 4); /* a multiply-add of a product is cheap */
  /* Tiles cost unequally much where experts have unequally many rows: threads fetch them in small lots. */
  int64_t lot = all.n / (8 * threads) + 1;
#pragma omp parallel num_threads(threads)
  {
    float *buffer = s->thread + m3_thread_index() * s->thread_floats;
    if (rounded) {
#pragma omp for schedule(static)
      for (int32_t r = 0; r < p->n; r++)
        c->kernels->products->round(p->x + r * n_in, n_in, (char *)s->rounded + r * m3_activation_bytes(n_in));
    }
#pragma omp for schedule(dynamic, lot)
    for (int64_t i = 0; i < all.n; i++) {
      piece w = piece_at(p, &all, i);
      w.coding ? multiply_integers(c, p, &w, buffer) : multiply_floats(c, p, &w, buffer);
    }
  }
}
