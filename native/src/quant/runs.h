/* runs.h - eight elements of a row of any storage type: what a lane of a GPU takes at a time. As numbers q, a scale and
 * an offset with value = scale * q - min, which products use as they stand; and as float32 with the values of the
 * decoders, bit for bit (NaN by being NaN). C compiles it for the tests only.
 *
 * With a type that is a constant, the switches fold. Includers declare the codebooks (codebooks.h, or tables.h with
 * M3_TABLE for device memory aligned to 16). Rows are aligned to 16 bytes where the block size allows it. */
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
#else
#define M3_RUN_FUNCTION static inline
#define M3_RUN_F16(h) m3_f16_to_f32(h)
#define M3_RUN_FLOAT(u) m3_float_of(u)
#endif

typedef struct m3_run {
  float q[M3_RUN];
  float scale, min; /* 1 and 0 for F32, F16 and BF16; min is 0 but for types that m3_has_min names */
} m3_run;

M3_RUN_FUNCTION bool m3_has_min(int32_t type) {
  return type == M3_TYPE_Q4_1 || type == M3_TYPE_Q5_1 || type == M3_TYPE_Q2_K || type == M3_TYPE_Q4_K ||
         type == M3_TYPE_Q5_K;
}

M3_RUN_FUNCTION bool m3_is_plain(int32_t type) {
  return type == M3_TYPE_F32 || type == M3_TYPE_F16 || type == M3_TYPE_BF16;
}

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

/* Byte j minus offset, a whole number below 2^23. */
M3_RUN_FUNCTION float m3_whole(m3_bytes8 b, int j, int offset) {
  uint32_t word = j < 4 ? b.low : b.high;
#ifdef __CUDACC__
  /* The byte in the last place of 2^23 is 2^23 + byte, and the difference is exact: two instructions at full speed,
   * where a conversion is one at a quarter of it. */
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u | (j % 4))) - (8388608.0f + (float)offset);
#else
  return (float)((int)(word >> 8 * (j % 4) & 255) - offset);
#endif
}

/* `bits` of each byte from bit `shift` on. */
M3_RUN_FUNCTION m3_bytes8 m3_bit_field(m3_bytes8 b, int shift, uint32_t bits) {
  b.low = b.low >> shift & bits * 0x01010101u, b.high = b.high >> shift & bits * 0x01010101u;
  return b;
}

/* a + (b << shift) in each byte, which hold no common bit. */
M3_RUN_FUNCTION m3_bytes8 m3_put_above(m3_bytes8 a, m3_bytes8 b, int shift) {
  a.low |= b.low << shift, a.high |= b.high << shift;
  return a;
}

/* Four bits each of elements 8 * k .. 8 * k + 7 of a block of 32, whose bytes hold two (see blocks.h). */
M3_RUN_FUNCTION m3_bytes8 m3_half_bytes(const uint8_t *q, int k, int alignment) {
  return m3_bit_field(m3_load8(q + 8 * (k % 2), alignment), 4 * (k / 2), 15);
}

/* Bit j of `bits` as byte j. */
M3_RUN_FUNCTION m3_bytes8 m3_spread_bits(uint32_t bits) {
  m3_bytes8 b;
  /* Copies of the bits 7 places apart put bit j at place 8 * j. */
  b.low = (bits & 15) * 0x00204081u & 0x01010101u, b.high = (bits >> 4 & 15) * 0x00204081u & 0x01010101u;
  return b;
}

/* Signed bytes with 128 added, so that m3_whole takes it off again. */
M3_RUN_FUNCTION m3_bytes8 m3_shifted(m3_bytes8 b) {
  b.low ^= 0x80808080u, b.high ^= 0x80808080u;
  return b;
}

M3_RUN_FUNCTION void m3_wholes(m3_bytes8 b, int offset, float *q) {
  for (int j = 0; j < M3_RUN; j++) q[j] = m3_whole(b, j, offset);
}

#ifdef __CUDACC__
/* Four of 16 signed bytes by codes in bytes. */
M3_RUN_FUNCTION uint32_t m3_look_up4(uint4 table, uint32_t codes) {
  uint32_t s = (codes | codes >> 4) & 0x00ff00ffu; /* to one code in four bits */
  s = (s | s >> 8) & 0xffffu;
  uint32_t first = __byte_perm(table.x, table.y, s & 0x7777u), last = __byte_perm(table.z, table.w, s & 0x7777u);
  return __byte_perm(first, last, 0x3210u | (s & 0x8888u) >> 1);
}
#endif

