/* units.cuh - 32 weights of a row of any block type as signed bytes with their scales: what a lane takes at a time.
 *
 * Unit u of a row holds two runs of 16 columns; those of four neighboring units, u = 4 i to 4 i + 3, are columns 128 i
 * to 128 i + 127. Values are (scale * q) - min as in quant/codes.h, to the bit. */
#ifndef M3_SRC_CUDA_UNITS_CUH
#define M3_SRC_CUDA_UNITS_CUH

#include "cuda/tables.cuh"

struct m3_unit {
  uint32_t q[8];  /* signed bytes: the first run, then the second */
  float scale[2]; /* of each run */
  float min[2];   /* of types with minima */
};

/* Distance of the two runs: where a byte holds weights of two groups, a lane takes both. */
__host__ __device__ constexpr int m3_unit_distance(int32_t type) {
  return type == M3_TYPE_Q2_K || type == M3_TYPE_Q3_K || type == M3_TYPE_Q4_K || type == M3_TYPE_Q5_K ? 32
         : type == M3_TYPE_Q6_K                                                                       ? 64
                                                                                                      : 16;
}

__host__ __device__ constexpr bool m3_unit_has_min(int32_t type) {
  return type == M3_TYPE_Q4_1 || type == M3_TYPE_Q5_1 || type == M3_TYPE_Q2_K || type == M3_TYPE_Q4_K ||
         type == M3_TYPE_Q5_K;
}

/* Both runs are one group, with one scale. */
__host__ __device__ constexpr bool m3_unit_is_group(int32_t type) {
  return m3_unit_distance(type) == 16 && type != M3_TYPE_IQ2_XS && type != M3_TYPE_IQ2_S && type != M3_TYPE_IQ1_M;
}

/* Groups of 16 columns have a scale each, not groups of 32. */
__host__ __device__ constexpr bool m3_has_groups_of_16(int32_t type) {
  return type == M3_TYPE_Q2_K || type == M3_TYPE_Q3_K || type == M3_TYPE_Q6_K || type == M3_TYPE_IQ2_XS ||
         type == M3_TYPE_IQ2_S || type == M3_TYPE_IQ1_M;
}

/* First column of the first run. */
__host__ __device__ constexpr uint32_t m3_unit_column(int distance, uint32_t unit) {
  return distance == 16   ? 32 * unit
         : distance == 32 ? 64 * (unit / 2) + 16 * (unit % 2)
                          : 128 * (unit / 4) + 16 * (unit % 4);
}

/* 16 bytes from an address that is a multiple of ALIGNMENT. In shared memory the rest of the last word is read too, in
 * memory nothing past the bytes. */
