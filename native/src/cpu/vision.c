/* Operations of the vision tower. */
#include <math.h>
#include <string.h>

#include "cpu/cpu.h"

static void finish_linear(const m3_linear_params *p, const float *bias, int64_t width, float *y) {
  for (int64_t i = 0; bias && i < width; i++) y[i] += bias[i];
  for (int64_t i = 0; p->gelu && i < width; i++) y[i] = 0.5f * y[i] * (1.0f + erff(y[i] * (float)M_SQRT1_2));
}

void m3_cpu_linear(const m3_context *c, const m3_linear_params *p) {
  int64_t width = p->weight->tensor->ne[1];
  const float *bias = p->bias ? m3_vector(p->bias) : NULL;
  const m3_factor factor = {p->weight, p->y, width};
  m3_matmul(c, &(m3_matmul_params){.factors = &factor, .n_factors = 1, .x = p->x, .n = p->n, .add = p->add});
  if (!bias && !p->gelu) return;
#pragma omp parallel for num_threads(m3_threads_for(c, (p->gelu ? 16 : 1) * p->n * width)) schedule(static)
  for (int32_t r = 0; r < p->n; r++) finish_linear(p, bias, width, p->y + r * width);
}

/* Sums in double precision: the mean is taken off before squares are, so that nothing is lost where it is large. */
static void norm_row(const m3_layer_norm_params *p, const float *weight, const float *bias, int64_t width,
                     const float *x, float *out) {
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < width; i++) sum += (double)x[i];
  float mean = (float)(sum / (double)width);
  for (int64_t i = 0; i < width; i++) squares += (double)(x[i] - mean) * (double)(x[i] - mean);
  float scale = 1.0f / sqrtf((float)(squares / (double)width) + p->eps);
  for (int64_t i = 0; i < width; i++) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

void m3_cpu_layer_norm(const m3_context *c, const m3_layer_norm_params *p) {
  int64_t width = p->weight->tensor->ne[0];
  const float *weight = m3_vector(p->weight), *bias = m3_vector(p->bias);
#pragma omp parallel for num_threads(m3_threads_for(c, p->n *width)) schedule(static)
  for (int32_t r = 0; r < p->n; r++) norm_row(p, weight, bias, width, p->x + r * width, p->out + r * width);
}

/* One head. */
static void turn_axes(int64_t f, const float *cos, const float *sin, float *x) {
  for (int64_t axis = 0; axis < 3; axis++, x += 2 * f, cos += f, sin += f)
    for (int64_t i = 0; i < f; i++) {
      float a = x[i], b = x[i + f];
      x[i] = a * cos[i] - b * sin[i];
      x[i + f] = b * cos[i] + a * sin[i];
    }
}

static void turn_row(const m3_context *c, const m3_turn_params *p, int64_t row) {
  const m3_hparams *h = c->hparams;
  const m3_scratch *s = c->scratch;
  int64_t dim = h->head_dim, f = h->n_rot / 6;
  const float *cos = p->rows->cos + row * 3 * f, *sin = p->rows->sin + row * 3 * f;
  int64_t page = p->rows->tables[p->rows->seq[row]][row / h->block_size], slot = row % h->block_size;
  for (int64_t head = 0; head < h->n_head; head++) {
    int64_t from = (row * h->n_head + head) * dim, to = ((page * h->n_head + head) * h->block_size + slot) * dim;
    turn_axes(f, cos, sin, s->q + from);
    turn_axes(f, cos, sin, s->k + from);
    memcpy((float *)p->cache.k + to, s->k + from, (size_t)dim * sizeof(float));
    memcpy((float *)p->cache.v + to, s->v + from, (size_t)dim * sizeof(float));
  }
}

void m3_cpu_turn(const m3_context *c, const m3_turn_params *p) {
  const m3_hparams *h = c->hparams;
#pragma omp parallel for num_threads(m3_threads_for(c, (int64_t)p->rows->n * h->n_embd)) schedule(static)
  for (int32_t r = 0; r < p->rows->n; r++) turn_row(c, p, r);
}
