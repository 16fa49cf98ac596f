/* runs.h - eight elements of a row of any storage type to float32: what a lane of a GPU takes at a time. The same
 * values as the decoders', bit for bit (NaN by being NaN); C compiles it for the tests only.
 *
 * With a type that is a constant, the switch folds. Includers declare the codebooks (codebooks.h, or tables.h with
 * M3_TABLE for device memory aligned to 8). Rows are aligned to 16 bytes where the block size allows it. */
#ifndef M3_SRC_QUANT_RUNS_H
#define M3_SRC_QUANT_RUNS_H

#include "m3.h"
#include "quant/blocks.h"
#include "quant/half.h"
#include "quant/scales.h"

enum { M3_RUN = 8 };

#ifdef __CUDACC__
#define M3_RUN_FUNCTION static __device__ inline
#define M3_RUN_F16(h) __half2float(__ushort_as_half(h))
#define M3_RUN_FLOAT(u) __uint_as_float(u)
#define M3_RUN_BITS(f) __float_as_uint(f)
#else
#define M3_RUN_FUNCTION static inline
#define M3_RUN_F16(h) m3_f16_to_f32(h)
#define M3_RUN_FLOAT(u) m3_float_of(u)
#define M3_RUN_BITS(f) m3_bits_of(f)
#endif

/* Eight bytes: 0 to 3 and 4 to 7, the first the lowest. */
typedef struct m3_bytes8 {
  uint32_t low, high;
} m3_bytes8;

/* From an address that is a multiple of `alignment`: 1, 2, 4 or 8. */
M3_RUN_FUNCTION m3_bytes8 m3_load8(const void *p, int alignment) {
  m3_bytes8 b;
#ifdef __CUDACC__
  if (alignment == 8) {
    uint2 v = *(const uint2 *)p;
    b.low = v.x, b.high = v.y;
    return b;
  }
  if (alignment == 4) {
    b.low = ((const uint32_t *)p)[0], b.high = ((const uint32_t *)p)[1];
    return b;
  }
  if (alignment == 2) {
    const uint16_t *s = (const uint16_t *)p;
    b.low = (uint32_t)s[0] | (uint32_t)s[1] << 16, b.high = (uint32_t)s[2] | (uint32_t)s[3] << 16;
    return b;
  }
#endif
  (void)alignment;
  b.low = m3_word((const uint8_t *)p), b.high = m3_word((const uint8_t *)p + 4);
  return b;
}

M3_RUN_FUNCTION int m3_byte(m3_bytes8 b, int j) { return (int)((j < 4 ? b.low : b.high) >> 8 * (j % 4) & 255); }

/* Four bits each of elements 8 * k .. 8 * k + 7 of a block of 32, whose bytes hold two (see blocks.h). */
M3_RUN_FUNCTION m3_bytes8 m3_half_bytes(const uint8_t *q, int k, int alignment) {
  m3_bytes8 b = m3_load8(q + 8 * (k % 2), alignment);
  b.low = b.low >> 4 * (k / 2) & 0x0f0f0f0fu, b.high = b.high >> 4 * (k / 2) & 0x0f0f0f0fu;
  return b;
}

/* `bits` of each byte from bit `shift` on. */
M3_RUN_FUNCTION m3_bytes8 m3_bit_field(m3_bytes8 b, int shift, uint32_t bits) {
  b.low = b.low >> shift & bits * 0x01010101u, b.high = b.high >> shift & bits * 0x01010101u;
  return b;
}

M3_RUN_FUNCTION void m3_signed_run(float *out, float scale, m3_bytes8 grid, unsigned signs) {
  for (int j = 0; j < 8; j++) {
    float x = scale * (float)m3_byte(grid, j);
    out[j] = M3_RUN_FLOAT(M3_RUN_BITS(x) ^ (uint32_t)(signs >> j & 1) << 31);
  }
}

M3_RUN_FUNCTION void m3_ternary_run(float *out, float scale, m3_bytes8 grid, float delta) {
  for (int j = 0; j < 8; j++) out[j] = scale * ((float)(int8_t)m3_byte(grid, j) + delta);
}

