/* activations.h - rows of activations rounded to 16-bit integers, for products with weights of block types.
 *
 * A row of n (a multiple of 32) elements is cut in groups of 32. With m the largest magnitude of a group, scale = m /
 * 32767 and q = x * (32767 / m) to the nearest whole number, ties to even: an element is off by at most m / 65534 and
 * the rounding of float32, in all below 1.6e-5 of the group's largest. m below 2^-100 counts as zero: scale and q are
 * 0. A group that holds NaN or infinity has scale NaN and q 0, so that every product with it is NaN. */
#ifndef M3_SRC_CPU_ACTIVATIONS_H
#define M3_SRC_CPU_ACTIVATIONS_H

#include <stdint.h>

enum { M3_ACTIVATION_GROUP = 32, M3_ACTIVATION_PAD = 256 };

#define M3_ACTIVATION_TINY 0x1p-100f

/* A row in memory: the arrays one behind the other, padded with zeros to whole superblocks. */
typedef struct m3_activations {
  int16_t *q;      /* [padded n] in each group the even elements, 0, 2, ... 30, then the odd ones: bytes of weights are
                      parted into 16-bit lanes in this order without moving them across lanes */
  float *scale;    /* [padded n / 32] */
  float *sum;      /* [padded n / 32] scale * sum of the group's q */
  float *half_sum; /* [padded n / 16] the same of each half */
  int32_t *total;  /* [padded n / 16] sum of the half's q */
} m3_activations;

static inline int64_t m3_padded_activations(int64_t n) {
  return (n + M3_ACTIVATION_PAD - 1) / M3_ACTIVATION_PAD * M3_ACTIVATION_PAD;
}

/* Bytes of a row, a multiple of 64. */
static inline int64_t m3_activation_bytes(int64_t n) { return m3_padded_activations(n) / 4 * 11; }

static inline m3_activations m3_activations_at(void *row, int64_t n) {
  int64_t padded = m3_padded_activations(n), groups = padded / M3_ACTIVATION_GROUP;
  int16_t *q = row;
  float *scale = (float *)(void *)(q + padded);
  int32_t *total = (int32_t *)(void *)(scale + 4 * groups);
  return (m3_activations){q, scale, scale + groups, scale + 2 * groups, total};
}

#endif
