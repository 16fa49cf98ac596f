/* Products of tiles with AVX-512: all 16 rows of a tile in one vector. Single rows and unpacking are those of AVX2. The
 * file is compiled twice, the second time with dot product instructions (products_avx512_vnni.c). */
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "cpu/products.h"

#define INLINE static inline __attribute__((always_inline))

enum { X_ROWS = 8 };

#if defined(__AVX512VNNI__)
#define MULTIPLY m3_multiply_avx512_vnni
INLINE __m512i add_products(__m512i sum, __m512i a, __m512i b) { return _mm512_dpwssd_epi32(sum, a, b); }
#else
#define MULTIPLY m3_multiply_avx512
INLINE __m512i add_products(__m512i sum, __m512i a, __m512i b) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}
#endif

/* Adds `count` pairs from pair `pair` of the tile to the sums of n rows of x. */
INLINE void add_pairs(const m3_tile *t, int64_t pair, int count, const int16_t *const *x, int64_t at, int n,
                      __m512i *sum) {
#pragma GCC unroll 1
  for (int p = 0; p < count; p++) {
    __m512i w = _mm512_load_si512(t->q[pair + p]);
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
      int32_t two;
      memcpy(&two, x[r] + at + 2 * p, 4);
      sum[r] = add_products(sum[r], w, _mm512_set1_epi32(two));
    }
  }
}

/* n rows of activations with a tile. */
INLINE void multiply_rows(const m3_tile_product *p, const m3_activations *a, int n, bool halves, bool minima,
                          float *acc) {
  const int16_t *x[X_ROWS];
  int64_t first = p->first / M3_ACTIVATION_GROUP;
  __m512 total[X_ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < n; r++) {
    x[r] = a[r].q + p->first;
    total[r] = _mm512_loadu_ps(acc + r * M3_TILE_ROWS);
  }
  for (int64_t g = 0; g < p->n / M3_ACTIVATION_GROUP; g++)
    for (int h = 0; h < (halves ? 2 : 1); h++) {
      int64_t group = halves ? 2 * g + h : g;
      __m512i sum[X_ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < n; r++) sum[r] = _mm512_setzero_si512();
      if (halves) {
        add_pairs(p->tile, 16 * g + 4 * h, 4, x, 32 * g + 8 * h, n, sum);
        add_pairs(p->tile, 16 * g + 4 * h + 8, 4, x, 32 * g + 8 * h + 16, n, sum);
      } else {
        add_pairs(p->tile, 16 * g, 16, x, 32 * g, n, sum);
      }
      __m512 weight_scale = _mm512_load_ps(p->tile->scale[group]);
      __m512 min = minima ? _mm512_load_ps(p->tile->min[group]) : _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int r = 0; r < n; r++) {
        __m512 scale = _mm512_mul_ps(weight_scale, _mm512_set1_ps(a[r].scale[first + g]));
        total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), scale, total[r]);
        if (!minima) continue;
        float x_sum = halves ? a[r].half_sum[2 * first + group] : a[r].sum[first + g];
        total[r] = _mm512_fnmadd_ps(min, _mm512_set1_ps(x_sum), total[r]);
      }
    }
#pragma GCC unroll 8
  for (int r = 0; r < n; r++) _mm512_storeu_ps(acc + r * M3_TILE_ROWS, total[r]);
}

INLINE void multiply_kind(const m3_tile_product *p, bool halves, bool minima) {
  m3_ahead ahead = p->ahead;
  int64_t lines = m3_ahead_lines(&ahead, (p->n_x + X_ROWS - 1) / X_ROWS);
  for (int64_t r = 0; r < p->n_x; r += X_ROWS) {
    m3_fetch(&ahead, lines);
    m3_activations a[X_ROWS];
    int64_t n = p->n_x - r < X_ROWS ? p->n_x - r : X_ROWS;
    for (int64_t k = 0; k < n; k++) a[k] = m3_activations_of(p, r + k);
    float *acc = p->acc + r * M3_TILE_ROWS;
    switch (n) {
      case 8: multiply_rows(p, a, 8, halves, minima, acc); break;
      case 4: multiply_rows(p, a, 4, halves, minima, acc); break;
      default:
        for (int64_t k = 0; k < n; k++) multiply_rows(p, a + k, 1, halves, minima, acc + k * M3_TILE_ROWS);
    }
  }
}

void MULTIPLY(const m3_tile_product *p) {
  if (p->coding->group == 32)
    p->coding->minima ? multiply_kind(p, false, true) : multiply_kind(p, false, false);
  else
    p->coding->minima ? multiply_kind(p, true, true) : multiply_kind(p, true, false);
}
#else
typedef int m3_no_avx512_products;
#endif
