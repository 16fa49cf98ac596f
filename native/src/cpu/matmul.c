#include <string.h>

#include "cpu/cpu.h"

/* Integers: rows of x whose columns of a tile stay in the second cache, tiles that are multiplied with them one after
 * the other, and rows of x up to which weights are multiplied as they are unpacked; above, unpacking once for all is
 * cheaper. */
#define MOST_ROWS 128
#define MOST_TILES 8
#define UNPACKED_ROWS 2

/* Rows of x up to which tiles are multiplied one by one: so few stay in the second cache with all of their columns. */
#define ONE_TILE_ROWS 32

/* Pieces, or lots of them, that each thread has. */
#define PIECES 8

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

/* What a thread holds of a product in integers, and in floats. */
typedef struct integer_buffer {
  m3_tile tile;
  float acc[MOST_TILES * MOST_ROWS * M3_TILE_ROWS]; /* by tile and row */
} integer_buffer;

typedef struct float_buffer {
  float product[X_ROWS * FLOAT_TILE];
  float partial[X_ROWS * FLOAT_TILE * M3_DOT_LANES];
  float weights[FLOAT_TILE * FEW_COLUMNS];
} float_buffer;

int64_t m3_matmul_floats(void) {
  size_t bytes = sizeof(integer_buffer) + M3_CACHE_LINE;
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

/* Outputs `first` to first + count - 1 of the piece of one row. */
static void write_row(const m3_matmul_params *p, const piece *w, int64_t row, int64_t first, int64_t count,
                      const float *out) {
  float *restrict y = w->factor->y + (w->first_row + row) * w->factor->ldy + w->first + first;
  if (!p->add) {
    memcpy(y, out, (size_t)count * sizeof *y);
    return;
  }
#pragma omp simd
  for (int64_t j = 0; j < count; j++) y[j] += out[j];
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
  for (int64_t k = 0; k < n_x; k++) write_row(p, w, r + k, 0, w->count, buffer->product + k * FLOAT_TILE);
}

static void multiply_floats(const m3_context *c, const m3_matmul_params *p, const piece *w, float *buffer) {
  for (int64_t r = 0; r < w->n; r += X_ROWS)
    multiply_rows(c, p, w, r, w->n - r < X_ROWS ? w->n - r : X_ROWS, (float_buffer *)buffer);
}

static int64_t at_most(int64_t n, int64_t most) { return n < most ? n : most; }

/* The tile that is unpacked after that of rows from `row` and columns from `column` on. */
static m3_ahead next_tile(const piece *w, int32_t type, int64_t row, int64_t column) {
  row += M3_TILE_ROWS;
  if (row >= w->count) row = 0, column += M3_TILE_COLUMNS;
  if (column >= w->n_in) row = w->count, column = 0; /* of the next piece, whose rows follow in memory */
  int64_t bytes = m3_row_bytes(type, at_most(w->n_in - column, M3_TILE_COLUMNS));
  const char *from = w->weights + row * w->row_bytes + m3_row_bytes(type, column);
  return m3_ahead_of(from, bytes, w->row_bytes, M3_TILE_ROWS);
}

/* All columns of the piece with n rows from row r on. */
static void sum_tiles(const m3_context *c, const m3_matmul_params *p, const piece *w, int64_t r, int64_t n,
                      integer_buffer *buffer) {
  const m3_products *products = c->kernels->products;
  int32_t type = w->factor->weight->tensor->type;
  m3_unpacker unpack = products->unpack[type] ? products->unpack[type] : m3_unpack;
  int64_t first = w->first_row + r;
  m3_tile_product t = {.coding = w->coding, .tile = &buffer->tile, .x = c->scratch->rounded, .n_in = w->n_in, .n_x = n};
  if (p->rows)
    t.rows = p->rows + first;
  else
    t.x += first * m3_activation_bytes(w->n_in);
  for (t.first = 0; t.first < w->n_in; t.first += M3_TILE_COLUMNS) {
    t.n = at_most(w->n_in - t.first, M3_TILE_COLUMNS);
    t.acc = buffer->acc;
    for (int64_t row = 0; row < w->count; row += M3_TILE_ROWS, t.acc += n * M3_TILE_ROWS) {
      const char *data = w->weights + row * w->row_bytes + m3_row_bytes(type, t.first);
      int64_t n_rows = at_most(w->count - row, M3_TILE_ROWS);
      unpack(&(m3_weight_rows){w->coding, data, w->row_bytes, n_rows, t.n}, &buffer->tile);
      t.ahead = next_tile(w, type, row, t.first);
      products->multiply(&t);
    }
  }
}

static void multiply_tiles(const m3_context *c, const m3_matmul_params *p, const piece *w, integer_buffer *buffer) {
  for (int64_t r = 0; r < w->n; r += MOST_ROWS) {
    int64_t n = at_most(w->n - r, MOST_ROWS);
    memset(buffer->acc, 0, (size_t)(n * ((w->count + M3_TILE_ROWS - 1) / M3_TILE_ROWS * M3_TILE_ROWS)) * sizeof(float));
    sum_tiles(c, p, w, r, n, buffer);
    for (int64_t k = 0; k < n; k++)
      for (int64_t row = 0; row < w->count; row += M3_TILE_ROWS)
        write_row(p, w, r + k, row, at_most(w->count - row, M3_TILE_ROWS), buffer->acc + (row * n + k * M3_TILE_ROWS));
  }
}

static void multiply_tile(const m3_context *c, const m3_matmul_params *p, const piece *w, integer_buffer *buffer) {
  m3_row_product row_product = c->kernels->products->row_product[w->factor->weight->tensor->type];
  if (!row_product || w->n > UNPACKED_ROWS) {
    multiply_tiles(c, p, w, buffer);
    return;
  }
  for (int64_t r = 0; r < w->n; r++) {
    float out[M3_TILE_ROWS];
    int64_t row = p->rows ? p->rows[w->first_row + r] : w->first_row + r;
    const char *x = (const char *)c->scratch->rounded + row * m3_activation_bytes(w->n_in);
    row_product(&(m3_weight_rows){w->coding, w->weights, w->row_bytes, w->count, w->n_in}, x, out);
    write_row(p, w, r, 0, w->count, out);
  }
}

static void multiply_integers(const m3_context *c, const m3_matmul_params *p, const piece *w, float *buffer) {
  uintptr_t aligned = ((uintptr_t)buffer + M3_CACHE_LINE - 1) & ~(uintptr_t)(M3_CACHE_LINE - 1);
  if (w->n > ONE_TILE_ROWS) {
    multiply_tiles(c, p, w, (integer_buffer *)aligned);
    return;
  }
  for (int64_t row = 0; row < w->count; row += M3_TILE_ROWS) {
    piece tile = *w;
    tile.first += row;
    tile.weights += row * w->row_bytes;
    tile.count = at_most(w->count - row, M3_TILE_ROWS);
    multiply_tile(c, p, &tile, (integer_buffer *)aligned);
  }
}

/* All pieces of a product, numbered: experts that have rows, of each the factors, of each some tiles. */
typedef struct pieces {
  int64_t tiles;     /* of integers in a piece, at most */
  int64_t of_expert; /* pieces of one expert */
  int64_t n;
  int32_t n_active;
  int32_t active[M3_MAX_EXPERTS];
} pieces;

static int64_t rows_of_piece(const m3_matmul_params *p, const pieces *all, const m3_factor *f) {
  if (m3_coding_of(f->weight->tensor->type)) return all->tiles * M3_TILE_ROWS;
  return p->n <= FEW_ROWS ? FEW_FLOAT_TILE : FLOAT_TILE;
}

static int64_t pieces_of(const m3_matmul_params *p, const pieces *all, const m3_factor *f) {
  int64_t rows = rows_of_piece(p, all, f);
  return (f->weight->tensor->ne[1] + rows - 1) / rows;
}

static void count_pieces(const m3_matmul_params *p, int64_t tiles, pieces *out) {
  out->tiles = tiles;
  out->of_expert = 0;
  for (int32_t f = 0; f < p->n_factors; f++) out->of_expert += pieces_of(p, out, &p->factors[f]);
  out->n = out->n_active * out->of_expert;
}

/* Tiles cost unequally much where experts have unequally many rows: each thread has several pieces. */
static void list_pieces(const m3_matmul_params *p, int32_t threads, pieces *out) {
  out->n_active = 0;
  if (!p->start) out->active[out->n_active++] = 0;
  for (int32_t e = 0; p->start && e < p->n_experts; e++)
    if (p->start[e + 1] > p->start[e]) out->active[out->n_active++] = e;
  count_pieces(p, 1, out);
  int64_t tiles = at_most(out->n / (PIECES * threads), MOST_TILES);
  if (p->n > ONE_TILE_ROWS && tiles > 1) count_pieces(p, tiles, out);
}

static piece piece_at(const m3_matmul_params *p, const pieces *all, int64_t index) {
  int32_t expert = all->active[index / all->of_expert];
  const m3_factor *f = p->factors;
  for (index %= all->of_expert; index >= pieces_of(p, all, f); f++) index -= pieces_of(p, all, f);
  int64_t rows = rows_of_piece(p, all, f);
  const m3_tensor *t = f->weight->tensor;
  piece w = {.factor = f, .coding = m3_coding_of(t->type), .n_in = t->ne[0], .first = index * rows};
  w.row_bytes = m3_row_bytes(t->type, w.n_in);
  w.weights = (const char *)matrix(f->weight, expert) + w.first * w.row_bytes;
  w.count = at_most(t->ne[1] - w.first, rows);
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
  int32_t threads = m3_threads_for(c, work_of(p) / 4); /* a multiply-add of a product is cheap */
  pieces all;
  list_pieces(p, threads, &all);
  int64_t lot = all.n / (PIECES * threads) + 1;
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
