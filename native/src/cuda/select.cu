/* Block selection as in MSA (arXiv 2606.13392): scores of all visible keys, their maximum in each block, and the best
 * blocks, ties to the lower id. A score is one chain of additions, whatever is computed with it. */
#include "cuda/hopper.cuh"
#include "cuda/state.cuh"
#include "cuda/tables.cuh"

/* Threads of a block, and floats of its shared memory (44 KiB). */
enum { SCORE_THREADS = 128, SCORE_FLOATS = 11264, MAX_VECTORS = 16 };

struct score_params {
  m3_places places;
  const float
      *q; /* index q of the first row at work, [rows, n_index_head, dim]: its vectors stand one after the other */
  const char *keys;
  int64_t row_bytes;
  int32_t first, rows, n_index_head; /* rows first .. first + rows - 1 of the chunk */
  int32_t dim, block_size, top_k;
  bool all;              /* score rows without a choice too */
  int32_t vectors, tile; /* vectors and keys at a time */
  float *scores;         /* out [rows, n_index_head, max_blocks] */
  int64_t max_blocks;
  int32_t code;
  int32_t *broken;
};

/* Keys of a block that vector v sees; 0 if it needs no score. */
__device__ static inline int32_t visible_keys(const score_params &p, int32_t v, int64_t block) {
  int64_t pos = p.places.pos[p.first + v / p.n_index_head];
  if (!p.all && pos / p.block_size + 1 <= p.top_k) return 0;
  int64_t n = pos + 1 - block * p.block_size;
  return n < 0 ? 0 : n > p.block_size ? p.block_size : (int32_t)n;
}

/* Scores of one block for `vectors` vectors of queries that see the same sequence or not: page ids are looked up for
 * the sequence of each run of vectors. */
template <int TYPE>
__device__ static void score_run(const score_params &p, int32_t first, int32_t n, int64_t block, float *shared) {
  float *keys = shared, *q = keys + p.tile * (p.dim + 1); /* [tile, dim + 1], [dim, vectors] */
  float *scores = q + p.dim * p.vectors;                  /* [vectors, tile] */
  float *best = scores + p.vectors * p.tile;              /* [vectors] */
  int32_t most = 0, runs = (p.dim + M3_RUN - 1) / M3_RUN;
  for (int32_t v = first; v < first + n; v++) most = max(most, visible_keys(p, v, block));
  if (!most) return;
  __syncthreads();
  for (int32_t i = threadIdx.x; i < p.dim * p.vectors; i += blockDim.x) {
    int32_t v = i % p.vectors, d = i / p.vectors;
    q[i] = v < n ? p.q[(int64_t)(first + v) * p.dim + d] : 0.0f;
  }
  for (int32_t v = threadIdx.x; v < n; v += blockDim.x) best[v] = -INFINITY;
  int64_t key = m3_page_of(p.places, p.first + first / p.n_index_head, block) * p.block_size;
  for (int32_t at = 0; at < most; at += p.tile) {
    int32_t m = min(p.tile, most - at);
    for (int32_t i = threadIdx.x; i < m * runs; i += blockDim.x) {
      int32_t row = i / runs, run = i % runs;
      float values[M3_RUN];
      m3_decode_run(TYPE, p.keys + (key + at + row) * p.row_bytes, (uint32_t)run, p.dim, values);
      for (int32_t j = 0; j < M3_RUN && run * M3_RUN + j < p.dim; j++)
        keys[row * (p.dim + 1) + run * M3_RUN + j] = values[j];
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < m * p.vectors / 4; i += blockDim.x) {
      int32_t j = i % m, quad = i / m;
      const float *k = keys + j * (p.dim + 1), *x = q + 4 * quad;
      float a = 0, b = 0, c = 0, d = 0;
      for (int32_t e = 0; e < p.dim; e++, x += p.vectors) {
        a = fmaf(x[0], k[e], a);
        b = fmaf(x[1], k[e], b);
        c = fmaf(x[2], k[e], c);
        d = fmaf(x[3], k[e], d);
      }
      float *out = scores + 4 * quad * p.tile + j;
      out[0] = a, out[p.tile] = b, out[2 * p.tile] = c, out[3 * p.tile] = d;
    }
    __syncthreads();
    for (int32_t v = threadIdx.x / M3_WARP; v < n; v += SCORE_THREADS / M3_WARP) {
      int32_t sees = min(visible_keys(p, first + v, block) - at, m);
      float largest = -INFINITY;
      bool finite = true;
      for (int32_t j = threadIdx.x % M3_WARP; j < sees; j += M3_WARP) {
        float score = scores[v * p.tile + j];
        finite &= m3_is_finite(score);
        largest = fmaxf(largest, score);
      }
      largest = m3_warp_max(largest);
      if (!finite) atomicMin(p.broken, p.code);
      if (threadIdx.x % M3_WARP == 0) best[v] = fmaxf(best[v], largest);
    }
    __syncthreads();
  }
  for (int32_t v = threadIdx.x; v < n; v += blockDim.x)
    if (visible_keys(p, first + v, block)) p.scores[(first + v) * p.max_blocks + block] = best[v];
}

