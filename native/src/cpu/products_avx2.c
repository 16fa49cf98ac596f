/* Products in integers with AVX2. The table of AVX-512 uses all of this but the product of tiles. */
#if defined(__x86_64__)
#include <math.h>

#include "cpu/panels_avx2.h"
#include "cpu/products.h"
#include "cpu/unpack_codebooks_avx2.h"
#include "quant/lanes.h"

enum { PANEL = 8 /* rows of weights that are worked on together */ };

/* Where the codes of 256 elements lie, if `codes` makes byte i of its results of bytes i of these alone. */
typedef struct words {
  int count; /* of 32 bytes each; 0: it does not */
  size_t offset, stride;
} words;

/* One type. The functions are constant where this is inlined. */
typedef struct format {
  size_t bytes; /* of 256 elements */
  size_t block; /* bytes of a block */
  int groups;   /* of 256 elements: 8 or 16 */
  bool minima;
  int zero;    /* in the lanes of `codes` */
  bool by_row; /* a row of the panel at a time, which takes fewer registers; else four rows, which takes no memory */
  void (*codes)(const void *src, int i, __m256i *v);
  void (*scales)(const void *src, float *s, float *m);
  panel_scales *panel; /* NULL: from the scales of each row */
  words words;
} format;

/* ------------------------------------------------------------------------------------------------ panels */

enum { MOST_BYTES_256 = 272 /* of 256 elements; Q8_0 */ };

/* Eight rows of weights. */
typedef struct panel {
  const char *row[PANEL];           /* 256 elements of each from the current column on */
  char rest[PANEL][MOST_BYTES_256]; /* of the last column of rows that end within 256 elements: zeros behind the end */
} panel;

/* Rows beyond the last are the last again. */
INLINE void begin_panel(const m3_weight_rows *w, int64_t first, panel *p) {
  for (int64_t j = 0; j < PANEL; j++)
    p->row[j] = (const char *)w->data + (first + j < w->n_rows ? first + j : w->n_rows - 1) * w->row_bytes;
}

INLINE void pad_rows(const format *f, int64_t elements, panel *p) {
  for (int j = 0; j < PANEL; j++) {
    memset(p->rest[j], 0, f->bytes);
    memcpy(p->rest[j], p->row[j], (size_t)(elements / M3_BLOCK) * f->block);
    p->row[j] = p->rest[j];
  }
}

/* What is fetched of the next panel, which lies behind this one, while a panel is worked on: from `at` on, for each of
 * its rows. Long rows are fetched where they will be read. Short ones in the order of memory: where several of them
 * share a page, the processor's own prefetch, which must run ahead of these, takes them for one stream. */
typedef struct fetching {
  const char *at;
  int64_t row, column; /* bytes from one row to the next, and from one 256 columns to the next */
} fetching;

enum { LONG_ROW = 2560 };

INLINE fetching begin_fetching(const format *f, const m3_weight_rows *w, int64_t first) {
  int64_t bytes = (int64_t)f->bytes;
  const char *next = (const char *)w->data + (first + PANEL) * w->row_bytes;
  return w->row_bytes < LONG_ROW ? (fetching){next, bytes, PANEL * bytes} : (fetching){next, w->row_bytes, bytes};
}

INLINE void fetch(const format *f, const char *at) {
#pragma GCC unroll 8
  for (size_t i = 0; i < f->bytes; i += 64) _mm_prefetch(at + i, _MM_HINT_T0);
}

/* Scales and minima by group, a row in each lane. */
INLINE void scales_of_panel(const format *f, const panel *p, __m256 *s, __m256 *m) {
  if (f->panel) {
    f->panel(p->row, s, m);
    return;
  }
  _Alignas(32) float scales[PANEL][16], minima[PANEL][16];
  for (int j = 0; j < PANEL; j++) f->scales(p->row[j], scales[j], minima[j]);
  for (int g = 0; g < f->groups; g += 8) {
    m3_transpose8(&scales[0][g], 16, (m3_f8 *)s + g);
    if (f->minima) m3_transpose8(&minima[0][g], 16, (m3_f8 *)m + g);
  }
}

