/* launch.cuh - launches that overlap: a kernel may be resident before the one in front of it in the stream has ended,
 * and fetches what does not depend on it (weights) in the meantime.
 *
 * A kernel that is launched by m3_launch calls m3_wait_for_previous before it reads what an earlier kernel wrote, or
 * writes anything; when that returns, all earlier kernels have ended. m3_let_next_begin may come at any time. */
#ifndef M3_SRC_CUDA_LAUNCH_CUH
#define M3_SRC_CUDA_LAUNCH_CUH

#include "cuda/state.cuh"

__device__ inline void m3_wait_for_previous() {
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void m3_let_next_begin() {
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class... P, class... A>
static inline void m3_launch(m3_device_state *s, const char *what, void (*kernel)(P...), dim3 grid, unsigned threads,
                             size_t shared, A... arguments) {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = s->stream;
  config.attrs = &early;
  config.numAttrs = s->overlap ? 1 : 0;
  m3_note(s, cudaLaunchKernelEx(&config, kernel, arguments...), what);
}

#endif