/* A block for each block of keys and each stretch of vectors, which is cut where another sequence begins. */
template <int TYPE>
__global__ static void __launch_bounds__(SCORE_THREADS) score_blocks(score_params p) {
  extern __shared__ float shared[];
  int32_t first = (int32_t)blockIdx.y * p.vectors, end = min(first + p.vectors, p.rows * p.n_index_head);
  while (first < end) {
    int32_t seq = p.places.seq[p.first + first / p.n_index_head], n = 1;
    while (first + n < end && p.places.seq[p.first + (first + n) / p.n_index_head] == seq) n++;
    score_run<TYPE>(p, first, n, blockIdx.x, shared);
    first += n;
  }
}

struct choose_params {
  m3_places places;
  int32_t first, n_index_head, top_k, local, block_size;
  const float *scores; /* [rows, n_index_head, max_blocks] */
  int64_t max_blocks;
  int32_t *blocks; /* out [rows, n_index_head, top_k] of the rows at work */
  float *recorded; /* out [rows, n_index_head, n_blocks] or NULL */
  int64_t n_blocks;
};

struct choice {
  float score;
  int32_t block; /* INT32_MAX: there is none */
};

__device__ static inline bool before(choice a, choice b) {
  return a.score > b.score || (a.score == b.score && a.block < b.block);
}

__device__ static inline choice best_of_warp(choice c) {
#pragma unroll
  for (int step = M3_WARP / 2; step > 0; step /= 2) {
    choice other = {__shfl_xor_sync(0xffffffffu, c.score, step), __shfl_xor_sync(0xffffffffu, c.block, step)};
    if (before(other, c)) c = other;
  }
  return c;
}

/* A block for each list: the last `local` blocks, then the best of the others one after the other, each the first in
 * the order of score and id behind the one taken before it. */
__global__ static void __launch_bounds__(M3_THREADS) choose_blocks(choose_params p) {
  __shared__ int32_t taken[M3_MAX_TOP_K];
  __shared__ choice warps[M3_THREADS / M3_WARP];
  int32_t row = (int32_t)blockIdx.x / p.n_index_head, lane = threadIdx.x % M3_WARP, warp = threadIdx.x / M3_WARP;
  int64_t n_blocks = p.places.pos[p.first + row] / p.block_size + 1;
  const float *scores = p.scores + blockIdx.x * p.max_blocks;
  int32_t *list = p.blocks + (int64_t)blockIdx.x * p.top_k;
  for (int64_t b = threadIdx.x; p.recorded && b < p.n_blocks; b += blockDim.x)
    p.recorded[blockIdx.x * p.n_blocks + b] = b < n_blocks ? scores[b] : -INFINITY;
  if (n_blocks <= p.top_k) {
    for (int32_t i = threadIdx.x; i < p.top_k; i += blockDim.x) list[i] = i < n_blocks ? i : -1;
    return;
  }
  int32_t others = (int32_t)n_blocks - p.local, room = p.top_k - p.local;
  choice last = {INFINITY, -1};
  for (int32_t k = 0; k < room; k++) {
    choice best = {-INFINITY, INT32_MAX};
    for (int32_t b = threadIdx.x; b < others; b += M3_THREADS) {
      choice c = {scores[b], b};
      if (before(last, c) && before(c, best)) best = c;
    }
    best = best_of_warp(best);
    if (lane == 0) warps[warp] = best;
    __syncthreads();
    if (warp == 0) {
      best = lane < M3_THREADS / M3_WARP ? warps[lane] : choice{-INFINITY, INT32_MAX};
      best = best_of_warp(best);
      if (lane == 0) {
        taken[k] = best.block;
        warps[0] = best;
      }
    }
    __syncthreads();
    last = warps[0];
    __syncthreads();
  }
  for (int32_t i = threadIdx.x; i < p.local; i += blockDim.x) taken[room + i] = others + i;
  __syncthreads();
  /* A place that no number fills (all scores are broken) stays empty, at the end. */
  for (int32_t i = threadIdx.x; i < p.top_k; i += blockDim.x) {
    int32_t block = taken[i], at = 0;
    for (int32_t j = 0; j < p.top_k; j++) at += taken[j] < block || (taken[j] == block && j < i);
    list[at] = block == INT32_MAX ? -1 : block;
  }
}

