/* encode.cuh - rows of the cache by a warp, with the bytes that the encoders of the CPU give. */
#ifndef M3_SRC_CUDA_ENCODE_CUH
#define M3_SRC_CUDA_ENCODE_CUH

#include "cuda/state.cuh"
#include "quant/blocks.h"

__device__ static inline uint16_t m3_to_f16(float x) {
  uint32_t u = __float_as_uint(x);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16 & 0x8000) | 0x7e00 | (u >> 13 & 0x1ff));
  return __half_as_ushort(__float2half_rn(x));
}

__device__ static inline uint16_t m3_to_bf16(float x) {
  uint32_t u = __float_as_uint(x);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* 1 / d, and 0 where that is no number (m3_inverse of quant/rounding.h). */
__device__ static inline float m3_scale_inverse(float d) {
  float i = d != 0 ? 1.0f / d : 0.0f;
  return isinf(i) ? 0.0f : i;
}

/* Lane i holds element i of the block. */
__device__ static inline void m3_encode_q8_0(float x, m3_block_q8_0 *b) {
  int lane = threadIdx.x % M3_WARP;
  float d = m3_warp_max(fabsf(x)) / 127.0f;
  if (lane == 0) b->d = m3_to_f16(d);
  b->q[lane] = (int8_t)roundf(x * m3_scale_inverse(d));
}

__device__ static inline void m3_encode_q4_0(float x, m3_block_q4_0 *b) {
  int lane = threadIdx.x % M3_WARP;
  /* The value of the largest magnitude, the first of equal ones. */
  float most = x;
  int at = lane;
#pragma unroll
  for (int step = M3_WARP / 2; step > 0; step /= 2) {
    float other = __shfl_xor_sync(0xffffffffu, most, step);
    int place = __shfl_xor_sync(0xffffffffu, at, step);
    if (fabsf(other) > fabsf(most) || (fabsf(other) == fabsf(most) && place < at)) most = other, at = place;
  }
  float d = most / -8.0f;
  int code = min((int)(x * m3_scale_inverse(d) + 8.5f), 15);
  int high = __shfl_down_sync(0xffffffffu, code, 16);
  if (lane == 0) b->d = m3_to_f16(d);
  if (lane < 16) b->q[lane] = (uint8_t)((code & 15) | (high & 15) << 4);
}

/* n elements of x, in shared memory of the warp. */
__device__ static inline void m3_encode_row(int32_t type, const float *x, int32_t n, void *out) {
  int lane = threadIdx.x % M3_WARP;
  if (type == M3_TYPE_F32) {
    for (int32_t i = lane; i < n; i += M3_WARP) ((float *)out)[i] = x[i];
    return;
  }
  if (type == M3_TYPE_F16 || type == M3_TYPE_BF16) {
    for (int32_t i = lane; i < n; i += M3_WARP)
      ((uint16_t *)out)[i] = type == M3_TYPE_F16 ? m3_to_f16(x[i]) : m3_to_bf16(x[i]);
    return;
  }
  /* What the type does not hold becomes NaN: all bits set. The limits are those of quant/types.c. */
  float largest = 0x1.ffdffep15f * (type == M3_TYPE_Q8_0 ? 127.0f : 8.0f);
  bool held = true;
  for (int32_t i = lane; i < n; i += M3_WARP) held &= fabsf(x[i]) <= largest;
  held = __all_sync(0xffffffffu, held);
  for (int32_t b = 0; b < n / M3_BLOCK; b++) {
    m3_block_q8_0 *q8 = (m3_block_q8_0 *)out + b;
    m3_block_q4_0 *q4 = (m3_block_q4_0 *)out + b;
    if (!held) {
      int bytes = type == M3_TYPE_Q8_0 ? (int)sizeof *q8 : (int)sizeof *q4;
      uint8_t *block = type == M3_TYPE_Q8_0 ? (uint8_t *)q8 : (uint8_t *)q4;
      for (int i = lane; i < bytes; i += M3_WARP) block[i] = 0xff;
    } else if (type == M3_TYPE_Q8_0) {
      m3_encode_q8_0(x[b * M3_BLOCK + lane], q8);
    } else {
      m3_encode_q4_0(x[b * M3_BLOCK + lane], q4);
    }
  }
}

#endif