/* ------------------------------------------------------------------------------------------------ one row of x */

/* Sums of halves of lanes of four rows: rows 0 to 3 in the lanes of each half. Cheaper than horizontal additions. */
INLINE __m256i sum_lanes(const __m256i *rows) {
  __m256i a = _mm256_add_epi32(_mm256_unpacklo_epi32(rows[0], rows[1]), _mm256_unpackhi_epi32(rows[0], rows[1]));
  __m256i b = _mm256_add_epi32(_mm256_unpacklo_epi32(rows[2], rows[3]), _mm256_unpackhi_epi32(rows[2], rows[3]));
  return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

INLINE __m256 add_scaled(__m256 acc, __m256i sum, __m256 weight_scale, __m256 scale) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(weight_scale, scale), acc);
}

/* Sums of groups 2 i and 2 i + 1 of a row in lanes. */
INLINE void multiply_codes(const format *f, const char *row, int i, const int16_t *x, __m256i *even, __m256i *odd) {
  __m256i v[4];
  f->codes(row, i, v);
  *even = _mm256_add_epi32(_mm256_madd_epi16(v[0], load32(x)), _mm256_madd_epi16(v[1], load32(x + 16)));
  *odd = _mm256_add_epi32(_mm256_madd_epi16(v[2], load32(x + 32)), _mm256_madd_epi16(v[3], load32(x + 48)));
}

/* sums[h][g] = those of group g of rows 4 h to 4 h + 3, as sum_lanes gives them: low halves are of the first 16
 * elements of the group, high ones of the second 16. */
INLINE void sum_by_fours(const format *f, const panel *p, const int16_t *q, fetching next, __m256i (*sums)[8]) {
  for (int h = 0; h < 2; h++) {
    for (int j = 0; j < 4; j++, next.at += next.row) fetch(f, next.at);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      __m256i even[4], odd[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) multiply_codes(f, p->row[4 * h + j], i, q + 64 * i, &even[j], &odd[j]);
      sums[h][2 * i] = sum_lanes(even);
      sums[h][2 * i + 1] = sum_lanes(odd);
    }
  }
}

INLINE void sum_by_rows(const format *f, const panel *p, const int16_t *q, fetching next, __m256i (*sums)[8]) {
  __m256i lanes[8][PANEL];
  for (int j = 0; j < PANEL; j++, next.at += next.row) {
    fetch(f, next.at);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) multiply_codes(f, p->row[j], i, q + 64 * i, &lanes[2 * i][j], &lanes[2 * i + 1][j]);
  }
  for (int g = 0; g < 8; g++) {
    sums[0][g] = sum_lanes(lanes[g]);
    sums[1][g] = sum_lanes(lanes[g] + 4);
  }
}

/* Adds group g of the activations; `first` and `second` are sums of rows 0 to 3 and 4 to 7. */
INLINE __m256 add_group(const format *f, __m256i first, __m256i second, const __m256 *s, const __m256 *m,
                        const m3_activations *a, int64_t at, __m256 acc) {
  if (f->zero) {
    const __m256i halves = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    __m256i total = _mm256_set1_epi64x((int64_t)word64(a->total + 2 * at));
    total = _mm256_slli_epi32(_mm256_permutevar8x32_epi32(total, halves), __builtin_ctz((unsigned)f->zero));
    first = _mm256_sub_epi32(first, total);
    second = _mm256_sub_epi32(second, total);
  }
  __m256i low = _mm256_permute2x128_si256(first, second, 0x20);
  __m256i high = _mm256_permute2x128_si256(first, second, 0x31);
  __m256 scale = _mm256_broadcast_ss(a->scale + at);
  if (f->groups == 8) {
    acc = add_scaled(acc, _mm256_add_epi32(low, high), s[0], scale);
    return f->minima ? _mm256_fnmadd_ps(m[0], _mm256_broadcast_ss(a->sum + at), acc) : acc;
  }
  acc = add_scaled(acc, low, s[0], scale);
  if (f->minima) acc = _mm256_fnmadd_ps(m[0], _mm256_broadcast_ss(a->half_sum + 2 * at), acc);
  acc = add_scaled(acc, high, s[1], scale);
  return f->minima ? _mm256_fnmadd_ps(m[1], _mm256_broadcast_ss(a->half_sum + 2 * at + 1), acc) : acc;
}

