/* Products in integers with AVX2. The table of AVX-512 uses all of this but the product of tiles. */
#if defined(__x86_64__)
#include <math.h>

#include "cpu/products.h"
#include "cpu/unpack_avx2.h"

enum { PANEL = 8 /* rows of weights that are worked on together */ };

/* One type. The functions are constant where this is inlined. */
typedef struct format {
  size_t bytes; /* of 256 elements */
  size_t block; /* bytes of a block */
  int groups;   /* of 256 elements: 8 or 16 */
  bool minima;
  void (*codes)(const void *src, int i, __m256i *v);
  void (*scales)(const void *src, float *s, float *m);
} format;

/* ------------------------------------------------------------------------------------------------ panels */

/* Eight rows of eight floats, `stride` apart, to columns. */
INLINE void transpose8(const float *from, size_t stride, __m256 *to) {
  __m256 a[8], b[8];
  for (int k = 0; k < 4; k++) {
    const float *p = from + (size_t)k * stride, *q = p + 4 * stride;
    a[k] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(q), 1);
    a[k + 4] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p + 4)), _mm_loadu_ps(q + 4), 1);
  }
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
}

/* Scales or minima of a panel by group, a row in each lane. */
typedef struct panel_scales {
  _Alignas(32) float rows[PANEL][16];
} panel_scales;

INLINE void transpose_scales(const panel_scales *from, int groups, __m256 *to) {
  for (int g = 0; g < groups; g += 8) transpose8(&from->rows[0][g], 16, to + g);
}

enum { MOST_BYTES_256 = 272 /* of 256 elements; Q8_0 */ };

/* 256 elements of row j of a panel from `column` on; what lies behind the end of the row reads as zeros. */
INLINE const void *block_of(const format *f, const m3_weight_rows *w, int64_t j, int64_t column, char *rest) {
  if (j >= w->n_rows) j = w->n_rows - 1;
  const char *p = (const char *)w->data + j * w->row_bytes + column / M3_SUPERBLOCK * (int64_t)f->bytes;
  _mm_prefetch(p + PANEL * w->row_bytes, _MM_HINT_T0);
  _mm_prefetch(p + PANEL * w->row_bytes + 64, _MM_HINT_T0);
  if (f->bytes > 128) _mm_prefetch(p + PANEL * w->row_bytes + 128, _MM_HINT_T0);
  if (w->n - column >= M3_SUPERBLOCK) return p;
  memset(rest, 0, MOST_BYTES_256);
  memcpy(rest, p, (size_t)(w->n - column) / M3_BLOCK * f->block);
  return rest;
}

/* ------------------------------------------------------------------------------------------------ one row of x */

/* Sums of halves of lanes of four rows: rows 0 to 3 in the lanes of each half. Cheaper than horizontal additions. */
INLINE __m256i sum_lanes(const __m256i *rows) {
  __m256i a = _mm256_add_epi32(_mm256_unpacklo_epi32(rows[0], rows[1]), _mm256_unpackhi_epi32(rows[0], rows[1]));
  __m256i b = _mm256_add_epi32(_mm256_unpacklo_epi32(rows[2], rows[3]), _mm256_unpackhi_epi32(rows[2], rows[3]));
  return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

/* Sums of lanes of eight rows: of the first 16 elements of a group in `low`, of the second in `high`. */
INLINE void sum_rows(const __m256i *rows, __m256i *low, __m256i *high) {
  __m256i first = sum_lanes(rows), second = sum_lanes(rows + 4);
  *low = _mm256_permute2x128_si256(first, second, 0x20);
  *high = _mm256_permute2x128_si256(first, second, 0x31);
}

INLINE __m256 add_scaled(__m256 acc, __m256i sum, __m256 weight_scale, __m256 scale) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(weight_scale, scale), acc);
}