template <int ALIGNMENT, bool SHARED>
__device__ static __forceinline__ void load_16(const uint8_t *p, uint32_t (&out)[4]) {
  if (ALIGNMENT == 16) {
    uint4 v = *(const uint4 *)p;
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
  } else if (ALIGNMENT == 8) {
    uint2 a = ((const uint2 *)p)[0], b = ((const uint2 *)p)[1];
    out[0] = a.x, out[1] = a.y, out[2] = b.x, out[3] = b.y;
  } else if (ALIGNMENT == 4) {
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = ((const uint32_t *)p)[i];
  } else {
    unsigned over = (unsigned)(uintptr_t)p & 3;
    const uint32_t *words = (const uint32_t *)(p - over);
    uint32_t w[5] = {words[0], words[1], words[2], words[3], 0};
    if (over) {
      if (SHARED)
        w[4] = words[4];
      else if (ALIGNMENT == 2)
        w[4] = *(const uint16_t *)(words + 4);
      else
        for (unsigned i = 0; i < over; i++) w[4] |= (uint32_t)((const uint8_t *)(words + 4))[i] << 8 * i;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = __funnelshift_r(w[i], w[i + 1], 8 * over);
  }
}

/* Codes 0 to 2 * offset - 1 in bytes, minus offset; offset up to 64. */
__device__ static __forceinline__ uint32_t signed_codes(uint32_t codes, uint32_t offset) {
  return (codes + (128 - offset) * 0x01010101u) ^ 0x80808080u;
}

/* Scales and mins of the group pair (2 j, 2 j + 1) of Q4_K and Q5_K. */
__device__ static __forceinline__ void k_scales(const uint8_t *block, uint32_t j, m3_unit *u) {
  uint4 h = *(const uint4 *)block;
  float d = __half2float(__ushort_as_half((uint16_t)h.x)), dmin = __half2float(__ushort_as_half((uint16_t)(h.x >> 16)));
  /* Without a branch, as lanes differ in j. */
  bool late = j >= 2;
  uint32_t shift = 16 * (j & 1), low = late ? 0x0f0f : 0x3f3f, high = late ? 0x3030 : 0;
  uint32_t scale = ((late ? h.w : h.y) >> shift & low) | (h.y >> (shift + 2) & high);
  uint32_t min = ((late ? h.w >> 4 : h.z) >> shift & low) | (h.z >> (shift + 2) & high);
  u->scale[0] = d * (float)(scale & 255), u->scale[1] = d * (float)(scale >> 8 & 255);
  u->min[0] = dmin * (float)(min & 255), u->min[1] = dmin * (float)(min >> 8 & 255);
}

__device__ static __forceinline__ float f16_at(const uint8_t *p) {
  return __half2float(__ushort_as_half(*(const uint16_t *)p));
}

/* Numbers of a table of 16 by the half bytes of 16 bytes: the low ones are the first run. */
__device__ static __forceinline__ void look_up_halves(const int8_t *table, const uint32_t (&w)[4], m3_unit *u) {
  uint4 t = *(const uint4 *)table;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    /* Four half bytes choose among 8 bytes twice, their upper bits between the two. */
    uint32_t low = w[i] & 0x77777777u, pick = (w[i] >> 1 & 0x44444444u) | 0x32103210u;
    uint32_t a = __byte_perm(__byte_perm(t.x, t.y, low), __byte_perm(t.z, t.w, low), pick);
    low >>= 16, pick >>= 16;
    uint32_t b = __byte_perm(__byte_perm(t.x, t.y, low), __byte_perm(t.z, t.w, low), pick);
    u->q[i] = __byte_perm(a, b, 0x6420);
    u->q[4 + i] = __byte_perm(a, b, 0x7531);
  }
}

/* A run of eight with the signs of `bits`; the entries are at least 1. */
__device__ static __forceinline__ void put_signs(uint2 entry, uint32_t bits, uint32_t *q) {
  m3_bytes8 s = m3_spread_bits(bits);
  q[0] = (entry.x ^ s.low * 255) + s.low;
  q[1] = (entry.y ^ s.high * 255) + s.high;
}

/* Types without a faster way: the runs of eight of quant/runs.h as integers. */
__device__ static inline void any_unit(int32_t type, const uint8_t *row, uint32_t unit, m3_unit *u) {
  bool ternary = type == M3_TYPE_IQ1_S || type == M3_TYPE_IQ1_M; /* their 0.125 goes into the scale */
#pragma unroll 1
  for (uint32_t i = 0; i < 4; i++) {
    m3_run r;
    m3_load_run(type, row, 4 * unit + i, 32, &r);
    uint32_t w[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < M3_RUN; j++)
      w[j / 4] |= (uint32_t)(__float2int_rn(ternary ? 8 * r.q[j] : r.q[j]) & 255) << 8 * (j % 4);
    u->q[2 * i] = w[0], u->q[2 * i + 1] = w[1];
    u->scale[i / 2] = ternary ? r.scale * 0.125f : r.scale;
    u->min[i / 2] = r.min;
  }
}