/* Numbers of a table of 16 by their codes. */
M3_RUN_FUNCTION void m3_look_up(const int8_t *table, m3_bytes8 codes, float *q) {
#ifdef __CUDACC__
  uint4 t = *(const uint4 *)table;
  m3_bytes8 b = {m3_look_up4(t, codes.low), m3_look_up4(t, codes.high)};
  m3_wholes(m3_shifted(b), 128, q);
#else
  for (int j = 0; j < M3_RUN; j++) q[j] = (float)table[(int)m3_whole(codes, j, 0)];
#endif
}

/* Run k (0..3) of a block of 32. */
M3_RUN_FUNCTION void m3_legacy_run(int32_t type, const void *row, uint32_t block, int k, m3_run *r) {
  r->min = 0;
  switch (type) {
    case M3_TYPE_Q4_0: {
      const m3_block_q4_0 *b = (const m3_block_q4_0 *)row + block;
      r->scale = M3_RUN_F16(b->d);
      m3_wholes(m3_half_bytes(b->q, k, 2), 8, r->q);
      return;
    }
    case M3_TYPE_Q4_1: {
      const m3_block_q4_1 *b = (const m3_block_q4_1 *)row + block;
      r->scale = M3_RUN_F16(b->d), r->min = -M3_RUN_F16(b->m);
      m3_wholes(m3_half_bytes(b->q, k, 4), 0, r->q);
      return;
    }
    case M3_TYPE_Q5_0: {
      const m3_block_q5_0 *b = (const m3_block_q5_0 *)row + block;
      r->scale = M3_RUN_F16(b->d);
      m3_wholes(m3_put_above(m3_half_bytes(b->q, k, 2), m3_spread_bits(b->qh[k]), 4), 16, r->q);
      return;
    }
    case M3_TYPE_Q5_1: {
      const m3_block_q5_1 *b = (const m3_block_q5_1 *)row + block;
      r->scale = M3_RUN_F16(b->d), r->min = -M3_RUN_F16(b->m);
      m3_wholes(m3_put_above(m3_half_bytes(b->q, k, 8), m3_spread_bits(b->qh[k]), 4), 0, r->q);
      return;
    }
    case M3_TYPE_Q8_0: {
      const m3_block_q8_0 *b = (const m3_block_q8_0 *)row + block;
      r->scale = M3_RUN_F16(b->d);
      m3_wholes(m3_shifted(m3_load8(b->q + 8 * k, 2)), 128, r->q);
      return;
    }
    case M3_TYPE_IQ4_NL: {
      const m3_block_iq4_nl *b = (const m3_block_iq4_nl *)row + block;
      r->scale = M3_RUN_F16(b->d);
      m3_look_up(m3_iq4_values, m3_half_bytes(b->q, k, 2), r->q);
      return;
    }
    default: { /* MXFP4 */
      const m3_block_mxfp4 *b = (const m3_block_mxfp4 *)row + block;
      r->scale = M3_RUN_FLOAT(b->e < 2 ? (uint32_t)0x00200000 << b->e : (uint32_t)(b->e - 1) << 23);
      m3_look_up(m3_mxfp4_values, m3_half_bytes(b->q, k, 1), r->q);
      return;
    }
  }
}

/* Scale and min of group g of Q4_K and Q5_K, whose blocks begin with the same 16 bytes. */
M3_RUN_FUNCTION void m3_k_scales(const void *block, int g, m3_run *r) {
#ifdef __CUDACC__
  uint4 h = *(const uint4 *)block;
  int shift = 8 * (g % 4);
  uint32_t a = h.y >> shift & 255, b = h.z >> shift & 255, c = h.w >> shift & 255;
  m3_bytes8 pair = {g < 4 ? (a & 63) | (b & 63) << 8 : (c & 15) | (a >> 6) << 4 | ((c >> 4) | (b >> 6) << 4) << 8, 0};
  r->scale = M3_RUN_F16((uint16_t)h.x) * m3_whole(pair, 0, 0);
  r->min = M3_RUN_F16((uint16_t)(h.x >> 16)) * m3_whole(pair, 1, 0);
#else
  const m3_block_q4_k *b = (const m3_block_q4_k *)block;
  r->scale = M3_RUN_F16(b->d) * (float)m3_k_scale(b->scales, g);
  r->min = M3_RUN_F16(b->dmin) * (float)m3_k_min(b->scales, g);
#endif
}

