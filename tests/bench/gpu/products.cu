// Times of matrix products of every type at M3's widths, and of a layer's products as decoding calls them:
// products [few] [many] [layer] [serial]. Prints CSV lines: what, type, rows, us, then GB/s of weights read or TFLOP/s.
#include <string.h>

#include "cuda/few_rows.cuh"
#include "cuda/many_rows.cuh"
#include "cuda/state.cuh"
#include "timing.cuh"

// Where the float16 scales of a block stand: so that random blocks are numbers of a sane size.
struct format {
  int32_t type;
  int block, scales[2];
};
static const format formats[] = {
    {M3_TYPE_Q8_0, 34, {0, -1}},    {M3_TYPE_Q6_K, 210, {208, -1}}, {M3_TYPE_Q5_K, 176, {0, 2}},
    {M3_TYPE_Q4_K, 144, {0, 2}},    {M3_TYPE_Q3_K, 110, {108, -1}}, {M3_TYPE_Q2_K, 84, {80, 82}},
    {M3_TYPE_IQ4_XS, 136, {0, -1}}, {M3_TYPE_IQ2_XXS, 66, {0, -1}}, {M3_TYPE_MXFP4, 17, {-1, -1}},
    {M3_TYPE_Q4_0, 18, {0, -1}},    {M3_TYPE_Q5_1, 24, {0, 2}},     {M3_TYPE_IQ3_S, 110, {0, -1}},
    {M3_TYPE_BF16, 0, {-1, -1}},    {M3_TYPE_F16, 0, {-1, -1}},     {M3_TYPE_F32, 0, {-1, -1}},
};

__global__ static void fill_blocks(uint8_t *p, int64_t n, format f, uint64_t seed) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    uint64_t z = (uint64_t)(i / 8) * 0x9e3779b97f4a7c15ull + seed;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull, z = (z ^ z >> 27) * 0x94d049bb133111ebull, z ^= z >> 31;
    uint8_t v = (uint8_t)(z >> 8 * (i % 8));
    int at = (int)(i % f.block);
    for (int s : f.scales)
      if (s >= 0 && (at == s || at == s + 1)) v = at == s ? v : 0x14; /* some 0.001 */
    if (f.type == M3_TYPE_MXFP4 && at == 0) v = 118 + v % 4;
    p[i] = v;
  }
}

struct matrix {
  m3_tensor tensor;
  m3_weight weight;
};

static matrix *new_matrix(int32_t type, int64_t n_in, int64_t n_out, int64_t n, uint64_t seed) {
  matrix *m = new matrix();
  m->tensor.type = type;
  m->tensor.n_dims = 3;
  m->tensor.ne[0] = n_in, m->tensor.ne[1] = n_out, m->tensor.ne[2] = n, m->tensor.ne[3] = 1;
  m->tensor.n_bytes = (uint64_t)(m3_row_bytes(type, n_in) * n_out * n);
  void *p;
  CUDA(cudaMalloc(&p, m->tensor.n_bytes + 64));
  if (type == M3_TYPE_F32)
    fill_normal((float *)p, n_in * n_out * n, seed);
  else if (type == M3_TYPE_F16)
    fill_normal((__half *)p, n_in * n_out * n, seed);
  else if (type == M3_TYPE_BF16)
    fill_normal((__nv_bfloat16 *)p, n_in * n_out * n, seed);
  else
    for (const format &f : formats)
      if (f.type == type) fill_blocks<<<2048, 256>>>((uint8_t *)p, (int64_t)m->tensor.n_bytes, f, seed);
  CUDA(cudaGetLastError());
  m->weight.tensor = &m->tensor;
  m->weight.device = p;
  return m;
}

static void drop(matrix *m) {
  CUDA(cudaFree(m->weight.device));
  delete m;
}

struct bench {
  m3_hparams h = {};
  m3_scratch scratch = {};
  m3_device_state *state = NULL;
  m3_context c = {};
  float *hidden;
};

enum { ROWS = 2048 };

static float *floats(int64_t n, uint64_t seed) {
  float *p;
  CUDA(cudaMalloc(&p, (size_t)n * 4));
  fill_normal(p, n, seed);
  return p;
}

