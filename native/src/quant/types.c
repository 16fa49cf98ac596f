#include <float.h>
#include <stddef.h>

#include "quant/blocks.h"
#include "quant/decode.h"
#include "quant/encode.h"
#include "quant/traits.h"

/* The last float32 that rounds to a finite float16, and likewise to a finite bfloat16. */
#define F16_LARGEST 0x1.ffdffep15f
#define BF16_LARGEST 0x1.fefffep127f

#define BLOCK(struct_name) M3_BLOCK, sizeof(struct_name), _Alignof(struct_name)
#define SUPERBLOCK(struct_name) M3_SUPERBLOCK, sizeof(struct_name), _Alignof(struct_name)

/* Largest magnitudes: where the float16 scale is the largest magnitude over a fixed number, the limit is exact. The
 * others take what float16 holds, because their scale or their smallest value may be as large as the values. MXFP4 has
 * an exponent as wide as float32's. */
static const m3_type_traits traits[] = {
    {M3_TYPE_F32, "F32", 1, 4, 4, FLT_MAX, false, m3_decode_f32, m3_encode_f32},
    {M3_TYPE_F16, "F16", 1, 2, 2, F16_LARGEST, false, m3_decode_f16, m3_encode_f16},
    {M3_TYPE_BF16, "BF16", 1, 2, 2, BF16_LARGEST, false, m3_decode_bf16, m3_encode_bf16},
    {M3_TYPE_Q4_0, "Q4_0", BLOCK(m3_block_q4_0), F16_LARGEST * 8, false, m3_decode_q4_0, m3_encode_q4_0},
    {M3_TYPE_Q4_1, "Q4_1", BLOCK(m3_block_q4_1), F16_LARGEST, false, m3_decode_q4_1, m3_encode_q4_1},
    {M3_TYPE_Q5_0, "Q5_0", BLOCK(m3_block_q5_0), F16_LARGEST * 16, false, m3_decode_q5_0, m3_encode_q5_0},
    {M3_TYPE_Q5_1, "Q5_1", BLOCK(m3_block_q5_1), F16_LARGEST, false, m3_decode_q5_1, m3_encode_q5_1},
    {M3_TYPE_Q8_0, "Q8_0", BLOCK(m3_block_q8_0), F16_LARGEST * 127, false, m3_decode_q8_0, m3_encode_q8_0},
    {M3_TYPE_IQ4_NL, "IQ4_NL", BLOCK(m3_block_iq4_nl), F16_LARGEST, false, m3_decode_iq4_nl, m3_encode_iq4_nl},
    {M3_TYPE_MXFP4, "MXFP4", BLOCK(m3_block_mxfp4), FLT_MAX, false, m3_decode_mxfp4, m3_encode_mxfp4},
    {M3_TYPE_Q2_K, "Q2_K", SUPERBLOCK(m3_block_q2_k), F16_LARGEST, false, m3_decode_q2_k, m3_encode_q2_k},
    {M3_TYPE_Q3_K, "Q3_K", SUPERBLOCK(m3_block_q3_k), F16_LARGEST, false, m3_decode_q3_k, m3_encode_q3_k},
    {M3_TYPE_Q4_K, "Q4_K", SUPERBLOCK(m3_block_q4_k), F16_LARGEST, false, m3_decode_q4_k, m3_encode_q4_k},
    {M3_TYPE_Q5_K, "Q5_K", SUPERBLOCK(m3_block_q5_k), F16_LARGEST, false, m3_decode_q5_k, m3_encode_q5_k},
    {M3_TYPE_Q6_K, "Q6_K", SUPERBLOCK(m3_block_q6_k), F16_LARGEST, false, m3_decode_q6_k, m3_encode_q6_k},
    {M3_TYPE_IQ4_XS, "IQ4_XS", SUPERBLOCK(m3_block_iq4_xs), F16_LARGEST, false, m3_decode_iq4_xs, m3_encode_iq4_xs},
    {M3_TYPE_IQ3_S, "IQ3_S", SUPERBLOCK(m3_block_iq3_s), F16_LARGEST, false, m3_decode_iq3_s, m3_encode_iq3_s},
    {M3_TYPE_IQ3_XXS, "IQ3_XXS", SUPERBLOCK(m3_block_iq3_xxs), F16_LARGEST, false, m3_decode_iq3_xxs,
     m3_encode_iq3_xxs},
    {M3_TYPE_IQ2_S, "IQ2_S", SUPERBLOCK(m3_block_iq2_s), F16_LARGEST, false, m3_decode_iq2_s, m3_encode_iq2_s},
    {M3_TYPE_IQ2_XS, "IQ2_XS", SUPERBLOCK(m3_block_iq2_xs), F16_LARGEST, true, m3_decode_iq2_xs, m3_encode_iq2_xs},
    {M3_TYPE_IQ2_XXS, "IQ2_XXS", SUPERBLOCK(m3_block_iq2_xxs), F16_LARGEST, true, m3_decode_iq2_xxs, m3_encode_iq2_xxs},
    {M3_TYPE_IQ1_M, "IQ1_M", SUPERBLOCK(m3_block_iq1_m), F16_LARGEST, true, m3_decode_iq1_m, m3_encode_iq1_m},
    {M3_TYPE_IQ1_S, "IQ1_S", SUPERBLOCK(m3_block_iq1_s), F16_LARGEST, true, m3_decode_iq1_s, m3_encode_iq1_s},
};

const m3_type_traits *m3_traits(int32_t type) {
  for (size_t i = 0; i < sizeof traits / sizeof *traits; i++)
    if (traits[i].type == type) return &traits[i];
  return NULL;
}

const char *m3_any_type_name(int32_t type) {
  /* GGUF's numbers; the gaps are types that were withdrawn from the format. */
  static const char *const names[] = {
      "F32",   "F16",    "Q4_0",  "Q4_1", NULL,   NULL,      "Q5_0",   "Q5_1",    "Q8_0",  "Q8_1",   "Q2_K",
      "Q3_K",  "Q4_K",   "Q5_K",  "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S",
      "IQ2_S", "IQ4_XS", "I8",    "I16",  "I32",  "I64",     "F64",    "IQ1_M",   "BF16",  NULL,     NULL,
      NULL,    "TQ1_0",  "TQ2_0", NULL,   NULL,   NULL,      "MXFP4",  "NVFP4"};
  if (type < 0 || (size_t)type >= sizeof names / sizeof *names) return NULL;
  return names[type];
}

const char *m3_type_name(int32_t type) {
  const m3_type_traits *t = m3_traits(type);
  return t ? t->name : NULL;
}

int64_t m3_type_block_size(int32_t type) {
  const m3_type_traits *t = m3_traits(type);
  return t ? t->block : 0;
}

int32_t m3_type_needs_importance(int32_t type) {
  const m3_type_traits *t = m3_traits(type);
  return t && t->needs_importance;
}

float m3_type_largest(int32_t type) {
  const m3_type_traits *t = m3_traits(type);
  return t ? t->largest : 0;
}

int64_t m3_row_bytes(int32_t type, int64_t n) {
  const m3_type_traits *t = m3_traits(type);
  int64_t bytes;
  if (!t || n < 0 || n % t->block || __builtin_mul_overflow(n / t->block, t->block_bytes, &bytes)) return -1;
  return bytes;
}
