/* Products with few rows. Each warp keeps a ring of pieces of weights under way to its shared memory: pieces of 1024
 * columns of two or four rows of the weight, as they stand in the file. A lane multiplies a unit of 32 weights
 * (units.cuh) by bytes; the lanes' sums are added in one tree, and those of the pieces in the order of the columns, so
 * that what a row gets depends neither on the rows beside it nor on how rows of the weight are spread over blocks and
 * warps. */
#include "cuda/few_rows.cuh"
#include "cuda/launch.cuh"
#include "cuda/pieces.cuh"
#include "cuda/swiglu.cuh"
#include "cuda/types.cuh"

enum {
  WARPS = 12, /* one block is at work on a multiprocessor */
  THREADS = WARPS * M3_WARP,
  MOST_PARTIALS = 8192,
  X_AT_ONCE = 4, /* four columns each, that a thread has under way */
};

struct few_part {
  const char *weight, *up; /* up or NULL */
  int64_t expert_bytes, row_bytes;
  float *y;
  int64_t ldy;
  int32_t type, n_out;
  int32_t groups; /* of rows of x, or experts */
  bool shared;
  int32_t rows; /* of the weight, for a block */
  unsigned first_block;
};

struct few_params {
  few_part parts[M3_PRODUCT_PARTS];
  int32_t n_parts, n_in, n;
  bool add;
  const float *x;
  const float *norm;
  float eps;
  float *normed;
  const int32_t *experts;
  int32_t used;
  const float *sum_weights;
  const m3_row_group *groups;
  const int32_t *n_groups;
  const int32_t *gather;
  float limit, alpha; /* of SwiGLU */
  uint32_t x_offset, partial_offset;
};

/* ------------------------------------------------------------------------------------------------ rows of x */

__device__ static inline const float *row_of_x(const few_params &p, const m3_row_group &g, int32_t r) {
  if (p.experts) return p.x + (p.sum_weights ? (int64_t)r * p.n_in : 0);
  int32_t row = g.first + min(r, g.count - 1);
  return p.x + (int64_t)(p.gather ? p.gather[row] : row) * p.n_in;
}

__device__ static __forceinline__ float squares(float4 v, float sum) {
  sum = fmaf(v.x, v.x, sum), sum = fmaf(v.y, v.y, sum), sum = fmaf(v.z, v.z, sum);
  return fmaf(v.w, v.w, sum);
}

/* `rows` rows of x to shared memory, as floats or rounded; `writes`: and their norm to memory, if it is wanted. */
__device__ static __noinline__ void bring_x(const few_params &p, const m3_row_group &g, int32_t rows, bool floats,
                                            bool writes, char *out) {
  __shared__ float work[WARPS + 1];
  constexpr int32_t LOT = 4 * THREADS * X_AT_ONCE;
  int32_t own = 4 * (int32_t)threadIdx.x;
  float4 weight[X_AT_ONCE];
  auto load = [&](const float *from, int32_t base, float4(&v)[X_AT_ONCE]) {
#pragma unroll
    for (int i = 0; i < X_AT_ONCE; i++) {
      int32_t column = base + own + 4 * THREADS * i;
      v[i] = column < p.n_in ? *(const float4 *)(from + column) : make_float4(0, 0, 0, 0);
    }
  };
  if (p.norm) load(p.norm, 0, weight);
  m3_wait_for_previous();
  for (int32_t r = 0; r < rows; r++) {
    const float *x = row_of_x(p, g, r);
    float4 v[X_AT_ONCE];
    load(x, 0, v);
    float factor = 1;
    if (p.norm) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < X_AT_ONCE; i++) sum = squares(v[i], sum);
      for (int32_t i = LOT + own; i < p.n_in; i += 4 * THREADS) sum = squares(*(const float4 *)(x + i), sum);
      factor = 1.0f / sqrtf(m3_block_sum(sum, work) / (float)p.n_in + p.eps);
    }
    m3_rounded_row to = m3_rounded_at(out + (int64_t)r * m3_rounded_bytes(p.n_in), p.n_in);
    for (int32_t base = 0; base < p.n_in; base += LOT) {
      if (base) load(x, base, v);
      if (base && p.norm) load(p.norm, base, weight);
#pragma unroll
      for (int i = 0; i < X_AT_ONCE; i++) {
        int32_t column = base + own + 4 * THREADS * i;
        if (column >= p.n_in) break;
        if (p.norm) {
          float4 w = weight[i];
          v[i] =
              make_float4(v[i].x * factor * w.x, v[i].y * factor * w.y, v[i].z * factor * w.z, v[i].w * factor * w.w);
          if (writes && r < g.count) *(float4 *)(p.normed + (int64_t)(g.first + r) * p.n_in + column) = v[i];
        }
        if (floats) {
          *(float4 *)(out + ((int64_t)r * p.n_in + column) * sizeof(float)) = v[i];
          continue;
        }
        m3_rounded_part part = m3_round_columns(v[i]);
        uint32_t place = place_of_column((uint32_t)column);
        *(uint32_t *)(to.high + place) = part.high;
        *(uint32_t *)(to.low + place) = part.low;
        if (column % 32 == 0) to.scale[column / 32] = part.scale;
        if (column % 16 == 0) to.half_sum[column / 16] = part.half_sum;
      }
    }
    if (p.norm && p.n_in > LOT) load(p.norm, 0, weight);
  }
}

