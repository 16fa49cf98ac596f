/* Softmax attention over listed blocks, or over all.
 *
 * The keys that a row reads stand in the order of its list, one after the other. They are cut into chunks of a fixed
 * size; a chunk is a softmax of its own with a running maximum, and the chunks are joined in their order. So a row gets
 * the same bits whether one thread block does all of it (many rows) or one for each chunk (few rows), and whatever else
 * is in the batch. */
#include "cuda/hopper.cuh"
#include "cuda/state.cuh"
#include "cuda/tables.cuh"

/* Keys of a chunk and of a tile; query heads of a thread block. Tiles and heads are fewer where heads are wide. */
enum { CHUNK = 256, MAX_KEYS = 64, MAX_HEADS = 16, TILE_FLOATS = 8192, QUERY_FLOATS = 2048 };

/* Thread blocks that keep a GPU at work: fewer are cut into chunks. */
enum { ENOUGH_BLOCKS = 512 };

struct attention_params {
  m3_places places;
  const float *q; /* [n, n_head, dim] */
  const char *k, *v;
  int64_t row_bytes;
  const int32_t *blocks; /* [n, n_head_kv, top_k] or NULL */
  float *out;            /* [n, n_head, dim] */
  float *mass;           /* [n, n_head, top_k] or NULL */
  int32_t n_head, n_head_kv, dim, block_size, top_k;
  int32_t heads;  /* query heads of a thread block: all of a group, or part of it */
  int32_t pieces; /* thread blocks that share a group */
  int32_t keys;   /* of a tile */
  float scale;
  int32_t chunks; /* of a row, when each has its thread block; else 0 */
  float *parts;   /* [n, n_head, chunks, dim + 2]: sums, maximum, sum of exponentials */
};

/* Of shared memory. Rows of q and of the tile are padded to four floats, and heads to four, with zeros. */
struct attention_buffers {
  float *q;     /* [heads, width] */
  float *sum;   /* [heads, dim] of the chunk */
  float *total; /* [heads, dim] of the chunks before */
  float *tile;  /* [keys, width + 4] */
  float *p;     /* [heads, keys] scores, then their exponentials */
  float *max, *all,
      *shrink; /* [heads] of the chunk: maximum, sum of exponentials, what older sums are multiplied with */
  float *total_max, *total_all;
  int64_t *rows; /* [keys] of the tile in the cache */
  int32_t width;
};

/* What a thread block works on. */
struct attention_work {
  int32_t row, kv_head, head, heads;
  const int32_t *list; /* NULL: all blocks */
  int32_t n_keys;
};

static __host__ __device__ int32_t up_to_4(int32_t n) { return (n + 3) & ~3; }

static size_t shared_floats(const attention_params &p) {
  int32_t heads = up_to_4(p.heads), width = up_to_4(p.dim);
  return (size_t)(heads * width + 2 * p.heads * p.dim + p.keys * (width + 4) + heads * p.keys + 5 * heads + 2 * p.keys +
                  2);
}

__device__ static attention_buffers lay_out(const attention_params &p, float *shared) {
  attention_buffers b;
  int32_t heads = up_to_4(p.heads);
  b.width = up_to_4(p.dim);
  b.q = shared;
  b.tile = b.q + heads * b.width;
  b.sum = b.tile + p.keys * (b.width + 4);
  b.total = b.sum + p.heads * p.dim;
  b.p = b.total + p.heads * p.dim;
  b.max = b.p + heads * p.keys;
  b.all = b.max + heads;
  b.shrink = b.all + heads;
  b.total_max = b.shrink + heads;
  b.total_all = b.total_max + heads;
  b.rows = (int64_t *)(((uintptr_t)(b.total_all + heads) + 7) & ~(uintptr_t)7);
  return b;
}