M3_RUN_FUNCTION void m3_legacy_run(int32_t type, const void *row, int64_t block, int k, float *out) {
  switch (type) {
    case M3_TYPE_Q4_0: {
      const m3_block_q4_0 *b = (const m3_block_q4_0 *)row + block;
      float d = M3_RUN_F16(b->d);
      m3_bytes8 q = m3_half_bytes(b->q, k, 2);
      for (int j = 0; j < 8; j++) out[j] = d * (float)(m3_byte(q, j) - 8);
      return;
    }
    case M3_TYPE_Q4_1: {
      const m3_block_q4_1 *b = (const m3_block_q4_1 *)row + block;
      float d = M3_RUN_F16(b->d), m = M3_RUN_F16(b->m);
      m3_bytes8 q = m3_half_bytes(b->q, k, 4);
      for (int j = 0; j < 8; j++) out[j] = d * (float)m3_byte(q, j) + m;
      return;
    }
    case M3_TYPE_Q5_0: {
      const m3_block_q5_0 *b = (const m3_block_q5_0 *)row + block;
      float d = M3_RUN_F16(b->d);
      m3_bytes8 q = m3_half_bytes(b->q, k, 2);
      for (int j = 0; j < 8; j++) out[j] = d * (float)((m3_byte(q, j) | (b->qh[k] >> j & 1) << 4) - 16);
      return;
    }
    case M3_TYPE_Q5_1: {
      const m3_block_q5_1 *b = (const m3_block_q5_1 *)row + block;
      float d = M3_RUN_F16(b->d), m = M3_RUN_F16(b->m);
      m3_bytes8 q = m3_half_bytes(b->q, k, 8);
      for (int j = 0; j < 8; j++) out[j] = d * (float)(m3_byte(q, j) | (b->qh[k] >> j & 1) << 4) + m;
      return;
    }
    case M3_TYPE_Q8_0: {
      const m3_block_q8_0 *b = (const m3_block_q8_0 *)row + block;
      float d = M3_RUN_F16(b->d);
      m3_bytes8 q = m3_load8(b->q + 8 * k, 2);
      for (int j = 0; j < 8; j++) out[j] = (float)(int8_t)m3_byte(q, j) * d;
      return;
    }
    case M3_TYPE_IQ4_NL: {
      const m3_block_iq4_nl *b = (const m3_block_iq4_nl *)row + block;
      float d = M3_RUN_F16(b->d);
      m3_bytes8 q = m3_half_bytes(b->q, k, 2);
      for (int j = 0; j < 8; j++) out[j] = d * (float)m3_iq4_values[m3_byte(q, j)];
      return;
    }
    default: { /* MXFP4 */
      const m3_block_mxfp4 *b = (const m3_block_mxfp4 *)row + block;
      float d = M3_RUN_FLOAT(b->e < 2 ? (uint32_t)0x00200000 << b->e : (uint32_t)(b->e - 1) << 23);
      m3_bytes8 q = m3_half_bytes(b->q, k, 1);
      for (int j = 0; j < 8; j++) out[j] = d * (float)m3_mxfp4_values[m3_byte(q, j)];
      return;
    }
  }
}

