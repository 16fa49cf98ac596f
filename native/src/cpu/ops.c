/* Embedding, norms, the feed-forward half of a layer, and the output head. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "cpu/cpu.h"

const float *m3_vector(const m3_weight *w) { return w->data; }

void m3_rms_norm(const m3_context *c, const float *x, const float *weight, int64_t n, float *out) {
  float mean = c->kernels->dot(x, x, n) / (float)n;
  float r = 1.0f / sqrtf(mean + c->hparams->rms_eps);
  for (int64_t i = 0; i < n; i++) out[i] = x[i] * r * weight[i];
}

void m3_cpu_embed(const m3_context *c, const m3_embed_params *p) {
  int64_t n_embd = c->hparams->n_embd;
  int32_t type = p->embd->tensor->type;
  int64_t row_bytes = m3_row_bytes(type, n_embd);
  for (int32_t r = 0; r < p->rows->n; r++)
    m3_convert_row(c->kernels, type, (const char *)p->embd->data + p->rows->ids[r] * row_bytes, p->hidden + r * n_embd,
                   n_embd);
}

/* SwiGLU-OAI: g * sigmoid(alpha g) * (u + 1), g clamped from above, u on both sides. The clamps must not hide broken
 * weights: x - x is zero for a number and NaN for NaN and infinity, so adding it carries both through. */
static void swiglu(const m3_hparams *h, float *gate, const float *up, int64_t n) {
  float limit = h->swiglu_limit, alpha = h->swiglu_alpha;
  for (int64_t i = 0; i < n; i++) {
    float g = (gate[i] > limit ? limit : gate[i]) + (gate[i] - gate[i]);
    float u = (up[i] > limit ? limit : up[i] < -limit ? -limit : up[i]) + (up[i] - up[i]);
    gate[i] = g / (1.0f + expf(-alpha * g)) * (u + 1.0f);
  }
}

static void norm_rows(const m3_context *c, const m3_ffn_params *p) {
  int64_t n_embd = c->hparams->n_embd;
  const float *w = m3_vector(&p->layer->w[M3_FFN_NORM]);
#pragma omp parallel for num_threads(c->scratch->n_threads) schedule(static)
  for (int32_t r = 0; r < p->n; r++) m3_rms_norm(c, p->hidden + r * n_embd, w, n_embd, c->scratch->normed + r * n_embd);
}

/* Gated MLPs: y (+)= down(swiglu(gate(x), up(x))) for n rows of x, or for the rows of each expert. */
typedef struct gated {
  const m3_weight *w_gate, *w_up, *w_down;
  const float *x;
  int32_t n;
  const int32_t *start, *rows; /* as in m3_matmul_params, NULL for a single MLP */
  float *y;                    /* [n, n_embd], or a row for each of `rows` */
  bool add;
  m3_input input; /* of w_down */
} gated;

static void gated_mlp(const m3_context *c, const gated *m) {
  const m3_scratch *s = c->scratch;
  int64_t width = m->w_gate->tensor->ne[1], n_embd = c->hparams->n_embd;
  int32_t n_experts = c->hparams->n_expert, n = m->start ? m->start[n_experts] : m->n;
  const m3_factor in[] = {{m->w_gate, s->gate, width}, {m->w_up, s->up, width}};
  const m3_factor out = {m->w_down, m->y, n_embd};
  m3_matmul(c, &(m3_matmul_params){in, 2, m->x, m->n, m->start, n_experts, m->rows, false});
#pragma omp parallel for num_threads(m3_threads_for(c, 16 * n * width)) schedule(static)
  for (int32_t r = 0; r < n; r++) swiglu(c->hparams, s->gate + r * width, s->up + r * width, width);
  if (!m->start) m3_sum_squares(c, m->input, 0, s->gate, n);
  for (int32_t e = 0; m->start && e < n_experts; e++)
    m3_sum_squares(c, m->input, e, s->gate + m->start[e] * width, m->start[e + 1] - m->start[e]);
  m3_matmul(c, &(m3_matmul_params){&out, 1, s->gate, n, m->start, n_experts, NULL, m->add});
}

void m3_cpu_mlp(const m3_context *c, const m3_ffn_params *p) {
  const m3_weight *w = p->layer->w;
  m3_scratch *s = c->scratch;
  norm_rows(c, p);
  m3_sum_squares(c, M3_INPUT_FFN, 0, s->normed, p->n);
  gated_mlp(c, &(gated){.w_gate = &w[M3_FFN_GATE],
                        .w_up = &w[M3_FFN_UP],
                        .w_down = &w[M3_FFN_DOWN],
                        .x = s->normed,
                        .n = p->n,
                        .y = p->hidden,
                        .add = true,
                        .input = M3_INPUT_MLP_DOWN});
}

