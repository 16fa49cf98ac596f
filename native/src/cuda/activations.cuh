/* activations.cuh - rows of activations rounded to 16-bit integers in groups of 32, number by number as
 * cpu/activations.h says, and cut in two bytes: q = 256 * high + low, high -128 to 127, low 0 to 255. Products of bytes
 * then give the exact integer sums of the CPU. */
#ifndef M3_SRC_CUDA_ACTIVATIONS_CUH
#define M3_SRC_CUDA_ACTIVATIONS_CUH

#include "cuda/state.cuh"

enum { M3_ROUNDED_PAD = 256 };

/* A row of n columns in memory: high bytes, low bytes, scales of the groups, and scale * sum of q of each half of a
 * group; padded with zeros to whole superblocks. */
struct m3_rounded_row {
  uint8_t *high, *low; /* [padded] */
  float *scale;        /* [padded / 32] */
  float *half_sum;     /* [padded / 16] */
};

__host__ __device__ inline int32_t m3_rounded_columns(int32_t n) {
  return (n + M3_ROUNDED_PAD - 1) / M3_ROUNDED_PAD * M3_ROUNDED_PAD;
}

/* A multiple of 16. */
__host__ __device__ inline int32_t m3_rounded_bytes(int32_t n) { return m3_rounded_columns(n) / 8 * 19; }

__host__ __device__ inline m3_rounded_row m3_rounded_at(void *row, int32_t n) {
  int32_t padded = m3_rounded_columns(n);
  uint8_t *bytes = (uint8_t *)row;
  float *scale = (float *)(bytes + 2 * padded);
  return m3_rounded_row{bytes, bytes + padded, scale, scale + padded / 32};
}

/* Four columns of a group. */
struct m3_rounded_part {
  uint32_t high, low;
  float scale;    /* of the group */
  float half_sum; /* of the half that the columns are in */
};

/* Eight neighboring lanes hold a group, four columns each. Lanes of other groups of the warp may be elsewhere. */
__device__ inline m3_rounded_part m3_round_columns(float4 x) {
  unsigned lanes = 0xffu << (threadIdx.x & 24);
  /* Bits order magnitudes, and NaN above infinity above numbers. */
  uint32_t largest = max(max(__float_as_uint(x.x) & 0x7fffffff, __float_as_uint(x.y) & 0x7fffffff),
                         max(__float_as_uint(x.z) & 0x7fffffff, __float_as_uint(x.w) & 0x7fffffff));
#pragma unroll
  for (int step = 1; step < 8; step *= 2) largest = max(largest, __shfl_xor_sync(lanes, largest, step));
  float top = __uint_as_float(largest);
  m3_rounded_part r = {0, 0, top < 0x1p-100f ? 0.0f : NAN, 0};
  int sum = 0;
  if (top >= 0x1p-100f && top < INFINITY) {
    float inverse = 32767.0f / top;
    int a = __float2int_rn(x.x * inverse), b = __float2int_rn(x.y * inverse);
    int c = __float2int_rn(x.z * inverse), d = __float2int_rn(x.w * inverse);
    uint32_t first = __byte_perm(a, b, 0x5410), second = __byte_perm(c, d, 0x5410);
    r.low = __byte_perm(first, second, 0x6420);
    r.high = __byte_perm(first, second, 0x7531);
    r.scale = top / 32767.0f;
    sum = (a + b) + (c + d);
  }
  sum += __shfl_xor_sync(lanes, sum, 1);
  sum += __shfl_xor_sync(lanes, sum, 2);
  r.half_sum = r.scale * (float)sum;
  return r;
}

#endif
