// Matrix products of a warpgroup: m64n128k16 with float32 sums, operands in shared memory in the 128-byte swizzle.
#ifndef M3_SRC_CUDA_MSA_WGMMA_CUH
#define M3_SRC_CUDA_MSA_WGMMA_CUH

#include "msa_device.cuh"

namespace m3_msa {

#if M3_MSA_HOPPER

// Rows of 64 numbers (128 bytes), 8 rows a swizzle atom. `leading`: bytes between tiles of 64 columns of an operand
// whose rows are its reduced dimension (values); not used otherwise.
__device__ __forceinline__ uint64_t operand(uint32_t shared, uint32_t leading = 16) {
  return (uint64_t)(shared >> 4 & 0x3fff) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
         (uint64_t)1 << 62;
}
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of sums across the asynchronous products.
template <int N>
__device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define M3_SUMS(d)                                                                                            \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), \
      "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
      "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define M3_SUM_NAMES                                                                                                 \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
  "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
  "%58,%59,%60,%61,%62,%63}"

// d (+)= a b^T: both with the reduced dimension along their rows' 64 numbers. d[4 j + {0, 1}] of thread (warp w, g, t)
// are row 16 w + g, columns 8 j + 2 t + {0, 1}; d[4 j + {2, 3}] row 16 w + g + 8.
template <class T>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, bool add);
template <>
__device__ __forceinline__ void wgmma<__half>(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " M3_SUM_NAMES
      ", %64, %65, p, 1, 1, 0, 0;\n}"
      : M3_SUMS(d)
      : "l"(a), "l"(b), "r"((int)add));
}
template <>
__device__ __forceinline__ void wgmma<__nv_bfloat16>(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " M3_SUM_NAMES
      ", %64, %65, p, 1, 1, 0, 0;\n}"
      : M3_SUMS(d)
      : "l"(a), "l"(b), "r"((int)add));
}
// d += a b with a in registers (as the A of m16n8k16, 16 rows a warp) and b's rows the reduced dimension.
template <class T>
__device__ __forceinline__ void wgmma_rows(float (&d)[64], const uint32_t (&a)[4], uint64_t b);
template <>
__device__ __forceinline__ void wgmma_rows<__half>(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " M3_SUM_NAMES
               ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : M3_SUMS(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
__device__ __forceinline__ void wgmma_rows<__nv_bfloat16>(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " M3_SUM_NAMES
               ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : M3_SUMS(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Byte of number `column` (a multiple of 4) of a row in a tile of 64 columns: the 128-byte swizzle.
__device__ __forceinline__ int swizzled(int row, int column) {
  return row * 128 + (((column >> 3) ^ (row & 7)) << 4) + (column & 7) * 2;
}

#endif

}  // namespace m3_msa

#endif