void m3_cpu_shared(const m3_context *c, const m3_ffn_params *p) {
  const m3_weight *w = p->layer->w;
  gated_mlp(c, &(gated){.w_gate = &w[M3_GATE_SHEXP],
                        .w_up = &w[M3_UP_SHEXP],
                        .w_down = &w[M3_DOWN_SHEXP],
                        .x = c->scratch->normed,
                        .n = p->n,
                        .y = p->hidden,
                        .add = true,
                        .input = M3_INPUT_SHARED_DOWN});
}

/* The chosen experts of one row from its logits: sigmoid of the logits plus bias ranks them (ties to the lower id),
 * their unbiased sigmoids over their sum weigh them. `work` holds 2 * n_expert floats. False if a logit or bias is not
 * finite. */
static bool route_row(const m3_context *c, const m3_ffn_params *p, int32_t row, float *work) {
  const m3_hparams *h = c->hparams;
  const m3_scratch *s = c->scratch;
  const float *logits = s->logits + (int64_t)row * h->n_expert, *bias = m3_vector(&p->layer->w[M3_ROUTER_BIAS]);
  float *prob = work, *rank = work + h->n_expert;
  bool finite = true;
  for (int32_t e = 0; e < h->n_expert; e++) {
    finite &= fabsf(logits[e]) <= FLT_MAX;
    prob[e] = 1.0f / (1.0f + expf(-logits[e]));
    rank[e] = prob[e] + bias[e];
    finite &= fabsf(rank[e]) <= FLT_MAX;
  }
  int32_t *chosen = s->experts + (int64_t)row * h->n_expert_used;
  float *weight = s->weights + (int64_t)row * h->n_expert_used, sum = 0;
  for (int32_t k = 0; k < h->n_expert_used; k++) {
    int32_t best = -1;
    for (int32_t e = 0; e < h->n_expert; e++)
      if (rank[e] > -INFINITY && (best < 0 || rank[e] > rank[best])) best = e;
    if (best < 0) return false; /* nothing finite is left */
    rank[best] = -INFINITY;
    int32_t at = k; /* kept in ascending order, so that the sum over experts has one order */
    for (; at > 0 && chosen[at - 1] > best; at--) chosen[at] = chosen[at - 1];
    chosen[at] = best;
  }
  for (int32_t k = 0; k < h->n_expert_used; k++) sum += prob[chosen[k]];
  for (int32_t k = 0; k < h->n_expert_used; k++) weight[k] = prob[chosen[k]] / sum * h->expert_scale;
  return finite;
}

bool m3_cpu_router(const m3_context *c, const m3_ffn_params *p) {
  m3_scratch *s = c->scratch;
  norm_rows(c, p);
  m3_sum_squares(c, M3_INPUT_FFN, 0, s->normed, p->n);
  const m3_factor router = {&p->layer->w[M3_ROUTER], s->logits, c->hparams->n_expert};
  m3_matmul(c, &(m3_matmul_params){.factors = &router, .n_factors = 1, .x = s->normed, .n = p->n});
  bool finite = true;
#pragma omp parallel num_threads(m3_threads_for(c, 16 * (int64_t)p->n * c->hparams->n_expert)) reduction(&& : finite)
  {
    float *work = s->thread + m3_thread_index() * s->thread_floats;
#pragma omp for schedule(static)
    for (int32_t r = 0; r < p->n; r++) {
      bool ok = route_row(c, p, r, work);
      finite = finite && ok;
    }
  }
  return finite;
}

/* The (row, slot) pairs ordered by expert. Within an expert rows keep their order. */
typedef struct groups {
  int32_t *start; /* [n_expert + 1] the first place of each expert */
  int32_t *place; /* [pairs] where the row of a pair stands */
  int32_t *row;   /* [pairs] the row that stands in a place */
} groups;

static groups group_by_expert(const m3_hparams *h, const m3_scratch *s, int64_t pairs) {
  const int32_t *experts = s->experts;
  int32_t *start = s->grouping, *place = start + h->n_expert + 1, *row = place + pairs;
  memset(start, 0, (size_t)(h->n_expert + 1) * sizeof *start);
  for (int64_t i = 0; i < pairs; i++) start[experts[i] + 1]++;
  for (int32_t e = 0; e < h->n_expert; e++) start[e + 1] += start[e];
  for (int64_t i = 0; i < pairs; i++) {
    place[i] = start[experts[i]]++;
    row[place[i]] = (int32_t)(i / h->n_expert_used);
  }
  /* The starts have moved to the next expert's: shift them back. */
  for (int32_t e = h->n_expert; e > 0; e--) start[e] = start[e - 1];
  start[0] = 0;
  return (groups){start, place, row};
}

