/* Products with many rows. A block multiplies a tile of BM rows of the weight by BN rows of x in steps of 128 columns:
 * weights are unpacked to signed bytes in shared memory, rounded activations arrive as their two bytes, and tensor
 * cores give the exact integer sum of each group of 16 or 32 columns; its product with the two scales is added in
 * float32, group after group. So results have the precision of the CPU's, and depend neither on the tile nor on other
 * rows. */
#include "cuda/activations.cuh"
#include "cuda/launch.cuh"
#include "cuda/many_rows.cuh"
#include "cuda/swiglu.cuh"
#include "cuda/types.cuh"
#include "cuda/units.cuh"

enum { THREADS = 256, WARPS = THREADS / M3_WARP, STEP = 128, WARP_OUTS = 32 };

/* What a block holds in shared memory; bytes of a row in pieces of 16 that change places by row, so that eight rows are
 * read at once. */
template <int BM, int BN>
struct tile {
  uint8_t weights[BM][STEP];
  uint8_t x[2][2][BN][STEP]; /* two steps of high and low bytes */
  float weight_scale[STEP / 16][BM], weight_min[STEP / 16][BM];
  float x_scale[STEP / 32][BN], x_sum[STEP / 16][BN];
};

__device__ static __forceinline__ int place_of_piece(int row, int piece) { return 16 * (piece ^ (row & 7)); }

__device__ static __forceinline__ void copy_16(void *to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from)
               : "memory");
}

__device__ static __forceinline__ void load_matrices(const void *p, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((uint32_t)__cvta_generic_to_shared(p)));
}

