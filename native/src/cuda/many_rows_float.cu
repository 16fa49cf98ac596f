/* Products of F32, F16 and BF16 weights with many rows. A float is the sum of three bfloat16 numbers of 8 bits each (a
 * float16 of two), whose products are exact in float32: tensor cores multiply all pairs of parts but those below 2^-24
 * of the first. Their sums are cut off rather than rounded, so they run over 64 columns only, and float32 takes them
 * from there. */
#include <cuda_bf16.h>

#include "cuda/launch.cuh"
#include "cuda/many_rows.cuh"
#include "cuda/tables.cuh"

enum { THREADS = 256, BN = 64, STEP = 64, RUN = 16, X_PARTS = 3 };

template <int TYPE>
constexpr int parts_of = TYPE == M3_TYPE_BF16  ? 1
                         : TYPE == M3_TYPE_F16 ? 2
                                               : 3;

/* Bytes of a row in pieces of 16 that change places by row. */
template <int PARTS, int BM>
struct tile {
  uint4 weights[PARTS][BM][STEP / 8], x[X_PARTS][BN][STEP / 8];
};

/* Columns first to first + 15 of a row, zeros past its end. */
template <int TYPE>
__device__ static inline void load_run(const char *row, int32_t first, int32_t n_in, float (&out)[RUN]) {
#pragma unroll
  for (int i = 0; i < RUN; i += M3_RUN) {
    m3_run r;
    m3_load_run(TYPE, row, (uint32_t)(first + i) / M3_RUN, first + i < n_in ? n_in : -1, &r);
#pragma unroll
    for (int j = 0; j < M3_RUN; j++) out[i + j] = r.q[j];
  }
}

template <int PARTS, int ROWS>
__device__ static inline void store_run(uint4 (&to)[PARTS][ROWS][STEP / 8], int row, int piece, float (&x)[RUN]) {
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    uint32_t w[RUN / 2];
#pragma unroll
    for (int j = 0; j < RUN; j += 2) {
      __nv_bfloat162 pair = __floats2bfloat162_rn(x[j], x[j + 1]);
      w[j / 2] = *(uint32_t *)&pair;
      x[j] -= __low2float(pair), x[j + 1] -= __high2float(pair);
    }
    to[p][row][piece ^ (row & 7)] = make_uint4(w[0], w[1], w[2], w[3]);
    to[p][row][(piece + 1) ^ (row & 7)] = make_uint4(w[4], w[5], w[6], w[7]);
  }
}

__device__ static __forceinline__ void load_matrices(const void *p, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((uint32_t)__cvta_generic_to_shared(p)));
}

