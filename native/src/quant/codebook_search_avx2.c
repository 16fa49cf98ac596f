/* The searches with AVX2: the same operations on the same lanes, so the same bytes. */
#include "quant/codebook_search.h"

#if defined(__x86_64__)
#define M3_CODEBOOK_SEARCHES m3_codebook_searches_avx2
#include "quant/codebook_search.c"
#endif