__device__ static attention_work work_of(const attention_params &p) {
  attention_work w;
  int32_t group = p.n_head / p.n_head_kv;
  w.row = (int32_t)blockIdx.x;
  w.kv_head = (int32_t)blockIdx.y / p.pieces;
  w.head = w.kv_head * group + (int32_t)blockIdx.y % p.pieces * p.heads;
  w.heads = min(p.heads, (w.kv_head + 1) * group - w.head);
  int64_t pos = p.places.pos[w.row], n = pos / p.block_size + 1, last = n - 1;
  w.list = NULL;
  if (p.blocks) {
    w.list = p.blocks + ((int64_t)w.row * p.n_head_kv + w.kv_head) * p.top_k;
    for (n = 0; n < p.top_k && w.list[n] >= 0; n++) continue;
    last = n ? w.list[n - 1] : 0;
  }
  /* Only the row's own block, which is the last if it is listed, is not seen to its end. */
  int64_t in_last = pos + 1 - last * p.block_size;
  w.n_keys = n ? (int32_t)((n - 1) * p.block_size + (in_last < p.block_size ? in_last : p.block_size)) : 0;
  return w;
}

/* Where the keys first .. first + n - 1 in the order of the list stand in the cache. */
__device__ static void find_rows(const attention_params &p, const attention_work &w, int32_t first, int32_t n,
                                 const attention_buffers &b) {
  for (int32_t j = threadIdx.x; j < n; j += blockDim.x) {
    int64_t block = (first + j) / p.block_size;
    if (w.list) block = w.list[block];
    b.rows[j] =
        (m3_page_of(p.places, w.row, block) * p.n_head_kv + w.kv_head) * p.block_size + (first + j) % p.block_size;
  }
}

/* Those keys, or their values. Several loads of a thread are under way at a time. */
template <int TYPE>
__device__ static void load_tile(const attention_params &p, const char *base, int32_t n, const attention_buffers &b) {
  enum { AT_ONCE = 4 };
  int32_t runs = (p.dim + M3_RUN - 1) / M3_RUN;
  for (int32_t i = threadIdx.x; i < n * runs; i += AT_ONCE * blockDim.x) {
    float values[AT_ONCE][M3_RUN];
#pragma unroll
    for (int32_t u = 0; u < AT_ONCE; u++) {
      int32_t at = i + u * blockDim.x;
      if (at < n * runs) m3_decode_run(TYPE, base + b.rows[at / runs] * p.row_bytes, at % runs, p.dim, values[u]);
    }
#pragma unroll
    for (int32_t u = 0; u < AT_ONCE; u++) {
      int32_t at = i + u * blockDim.x, run = at % runs;
      if (at >= n * runs) break;
      float4 *out = (float4 *)(b.tile + at / runs * (b.width + 4) + run * M3_RUN);
      out[0] = make_float4(values[u][0], values[u][1], values[u][2], values[u][3]);
      if (run * M3_RUN + M3_RUN <= b.width)
        out[1] = make_float4(values[u][4], values[u][5], values[u][6], values[u][7]);
    }
  }
}

/* Scores of n keys for all heads: a thread takes a key and four heads at a time. */
__device__ static void score_tile(const attention_params &p, int32_t heads, int32_t n, const attention_buffers &b) {
  for (int32_t i = threadIdx.x; i < n * up_to_4(heads) / 4; i += blockDim.x) {
    int32_t j = i % n, g = i / n * 4;
    const float4 *k = (const float4 *)(b.tile + j * (b.width + 4)), *q = (const float4 *)(b.q + g * b.width);
    int32_t quads = b.width / 4;
    float s[4] = {0, 0, 0, 0};
    for (int32_t d = 0; d < quads; d++) {
      float4 x = k[d];
#pragma unroll
      for (int32_t h = 0; h < 4; h++) {
        float4 y = q[h * quads + d];
        s[h] = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, s[h]))));
      }
    }
#pragma unroll
    for (int32_t h = 0; h < 4; h++) b.p[(g + h) * p.keys + j] = s[h] * p.scale;
  }
}