/* 256 columns of eight rows, added to the sums of the rows. */
INLINE __m256 multiply_panel(const format *f, const panel *p, fetching next, const m3_activations *a, int64_t column,
                             __m256 acc) {
  const int step = f->groups / 8;
  __m256 s[16], m[16];
  scales_of_panel(f, p, s, m);
  __m256i sums[2][8];
  if (f->by_row)
    sum_by_rows(f, p, a->q + column, next, sums);
  else
    sum_by_fours(f, p, a->q + column, next, sums);
  for (int g = 0; g < 8; g++)
    acc = add_group(f, sums[0][g], sums[1][g], s + step * g, m + step * g, a, column / M3_ACTIVATION_GROUP + g, acc);
  return acc;
}

/* Products of eight rows from row `first` on with one row of activations. */
INLINE __m256 panel_product(const format f, const m3_weight_rows *w, int64_t first, const m3_activations *a) {
  __m256 acc = _mm256_setzero_ps();
  panel p;
  begin_panel(w, first, &p);
  fetching next = begin_fetching(&f, w, first);
  int64_t column = 0;
  for (; column < w->n; column += M3_SUPERBLOCK) {
    if (f.block != f.bytes && w->n - column < M3_SUPERBLOCK) pad_rows(&f, w->n - column, &p);
    acc = multiply_panel(&f, &p, next, a, column, acc);
    next.at += next.column;
    for (int j = 0; j < PANEL; j++) p.row[j] += f.bytes;
  }
  return acc;
}

INLINE void row_product(const format f, const m3_weight_rows *w, const void *x, float *out) {
  m3_activations a = m3_activations_at((void *)x, w->n);
  for (int64_t first = 0; first < w->n_rows; first += PANEL)
    _mm256_storeu_ps(out + first, panel_product(f, w, first, &a));
}

/* ------------------------------------------------------------------------------------------------ tiles */

/* Codes of up to 8 groups from column `column` on, pairs of a row in each lane. */
INLINE void store_codes(const format *f, __m256i v, m3_tile *out, int64_t pair, int64_t first) {
  if (f->zero) v = _mm256_sub_epi16(v, _mm256_set1_epi16((int16_t)f->zero));
  _mm256_store_si256((__m256i *)(void *)out->q[pair][first], v);
}

/* Of types whose codes come byte by byte from words of 32 bytes: the k-th 32-bit words of eight rows are put together
 * to one block, of which `codes` then gives the k-th pairs of eight rows. */
INLINE void unpack_words(const format *f, const panel *p, int64_t groups, m3_tile *out, int64_t pair, int64_t first) {
  _Alignas(32) char block[8][MOST_BYTES_256 + 16];
#pragma GCC unroll 8
  for (int c = 0; c < f->words.count; c++) {
    size_t at = f->words.offset + (size_t)c * f->words.stride;
    __m256i w[8];
    words_of_rows(p->row, at, w);
    words_of_rows(p->row, at + 16, w + 4);
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) _mm256_storeu_si256((__m256i *)(void *)(block[k] + at), w[k]);
  }
  for (int k = 0; k < 8; k++) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      if (2 * i >= groups) break;
      __m256i v[4];
      f->codes(block[k], i, v);
      store_codes(f, v[0], out, pair + 32 * i + k, first);
      store_codes(f, v[1], out, pair + 32 * i + 8 + k, first);
      if (2 * i + 1 == groups) break;
      store_codes(f, v[2], out, pair + 32 * i + 16 + k, first);
      store_codes(f, v[3], out, pair + 32 * i + 24 + k, first);
    }
  }
}

