/* Norms, the dense and the shared MLP, the output head, and the search for numbers that are not finite. */
#include "cuda/few_rows.cuh"
#include "cuda/launch.cuh"
#include "cuda/many_rows.cuh"
#include "cuda/swiglu.cuh"

/* A block for each row, of as many threads as its length needs: what is read must be under way at once. */
enum { NORM_THREADS = 1024 };

__global__ static void norm_rows(const float *x, const float *weight, int32_t n, float eps, float *out) {
  __shared__ float work[NORM_THREADS / M3_WARP + 1];
  m3_wait_for_previous();
  m3_let_next_begin();
  x += (int64_t)blockIdx.x * n;
  out += (int64_t)blockIdx.x * n;
  float sum = 0;
#pragma unroll 8
  for (int32_t i = threadIdx.x; i < n; i += blockDim.x) sum = fmaf(x[i], x[i], sum);
  float r = 1.0f / sqrtf(m3_block_sum(sum, work) / (float)n + eps);
#pragma unroll 8
  for (int32_t i = threadIdx.x; i < n; i += blockDim.x) out[i] = x[i] * r * weight[i];
}

void m3_cuda_norm(m3_device_state *s, const m3_context *c, const float *x, const m3_weight *weight, int32_t n,
                  float *out) {
  int32_t width = c->hparams->n_embd, threads = M3_THREADS;
  if (width >= 2048) threads = NORM_THREADS;
  m3_launch(s, "norm", norm_rows, dim3((unsigned)n), threads, 0, x, (const float *)weight->device, width,
            c->hparams->rms_eps, out);
}

__global__ static void swiglu(float *gate, const float *up, int64_t n, float limit, float alpha) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) gate[i] = m3_swiglu(gate[i], up[i], limit, alpha);
}

void m3_cuda_swiglu(m3_device_state *s, const m3_hparams *h, float *gate, const float *up, int64_t n) {
  swiglu<<<m3_blocks_for(n, M3_THREADS), M3_THREADS, 0, s->stream>>>(gate, up, n, h->swiglu_limit, h->swiglu_alpha);
  m3_launched(s, "SwiGLU");
}

/* hidden += down(swiglu(gate(x), up(x))), x: the norm of hidden if there is one, else scratch normed. */
static void gated_mlp(const m3_context *c, const m3_ffn_params *p, const m3_role (&roles)[3], const m3_weight *norm) {
  m3_device_state *s = c->state;
  m3_scratch *w = c->scratch;
  const m3_weight *gate = &p->layer->w[roles[0]], *up = &p->layer->w[roles[1]], *down = &p->layer->w[roles[2]];
  int64_t width = gate->tensor->ne[1];
  m3_few_product few = m3_one_few_product(gate, norm ? p->hidden : w->normed, p->n, w->gate, false);
  few.parts[0].up = up;
  few.norm = norm;
  m3_product last = m3_one_product(down, w->gate, p->n, p->hidden, true);
  if (!m3_cuda_few_rows(c, &few)) {
    if (norm) m3_cuda_norm(s, c, p->hidden, norm, p->n, w->normed);
    m3_product product = {{{gate, w->gate, width}, {up, w->up, width}}, 2, w->normed, p->n};
    m3_cuda_product(c, &product);
    if (!s->exact && p->n > M3_FEW_ROWS && m3_cuda_has_units(down)) {
      m3_cuda_round_swiglu(c, w->gate, w->up, p->n, (int32_t)width);
      return m3_cuda_many_rows(c, &last);
    }
    m3_cuda_swiglu(s, c->hparams, w->gate, w->up, p->n * width);
  }
  m3_cuda_product(c, &last);
}

void m3_cuda_mlp(const m3_context *c, const m3_ffn_params *p) {
  gated_mlp(c, p, {M3_FFN_GATE, M3_FFN_UP, M3_FFN_DOWN}, &p->layer->w[M3_FFN_NORM]);
}

void m3_cuda_shared(const m3_context *c, const m3_ffn_params *p) {
  gated_mlp(c, p, {M3_GATE_SHEXP, M3_UP_SHEXP, M3_DOWN_SHEXP}, NULL);
}

void m3_cuda_output(const m3_context *c, const m3_output_params *p) {
  m3_product product = m3_one_product(p->weight, p->x, p->n, p->hidden, true);
  m3_cuda_product(c, &product);
}

void m3_cuda_head(const m3_context *c, const m3_head_params *p) {
  m3_few_product few = m3_one_few_product(p->head, p->hidden, p->n, p->logits, false);
  few.norm = p->norm;
  if (m3_cuda_few_rows(c, &few)) return;
  m3_cuda_norm(c->state, c, p->hidden, p->norm, p->n, c->scratch->normed);
  m3_product product = m3_one_product(p->head, c->scratch->normed, p->n, p->logits, false);
  m3_cuda_product(c, &product);
}

__global__ static void find_broken(const float *x, int64_t n, int32_t code, int32_t *broken) {
  bool bad = false;
  int64_t stride = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) bad |= !m3_is_finite(x[i]);
  if (bad) atomicMin(broken, code);
}

bool m3_cuda_finite(const m3_context *c, const float *x, int64_t n, m3_part part) {
  m3_device_state *s = c->state;
  unsigned blocks = m3_blocks_for(n, M3_THREADS * 4);
  if (blocks > 512) blocks = 512;
  find_broken<<<blocks, M3_THREADS, 0, s->stream>>>(x, n, m3_broken_code(c, part), s->broken);
  m3_launched(s, "search for broken numbers");
  return true; /* told by finish */
}
