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

/* Copies of index keys in 8 bits, for sessions that select by these kernels: bytes of a page of them, tokens from which
 * their scan pays (see backend.h), and bytes of m3_device_state.block_scores that it takes. */
int64_t m3_hopper_low_bit_page_bytes(const m3_hparams *h);
int64_t m3_hopper_low_bit_tokens(const m3_state_params *p);
int64_t m3_hopper_low_bit_bytes(const m3_state_params *p);

/* After the write of the index keys of the chunk's rows: their copies. */
void m3_hopper_store_low_bit(const m3_context *c, const m3_layer_cache *cache);

/* Counts what a chunk rescored, when the device has told it; and the blocks of `layers` selections of its rows. */
void m3_hopper_count(const m3_context *c);
void m3_hopper_count_blocks(const m3_context *c, int64_t layers);

/* The operations, for a session that takes them. */
void m3_hopper_select(const m3_context *c, const m3_select_params *p);
void m3_hopper_attend(const m3_context *c, const m3_attend_params *p);

#endif