/* Products of eight rows from row `first` on with one row of activations. */
INLINE __m256 panel_product(const format f, const m3_weight_rows *w, int64_t first, const m3_activations *a) {
  __m256 acc = _mm256_setzero_ps();
  for (int64_t column = 0; column < w->n; column += M3_SUPERBLOCK) {
    __m256i sums[8][PANEL];
    panel_scales scales, minima;
    const __m256i *x = (const __m256i *)(const void *)(a->q + column);
    for (int j = 0; j < PANEL; j++) {
      char rest[MOST_BYTES_256];
      const void *b = block_of(&f, w, first + j, column, rest);
      f.scales(b, scales.rows[j], minima.rows[j]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        __m256i v[4];
        f.codes(b, i, v);
        sums[2 * i][j] = _mm256_add_epi32(_mm256_madd_epi16(v[0], x[4 * i]), _mm256_madd_epi16(v[1], x[4 * i + 1]));
        sums[2 * i + 1][j] =
            _mm256_add_epi32(_mm256_madd_epi16(v[2], x[4 * i + 2]), _mm256_madd_epi16(v[3], x[4 * i + 3]));
      }
    }
    __m256 s[16], m[16];
    transpose_scales(&scales, f.groups, s);
    if (f.minima) transpose_scales(&minima, f.groups, m);
    for (int g = 0; g < 8; g++) {
      int64_t at = column / M3_ACTIVATION_GROUP + g;
      __m256 scale = _mm256_broadcast_ss(a->scale + at);
      __m256i low, high;
      sum_rows(sums[g], &low, &high);
      if (f.groups == 8) {
        acc = add_scaled(acc, _mm256_add_epi32(low, high), s[g], scale);
        if (f.minima) acc = _mm256_fnmadd_ps(m[g], _mm256_broadcast_ss(a->sum + at), acc);
      } else {
        acc = add_scaled(acc, low, s[2 * g], scale);
        if (f.minima) acc = _mm256_fnmadd_ps(m[2 * g], _mm256_broadcast_ss(a->half_sum + 2 * at), acc);
        acc = add_scaled(acc, high, s[2 * g + 1], scale);
        if (f.minima) acc = _mm256_fnmadd_ps(m[2 * g + 1], _mm256_broadcast_ss(a->half_sum + 2 * at + 1), acc);
      }
    }
  }
  return acc;
}

INLINE void row_product(const format f, const m3_weight_rows *w, const void *x, float *out) {
  m3_activations a = m3_activations_at((void *)x, w->n);
  for (int64_t first = 0; first < w->n_rows; first += PANEL)
    _mm256_storeu_ps(out + first, panel_product(f, w, first, &a));
}

/* ------------------------------------------------------------------------------------------------ tiles */

INLINE void unpack_panel(const format f, const m3_weight_rows *w, int64_t first, m3_tile *out) {
  for (int64_t column = 0; column < w->n; column += M3_SUPERBLOCK) {
    __m256i v[16][PANEL];
    panel_scales scales, minima;
    for (int j = 0; j < PANEL; j++) {
      char rest[MOST_BYTES_256];
      const void *b = block_of(&f, w, first + j, column, rest);
      f.scales(b, scales.rows[j], minima.rows[j]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        __m256i four[4];
        f.codes(b, i, four);
        for (int k = 0; k < 4; k++) v[4 * i + k][j] = four[k];
      }
    }
    int64_t groups = w->n - column < M3_SUPERBLOCK ? (w->n - column) / M3_ACTIVATION_GROUP : 8;
    for (int64_t k = 0; k < 2 * groups; k++) {
      __m256 pairs[8];
      transpose8((const float *)(const void *)v[k], 8, pairs);
      for (int p = 0; p < 8; p++)
        _mm256_store_ps((float *)(void *)out->q[column / 2 + 8 * k + p][first], pairs[p]);
    }
    __m256 s[16];
    int64_t at = column / M3_SUPERBLOCK * f.groups, count = groups * f.groups / 8;
    transpose_scales(&scales, f.groups, s);
    for (int64_t g = 0; g < count; g++) _mm256_store_ps(out->scale[at + g] + first, s[g]);
    if (!f.minima) continue;
    transpose_scales(&minima, f.groups, s);
    for (int64_t g = 0; g < count; g++) _mm256_store_ps(out->min[at + g] + first, s[g]);
  }
}