static bench *new_bench(int32_t n_expert) {
  bench *b = new bench();
  m3_hparams &h = b->h;
  h.n_layer = 1, h.n_embd = 6144, h.n_head = 64, h.n_head_kv = 4, h.head_dim = 128, h.n_ff = 12288,
  h.n_ff_expert = 3072;
  h.n_ff_shared = 3072, h.n_expert = n_expert, h.n_expert_used = 4, h.n_vocab = 200064, h.n_index_head = 4;
  h.index_dim = 128, h.top_k = 16, h.block_size = 128, h.local_blocks = 1, h.rms_eps = 1e-6f, h.expert_scale = 2;
  h.swiglu_alpha = 1.702f, h.swiglu_limit = 7;
  const m3_backend *backend;
  m3_error err;
  m3_state_params p = {};
  p.hparams = &h, p.sequences = 1, p.chunk = ROWS, p.blocks = 1;
  if (m3_cuda_backend(&backend, &err) || backend->open(&p, &b->state, &err)) {
    printf("%s\n", err.message);
    exit(1);
  }
  m3_scratch &s = b->scratch;
  s.normed = floats((int64_t)ROWS * 6144, 1);
  s.q = floats((int64_t)ROWS * 8192, 2);
  s.k = floats((int64_t)ROWS * 512, 3);
  s.v = floats((int64_t)ROWS * 512, 3);
  s.index_q = floats((int64_t)ROWS * 512, 3);
  s.index_k = floats((int64_t)ROWS * 128, 3);
  s.attended = floats((int64_t)ROWS * 8192, 2);
  s.gate = floats((int64_t)ROWS * 12288, 4);
  s.up = floats((int64_t)ROWS * 12288, 5);
  s.expert_out = floats((int64_t)ROWS * 4 * 6144, 6);
  s.logits = floats((int64_t)ROWS * n_expert, 7);
  s.weights = floats((int64_t)ROWS * 4, 8);
  CUDA(cudaMalloc((void **)&s.experts, ROWS * 4 * 4));
  CUDA(cudaMalloc(&s.rounded, (size_t)m3_cuda_input_bytes(&h, ROWS)));
  b->hidden = floats((int64_t)ROWS * 6144, 9);
  b->c.hparams = &b->h;
  b->c.scratch = &b->scratch;
  b->c.state = b->state;
  return b;
}

// Runs f on the stream of a capture.
template <class F>
static float time_us(bench *b, int calls, F f) {
  cudaStream_t own = b->state->stream;
  float us = graph_us(calls, [&](int i, cudaStream_t s) {
    b->state->stream = s;
    f(i);
  });
  b->state->stream = own;
  if (b->state->error != cudaSuccess) {
    printf("%s: %s\n", b->state->where, cudaGetErrorString(b->state->error));
    exit(1);
  }
  return us;
}

// One weight of n_in x n_out, in so many copies that they do not stay in the second cache.
template <class F>
static void time_copies(bench *b, const char *what, int32_t type, int32_t rows, int64_t n_in, int64_t n_out, F f) {
  int copies = (int)(400e6 / (double)(m3_row_bytes(type, n_in) * n_out)) + 2;
  std::vector<matrix *> m;
  for (int i = 0; i < copies; i++) m.push_back(new_matrix(type, n_in, n_out, 1, (uint64_t)i));
  float us = time_us(b, rows > 8 ? 2 : copies, [&](int i) { f(m[(size_t)i]); });
  double bytes = (double)m[0]->tensor.n_bytes, flop = 2.0 * (double)n_in * (double)n_out * rows;
  printf("%s %lldx%lld,%s,%d,%.2f,%.0f,%.1f\n", what, (long long)n_in, (long long)n_out, m3_type_name(type), rows, us,
         bytes / us * 1e-3, flop / us * 1e-6);
  for (matrix *x : m) drop(x);
}

static void time_few(bench *b) {
  for (const format &f : formats) {
    for (int32_t rows = 1; rows <= 8; rows *= 2)
      time_copies(b, "few", f.type, rows, 6144, 9216, [&](matrix *m) {
        m3_few_product p = m3_one_few_product(&m->weight, b->scratch.normed, rows, b->scratch.expert_out, false);
        if (!m3_cuda_few_rows(&b->c, &p)) printf("refused\n");
      });
    time_copies(b, "few", f.type, 1, 3072, 6144, [&](matrix *m) {
      m3_few_product p = m3_one_few_product(&m->weight, b->scratch.normed, 1, b->hidden, true);
      if (!m3_cuda_few_rows(&b->c, &p)) printf("refused\n");
    });
    time_copies(b, "plain", f.type, 1, 6144, 9216, [&](matrix *m) {
      m3_product p = m3_one_product(&m->weight, b->scratch.normed, 1, b->scratch.expert_out, false);
      m3_cuda_plain_product(b->state, &p);
    });
  }
}

