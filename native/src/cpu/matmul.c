#include <string.h>

#include "cpu/cpu.h"

/* Rows of x with which a tile is multiplied before its sums are written. */
#define MOST_ROWS 512

/* Rows of x up to which weights are multiplied as they are unpacked. Above, unpacking once for all is cheaper. */
#define FEW_ROWS 2

#define CACHE_LINE 64

/* What a thread holds of a product in integers. */
typedef struct integer_buffer {
  m3_tile tile;
  float acc[MOST_ROWS][M3_TILE_ROWS];
} integer_buffer;

int64_t m3_matmul_floats(int64_t widest) {
  int64_t integers = (int64_t)(sizeof(integer_buffer) + CACHE_LINE) / (int64_t)sizeof(float);
  return integers > M3_TILE_ROWS * widest ? integers : M3_TILE_ROWS * widest;
}

/* Up to 16 output rows of one matrix, and the rows of x that they are multiplied with. */
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

static int64_t row_of_x(const m3_matmul_params *p, const piece *w, int64_t row) {
  return p->rows ? p->rows[w->first_row + row] : w->first_row + row;
}

/* `tile` holds count * n_in floats. */
static void multiply_floats(const m3_context *c, const m3_matmul_params *p, const piece *w, float *tile) {
  int32_t type = w->factor->weight->tensor->type;
  const float *weights = (const float *)(const void *)w->weights;
  if (type != M3_TYPE_F32) {
    m3_convert_row(c->kernels, type, w->weights, tile, w->count * w->n_in);
    weights = tile;
  }
  for (int64_t r = 0; r < w->n; r++) {
    const float *x = p->x + row_of_x(p, w, r) * w->n_in;
    float out[M3_TILE_ROWS];
    int64_t j = 0;
    for (; j + 4 <= w->count; j += 4) c->kernels->dot4(weights + j * w->n_in, w->n_in, x, w->n_in, out + j);
    for (; j < w->count; j++) out[j] = c->kernels->dot(weights + j * w->n_in, x, w->n_in);
    write_row(p, w, r, out);
  }
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
  if (!row_product || w->n > FEW_ROWS) {
    uintptr_t aligned = ((uintptr_t)buffer + CACHE_LINE - 1) & ~(uintptr_t)(CACHE_LINE - 1);
    multiply_tile(c, p, w, (integer_buffer *)aligned);
    return;
  }
  for (int64_t r = 0; r < w->n; r++) {
    float out[M3_TILE_ROWS];
    const char *x = (const char *)c->scratch->rounded + row_of_x(p, w, r) * m3_activation_bytes(w->n_in);
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

static int64_t tiles_of(const m3_factor *f) { return (f->weight->tensor->ne[1] + M3_TILE_ROWS - 1) / M3_TILE_ROWS; }

static void list_pieces(const m3_matmul_params *p, pieces *out) {
  out->of_expert = out->n_active = 0;
  for (int32_t f = 0; f < p->n_factors; f++) out->of_expert += tiles_of(&p->factors[f]);
  if (!p->start) out->active[out->n_active++] = 0;
  for (int32_t e = 0; p->start && e < p->n_experts; e++)
    if (p->start[e + 1] > p->start[e]) out->active[out->n_active++] = e;
  out->n = out->n_active * out->of_expert;
}

static piece piece_at(const m3_matmul_params *p, const pieces *all, int64_t index) {
  int32_t expert = all->active[index / all->of_expert];
  const m3_factor *f = p->factors;
  for (index %= all->of_expert; index >= tiles_of(f); f++) index -= tiles_of(f);
  const m3_tensor *t = f->weight->tensor;
  piece w = {.factor = f, .coding = m3_coding_of(t->type), .n_in = t->ne[0], .first = index * M3_TILE_ROWS};
  w.row_bytes = m3_row_bytes(t->type, w.n_in);
  w.weights = (const char *)matrix(f->weight, expert) + w.first * w.row_bytes;
  w.count = t->ne[1] - w.first < M3_TILE_ROWS ? t->ne[1] - w.first : M3_TILE_ROWS;
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
  int32_t threads = m3_threads_for(c, work_of(p));
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
