/* The searches as table M3_SEARCHES, compiled once for any machine and once more by scale_search_avx2.c. */
#include "quant/scale_search.h"

#include "quant/affine_search.h"
#include "quant/mxfp4_search.h"
#include "quant/symmetric_search.h"

#ifndef M3_SEARCHES
#define M3_SEARCHES m3_searches_scalar
#endif

static void q2_k(const float *x, const float *w, m3_affine_groups *out) {
  affine_search(&(affine_shape){2, 16, 3, 15, {6, 3, -0.2f, 0.24f}, {8, 5, -0.5f, 0.24f}}, x, w, out);
}

static void q4_k(const float *x, const float *w, m3_affine_groups *out) {
  affine_search(&(affine_shape){1, 32, 15, 63, {9, 3, -0.7f, 0.4f}, {10, 5, -0.7f, 0.4f}}, x, w, out);
}

static void q5_k(const float *x, const float *w, m3_affine_groups *out) {
  affine_search(&(affine_shape){1, 32, 31, 63, {9, 3, -0.7f, 0.4f}, {10, 5, -0.7f, 0.4f}}, x, w, out);
}

static void q3_k(const float *x, const float *w, m3_symmetric_groups *out) {
  symmetric_groups(&(symmetric_shape){2, 16, -4, 3, false, -32, 31, {3, -0.2f, 0.45f}, {14, -1.0f, 0.2f}}, x, w, out);
}

static void q6_k(const float *x, const float *w, m3_symmetric_groups *out) {
  symmetric_groups(&(symmetric_shape){2, 16, -32, 31, false, -128, 127, {12, -1.6f, 0.4f}, {16, -2.0f, 0.35f}}, x, w,
                   out);
}

static void iq4_xs(const float *x, const float *w, m3_symmetric_groups *out) {
  symmetric_groups(&(symmetric_shape){1, 32, -127, 113, true, -32, 31, {8, -24.0f, 8.0f}, {12, -30.0f, 6.0f}}, x, w,
                   out);
}

static void iq4_nl(const float *x, const float *w, m3_single_blocks *out) {
  symmetric_blocks(&(symmetric_shape){1, 32, -127, 113, true, 1, 1, {8, -24.0f, 8.0f}, {12, -30.0f, 6.0f}}, x, w, out);
}

static void q4_0(const float *x, const float *w, m3_single_blocks *out) {
  symmetric_blocks(&(symmetric_shape){1, 32, -8, 7, false, 1, 1, {8, -0.6f, 0.2f}, {14, -1.0f, 0.2f}}, x, w, out);
}

static void q5_0(const float *x, const float *w, m3_single_blocks *out) {
  symmetric_blocks(&(symmetric_shape){1, 32, -16, 15, false, 1, 1, {10, -1.0f, 0.25f}, {16, -1.5f, 0.25f}}, x, w, out);
}

static void q4_1(const float *x, const float *w, m3_single_blocks *out) {
  affine_blocks(&(affine_shape){1, 32, 15, 1, {9, 3, -0.7f, 0.4f}, {10, 5, -0.7f, 0.4f}}, x, w, out);
}

static void q5_1(const float *x, const float *w, m3_single_blocks *out) {
  affine_blocks(&(affine_shape){1, 32, 31, 1, {9, 3, -0.7f, 0.4f}, {10, 5, -0.7f, 0.4f}}, x, w, out);
}

const m3_searches M3_SEARCHES = {.q2_k = q2_k,
                                 .q4_k = q4_k,
                                 .q5_k = q5_k,
                                 .q3_k = q3_k,
                                 .q6_k = q6_k,
                                 .iq4_xs = iq4_xs,
                                 .q4_0 = q4_0,
                                 .q4_1 = q4_1,
                                 .q5_0 = q5_0,
                                 .q5_1 = q5_1,
                                 .iq4_nl = iq4_nl,
                                 .mxfp4 = mxfp4_blocks};