/* Takes n scores of each head into the softmax of the chunk. A warp for each head. */
__device__ static void absorb(const attention_params &p, int32_t heads, int32_t n, const attention_buffers &b) {
  int32_t lane = threadIdx.x % M3_WARP;
  for (int32_t g = threadIdx.x / M3_WARP; g < heads; g += blockDim.x / M3_WARP) {
    float *scores = b.p + g * p.keys, before = b.max[g], largest = before, sum = 0;
    for (int32_t j = lane; j < n; j += M3_WARP) largest = fmaxf(largest, scores[j]);
    largest = m3_warp_max(largest);
    for (int32_t j = lane; j < n; j += M3_WARP) {
      scores[j] = expf(scores[j] - largest);
      sum += scores[j];
    }
    sum = m3_warp_sum(sum);
    __syncwarp(); /* all lanes have read b.max[g] */
    if (lane == 0) {
      float shrink = expf(before - largest);
      b.max[g] = largest;
      b.all[g] = b.all[g] * shrink + sum;
      b.shrink[g] = shrink;
    }
  }
}

/* sum = sum * shrink + p v, keys in their order; a thread takes four channels of a head. */
__device__ static void add_values(const attention_params &p, int32_t heads, int32_t n, const attention_buffers &b) {
  int32_t quads = b.width / 4;
  for (int32_t i = threadIdx.x; i < heads * quads; i += blockDim.x) {
    int32_t g = i / quads, d = i % quads * 4, left = p.dim - d;
    float shrink = b.shrink[g], *sum = b.sum + g * p.dim + d, s[4];
    const float *weight = b.p + g * p.keys;
#pragma unroll
    for (int32_t e = 0; e < 4; e++) s[e] = e < left ? sum[e] * shrink : 0;
#pragma unroll 4
    for (int32_t j = 0; j < n; j++) {
      float4 v = *(const float4 *)(b.tile + j * (b.width + 4) + d);
      float w = weight[j];
      s[0] = fmaf(w, v.x, s[0]), s[1] = fmaf(w, v.y, s[1]), s[2] = fmaf(w, v.z, s[2]), s[3] = fmaf(w, v.w, s[3]);
    }
#pragma unroll
    for (int32_t e = 0; e < 4; e++)
      if (e < left) sum[e] = s[e];
  }
}

/* Joins softmaxes: what the older and the newer sums are multiplied with. Both ways to compute a row join by these. */
struct joint {
  float max, older, newer;
};

__device__ static inline joint join(float older, float newer) {
  float max = fmaxf(older, newer);
  return joint{max, expf(older - max), expf(newer - max)};
}

__device__ static inline float joined(joint j, float older, float newer) { return older * j.older + newer * j.newer; }

/* One chunk from nothing. */
template <int TYPE>
__device__ static void attend_chunk(const attention_params &p, const attention_work &w, int32_t chunk,
                                    const attention_buffers &b) {
  for (int32_t i = threadIdx.x; i < w.heads * p.dim; i += blockDim.x) b.sum[i] = 0;
  for (int32_t g = threadIdx.x; g < w.heads; g += blockDim.x) b.max[g] = -INFINITY, b.all[g] = 0;
  int32_t end = min((chunk + 1) * CHUNK, w.n_keys);
  for (int32_t first = chunk * CHUNK; first < end; first += p.keys) {
    int32_t n = min(p.keys, end - first);
    __syncthreads();
    find_rows(p, w, first, n, b);
    __syncthreads();
    load_tile<TYPE>(p, p.k, n, b);
    __syncthreads();
    score_tile(p, w.heads, n, b);
    __syncthreads();
    load_tile<TYPE>(p, p.v, n, b);
    absorb(p, w.heads, n, b);
    __syncthreads();
    add_values(p, w.heads, n, b);
  }
  __syncthreads();
}

