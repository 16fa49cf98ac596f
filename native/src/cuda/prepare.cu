/* Queries, keys and values: projections, norms of each head, rotation, and the write to the cache. */
#include "cuda/encode.cuh"
#include "cuda/few_rows.cuh"
#include "cuda/hopper.cuh"
#include "cuda/launch.cuh"

#define WARPS 4

/* What the heads of a row are, in the order in which warps take them. */
struct heads_params {
  m3_places places;
  int32_t n, n_head, n_head_kv, n_index_head; /* no index heads in a dense layer */
  int32_t dim, index_dim, half, block_size;
  float eps;
  const float *cos, *sin; /* [n, half] */
  float *q, *k, *v, *index_q, *index_k;
  const float *q_norm, *k_norm, *index_q_norm, *index_k_norm;
  m3_layer_cache cache;
  int64_t kv_bytes, index_bytes; /* of a row of the cache */
};

/* RMSNorm and RoPE (NeoX halves) of one head, which a warp holds in x. */
__device__ static void norm_and_rotate(const heads_params &p, int32_t row, const float *weight, int32_t dim, float *x) {
  int32_t lane = threadIdx.x % M3_WARP;
  float sum = 0;
  for (int32_t i = lane; i < dim; i += M3_WARP) sum = fmaf(x[i], x[i], sum);
  float r = 1.0f / sqrtf(m3_warp_sum(sum) / (float)dim + p.eps);
  for (int32_t i = lane; i < dim; i += M3_WARP) x[i] = x[i] * r * weight[i];
  __syncwarp();
  const float *cos = p.cos + (int64_t)row * p.half, *sin = p.sin + (int64_t)row * p.half;
  for (int32_t i = lane; i < p.half; i += M3_WARP) {
    float a = x[i], b = x[i + p.half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + p.half] = b * cos[i] + a * sin[i];
  }
  __syncwarp();
}

/* A warp for each head of each row. */
__global__ static void __launch_bounds__(WARPS *M3_WARP) finish_heads(heads_params p) {
  __shared__ float buffers[WARPS][M3_MAX_HEAD_DIM];
  m3_wait_for_previous();
  m3_let_next_begin();
  int32_t warp = threadIdx.x / M3_WARP, lane = threadIdx.x % M3_WARP;
  int32_t heads = p.n_head + 2 * p.n_head_kv + (p.n_index_head ? p.n_index_head + 1 : 0);
  int64_t work = (int64_t)blockIdx.x * WARPS + warp;
  if (work >= (int64_t)p.n * heads) return;
  int32_t row = (int32_t)(work / heads), head = (int32_t)(work % heads);
  float *x = buffers[warp], *source;
  const float *weight = NULL;
  void *cache = NULL;
  int32_t dim = p.dim, cached = 0, type = p.cache.kv_type;
  int64_t pos = p.places.pos[row], slot = pos % p.block_size;
  int64_t page = m3_page_of(p.places, row, pos / p.block_size), index = 0, bytes = p.kv_bytes;
  if (head < p.n_head) {
    source = p.q + ((int64_t)row * p.n_head + head) * dim;
    weight = p.q_norm;
  } else if ((head -= p.n_head) < 2 * p.n_head_kv) {
    bool is_k = head < p.n_head_kv;
    if (!is_k) head -= p.n_head_kv;
    source = (is_k ? p.k : p.v) + ((int64_t)row * p.n_head_kv + head) * dim;
    weight = is_k ? p.k_norm : NULL;
    cache = is_k ? p.cache.k : p.cache.v;
    index = (page * p.n_head_kv + head) * p.block_size + slot;
    cached = 1;
  } else if ((head -= 2 * p.n_head_kv) < p.n_index_head) {
    dim = p.index_dim;
    source = p.index_q + ((int64_t)row * p.n_index_head + head) * dim;
    weight = p.index_q_norm;
  } else {
    dim = p.index_dim;
    source = p.index_k + (int64_t)row * dim;
    weight = p.index_k_norm;
    cache = p.cache.index;
    index = page * p.block_size + slot;
    type = p.cache.index_type;
    bytes = p.index_bytes;
    cached = 1;
  }
  for (int32_t i = lane; i < dim; i += M3_WARP) x[i] = source[i];
  __syncwarp();
  if (weight) {
    norm_and_rotate(p, row, weight, dim, x);
    for (int32_t i = lane; i < dim; i += M3_WARP) source[i] = x[i];
  }
  if (cached) m3_encode_row(type, x, dim, (char *)cache + index * bytes);
}

void m3_cuda_prepare(const m3_context *c, const m3_prepare_params *p) {
  const m3_hparams *h = c->hparams;
  m3_device_state *s = c->state;
  m3_scratch *w = c->scratch;
  const m3_weight *l = p->layer->w;
  int32_t n = p->rows->n;
  bool sparse = p->cache.index != NULL;
  int64_t q = (int64_t)h->n_head * h->head_dim, kv = (int64_t)h->n_head_kv * h->head_dim;
  m3_product product = {{{&l[M3_ATTN_Q], w->q, q},
                         {&l[M3_ATTN_K], w->k, kv},
                         {&l[M3_ATTN_V], w->v, kv},
                         {&l[M3_INDEX_Q], w->index_q, (int64_t)h->n_index_head * h->index_dim},
                         {&l[M3_INDEX_K], w->index_k, h->index_dim}},
                        sparse ? 5 : 3,
                        w->normed,
                        n};
  m3_few_product few = {};
  few.n_parts = product.n_parts;
  for (int i = 0; i < few.n_parts; i++)
    few.parts[i] = m3_few_part{product.parts[i].weight, product.parts[i].y, product.parts[i].ldy};
  few.x = p->hidden;
  few.n = n;
  few.norm = &l[M3_ATTN_NORM];
  if (!m3_cuda_few_rows(c, &few)) {
    m3_cuda_norm(s, c, p->hidden, &l[M3_ATTN_NORM], n, w->normed);
    m3_cuda_product(c, &product);
  }
  heads_params a = {};
  a.places = m3_places_of(s);
  a.n = n;
  a.n_head = h->n_head;
  a.n_head_kv = h->n_head_kv;
  a.n_index_head = sparse ? h->n_index_head : 0;
  a.dim = h->head_dim;
  a.index_dim = h->index_dim;
  a.half = h->n_rot / 2;
  a.block_size = h->block_size;
  a.eps = h->rms_eps;
  a.cos = s->cos;
  a.sin = s->sin;
  a.q = w->q;
  a.k = w->k;
  a.v = w->v;
  a.index_q = w->index_q;
  a.index_k = w->index_k;
  a.q_norm = (const float *)l[M3_ATTN_Q_NORM].device;
  a.k_norm = (const float *)l[M3_ATTN_K_NORM].device;
  a.index_q_norm = (const float *)l[M3_INDEX_Q_NORM].device;
  a.index_k_norm = (const float *)l[M3_INDEX_K_NORM].device;
  a.cache = p->cache;
  a.kv_bytes = m3_row_bytes(p->cache.kv_type, h->head_dim);
  a.index_bytes = sparse ? m3_row_bytes(p->cache.index_type, h->index_dim) : 0;
  int64_t heads = h->n_head + 2 * h->n_head_kv + (sparse ? h->n_index_head + 1 : 0);
  m3_launch(s, "norm, rotation and cache write", finish_heads, dim3(m3_blocks_for(n * heads, WARPS)), WARPS * M3_WARP,
            0, a);
  if (p->cache.low_bit) m3_hopper_store_low_bit(c, &p->cache);
}