/* Integer products of 16 rows of the weight with 8 rows of x over 32 columns, x as high or low bytes. */
__device__ static __forceinline__ void product_32(int (&d)[4], const uint32_t (&a)[4], const uint32_t *b, bool high) {
  d[0] = d[1] = d[2] = d[3] = 0;
  if (high)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* The same over the 16 columns of half `half` of them. */
__device__ static __forceinline__ void product_16(int (&d)[4], const uint32_t (&a)[4], const uint32_t *b, int half,
                                                  bool high) {
  d[0] = d[1] = d[2] = d[3] = 0;
  if (high)
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
}

__device__ static inline void load_any(int32_t type, const uint8_t *row, uint32_t unit, m3_unit *u) {
  switch (type) {
#define TYPE(name) \
  case M3_TYPE_##name: m3_load_unit<M3_TYPE_##name, false>(row, unit, u); break;
    M3_UNIT_TYPES(TYPE)
#undef TYPE
    default: any_unit(type, row, unit, u);
  }
}

/* GROUP: columns of a scale; MIN: there are minima. */
template <int GROUP, bool MIN, int BM, int BN>
__global__ static void __launch_bounds__(THREADS, 2) multiply_many(const __grid_constant__ m3_many_params p) {
  extern __shared__ __align__(128) char shared[];
  using T = tile<BM, BN>;
  T &t = *(T *)shared;
  constexpr int WARPS_M = BM / WARP_OUTS, WARPS_N = WARPS / WARPS_M, WN = BN / WARPS_N, TILES_N = WN / 8;
  constexpr int UNITS = BM * (STEP / 32) / THREADS;
  m3_wait_for_previous();
  m3_let_next_begin();
  /* Groups run fastest: those that read the same rows of the weight are at work together. */
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
  int32_t type = part.type, distance = m3_unit_distance(type);
  uint32_t units = (uint32_t)p.n_in / 32;
  const uint8_t *weight = (const uint8_t *)part.weight + g.expert * part.expert_bytes;

  uint32_t tid = threadIdx.x, lane = tid % M3_WARP, warp = tid / M3_WARP;
  int warp_m = (int)(warp % WARPS_M) * WARP_OUTS, warp_n = (int)(warp / WARPS_M) * WN;

  /* The row of x whose scales and sums the thread brings. */
  int32_t x_bytes = m3_rounded_bytes(p.n_in);
  auto row_of = [&](int32_t r) {
    int32_t row = g.first + min(r, g.count - 1);
    return p.x + (int64_t)(p.gather ? p.gather[row] : row) * x_bytes;
  };
  const float *own_scale = NULL;
  if (tid < BN) own_scale = m3_rounded_at((void *)row_of((int32_t)tid), p.n_in).scale;

  /* Pieces of 16 bytes of x: thread tid brings those of rows tid / 8, tid / 8 + 32, ... */
  const char *x_rows[BN / 32];
#pragma unroll
  for (int i = 0; i < BN / 32; i++) x_rows[i] = row_of((int32_t)tid / 8 + 32 * i) + 16 * (tid % 8);
  int32_t padded = m3_rounded_columns(p.n_in);
  auto fetch = [&](int32_t column, int stage) {
    if (column < padded) {
#pragma unroll
      for (int i = 0; i < BN / 32; i++) {
        int r = (int)tid / 8 + 32 * i, place = place_of_piece(r, (int)tid % 8);
        copy_16(&t.x[stage][0][r][place], x_rows[i] + column);
        copy_16(&t.x[stage][1][r][place], x_rows[i] + padded + column);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  float sum[2][TILES_N][4];
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < TILES_N; j++)
#pragma unroll
      for (int k = 0; k < 4; k++) sum[i][j][k] = 0;

  int64_t superblock = part.row_bytes * 256 / p.n_in; /* bytes of 256 columns */
  auto row_of_weight = [&](int i) {
    return weight + (int64_t)min(first_out + ((int)tid + i * THREADS) / 4, part.n_out - 1) * part.row_bytes;
  };
  fetch(0, 0);
  for (int32_t column = 0, stage = 0; column < p.n_in; column += STEP, stage ^= 1) {
    m3_unit u[UNITS];
    float scale[4], half[8];
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      int index = (int)tid + i * THREADS;
      uint32_t unit = (uint32_t)column / 32 + (uint32_t)index % 4;
#pragma unroll
      for (int j = 0; j < 8; j++) u[i].q[j] = 0;
      u[i].scale[0] = u[i].scale[1] = u[i].min[0] = u[i].min[1] = 0;
      if (unit < units) load_any(type, row_of_weight(i), unit, &u[i]);
      /* What comes after the next step leaves memory in the meantime. */
      int64_t ahead = superblock * (column + 2 * STEP) / 256 + superblock / 8 * (index % 4);
      if (ahead < part.row_bytes) asm volatile("prefetch.global.L2 [%0];" ::"l"(row_of_weight(i) + ahead));
    }
    if (tid < BN) {
      float4 v = *(const float4 *)(own_scale + column / 32);
      scale[0] = v.x, scale[1] = v.y, scale[2] = v.z, scale[3] = v.w;
      if (MIN) {
        const float4 *h = (const float4 *)(own_scale + padded / 32 + column / 16);
        float4 a = h[0], b = h[1];
        half[0] = a.x, half[1] = a.y, half[2] = a.z, half[3] = a.w;
        half[4] = b.x, half[5] = b.y, half[6] = b.z, half[7] = b.w;
      }
    }
    __syncthreads(); /* the step before is done */
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      int index = (int)tid + i * THREADS, row = index / 4,
          first = (int)m3_unit_column(distance, (uint32_t)index % 4) / 16;
      int second = first + distance / 16;
      *(uint4 *)&t.weights[row][place_of_piece(row, first)] = make_uint4(u[i].q[0], u[i].q[1], u[i].q[2], u[i].q[3]);
      *(uint4 *)&t.weights[row][place_of_piece(row, second)] = make_uint4(u[i].q[4], u[i].q[5], u[i].q[6], u[i].q[7]);
      t.weight_scale[first * 16 / GROUP][row] = u[i].scale[0], t.weight_scale[second * 16 / GROUP][row] = u[i].scale[1];
      if (MIN)
        t.weight_min[first * 16 / GROUP][row] = -u[i].min[0], t.weight_min[second * 16 / GROUP][row] = -u[i].min[1];
    }
    if (tid < BN) {
#pragma unroll
      for (int i = 0; i < 4; i++) t.x_scale[i][tid] = scale[i];
      if (MIN)
#pragma unroll
        for (int i = 0; i < STEP / GROUP; i++)
          t.x_sum[i][tid] = GROUP == 16 ? half[i] : half[2 * i % 8] + half[(2 * i + 1) % 8];
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    fetch(column + STEP, stage ^ 1);
#pragma unroll
    for (int k = 0; k < STEP / 32; k++) {
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        /* Rows 0 to 7 and 8 to 15, then the same of the next 16 columns. */
        int row = warp_m + 16 * i + (int)lane % 16;
        load_matrices(&t.weights[row][place_of_piece(row, 2 * k + (int)lane / 16)], a[i]);
      }
      constexpr int PARTS = 32 / GROUP;
      float w_scale[PARTS][2][2], w_min[PARTS][2][2];
#pragma unroll
      for (int h = 0; h < PARTS; h++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            int row = warp_m + 16 * i + 8 * j + (int)lane / 4;
            w_scale[h][i][j] = t.weight_scale[PARTS * k + h][row];
            if (MIN) w_min[h][i][j] = t.weight_min[PARTS * k + h][row];
          }
#pragma unroll
      for (int n = 0; n < TILES_N; n++) {
        uint32_t b[4]; /* high bytes of columns 0 to 15 and 16 to 31, then low ones */
        int row = warp_n + 8 * n + (int)lane % 8;
        load_matrices(&t.x[stage][lane / 16][row][place_of_piece(row, 2 * k + (int)lane / 8 % 2)], b);
        int at = warp_n + 8 * n + 2 * ((int)lane % 4);
        float2 x_scale = *(const float2 *)&t.x_scale[k][at];
#pragma unroll
        for (int h = 0; h < PARTS; h++) {
          float2 x_sum = {0, 0};
          if (MIN) x_sum = *(const float2 *)&t.x_sum[PARTS * k + h][at];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            int high[4], low[4];
            if (GROUP == 32)
              product_32(high, a[i], b, true), product_32(low, a[i], b + 2, false);
            else
              product_16(high, a[i], b, h, true), product_16(low, a[i], b + 2, h, false);
#pragma unroll
            for (int j = 0; j < 4; j++) {
              float s = w_scale[h][i][j / 2] * (j % 2 ? x_scale.y : x_scale.x);
              sum[i][n][j] = fmaf((float)(256 * high[j] + low[j]), s, sum[i][n][j]);
              if (MIN) sum[i][n][j] = fmaf(w_min[h][i][j / 2], j % 2 ? x_sum.y : x_sum.x, sum[i][n][j]);
            }
          }
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < TILES_N; n++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int r = warp_n + 8 * n + 2 * ((int)lane % 4) + j % 2;
      if (r >= g.count) continue;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int32_t out = first_out + warp_m + 16 * i + 8 * (j / 2) + (int)lane / 4;
        if (out >= part.n_out) continue;
        float *y = part.y + (int64_t)(g.first + r) * part.ldy + out;
        *y = p.add ? *y + sum[i][n][j] : sum[i][n][j];
      }
    }
}

/* ------------------------------------------------------------------------------------------------ launch */

typedef void (*many_kernel)(m3_many_params);

struct many_tile {
  many_kernel kernel;
  size_t shared;
  int32_t bm, bn;
};

template <int BM, int BN>
static many_tile tile_for(int32_t type) {
  bool min = m3_unit_has_min(type);
  many_kernel kernel = m3_has_groups_of_16(type)
                           ? (min ? multiply_many<16, true, BM, BN> : multiply_many<16, false, BM, BN>)
                           : (min ? multiply_many<32, true, BM, BN> : multiply_many<32, false, BM, BN>);
  return many_tile{kernel, sizeof(tile<BM, BN>), BM, BN};
}

enum { TILES = 3 };

static many_tile choose_tile(int32_t type, int which) {
  switch (which) {
    case 0: return tile_for<64, 64>(type);
    case 1: return tile_for<128, 64>(type);
    default: return tile_for<128, 128>(type);
  }
}

cudaError_t m3_cuda_many_rows_setup() {
  static const int32_t types[] = {M3_TYPE_Q8_0, M3_TYPE_Q4_K, M3_TYPE_Q6_K, M3_TYPE_Q2_K}; /* one of each kernel */
  for (int32_t type : types)
    for (int i = 0; i < TILES; i++) {
      many_tile t = choose_tile(type, i);
      cudaError_t error =
          cudaFuncSetAttribute((const void *)t.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)t.shared);
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

int32_t m3_cuda_many_group_rows(const m3_product *p, int64_t rows, int32_t matrices) {
  for (int i = 0; i < p->n_parts; i++)
    if (!m3_cuda_has_units(p->parts[i].weight)) return 64; /* floats have no other tile */
  return rows > (int64_t)96 * matrices ? 128 : 64;
}

unsigned m3_cuda_many_params(const m3_product *p, const int *members, int n, int32_t bm, int32_t bn,
                             m3_many_params *out) {
  unsigned blocks = 0;
  *out = m3_many_params{};
  for (int i = 0; i < n; i++) {
    const m3_product_part *part = &p->parts[members[i]];
    const m3_tensor *w = part->weight->tensor;
    out->parts[i] = m3_many_part{(const char *)part->weight->device,
                                 (int64_t)(w->n_bytes / (uint64_t)w->ne[2]),
                                 m3_row_bytes(w->type, w->ne[0]),
                                 w->type,
                                 (int32_t)w->ne[1],
                                 blocks,
                                 part->y,
                                 part->ldy};
    blocks += m3_blocks_for(w->ne[1], bm);
  }
  out->n_parts = n;
  out->n_in = (int32_t)p->parts[members[0]].weight->tensor->ne[0];
  out->n = p->n;
  out->add = p->add;
  out->x = (const char *)p->x;
  out->gather = p->gather;
  out->groups = p->grouping ? p->grouping->groups : NULL;
  out->n_groups = p->grouping ? p->grouping->n_groups : NULL;
  out->max_groups = p->grouping ? p->max_groups : (int32_t)m3_blocks_for(p->n, bn);
  return blocks * (unsigned)out->max_groups;
}

void m3_cuda_many_rows(const m3_context *c, const m3_product *p) {
  m3_device_state *s = c->state;
  bool done[M3_PRODUCT_PARTS] = {false};
  for (int first = 0; first < p->n_parts; first++) {
    if (done[first] || !m3_cuda_has_units(p->parts[first].weight)) continue;
    /* Weights whose types have the same kernel go together. */
    int32_t type = p->parts[first].weight->tensor->type;
    int members[M3_PRODUCT_PARTS], n = 0;
    many_kernel same = choose_tile(type, 0).kernel;
    for (int i = first; i < p->n_parts; i++)
      if (!done[i] && m3_cuda_has_units(p->parts[i].weight) &&
          choose_tile(p->parts[i].weight->tensor->type, 0).kernel == same)
        done[i] = true, members[n++] = i;
    bool large = p->grouping ? p->group_rows == 128 : p->n > 96;
    m3_many_params m;
    for (int which = large ? 2 : 1;; which--) {
      many_tile t = choose_tile(type, which);
      unsigned blocks = m3_cuda_many_params(p, members, n, t.bm, t.bn, &m);
      /* Smaller tiles where larger ones would leave multiprocessors idle; a group's rows are one tile. */
      bool fixed = which == 0 || (which == 2 && p->grouping);
      if (blocks < 2 * (unsigned)s->multiprocessors && !fixed) continue;
      m.x = (const char *)c->scratch->rounded;
      m3_launch(s, "a product with many rows", t.kernel, dim3(blocks), THREADS, t.shared, m);
      break;
    }
  }
  m3_cuda_many_floats(c, p);
}

/* ------------------------------------------------------------------------------------------------ rounding */

struct round_params {
  const float *x, *up; /* up: SwiGLU of both, or NULL */
  int32_t n_in;
  float limit, alpha;
  char *out;
};

/* A thread for four columns of a row, with those of the padding. */
__global__ static void round_rows(round_params p) {
  m3_wait_for_previous();
  m3_let_next_begin();
  int32_t column = 4 * (int32_t)(blockIdx.y * blockDim.x + threadIdx.x);
  if (column >= m3_rounded_columns(p.n_in)) return;
  int64_t row = blockIdx.x;
  float4 v = {0, 0, 0, 0};
  if (column < p.n_in) {
    v = *(const float4 *)(p.x + row * p.n_in + column);
    if (p.up) {
      float4 u = *(const float4 *)(p.up + row * p.n_in + column);
      v.x = m3_swiglu(v.x, u.x, p.limit, p.alpha), v.y = m3_swiglu(v.y, u.y, p.limit, p.alpha);
      v.z = m3_swiglu(v.z, u.z, p.limit, p.alpha), v.w = m3_swiglu(v.w, u.w, p.limit, p.alpha);
    }
  }
  m3_rounded_part part = m3_round_columns(v);
  m3_rounded_row out = m3_rounded_at(p.out + row * m3_rounded_bytes(p.n_in), p.n_in);
  *(uint32_t *)(out.high + column) = part.high;
  *(uint32_t *)(out.low + column) = part.low;
  if (column % 32 == 0) out.scale[column / 32] = part.scale;
  if (column % 16 == 0) out.half_sum[column / 16] = part.half_sum;
}

static void round_any(const m3_context *c, const float *x, const float *up, int64_t n, int32_t n_in) {
  const m3_hparams *h = c->hparams;
  round_params p = {x, up, n_in, h->swiglu_limit, h->swiglu_alpha, (char *)c->scratch->rounded};
  dim3 grid((unsigned)n, m3_blocks_for(m3_rounded_columns(n_in), 4 * M3_THREADS));
  m3_launch(c->state, "rounding", round_rows, grid, M3_THREADS, 0, p);
}

void m3_cuda_round(const m3_context *c, const float *x, int64_t n, int32_t n_in) { round_any(c, x, NULL, n, n_in); }

void m3_cuda_round_swiglu(const m3_context *c, const float *gate, const float *up, int64_t n, int32_t n_in) {
  round_any(c, gate, up, n, n_in);
}

int64_t m3_cuda_input_bytes(const m3_hparams *h, int64_t rows) {
  int64_t widths[] = {h->n_embd, (int64_t)h->n_head * h->head_dim, h->n_ff, h->n_ff_shared}, most = 0;
  for (int64_t width : widths)
    if (width > most) most = width;
  int64_t bytes = rows * m3_rounded_bytes((int32_t)most);
  int64_t experts = rows * h->n_expert_used * m3_rounded_bytes(h->n_ff_expert);
  return bytes > experts ? bytes : experts;
}
