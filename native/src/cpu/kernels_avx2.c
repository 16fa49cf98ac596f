/* AVX2 + FMA + F16C. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "cpu/decode_avx2.h"
#include "cpu/kernels.h"
#include "quant/blocks.h"
#include "quant/half.h"

static inline float sum8(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  s = _mm_add_ss(s, _mm_movehdup_ps(s));
  return _mm_cvtss_f32(s);
}

/* The last n % 16 products, summed in order; dot and dot4 share it so that they agree. */
static inline float tail(const float *a, const float *b, int64_t i, int64_t n) {
  float s = 0;
  for (; i < n; i++) s += a[i] * b[i];
  return s;
}

static float dot(const float *a, const float *b, int64_t n) {
  __m256 s0 = _mm256_setzero_ps(), s1 = s0;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    s0 = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i), s0);
    s1 = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 8), _mm256_loadu_ps(b + i + 8), s1);
  }
  float s = sum8(_mm256_add_ps(s0, s1));
  return i < n ? s + tail(a, b, i, n) : s;
}

static void dot4(const float *rows, int64_t stride, const float *x, int64_t n, float out[4]) {
  const float *r0 = rows, *r1 = rows + stride, *r2 = rows + 2 * stride, *r3 = rows + 3 * stride;
  /* Eight independent chains cover the latency of the multiply-add. */
  __m256 a0 = _mm256_setzero_ps(), b0 = a0, a1 = a0, b1 = a0, a2 = a0, b2 = a0, a3 = a0, b3 = a0;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256 x0 = _mm256_loadu_ps(x + i), x1 = _mm256_loadu_ps(x + i + 8);
    a0 = _mm256_fmadd_ps(_mm256_loadu_ps(r0 + i), x0, a0);
    b0 = _mm256_fmadd_ps(_mm256_loadu_ps(r0 + i + 8), x1, b0);
    a1 = _mm256_fmadd_ps(_mm256_loadu_ps(r1 + i), x0, a1);
    b1 = _mm256_fmadd_ps(_mm256_loadu_ps(r1 + i + 8), x1, b1);
    a2 = _mm256_fmadd_ps(_mm256_loadu_ps(r2 + i), x0, a2);
    b2 = _mm256_fmadd_ps(_mm256_loadu_ps(r2 + i + 8), x1, b2);
    a3 = _mm256_fmadd_ps(_mm256_loadu_ps(r3 + i), x0, a3);
    b3 = _mm256_fmadd_ps(_mm256_loadu_ps(r3 + i + 8), x1, b3);
  }
  out[0] = sum8(_mm256_add_ps(a0, b0));
  out[1] = sum8(_mm256_add_ps(a1, b1));
  out[2] = sum8(_mm256_add_ps(a2, b2));
  out[3] = sum8(_mm256_add_ps(a3, b3));
  if (i < n)
    for (int r = 0; r < 4; r++) out[r] += tail(rows + r * stride, x, i, n);
}

static void axpy(float *y, float a, const float *x, int64_t n) {
  __m256 va = _mm256_set1_ps(a);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(y + i, _mm256_fmadd_ps(va, _mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
  for (; i < n; i++) y[i] += a * x[i];
}

static void f16_to_f32(const void *src, float *dst, int64_t n) {
  const uint16_t *s = src;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + i))));
  for (; i < n; i++) dst[i] = m3_f16_to_f32(s[i]);
}

static void bf16_to_f32(const void *src, float *dst, int64_t n) {
  const uint16_t *s = src;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(s + i)));
    _mm256_storeu_ps(dst + i, _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)));
  }
  for (; i < n; i++) dst[i] = m3_bf16_to_f32(s[i]);
}

static void q8_0_to_f32(const void *src, float *dst, int64_t n) {
  const m3_block_q8_0 *b = src;
  for (int64_t i = 0; i < n / M3_BLOCK; i++, dst += M3_BLOCK) {
    __m256 d = _mm256_set1_ps(m3_f16_to_f32(b[i].d));
    for (int j = 0; j < M3_BLOCK; j += 8) {
      __m256i q = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(b[i].q + j)));
      _mm256_storeu_ps(dst + j, _mm256_mul_ps(_mm256_cvtepi32_ps(q), d));
    }
  }
}

const m3_kernels m3_kernels_avx2 = {
    "avx2",
    dot,
    dot4,
    axpy,
    &m3_products_avx2,
    {[M3_TYPE_F16] = f16_to_f32, [M3_TYPE_BF16] = bf16_to_f32, [M3_TYPE_Q8_0] = q8_0_to_f32, M3_AVX2_DECODERS},
};
#else
typedef int m3_no_avx2;
#endif