/* Run k (0..31) of a block of 256 with scales of groups. */
M3_RUN_FUNCTION void m3_k_run(int32_t type, const void *row, uint32_t block, int k, m3_run *r) {
  r->min = 0;
  switch (type) {
    case M3_TYPE_Q2_K: {
      const m3_block_q2_k *b = (const m3_block_q2_k *)row + block;
      r->scale = M3_RUN_F16(b->d) * (float)(b->scales[k / 2] & 15);
      r->min = M3_RUN_F16(b->dmin) * (float)(b->scales[k / 2] >> 4);
      m3_wholes(m3_bit_field(m3_load8(b->q + 32 * (k / 16) + 8 * (k % 4), 4), 2 * (k / 4 % 4), 3), 0, r->q);
      return;
    }
    case M3_TYPE_Q3_K: {
      const m3_block_q3_k *b = (const m3_block_q3_k *)row + block;
      r->scale = M3_RUN_F16(b->d) * (float)m3_q3_k_scale(b, k / 2);
      m3_bytes8 q = m3_bit_field(m3_load8(b->q + 32 * (k / 16) + 8 * (k % 4), 2), 2 * (k / 4 % 4), 3);
      m3_bytes8 h = m3_bit_field(m3_load8(b->hmask + 8 * (k % 4), 2), k / 4, 1);
      m3_wholes(m3_put_above(q, h, 2), 4, r->q);
      return;
    }
    case M3_TYPE_Q4_K: {
      const m3_block_q4_k *b = (const m3_block_q4_k *)row + block;
      m3_k_scales(b, k / 4, r);
      m3_wholes(m3_bit_field(m3_load8(b->q + 32 * (k / 8) + 8 * (k % 4), 8), 4 * (k / 4 % 2), 15), 0, r->q);
      return;
    }
    case M3_TYPE_Q5_K: {
      const m3_block_q5_k *b = (const m3_block_q5_k *)row + block;
      m3_k_scales(b, k / 4, r);
      m3_bytes8 q = m3_bit_field(m3_load8(b->q + 32 * (k / 8) + 8 * (k % 4), 8), 4 * (k / 4 % 2), 15);
      m3_bytes8 h = m3_bit_field(m3_load8(b->qh + 8 * (k % 4), 8), k / 4, 1);
      m3_wholes(m3_put_above(q, h, 4), 0, r->q);
      return;
    }
    case M3_TYPE_Q6_K: {
      const m3_block_q6_k *b = (const m3_block_q6_k *)row + block;
      r->scale = M3_RUN_F16(b->d) * (float)b->scales[k / 2];
      m3_bytes8 q = m3_bit_field(m3_load8(b->ql + 64 * (k / 16) + 8 * (k % 8), 2), 4 * (k / 8 % 2), 15);
      m3_bytes8 h = m3_bit_field(m3_load8(b->qh + 32 * (k / 16) + 8 * (k % 4), 2), 2 * (k / 4 % 4), 3);
      m3_wholes(m3_put_above(q, h, 4), 32, r->q);
      return;
    }
    default: { /* IQ4_XS */
      const m3_block_iq4_xs *b = (const m3_block_iq4_xs *)row + block;
      r->scale = M3_RUN_F16(b->d) * (float)m3_iq4_xs_scale(b, k / 4);
      m3_look_up(m3_iq4_values, m3_bit_field(m3_load8(b->q + 16 * (k / 4) + 8 * (k % 2), 8), 4 * (k / 2 % 2), 15),
                 r->q);
      return;
    }
  }
}

M3_RUN_FUNCTION void m3_signed_run(m3_run *r, m3_bytes8 grid, unsigned signs) {
  for (int j = 0; j < M3_RUN; j++) {
    float x = m3_whole(grid, j, 0);
    r->q[j] = signs >> j & 1 ? -x : x;
  }
}

M3_RUN_FUNCTION void m3_ternary_run(m3_run *r, m3_bytes8 grid, float delta) {
  for (int j = 0; j < M3_RUN; j++) r->q[j] = m3_whole(m3_shifted(grid), j, 128) + delta;
}

