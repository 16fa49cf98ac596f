/* Matrix products with weights of any storage type: which way they are taken, and the plain way, with weights decoded
 * in registers and float32 activations and sums.
 *
 * A warp computes a tile of ROWS rows of x and OUTS rows of the weight. Lane l takes the runs of eight columns l, l +
 * 32, l + 64, ... and the lanes' sums are added up in one tree, so that what a row gets does not depend on the tile:
 * one row and many rows give the same bits. */
#include "cuda/few_rows.cuh"
#include "cuda/many_rows.cuh"
#include "cuda/state.cuh"
#include "cuda/tables.cuh"
#include "cuda/types.cuh"

/* Warps of a block. Those of a tile with many rows read the same rows of x at the same time, step by step, so that
 * these come from the second cache once for all of them. */
template <int ROWS>
constexpr int warps_of = ROWS == 16 ? 12 : 4;
template <int ROWS>
constexpr int blocks_at_once = ROWS == 16  ? 1
                               : ROWS == 4 ? 4
                                           : 8;

/* One of the weights that are multiplied with the same rows. */
struct multiply_part {
  const char *weight;
  int64_t expert_bytes;
  int32_t n_out;
  unsigned first_block; /* of those that walk through the weight's rows */
  float *y;
  int64_t ldy;
};

struct multiply_params {
  multiply_part parts[M3_PRODUCT_PARTS];
  int32_t n_parts;
  int64_t row_bytes;
  int32_t n_in;
  const float *x;
  int32_t n;
  bool add;
  const int32_t *gather;      /* or NULL */
  const m3_row_group *groups; /* or NULL: rows of the one group by their number */
  const int32_t *n_groups;
  int32_t max_groups;
};

/* Columns 8 * run .. of a row of x; zeros past its end. */
template <bool WHOLE>
__device__ static inline void load_x(const float *x, uint32_t run, int32_t n_in, float *out) {
  if (WHOLE) {
    const float4 *p = (const float4 *)x + 2 * run;
    float4 a = p[0], b = p[1];
    out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w, out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
  } else {
    m3_plain_run(M3_TYPE_F32, x, (int64_t)run * M3_RUN, n_in - (int64_t)run * M3_RUN, out);
  }
}

/* Adds the products of one run of all rows of the tile. WHOLE: rows are a whole number of runs. */
template <int TYPE, bool WHOLE, int ROWS, int OUTS>
__device__ static __forceinline__ void add_run(const char *const (&w)[OUTS], const float *const (&x)[ROWS],
                                               uint32_t run, int32_t n_in, float (&sum)[ROWS][OUTS]) {
  m3_run a[OUTS];
#pragma unroll
  for (int o = 0; o < OUTS; o++) m3_load_run(TYPE, w[o], run, WHOLE ? M3_RUN : n_in, &a[o]);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float b[M3_RUN], whole = 0;
    load_x<WHOLE>(x[r], run, n_in, b);
    if (m3_has_min(TYPE)) whole = ((b[0] + b[1]) + (b[2] + b[3])) + ((b[4] + b[5]) + (b[6] + b[7]));
#pragma unroll
    for (int o = 0; o < OUTS; o++) {
      /* scale * (q . x) - min * (sum of x): the weights need not be put together one by one. */
      float dot = m3_is_plain(TYPE) ? sum[r][o] : 0;
#pragma unroll
      for (int j = 0; j < M3_RUN; j++) dot = fmaf(a[o].q[j], b[j], dot);
      if (m3_is_plain(TYPE)) sum[r][o] = dot;
      if (!m3_is_plain(TYPE)) sum[r][o] = fmaf(a[o].scale, dot, sum[r][o]);
      if (m3_has_min(TYPE)) sum[r][o] = fmaf(-a[o].min, whole, sum[r][o]);
    }
  }
}