INLINE void unpack_rows(const format *f, const panel *p, int64_t groups, m3_tile *out, int64_t pair, int64_t first) {
  __m256i v[16][PANEL];
  for (int j = 0; j < PANEL; j++) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      __m256i four[4];
      f->codes(p->row[j], i, four);
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) v[4 * i + k][j] = four[k];
    }
  }
  for (int64_t k = 0; k < 2 * groups; k++) {
    __m256 pairs[8];
    m3_transpose8((const float *)(const void *)v[k], 8, (m3_f8 *)pairs);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) store_codes(f, _mm256_castps_si256(pairs[i]), out, pair + 8 * k + i, first);
  }
}

INLINE void unpack_panel(const format f, const m3_weight_rows *w, int64_t first, m3_tile *out) {
  panel rows;
  begin_panel(w, first, &rows);
  for (int64_t column = 0; column < w->n; column += M3_SUPERBLOCK) {
    int64_t groups = w->n - column < M3_SUPERBLOCK ? (w->n - column) / M3_ACTIVATION_GROUP : 8;
    if (f.block != f.bytes && groups < 8) pad_rows(&f, w->n - column, &rows);
    if (f.words.count)
      unpack_words(&f, &rows, groups, out, column / 2, first);
    else
      unpack_rows(&f, &rows, groups, out, column / 2, first);
    __m256 s[16], m[16];
    scales_of_panel(&f, &rows, s, m);
    int64_t at = column / M3_SUPERBLOCK * f.groups;
    for (int64_t g = 0; g < groups * f.groups / 8; g++) {
      _mm256_store_ps(out->scale[at + g] + first, s[g]);
      if (f.minima) _mm256_store_ps(out->min[at + g] + first, m[g]);
    }
    for (int j = 0; j < PANEL; j++) rows.row[j] += f.bytes;
  }
}

INLINE void unpack(const format f, const m3_weight_rows *w, m3_tile *out) {
  for (int64_t first = 0; first < M3_TILE_ROWS; first += PANEL) unpack_panel(f, w, first, out);
}

/* ------------------------------------------------------------------------------------------------ many rows of x */

/* As many as there are registers for: their sums of integers and of floats. The last four rows are taken together. */
enum { X_ROWS = 3, LAST_ROWS = 4 };

/* Adds `count` pairs from pair `pair` of the tile to the sums of n rows of x and 16 rows of weights. The first of them
 * begin the sums if `begin` is set. */
INLINE void add_pairs(const m3_tile *t, int64_t pair, int count, const int16_t *const *x, int64_t at, int n, bool begin,
                      __m256i (*sum)[2]) {
#pragma GCC unroll 16
  for (int p = 0; p < count; p++) {
    __m256i w[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
      w[k] = _mm256_load_si256((const __m256i *)(const void *)t->q[pair + p][8 * k]);
      /* Else the compiler loads them anew for each row, more than the two loads a cycle. */
      __asm__("" : "+x"(w[k]));
    }
#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
      __m256i two = _mm256_set1_epi32((int)word32(x[r] + at + 2 * p));
#pragma GCC unroll 2
      for (int k = 0; k < 2; k++) {
        __m256i product = _mm256_madd_epi16(w[k], two);
        sum[r][k] = begin && p == 0 ? product : _mm256_add_epi32(sum[r][k], product);
        /* Else the compiler orders the sums anew and spills them. */
        __asm__("" : "+x"(sum[r][k]));
      }
    }
  }
}

