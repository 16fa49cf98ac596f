/* Router and routed experts. Rows are grouped by expert on the device: the host never learns who was chosen. */
#include "cuda/few_rows.cuh"
#include "cuda/launch.cuh"
#include "cuda/many_rows.cuh"

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
  m3_wait_for_previous();
  m3_let_next_begin();
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
  m3_few_product few = m3_one_few_product(&p->layer->w[M3_ROUTER], p->hidden, p->n, w->logits, false);
  few.norm = &p->layer->w[M3_FFN_NORM];
  few.normed = w->normed;
  if (!m3_cuda_few_rows(c, &few)) {
    m3_cuda_norm(s, c, p->hidden, &p->layer->w[M3_FFN_NORM], p->n, w->normed);
    m3_product product = m3_one_product(&p->layer->w[M3_ROUTER], w->normed, p->n, w->logits, false);
    m3_cuda_product(c, &product);
  }
  route_params r = {w->logits,       (const float *)p->layer->w[M3_ROUTER_BIAS].device,
                    h->n_expert,     h->n_expert_used,
                    h->expert_scale, w->experts,
                    w->weights,      m3_broken_code(c, M3_PART_ROUTER),
                    s->broken};
  size_t shared = (size_t)(h->n_expert + h->n_expert_used) * sizeof(float); /* at most 32 KiB */
  m3_launch(s, "router", route, dim3((unsigned)p->n), M3_WARP, shared, r);
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
  m3_wait_for_previous();
  m3_let_next_begin();
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
  m3_wait_for_previous();
  m3_let_next_begin();
  if (i >= n_embd) return;
  int64_t row = blockIdx.x;
  float sum = 0;
  for (int32_t k = 0; k < used; k++)
    sum = fmaf(weights[row * used + k], out[(int64_t)place[row * used + k] * n_embd + i], sum);
  hidden[row * n_embd + i] += sum;
}

/* Groups pairs by expert; returns the most groups that there can be. */
static int32_t group(const m3_context *c, int32_t n, int32_t rows) {
  const m3_hparams *h = c->hparams;
  int32_t pairs = n * h->n_expert_used, most = pairs < h->n_expert ? pairs : h->n_expert;
  group_params g = {c->scratch->experts, pairs, h->n_expert_used, h->n_expert, rows, c->state->grouping};
  size_t shared = (size_t)(2 * h->n_expert + 1) * sizeof(int32_t); /* at most 32 KiB and one number */
  m3_launch(c->state, "grouping rows by expert", group_rows, dim3(1), 1024, shared, g);
  return most + (pairs - most) / rows;
}

static void add_up(const m3_context *c, const m3_ffn_params *p) {
  const m3_hparams *h = c->hparams;
  const m3_scratch *w = c->scratch;
  dim3 grid((unsigned)p->n, m3_blocks_for(h->n_embd, M3_THREADS));
  m3_launch(c->state, "sum of experts", combine, grid, M3_THREADS, 0, (const float *)w->expert_out,
            (const int32_t *)c->state->grouping.place, (const float *)w->weights, h->n_expert_used, h->n_embd,
            p->hidden);
}

/* Few rows: gate and up in one launch, with SwiGLU, and down in another, which adds up the experts of a single token
 * itself. False, and nothing is done, where few_rows.cuh does not take them. */
