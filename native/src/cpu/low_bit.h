/* low_bit.h - int8 copies of index keys and a bound on the scores of the exact ones.
 *
 * A key k is kept as s c + e: a scale s, codes c in -127 .. 127, and |e| rounded up. A query q is t d + f likewise,
 * with codes of 16 bits. With D = c . d, an exact integer, q . k  <=  s t D  +  s |f| |c|  +  |q| |e|,      |c| <= 127
 * sqrt(dim), and the float32 sum of the exact scan is above q . k by less than dim 2^-24 |q| |k|, |k| <= s |c| + |e|.
 * So bound = s (t D + slack) + |e| norm with slack = 127 sqrt(dim) (|f| + r |q|), norm = (1 + r) |q|, r = (dim + 32)
 * 2^-23, is not below the score that the exact scan computes: r is twice what that rounds, and the rest covers the few
 * operations on the bound itself. Where numbers are so large that products might overflow, or are none, the bound is
 * infinite: the exact scan decides. */
#ifndef M3_SRC_CPU_LOW_BIT_H
#define M3_SRC_CPU_LOW_BIT_H

#include <stdbool.h>
#include <stdint.h>

#include "cpu/kernels.h"
#include "m3.h"

/* Codes of a row, padded with zeros to whole vectors. */
int64_t m3_low_bit_stride(int64_t dim);

/* A page: block_size pairs of s and |e|, then block_size rows of codes. A multiple of 4 bytes. */
int64_t m3_low_bit_page_bytes(const m3_hparams *h);

/* Writes the copy of a key as it stands in the index cache. */
void m3_low_bit_store(const m3_hparams *h, void *pages, int64_t page, int64_t slot, const float *key);

/* Four queries; those beyond the last head are zero. */
typedef struct m3_low_bit_queries {
  int16_t *codes; /* [4, stride] */
  float factors[12];
} m3_low_bit_queries;

/* Queries of heads [first, first + 4) of n_heads rows q [n_heads, index_dim]. False if one is so large, or no number,
 * that bounds cannot be trusted. */
bool m3_low_bit_queries_of(const m3_hparams *h, const float *q, int64_t first, m3_low_bit_queries *out);

/* The first n tokens of a page, and the page that is read next (-1: none). */
typedef struct m3_low_bit_tokens {
  const void *pages;
  int64_t page, n, next;
} m3_low_bit_tokens;

/* Their bounds for four queries. */
void m3_low_bit_bounds(const m3_hparams *h, const m3_kernels *kernels, const m3_low_bit_tokens *tokens,
                       const m3_low_bit_queries *queries, float out[4]);

#endif
