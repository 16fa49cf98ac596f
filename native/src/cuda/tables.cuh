/* tables.cuh - the codebooks (codebooks.h) in device memory, and the runs of eight elements that read them. */
#ifndef M3_SRC_CUDA_TABLES_CUH
#define M3_SRC_CUDA_TABLES_CUH

#include <cuda_fp16.h>

#define M3_TABLE static __device__ __align__(16) const
#include "tables.h" /* build/generated */

#include "quant/runs.h"

#endif
