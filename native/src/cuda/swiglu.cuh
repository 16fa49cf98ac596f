/* swiglu.cuh - SwiGLU-OAI of one element: g * sigmoid(alpha g) * (u + 1), g clamped from above, u on both sides. */
#ifndef M3_SRC_CUDA_SWIGLU_CUH
#define M3_SRC_CUDA_SWIGLU_CUH

/* The clamps must not hide broken numbers: x - x is zero for a number and NaN for NaN and infinity. */
__device__ inline float m3_swiglu(float g, float u, float limit, float alpha) {
  g = (g > limit ? limit : g) + (g - g);
  u = (u > limit ? limit : u < -limit ? -limit : u) + (u - u);
  return g / (1.0f + expf(-alpha * g)) * (u + 1.0f);
}

#endif
