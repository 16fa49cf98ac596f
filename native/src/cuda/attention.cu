/* Softmax attention over blocks with a running maximum, as the CPU does it: keys in the order of the list, in tiles
 * that depend on nothing but the sizes of the model, so that a row gets the same bits whatever is computed with it. */
#include "cuda/state.cuh"
#include "cuda/tables.cuh"

/* Floats of a block for queries, for sums, and for a tile of keys or values. */
enum { QUERY_FLOATS = 2048, TILE_FLOATS = 4224, MAX_KEYS = 64, MAX_HEADS = 16 };

struct attention_params {
  m3_places places;
  const float *q; /* [n, n_head, dim] */
  const char *k, *v;
  int64_t row_bytes;
  const int32_t *blocks; /* [n, n_head_kv, top_k] or NULL */
  float *out;            /* [n, n_head, dim] */
  float *mass;           /* [n, n_head, top_k] or NULL */
  int32_t n_head, n_head_kv, dim, block_size, top_k;
  int32_t heads;  /* query heads of a block: all of a group, or part of it */
  int32_t pieces; /* blocks that share a group */
  int32_t keys;   /* of a tile */
  float scale;
};

struct attention_buffers {
  float *q, *sum;   /* [heads, dim] */
  float *tile;      /* [keys, dim + 1] */
  float *p;         /* [heads, keys] */
  float *max, *all; /* [heads] running maximum and sum */
  float *shrink;    /* [heads] what older sums are multiplied with */
};

/* Rows first .. first + n - 1 of the cache to the tile. */
template <int TYPE>
__device__ static void load_tile(const attention_params &p, const char *base, int64_t first, int32_t n, float *tile) {
  int32_t runs = (p.dim + M3_RUN - 1) / M3_RUN;
  for (int32_t i = threadIdx.x; i < n * runs; i += blockDim.x) {
    int32_t row = i / runs, run = i % runs;
    float values[M3_RUN];
    m3_decode_run(TYPE, base + (first + row) * p.row_bytes, run, p.dim, values);
    for (int32_t j = 0; j < M3_RUN && run * M3_RUN + j < p.dim; j++)
      tile[row * (p.dim + 1) + run * M3_RUN + j] = values[j];
  }
}

/* Takes n scores of each head into its running softmax; p becomes exp(p - maximum). A warp for each head. */
__device__ static void absorb(const attention_params &p, const attention_buffers &b, int32_t n, float *mass,
                              int32_t listed, bool first_tile) {
  int32_t lane = threadIdx.x % M3_WARP;
  for (int32_t g = threadIdx.x / M3_WARP; g < p.heads; g += blockDim.x / M3_WARP) {
    float *scores = b.p + g * p.keys, max = b.max[g];
    float largest = -INFINITY;
    for (int32_t j = lane; j < n; j += M3_WARP) largest = fmaxf(largest, scores[j]);
    float before = max;
    max = fmaxf(max, m3_warp_max(largest));
    float shrink = expf(before - max), sum = 0;
    for (int32_t j = lane; j < n; j += M3_WARP) {
      scores[j] = expf(scores[j] - max);
      sum += scores[j];
    }
    sum = m3_warp_sum(sum);
    __syncwarp();
    if (lane == 0) {
      b.max[g] = max;
      b.all[g] = b.all[g] * shrink + sum;
      b.shrink[g] = shrink;
    }
    if (!mass) continue;
    float *shares = mass + (int64_t)g * p.top_k;
    for (int32_t i = lane; i < listed + !first_tile; i += M3_WARP) shares[i] *= shrink;
    __syncwarp();
    if (lane == 0) shares[listed] = first_tile ? sum : shares[listed] + sum;
    __syncwarp();
  }
}

/* Adds the keys of one block to the running softmax and sums of the block's heads. */
template <int TYPE>
__device__ static void attend_block(const attention_params &p, const attention_buffers &b, int32_t row, int32_t kv_head,
                                    int64_t block, int32_t listed, float *mass) {
  int64_t visible = p.places.pos[row] + 1 - block * p.block_size;
  if (visible > p.block_size) visible = p.block_size;
  int64_t first = (m3_page_of(p.places, row, block) * p.n_head_kv + kv_head) * p.block_size;
  int32_t stride = p.dim + 1;
  for (int32_t at = 0; at < visible; at += p.keys) {
    int32_t n = min(p.keys, (int32_t)visible - at);
    load_tile<TYPE>(p, p.k, first + at, n, b.tile);
    __syncthreads();
    for (int32_t i = threadIdx.x; i < p.heads * n; i += blockDim.x) {
      int32_t g = i / n, j = i % n;
      const float *q = b.q + g * p.dim, *k = b.tile + j * stride;
      float score = 0;
      for (int32_t d = 0; d < p.dim; d++) score = fmaf(q[d], k[d], score);
      b.p[g * p.keys + j] = score * p.scale;
    }
    __syncthreads();
    absorb(p, b, n, mass, listed, at == 0);
    load_tile<TYPE>(p, p.v, first + at, n, b.tile);
    __syncthreads();
    for (int32_t i = threadIdx.x; i < p.heads * p.dim; i += blockDim.x) {
      int32_t g = i / p.dim, d = i % p.dim;
      float sum = b.sum[i] * b.shrink[g];
      for (int32_t j = 0; j < n; j++) sum = fmaf(b.p[g * p.keys + j], b.tile[j * stride + d], sum);
      b.sum[i] = sum;
    }
    __syncthreads();
  }
}

