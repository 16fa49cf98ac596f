/* Router and routed experts. Rows are grouped by expert on the device: the host never learns who was chosen. */
#include "cuda/state.cuh"

/* The best of the candidates that stand behind the last one taken: higher rank first, then lower id. */
struct candidate {
  float rank;
  int32_t id; /* INT32_MAX: there is none */
};

__device__ static inline bool before(candidate a, candidate b) {
  return a.rank > b.rank || (a.rank == b.rank && a.id < b.id);
}

__device__ static inline candidate best_of_warp(candidate c) {
#pragma unroll
  for (int step = M3_WARP / 2; step > 0; step /= 2) {
    candidate other = {__shfl_xor_sync(0xffffffffu, c.rank, step), __shfl_xor_sync(0xffffffffu, c.id, step)};
    if (before(other, c)) c = other;
  }
  return c;
}

struct route_params {
  const float *logits; /* [n, n_expert] */
  const float *bias;
  int32_t n_expert, used;
  float scale;
  int32_t *experts; /* out [n, used] ascending */
  float *weights;   /* out [n, used] */
  int32_t code;
  int32_t *broken;
};

/* A warp for each row: sigmoid of the logits plus bias ranks the experts, their sigmoids over their sum weigh them. */
__global__ static void route(route_params p) {
  extern __shared__ float prob[]; /* [n_expert], then chosen [used] */
  int32_t *chosen = (int32_t *)(prob + p.n_expert);
  const float *logits = p.logits + (int64_t)blockIdx.x * p.n_expert;
  int32_t *experts = p.experts + (int64_t)blockIdx.x * p.used;
  float *weights = p.weights + (int64_t)blockIdx.x * p.used;
  int32_t lane = threadIdx.x;
  bool finite = true;
  for (int32_t e = lane; e < p.n_expert; e += M3_WARP) {
    prob[e] = 1.0f / (1.0f + expf(-logits[e]));
    finite &= m3_is_finite(logits[e]) && m3_is_finite(prob[e] + p.bias[e]);
  }
  __syncwarp();
  candidate last = {INFINITY, -1};
  for (int32_t k = 0; k < p.used; k++) {
    candidate best = {-INFINITY, INT32_MAX};
    for (int32_t e = lane; e < p.n_expert; e += M3_WARP) {
      candidate c = {prob[e] + p.bias[e], e};
      if (c.rank > -INFINITY && before(last, c) && before(c, best)) best = c;
    }
    last = best_of_warp(best);
    /* Nothing is left that is a number: any ids do, as long as they are ids, for the row is broken. */
    if (lane == 0) chosen[k] = last.id == INT32_MAX ? k : last.id;
    finite &= last.id != INT32_MAX;
  }
  __syncwarp();
  if (!finite) {
    atomicMin(p.broken, p.code);
    chosen[0] = -1;
  }
  __syncwarp();
  bool broken = chosen[0] < 0;
  __syncwarp();
  for (int32_t k = lane; k < p.used && broken; k += M3_WARP) chosen[k] = k;
  __syncwarp();
  for (int32_t k = lane; k < p.used; k += M3_WARP) {
    int32_t at = 0;
    for (int32_t j = 0; j < p.used; j++) at += chosen[j] < chosen[k];
    experts[at] = chosen[k];
  }
  __syncwarp();
  float sum = 0;
  for (int32_t k = 0; k < p.used; k++) sum += prob[experts[k]];
  for (int32_t k = lane; k < p.used; k += M3_WARP) weights[k] = broken ? NAN : prob[experts[k]] / sum * p.scale;
}

bool m3_cuda_router(const m3_context *c, const m3_ffn_params *p) {
  const m3_hparams *h = c->hparams;
  m3_device_state *s = c->state;
  m3_scratch *w = c->scratch;
  m3_cuda_norm(s, c, p->hidden, &p->layer->w[M3_FFN_NORM], p->n, w->normed);
  m3_product product = m3_one_product(&p->layer->w[M3_ROUTER], w->normed, p->n, w->logits, false);
  m3_cuda_product(s, &product);
  route_params r = {w->logits,       (const float *)p->layer->w[M3_ROUTER_BIAS].device,
                    h->n_expert,     h->n_expert_used,
                    h->expert_scale, w->experts,
                    w->weights,      m3_broken_code(c, M3_PART_ROUTER),
                    s->broken};
  size_t shared = (size_t)(h->n_expert + h->n_expert_used) * sizeof(float); /* at most 32 KiB */
  route<<<(unsigned)p->n, M3_WARP, shared, s->stream>>>(r);
  m3_launched(s, "router");
  return true; /* told by finish */
}