/* Run k (0..31) of a block of 256 of codebook entries. */
M3_RUN_FUNCTION void m3_codebook_run(int32_t type, const void *row, uint32_t block, int k, m3_run *r) {
  r->min = 0;
  switch (type) {
    case M3_TYPE_IQ2_XXS: {
      const m3_block_iq2_xxs *b = (const m3_block_iq2_xxs *)row + block;
      const uint16_t *q = b->q + 4 * (k / 4);
      int in_group = k % 4, entry = q[in_group / 2] >> 8 * (in_group % 2) & 255;
      uint32_t w = (uint32_t)q[2] | (uint32_t)q[3] << 16;
      r->scale = M3_RUN_F16(b->d) * (0.5f + (float)(w >> 28)) * 0.25f;
      m3_signed_run(r, m3_load8(m3_iq2_xxs_grid[entry], 8), m3_sign_patterns[w >> 7 * in_group & 127]);
      return;
    }
    case M3_TYPE_IQ2_XS: {
      const m3_block_iq2_xs *b = (const m3_block_iq2_xs *)row + block;
      r->scale = M3_RUN_F16(b->d) * (0.5f + (float)m3_nibble(b->scales, k / 2)) * 0.25f;
      m3_signed_run(r, m3_load8(m3_iq2_xs_grid[b->q[k] & 511], 8), m3_sign_patterns[b->q[k] >> 9]);
      return;
    }
    case M3_TYPE_IQ2_S: {
      const m3_block_iq2_s *b = (const m3_block_iq2_s *)row + block;
      r->scale = M3_RUN_F16(b->d) * (0.5f + (float)m3_nibble(b->scales, k / 2)) * 0.25f;
      int entry = b->q[k] | (b->qh[k / 4] >> 2 * (k % 4) & 3) << 8;
      m3_signed_run(r, m3_load8(m3_iq2_s_grid[entry], 8), b->signs[k]);
      return;
    }
    case M3_TYPE_IQ3_XXS: {
      const m3_block_iq3_xxs *b = (const m3_block_iq3_xxs *)row + block;
      uint32_t w = m3_word(b->gas + 4 * (k / 4));
      r->scale = M3_RUN_F16(b->d) * (0.5f + (float)(w >> 28)) * 0.5f;
      m3_bytes8 grid = {m3_word(m3_iq3_xxs_grid[b->q[2 * k]]), m3_word(m3_iq3_xxs_grid[b->q[2 * k + 1]])};
      m3_signed_run(r, grid, m3_sign_patterns[w >> 7 * (k % 4) & 127]);
      return;
    }
    case M3_TYPE_IQ3_S: {
      const m3_block_iq3_s *b = (const m3_block_iq3_s *)row + block;
      r->scale = M3_RUN_F16(b->d) * (float)(1 + 2 * m3_nibble(b->scales, k / 4));
      int high = b->qh[k / 4] >> 2 * (k % 4);
      m3_bytes8 grid = {m3_word(m3_iq3_s_grid[b->q[2 * k] | (high & 1) << 8]),
                        m3_word(m3_iq3_s_grid[b->q[2 * k + 1] | (high >> 1 & 1) << 8])};
      m3_signed_run(r, grid, b->signs[k]);
      return;
    }
    case M3_TYPE_IQ1_S: {
      const m3_block_iq1_s *b = (const m3_block_iq1_s *)row + block;
      uint16_t qh = b->qh[k / 4];
      r->scale = M3_RUN_F16(b->d) * (float)(2 * (qh >> 12 & 7) + 1);
      m3_ternary_run(r, m3_load8(m3_iq1_grid[b->q[k] | (qh >> 3 * (k % 4) & 7) << 8], 8),
                     qh & 0x8000 ? -0.125f : 0.125f);
      return;
    }
    default: { /* IQ1_M */
      const m3_block_iq1_m *b = (const m3_block_iq1_m *)row + block;
      int h = m3_nibble(b->qh, k);
      r->scale = M3_RUN_F16(m3_iq1_m_d(b)) * (float)m3_iq1_m_scale(b, k / 2);
      m3_ternary_run(r, m3_load8(m3_iq1_grid[b->q[k] | (h & 7) << 8], 8), h & 8 ? -0.125f : 0.125f);
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

/* Run `run` of a row of n; zeros past its end. */
M3_RUN_FUNCTION void m3_load_run(int32_t type, const void *row, uint32_t run, int64_t n, m3_run *r) {
  switch (type) {
    case M3_TYPE_F32:
    case M3_TYPE_F16:
    case M3_TYPE_BF16: {
      int64_t first = (int64_t)run * M3_RUN;
      float *out = r->q;
      r->scale = 1, r->min = 0;
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
        for (int j = 0; j < M3_RUN; j++) {
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
    case M3_TYPE_IQ4_XS: m3_k_run(type, row, run / 32, (int)(run % 32), r); return;
    case M3_TYPE_IQ2_XXS:
    case M3_TYPE_IQ2_XS:
    case M3_TYPE_IQ2_S:
    case M3_TYPE_IQ3_XXS:
    case M3_TYPE_IQ3_S:
    case M3_TYPE_IQ1_S:
    case M3_TYPE_IQ1_M: m3_codebook_run(type, row, run / 32, (int)(run % 32), r); return;
    default: m3_legacy_run(type, row, run / 4, (int)(run % 4), r); return;
  }
}

/* Elements 8 * run .. 8 * run + 7 of a row of n; zeros past its end. */
M3_RUN_FUNCTION void m3_decode_run(int32_t type, const void *row, uint32_t run, int64_t n, float *out) {
  m3_run r;
  m3_load_run(type, row, run, n, &r);
  for (int j = 0; j < M3_RUN; j++) {
    if (m3_is_plain(type))
      out[j] = r.q[j];
    else if (m3_has_min(type))
      out[j] = r.scale * r.q[j] - r.min;
    else
      out[j] = r.scale * r.q[j];
  }
}

#endif
