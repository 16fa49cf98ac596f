/* codebooks.h - the tables of the codebook types, made at build time from the `gguf` package by native/make_tables.py.
 * How a block refers to them stands in blocks.h. */
#ifndef M3_SRC_QUANT_CODEBOOKS_H
#define M3_SRC_QUANT_CODEBOOKS_H

#include <stdint.h>

/* Magnitudes of 8 elements: 8, 25 or 43 (about 1, 3 and 5 in units of 8). */
extern const uint8_t m3_iq2_xxs_grid[256][8];
extern const uint8_t m3_iq2_xs_grid[512][8];
extern const uint8_t m3_iq2_s_grid[1024][8];

/* Magnitudes of 4 elements: 4, 12, 20, 28, 36, 44, 52 or 62. */
extern const uint8_t m3_iq3_xxs_grid[256][4];

/* Magnitudes of 4 elements: 1, 3, 5, 7, 9, 11, 13 or 15. */
extern const uint8_t m3_iq3_s_grid[512][4];

/* 8 elements: -1, 0 or 1. */
extern const int8_t m3_iq1_grid[2048][8];

/* Sign byte of a 7-bit code: the code, and bit 7 so that the number of set bits is even. */
extern const uint8_t m3_sign_patterns[128];

/* What the 16 codes of IQ4_NL and IQ4_XS stand for, ascending. */
extern const int8_t m3_iq4_values[16];

/* E2M1 numbers times two. */
extern const int8_t m3_mxfp4_values[16];

#endif