/* Shares of the listed blocks, from the maximum and the sum of all: the scores once more. */
template <int TYPE>
__device__ static void share_out(const attention_params &p, const attention_work &w, const attention_buffers &b) {
  float *mass = p.mass + ((int64_t)w.row * p.n_head + w.head) * p.top_k;
  int32_t lane = threadIdx.x % M3_WARP, warps = blockDim.x / M3_WARP;
  for (int32_t i = threadIdx.x; i < w.heads * p.top_k; i += blockDim.x) mass[i] = 0;
  for (int32_t first = 0; first < w.n_keys; first += p.keys) {
    int32_t n = min(p.keys, w.n_keys - first);
    __syncthreads();
    find_rows(p, w, first, n, b);
    __syncthreads();
    load_tile<TYPE>(p, p.k, n, b);
    __syncthreads();
    score_tile(p, w.heads, n, b);
    __syncthreads();
    for (int32_t g = threadIdx.x / M3_WARP; g < w.heads; g += warps)
      for (int32_t from = 0, to; from < n; from = to) { /* the keys of one block */
        int32_t block = (first + from) / p.block_size;
        to = min(n, (block + 1) * p.block_size - first);
        float sum = 0;
        for (int32_t j = from + lane; j < to; j += M3_WARP) sum += expf(b.p[g * p.keys + j] - b.total_max[g]);
        sum = m3_warp_sum(sum);
        if (lane == 0) mass[g * p.top_k + block] += sum / b.total_all[g];
      }
  }
}

template <int TYPE>
__global__ static void __launch_bounds__(M3_THREADS) attend(attention_params p) {
  extern __shared__ __align__(16) float shared[];
  attention_buffers b = lay_out(p, shared);
  attention_work w = work_of(p);
  int64_t first = ((int64_t)w.row * p.n_head + w.head) * p.dim;
  if (p.chunks && (int32_t)blockIdx.z * CHUNK >= w.n_keys) return;
  for (int32_t i = threadIdx.x; i < up_to_4(w.heads) * b.width; i += blockDim.x) {
    int32_t g = i / b.width, d = i % b.width;
    b.q[i] = g < w.heads && d < p.dim ? p.q[first + g * p.dim + d] : 0;
  }
  if (p.chunks) {
    attend_chunk<TYPE>(p, w, blockIdx.z, b);
    for (int32_t i = threadIdx.x; i < w.heads * (p.dim + 2); i += blockDim.x) {
      int32_t g = i / (p.dim + 2), d = i % (p.dim + 2);
      int64_t head = (int64_t)w.row * p.n_head + w.head + g;
      p.parts[(head * p.chunks + blockIdx.z) * (p.dim + 2) + d] = d < p.dim    ? b.sum[g * p.dim + d]
                                                                  : d == p.dim ? b.max[g]
                                                                               : b.all[g];
    }
    return;
  }
  for (int32_t i = threadIdx.x; i < w.heads * p.dim; i += blockDim.x) b.total[i] = 0;
  for (int32_t g = threadIdx.x; g < w.heads; g += blockDim.x) b.total_max[g] = -INFINITY, b.total_all[g] = 0;
  for (int32_t chunk = 0; chunk * CHUNK < w.n_keys; chunk++) {
    attend_chunk<TYPE>(p, w, chunk, b);
    for (int32_t i = threadIdx.x; i < w.heads * p.dim; i += blockDim.x) {
      joint j = join(b.total_max[i / p.dim], b.max[i / p.dim]);
      b.total[i] = joined(j, b.total[i], b.sum[i]);
    }
    __syncthreads();
    for (int32_t g = threadIdx.x; g < w.heads; g += blockDim.x) {
      joint j = join(b.total_max[g], b.max[g]);
      b.total_all[g] = joined(j, b.total_all[g], b.all[g]);
      b.total_max[g] = j.max;
    }
    __syncthreads();
  }
  for (int32_t i = threadIdx.x; i < w.heads * p.dim; i += blockDim.x)
    p.out[first + i] = b.total[i] / b.total_all[i / p.dim];
  if (p.mass) share_out<TYPE>(p, w, b);
}

/* Joins the chunks of a head, each of which had a thread block. */
__global__ static void join_chunks(attention_params p) {
  int32_t row = (int32_t)blockIdx.x, head = (int32_t)blockIdx.y;
  int64_t at = (int64_t)row * p.n_head + head;
  int64_t pos = p.places.pos[row], n = pos / p.block_size + 1, last = n - 1;
  if (p.blocks) {
    const int32_t *list = p.blocks + ((int64_t)row * p.n_head_kv + head / (p.n_head / p.n_head_kv)) * p.top_k;
    for (n = 0; n < p.top_k && list[n] >= 0; n++) continue;
    last = n ? list[n - 1] : 0;
  }
  int64_t in_last = pos + 1 - last * p.block_size;
  int64_t keys = n ? (n - 1) * p.block_size + (in_last < p.block_size ? in_last : p.block_size) : 0;
  for (int32_t d = threadIdx.x; d < p.dim; d += blockDim.x) {
    float max = -INFINITY, all = 0, sum = 0;
    for (int64_t chunk = 0; chunk * CHUNK < keys; chunk++) {
      const float *part = p.parts + (at * p.chunks + chunk) * (p.dim + 2);
      joint j = join(max, part[p.dim]);
      sum = joined(j, sum, part[d]);
      all = joined(j, all, part[p.dim + 1]);
      max = j.max;
    }
    p.out[at * p.dim + d] = sum / all;
  }
}

