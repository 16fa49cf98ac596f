/* definitions.h - the feed-forward half, the projections and the head in double precision, written from the model's
 * definition and not from the engine's code. */
#ifndef M3_TESTS_DEFINITIONS_H
#define M3_TESTS_DEFINITIONS_H

#include "world.h"

enum { MAX_WIDTH = 2048 };

/* y = W x for one matrix of a weight, in double precision on the stored values. */
static inline void exact_product(const m3_weight *w, int64_t expert, const double *x, double *y) {
  static float row[MAX_WIDTH * 4];
  int64_t n_in = w->tensor->ne[0], n_out = w->tensor->ne[1], bytes = m3_row_bytes(w->tensor->type, n_in);
  for (int64_t j = 0; j < n_out; j++) {
    m3_traits(w->tensor->type)->to_f32((const char *)w->data + (expert * n_out + j) * bytes, row, n_in);
    y[j] = 0;
    for (int64_t i = 0; i < n_in; i++) y[j] += (double)row[i] * x[i];
  }
}

static inline void exact_norm(const world *w, const float *x, const m3_weight *norm, int64_t n, double *out) {
  const float *weight = norm->data;
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
  for (int64_t i = 0; i < n; i++)
    out[i] = (double)x[i] / sqrt(sum / (double)n + (double)w->h.rms_eps) * (double)weight[i];
}

/* down(g * sigmoid(1.702 g) * (u + 1)) with g = min(gate, 7), u = clamp(up, -7, 7); added to y with a factor. */
static inline void add_gated(const m3_weight *l, const m3_role roles[3], int64_t expert, const double *x, double factor,
                             double *y) {
  static double gate[MAX_WIDTH], up[MAX_WIDTH], out[MAX_WIDTH];
  exact_product(&l[roles[0]], expert, x, gate);
  exact_product(&l[roles[1]], expert, x, up);
  for (int64_t i = 0; i < l[roles[0]].tensor->ne[1]; i++) {
    double g = fmin(gate[i], 7.0), u = fmax(-7.0, fmin(up[i], 7.0));
    gate[i] = g / (1.0 + exp(-1.702 * g)) * (u + 1.0);
  }
  exact_product(&l[roles[2]], expert, gate, out);
  for (int64_t i = 0; i < l[roles[2]].tensor->ne[1]; i++) y[i] += factor * out[i];
}

/* Chosen experts (ascending) and weights of a normed row: sigmoids plus bias rank, sigmoids over their sum weigh. */
static inline void exact_router(const world *w, const double *x, int32_t *experts, double *weights) {
  static double prob[M3_MAX_EXPERTS];
  const float *bias = w->layer.w[M3_ROUTER_BIAS].data;
  bool taken[M3_MAX_EXPERTS] = {false};
  double sum = 0;
  int32_t used = 0;
  exact_product(&w->layer.w[M3_ROUTER], 0, x, prob);
  for (int32_t e = 0; e < w->c.n_expert; e++) prob[e] = 1.0 / (1.0 + exp(-prob[e]));
  for (int32_t k = 0; k < w->c.n_expert_used; k++) {
    int32_t best = -1;
    for (int32_t e = 0; e < w->c.n_expert; e++)
      if (!taken[e] && (best < 0 || prob[e] + (double)bias[e] > prob[best] + (double)bias[best])) best = e;
    taken[best] = true;
    sum += prob[best];
  }
  for (int32_t e = 0; e < w->c.n_expert; e++)
    if (taken[e]) experts[used] = e, weights[used++] = prob[e] / sum * (double)w->h.expert_scale;
}

/* RoPE of the first n_rot channels, halves turning together, by the position of a row. */
static inline void exact_rope(const world *w, int32_t row, double *x) {
  for (int32_t i = 0; i < w->c.n_rot / 2; i++) {
    double angle = (double)w->rows.pos[row] * pow(5e6, -2.0 * i / w->c.n_rot);
    double a = x[i], b = x[i + w->c.n_rot / 2];
    x[i] = a * cos(angle) - b * sin(angle);
    x[i + w->c.n_rot / 2] = b * cos(angle) + a * sin(angle);
  }
}

/* One head of a projection: norm and rotation of channels [head * n, head * n + n) of W norm(hidden). */
static inline void exact_head(const world *w, int32_t row, const m3_role roles[2], int32_t head, int64_t n,
                              float *out) {
  static double normed[MAX_WIDTH], all[MAX_WIDTH * 4], channels[M3_MAX_HEAD_DIM];
  static float rounded[M3_MAX_HEAD_DIM];
  exact_norm(w, w->hidden + (int64_t)row * w->c.n_embd, &w->layer.w[M3_ATTN_NORM], w->c.n_embd, normed);
  exact_product(&w->layer.w[roles[0]], 0, normed, all);
  for (int64_t i = 0; i < n; i++) rounded[i] = (float)all[head * n + i];
  exact_norm(w, rounded, &w->layer.w[roles[1]], n, channels);
  exact_rope(w, row, channels);
  for (int64_t i = 0; i < n; i++) out[i] = (float)channels[i];
}

#endif
