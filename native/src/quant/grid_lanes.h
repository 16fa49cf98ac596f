/* grid_lanes.h - what searches of codebooks do with eight floats side by side, besides lanes.h. */
#ifndef M3_SRC_QUANT_GRID_LANES_H
#define M3_SRC_QUANT_GRID_LANES_H

#include "quant/lanes.h"

M3_INLINE m3_f8 m3_load8(const float *p) {
  m3_f8 a;
  memcpy(&a, p, sizeof a);
  return a;
}

M3_INLINE void m3_store8(float *p, m3_f8 a) { memcpy(p, &a, sizeof a); }

#if defined(__AVX2__)

/* Bit i: a[i] <= b[i]. */
M3_INLINE unsigned m3_not_above8(m3_f8 a, m3_f8 b) {
  return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LE_OQ));
}

M3_INLINE float m3_least(m3_f8 a) {
  __m128 m = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_min_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_min_ss(m, _mm_shuffle_ps(m, m, 1)));
}

/* Toward zero, for magnitudes below 2^31. */
M3_INLINE m3_f8 m3_whole8(m3_f8 a) { return _mm256_cvtepi32_ps(_mm256_cvttps_epi32(a)); }

/* table[index[i]], index 0..7. */
M3_INLINE m3_f8 m3_pick8(m3_f8 table, const uint8_t *index) {
  return _mm256_permutevar8x32_ps(table, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)index)));
}

M3_INLINE m3_f8 m3_unsigned8(const uint8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

M3_INLINE m3_f8 m3_signed8(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

#else

M3_INLINE unsigned m3_not_above8(m3_f8 a, m3_f8 b) {
  m3_i8 at_most = a <= b;
  unsigned bits = 0;
  for (int i = 0; i < M3_LANES; i++) bits |= (unsigned)(at_most[i] & 1) << i;
  return bits;
}

M3_INLINE float m3_least(m3_f8 a) {
  float least = a[0];
  for (int i = 1; i < M3_LANES; i++) least = a[i] < least ? a[i] : least;
  return least;
}

M3_INLINE m3_f8 m3_whole8(m3_f8 a) {
  m3_f8 out;
  for (int i = 0; i < M3_LANES; i++) out[i] = (float)(int32_t)a[i];
  return out;
}

M3_INLINE m3_f8 m3_pick8(m3_f8 table, const uint8_t *index) {
  float from[M3_LANES], out[M3_LANES];
  m3_store8(from, table);
  for (int i = 0; i < M3_LANES; i++) out[i] = from[index[i]];
  return m3_load8(out);
}

M3_INLINE m3_f8 m3_unsigned8(const uint8_t *p) {
  float out[M3_LANES];
  for (int i = 0; i < M3_LANES; i++) out[i] = (float)p[i];
  return m3_load8(out);
}

M3_INLINE m3_f8 m3_signed8(const int8_t *p) {
  float out[M3_LANES];
  for (int i = 0; i < M3_LANES; i++) out[i] = (float)p[i];
  return m3_load8(out);
}

#endif

#endif
