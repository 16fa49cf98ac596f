/* hopper.cuh - where operations of the backend take the Hopper kernels of msa_kernels.h. */
#ifndef M3_SRC_CUDA_HOPPER_CUH
#define M3_SRC_CUDA_HOPPER_CUH

#include "cuda/state.cuh"

/* What of a session takes them: decided when it opens, by device, sizes, types of the cache and its flags. */
m3_hopper m3_hopper_of(const m3_state_params *p);

/* Bytes of m3_device_state.hopper_work. */
int64_t m3_hopper_bytes(const m3_state_params *p);

/* "hopper", or what is plain and why. */
void m3_hopper_describe(const m3_state_params *p, char *out, size_t size);

/* The operations, for a session that takes them. */
void m3_hopper_select(const m3_context *c, const m3_select_params *p);
void m3_hopper_attend(const m3_context *c, const m3_attend_params *p);

#endif
