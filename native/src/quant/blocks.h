/* blocks.h - the storage types as they stand in the file (GGUF, little endian), byte by byte.
 *
 * A row is a whole number of blocks; element i of a block is the i-th value of its part of the row. In the formulas
 * f16(x) is the float32 value of a float16, products and sums are float32 operations in the order of the brackets
 * (each rounded, none fused), and x[a..b] are bits a to b of x, bit 0 the lowest. Numbers wider than a byte are little
 * endian; those of 32 bits may stand at any even address, so they are stored as 16-bit halves or bytes. */
#ifndef M3_SRC_QUANT_BLOCKS_H
#define M3_SRC_QUANT_BLOCKS_H

#include <stdint.h>

/* CUDA reads these blocks too. M3_BLOCK_FUNCTION: small functions on them, for both. */
#ifdef __CUDACC__
#define M3_BLOCK_FUNCTION static __host__ __device__ inline
#define _Static_assert static_assert
#else
#define M3_BLOCK_FUNCTION static inline
#endif

/* ------------------------------------------------------------------------------------- blocks of 32 elements */

enum { M3_BLOCK = 32 };

/* Where Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL and MXFP4 keep 4 bits of element i: q[i] & 15 for i < 16, q[i - 16] >> 4 for
 * i >= 16. The fifth bit of Q5_0 and Q5_1 is bit i % 8 of qh[i / 8]. */

/* value = f16(d) * (q - 8), q = 0..15. */
typedef struct m3_block_q4_0 {
  uint16_t d; /* scale, float16 */
  uint8_t q[16];
} m3_block_q4_0;

/* value = (f16(d) * q) + f16(m), q = 0..15. */
typedef struct m3_block_q4_1 {
  uint16_t d; /* scale, float16 */
  uint16_t m; /* value of q = 0, float16 */
  uint8_t q[16];
} m3_block_q4_1;

/* value = f16(d) * (q - 16), q = 0..31. */
typedef struct m3_block_q5_0 {
  uint16_t d;
  uint8_t qh[4]; /* fifth bits */
  uint8_t q[16];
} m3_block_q5_0;

/* value = (f16(d) * q) + f16(m), q = 0..31. */
typedef struct m3_block_q5_1 {
  uint16_t d;
  uint16_t m;
  uint8_t qh[4];
  uint8_t q[16];
} m3_block_q5_1;

/* value = q[i] * f16(d). */
typedef struct m3_block_q8_0 {
  uint16_t d;
  int8_t q[32];
} m3_block_q8_0;

/* value = f16(d) * m3_iq4_values[q], q = 0..15: 16 unevenly spaced numbers from -127 to 113. */
typedef struct m3_block_iq4_nl {
  uint16_t d;
  uint8_t q[16];
} m3_block_iq4_nl;

/* OCP microscaling: value = 2^(e - 128) * m3_mxfp4_values[q]. The table holds the E2M1 numbers doubled (0, 1, 2, 3, 4,
 * 6, 8, 12 and their negatives for q >= 8), so the scale is half of E8M0's 2^(e - 127). e = 0 and 1 give the subnormal
 * 2^-128 and 2^-127; e = 255, NaN in the OCP format, is read as 2^127. */
typedef struct m3_block_mxfp4 {
  uint8_t e; /* exponent, E8M0 */
  uint8_t q[16];
} m3_block_mxfp4;

/* ------------------------------------------------------------------------------------ blocks of 256 elements */

enum { M3_SUPERBLOCK = 256 };

/* Two bits of element i, in Q2_K and Q3_K: q[32 * (i / 128) + i % 32] >> 2 * (i / 32 % 4) & 3. In words: 32 bytes hold
 * 128 elements; the lowest bits of the bytes are the first 32 of them, the next bits the second 32, and so on. */

/* 16 groups of 16, g = i / 16:
 * value = ((f16(d) * scale_g) * q) - (f16(dmin) * min_g), scale_g = scales[g] & 15, min_g = scales[g] >> 4, q = 0..3.
 */
typedef struct m3_block_q2_k {
  uint8_t scales[16];
  uint8_t q[64];
  uint16_t d;
  uint16_t dmin;
} m3_block_q2_k;

/* 16 groups of 16, g = i / 16:
 * value = (f16(d) * (scale_g - 32)) * q, q = -4..3: the two bits minus 4, plus 4 if bit i / 32 of hmask[i % 32] is set.
 * scale_g = 0..63: low four bits in scales[g % 8] >> 4 * (g / 8) & 15, high two in scales[8 + g % 4] >> 2 * (g / 4)
 * & 3. */
