/* pieces.cuh - pieces of rows of a weight, as few_rows.cu multiplies them: their sizes by type, and a lane's share of
 * the products of one with rows of x in shared memory. */
#ifndef M3_SRC_CUDA_PIECES_CUH
#define M3_SRC_CUDA_PIECES_CUH

#include "cuda/activations.cuh"
#include "cuda/units.cuh"

/* Bytes of the ring of a warp, and rows of the weight in a piece: less of both where rows of x take the room. */
__host__ __device__ constexpr int ring_bytes(int rows) { return rows <= 2 ? 9216 : 4608; }
__host__ __device__ constexpr int outs_of_piece(int bytes, int rows) { return rows <= 2 && bytes <= 720 ? 4 : 2; }

__device__ static __forceinline__ uint32_t place_of_column(uint32_t column) {
  /* Pieces of 16 bytes change places so that the eight that neighboring lanes read lie in different banks, for every
   * distance of m3_unit_distance. */
  uint32_t piece = column >> 4;
  return (piece ^ (piece & 8 ? 7 : 0)) << 4 | (column & 15);
}

/* ------------------------------------------------------------------------------------------------ sums of lanes */

/* Lane l gets the sum over the lanes of value l / (32 / N) of N; in the same tree for every N. */
template <int N>
__device__ static __forceinline__ float sum_of_lanes(float (&v)[N]) {
  uint32_t lane = threadIdx.x % M3_WARP;
#pragma unroll
  for (int step = M3_WARP / 2, n = N; step > 0; step /= 2) {
    if (n > 1) {
      n /= 2;
      bool upper = lane & step;
#pragma unroll
      for (int i = 0; i < n; i++) {
        float mine = upper ? v[n + i] : v[i], other = upper ? v[i] : v[n + i];
        v[i] = mine + __shfl_xor_sync(0xffffffffu, other, step);
      }
    } else {
      v[0] += __shfl_xor_sync(0xffffffffu, v[0], step);
    }
  }
  return v[0];
}

/* ------------------------------------------------------------------------------------------------ pieces of weights */

template <int TYPE, int ROWS>
struct piece {
  static constexpr bool FLOATS = TYPE == M3_TYPE_F32 || TYPE == M3_TYPE_F16 || TYPE == M3_TYPE_BF16;
  static constexpr int SIZE = TYPE == M3_TYPE_F32 ? 4 : 2; /* of a float */
  static constexpr int UNIT_BYTES_8 =                      /* of 256 columns */
      TYPE == M3_TYPE_Q4_0 || TYPE == M3_TYPE_IQ4_NL ? 8 * 18
      : TYPE == M3_TYPE_Q4_1                         ? 8 * 20
      : TYPE == M3_TYPE_Q5_0                         ? 8 * 22
      : TYPE == M3_TYPE_Q5_1                         ? 8 * 24
      : TYPE == M3_TYPE_Q8_0                         ? 8 * 34
      : TYPE == M3_TYPE_MXFP4                        ? 8 * 17
      : TYPE == M3_TYPE_Q2_K                         ? (int)sizeof(m3_block_q2_k)
      : TYPE == M3_TYPE_Q3_K                         ? (int)sizeof(m3_block_q3_k)
      : TYPE == M3_TYPE_Q4_K                         ? (int)sizeof(m3_block_q4_k)
      : TYPE == M3_TYPE_Q5_K                         ? (int)sizeof(m3_block_q5_k)
      : TYPE == M3_TYPE_Q6_K                         ? (int)sizeof(m3_block_q6_k)
      : TYPE == M3_TYPE_IQ4_XS                       ? (int)sizeof(m3_block_iq4_xs)
      : TYPE == M3_TYPE_IQ2_XXS                      ? (int)sizeof(m3_block_iq2_xxs)
      : TYPE == M3_TYPE_IQ2_XS                       ? (int)sizeof(m3_block_iq2_xs)
      : TYPE == M3_TYPE_IQ2_S                        ? (int)sizeof(m3_block_iq2_s)
      : TYPE == M3_TYPE_IQ3_XXS                      ? (int)sizeof(m3_block_iq3_xxs)
      : TYPE == M3_TYPE_IQ3_S                        ? (int)sizeof(m3_block_iq3_s)
      : TYPE == M3_TYPE_IQ1_S                        ? (int)sizeof(m3_block_iq1_s)
                                                     : (int)sizeof(m3_block_iq1_m);
  static constexpr int COLUMNS = FLOATS ? 1024 / SIZE : 1024;
  static constexpr int BYTES = FLOATS ? 1024 : 4 * UNIT_BYTES_8;
  static constexpr int SLOT =
      (BYTES + 15) / 16 * 16 + 32; /* it may begin anywhere in 16 bytes, and a word more is read */
  static constexpr int OUTS = outs_of_piece(BYTES, ROWS); /* rows of the weight */
  static constexpr int SLOTS = ring_bytes(ROWS) / (OUTS * SLOT) < 4 ? ring_bytes(ROWS) / (OUTS * SLOT) : 4;
  static constexpr int AHEAD = SLOTS - 1;
};

