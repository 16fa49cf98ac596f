/* Blocks of 32 by rounding alone: the scale follows from the extremes of the block, every number is then the nearest
 * one. The bytes are those of the format's other writers, so each float32 operation is theirs too: a multiplication by
 * the inverse of the float32 scale, not a division by the stored float16 one. */
#include "quant/rounding.h"

#include "quant/blocks.h"
#include "quant/half.h"
#include "quant/pack.h"

static void round_f16(const float *src, void *dst, int64_t n) {
  uint16_t *d = dst;
  for (int64_t i = 0; i < n; i++) d[i] = m3_f32_to_f16(src[i]);
}

static void round_bf16(const float *src, void *dst, int64_t n) {
  uint16_t *d = dst;
  for (int64_t i = 0; i < n; i++) d[i] = m3_f32_to_bf16(src[i]);
}

static void round_q8_0(const float *src, void *dst, int64_t n) {
  m3_block_q8_0 *b = dst;
  for (; n > 0; n -= M3_BLOCK, src += M3_BLOCK, b++) {
    float absmax = 0;
    for (int j = 0; j < M3_BLOCK; j++) absmax = fmaxf(absmax, fabsf(src[j]));
    float d = absmax / 127.0f, id = m3_inverse(d);
    b->d = m3_f32_to_f16(d);
    for (int j = 0; j < M3_BLOCK; j++) b->q[j] = (int8_t)roundf(src[j] * id);
  }
}

/* The value of the largest magnitude, the first of equal ones. */
static float extreme(const float *x) {
  float e = x[0];
  for (int j = 1; j < M3_BLOCK; j++)
    if (fabsf(x[j]) > fabsf(e)) e = x[j];
  return e;
}

static void range(const float *x, float *min, float *max) {
  *min = *max = x[0];
  for (int j = 1; j < M3_BLOCK; j++) {
    if (x[j] < *min) *min = x[j];
    if (x[j] > *max) *max = x[j];
  }
}

/* The whole part of x, which is at least 0, and at most `top`. */
static uint8_t code(float x, int top) {
  int q = (int)x;
  return (uint8_t)(q > top ? top : q);
}

/* Codes of a type whose zero stands at `zero` = half its codes: the extreme value gets code 0, so that the longer side
 * of the range is the one with a code more. Gives the scale. */
static float symmetric_codes(const float *x, int zero, uint8_t *codes) {
  float d = extreme(x) / -(float)zero, id = m3_inverse(d);
  for (int j = 0; j < M3_BLOCK; j++) codes[j] = code(x[j] * id + ((float)zero + 0.5f), 2 * zero - 1);
  return d;
}

/* Codes 0 to top from the least value to the greatest. */
static float range_codes(const float *x, int top, uint8_t *codes, float *min) {
  float max;
  range(x, min, &max);
  float d = (max - *min) / (float)top, id = m3_inverse(d);
  for (int j = 0; j < M3_BLOCK; j++) codes[j] = code((x[j] - *min) * id + 0.5f, top);
  return d;
}

static void round_q4_0(const float *src, void *dst, int64_t n) {
  m3_block_q4_0 *b = dst;
  uint8_t codes[M3_BLOCK];
  for (; n > 0; n -= M3_BLOCK, src += M3_BLOCK, b++) {
    b->d = m3_f32_to_f16(symmetric_codes(src, 8, codes));
    m3_pack_codes(codes, b->q);
  }
}

static void round_q5_0(const float *src, void *dst, int64_t n) {
  m3_block_q5_0 *b = dst;
  uint8_t codes[M3_BLOCK];
  for (; n > 0; n -= M3_BLOCK, src += M3_BLOCK, b++) {
    b->d = m3_f32_to_f16(symmetric_codes(src, 16, codes));
    m3_pack_codes(codes, b->q);
    m3_pack_fifth(codes, b->qh);
  }
}

static void round_q4_1(const float *src, void *dst, int64_t n) {
  m3_block_q4_1 *b = dst;
  uint8_t codes[M3_BLOCK];
  for (; n > 0; n -= M3_BLOCK, src += M3_BLOCK, b++) {
    float min;
    b->d = m3_f32_to_f16(range_codes(src, 15, codes, &min));
    b->m = m3_f32_to_f16(min);
    m3_pack_codes(codes, b->q);
  }
}

static void round_q5_1(const float *src, void *dst, int64_t n) {
  m3_block_q5_1 *b = dst;
  uint8_t codes[M3_BLOCK];
  for (; n > 0; n -= M3_BLOCK, src += M3_BLOCK, b++) {
    float min;
    b->d = m3_f32_to_f16(range_codes(src, 31, codes, &min));
    b->m = m3_f32_to_f16(min);
    m3_pack_codes(codes, b->q);
    m3_pack_fifth(codes, b->qh);
  }
}

const m3_roundings m3_roundings_scalar = {.f16 = round_f16,
                                          .bf16 = round_bf16,
                                          .q4_0 = round_q4_0,
                                          .q4_1 = round_q4_1,
                                          .q5_0 = round_q5_0,
                                          .q5_1 = round_q5_1,
                                          .q8_0 = round_q8_0};