/* ------------------------------------------------------------------------------------------------ a block */

/* The rows of the weight of a block, in lots of OUTS: with `up` half of a lot are rows of weight, half of up. Pieces
 * are numbered lots outermost, then experts of a weighted sum, then columns. */
struct lots {
  int32_t first, end; /* rows of the weight (and of up) */
  int32_t n, experts, steps;
};

template <int TYPE, int ROWS>
struct reader {
  const few_part &part;
  const lots &all;
  const int32_t *experts; /* of a weighted sum, or NULL */
  int32_t expert;         /* else */
  int32_t lot, of_expert, step;
  const char *line[piece<TYPE, ROWS>::OUTS];

  __device__ __forceinline__ void point() {
    int64_t e = experts ? experts[of_expert] : expert;
#pragma unroll
    for (int o = 0; o < piece<TYPE, ROWS>::OUTS; o++) {
      int32_t row =
          all.first + (part.up ? lot * (piece<TYPE, ROWS>::OUTS / 2) + o / 2 : lot * piece<TYPE, ROWS>::OUTS + o);
      const char *base = part.up && o % 2 ? part.up : part.weight;
      line[o] = base + e * part.expert_bytes + min(row, all.end - 1) * part.row_bytes + step * piece<TYPE, ROWS>::BYTES;
    }
  }

  __device__ __forceinline__ void start(int32_t index) {
    step = index % all.steps;
    of_expert = index / all.steps % all.experts;
    lot = index / (all.steps * all.experts);
    point();
  }

  __device__ __forceinline__ void advance() {
    if (++step < all.steps) {
#pragma unroll
      for (int o = 0; o < piece<TYPE, ROWS>::OUTS; o++) line[o] += piece<TYPE, ROWS>::BYTES;
      return;
    }
    step = 0;
    if (++of_expert == all.experts) of_expert = 0, lot++;
    point();
  }

  /* Sends the piece on its way, in whole 16 bytes (see take in backend.cu); returns where in the first ones each line
   * begins, four bits each. */
  __device__ __forceinline__ uint32_t fetch(uint32_t to) const {
    using P = piece<TYPE, ROWS>;
    int32_t bytes = min((int32_t)P::BYTES, (int32_t)part.row_bytes - step * P::BYTES);
    uint32_t skews = 0, lane = threadIdx.x % M3_WARP;
    to += 16 * lane;
#pragma unroll
    for (int o = 0; o < P::OUTS; o++) {
      uint32_t skew = (uint32_t)(uintptr_t)line[o] & 15;
      const char *from = (const char *)((uintptr_t)line[o] & ~(uintptr_t)15) + 16 * lane;
      int32_t rest = bytes + (int32_t)skew - 16 * (int32_t)lane;
#pragma unroll
      for (int i = 0; i < (P::BYTES + 15 + 511) / 512; i++)
        if (rest > 512 * i) copy_16(to + (uint32_t)(o * P::SLOT + 512 * i), from + 512 * i);
      skews |= skew << 4 * o;
    }
    return skews;
  }
};

/* Adds up the pieces of row o of a lot. */
__device__ static inline float total(const float *partial, const lots &all, int32_t lot, int32_t expert, int outs,
                                     int rows, int o, int r) {
  partial += (lot * all.experts + expert) * all.steps * outs * rows + o * rows + r;
  float sum = 0;
#pragma unroll 4
  for (int32_t i = 0; i < all.steps; i++) sum += partial[i * outs * rows];
  return sum;
}

