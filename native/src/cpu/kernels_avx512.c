/* AVX-512 F, BW, VL, DQ. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu/decode_avx2.h"
#include "cpu/kernels.h"
#include "quant/blocks.h"
#include "quant/half.h"

/* The first n of 16 lanes; the others read as zero and touch no memory. */
static inline __mmask16 lanes(int64_t n) { return (__mmask16)((1u << n) - 1); }

static float dot(const float *a, const float *b, int64_t n) {
  __m512 s0 = _mm512_setzero_ps(), s1 = s0;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    s0 = _mm512_fmadd_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i), s0);
    s1 = _mm512_fmadd_ps(_mm512_loadu_ps(a + i + 16), _mm512_loadu_ps(b + i + 16), s1);
  }
  for (; i < n; i += 16) {
    __mmask16 m = n - i >= 16 ? 0xffff : lanes(n - i);
    s0 = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(m, a + i), _mm512_maskz_loadu_ps(m, b + i), s0);
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(s0, s1));
}

static void dot4(const float *rows, int64_t stride, const float *x, int64_t n, float out[4]) {
  __m512 s0[4], s1[4];
  for (int r = 0; r < 4; r++) s0[r] = s1[r] = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m512 x0 = _mm512_loadu_ps(x + i), x1 = _mm512_loadu_ps(x + i + 16);
    for (int r = 0; r < 4; r++) {
      s0[r] = _mm512_fmadd_ps(_mm512_loadu_ps(rows + r * stride + i), x0, s0[r]);
      s1[r] = _mm512_fmadd_ps(_mm512_loadu_ps(rows + r * stride + i + 16), x1, s1[r]);
    }
  }
  for (; i < n; i += 16) {
    __mmask16 m = n - i >= 16 ? 0xffff : lanes(n - i);
    __m512 xm = _mm512_maskz_loadu_ps(m, x + i);
    for (int r = 0; r < 4; r++) s0[r] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(m, rows + r * stride + i), xm, s0[r]);
  }
  for (int r = 0; r < 4; r++) out[r] = _mm512_reduce_add_ps(_mm512_add_ps(s0[r], s1[r]));
}

static void axpy(float *y, float a, const float *x, int64_t n) {
  __m512 va = _mm512_set1_ps(a);
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 m = n - i >= 16 ? 0xffff : lanes(n - i);
    __m512 r = _mm512_fmadd_ps(va, _mm512_maskz_loadu_ps(m, x + i), _mm512_maskz_loadu_ps(m, y + i));
    _mm512_mask_storeu_ps(y + i, m, r);
  }
}

static void f16_to_f32(const void *src, float *dst, int64_t n) {
  const uint16_t *s = src;
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 m = n - i >= 16 ? 0xffff : lanes(n - i);
    _mm512_mask_storeu_ps(dst + i, m, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, s + i)));
  }
}

static void bf16_to_f32(const void *src, float *dst, int64_t n) {
  const uint16_t *s = src;
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 m = n - i >= 16 ? 0xffff : lanes(n - i);
    __m512i v = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, s + i)), 16);
    _mm512_mask_storeu_ps(dst + i, m, _mm512_castsi512_ps(v));
  }
}

static void q8_0_to_f32(const void *src, float *dst, int64_t n) {
  const m3_block_q8_0 *b = src;
  for (int64_t i = 0; i < n / M3_BLOCK; i++, dst += M3_BLOCK) {
    __m512 d = _mm512_set1_ps(m3_f16_to_f32(b[i].d));
    for (int j = 0; j < M3_BLOCK; j += 16) {
      __m512i q = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(b[i].q + j)));
      _mm512_storeu_ps(dst + j, _mm512_mul_ps(_mm512_cvtepi32_ps(q), d));
    }
  }
}

#define WITH_PRODUCTS(products)                                                                                \
  {                                                                                                            \
    "avx512", dot, dot4, axpy, products, {                                                                     \
      [M3_TYPE_F16] = f16_to_f32, [M3_TYPE_BF16] = bf16_to_f32, [M3_TYPE_Q8_0] = q8_0_to_f32, M3_AVX2_DECODERS \
    }                                                                                                          \
  }

const m3_kernels m3_kernels_avx512 = WITH_PRODUCTS(&m3_products_avx512);
const m3_kernels m3_kernels_avx512_vnni = WITH_PRODUCTS(&m3_products_avx512_vnni);
#else
typedef int m3_no_avx512;
#endif