/* Run k (0..31) of a block of 256 with scales of groups. */
M3_RUN_FUNCTION void m3_k_run(int32_t type, const void *row, int64_t block, int k, float *out) {
  switch (type) {
    case M3_TYPE_Q2_K: {
      const m3_block_q2_k *b = (const m3_block_q2_k *)row + block;
      float scale = M3_RUN_F16(b->d) * (float)(b->scales[k / 2] & 15);
      float min = M3_RUN_F16(b->dmin) * (float)(b->scales[k / 2] >> 4);
      m3_bytes8 q = m3_bit_field(m3_load8(b->q + 32 * (k / 16) + 8 * (k % 4), 4), 2 * (k / 4 % 4), 3);
      for (int j = 0; j < 8; j++) out[j] = scale * (float)m3_byte(q, j) - min;
      return;
    }
    case M3_TYPE_Q3_K: {
      const m3_block_q3_k *b = (const m3_block_q3_k *)row + block;
      float scale = M3_RUN_F16(b->d) * (float)m3_q3_k_scale(b, k / 2);
      m3_bytes8 q = m3_bit_field(m3_load8(b->q + 32 * (k / 16) + 8 * (k % 4), 2), 2 * (k / 4 % 4), 3);
      m3_bytes8 h = m3_bit_field(m3_load8(b->hmask + 8 * (k % 4), 2), k / 4, 1);
      for (int j = 0; j < 8; j++) out[j] = scale * (float)(m3_byte(q, j) - 4 + m3_byte(h, j) * 4);
      return;
    }
    case M3_TYPE_Q4_K: {
      const m3_block_q4_k *b = (const m3_block_q4_k *)row + block;
      float scale = M3_RUN_F16(b->d) * (float)m3_k_scale(b->scales, k / 4);
      float min = M3_RUN_F16(b->dmin) * (float)m3_k_min(b->scales, k / 4);
      m3_bytes8 q = m3_bit_field(m3_load8(b->q + 32 * (k / 8) + 8 * (k % 4), 8), 4 * (k / 4 % 2), 15);
      for (int j = 0; j < 8; j++) out[j] = scale * (float)m3_byte(q, j) - min;
      return;
    }
    case M3_TYPE_Q5_K: {
      const m3_block_q5_k *b = (const m3_block_q5_k *)row + block;
      float scale = M3_RUN_F16(b->d) * (float)m3_k_scale(b->scales, k / 4);
      float min = M3_RUN_F16(b->dmin) * (float)m3_k_min(b->scales, k / 4);
      m3_bytes8 q = m3_bit_field(m3_load8(b->q + 32 * (k / 8) + 8 * (k % 4), 8), 4 * (k / 4 % 2), 15);
      m3_bytes8 h = m3_bit_field(m3_load8(b->qh + 8 * (k % 4), 8), k / 4, 1);
      for (int j = 0; j < 8; j++) out[j] = scale * (float)(m3_byte(q, j) | m3_byte(h, j) << 4) - min;
      return;
    }
    case M3_TYPE_Q6_K: {
      const m3_block_q6_k *b = (const m3_block_q6_k *)row + block;
      float scale = M3_RUN_F16(b->d) * (float)b->scales[k / 2];
      m3_bytes8 q = m3_bit_field(m3_load8(b->ql + 64 * (k / 16) + 8 * (k % 8), 2), 4 * (k / 8 % 2), 15);
      m3_bytes8 h = m3_bit_field(m3_load8(b->qh + 32 * (k / 16) + 8 * (k % 4), 2), 2 * (k / 4 % 4), 3);
      for (int j = 0; j < 8; j++) out[j] = scale * (float)((m3_byte(q, j) | m3_byte(h, j) << 4) - 32);
      return;
    }
    default: { /* IQ4_XS */
      const m3_block_iq4_xs *b = (const m3_block_iq4_xs *)row + block;
      float scale = M3_RUN_F16(b->d) * (float)m3_iq4_xs_scale(b, k / 4);
      m3_bytes8 q = m3_bit_field(m3_load8(b->q + 16 * (k / 4) + 8 * (k % 2), 8), 4 * (k / 2 % 2), 15);
      for (int j = 0; j < 8; j++) out[j] = scale * (float)m3_iq4_values[m3_byte(q, j)];
      return;
    }
  }
}

/* Run k (0..31) of a block of 256 of codebook entries. */
M3_RUN_FUNCTION void m3_codebook_run(int32_t type, const void *row, int64_t block, int k, float *out) {
  switch (type) {
    case M3_TYPE_IQ2_XXS: {
      const m3_block_iq2_xxs *b = (const m3_block_iq2_xxs *)row + block;
      const uint16_t *q = b->q + 4 * (k / 4);
      int r = k % 4, entry = q[r / 2] >> 8 * (r % 2) & 255;
      uint32_t w = (uint32_t)q[2] | (uint32_t)q[3] << 16;
      float scale = M3_RUN_F16(b->d) * (0.5f + (float)(w >> 28)) * 0.25f;
      m3_signed_run(out, scale, m3_load8(m3_iq2_xxs_grid[entry], 8), m3_sign_patterns[w >> 7 * r & 127]);
      return;
    }
    case M3_TYPE_IQ2_XS: {
      const m3_block_iq2_xs *b = (const m3_block_iq2_xs *)row + block;
      float scale = M3_RUN_F16(b->d) * (0.5f + (float)m3_nibble(b->scales, k / 2)) * 0.25f;
      m3_signed_run(out, scale, m3_load8(m3_iq2_xs_grid[b->q[k] & 511], 8), m3_sign_patterns[b->q[k] >> 9]);
      return;
    }
    case M3_TYPE_IQ2_S: {
      const m3_block_iq2_s *b = (const m3_block_iq2_s *)row + block;
      float scale = M3_RUN_F16(b->d) * (0.5f + (float)m3_nibble(b->scales, k / 2)) * 0.25f;
      int entry = b->q[k] | (b->qh[k / 4] >> 2 * (k % 4) & 3) << 8;
      m3_signed_run(out, scale, m3_load8(m3_iq2_s_grid[entry], 8), b->signs[k]);
      return;
    }
    case M3_TYPE_IQ3_XXS: {
      const m3_block_iq3_xxs *b = (const m3_block_iq3_xxs *)row + block;
      uint32_t w = m3_word(b->gas + 4 * (k / 4));
      float scale = M3_RUN_F16(b->d) * (0.5f + (float)(w >> 28)) * 0.5f;
      m3_bytes8 grid = {m3_word(m3_iq3_xxs_grid[b->q[2 * k]]), m3_word(m3_iq3_xxs_grid[b->q[2 * k + 1]])};
      m3_signed_run(out, scale, grid, m3_sign_patterns[w >> 7 * (k % 4) & 127]);
      return;
    }
    case M3_TYPE_IQ3_S: {
      const m3_block_iq3_s *b = (const m3_block_iq3_s *)row + block;
      float scale = M3_RUN_F16(b->d) * (float)(1 + 2 * m3_nibble(b->scales, k / 4));
      int high = b->qh[k / 4] >> 2 * (k % 4);
      m3_bytes8 grid = {m3_word(m3_iq3_s_grid[b->q[2 * k] | (high & 1) << 8]),
                        m3_word(m3_iq3_s_grid[b->q[2 * k + 1] | (high >> 1 & 1) << 8])};
      m3_signed_run(out, scale, grid, b->signs[k]);
      return;
    }
    case M3_TYPE_IQ1_S: {
      const m3_block_iq1_s *b = (const m3_block_iq1_s *)row + block;
      uint16_t qh = b->qh[k / 4];
      float scale = M3_RUN_F16(b->d) * (float)(2 * (qh >> 12 & 7) + 1);
      m3_ternary_run(out, scale, m3_load8(m3_iq1_grid[b->q[k] | (qh >> 3 * (k % 4) & 7) << 8], 8),
                     qh & 0x8000 ? -0.125f : 0.125f);
      return;
    }
    default: { /* IQ1_M */
      const m3_block_iq1_m *b = (const m3_block_iq1_m *)row + block;
      int h = m3_nibble(b->qh, k);
      float scale = M3_RUN_F16(m3_iq1_m_d(b)) * (float)m3_iq1_m_scale(b, k / 2);
      m3_ternary_run(out, scale, m3_load8(m3_iq1_grid[b->q[k] | (h & 7) << 8], 8), h & 8 ? -0.125f : 0.125f);
      return;
    }
  }
}

