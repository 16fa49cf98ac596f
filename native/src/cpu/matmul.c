#include "cpu/cpu.h"

/* Output rows that one piece of work computes for all rows of x; fewer where there are few, for the threads' sake. */
#define TILE 24
#define FEW_TILE 8

/* Rows of x whose partial sums are kept between pieces of columns. */
#define X_ROWS 128

/* Columns of a piece. Many rows of x: a tile of weights fits in the first cache and so does what passes it. Few rows:
 * the weights are read once and in long stretches. Both are whole blocks of every type. */
#define MANY_COLUMNS 256
#define FEW_COLUMNS 512
#define FEW_ROWS 4

int64_t m3_matmul_floats(void) {
  int64_t many = TILE * MANY_COLUMNS + (int64_t)X_ROWS * TILE * M3_LANES;
  int64_t few = FEW_TILE * FEW_COLUMNS + (int64_t)FEW_ROWS * TILE * M3_LANES;
  return (many > few ? many : few) + X_ROWS * TILE;
}

static const void *matrix(const m3_weight *w, int32_t expert) {
  if (w->experts) return w->experts[expert];
  return (const char *)w->data + (uint64_t)expert * (w->tensor->n_bytes / (uint64_t)w->tensor->ne[2]);
}

/* Output rows [first, first + count) of rows [r, r + n_x) of x, n_x at most X_ROWS. */
typedef struct tile {
  int64_t first, count, r, n_x;
} tile;

static void multiply_tile(const m3_context *c, const m3_matmul_params *p, tile t, float *buffer) {
  int32_t type = p->weight->tensor->type;
  int64_t n_in = p->weight->tensor->ne[0], row_bytes = m3_row_bytes(type, n_in);
  int64_t columns = t.n_x <= FEW_ROWS ? FEW_COLUMNS : MANY_COLUMNS;
  const char *w = (const char *)matrix(p->weight, p->expert) + t.first * row_bytes;
  float *product = buffer, *partial = product + X_ROWS * TILE, *converted = partial + t.n_x * TILE * M3_LANES;
  m3_dots d = {.n_rows = t.count, .x_stride = n_in, .n_x = t.n_x, .out = product, .out_stride = TILE};
  d.partial = n_in > columns ? partial : NULL;
  for (int64_t i = 0; i < n_in; i += columns) {
    d.first = i == 0;
    d.last = n_in - i <= columns;
    d.n = d.last ? n_in - i : columns;
    d.x = p->x + t.r * n_in + i;
    const char *piece = w + m3_row_bytes(type, i);
    d.rows = (const float *)(const void *)piece;
    d.row_stride = n_in;
    /* Many passes over rows that lie far apart would contend for the same lines of the cache. */
    if (type != M3_TYPE_F32 || t.n_x > FEW_ROWS) {
      for (int64_t j = 0; j < t.count; j++)
        m3_convert_row(c->kernels, type, piece + j * row_bytes, converted + j * d.n, d.n);
      d.rows = converted;
      d.row_stride = d.n;
    }
    c->kernels->dots(&d);
  }
  for (int64_t r = 0; r < t.n_x; r++) {
    float *y = p->y + (t.r + r) * p->ldy + t.first;
    const float *out = product + r * TILE;
    for (int64_t j = 0; j < t.count; j++) y[j] = p->add ? y[j] + out[j] : out[j];
  }
}

void m3_matmul(const m3_context *c, const m3_matmul_params *p) {
  int64_t n_out = p->weight->tensor->ne[1];
  int64_t size = p->n <= FEW_ROWS ? FEW_TILE : TILE, tiles = (n_out + size - 1) / size;
  m3_scratch *s = c->scratch;
#pragma omp parallel num_threads(m3_threads_for(c, n_out * p->weight->tensor->ne[0] * p->n))
  {
    float *buffer = s->thread + m3_thread_index() * s->thread_floats;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tiles; t++) {
      int64_t first = t * size, count = n_out - first < size ? n_out - first : size;
      for (int64_t r = 0; r < p->n; r += X_ROWS)
        multiply_tile(c, p, (tile){first, count, r, p->n - r < X_ROWS ? p->n - r : X_ROWS}, buffer);
    }
  }
}