struct group_params {
  const int32_t *experts; /* [pairs] */
  int32_t pairs, used, n_expert, group_rows;
  m3_grouping out;
};

/* One block: counts the rows of each expert, gives every pair a place among those of its expert, and cuts these into
 * groups. The order within an expert is left to chance: it changes no result. */
__global__ static void group_rows(group_params p) {
  extern __shared__ int32_t start[]; /* [n_expert] then the first group of each [n_expert + 1] */
  int32_t *first_group = start + p.n_expert;
  for (int32_t e = threadIdx.x; e < p.n_expert; e += blockDim.x) start[e] = 0;
  __syncthreads();
  for (int32_t i = threadIdx.x; i < p.pairs; i += blockDim.x) atomicAdd(&start[p.experts[i]], 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t rows = 0, groups = 0;
    for (int32_t e = 0; e < p.n_expert; e++) {
      int32_t count = start[e];
      start[e] = rows;
      first_group[e] = groups;
      rows += count;
      groups += (count + p.group_rows - 1) / p.group_rows;
    }
    first_group[p.n_expert] = groups;
    *p.out.n_groups = groups;
  }
  __syncthreads();
  for (int32_t e = threadIdx.x; e < p.n_expert; e += blockDim.x) {
    int32_t end = e + 1 < p.n_expert ? start[e + 1] : p.pairs;
    for (int32_t g = first_group[e], row = start[e]; g < first_group[e + 1]; g++, row += p.group_rows)
      p.out.groups[g] = m3_row_group{e, row, min(p.group_rows, end - row)};
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < p.pairs; i += blockDim.x) {
    int32_t place = atomicAdd(&start[p.experts[i]], 1);
    p.out.place[i] = place;
    p.out.row[place] = i / p.used;
  }
}

/* hidden += the weighted sum of a row's experts, in the order of their ids. */
__global__ static void combine(const float *out, const int32_t *place, const float *weights, int32_t used,
                               int32_t n_embd, float *hidden) {
  int32_t i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= n_embd) return;
  int64_t row = blockIdx.x;
  float sum = 0;
  for (int32_t k = 0; k < used; k++)
    sum = fmaf(weights[row * used + k], out[(int64_t)place[row * used + k] * n_embd + i], sum);
  hidden[row * n_embd + i] += sum;
}

void m3_cuda_experts(const m3_context *c, const m3_ffn_params *p) {
  const m3_hparams *h = c->hparams;
  m3_device_state *s = c->state;
  m3_scratch *w = c->scratch;
  const m3_weight *l = p->layer->w;
  int32_t pairs = p->n * h->n_expert_used;
  /* As if rows were spread evenly: an expert with more rows gets more groups. */
  int32_t rows = m3_cuda_group_rows(p->n == 1 ? 1 : (pairs + h->n_expert - 1) / h->n_expert);
  int32_t most = pairs < h->n_expert ? pairs : h->n_expert;
  group_params g = {w->experts, pairs, h->n_expert_used, h->n_expert, rows, s->grouping};
  size_t shared = (size_t)(2 * h->n_expert + 1) * sizeof(int32_t); /* at most 32 KiB and one number */
  group_rows<<<1, 1024, shared, s->stream>>>(g);
  m3_launched(s, "grouping rows by expert");
  m3_product product = {{{&l[M3_GATE_EXPS], w->gate, h->n_ff_expert}, {&l[M3_UP_EXPS], w->up, h->n_ff_expert}},
                        2,
                        w->normed,
                        pairs,
                        false,
                        s->grouping.row,
                        &s->grouping,
                        rows,
                        most + (pairs - most) / rows};
  m3_cuda_product(s, &product);
  m3_cuda_swiglu(s, h, w->gate, w->up, (int64_t)pairs * h->n_ff_expert);
  product.parts[0] = m3_product_part{&l[M3_DOWN_EXPS], w->expert_out, h->n_embd};
  product.n_parts = 1;
  product.x = w->gate;
  product.gather = NULL;
  m3_cuda_product(s, &product);
  dim3 grid((unsigned)p->n, m3_blocks_for(h->n_embd, M3_THREADS));
  combine<<<grid, M3_THREADS, 0, s->stream>>>(w->expert_out, s->grouping.place, w->weights, h->n_expert_used, h->n_embd,
                                              p->hidden);
  m3_launched(s, "sum of experts");
}
