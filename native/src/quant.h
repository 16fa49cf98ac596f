/* quant.h - the storage types: sizes, and conversion of rows to and from float32.
 *
 * The byte formats are those of GGUF (ggml). The scalar functions here are the specification; the CPU kernels
 * must give the same float32 values bit for bit. */
#ifndef M3_SRC_QUANT_H
#define M3_SRC_QUANT_H

#include <stdint.h>

#include "error.h"
#include "m3.h"

#define M3_Q8_0_BLOCK 32

typedef struct m3_block_q8_0 {
  uint16_t d; /* scale, float16 */
  int8_t q[M3_Q8_0_BLOCK];
} m3_block_q8_0;

_Static_assert(sizeof(m3_block_q8_0) == 34, "Q8_0 blocks are 34 bytes in the file");

/* IEEE 754 binary16 and bfloat16, round to nearest even. NaN stays NaN. */
float m3_f16_to_f32(uint16_t h);
uint16_t m3_f32_to_f16(float f);
float m3_bf16_to_f32(uint16_t h);
uint16_t m3_f32_to_bf16(float f);

typedef struct m3_type_traits {
  int32_t type;
  const char *name;
  int64_t block;       /* elements of a block; a row is a whole number of blocks */
  int64_t block_bytes; /* bytes of a block */
  void (*to_f32)(const void *src, float *dst, int64_t n);
  void (*from_f32)(const float *src, void *dst, int64_t n);
} m3_type_traits;

/* NULL for a type that the engine does not know. */
const m3_type_traits *m3_traits(int32_t type);

/* Name for messages: of any GGUF type number, "type N" text for unknown ones is left to the caller (NULL). */
const char *m3_any_type_name(int32_t type);

#endif
