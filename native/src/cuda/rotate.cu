/* Keys that are cached already, turned to other positions. */
#include "cuda/encode.cuh"
#include "cuda/launch.cuh"
#include "cuda/tables.cuh"

#define WARPS 4

struct rotate_params {
  m3_places places;
  int32_t n, n_head_kv, heads; /* heads: of K, and one of index keys in a sparse layer */
  int32_t dim, index_dim, half, block_size;
  const float *cos, *sin; /* [n, half] */
  m3_layer_cache cache;
  int64_t kv_bytes, index_bytes;     /* of a row of the cache */
  int32_t kv_turning, index_turning; /* channels that are read and stored */
};

/* A warp for each head of each row. */
__global__ static void __launch_bounds__(WARPS *M3_WARP) rotate_keys(rotate_params p) {
  __shared__ float buffers[WARPS][M3_MAX_HEAD_DIM];
  m3_wait_for_previous();
  m3_let_next_begin();
  int32_t warp = threadIdx.x / M3_WARP, lane = threadIdx.x % M3_WARP;
  int64_t work = (int64_t)blockIdx.x * WARPS + warp;
  if (work >= (int64_t)p.n * p.heads) return;
  int32_t row = (int32_t)(work / p.heads), head = (int32_t)(work % p.heads);
  int64_t pos = p.places.pos[row], slot = pos % p.block_size;
  int64_t page = m3_page_of(p.places, row, pos / p.block_size);
  bool is_k = head < p.n_head_kv;
  int64_t index = is_k ? (page * p.n_head_kv + head) * p.block_size + slot : page * p.block_size + slot;
  char *key = is_k ? (char *)p.cache.k + index * p.kv_bytes : (char *)p.cache.index + index * p.index_bytes;
  int32_t type = is_k ? p.cache.kv_type : p.cache.index_type, n = is_k ? p.kv_turning : p.index_turning;
  float *x = buffers[warp];
  for (int32_t run = lane; run * M3_RUN < n; run += M3_WARP) {
    float values[M3_RUN];
    m3_decode_run(type, key, (uint32_t)run, is_k ? p.dim : p.index_dim, values);
    for (int32_t j = 0; j < M3_RUN && run * M3_RUN + j < n; j++) x[run * M3_RUN + j] = values[j];
  }
  __syncwarp();
  const float *cos = p.cos + (int64_t)row * p.half, *sin = p.sin + (int64_t)row * p.half;
  for (int32_t i = lane; i < p.half; i += M3_WARP) {
    float a = x[i], b = x[i + p.half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + p.half] = b * cos[i] + a * sin[i];
  }
  __syncwarp();
  m3_encode_row(type, x, n, key);
}

/* The channels that turn, in whole blocks of the type. */
static int32_t turning(const m3_hparams *h, int32_t type) {
  int32_t block = (int32_t)m3_type_block_size(type);
  return (h->n_rot + block - 1) / block * block;
}

void m3_cuda_rotate(const m3_context *c, const m3_rotate_params *p) {
  const m3_hparams *h = c->hparams;
  m3_device_state *s = c->state;
  bool sparse = p->cache.index != NULL;
  rotate_params a = {};
  a.places = m3_places_of(s);
  a.n = p->rows->n;
  a.n_head_kv = h->n_head_kv;
  a.heads = h->n_head_kv + (sparse ? 1 : 0);
  a.dim = h->head_dim;
  a.index_dim = h->index_dim;
  a.half = h->n_rot / 2;
  a.block_size = h->block_size;
  a.cos = s->cos;
  a.sin = s->sin;
  a.cache = p->cache;
  a.kv_bytes = m3_row_bytes(p->cache.kv_type, h->head_dim);
  a.kv_turning = turning(h, p->cache.kv_type);
  if (sparse) {
    a.index_bytes = m3_row_bytes(p->cache.index_type, h->index_dim);
    a.index_turning = turning(h, p->cache.index_type);
  }
  m3_launch(s, "rotation of cached keys", rotate_keys, dim3(m3_blocks_for((int64_t)a.n * a.heads, WARPS)),
            WARPS * M3_WARP, 0, a);
}