static void time_many(bench *b) {
  static const int32_t rows[] = {9, 64, 512, 2048};
  for (const format &f : formats)
    for (int32_t n : rows) {
      time_copies(b, "many", f.type, n, 6144, 6144, [&](matrix *m) {
        m3_product p = m3_one_product(&m->weight, b->scratch.normed, n, b->scratch.expert_out, false);
        m3_cuda_product(&b->c, &p);
      });
      if (n == 512 && m3_type_block_size(f.type) > 1)
        time_copies(b, "plain", f.type, n, 6144, 6144, [&](matrix *m) {
          m3_product p = m3_one_product(&m->weight, b->scratch.normed, n, b->scratch.expert_out, false);
          m3_cuda_plain_product(b->state, &p);
        });
    }
}

// The products of one sparse layer, its router and its experts.
struct layer {
  m3_layer l = {};
  double bytes;  // that a token reads
};

static layer *new_layer(const m3_hparams &h, int32_t type, uint64_t seed) {
  layer *a = new layer();
  m3_weight *w = a->l.w;
  auto put = [&](m3_role role, int32_t t, int64_t n_in, int64_t n_out, int64_t n, int64_t read) {
    w[role] = new_matrix(t, n_in, n_out, n, seed + (uint64_t)role)->weight;
    a->bytes += (double)w[role].tensor->n_bytes * (double)read / (double)n;
  };
  put(M3_ATTN_NORM, M3_TYPE_F32, h.n_embd, 1, 1, 1);
  put(M3_FFN_NORM, M3_TYPE_F32, h.n_embd, 1, 1, 1);
  put(M3_ATTN_Q, type, h.n_embd, 8192, 1, 1);
  put(M3_ATTN_K, type, h.n_embd, 512, 1, 1);
  put(M3_ATTN_V, type, h.n_embd, 512, 1, 1);
  put(M3_INDEX_Q, M3_TYPE_BF16, h.n_embd, 512, 1, 1);
  put(M3_INDEX_K, M3_TYPE_BF16, h.n_embd, 128, 1, 1);
  put(M3_ATTN_OUTPUT, type, 8192, h.n_embd, 1, 1);
  put(M3_ROUTER, M3_TYPE_F32, h.n_embd, h.n_expert, 1, 1);
  put(M3_ROUTER_BIAS, M3_TYPE_F32, h.n_expert, 1, 1, 1);
  put(M3_GATE_EXPS, type, h.n_embd, h.n_ff_expert, h.n_expert, h.n_expert_used);
  put(M3_UP_EXPS, type, h.n_embd, h.n_ff_expert, h.n_expert, h.n_expert_used);
  put(M3_DOWN_EXPS, type, h.n_ff_expert, h.n_embd, h.n_expert, h.n_expert_used);
  put(M3_GATE_SHEXP, type, h.n_embd, h.n_ff_shared, 1, 1);
  put(M3_UP_SHEXP, type, h.n_embd, h.n_ff_shared, 1, 1);
  put(M3_DOWN_SHEXP, type, h.n_ff_shared, h.n_embd, 1, 1);
  return a;
}

