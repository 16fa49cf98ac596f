#include "cpu/cpu.h"

static const void *matrix(const m3_weight *w, int32_t expert) {
  if (w->experts) return w->experts[expert];
  return (const char *)w->data + (uint64_t)expert * (w->tensor->n_bytes / (uint64_t)w->tensor->ne[2]);
}

/* Output rows [first, first + count) for all rows of x. `tile` holds count * n_in floats. */
static void multiply_tile(const m3_context *c, const m3_matmul_params *p, int64_t first, int64_t count, float *tile) {
  int32_t type = p->weight->tensor->type;
  int64_t n_in = p->weight->tensor->ne[0];
  int64_t row_bytes = m3_row_bytes(type, n_in);
  const char *src = (const char *)matrix(p->weight, p->expert) + first * row_bytes;
  const float *w = (const float *)(const void *)src;
  if (type != M3_TYPE_F32) {
    m3_convert_row(c->kernels, type, src, tile, count * n_in);
    w = tile;
  }
  for (int32_t r = 0; r < p->n; r++) {
    const float *x = p->x + r * n_in;
    float *y = p->y + r * p->ldy + first;
    float out[M3_MATMUL_TILE];
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) c->kernels->dot4(w + j * n_in, n_in, x, n_in, out + j);
    for (; j < count; j++) out[j] = c->kernels->dot(w + j * n_in, x, n_in);
    for (j = 0; j < count; j++) y[j] = p->add ? y[j] + out[j] : out[j];
  }
}

void m3_matmul(const m3_context *c, const m3_matmul_params *p) {
  int64_t n_out = p->weight->tensor->ne[1];
  int64_t tiles = (n_out + M3_MATMUL_TILE - 1) / M3_MATMUL_TILE;
  m3_scratch *s = c->scratch;
#pragma omp parallel num_threads(m3_threads_for(c, n_out * p->weight->tensor->ne[0] * p->n))
  {
    float *tile = s->thread + m3_thread_index() * s->thread_floats;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tiles; t++) {
      int64_t first = t * M3_MATMUL_TILE;
      int64_t count = n_out - first < M3_MATMUL_TILE ? n_out - first : M3_MATMUL_TILE;
      multiply_tile(c, p, first, count, tile);
    }
  }
}