INLINE void unpack(const format f, const m3_weight_rows *w, m3_tile *out) {
  for (int64_t first = 0; first < M3_TILE_ROWS; first += PANEL) unpack_panel(f, w, first, out);
}

/* ------------------------------------------------------------------------------------------------ many rows of x */

enum { X_ROWS = 4 };

/* Adds `count` pairs from pair `pair` of group g to the sums of n rows of x and 16 rows of weights. */
INLINE void add_pairs(const m3_tile *t, int64_t pair, int count, const int16_t *const *x, int64_t at, int n,
                      __m256i (*sum)[2]) {
#pragma GCC unroll 1 /* else the compiler orders the sums anew and spills them */
  for (int p = 0; p < count; p++) {
    __m256i w0 = _mm256_load_si256((const __m256i *)(const void *)t->q[pair + p][0]);
    __m256i w1 = _mm256_load_si256((const __m256i *)(const void *)t->q[pair + p][8]);
#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
      __m256i two = _mm256_set1_epi32((int)word32(x[r] + at + 2 * p));
      sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(w0, two));
      sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(w1, two));
    }
  }
}

INLINE void add_groups(__m256i (*sum)[2], const float *weight_scale, const float *const *scale, int64_t at, int n,
                       float *acc) {
#pragma GCC unroll 4
  for (int r = 0; r < n; r++)
    for (int k = 0; k < 2; k++) {
      float *to = acc + r * M3_TILE_ROWS + 8 * k;
      __m256 s = _mm256_broadcast_ss(scale[r] + at);
      _mm256_storeu_ps(to, add_scaled(_mm256_loadu_ps(to), sum[r][k], _mm256_load_ps(weight_scale + 8 * k), s));
    }
}

INLINE void subtract_minima(const float *min, const float *const *sum, int64_t at, int n, float *acc) {
#pragma GCC unroll 4
  for (int r = 0; r < n; r++)
    for (int k = 0; k < 2; k++) {
      float *to = acc + r * M3_TILE_ROWS + 8 * k;
      __m256 s = _mm256_broadcast_ss(sum[r] + at);
      _mm256_storeu_ps(to, _mm256_fnmadd_ps(_mm256_load_ps(min + 8 * k), s, _mm256_loadu_ps(to)));
    }
}

/* n rows of activations with a tile. */
INLINE void multiply_rows(const m3_tile_product *p, const m3_activations *a, int n, bool halves_, bool minima,
                          float *acc) {
  const int16_t *x[X_ROWS];
  const float *scale[X_ROWS], *sums[X_ROWS];
  int64_t first = p->first / M3_ACTIVATION_GROUP;
#pragma GCC unroll 4
  for (int r = 0; r < n; r++) {
    x[r] = a[r].q + p->first;
    scale[r] = a[r].scale + first;
    sums[r] = halves_ ? a[r].half_sum + 2 * first : a[r].sum + first;
  }
  for (int64_t g = 0; g < p->n / M3_ACTIVATION_GROUP; g++)
    for (int h = 0; h < (halves_ ? 2 : 1); h++) {
      int64_t group = halves_ ? 2 * g + h : g;
      __m256i sum[X_ROWS][2];
#pragma GCC unroll 4
      for (int r = 0; r < n; r++) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
      if (halves_) {
        add_pairs(p->tile, 16 * g + 4 * h, 4, x, 32 * g + 8 * h, n, sum);
        add_pairs(p->tile, 16 * g + 4 * h + 8, 4, x, 32 * g + 8 * h + 16, n, sum);
      } else {
        add_pairs(p->tile, 16 * g, 16, x, 32 * g, n, sum);
      }
      add_groups(sum, p->tile->scale[group], scale, g, n, acc);
      if (minima) subtract_minima(p->tile->min[group], sums, group, n, acc);
    }
}