__device__ static __forceinline__ void multiply_parts(float (&d)[4], const uint32_t (&a)[4], const uint32_t *b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* BM: rows of the weight, 32 or 64. */
template <int TYPE, int BM>
__global__ static void __launch_bounds__(THREADS, 2) multiply_floats(const __grid_constant__ m3_many_params p) {
  constexpr int PARTS = parts_of<TYPE>, M = BM / 32; /* tiles of 16 rows of a warp */
  __shared__ tile<PARTS, BM> t;
  m3_wait_for_previous();
  m3_let_next_begin();
  int32_t group = (int32_t)(blockIdx.x % (unsigned)p.max_groups);
  unsigned block = blockIdx.x / (unsigned)p.max_groups;
  int which = 0;
  for (int i = 1; i < p.n_parts; i++)
    if (block >= p.parts[i].first_block) which = i;
  const m3_many_part &part = p.parts[which];
  m3_row_group g = {0, group * BN, min(BN, p.n - group * BN)};
  if (p.groups) {
    if (group >= *p.n_groups) return;
    g = p.groups[group];
  }
  int32_t first_out = (int32_t)(block - part.first_block) * BM;
  int tid = (int)threadIdx.x, lane = tid % M3_WARP, warp = tid / M3_WARP;
  int warp_m = warp % 2 * 16 * M, warp_n = warp / 2 * 16;
  /* Thread tid brings 16 columns of row tid / 4 of the weight and of x. */
  int own = tid / 4, piece = tid % 4 * 2;
  const char *weight = part.weight + g.expert * part.expert_bytes +
                       (int64_t)min(first_out + min(own, BM - 1), part.n_out - 1) * part.row_bytes;
  int32_t row = g.first + min(own, g.count - 1);
  const char *x = p.x + (int64_t)(p.gather ? p.gather[row] : row) * p.n_in * (int64_t)sizeof(float);
  float sum[M][2][4] = {}, w_run[RUN], x_run[RUN];
  load_run<TYPE>(weight, 8 * piece, p.n_in, w_run);
  load_run<M3_TYPE_F32>(x, 8 * piece, p.n_in, x_run);
  for (int32_t column = 0; column < p.n_in; column += STEP) {
    __syncthreads(); /* the step before is done */
    if (own < BM) store_run(t.weights, own, piece, w_run);
    store_run(t.x, own, piece, x_run);
    __syncthreads();
    load_run<TYPE>(weight, column + STEP + 8 * piece, p.n_in, w_run);
    load_run<M3_TYPE_F32>(x, column + STEP + 8 * piece, p.n_in, x_run);
    float step[M][2][4] = {};
#pragma unroll
    for (int k = 0; k < STEP / 16; k++) {
      uint32_t a[PARTS][M][4], b[X_PARTS][4];
#pragma unroll
      for (int i = 0; i < PARTS; i++)
#pragma unroll
        for (int m = 0; m < M; m++) {
          int r = warp_m + 16 * m + lane % 16;
          load_matrices(&t.weights[i][r][(2 * k + lane / 16) ^ (r & 7)], a[i][m]);
        }
#pragma unroll
      for (int i = 0; i < X_PARTS; i++) {
        int r = warp_n + 8 * (lane / 16) + lane % 8;
        load_matrices(&t.x[i][r][(2 * k + lane / 8 % 2) ^ (r & 7)], b[i]);
      }
      /* Small ones first. */
#pragma unroll
      for (int order = X_PARTS - 1; order >= 0; order--)
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
          if (order < i) continue;
#pragma unroll
          for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < 2; n++) multiply_parts(step[m][n], a[i][m], b[order - i] + 2 * n);
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) sum[m][n][j] += step[m][n][j];
  }
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int r = warp_n + 8 * n + 2 * (lane % 4) + j % 2, out = first_out + warp_m + 16 * m + 8 * (j / 2) + lane / 4;
        if (r >= g.count || out >= part.n_out) continue;
        float *y = part.y + (int64_t)(g.first + r) * part.ldy + out;
        *y = p.add ? *y + sum[m][n][j] : sum[m][n][j];
      }
}

template <int TYPE>
static void launch(const m3_context *c, const m3_product *p, const int *members, int n) {
  m3_many_params m;
  /* The smaller tile where the larger one would leave multiprocessors idle. */
  unsigned blocks = m3_cuda_many_params(p, members, n, 64, BN, &m);
  void (*kernel)(m3_many_params) = multiply_floats<TYPE, 64>;
  if (blocks < 2 * (unsigned)c->state->multiprocessors) {
    blocks = m3_cuda_many_params(p, members, n, 32, BN, &m);
    kernel = multiply_floats<TYPE, 32>;
  }
  m3_launch(c->state, "a product with many rows", kernel, dim3(blocks), THREADS, 0, m);
}

void m3_cuda_many_floats(const m3_context *c, const m3_product *p) {
  for (int32_t type : {(int32_t)M3_TYPE_F32, (int32_t)M3_TYPE_F16, (int32_t)M3_TYPE_BF16}) {
    int members[M3_PRODUCT_PARTS], n = 0;
    for (int i = 0; i < p->n_parts; i++)
      if (p->parts[i].weight->tensor->type == type) members[n++] = i;
    if (!n) continue;
    if (type == M3_TYPE_F32)
      launch<M3_TYPE_F32>(c, p, members, n);
    else if (type == M3_TYPE_F16)
      launch<M3_TYPE_F16>(c, p, members, n);
    else
      launch<M3_TYPE_BF16>(c, p, members, n);
  }
}