static void time_layer(bench *b, int32_t type) {
  enum { LAYERS = 3 };
  layer *layers[LAYERS];
  for (int i = 0; i < LAYERS; i++) layers[i] = new_layer(b->h, type, 1000 * (uint64_t)i);
  static const int32_t rows[] = {1, 2, 8, 64, 512, 2048};
  for (int32_t n : rows) {
    auto prepare = [&](const m3_layer *l) {
      m3_few_product p = {};
      static const m3_role roles[] = {M3_ATTN_Q, M3_ATTN_K, M3_ATTN_V, M3_INDEX_Q, M3_INDEX_K};
      float *to[] = {b->scratch.q, b->scratch.k, b->scratch.v, b->scratch.index_q, b->scratch.index_k};
      m3_product q = {};
      for (p.n_parts = 0; p.n_parts < 5; p.n_parts++) {
        const m3_weight *w = &l->w[roles[p.n_parts]];
        p.parts[p.n_parts] = m3_few_part{w, to[p.n_parts], w->tensor->ne[1]};
        q.parts[p.n_parts] = m3_product_part{w, to[p.n_parts], w->tensor->ne[1]};
      }
      p.x = b->hidden, p.n = n, p.norm = &l->w[M3_ATTN_NORM];
      if (m3_cuda_few_rows(&b->c, &p)) return;
      m3_cuda_norm(b->state, &b->c, b->hidden, p.norm, n, b->scratch.normed);
      q.n_parts = 5, q.x = b->scratch.normed, q.n = n;
      m3_cuda_product(&b->c, &q);
    };
    auto ffn_of = [&](const m3_layer *l) { return m3_ffn_params{l, n, b->hidden, false}; };
    auto output = [&](const m3_layer *l) {
      m3_output_params p = {&l->w[M3_ATTN_OUTPUT], b->scratch.attended, n, b->hidden};
      m3_cuda_output(&b->c, &p);
    };
    auto router = [&](const m3_layer *l) {
      m3_ffn_params p = ffn_of(l);
      m3_cuda_router(&b->c, &p);
    };
    auto experts = [&](const m3_layer *l) {
      m3_ffn_params p = ffn_of(l);
      m3_cuda_experts(&b->c, &p);
    };
    auto shared = [&](const m3_layer *l) {
      m3_ffn_params p = ffn_of(l);
      m3_cuda_shared(&b->c, &p);
    };
    router(&layers[0]->l);  // chooses experts
    CUDA(cudaStreamSynchronize(b->state->stream));
    int calls = n > 8 ? LAYERS : 4 * LAYERS;
    auto report = [&](const char *what, float us, double bytes, double flop) {
      printf("layer %s,%s,%d,%.2f,%.0f,%.1f\n", what, m3_type_name(type), n, us, bytes / us * 1e-3,
             flop * n / us * 1e-6);
    };
    double e = 6144.0, part = 0.5625 * e;
    if (type != M3_TYPE_Q4_K) part = (double)m3_row_bytes(type, 6144);
    report("prepare", time_us(b, calls, [&](int i) { prepare(&layers[i % LAYERS]->l); }), 9216 * part + 640 * 2 * e,
           2 * 9856 * e);
    report("output", time_us(b, calls, [&](int i) { output(&layers[i % LAYERS]->l); }), 8192 * part, 2 * 8192 * e);
    report("router", time_us(b, calls, [&](int i) { router(&layers[i % LAYERS]->l); }), 4 * e * b->h.n_expert,
           2 * e * b->h.n_expert);
    report("experts", time_us(b, calls, [&](int i) { experts(&layers[i % LAYERS]->l); }), 4 * 3 * 3072 * part,
           8 * 3 * 3072 * e);
    report("shared", time_us(b, calls, [&](int i) { shared(&layers[i % LAYERS]->l); }), 3 * 3072 * part,
           2 * 3 * 3072 * e);
    float all = time_us(b, calls, [&](int i) {
      const m3_layer *l = &layers[i % LAYERS]->l;
      m3_ffn_params p = {l, n, b->hidden, true};
      prepare(l), output(l), router(l), m3_cuda_experts(&b->c, &p);
    });
    report("all", all, layers[0]->bytes, 2 * e * (9856 + 8192 + b->h.n_expert + 5 * 3 * 3072));
  }
}

int main(int argc, char **argv) {
  auto asked = [&](const char *name) {
    for (int i = 1; i < argc; i++)
      if (!strcmp(argv[i], name)) return true;
    return argc == 1;
  };
  bench *b = new_bench(32);
  for (int i = 1; i < argc; i++)
    if (!strcmp(argv[i], "serial")) b->state->overlap = false;  // each kernel begins when the one before has ended
  printf("what,type,rows,us,GB/s,TFLOP/s\n");
  if (asked("few")) time_few(b);
  if (asked("many")) time_many(b);
  if (asked("layer")) time_layer(b, M3_TYPE_Q4_K);
  return 0;
}