/* Unit `unit` of a row, in memory or, with the same alignment, in shared memory. */
template <int TYPE, bool SHARED>
__device__ static __forceinline__ void m3_load_unit(const uint8_t *row, uint32_t unit, m3_unit *u) {
  uint32_t w[4], k = unit % 8;
  if constexpr (TYPE == M3_TYPE_Q8_0) {
    const uint8_t *b = row + unit * sizeof(m3_block_q8_0);
    load_16<2, SHARED>(b + 2, w);
    u->q[0] = w[0], u->q[1] = w[1], u->q[2] = w[2], u->q[3] = w[3];
    load_16<2, SHARED>(b + 18, w);
    u->q[4] = w[0], u->q[5] = w[1], u->q[6] = w[2], u->q[7] = w[3];
    u->scale[0] = u->scale[1] = f16_at(b);
  } else if constexpr (TYPE == M3_TYPE_Q4_0) {
    const uint8_t *b = row + unit * sizeof(m3_block_q4_0);
    load_16<2, SHARED>(b + 2, w);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u->q[i] = signed_codes(w[i] & 0x0f0f0f0fu, 8);
      u->q[4 + i] = signed_codes(w[i] >> 4 & 0x0f0f0f0fu, 8);
    }
    u->scale[0] = u->scale[1] = f16_at(b);
  } else if constexpr (TYPE == M3_TYPE_IQ4_NL) {
    const uint8_t *b = row + unit * sizeof(m3_block_iq4_nl);
    load_16<2, SHARED>(b + 2, w);
    look_up_halves(m3_iq4_values, w, u);
    u->scale[0] = u->scale[1] = f16_at(b);
  } else if constexpr (TYPE == M3_TYPE_MXFP4) {
    const uint8_t *b = row + unit * sizeof(m3_block_mxfp4);
    load_16<1, SHARED>(b + 1, w);
    look_up_halves(m3_mxfp4_values, w, u);
    u->scale[0] = u->scale[1] = __uint_as_float(*b < 2 ? 0x00200000u << *b : (uint32_t)(*b - 1) << 23);
  } else if constexpr (TYPE == M3_TYPE_IQ4_XS) {
    const uint8_t *b = row + unit / 8 * sizeof(m3_block_iq4_xs);
    load_16<8, SHARED>(b + 8 + 16 * k, w);
    look_up_halves(m3_iq4_values, w, u);
    uint2 h = *(const uint2 *)b;
    int scale = (int)((h.y >> 4 * k & 15) | (h.x >> 16 >> 2 * k & 3) << 4) - 32;
    u->scale[0] = u->scale[1] = __half2float(__ushort_as_half((uint16_t)h.x)) * (float)scale;
  } else if constexpr (TYPE == M3_TYPE_IQ2_XXS) {
    const uint8_t *b = row + unit / 8 * sizeof(m3_block_iq2_xxs);
    /* Two words at an even address. */
    unsigned over = (unsigned)(uintptr_t)(b + 2 + 8 * k) & 3;
    const uint32_t *words = (const uint32_t *)(b + 2 + 8 * k - over);
    uint32_t last = over ? *(const uint16_t *)(words + 2) : 0;
    uint32_t entries = __funnelshift_r(words[0], words[1], 8 * over), signs = __funnelshift_r(words[1], last, 8 * over);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t s = signs >> 7 * i & 127;
      s |= (uint32_t)(__popc(s) & 1) << 7; /* m3_sign_patterns: an even number of them */
      put_signs(*(const uint2 *)m3_iq2_xxs_grid[entries >> 8 * i & 255], s, u->q + 2 * i);
    }
    u->scale[0] = u->scale[1] = f16_at(b) * (0.5f + (float)(signs >> 28)) * 0.25f;
  } else if constexpr (TYPE == M3_TYPE_Q4_K) {
    const uint8_t *b = row + unit / 8 * sizeof(m3_block_q4_k);
    load_16<16, SHARED>(b + 16 + 16 * k, w);
    k_scales(b, k / 2, u);
#pragma unroll
    for (int i = 0; i < 4; i++) u->q[i] = w[i] & 0x0f0f0f0fu, u->q[4 + i] = w[i] >> 4 & 0x0f0f0f0fu;
  } else if constexpr (TYPE == M3_TYPE_Q5_K) {
    const uint8_t *b = row + unit / 8 * sizeof(m3_block_q5_k);
    uint32_t h[4];
    load_16<16, SHARED>(b + 48 + 16 * k, w);
    load_16<16, SHARED>(b + 16 + 16 * (k % 2), h);
    k_scales(b, k / 2, u);
    uint32_t bit = k & ~1u; /* of the first run; the next one is the second run's */
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t high = h[i] >> bit;
      u->q[i] = (w[i] & 0x0f0f0f0fu) | (high << 4 & 0x10101010u);
      u->q[4 + i] = (w[i] >> 4 & 0x0f0f0f0fu) | (high << 3 & 0x10101010u);
    }
  } else if constexpr (TYPE == M3_TYPE_Q6_K) {
    const uint8_t *b = row + unit / 8 * sizeof(m3_block_q6_k);
    uint32_t h[4], half = k / 4, part = k % 4;
    load_16<2, SHARED>(b + 64 * half + 16 * part, w);
    load_16<2, SHARED>(b + 128 + 32 * half + 16 * (part % 2), h);
    uint32_t shift = 2 * (part / 2);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t high = h[i] >> shift;
      u->q[i] = signed_codes((w[i] & 0x0f0f0f0fu) | (high << 4 & 0x30303030u), 32);
      u->q[4 + i] = signed_codes((w[i] >> 4 & 0x0f0f0f0fu) | (high & 0x30303030u), 32);
    }
    float d = f16_at(b + 208);
    const int8_t *scales = (const int8_t *)b + 192 + 8 * half + part;
    u->scale[0] = d * (float)scales[0], u->scale[1] = d * (float)scales[4];
  } else if constexpr (TYPE == M3_TYPE_Q3_K) {
    const m3_block_q3_k *b = (const m3_block_q3_k *)row + unit / 8;
    uint32_t h[4], run = 8 * (k / 4) + 4 * (k / 2 % 2) + k % 2; /* in 16 columns */
    load_16<2, SHARED>(b->q + 32 * (k / 4) + 16 * (k % 2), w);
    load_16<2, SHARED>(b->hmask + 16 * (k % 2), h);
    uint32_t shift = 4 * (k / 2 % 2), bit = 4 * (k / 4) + 2 * (k / 2 % 2);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t low = w[i] >> shift, high = h[i] >> bit;
      u->q[i] = signed_codes((low & 0x03030303u) | (high << 2 & 0x04040404u), 4);
      u->q[4 + i] = signed_codes((low >> 2 & 0x03030303u) | (high << 1 & 0x04040404u), 4);
    }
    float d = f16_at((const uint8_t *)&b->d);
    u->scale[0] = d * (float)m3_q3_k_scale(b, (int)run), u->scale[1] = d * (float)m3_q3_k_scale(b, (int)run + 2);
  } else if constexpr (TYPE == M3_TYPE_Q2_K) {
    const uint8_t *b = row + unit / 8 * sizeof(m3_block_q2_k);
    uint32_t run = 8 * (k / 4) + 4 * (k / 2 % 2) + k % 2, shift = 4 * (k / 2 % 2);
    load_16<4, SHARED>(b + 16 + 32 * (k / 4) + 16 * (k % 2), w);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t low = w[i] >> shift;
      u->q[i] = low & 0x03030303u, u->q[4 + i] = low >> 2 & 0x03030303u;
    }
    uint32_t d = *(const uint32_t *)(b + 80), first = b[run], second = b[run + 2];
    float scale = __half2float(__ushort_as_half((uint16_t)d)),
          min = __half2float(__ushort_as_half((uint16_t)(d >> 16)));
    u->scale[0] = scale * (float)(first & 15), u->scale[1] = scale * (float)(second & 15);
    u->min[0] = min * (float)(first >> 4), u->min[1] = min * (float)(second >> 4);
  } else {
    any_unit(TYPE, row, unit, u);
  }
}

#endif
