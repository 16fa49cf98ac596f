/* traits.h - the registry of storage types: sizes, and conversion of rows to and from float32.
 *
 * The scalar decoders are the specification; the CPU kernels must give the same float32 values bit for bit. */
#ifndef M3_SRC_QUANT_TRAITS_H
#define M3_SRC_QUANT_TRAITS_H

#include <stdbool.h>
#include <stdint.h>

#include "m3.h"

/* n elements, a whole number of blocks, to float32. src is aligned as the traits say. */
typedef void (*m3_decoder)(const void *src, float *dst, int64_t n);

/* n elements to blocks. src is finite and no magnitude is above the traits' `largest`. importance holds n weights of
 * the squared errors, finite and not negative (all may be zero), or is NULL: all equal; never NULL if the type needs
 * it. Every byte of dst is written, and depends on nothing but the arguments. */
typedef void (*m3_encoder)(const float *src, void *dst, int64_t n, const float *importance);

typedef struct m3_type_traits {
  int32_t type;
  const char *name;
  int64_t block;         /* elements of a block; a row is a whole number of blocks */
  int64_t block_bytes;   /* bytes of a block */
  int64_t alignment;     /* bytes; addresses of rows are multiples of it */
  float largest;         /* magnitudes above it have no finite value in the type */
  bool needs_importance; /* so few bits that without importance the result is useless; refused */
  m3_decoder to_f32;
  m3_encoder from_f32; /* NULL: the type is read only */
} m3_type_traits;

/* NULL for a type that the engine does not know. */
const m3_type_traits *m3_traits(int32_t type);

/* Name for messages: of any GGUF type number, "type N" text for unknown ones is left to the caller (NULL). */
const char *m3_any_type_name(int32_t type);

#endif
