/* The product of tiles of AVX-512 with dot product instructions. */
#include "cpu/products_avx512.c"