/* n rows of activations with a tile. */
INLINE void multiply_rows(const m3_tile_product *p, const m3_activations *a, int n, bool halved, bool minima,
                          float *acc) {
  const int16_t *x[LAST_ROWS];
  const float *scale[LAST_ROWS], *x_sum[LAST_ROWS];
  __m256 total[LAST_ROWS][2];
  int64_t first = p->first / M3_ACTIVATION_GROUP;
#pragma GCC unroll 4
  for (int r = 0; r < n; r++) {
    x[r] = a[r].q + p->first;
    scale[r] = a[r].scale + first;
    x_sum[r] = halved ? a[r].half_sum + 2 * first : a[r].sum + first;
    total[r][0] = _mm256_loadu_ps(acc + r * M3_TILE_ROWS);
    total[r][1] = _mm256_loadu_ps(acc + r * M3_TILE_ROWS + 8);
  }
  for (int64_t g = 0; g < p->n / M3_ACTIVATION_GROUP; g++)
    for (int h = 0; h < (halved ? 2 : 1); h++) {
      int64_t group = halved ? 2 * g + h : g;
      __m256i sum[LAST_ROWS][2];
      if (halved) {
        add_pairs(p->tile, 16 * g + 4 * h, 4, x, 32 * g + 8 * h, n, true, sum);
        add_pairs(p->tile, 16 * g + 4 * h + 8, 4, x, 32 * g + 8 * h + 16, n, false, sum);
      } else {
        add_pairs(p->tile, 16 * g, 16, x, 32 * g, n, true, sum);
      }
#pragma GCC unroll 4
      for (int r = 0; r < n; r++) {
        __m256 s = _mm256_broadcast_ss(scale[r] + g), m = minima ? _mm256_broadcast_ss(x_sum[r] + group) : s;
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
          __m256 y = add_scaled(total[r][k], sum[r][k], _mm256_load_ps(p->tile->scale[group] + 8 * k), s);
          total[r][k] = minima ? _mm256_fnmadd_ps(_mm256_load_ps(p->tile->min[group] + 8 * k), m, y) : y;
          /* Else the compiler keeps them in memory. */
          if (n <= X_ROWS) __asm__("" : "+x"(total[r][k]));
        }
      }
    }
#pragma GCC unroll 4
  for (int r = 0; r < n; r++)
    for (int k = 0; k < 2; k++) _mm256_storeu_ps(acc + r * M3_TILE_ROWS + 8 * k, total[r][k]);
}