typedef struct m3_block_q3_k {
  uint8_t hmask[32];
  uint8_t q[64];
  uint8_t scales[12];
  uint16_t d;
} m3_block_q3_k;

/* Four bits of element i, in Q4_K and Q5_K: q[32 * (i / 64) + i % 32] >> 4 * (i / 32 % 2) & 15: 32 bytes hold 64
 * elements, the first 32 in the low halves.
 *
 * Scales and mins of Q4_K and Q5_K, both 0..63, of 8 groups of 32, g = i / 32:
 *   g < 4:   scale_g = scales[g] & 63
 *            min_g = scales[4 + g] & 63
 *   g >= 4:  scale_g = scales[4 + g] & 15 | (scales[g - 4] >> 6) << 4
 *            min_g = scales[4 + g] >> 4 | (scales[g] >> 6) << 4
 * value = ((f16(d) * scale_g) * q) - (f16(dmin) * min_g) */

/* q = 0..15. */
typedef struct m3_block_q4_k {
  uint16_t d;
  uint16_t dmin;
  uint8_t scales[12];
  uint8_t q[128];
} m3_block_q4_k;

/* q = 0..31: the fifth bit is bit i / 32 of qh[i % 32]. */
typedef struct m3_block_q5_k {
  uint16_t d;
  uint16_t dmin;
  uint8_t scales[12];
  uint8_t qh[32];
  uint8_t q[128];
} m3_block_q5_k;

/* 16 groups of 16: value = (f16(d) * scales[i / 16]) * (q - 32), q = 0..63: low four bits in
 * ql[64 * (i / 128) + i % 64] >> 4 * (i / 64 % 2) & 15, high two in qh[32 * (i / 128) + i % 32] >> 2 * (i / 32 % 4)
 * & 3. */
typedef struct m3_block_q6_k {
  uint8_t ql[128];
  uint8_t qh[64];
  int8_t scales[16];
  uint16_t d;
} m3_block_q6_k;

/* 8 groups of 32, g = i / 32: value = (f16(d) * (scale_g - 32)) * m3_iq4_values[q].
 * q of element i: q[16 * g + i % 16] >> 4 * (i / 16 % 2) & 15. scale_g = 0..63: low four bits in
 * scales_l[g / 2] >> 4 * (g % 2) & 15, high two in scales_h >> 2 * g & 3. */
typedef struct m3_block_iq4_xs {
  uint16_t d;
  uint16_t scales_h;
  uint8_t scales_l[4];
  uint8_t q[128];
} m3_block_iq4_xs;

/* The codebook types. A run of 8 (IQ2, IQ1) or 4 (IQ3) elements is one entry of a codebook; codebooks.h declares them.
 * Signs of a run of 8 elements: bit j of a sign byte set means that element j is negative. IQ2_XXS, IQ2_XS and IQ3_XXS
 * store 7 bits s and take the byte m3_sign_patterns[s]: s in bits 0..6, bit 7 makes the number of negative ones even.
 * value = (scale * codebook entry) * sign, scale = the bracket that each type gives. */

/* 8 groups of 32, g = i / 32, of four runs each. With w = q[4g + 2] | q[4g + 3] << 16:
 * run r of the group: entry m3_iq2_xxs_grid[r-th byte of q[4g..4g + 1]], signs w[7r..7r + 6];
 * scale = (f16(d) * (0.5 + w[28..31])) * 0.25. */
typedef struct m3_block_iq2_xxs {
  uint16_t d;
  uint16_t q[32];
} m3_block_iq2_xxs;

/* Run r (0..31) of 8: entry m3_iq2_xs_grid[q[r][0..8]], signs q[r][9..15]. 16 groups of two runs, g = i / 16:
 * scale = (f16(d) * (0.5 + (scales[g / 2] >> 4 * (g % 2) & 15))) * 0.25. */
typedef struct m3_block_iq2_xs {
  uint16_t d;
  uint16_t q[32];
  uint8_t scales[8];
} m3_block_iq2_xs;

/* Run r (0..31) of 8: entry m3_iq2_s_grid[q[r] | (qh[r / 4] >> 2 * (r % 4) & 3) << 8], sign byte signs[r] as it stands.
 * Scales as in IQ2_XS. */
typedef struct m3_block_iq2_s {
  uint16_t d;
  uint8_t q[32];
  uint8_t signs[32];
  uint8_t qh[8];
  uint8_t scales[8];
} m3_block_iq2_s;

/* Run r (0..63) of 4: entry m3_iq3_xxs_grid[q[r]]. 8 groups of 32, g = i / 32. With w = the 32-bit number in
 * gas[4g..4g + 3] ("group: signs and scale"): signs of elements 8k..8k + 7 of the group w[7k..7k + 6];
 * scale = (f16(d) * (0.5 + w[28..31])) * 0.5. */