template <int TYPE, bool WHOLE, int ROWS, int OUTS>
__global__ static void __launch_bounds__(warps_of<ROWS> * 32, blocks_at_once<ROWS>) multiply(multiply_params p) {
  /* Groups run fastest: those that read the same rows of the weight are at work together. */
  int32_t group = (int32_t)(blockIdx.x % (unsigned)p.max_groups);
  uint32_t lane = threadIdx.x % M3_WARP, warp = threadIdx.x / M3_WARP;
  unsigned block = blockIdx.x / (unsigned)p.max_groups;
  multiply_part part = p.parts[0];
#pragma unroll
  for (int i = 1; i < M3_PRODUCT_PARTS; i++)
    if (i < p.n_parts && block >= p.parts[i].first_block) part = p.parts[i];
  int32_t out = (int32_t)((block - part.first_block) * warps_of<ROWS> + warp) * OUTS;
  m3_row_group g = {0, group * ROWS, min(ROWS, p.n - group * ROWS)};
  if (p.groups) {
    if (group >= *p.n_groups) return;
    g = p.groups[group];
  }
  if (ROWS < 16 && out >= part.n_out) return; /* else it keeps step with the others */
  const char *weight = part.weight + g.expert * part.expert_bytes;
  const char *w[OUTS];
  const float *x[ROWS];
  float sum[ROWS][OUTS];
#pragma unroll
  for (int o = 0; o < OUTS; o++) w[o] = weight + min(out + o, part.n_out - 1) * p.row_bytes;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int32_t row = g.first + min(r, g.count - 1);
    x[r] = p.x + (int64_t)(p.gather ? p.gather[row] : row) * p.n_in;
#pragma unroll
    for (int o = 0; o < OUTS; o++) sum[r][o] = 0;
  }
  /* Whole blocks of 256 columns first: no lane leaves that loop before the others, and its place in a block stays. */
  uint32_t runs = (uint32_t)(p.n_in + M3_RUN - 1) / M3_RUN, step = 0;
#pragma unroll(ROWS == 1 ? 4 : 1)
  for (; step + M3_WARP <= runs; step += M3_WARP) {
    if (ROWS == 16) __syncthreads();
    add_run<TYPE, WHOLE, ROWS, OUTS>(w, x, step | lane, p.n_in, sum);
  }
  if ((step | lane) < runs) add_run<TYPE, WHOLE, ROWS, OUTS>(w, x, step | lane, p.n_in, sum);
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int o = 0; o < OUTS; o++) {
      float v = m3_warp_sum(sum[r][o]);
      if (lane != (r * OUTS + o) % M3_WARP || r >= g.count || out + o >= part.n_out) continue;
      float *y = part.y + (g.first + r) * part.ldy + out + o;
      *y = p.add ? *y + v : v;
    }
}

template <int TYPE, bool WHOLE, int ROWS, int OUTS>
static void launch(m3_device_state *s, multiply_params &p) {
  unsigned blocks = 0, threads = warps_of<ROWS> * 32;
  for (int i = 0; i < p.n_parts; i++) {
    p.parts[i].first_block = blocks;
    blocks += m3_blocks_for(p.parts[i].n_out, warps_of<ROWS> * OUTS);
  }
  multiply<TYPE, WHOLE, ROWS, OUTS><<<blocks *(unsigned)p.max_groups, threads, 0, s->stream>>>(p);
}

template <int TYPE, bool WHOLE>
static void choose_tile(m3_device_state *s, multiply_params &p, int32_t rows) {
  switch (rows) {
    case 1: launch<TYPE, WHOLE, 1, 2>(s, p); break;
    case 4: launch<TYPE, WHOLE, 4, 4>(s, p); break;
    default: launch<TYPE, WHOLE, 16, 4>(s, p); break;
  }
}

/* Rows that are no whole number of runs: of F32, F16 and BF16 only, as the other types have blocks of 32 or 256. */
template <int TYPE>
static void choose_ends(m3_device_state *s, multiply_params &p, int32_t rows) {
  if constexpr (TYPE == M3_TYPE_F32 || TYPE == M3_TYPE_F16 || TYPE == M3_TYPE_BF16)
    if (p.n_in % M3_RUN) return choose_tile<TYPE, false>(s, p, rows);
  choose_tile<TYPE, true>(s, p, rows);
}

int32_t m3_cuda_group_rows(int64_t n) { return n <= 1 ? 1 : n <= 8 ? 4 : 16; }

static void choose_type(m3_device_state *s, int32_t type, multiply_params &p, int32_t rows) {
  switch (type) {
#define TYPE(name) \
  case M3_TYPE_##name: choose_ends<M3_TYPE_##name>(s, p, rows); break;
    M3_WEIGHT_TYPES(TYPE)
#undef TYPE
    default: m3_note(s, cudaErrorNotSupported, "a product with a weight of an unknown type");
  }
}

