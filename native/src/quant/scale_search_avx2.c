/* The searches with AVX2 (and F16C): the same operations on the same lanes, so the same bytes. */
#include "quant/scale_search.h"

#if defined(__x86_64__)
#define M3_SEARCHES m3_searches_avx2
#include "quant/scale_search.c"
#endif
