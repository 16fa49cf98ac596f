/* types.cuh - the types of weights that kernels are compiled for, once for all: LIST(TYPE) is TYPE(name) for each. */
#ifndef M3_SRC_CUDA_TYPES_CUH
#define M3_SRC_CUDA_TYPES_CUH

/* clang-format off */

/* With a unit of their own, see units.cuh. */
#define M3_UNIT_TYPES(TYPE)                                                                               \
  TYPE(Q8_0)                                                                                              \
  TYPE(Q4_0) TYPE(IQ4_NL) TYPE(MXFP4) TYPE(Q2_K) TYPE(Q3_K) TYPE(Q4_K) TYPE(Q5_K) TYPE(Q6_K) TYPE(IQ4_XS) \
      TYPE(IQ2_XXS)

#define M3_WEIGHT_TYPES(TYPE)                                                                                      \
  TYPE(F32)                                                                                                        \
  TYPE(F16) TYPE(BF16) M3_UNIT_TYPES(TYPE) TYPE(Q4_1) TYPE(Q5_0) TYPE(Q5_1) TYPE(IQ2_XS) TYPE(IQ2_S) TYPE(IQ3_XXS) \
      TYPE(IQ3_S) TYPE(IQ1_S) TYPE(IQ1_M)

/* clang-format on */

#endif