template <int TYPE>
static void launch(m3_device_state *s, const attention_params &p, dim3 grid) {
  size_t shared = shared_floats(p) * sizeof(float); /* at most 74 KiB, which every GPU since sm_80 has */
  m3_note(s, cudaFuncSetAttribute(attend<TYPE>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared), "attention");
  attend<TYPE><<<grid, M3_THREADS, shared, s->stream>>>(p);
}

int64_t m3_cuda_attention_floats(const m3_hparams *h, int64_t blocks) {
  return h->n_head * ((blocks * h->block_size + CHUNK - 1) / CHUNK) * (h->head_dim + 2);
}

void m3_cuda_attend(const m3_context *c, const m3_attend_params *p) {
  const m3_hparams *h = c->hparams;
  m3_device_state *s = c->state;
  if (s->hopper.attend && !p->mass) return m3_hopper_attend(c, p);
  int32_t group = h->n_head / h->n_head_kv;
  attention_params a = {};
  a.places = m3_places_of(s);
  a.q = c->scratch->q;
  a.k = (const char *)p->cache.k;
  a.v = (const char *)p->cache.v;
  a.row_bytes = m3_row_bytes(p->cache.kv_type, h->head_dim);
  a.blocks = p->blocks;
  a.out = p->out;
  a.mass = p->mass;
  a.n_head = h->n_head;
  a.n_head_kv = h->n_head_kv;
  a.dim = h->head_dim;
  a.block_size = h->block_size;
  a.top_k = h->top_k;
  a.heads = QUERY_FLOATS / h->head_dim;
  if (a.heads > MAX_HEADS) a.heads = MAX_HEADS;
  if (a.heads > group) a.heads = group;
  a.pieces = (group + a.heads - 1) / a.heads;
  a.keys = TILE_FLOATS / h->head_dim;
  if (a.keys > MAX_KEYS) a.keys = MAX_KEYS;
  a.scale = 1.0f / sqrtf((float)h->head_dim);
  dim3 grid((unsigned)p->rows->n, (unsigned)(h->n_head_kv * a.pieces));
  int64_t keys = s->max_blocks * h->block_size, listed = (int64_t)h->top_k * h->block_size;
  if (p->blocks && keys > listed) keys = listed;
  int64_t chunks = (keys + CHUNK - 1) / CHUNK;
  bool few = (int64_t)grid.x * grid.y < ENOUGH_BLOCKS && chunks > 1 && !p->mass;
  if (few && p->rows->n * h->n_head * chunks * (h->head_dim + 2) <= s->attention_floats && chunks <= 65535) {
    a.chunks = (int32_t)chunks;
    a.parts = s->attention_parts;
    grid.z = (unsigned)chunks;
  }
  switch (p->cache.kv_type) {
    case M3_TYPE_F32: launch<M3_TYPE_F32>(s, a, grid); break;
    case M3_TYPE_F16: launch<M3_TYPE_F16>(s, a, grid); break;
    case M3_TYPE_BF16: launch<M3_TYPE_BF16>(s, a, grid); break;
    case M3_TYPE_Q8_0: launch<M3_TYPE_Q8_0>(s, a, grid); break;
    default: launch<M3_TYPE_Q4_0>(s, a, grid); break;
  }
  if (a.chunks) join_chunks<<<dim3((unsigned)p->rows->n, (unsigned)h->n_head), 128, 0, s->stream>>>(a);
  m3_launched(s, "attention");
}