INLINE void multiply_kind(const m3_tile_product *p, bool halved, bool minima) {
  m3_ahead ahead = p->ahead;
  int64_t lines = m3_ahead_lines(&ahead, (p->n_x + X_ROWS - 1) / X_ROWS);
  for (int64_t r = 0, n; r < p->n_x; r += n) {
    m3_fetch(&ahead, lines);
    int64_t left = p->n_x - r;
    n = left == LAST_ROWS || left < X_ROWS ? left : X_ROWS;
    m3_activations a[LAST_ROWS];
    for (int64_t k = 0; k < n; k++) a[k] = m3_activations_of(p, r + k);
    float *acc = p->acc + r * M3_TILE_ROWS;
    switch (n) {
      case 1: multiply_rows(p, a, 1, halved, minima, acc); break;
      case 2: multiply_rows(p, a, 2, halved, minima, acc); break;
      case 3: multiply_rows(p, a, 3, halved, minima, acc); break;
      default: multiply_rows(p, a, 4, halved, minima, acc);
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
  for (int k = 0; k < 2; k++) natural[k] = _mm256_permute4x64_epi64(_mm256_packs_epi32(i[2 * k], i[2 * k + 1]), 0xd8);
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
  for (int h = 0; h < 2; h++) {
    out->half_sum[2 * g + h] = scale * (float)sum[h];
    out->total[2 * g + h] = sum[h];
  }
}

static void round_row(const float *x, int64_t n, void *out) {
  m3_activations a = m3_activations_at(out, n);
  int64_t groups = n / M3_ACTIVATION_GROUP, padded = m3_padded_activations(n) / M3_ACTIVATION_GROUP;
  for (int64_t g = 0; g < groups; g++) round_group(x + 32 * g, g, &a);
  for (int64_t g = groups; g < padded; g++) {
    memset(a.q + 32 * g, 0, 32 * sizeof *a.q);
    a.scale[g] = a.sum[g] = a.half_sum[2 * g] = a.half_sum[2 * g + 1] = 0;
    a.total[2 * g] = a.total[2 * g + 1] = 0;
  }
}

/* ------------------------------------------------------------------------------------------------ types */

#define FORMAT(name, blocks, groups, minima, by_row, panel, ...) \
  ((format){(blocks) * sizeof(m3_block_##name),                  \
            sizeof(m3_block_##name),                             \
            groups,                                              \
            minima,                                              \
            zero_##name,                                         \
            by_row,                                              \
            codes_##name,                                        \
            scales_##name,                                       \
            panel,                                               \
            {__VA_ARGS__}})
#define TYPE(name, ...)                                                            \
  static void product_##name(const m3_weight_rows *w, const void *x, float *out) { \
    row_product(FORMAT(name, __VA_ARGS__), w, x, out);                             \
  }                                                                                \
  static void unpack_##name(const m3_weight_rows *w, m3_tile *out) { unpack(FORMAT(name, __VA_ARGS__), w, out); }

TYPE(q4_0, 8, 8, false, true, panel_q4_0, 0)
TYPE(q4_1, 8, 8, true, true, panel_q4_1, 0)
TYPE(q5_0, 8, 8, false, true, panel_q5_0, 0)
TYPE(q5_1, 8, 8, true, true, panel_q5_1, 0)
TYPE(q8_0, 8, 8, false, false, panel_q8_0, 8, offsetof(m3_block_q8_0, q), sizeof(m3_block_q8_0))
TYPE(iq4_nl, 8, 8, false, true, panel_iq4_nl, 0)
TYPE(mxfp4, 8, 8, false, true, NULL, 0)
TYPE(q2_k, 1, 16, true, false, panel_q2_k, 2, offsetof(m3_block_q2_k, q), 32)
TYPE(q3_k, 1, 16, false, false, panel_q3_k, 3, 0, 32) /* hmask, q */
TYPE(q4_k, 1, 8, true, false, panel_q4_k, 4, offsetof(m3_block_q4_k, q), 32)
TYPE(q5_k, 1, 8, true, false, panel_q5_k, 5, offsetof(m3_block_q5_k, qh), 32) /* qh, q */
TYPE(q6_k, 1, 16, false, false, panel_q6_k, 6, 0, 32)                         /* ql, qh */
TYPE(iq4_xs, 1, 8, false, false, panel_iq4_xs, 0)
TYPE(iq2_xxs, 1, 8, false, true, NULL, 0)
TYPE(iq2_xs, 1, 16, false, true, NULL, 0)
TYPE(iq2_s, 1, 16, false, true, NULL, 0)
TYPE(iq3_xxs, 1, 8, false, true, NULL, 0)
TYPE(iq3_s, 1, 8, false, true, NULL, 0)
TYPE(iq1_s, 1, 8, false, true, NULL, 0)
TYPE(iq1_m, 1, 16, false, true, NULL, 0)

#define PRODUCT(name) product_##name
#define UNPACK(name) unpack_##name
const m3_products m3_products_avx2 = {round_row, multiply, M3_BY_BLOCK_TYPE(UNPACK), M3_BY_BLOCK_TYPE(PRODUCT)};
const m3_products m3_products_avx512 = {round_row, m3_multiply_avx512, M3_BY_BLOCK_TYPE(UNPACK),
                                        M3_BY_BLOCK_TYPE(PRODUCT)};
const m3_products m3_products_avx512_vnni = {round_row, m3_multiply_avx512_vnni, M3_BY_BLOCK_TYPE(UNPACK),
                                             M3_BY_BLOCK_TYPE(PRODUCT)};
#else
typedef int m3_no_avx2_products;
#endif