template <int ROWS>
__device__ static __noinline__ void write_results(const few_params &p, const few_part &part, const m3_row_group &g,
                                                  const lots &all, int outs, const float *partial) {
  int32_t width = all.end - all.first;
  for (int32_t i = threadIdx.x; i < width * ROWS; i += THREADS) {
    int32_t j = i % width, r = i / width;
    if (r >= g.count) break;
    float *y = part.y + (int64_t)(g.first + r) * part.ldy + all.first + j;
    float before = p.add || p.sum_weights ? *y : 0;
    if (part.up) {
      int32_t pairs = outs / 2, lot = j / pairs, o = j % pairs * 2;
      float gate = total(partial, all, lot, 0, outs, ROWS, o, r);
      *y = m3_swiglu(gate, total(partial, all, lot, 0, outs, ROWS, o + 1, r), p.limit, p.alpha);
    } else if (p.sum_weights) {
      float sum = 0;
      for (int32_t e = 0; e < p.used; e++)
        sum = fmaf(p.sum_weights[e], total(partial, all, j / outs, e, outs, ROWS, j % outs, r), sum);
      *y = before + sum;
    } else {
      float v = total(partial, all, j / outs, 0, outs, ROWS, j % outs, r);
      *y = p.add ? before + v : v;
    }
  }
}