INLINE void multiply_kind(const m3_tile_product *p, bool halves_, bool minima) {
  int64_t stride = m3_activation_bytes(p->n_in);
  for (int64_t r = 0; r < p->n_x; r += X_ROWS) {
    m3_activations a[X_ROWS];
    int64_t n = p->n_x - r < X_ROWS ? p->n_x - r : X_ROWS;
    for (int64_t k = 0; k < n; k++)
      a[k] = m3_activations_at((char *)p->x + (p->rows ? p->rows[r + k] : r + k) * stride, p->n_in);
    float *acc = p->acc + r * M3_TILE_ROWS;
    switch (n) {
      case 1: multiply_rows(p, a, 1, halves_, minima, acc); break;
      case 2: multiply_rows(p, a, 2, halves_, minima, acc); break;
      case 3: multiply_rows(p, a, 3, halves_, minima, acc); break;
      default: multiply_rows(p, a, 4, halves_, minima, acc);
    }
  }
}

static void multiply(const m3_tile_product *p) {
  if (p->coding->group == 32)
    p->coding->minima ? multiply_kind(p, false, true) : multiply_kind(p, false, false);
  else
    p->coding->minima ? multiply_kind(p, true, true) : multiply_kind(p, true, false);
}

/* ------------------------------------------------------------------------------------------------ rounding */

INLINE int32_t total(__m256i a) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  s = _mm_hadd_epi32(s, s);
  return _mm_cvtsi128_si32(_mm_hadd_epi32(s, s));
}

/* Bits of the largest magnitude; bits order magnitudes, and NaN above infinity above numbers. */
INLINE float largest_magnitude(const __m256 *x) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i m = _mm256_setzero_si256();
  for (int k = 0; k < 4; k++) m = _mm256_max_epi32(m, _mm256_and_si256(_mm256_castps_si256(x[k]), magnitude));
  __m128i s = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  s = _mm_max_epi32(s, _mm_unpackhi_epi64(s, s));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 1));
  return _mm_cvtss_f32(_mm_castsi128_ps(s));
}

static void round_group(const float *from, int64_t g, const m3_activations *out) {
  __m256 x[4];
  for (int k = 0; k < 4; k++) x[k] = _mm256_loadu_ps(from + 8 * k);
  float max = largest_magnitude(x), scale = 0, inverse = 0;
  if (max >= M3_ACTIVATION_TINY && max < INFINITY) {
    scale = max / 32767.0f;
    inverse = 32767.0f / max;
  } else {
    scale = max < M3_ACTIVATION_TINY ? 0.0f : NAN;
    for (int k = 0; k < 4; k++) x[k] = _mm256_setzero_ps();
  }
  __m256i i[4], natural[2];
  for (int k = 0; k < 4; k++) i[k] = _mm256_cvtps_epi32(_mm256_mul_ps(x[k], _mm256_set1_ps(inverse)));
  for (int k = 0; k < 2; k++)
    natural[k] = _mm256_permute4x64_epi64(_mm256_packs_epi32(i[2 * k], i[2 * k + 1]), 0xd8);
  const __m256i low = _mm256_set1_epi32(0xffff);
  __m256i even = _mm256_packus_epi32(_mm256_and_si256(natural[0], low), _mm256_and_si256(natural[1], low));
  __m256i odd = _mm256_packus_epi32(_mm256_srli_epi32(natural[0], 16), _mm256_srli_epi32(natural[1], 16));
  __m256i *q = (__m256i *)(void *)(out->q + 32 * g);
  _mm256_storeu_si256(q, _mm256_permute4x64_epi64(even, 0xd8));
  _mm256_storeu_si256(q + 1, _mm256_permute4x64_epi64(odd, 0xd8));
  int32_t sum[2];
  for (int h = 0; h < 2; h++) sum[h] = total(_mm256_add_epi32(i[2 * h], i[2 * h + 1]));
  out->scale[g] = scale;
  out->sum[g] = scale * (float)(sum[0] + sum[1]);
  for (int h = 0; h < 2; h++) out->half_sum[2 * g + h] = scale * (float)sum[h];
}