/* Elements first .. first + n - 1 (n at most 8) of a row of F32, F16 or BF16, then zeros up to 8. */
M3_RUN_FUNCTION void m3_plain_run(int32_t type, const void *row, int64_t first, int64_t n, float *out) {
  for (int j = 0; j < 8; j++) {
    if (j >= n)
      out[j] = 0;
    else if (type == M3_TYPE_F32)
      out[j] = ((const float *)row)[first + j];
    else if (type == M3_TYPE_F16)
      out[j] = M3_RUN_F16(((const uint16_t *)row)[first + j]);
    else
      out[j] = M3_RUN_FLOAT((uint32_t)((const uint16_t *)row)[first + j] << 16);
  }
}

/* Elements 8 * run .. 8 * run + 7 of a row of n; zeros past its end. */
M3_RUN_FUNCTION void m3_decode_run(int32_t type, const void *row, int64_t run, int64_t n, float *out) {
  switch (type) {
    case M3_TYPE_F32:
    case M3_TYPE_F16:
    case M3_TYPE_BF16: {
      int64_t first = run * M3_RUN;
#ifdef __CUDACC__
      if (n % M3_RUN == 0 && type == M3_TYPE_F32) {
        const float4 *p = (const float4 *)row + 2 * run;
        float4 a = p[0], b = p[1];
        out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w, out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
        return;
      }
      if (n % M3_RUN == 0) {
        uint4 v = ((const uint4 *)row)[run];
        uint32_t words[4] = {v.x, v.y, v.z, v.w};
        for (int j = 0; j < 8; j++) {
          uint16_t h = (uint16_t)(words[j / 2] >> 16 * (j % 2));
          out[j] = type == M3_TYPE_F16 ? M3_RUN_F16(h) : M3_RUN_FLOAT((uint32_t)h << 16);
        }
        return;
      }
#endif
      m3_plain_run(type, row, first, n - first, out);
      return;
    }
    case M3_TYPE_Q2_K:
    case M3_TYPE_Q3_K:
    case M3_TYPE_Q4_K:
    case M3_TYPE_Q5_K:
    case M3_TYPE_Q6_K:
    case M3_TYPE_IQ4_XS: m3_k_run(type, row, run / 32, (int)(run % 32), out); return;
    case M3_TYPE_IQ2_XXS:
    case M3_TYPE_IQ2_XS:
    case M3_TYPE_IQ2_S:
    case M3_TYPE_IQ3_XXS:
    case M3_TYPE_IQ3_S:
    case M3_TYPE_IQ1_S:
    case M3_TYPE_IQ1_M: m3_codebook_run(type, row, run / 32, (int)(run % 32), out); return;
    default: m3_legacy_run(type, row, run / 4, (int)(run % 4), out); return;
  }
}

#endif