template <int TYPE>
__global__ static void __launch_bounds__(M3_THREADS) attend(attention_params p) {
  extern __shared__ float shared[];
  attention_buffers b;
  b.q = shared;
  b.sum = b.q + p.heads * p.dim;
  b.tile = b.sum + p.heads * p.dim;
  b.p = b.tile + p.keys * (p.dim + 1);
  b.max = b.p + p.heads * p.keys;
  b.all = b.max + p.heads;
  b.shrink = b.all + p.heads;
  int32_t row = (int32_t)(blockIdx.x), kv_head = (int32_t)blockIdx.y / p.pieces;
  int32_t head = kv_head * (p.n_head / p.n_head_kv) + (int32_t)blockIdx.y % p.pieces * p.heads;
  int32_t end = (kv_head + 1) * (p.n_head / p.n_head_kv);
  p.heads = min(p.heads, end - head); /* the last piece of a group may be smaller */
  int64_t first = ((int64_t)row * p.n_head + head) * p.dim;
  for (int32_t i = threadIdx.x; i < p.heads * p.dim; i += blockDim.x) {
    b.q[i] = p.q[first + i];
    b.sum[i] = 0;
  }
  for (int32_t g = threadIdx.x; g < p.heads; g += blockDim.x) {
    b.max[g] = -INFINITY;
    b.all[g] = 0;
  }
  float *mass = p.mass ? p.mass + ((int64_t)row * p.n_head + head) * p.top_k : NULL;
  for (int32_t i = threadIdx.x; mass && i < p.heads * p.top_k; i += blockDim.x) mass[i] = 0;
  __syncthreads();
  if (p.blocks) {
    const int32_t *list = p.blocks + ((int64_t)row * p.n_head_kv + kv_head) * p.top_k;
    for (int32_t i = 0; i < p.top_k && list[i] >= 0; i++) attend_block<TYPE>(p, b, row, kv_head, list[i], i, mass);
  } else {
    int64_t n_blocks = p.places.pos[row] / p.block_size + 1;
    for (int64_t block = 0; block < n_blocks; block++) attend_block<TYPE>(p, b, row, kv_head, block, 0, mass);
  }
  for (int32_t i = threadIdx.x; i < p.heads * p.dim; i += blockDim.x) p.out[first + i] = b.sum[i] / b.all[i / p.dim];
  for (int32_t i = threadIdx.x; mass && i < p.heads * p.top_k; i += blockDim.x) mass[i] /= b.all[i / p.top_k];
}

void m3_cuda_attend(const m3_context *c, const m3_attend_params *p) {
  const m3_hparams *h = c->hparams;
  m3_device_state *s = c->state;
  int32_t group = h->n_head / h->n_head_kv, heads = QUERY_FLOATS / h->head_dim, keys = TILE_FLOATS / (h->head_dim + 1);
  if (heads > MAX_HEADS) heads = MAX_HEADS;
  if (heads > group) heads = group;
  if (keys > MAX_KEYS) keys = MAX_KEYS;
  attention_params a = {m3_places_of(s),
                        c->scratch->q,
                        (const char *)p->cache.k,
                        (const char *)p->cache.v,
                        m3_row_bytes(p->cache.kv_type, h->head_dim),
                        p->blocks,
                        p->out,
                        p->mass,
                        h->n_head,
                        h->n_head_kv,
                        h->head_dim,
                        h->block_size,
                        h->top_k,
                        heads,
                        (group + heads - 1) / heads,
                        keys,
                        1.0f / sqrtf((float)h->head_dim)};
  dim3 grid((unsigned)p->rows->n, (unsigned)(h->n_head_kv * a.pieces));
  size_t shared =
      (size_t)(2 * heads * h->head_dim + keys * (h->head_dim + 1) + heads * keys + 3 * heads) * sizeof(float);
  switch (p->cache.kv_type) {
    case M3_TYPE_F32: attend<M3_TYPE_F32><<<grid, M3_THREADS, shared, s->stream>>>(a); break;
    case M3_TYPE_F16: attend<M3_TYPE_F16><<<grid, M3_THREADS, shared, s->stream>>>(a); break;
    case M3_TYPE_BF16: attend<M3_TYPE_BF16><<<grid, M3_THREADS, shared, s->stream>>>(a); break;
    case M3_TYPE_Q8_0: attend<M3_TYPE_Q8_0><<<grid, M3_THREADS, shared, s->stream>>>(a); break;
    default: attend<M3_TYPE_Q4_0><<<grid, M3_THREADS, shared, s->stream>>>(a); break;
  }
  m3_launched(s, "attention");
}
