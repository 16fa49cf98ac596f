/* Blocks of 32 as integers. The specification: formulas are those of blocks.h. */
#include "quant/blocks.h"
#include "quant/codebooks.h"
#include "quant/codes.h"
#include "quant/half.h"
#include "quant/scales.h"

/* The 16 elements of low halves of bytes come first, then those of the high halves. */
static inline void halves(const uint8_t bytes[16], int8_t q[32]) {
  for (int j = 0; j < 16; j++) {
    q[j] = (int8_t)(bytes[j] & 15);
    q[j + 16] = (int8_t)(bytes[j] >> 4);
  }
}

static inline void add_fifth(const uint8_t bytes[4], int8_t q[32]) {
  uint32_t qh = m3_word(bytes);
  for (int j = 0; j < 32; j++) q[j] = (int8_t)(q[j] | (qh >> j & 1) << 4);
}

static inline void shift(int8_t q[32], int zero) {
  for (int j = 0; j < 32; j++) q[j] = (int8_t)(q[j] - zero);
}

static inline void look_up(const int8_t table[16], int8_t q[32]) {
  for (int j = 0; j < 32; j++) q[j] = table[q[j]];
}

#define EACH_BLOCK(type) for (const type *b = src; n > 0; n -= M3_BLOCK, q += M3_BLOCK, scale++, min++, b++)

static void q4_0(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_q4_0) {
    halves(b->q, q);
    shift(q, 8);
    *scale = m3_f16_to_f32(b->d);
  }
}

static void q4_1(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_q4_1) {
    halves(b->q, q);
    *scale = m3_f16_to_f32(b->d);
    *min = -m3_f16_to_f32(b->m);
  }
}

static void q5_0(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_q5_0) {
    halves(b->q, q);
    add_fifth(b->qh, q);
    shift(q, 16);
    *scale = m3_f16_to_f32(b->d);
  }
}

static void q5_1(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_q5_1) {
    halves(b->q, q);
    add_fifth(b->qh, q);
    *scale = m3_f16_to_f32(b->d);
    *min = -m3_f16_to_f32(b->m);
  }
}

static void q8_0(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_q8_0) {
    for (int j = 0; j < M3_BLOCK; j++) q[j] = b->q[j];
    *scale = m3_f16_to_f32(b->d);
  }
}

static void iq4_nl(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_iq4_nl) {
    halves(b->q, q);
    look_up(m3_iq4_values, q);
    *scale = m3_f16_to_f32(b->d);
  }
}

static void mxfp4(const void *src, int8_t *q, float *scale, float *min, int64_t n) {
  EACH_BLOCK(m3_block_mxfp4) {
    halves(b->q, q);
    look_up(m3_mxfp4_values, q);
    *scale = m3_mxfp4_scale(b);
  }
}

const m3_coding m3_codes_q4_0 = {32, false, M3_SUPERBLOCK / M3_BLOCK * sizeof(m3_block_q4_0), q4_0};
const m3_coding m3_codes_q4_1 = {32, true, M3_SUPERBLOCK / M3_BLOCK * sizeof(m3_block_q4_1), q4_1};
const m3_coding m3_codes_q5_0 = {32, false, M3_SUPERBLOCK / M3_BLOCK * sizeof(m3_block_q5_0), q5_0};
const m3_coding m3_codes_q5_1 = {32, true, M3_SUPERBLOCK / M3_BLOCK * sizeof(m3_block_q5_1), q5_1};
const m3_coding m3_codes_q8_0 = {32, false, M3_SUPERBLOCK / M3_BLOCK * sizeof(m3_block_q8_0), q8_0};
const m3_coding m3_codes_iq4_nl = {32, false, M3_SUPERBLOCK / M3_BLOCK * sizeof(m3_block_iq4_nl), iq4_nl};
const m3_coding m3_codes_mxfp4 = {32, false, M3_SUPERBLOCK / M3_BLOCK * sizeof(m3_block_mxfp4), mxfp4};
