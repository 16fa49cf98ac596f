#include "cpu/low_bit.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define PAD 32         /* codes of the widest vector */
#define LARGEST 1e18   /* norms up to it: products of two stay far below the largest float */
#define UP 0x1.00001p0 /* rounds up what is then rounded to float */

int64_t m3_low_bit_stride(int64_t dim) { return (dim + PAD - 1) / PAD * PAD; }

int64_t m3_low_bit_page_bytes(const m3_hparams *h) {
  return (int64_t)h->block_size * (2 * (int64_t)sizeof(float) + m3_low_bit_stride(h->index_dim));
}

/* A vector in codes of at most `levels`: its scale, its norm and that of the error. */
typedef struct rounding {
  float scale;
  double norm, error;
} rounding;

static rounding measure(const float *x, int64_t n, float levels) {
  double sum = 0;
  float most = 0;
  for (int64_t i = 0; i < n; i++) {
    sum += (double)x[i] * (double)x[i];
    most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
  }
  float scale = most / levels;
  /* With a scale of few bits codes would not fit: all is error then. */
  return (rounding){scale < FLT_MIN ? 0 : scale, sqrt(sum), 0};
}

static int32_t code_of(float x, float scale, int32_t levels, double *error) {
  if (scale == 0) {
    *error += (double)x * (double)x;
    return 0;
  }
  float nearest = rintf(x / scale);
  int32_t code = nearest > (float)levels ? levels : nearest < (float)-levels ? -levels : (int32_t)nearest;
  double off = (double)x - (double)scale * code;
  *error += off * off;
  return code;
}

void m3_low_bit_store(const m3_hparams *h, void *pages, int64_t page, int64_t slot, const float *key) {
  char *base = (char *)pages + page * m3_low_bit_page_bytes(h);
  int64_t stride = m3_low_bit_stride(h->index_dim);
  float *pair = (float *)(void *)base + 2 * slot;
  int8_t *codes = (int8_t *)base + (int64_t)h->block_size * 2 * (int64_t)sizeof(float) + slot * stride;
  memset(codes, 0, (size_t)stride);
  rounding r = measure(key, h->index_dim, 127);
  if (!(r.norm <= LARGEST)) {
    pair[0] = 0, pair[1] = INFINITY;
    return;
  }
  for (int64_t i = 0; i < h->index_dim; i++) codes[i] = (int8_t)code_of(key[i], r.scale, 127, &r.error);
  pair[0] = r.scale;
  pair[1] = (float)(sqrt(r.error) * UP) + FLT_MIN; /* of the smallest numbers, too, not below */
}

bool m3_low_bit_queries_of(const m3_hparams *h, const float *q, int64_t first, m3_low_bit_queries *out) {
  int64_t dim = h->index_dim, stride = m3_low_bit_stride(dim);
  int32_t levels = (int32_t)(INT32_MAX / (127 * dim)); /* D fits in 32 bits */
  if (levels > INT16_MAX) levels = INT16_MAX;
  double rounded = (double)(dim + 32) * 0x1p-23, longest = 127 * sqrt((double)dim);
  memset(out->codes, 0, (size_t)(4 * stride) * sizeof *out->codes);
  memset(out->factors, 0, sizeof out->factors);
  for (int64_t i = 0; i < 4 && first + i < h->n_index_head; i++) {
    const float *x = q + (first + i) * dim;
    rounding r = measure(x, dim, (float)levels);
    if (!(r.norm <= LARGEST)) return false;
    for (int64_t j = 0; j < dim; j++) out->codes[i * stride + j] = (int16_t)code_of(x[j], r.scale, levels, &r.error);
    out->factors[i] = r.scale;
    out->factors[4 + i] = (float)(longest * (sqrt(r.error) + rounded * r.norm) * UP);
    out->factors[8 + i] = (float)((1 + rounded) * r.norm * UP);
  }
  return true;
}

void m3_low_bit_bounds(const m3_hparams *h, const m3_kernels *kernels, const m3_low_bit_tokens *tokens,
                       const m3_low_bit_queries *queries, float out[4]) {
  int64_t page_bytes = m3_low_bit_page_bytes(h);
  const char *base = (const char *)tokens->pages + tokens->page * page_bytes;
  const float *pairs = (const float *)(const void *)base;
  kernels->bounds(
      &(m3_bounds){.codes = (const int8_t *)(pairs + 2 * (int64_t)h->block_size),
                   .pairs = pairs,
                   .n = tokens->n,
                   .stride = m3_low_bit_stride(h->index_dim),
                   .queries = queries->codes,
                   .factors = queries->factors,
                   .out = out,
                   .next = tokens->next < 0 ? NULL : (const char *)tokens->pages + tokens->next * page_bytes});
}
