/* NEON of every AArch64 processor. */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <float.h>
#include <math.h>

#include "cpu/kernels.h"
#include "quant/blocks.h"
#include "quant/half.h"

typedef float32x4_t vec;
enum { LANES = 4 };

static inline vec zero(void) { return vdupq_n_f32(0); }
static inline vec all(float a) { return vdupq_n_f32(a); }
static inline vec load(const float *p) { return vld1q_f32(p); }
static inline void store(float *p, vec v) { vst1q_f32(p, v); }

static inline vec load_first(const float *p, int64_t n) {
  float four[4] = {0};
  for (int64_t i = 0; i < n; i++) four[i] = p[i];
  return vld1q_f32(four);
}

static inline void store_first(float *p, vec v, int64_t n) {
  float four[4];
  vst1q_f32(four, v);
  for (int64_t i = 0; i < n; i++) p[i] = four[i];
}

static inline vec multiply_add(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
static inline vec add(vec a, vec b) { return vaddq_f32(a, b); }
static inline vec subtract(vec a, vec b) { return vsubq_f32(a, b); }
static inline vec multiply(vec a, vec b) { return vmulq_f32(a, b); }
static inline vec larger(vec a, vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline vec bounded(vec low, vec v, vec high) { return vminq_f32(high, vmaxq_f32(low, v)); } /* both keep NaN */
static inline vec nearest(vec v) { return vrndnq_f32(v); }

static inline vec power_of_2(vec v) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(v), vdupq_n_s32(127)), 23));
}

static inline bool all_finite(vec v) { return vminvq_u32(vcltq_f32(vabsq_f32(v), all(INFINITY))) != 0; }
static inline float sum(vec v) { return vaddvq_f32(v); }

static inline void sum4(vec a, vec b, vec c, vec d, float *out) {
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}

#include "cpu/vector_kernels.h"

static void bounds(const m3_bounds *p) {
  float32x4_t best = all(-INFINITY), t = vld1q_f32(p->factors), slack = vld1q_f32(p->factors + 4);
  float32x4_t norm = vld1q_f32(p->factors + 8);
  uint32x4_t bad = vdupq_n_u32(0);
  for (int64_t j = 0; j < p->n; j++) {
    const int8_t *codes = p->codes + j * p->stride;
    int32x4_t s[4];
    for (int h = 0; h < 4; h++) s[h] = vdupq_n_s32(0);
    for (int64_t i = 0; i < p->stride; i += 8) {
      int16x8_t k = vmovl_s8(vld1_s8(codes + i));
#pragma GCC unroll 4
      for (int h = 0; h < 4; h++) {
        int16x8_t x = vld1q_s16(p->queries + h * p->stride + i);
        s[h] = vmlal_s16(s[h], vget_low_s16(k), vget_low_s16(x));
        s[h] = vmlal_high_s16(s[h], k, x);
      }
    }
    int32x4_t d = vpaddq_s32(vpaddq_s32(s[0], s[1]), vpaddq_s32(s[2], s[3]));
    float32x4_t bound = vmulq_n_f32(vaddq_f32(vmulq_f32(t, vcvtq_f32_s32(d)), slack), p->pairs[2 * j]);
    bound = vaddq_f32(vaddq_f32(bound, vmulq_n_f32(norm, p->pairs[2 * j + 1])), all(FLT_MIN));
    bad = vorrq_u32(bad, vmvnq_u32(vcleq_f32(bound, all(FLT_MAX))));
    best = larger(bound, best);
  }
  vst1q_f32(p->out, vbslq_f32(bad, all(INFINITY), best));
}

static void f16_to_f32(const void *src, float *dst, int64_t n) {
  const uint16_t *s = src;
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) vst1q_f32(dst + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(s + i))));
  for (; i < n; i++) dst[i] = m3_f16_to_f32(s[i]);
}

static void bf16_to_f32(const void *src, float *dst, int64_t n) {
  const uint16_t *s = src;
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) vst1q_f32(dst + i, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(s + i), 16)));
  for (; i < n; i++) dst[i] = m3_bf16_to_f32(s[i]);
}

static void q8_0_to_f32(const void *src, float *dst, int64_t n) {
  const m3_block_q8_0 *b = src;
  for (int64_t i = 0; i < n / M3_BLOCK; i++, dst += M3_BLOCK) {
    float d = m3_f16_to_f32(b[i].d);
    for (int j = 0; j < M3_BLOCK; j += 8) {
      int16x8_t q = vmovl_s8(vld1_s8(b[i].q + j));
      vst1q_f32(dst + j, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(q))), d));
      vst1q_f32(dst + j + 4, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(q))), d));
    }
  }
}

const m3_kernels m3_kernels_neon = {
    .name = "neon",
    VECTOR_KERNELS,
    .bounds = bounds,
    .products = &m3_products_neon,
    .to_f32 = {[M3_TYPE_F16] = f16_to_f32, [M3_TYPE_BF16] = bf16_to_f32, [M3_TYPE_Q8_0] = q8_0_to_f32},
};
#else
typedef int m3_no_neon;
#endif