template <int TYPE, int ROWS>
__device__ static __forceinline__ void multiply_block(const few_params &p, const few_part &part, m3_row_group g,
                                                      int32_t first, char *shared) {
  using P = piece<TYPE, ROWS>;
  constexpr int OUTS = P::OUTS;
  uint32_t lane = threadIdx.x % M3_WARP, warp = threadIdx.x / M3_WARP;
  lots all = {first, min(first + part.rows, part.n_out)};
  int32_t in_lot = part.up ? OUTS / 2 : OUTS;
  all.n = (all.end - first + in_lot - 1) / in_lot;
  all.experts = p.sum_weights ? p.used : 1;
  all.steps = (p.n_in + P::COLUMNS - 1) / P::COLUMNS;
  int32_t pieces = all.n * all.experts * all.steps;
  int32_t next = pieces * (int32_t)warp / WARPS, end = pieces * ((int32_t)warp + 1) / WARPS, fetched = next;
  reader<TYPE, ROWS> ahead = {part, all, p.sum_weights ? p.experts : NULL, g.expert};
  if (next < end) ahead.start(next);
  char *ring = shared + warp * ring_bytes(ROWS);
  uint32_t ring_at = (uint32_t)__cvta_generic_to_shared(ring), to = 0;
  uint64_t skews = 0;
  auto fetch = [&] {
    uint32_t skew = 0;
    if (fetched < end) {
      skew = ahead.fetch(ring_at + to * (OUTS * P::SLOT));
      if (++fetched < end) ahead.advance();
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    skews = skews << 16 | skew;
    if (++to == P::SLOTS) to = 0;
  };
  for (int i = 0; i < P::AHEAD; i++) fetch();
  bool writes = p.normed && first == 0 && &part == &p.parts[0];
  bring_x(p, g, p.sum_weights ? p.used : ROWS, P::FLOATS, writes, shared + p.x_offset);
  __syncthreads();
  float *partial = (float *)(shared + p.partial_offset);
  uint32_t slot = 0;
  int32_t step = next % all.steps, expert = next / all.steps % all.experts;
  uint32_t x_bytes = (uint32_t)(P::FLOATS ? p.n_in * (int32_t)sizeof(float) : m3_rounded_bytes(p.n_in));
  uint32_t padded = (uint32_t)m3_rounded_columns(p.n_in);
  lane_places places = places_of_lane<TYPE>(p.n_in);
  for (; next < end; next++) {
    wait_for_copies<P::AHEAD - 1>();
    __syncwarp();
    fetch();
    const char *w = ring + slot * (OUTS * P::SLOT), *x = shared + p.x_offset + (uint32_t)expert * x_bytes;
    uint32_t skew = (uint32_t)(skews >> 16 * P::AHEAD);
    float sum[OUTS * ROWS];
#pragma unroll
    for (int i = 0; i < OUTS * ROWS; i++) sum[i] = 0;
    if constexpr (P::FLOATS) {
      const char *lines[OUTS];
#pragma unroll
      for (int o = 0; o < OUTS; o++) lines[o] = w + o * P::SLOT;
      add_floats<TYPE, ROWS>(lines, x, p.n_in, step * P::COLUMNS, sum);
    } else {
      uint32_t unit = (uint32_t)step * M3_WARP + lane;
      if (unit < (uint32_t)p.n_in / 32) {
        m3_unit u[OUTS];
#pragma unroll
        for (int o = 0; o < OUTS; o++)
          m3_load_unit<TYPE, true>((const uint8_t *)w + o * P::SLOT + (skew >> 4 * o & 15), lane, &u[o]);
        add_unit<TYPE, ROWS>(u, x, places, padded, x_bytes, step, sum);
      }
    }
    float v = sum_of_lanes(sum);
    constexpr uint32_t SHARE = M3_WARP / (OUTS * ROWS);
    if (lane % SHARE == 0) partial[next * OUTS * ROWS + (int32_t)(lane / SHARE)] = v;
    if (++slot == P::SLOTS) slot = 0;
    if (++step == all.steps) {
      step = 0;
      if (++expert == all.experts) expert = 0;
    }
  }
  __syncthreads();
  write_results<ROWS>(p, part, g, all, OUTS, partial);
}

template <int ROWS>
__global__ static void __launch_bounds__(THREADS, 1) multiply_few(const __grid_constant__ few_params p) {
  extern __shared__ __align__(16) char shared[];
  m3_let_next_begin();
  int which = 0;
  for (int i = 1; i < p.n_parts; i++)
    if (blockIdx.x >= p.parts[i].first_block) which = i;
  const few_part &part = p.parts[which];
  int32_t block = (int32_t)(blockIdx.x - part.first_block), group = block % part.groups;
  m3_row_group g = {0, group * ROWS, min(ROWS, p.n - group * ROWS)};
  if ((p.groups || p.experts) && !part.shared) m3_wait_for_previous(); /* they say which weights */
  if (p.groups) {
    if (group >= *p.n_groups) return;
    g = p.groups[group];
  } else if (p.experts && !p.sum_weights && !part.shared) {
    g = {p.experts[group], group, 1};
  }
  int32_t first = block / part.groups * part.rows;
  switch (part.type) {
#define TYPE(name) \
  case M3_TYPE_##name: multiply_block<M3_TYPE_##name, ROWS>(p, part, g, first, shared); break;
    M3_WEIGHT_TYPES(TYPE)
#undef TYPE
  }
}

/* ------------------------------------------------------------------------------------------------ launch */

static bool is_float(int32_t type) { return type == M3_TYPE_F32 || type == M3_TYPE_F16 || type == M3_TYPE_BF16; }

static int outs_of(int32_t type, int32_t rows) {
  return outs_of_piece(is_float(type) ? 1024 : (int)m3_row_bytes(type, 1024), rows);
}

static int columns_of(int32_t type) {
  return type == M3_TYPE_F32 ? 256 : type == M3_TYPE_F16 || type == M3_TYPE_BF16 ? 512 : 1024;
}

static void (*kernel_for(int32_t rows))(few_params) {
  switch (rows) {
    case 1: return multiply_few<1>;
    case 2: return multiply_few<2>;
    case 4: return multiply_few<4>;
    default: return multiply_few<8>;
  }
}

cudaError_t m3_cuda_few_rows_setup() {
  int most = 0, device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  for (int32_t rows = 1; rows <= M3_FEW_ROWS && error == cudaSuccess; rows *= 2) {
    cudaFuncAttributes a;
    error = cudaFuncGetAttributes(&a, (const void *)kernel_for(rows));
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute((const void *)kernel_for(rows), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   most - (int)a.sharedSizeBytes);
  }
  return error;
}

/* Rows of whole runs of 16 bytes. */
static bool has_even_rows(const m3_tensor *t) {
  return !is_float(t->type) || m3_row_bytes(t->type, t->ne[0]) % 16 == 0;
}

static uint32_t bytes_of_row(const m3_tensor *t) {
  return is_float(t->type) ? (uint32_t)t->ne[0] * 4 : (uint32_t)m3_rounded_bytes((int32_t)t->ne[0]);
}

/* None on a GPU with less than some 150 KiB of shared memory. */
static uint32_t room_for_x(const m3_device_state *s, int32_t rows) {
  uint32_t taken = (uint32_t)(WARPS * ring_bytes(rows) + 4 * MOST_PARTIALS);
  return s->shared_bytes > taken ? s->shared_bytes - taken : 0;
}

bool m3_cuda_takes_few_rows(const m3_context *c, const m3_weight *weight, int32_t n, int32_t held) {
  const m3_tensor *t = weight->tensor;
  return !c->state->exact && n <= M3_FEW_ROWS && has_even_rows(t) && t->ne[0] % 4 == 0 &&
         (uint64_t)bytes_of_row(t) * (uint64_t)held <= room_for_x(c->state, 1);
}

/* Gives each block its rows, by the bytes of the weights and so that the blocks are at work together, in as few waves
 * as the room for sums of pieces allows; returns the blocks. at_work: groups that are taken to have rows, or 0 for all.
 */
static unsigned spread(const m3_device_state *s, few_params *f, int32_t rows, int32_t at_work, int64_t *partials) {
  double bytes = 0;
  for (int i = 0; i < f->n_parts; i++)
    bytes += (double)f->parts[i].n_out * (double)f->parts[i].row_bytes * (at_work ? at_work : f->parts[i].groups);
  unsigned blocks;
  for (int waves = 1;; waves++) {
    double at_once = (double)(s->multiprocessors * waves) / bytes;
    bool fits = true;
    blocks = 0;
    *partials = 0;
    for (int i = 0; i < f->n_parts; i++) {
      few_part *part = &f->parts[i];
      int32_t lot = part->up ? outs_of(part->type, rows) / 2 : outs_of(part->type, rows);
      double share = fmax(at_once * (double)part->n_out * (double)part->row_bytes, 1);
      part->rows = (int32_t)ceil((double)part->n_out / share / lot) * lot;
      part->first_block = blocks;
      blocks += m3_blocks_for(part->n_out, part->rows) * (unsigned)part->groups;
      int64_t sums = (int64_t)part->rows * (part->up ? 2 : 1) * (f->sum_weights ? f->used : 1) * rows *
                     ((f->n_in + columns_of(part->type) - 1) / columns_of(part->type));
      fits &= sums <= MOST_PARTIALS || part->rows == lot;
      if (sums > *partials) *partials = sums;
    }
    if (fits) return blocks;
  }
}

bool m3_cuda_few_rows(const m3_context *c, const m3_few_product *p) {
  m3_device_state *s = c->state;
  few_params f = {};
  uint32_t row_bytes = 0; /* of x */
  f.n_parts = p->n_parts;
  f.n_in = (int32_t)p->parts[0].weight->tensor->ne[0];
  for (int i = 0; i < p->n_parts; i++) {
    const m3_few_part *part = &p->parts[i];
    const m3_tensor *t = part->weight->tensor;
    if (!m3_cuda_takes_few_rows(c, part->weight, p->n, 1)) return false;
    if (part->up && part->up->tensor->type != t->type) return false;
    if (bytes_of_row(t) > row_bytes) row_bytes = bytes_of_row(t);
    f.parts[i] = few_part{(const char *)part->weight->device,
                          part->up ? (const char *)part->up->device : NULL,
                          (int64_t)(t->n_bytes / (uint64_t)t->ne[2]),
                          m3_row_bytes(t->type, t->ne[0]),
                          part->y,
                          part->ldy,
                          t->type,
                          (int32_t)t->ne[1],
                          1,
                          part->shared,
                          0,
                          0};
  }
  f.n = p->n;
  f.add = p->add;
  f.x = p->x;
  f.norm = p->norm ? (const float *)p->norm->device : NULL;
  f.eps = c->hparams->rms_eps;
  f.normed = p->normed;
  f.experts = p->experts;
  f.used = p->used;
  f.sum_weights = p->sum_weights;
  f.groups = p->grouping ? p->grouping->groups : NULL;
  f.n_groups = p->grouping ? p->grouping->n_groups : NULL;
  f.gather = p->gather;
  f.limit = c->hparams->swiglu_limit;
  f.alpha = c->hparams->swiglu_alpha;
  int32_t rows = 1;
  if (p->grouping)
    rows = p->group_rows;
  else
    while (rows < p->n) rows *= 2;
  int32_t held = p->sum_weights ? p->used : rows;
  while (row_bytes * (uint32_t)held > room_for_x(s, rows)) {
    if (rows == 1 || p->grouping) return false;
    held = rows /= 2;
  }
  for (int i = 0; i < f.n_parts; i++)
    f.parts[i].groups = p->grouping                           ? p->max_groups
                        : p->sum_weights || f.parts[i].shared ? 1
                        : p->experts                          ? p->used
                                                              : (int32_t)m3_blocks_for(p->n, rows);
  int64_t partials;
  unsigned blocks = spread(s, &f, rows, p->grouping ? c->hparams->n_expert_used : 0, &partials);
  f.x_offset = (uint32_t)(WARPS * ring_bytes(rows));
  f.partial_offset = f.x_offset + (row_bytes * (uint32_t)held + 15) / 16 * 16;
  size_t shared = f.partial_offset + (size_t)partials * sizeof(float);
  m3_launch(s, "a product with few rows", kernel_for(rows), dim3(blocks), THREADS, shared, f);
  return true;
}