static multiply_part part_of(const m3_product *p, int i) {
  const m3_tensor *t = p->parts[i].weight->tensor;
  return multiply_part{(const char *)p->parts[i].weight->device,
                       (int64_t)(t->n_bytes / (uint64_t)t->ne[2]),
                       (int32_t)t->ne[1],
                       0,
                       p->parts[i].y,
                       p->parts[i].ldy};
}

void m3_cuda_plain_product(m3_device_state *s, const m3_product *p) {
  int32_t rows = p->grouping ? p->group_rows : m3_cuda_group_rows(p->n);
  /* Weights of one type go together: small ones do not leave most of the chip idle, nor wait for each other. */
  for (int first = 0, next; first < p->n_parts; first = next) {
    const m3_tensor *t = p->parts[first].weight->tensor;
    multiply_params m = {};
    for (next = first; next < p->n_parts && p->parts[next].weight->tensor->type == t->type; next++)
      m.parts[m.n_parts++] = part_of(p, next);
    m.row_bytes = m3_row_bytes(t->type, t->ne[0]);
    m.n_in = (int32_t)t->ne[0];
    m.x = p->x;
    m.n = p->n;
    m.add = p->add;
    m.gather = p->gather;
    m.groups = p->grouping ? p->grouping->groups : NULL;
    m.n_groups = p->grouping ? p->grouping->n_groups : NULL;
    m.max_groups = p->grouping ? p->max_groups : (int32_t)m3_blocks_for(p->n, rows);
    choose_type(s, t->type, m, rows);
    m3_launched(s, "a matrix product");
  }
}

static bool few(const m3_context *c, const m3_product *p) {
  m3_few_product f = {};
  f.n_parts = p->n_parts;
  for (int i = 0; i < p->n_parts; i++) f.parts[i] = m3_few_part{p->parts[i].weight, p->parts[i].y, p->parts[i].ldy};
  f.x = p->x;
  f.n = p->n;
  f.add = p->add;
  return m3_cuda_few_rows(c, &f);
}

void m3_cuda_product(const m3_context *c, const m3_product *p) {
  m3_device_state *s = c->state;
  if (s->exact || p->grouping) return m3_cuda_plain_product(s, p);
  if (few(c, p)) return;
  if (p->n <= M3_FEW_ROWS) return m3_cuda_plain_product(s, p);
  if (m3_cuda_any_units(p)) m3_cuda_round(c, p->x, p->n, (int32_t)p->parts[0].weight->tensor->ne[0]);
  m3_cuda_many_rows(c, p);
}

/* ------------------------------------------------------------------------------------------------ embedding */

/* Eight columns a thread. */
template <int TYPE>
__global__ static void decode_rows(const char *weight, int64_t row_bytes, const int32_t *ids, int32_t n_in,
                                   float *out) {
  uint32_t run = blockIdx.y * blockDim.x + threadIdx.x;
  float values[M3_RUN];
  if ((int64_t)run * M3_RUN >= n_in) return;
  m3_decode_run(TYPE, weight + ids[blockIdx.x] * row_bytes, run, n_in, values);
  for (int j = 0; j < M3_RUN && (int64_t)run * M3_RUN + j < n_in; j++)
    out[(int64_t)blockIdx.x * n_in + run * M3_RUN + j] = values[j];
}

void m3_cuda_embed(const m3_context *c, const m3_embed_params *p) {
  m3_device_state *s = c->state;
  const m3_tensor *t = p->embd->tensor;
  int32_t n_in = (int32_t)t->ne[0];
  dim3 grid((unsigned)p->rows->n, m3_blocks_for(n_in, (int64_t)M3_RUN * (int64_t)M3_THREADS));
  const char *weight = (const char *)p->embd->device;
  int64_t row_bytes = m3_row_bytes(t->type, n_in);
  switch (t->type) {
#define TYPE(name)                                                                                               \
  case M3_TYPE_##name:                                                                                           \
    decode_rows<M3_TYPE_##name><<<grid, M3_THREADS, 0, s->stream>>>(weight, row_bytes, s->ids, n_in, p->hidden); \
    break;
    M3_WEIGHT_TYPES(TYPE)
#undef TYPE
    default: m3_note(s, cudaErrorNotSupported, "an embedding of an unknown type");
  }
  m3_launched(s, "embedding");
}