static void round_row(const float *x, int64_t n, void *out) {
  m3_activations a = m3_activations_at(out, n);
  int64_t groups = n / M3_ACTIVATION_GROUP, padded = m3_padded_activations(n) / M3_ACTIVATION_GROUP;
  for (int64_t g = 0; g < groups; g++) round_group(x + 32 * g, g, &a);
  for (int64_t g = groups; g < padded; g++) {
    memset(a.q + 32 * g, 0, 32 * sizeof *a.q);
    a.scale[g] = a.sum[g] = a.half_sum[2 * g] = a.half_sum[2 * g + 1] = 0;
  }
}

/* ------------------------------------------------------------------------------------------------ types */

#define FORMAT(name, blocks, groups, minima)                                                                     \
  ((format){(blocks) * sizeof(m3_block_##name), sizeof(m3_block_##name), groups, minima, codes_##name, scales_##name})
#define TYPE(name, blocks, groups, minima)                                              \
  static void product_##name(const m3_weight_rows *w, const void *x, float *out) {      \
    row_product(FORMAT(name, blocks, groups, minima), w, x, out);                       \
  }                                                                                     \
  static void unpack_##name(const m3_weight_rows *w, m3_tile *out) {                    \
    unpack(FORMAT(name, blocks, groups, minima), w, out);                               \
  }

TYPE(q4_0, 8, 8, false)
TYPE(q4_1, 8, 8, true)
TYPE(q5_0, 8, 8, false)
TYPE(q5_1, 8, 8, true)
TYPE(q8_0, 8, 8, false)
TYPE(iq4_nl, 8, 8, false)
TYPE(mxfp4, 8, 8, false)
TYPE(q2_k, 1, 16, true)
TYPE(q3_k, 1, 16, false)
TYPE(q4_k, 1, 8, true)
TYPE(q5_k, 1, 8, true)
TYPE(q6_k, 1, 16, false)
TYPE(iq4_xs, 1, 8, false)
TYPE(iq2_xxs, 1, 8, false)
TYPE(iq2_xs, 1, 16, false)
TYPE(iq2_s, 1, 16, false)
TYPE(iq3_xxs, 1, 8, false)
TYPE(iq3_s, 1, 8, false)
TYPE(iq1_s, 1, 8, false)
TYPE(iq1_m, 1, 16, false)

/* Places of a table by type. */
#define BY_TYPE(prefix)                                                                                                \
  {[M3_TYPE_Q4_0] = prefix##q4_0,       [M3_TYPE_Q4_1] = prefix##q4_1,       [M3_TYPE_Q5_0] = prefix##q5_0,            \
   [M3_TYPE_Q5_1] = prefix##q5_1,       [M3_TYPE_Q8_0] = prefix##q8_0,       [M3_TYPE_IQ4_NL] = prefix##iq4_nl,        \
   [M3_TYPE_MXFP4] = prefix##mxfp4,     [M3_TYPE_Q2_K] = prefix##q2_k,       [M3_TYPE_Q3_K] = prefix##q3_k,            \
   [M3_TYPE_Q4_K] = prefix##q4_k,       [M3_TYPE_Q5_K] = prefix##q5_k,       [M3_TYPE_Q6_K] = prefix##q6_k,            \
   [M3_TYPE_IQ4_XS] = prefix##iq4_xs,   [M3_TYPE_IQ2_XXS] = prefix##iq2_xxs, [M3_TYPE_IQ2_XS] = prefix##iq2_xs,        \
   [M3_TYPE_IQ2_S] = prefix##iq2_s,     [M3_TYPE_IQ3_XXS] = prefix##iq3_xxs, [M3_TYPE_IQ3_S] = prefix##iq3_s,          \
   [M3_TYPE_IQ1_S] = prefix##iq1_s,     [M3_TYPE_IQ1_M] = prefix##iq1_m}

const m3_products m3_products_avx2 = {round_row, multiply, BY_TYPE(unpack_), BY_TYPE(product_)};
#else
typedef int m3_no_avx2_products;
#endif
