/* NEON of every AArch64 processor. */
#if defined(__aarch64__)
#include <arm_neon.h>

#include "cpu/kernels.h"
#include "quant/blocks.h"
#include "quant/half.h"

static inline float tail(const float *a, const float *b, int64_t i, int64_t n) {
  float s = 0;
  for (; i < n; i++) s += a[i] * b[i];
  return s;
}

static float dot(const float *a, const float *b, int64_t n) {
  float32x4_t s0 = vdupq_n_f32(0), s1 = s0;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    s0 = vfmaq_f32(s0, vld1q_f32(a + i), vld1q_f32(b + i));
    s1 = vfmaq_f32(s1, vld1q_f32(a + i + 4), vld1q_f32(b + i + 4));
  }
  float s = vaddvq_f32(vaddq_f32(s0, s1));
  return i < n ? s + tail(a, b, i, n) : s;
}

static void dot4(const float *rows, int64_t stride, const float *x, int64_t n, float out[4]) {
  float32x4_t s0[4], s1[4];
  for (int r = 0; r < 4; r++) s0[r] = s1[r] = vdupq_n_f32(0);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    float32x4_t x0 = vld1q_f32(x + i), x1 = vld1q_f32(x + i + 4);
    for (int r = 0; r < 4; r++) {
      s0[r] = vfmaq_f32(s0[r], vld1q_f32(rows + r * stride + i), x0);
      s1[r] = vfmaq_f32(s1[r], vld1q_f32(rows + r * stride + i + 4), x1);
    }
  }
  for (int r = 0; r < 4; r++) {
    out[r] = vaddvq_f32(vaddq_f32(s0[r], s1[r]));
    if (i < n) out[r] += tail(rows + r * stride, x, i, n);
  }
}

static void axpy(float *y, float a, const float *x, int64_t n) {
  float32x4_t va = vdupq_n_f32(a);
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) vst1q_f32(y + i, vfmaq_f32(vld1q_f32(y + i), va, vld1q_f32(x + i)));
  for (; i < n; i++) y[i] += a * x[i];
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
    "neon",
    dot,
    dot4,
    axpy,
    &m3_products_neon,
    {[M3_TYPE_F16] = f16_to_f32, [M3_TYPE_BF16] = bf16_to_f32, [M3_TYPE_Q8_0] = q8_0_to_f32},
};
#else
typedef int m3_no_neon;
#endif