__device__ static __forceinline__ void copy_16(uint32_t to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

template <int PENDING>
__device__ static __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Sum of products of four signed bytes with x of each half. */
__device__ static __forceinline__ int dot_high(uint32_t q, uint32_t x, int sum) { return __dp4a((int)x, (int)q, sum); }
__device__ static __forceinline__ int dot_low(uint32_t q, uint32_t x, int sum) {
  asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(x), "r"(q));
  return sum;
}

/* Where a lane finds x: bytes from the beginning of a rounded row, in the first piece; a piece further they are 1024
 * bytes (of columns), 32 scales and 64 sums of halves further. */
struct lane_places {
  uint32_t run[2]; /* high bytes; the low ones are `padded` bytes further */
  uint32_t scale[2];
  uint32_t half_sum[2];
};

template <int TYPE>
__device__ static __forceinline__ lane_places places_of_lane(int32_t n_in) {
  uint32_t padded = (uint32_t)m3_rounded_columns(n_in);
  uint32_t first = m3_unit_column(m3_unit_distance(TYPE), threadIdx.x % M3_WARP);
  lane_places l;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    uint32_t column = first + (uint32_t)(k * m3_unit_distance(TYPE));
    l.run[k] = place_of_column(column);
    l.scale[k] = 2 * padded + column / 32 * 4;
    l.half_sum[k] = 2 * padded + padded / 8 + column / 16 * 4;
  }
  return l;
}

/* A lane's share of the products of a piece with rows of x: a unit. */
template <int TYPE, int ROWS>
__device__ static __forceinline__ void add_unit(const m3_unit (&u)[piece<TYPE, ROWS>::OUTS], const char *x,
                                                const lane_places &l, uint32_t padded, uint32_t row_bytes, int32_t step,
                                                float (&sum)[piece<TYPE, ROWS>::OUTS * ROWS]) {
  constexpr int OUTS = piece<TYPE, ROWS>::OUTS;
  constexpr bool GROUP = m3_unit_is_group(TYPE), MIN = m3_unit_has_min(TYPE);
  const char *columns = x + 1024 * step, *scales = x + 128 * step, *sums = x + 256 * step;
#pragma unroll
  for (int r = 0; r < ROWS; r++, columns += row_bytes, scales += row_bytes, sums += row_bytes) {
    uint4 h[2], b[2];
    float scale[2], half[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      h[k] = *(const uint4 *)(columns + l.run[k]);
      b[k] = *(const uint4 *)(columns + l.run[k] + padded);
      scale[k] = k == 1 && m3_unit_distance(TYPE) == 16 ? scale[0] : *(const float *)(scales + l.scale[k]);
      half[k] = MIN ? *(const float *)(sums + l.half_sum[k]) : 0;
    }
#pragma unroll
    for (int o = 0; o < OUTS; o++) {
      float s = sum[o * ROWS + r];
      int high = 0, low = 0;
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const uint32_t *q = u[o].q + 4 * k;
        high = dot_high(q[0], h[k].x, high), low = dot_low(q[0], b[k].x, low);
        high = dot_high(q[1], h[k].y, high), low = dot_low(q[1], b[k].y, low);
        high = dot_high(q[2], h[k].z, high), low = dot_low(q[2], b[k].z, low);
        high = dot_high(q[3], h[k].w, high), low = dot_low(q[3], b[k].w, low);
        if (GROUP && k == 0) continue;
        s = fmaf((float)(256 * high + low), u[o].scale[k] * scale[k], s);
        high = low = 0;
      }
#pragma unroll
      for (int k = 0; k < 2; k++)
        if (MIN) s = fmaf(-u[o].min[k], half[k], s);
      sum[o * ROWS + r] = s;
    }
  }
}

/* The same for floats: two runs of 16 bytes. */
template <int TYPE, int ROWS>
__device__ static __forceinline__ void add_floats(const char *const (&w)[piece<TYPE, ROWS>::OUTS], const char *x,
                                                  int32_t n_in, int32_t first,
                                                  float (&sum)[piece<TYPE, ROWS>::OUTS * ROWS]) {
  constexpr int OUTS = piece<TYPE, ROWS>::OUTS, RUN = 16 / piece<TYPE, ROWS>::SIZE;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int32_t run = (int32_t)(threadIdx.x % M3_WARP) + k * M3_WARP, column = first + run * RUN;
    if (column >= n_in) continue;
    float a[OUTS][RUN];
#pragma unroll
    for (int o = 0; o < OUTS; o++) {
      uint4 v = *(const uint4 *)(w[o] + 16 * run);
      uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < RUN; j++) {
        uint32_t half = words[j * piece<TYPE, ROWS>::SIZE / 4] >> (RUN == 8 ? 16 * (j % 2) : 0);
        a[o][j] = TYPE == M3_TYPE_F32   ? __uint_as_float(half)
                  : TYPE == M3_TYPE_F16 ? __half2float(__ushort_as_half((uint16_t)half))
                                        : __uint_as_float(half << 16);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int j = 0; j < RUN; j += 4) {
        float4 b = *(const float4 *)(x + ((int64_t)r * n_in + column + j) * sizeof(float));
#pragma unroll
        for (int o = 0; o < OUTS; o++) {
          float s = sum[o * ROWS + r];
          s = fmaf(a[o][j], b.x, s), s = fmaf(a[o][j + 1], b.y, s);
          sum[o * ROWS + r] = fmaf(a[o][j + 3], b.w, fmaf(a[o][j + 2], b.z, s));
        }
      }
  }
}

#endif