typedef struct m3_block_iq3_xxs {
  uint16_t d;
  uint8_t q[64];
  uint8_t gas[32];
} m3_block_iq3_xxs;

/* Run r (0..63) of 4: entry m3_iq3_s_grid[q[r] | (qh[r / 8] >> r % 8 & 1) << 8]; sign byte signs[i / 8] as it stands.
 * 8 groups of 32, g = i / 32: scale = f16(d) * (1 + 2 * (scales[g / 2] >> 4 * (g % 2) & 15)). */
typedef struct m3_block_iq3_s {
  uint16_t d;
  uint8_t q[64];
  uint8_t qh[8];
  uint8_t signs[32];
  uint8_t scales[4];
} m3_block_iq3_s;

/* Both IQ1 types: entries of m3_iq1_grid are -1, 0 and 1; value = scale * (entry + delta), delta = 0.125 or -0.125. */

/* 8 groups of 32, g = i / 32, of four runs of 8, run r of the group:
 * entry m3_iq1_grid[q[4g + r] | qh[g][3r..3r + 2] << 8]; scale = f16(d) * (2 * qh[g][12..14] + 1);
 * delta is negative if qh[g][15] is set. */
typedef struct m3_block_iq1_s {
  uint16_t d;
  uint8_t q[32];
  uint16_t qh[8];
} m3_block_iq1_s;

/* Run r (0..31) of 8 with h = qh[r / 2] >> 4 * (r % 2) & 15: entry m3_iq1_grid[q[r] | h[0..2] << 8]; delta is negative
 * if h[3] is set. 16 groups of two runs, g = i / 16: scale = f16(d) * (2 * s + 1), s = scales[g / 4] >> 3 * (g % 4)
 * & 7. The float16 d is cut in four: its bits 4k..4k + 3 are scales[k][12..15]. */
typedef struct m3_block_iq1_m {
  uint8_t q[32];
  uint8_t qh[16];
  uint16_t scales[4];
} m3_block_iq1_m;

_Static_assert(sizeof(m3_block_q4_0) == 18, "Q4_0 blocks are 18 bytes in the file");
_Static_assert(sizeof(m3_block_q4_1) == 20, "Q4_1 blocks are 20 bytes in the file");
_Static_assert(sizeof(m3_block_q5_0) == 22, "Q5_0 blocks are 22 bytes in the file");
_Static_assert(sizeof(m3_block_q5_1) == 24, "Q5_1 blocks are 24 bytes in the file");
_Static_assert(sizeof(m3_block_q8_0) == 34, "Q8_0 blocks are 34 bytes in the file");
_Static_assert(sizeof(m3_block_iq4_nl) == 18, "IQ4_NL blocks are 18 bytes in the file");
_Static_assert(sizeof(m3_block_mxfp4) == 17, "MXFP4 blocks are 17 bytes in the file");
_Static_assert(sizeof(m3_block_q2_k) == 84, "Q2_K blocks are 84 bytes in the file");
_Static_assert(sizeof(m3_block_q3_k) == 110, "Q3_K blocks are 110 bytes in the file");
_Static_assert(sizeof(m3_block_q4_k) == 144, "Q4_K blocks are 144 bytes in the file");
_Static_assert(sizeof(m3_block_q5_k) == 176, "Q5_K blocks are 176 bytes in the file");
_Static_assert(sizeof(m3_block_q6_k) == 210, "Q6_K blocks are 210 bytes in the file");
_Static_assert(sizeof(m3_block_iq4_xs) == 136, "IQ4_XS blocks are 136 bytes in the file");
_Static_assert(sizeof(m3_block_iq2_xxs) == 66, "IQ2_XXS blocks are 66 bytes in the file");
_Static_assert(sizeof(m3_block_iq2_xs) == 74, "IQ2_XS blocks are 74 bytes in the file");
_Static_assert(sizeof(m3_block_iq2_s) == 82, "IQ2_S blocks are 82 bytes in the file");
_Static_assert(sizeof(m3_block_iq3_xxs) == 98, "IQ3_XXS blocks are 98 bytes in the file");
_Static_assert(sizeof(m3_block_iq3_s) == 110, "IQ3_S blocks are 110 bytes in the file");
_Static_assert(sizeof(m3_block_iq1_s) == 50, "IQ1_S blocks are 50 bytes in the file");
_Static_assert(sizeof(m3_block_iq1_m) == 56, "IQ1_M blocks are 56 bytes in the file");

#endif