template <int TYPE>
static void launch(m3_device_state *s, const score_params &a, dim3 grid, size_t shared) {
  score_blocks<TYPE><<<grid, SCORE_THREADS, shared, s->stream>>>(a);
}

static size_t score_floats(const score_params &a) {
  return (size_t)(a.tile * (a.dim + 1) + a.dim * a.vectors + a.vectors * a.tile + a.vectors);
}

bool m3_cuda_select(const m3_context *c, const m3_select_params *p) {
  const m3_hparams *h = c->hparams;
  m3_device_state *s = c->state;
  int64_t list = (int64_t)h->n_index_head * h->top_k, max_blocks = s->max_blocks;
  if (s->hopper.select && !p->scores) {
    m3_hopper_select(c, p);
    return true; /* told by finish */
  }
  bool any = p->scores != NULL || max_blocks > h->top_k;
  for (int32_t first = 0; first < p->rows->n; first += s->select_rows) {
    int32_t rows = p->rows->n - first < s->select_rows ? p->rows->n - first : s->select_rows;
    score_params a = {};
    a.places = m3_places_of(s);
    a.q = c->scratch->index_q + (int64_t)first * h->n_index_head * h->index_dim;
    a.keys = (const char *)p->cache.index;
    a.row_bytes = m3_row_bytes(p->cache.index_type, h->index_dim);
    a.first = first;
    a.rows = rows;
    a.n_index_head = h->n_index_head;
    a.dim = h->index_dim;
    a.block_size = h->block_size;
    a.top_k = h->top_k;
    a.all = p->scores != NULL;
    a.scores = s->block_scores;
    a.max_blocks = max_blocks;
    a.code = m3_broken_code(c, M3_PART_SCORES);
    a.broken = s->broken;
    /* Few vectors in few columns leave room for the keys; both are halved until all fits. */
    for (a.vectors = MAX_VECTORS; a.vectors > 4 && a.vectors / 2 >= rows * h->n_index_head; a.vectors /= 2) continue;
    for (; a.vectors > 4 && a.vectors * a.dim > SCORE_FLOATS / 4; a.vectors /= 2) continue;
    for (a.tile = 64; score_floats(a) > SCORE_FLOATS; a.tile /= 2) continue;
    if (any) {
      dim3 grid((unsigned)max_blocks, m3_blocks_for((int64_t)rows * h->n_index_head, a.vectors));
      size_t shared = score_floats(a) * sizeof(float);
      switch (p->cache.index_type) {
        case M3_TYPE_F32: launch<M3_TYPE_F32>(s, a, grid, shared); break;
        case M3_TYPE_F16: launch<M3_TYPE_F16>(s, a, grid, shared); break;
        case M3_TYPE_BF16: launch<M3_TYPE_BF16>(s, a, grid, shared); break;
        case M3_TYPE_Q8_0: launch<M3_TYPE_Q8_0>(s, a, grid, shared); break;
        default: launch<M3_TYPE_Q4_0>(s, a, grid, shared); break;
      }
      m3_launched(s, "index scores");
    }
    choose_params b = {a.places,
                       first,
                       h->n_index_head,
                       h->top_k,
                       h->local_blocks,
                       h->block_size,
                       s->block_scores,
                       max_blocks,
                       p->blocks + first * list,
                       p->scores ? p->scores + first * h->n_index_head * p->n_blocks : NULL,
                       p->n_blocks};
    choose_blocks<<<(unsigned)(rows * h->n_index_head), M3_THREADS, 0, s->stream>>>(b);
    m3_launched(s, "choice of blocks");
  }
  return true; /* told by finish */
}
