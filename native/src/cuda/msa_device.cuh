// Hopper instructions that the MSA kernels are written with.
#ifndef M3_SRC_CUDA_MSA_DEVICE_CUH
#define M3_SRC_CUDA_MSA_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

// Kernel bodies are compiled for the one target that has these instructions; launchers refuse other devices.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define M3_MSA_HOPPER 1
#else
#define M3_MSA_HOPPER 0
#endif

namespace m3_msa {

constexpr int DIM = 128, BLOCK = 128, HEADS = 4, GROUP = 16, TOP_K = 16;
constexpr int ROW_BYTES = DIM * 2;             // of a 16-bit key or value
constexpr int PAGE_BYTES = BLOCK * ROW_BYTES;  // of one block and one head

#if M3_MSA_HOPPER

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(uint64_t *b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t *b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t *b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t *b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nwait: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra "
      "wait;\ndone:\n}" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}
// Copies bytes (a multiple of 16, both ends aligned to 16) to shared memory and counts them on the barrier.
__device__ __forceinline__ void bulk_load(void *dst, const void *src, uint32_t bytes, uint64_t *b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(dst)),
               "l"(src), "r"(bytes), "r"(shared_address(b))
               : "memory");
}
// Box of a tensor map at (x, y); counts its bytes on the barrier.
__device__ __forceinline__ void tensor_load(void *dst, const void *map, int x, int y, uint64_t *b) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(shared_address(dst)),
      "l"(map), "r"(shared_address(b)), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void tensor_prefetch(const void *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Between ordinary accesses to shared memory and those of the copy engine or wgmma.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Programmatic launch: `launch_next` lets the next kernel of the stream start, `wait_previous` waits until the previous
// one has ended and what it wrote can be seen (read past L1, which may have been filled before).
__device__ __forceinline__ void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// The address in the cluster of shared memory of the thread block of a rank.
__device__ __forceinline__ uint32_t cluster_address(const void *p, int rank) {
  uint32_t at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
  return at;
}
__device__ __forceinline__ uint64_t cluster_load(const uint64_t *p, int rank) {
  uint64_t x;
  asm volatile("ld.shared::cluster.b64 %0, [%1];" : "=l"(x) : "r"(cluster_address(p, rank)) : "memory");
  return x;
}
__device__ __forceinline__ void cluster_store(float2 *p, int rank, float2 x) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(cluster_address(p, rank)), "f"(x.x), "f"(x.y)
               : "memory");
}

__device__ __forceinline__ void cluster_store(uint64_t *p, int rank, uint64_t x) {
  asm volatile("st.shared::cluster.b64 [%0], %1;" ::"r"(cluster_address(p, rank)), "l"(x) : "memory");
}
__device__ __forceinline__ void cluster_store(int32_t *p, int rank, int32_t x) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(cluster_address(p, rank)), "r"(x) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <class T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ uint32_t pack(T a, T b) {
  return (uint32_t)*reinterpret_cast<const uint16_t *>(&a) | (uint32_t)*reinterpret_cast<const uint16_t *>(&b) << 16;
}
template <class T>
__device__ __forceinline__ uint32_t pack_pair(float x, float y);
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float x, float y) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float x, float y) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}
// x and y as sums of PARTS 16-bit numbers, largest first, packed in pairs.
template <class T, int PARTS>
__device__ __forceinline__ void split_pair(float x, float y, uint32_t (&parts)[PARTS]) {
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    T a = narrow<T>(x), b = narrow<T>(y);
    parts[i] = pack(a, b);
    x -= widen(a);
    y -= widen(b);
  }
}

// Power of two that brings numbers of at most `largest` (the bits of a float >= 0) up to 2^14, where the parts of a
// split in float16 lose nothing to its smallest exponent; 1 for bfloat16, whose exponents are those of float32.
template <class T>
__device__ __forceinline__ float split_scale(uint32_t largest) {
  return 1.0f;
}
template <>
__device__ __forceinline__ float split_scale<__half>(uint32_t largest) {
  int e = (int)(largest >> 23);
  e = 127 + 14 - (e - 127);
  return __uint_as_float((uint32_t)(e < 1 ? 1 : e > 250 ? 250 : e) << 23);
}

// Order of floats as that of unsigned numbers.
__device__ __forceinline__ uint32_t ordered(float x) {
  uint32_t u = __float_as_uint(x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

#endif  // M3_MSA_HOPPER

}  // namespace m3_msa

#endif
