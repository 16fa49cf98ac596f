/* lanes.h - eight floats side by side. Groups of a block are searched eight at a time, a group in each lane, so no sum
 * runs across lanes and the result is the same whatever instruction set the compiler writes for it: every operation is
 * one IEEE operation on each lane. A file that is compiled for several instruction sets includes this one. */
#ifndef M3_SRC_QUANT_LANES_H
#define M3_SRC_QUANT_LANES_H

#include <stdint.h>
#include <string.h>

#include "quant/half.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum { M3_LANES = 8 };

typedef float m3_f8 __attribute__((vector_size(32)));
typedef int32_t m3_i8 __attribute__((vector_size(32)));

#define M3_INLINE static inline __attribute__((always_inline))

/* Inner loops: a copy for each caller and its constants where these vectors are the machine's own. Elsewhere every
 * operation on them is several, and copies of that make compilers slow. */
#if defined(__AVX2__)
#define M3_KERNEL M3_INLINE
#else
#define M3_KERNEL static
#endif

M3_INLINE m3_f8 m3_splat(float f) { return (m3_f8){f, f, f, f, f, f, f, f}; }

/* a where the mask is set (all bits), else b. */
M3_INLINE m3_f8 m3_select(m3_i8 mask, m3_f8 a, m3_f8 b) {
#if defined(__AVX2__)
  return _mm256_blendv_ps(b, a, (__m256)mask);
#else
  return (m3_f8)(((m3_i8)a & mask) | ((m3_i8)b & ~mask));
#endif
}

/* Of equal ones the second, as x86 does. */
M3_INLINE m3_f8 m3_min8(m3_f8 a, m3_f8 b) {
#if defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return m3_select(a < b, a, b);
#endif
}

M3_INLINE m3_f8 m3_max8(m3_f8 a, m3_f8 b) {
#if defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return m3_select(a > b, a, b);
#endif
}

M3_INLINE m3_f8 m3_abs8(m3_f8 a) { return (m3_f8)((m3_i8)a & 0x7fffffff); }

/* To the nearest whole number, ties to even, for magnitudes below 2^22; larger ones stay large. What rounds to zero may
 * have either sign, on which no code depends. */
M3_INLINE m3_f8 m3_round8(m3_f8 a) {
#if defined(__AVX2__)
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  return (a + 0x1.8p23f) - 0x1.8p23f;
#endif
}

M3_INLINE m3_f8 m3_clamp8(m3_f8 a, float low, float high) { return m3_min8(m3_max8(a, m3_splat(low)), m3_splat(high)); }

M3_INLINE m3_i8 m3_limit8(m3_i8 a, int low, int high) {
  m3_i8 under = a<low, over = a> high;
  return (a & ~under & ~over) | (low & under) | (high & over);
}

/* 1 / a, and 0 where a is so small that nothing of a block with magnitudes up to 1 is a sensible multiple of it. */
M3_INLINE m3_f8 m3_inverse8(m3_f8 a) {
  m3_i8 usable = m3_abs8(a) > m3_splat(0x1p-60f);
  return m3_select(usable, m3_splat(1.0f) / m3_select(usable, a, m3_splat(1.0f)), m3_splat(0.0f));
}

/* Entry i of a table of eight, i = 0..7 in each lane. */
M3_INLINE m3_f8 m3_lookup8(m3_f8 table, m3_i8 i) {
#if defined(__AVX2__)
  return _mm256_permutevar8x32_ps(table, (__m256i)i);
#else
  m3_f8 out;
  for (int k = 0; k < M3_LANES; k++) out[k] = table[i[k]];
  return out;
#endif
}

/* Eight rows of eight floats, which are `stride` apart, to columns: to[j][k] = from[k * stride + j]. */
M3_INLINE void m3_transpose8(const float *from, int stride, m3_f8 *to) {
#if defined(__AVX2__)
  __m256 a[8], b[8];
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {
    const float *p = from + k * stride, *q = p + 4 * stride;
    a[k] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(q), 1);
    a[k + 4] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p + 4)), _mm_loadu_ps(q + 4), 1);
  }
#pragma GCC unroll 2
  for (int k = 0; k < 8; k += 4) {
    b[k] = _mm256_unpacklo_ps(a[k], a[k + 1]);
    b[k + 1] = _mm256_unpackhi_ps(a[k], a[k + 1]);
    b[k + 2] = _mm256_unpacklo_ps(a[k + 2], a[k + 3]);
    b[k + 3] = _mm256_unpackhi_ps(a[k + 2], a[k + 3]);
    to[k] = _mm256_shuffle_ps(b[k], b[k + 2], 0x44);
    to[k + 1] = _mm256_shuffle_ps(b[k], b[k + 2], 0xee);
    to[k + 2] = _mm256_shuffle_ps(b[k + 1], b[k + 3], 0x44);
    to[k + 3] = _mm256_shuffle_ps(b[k + 1], b[k + 3], 0xee);
  }
#else
  for (int j = 0; j < M3_LANES; j++)
    for (int k = 0; k < M3_LANES; k++) to[j][k] = from[k * stride + j];
#endif
}

/* The sum of the lanes, in one order everywhere. */
M3_INLINE float m3_total(m3_f8 a) {
  float f[M3_LANES];
  memcpy(f, &a, sizeof f);
  return ((f[0] + f[4]) + (f[2] + f[6])) + ((f[1] + f[5]) + (f[3] + f[7]));
}

M3_INLINE float m3_greatest(m3_f8 a) {
  float f[M3_LANES], g;
  memcpy(f, &a, sizeof f);
  g = f[0];
  for (int k = 1; k < M3_LANES; k++)
    if (f[k] > g) g = f[k];
  return g;
}

/* What float16 keeps of each lane, with magnitudes cut off at its largest number. */
M3_INLINE m3_f8 m3_half8(m3_f8 a) {
  a = m3_clamp8(a, -65504.0f, 65504.0f);
#if defined(__AVX2__)
  return _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  m3_f8 out;
  for (int k = 0; k < M3_LANES; k++) out[k] = m3_f16_to_f32(m3_f32_to_f16(a[k]));
  return out;
#endif
}

#endif