static bool few_experts(const m3_context *c, const m3_ffn_params *p) {
  const m3_hparams *h = c->hparams;
  m3_scratch *w = c->scratch;
  const m3_weight *l = p->layer->w;
  enum { TOGETHER = 2 }; /* rows of a group: seldom more choose one expert */
  int32_t used = h->n_expert_used;
  if (!m3_cuda_takes_few_rows(c, &l[M3_GATE_EXPS], p->n, TOGETHER) ||
      l[M3_GATE_EXPS].tensor->type != l[M3_UP_EXPS].tensor->type ||
      !m3_cuda_takes_few_rows(c, &l[M3_DOWN_EXPS], p->n, p->n == 1 ? used : TOGETHER))
    return false;
  m3_few_product f = m3_one_few_product(&l[M3_GATE_EXPS], w->normed, p->n, w->gate, false);
  f.parts[0].up = &l[M3_UP_EXPS];
  m3_few_product down = m3_one_few_product(&l[M3_DOWN_EXPS], w->gate, p->n, w->expert_out, false);
  f.used = down.used = used;
  if (p->n == 1) {
    f.experts = down.experts = w->experts;
    down.sum_weights = w->weights;
    down.parts[0].y = p->hidden;
  } else {
    f.grouping = down.grouping = &c->state->grouping;
    f.gather = c->state->grouping.row;
    f.group_rows = down.group_rows = TOGETHER;
    f.max_groups = down.max_groups = group(c, p->n, TOGETHER);
  }
  /* The shared expert's gate and up go along; its result waits where only more rows would put theirs. */
  const m3_weight *shared = &l[M3_GATE_SHEXP];
  bool along = p->n == 1 && p->with_shared && shared->tensor->type == l[M3_UP_SHEXP].tensor->type &&
               m3_cuda_takes_few_rows(c, shared, 1, 1);
  if (along) f.parts[f.n_parts++] = m3_few_part{shared, w->up, shared->tensor->ne[1], &l[M3_UP_SHEXP], true};
  if (!m3_cuda_few_rows(c, &f) || !m3_cuda_few_rows(c, &down))
    m3_note(c->state, cudaErrorNotSupported, "experts with few rows, of a shape that was taken for one");
  if (p->n > 1) add_up(c, p);
  if (along) {
    m3_product last = m3_one_product(&l[M3_DOWN_SHEXP], w->up, 1, p->hidden, true);
    m3_cuda_product(c, &last);
  } else if (p->with_shared) {
    m3_cuda_shared(c, p);
  }
  return true;
}

void m3_cuda_experts(const m3_context *c, const m3_ffn_params *p) {
  const m3_hparams *h = c->hparams;
  m3_device_state *s = c->state;
  m3_scratch *w = c->scratch;
  const m3_weight *l = p->layer->w;
  if (few_experts(c, p)) return;
  int32_t pairs = p->n * h->n_expert_used;
  bool many = !s->exact && p->n > M3_FEW_ROWS;
  /* As if rows were spread evenly: an expert with more rows gets more groups. */
  int32_t even = p->n == 1 ? 1 : (pairs + h->n_expert - 1) / h->n_expert;
  m3_product in = {{{&l[M3_GATE_EXPS], w->gate, h->n_ff_expert}, {&l[M3_UP_EXPS], w->up, h->n_ff_expert}},
                   2,
                   w->normed,
                   pairs,
                   false,
                   s->grouping.row,
                   &s->grouping};
  m3_product out = m3_one_product(&l[M3_DOWN_EXPS], w->gate, pairs, w->expert_out, false);
  out.grouping = &s->grouping;
  int32_t rows =
      many ? min(m3_cuda_many_group_rows(&in, pairs, h->n_expert), m3_cuda_many_group_rows(&out, pairs, h->n_expert))
           : m3_cuda_group_rows(even);
  in.group_rows = out.group_rows = rows;
  in.max_groups = out.max_groups = group(c, p->n, rows);
  if (many && m3_cuda_any_units(&in)) m3_cuda_round(c, w->normed, p->n, h->n_embd);
  many ? m3_cuda_many_rows(c, &in) : m3_cuda_plain_product(s, &in);
  if (many && m3_cuda_any_units(&out))
    m3_cuda_round_swiglu(c, w->gate, w->up, pairs, h->n_ff_expert);
  else
    m3_cuda_swiglu(s, h, w->gate, w->up, (int64_t)pairs * h->n_ff_expert);
  many ? m3_cuda_many_rows(c, &out) : m3_cuda_plain_product(s, &out);
  add_up(c, p);
  if (p->with_shared) m3_cuda_shared(c, p);
}