/* Whether a weight is multiplied in float32, which takes rows that lie one behind the other. */
static bool is_float(const m3_weight *w) { return !m3_coding_of(w->tensor->type); }

/* The inputs of the experts in the order of the places. */
static void gather(const m3_context *c, const groups *g) {
  const m3_scratch *s = c->scratch;
  int64_t n_embd = c->hparams->n_embd, pairs = g->start[c->hparams->n_expert];
#pragma omp parallel for num_threads(m3_threads_for(c, pairs *n_embd)) schedule(static)
  for (int64_t i = 0; i < pairs; i++)
    memcpy(s->expert_in + i * n_embd, s->normed + g->row[i] * n_embd, (size_t)n_embd * sizeof(float));
}

void m3_cpu_experts(const m3_context *c, const m3_ffn_params *p) {
  const m3_hparams *h = c->hparams;
  m3_scratch *s = c->scratch;
  const m3_weight *w = p->layer->w;
  int64_t used = h->n_expert_used, pairs = p->n * used, n_embd = h->n_embd;
  groups g = group_by_expert(h, s, pairs);
  bool gathered = c->inputs || is_float(&w[M3_GATE_EXPS]) || is_float(&w[M3_UP_EXPS]);
  if (gathered) gather(c, &g);
  for (int32_t e = 0; c->inputs && e < h->n_expert; e++)
    m3_sum_squares(c, M3_INPUT_EXPERTS, e, s->expert_in + g.start[e] * n_embd, g.start[e + 1] - g.start[e]);
  gated_mlp(c, &(gated){.w_gate = &w[M3_GATE_EXPS],
                        .w_up = &w[M3_UP_EXPS],
                        .w_down = &w[M3_DOWN_EXPS],
                        .x = gathered ? s->expert_in : s->normed,
                        .n = gathered ? (int32_t)pairs : p->n,
                        .start = g.start,
                        .rows = gathered ? NULL : g.row,
                        .y = s->expert_out,
                        .input = M3_INPUT_EXPERTS_DOWN});
#pragma omp parallel for num_threads(m3_threads_for(c, pairs *n_embd)) schedule(static)
  for (int32_t r = 0; r < p->n; r++) {
    float *sum = s->expert_in + (int64_t)r * n_embd;
    memset(sum, 0, (size_t)n_embd * sizeof(float));
    for (int64_t k = 0; k < used; k++)
      c->kernels->axpy(sum, s->weights[r * used + k], s->expert_out + g.place[r * used + k] * n_embd, n_embd);
    for (int64_t i = 0; i < n_embd; i++) p->hidden[r * n_embd + i] += sum[i];
  }
  if (p->with_shared) m3_cpu_shared(c, p);
}

void m3_cpu_head(const m3_context *c, const m3_head_params *p) {
  int64_t n_embd = c->hparams->n_embd;
  m3_scratch *s = c->scratch;
  for (int32_t r = 0; r < p->n; r++)
    m3_rms_norm(c, p->hidden + r * n_embd, m3_vector(p->norm), n_embd, s->normed + r * n_embd);
  const m3_factor head = {p->head, p->logits, c->hparams->n_vocab};
  m3_matmul(c, &(m3_matmul_params){.factors = &head, .n_factors = 1, .x = s->normed, .n = p->n});
}

bool m3_cpu_head_input(const m3_context *c, const m3_head_input_params *p) {
  int64_t n_embd = c->hparams->n_embd;
  float *normed = c->scratch->normed;
#pragma omp parallel for num_threads(m3_threads_for(c, p->n *n_embd)) schedule(static)
  for (int32_t r = 0; r < p->n; r++)
    m3_rms_norm(c, p->hidden + r * n_embd, m3_vector(p->norm), n_embd, normed + r * n_embd);
  m3_sum_squares(c, M3_INPUT_HEAD, 0, normed, p->n);
  return m3_cpu_finite(c, normed, p->n * n_embd, M3_PART_LOGITS);
}

bool m3_cpu_finite(const m3_context *c, const float *x, int64_t n, m3_part part) {
  (void)part; /* told at once */
  int64_t bad = 0;
#pragma omp parallel for num_threads(m3_threads_for(c, n)) schedule(static) reduction(+ : bad)
  for (int64_t i = 0; i < n; i++) bad += !(fabsf(x[i]) <= FLT_MAX);
  return bad == 0;
}
