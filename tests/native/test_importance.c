/* Sums of squares of what the weight matrices are multiplied with: what single operations add is compared with double
 * precision from the model's definition; what a session adds up must not depend on how it got there. */
#include "definitions.h"
#include "tiny_file.h"

static m3_error err;
static const m3_model_options cpu = {.struct_size = sizeof cpu, .device = M3_DEVICE_CPU};

/* ---------------------------------------------------------------------------------------------- operations */

typedef struct op_sums {
  m3_input_sums got[M3_INPUTS];
  double *want[M3_INPUTS], *want_rows[M3_INPUTS];
} op_sums;

static void add_input(world *w, op_sums *s, m3_input input, int64_t n_matrix, int64_t width) {
  size_t n = (size_t)(n_matrix * width), m = (size_t)n_matrix;
  s->got[input] = (m3_input_sums){n_matrix, width, keep(w, n * 8), keep(w, m * 8)};
  s->want[input] = keep(w, n * 8), s->want_rows[input] = keep(w, m * 8);
}

static void expect(op_sums *s, m3_input input, int32_t matrix, const double *x) {
  int64_t width = s->got[input].width;
  for (int64_t i = 0; i < width; i++) s->want[input][matrix * width + i] += x[i] * x[i];
  s->want_rows[input][matrix] += 1;
}

/* What the down matrix of a gated MLP gets, in double precision. */
static void expect_down(op_sums *s, m3_input input, int32_t matrix, const m3_weight *l, const m3_role roles[2],
                        const double *x) {
  static double gate[MAX_WIDTH], up[MAX_WIDTH];
  exact_product(&l[roles[0]], matrix, x, gate);
  exact_product(&l[roles[1]], matrix, x, up);
  for (int64_t i = 0; i < s->got[input].width; i++) {
    double g = fmin(gate[i], 7.0), u = fmax(-7.0, fmin(up[i], 7.0));
    gate[i] = g / (1.0 + exp(-1.702 * g)) * (u + 1.0);
  }
  expect(s, input, matrix, gate);
}

static void expect_row(world *w, op_sums *s, int32_t row) {
  static const m3_role mlp[] = {M3_FFN_GATE, M3_FFN_UP}, shared[] = {M3_GATE_SHEXP, M3_UP_SHEXP},
                       routed[] = {M3_GATE_EXPS, M3_UP_EXPS};
  static double x[MAX_WIDTH], weights[M3_MAX_EXPERTS];
  int32_t experts[M3_MAX_EXPERTS];
  const float *hidden = w->hidden + (int64_t)row * w->c.n_embd;
  exact_norm(w, hidden, &w->output_norm, w->c.n_embd, x);
  expect(s, M3_INPUT_HEAD, 0, x);
  exact_norm(w, hidden, &w->layer.w[M3_ATTN_NORM], w->c.n_embd, x);
  expect(s, M3_INPUT_ATTENTION, 0, x);
  exact_norm(w, hidden, &w->layer.w[M3_FFN_NORM], w->c.n_embd, x);
  expect(s, M3_INPUT_FFN, 0, x);
  expect_down(s, M3_INPUT_MLP_DOWN, 0, w->layer.w, mlp, x);
  expect_down(s, M3_INPUT_SHARED_DOWN, 0, w->layer.w, shared, x);
  exact_router(w, x, experts, weights);
  for (int32_t k = 0; k < w->c.n_expert_used; k++) {
    expect(s, M3_INPUT_EXPERTS, experts[k], x);
    expect_down(s, M3_INPUT_EXPERTS_DOWN, experts[k], w->layer.w, routed, x);
  }
  const float *attended = w->scratch.attended + (int64_t)row * w->c.n_head * w->c.head_dim;
  for (int32_t i = 0; i < w->c.n_head * w->c.head_dim; i++) x[i] = (double)attended[i];
  expect(s, M3_INPUT_ATTENDED, 0, x);
}

/* Every operation that multiplies activations, on the same hidden states: its output goes to a copy. */
static void run_operations(world *w, m3_context *x) {
  const m3_backend *b = &m3_cpu_backend;
  size_t size = (size_t)w->n * (size_t)w->c.n_embd * sizeof(float);
  float *hidden = keep(w, size);
#define FRESH memcpy(hidden, w->hidden, size)
  m3_ffn_params ffn = {&w->layer, w->n, hidden, false};
  b->output(x, &(m3_output_params){&w->layer.w[M3_ATTN_OUTPUT], w->scratch.attended, w->n, hidden});
  FRESH;
  b->prepare(x, &(m3_prepare_params){&w->layer, &w->rows, hidden, w->cache});
  CHECK(b->head_input(x, &(m3_head_input_params){&w->output_norm, hidden, w->n}), "head input");
  b->mlp(x, &ffn);
  FRESH;
  /* The MLP and the router of one layer share an input: a layer has one of them. */
  double *of_mlp = keep(w, (size_t)w->c.n_embd * 8);
  memcpy(of_mlp, x->inputs[M3_INPUT_FFN].sums, (size_t)w->c.n_embd * 8);
  memset(x->inputs[M3_INPUT_FFN].sums, 0, (size_t)w->c.n_embd * 8);
  x->inputs[M3_INPUT_FFN].rows[0] = 0;
  CHECK(b->router(x, &ffn), "router");
  b->experts(x, &ffn);
  b->shared(x, &ffn);
  CHECK(memcmp(of_mlp, x->inputs[M3_INPUT_FFN].sums, (size_t)w->c.n_embd * 8) == 0, "inputs of MLP and router");
#undef FRESH
}

static void check_operations(m3_isa isa, int32_t threads, op_sums *first) {
  static const op_case c = {.n_head = 4,
                            .n_head_kv = 2,
                            .head_dim = 32,
                            .index_dim = 32,
                            .n_rot = 16,
                            .block_size = 16,
                            .top_k = 2,
                            .local_blocks = 1,
                            .n_embd = 96,
                            .n_ff = 192,
                            .n_ff_expert = 64,
                            .n_ff_shared = 128,
                            .n_expert = 12,
                            .n_expert_used = 3,
                            .n_vocab = 64,
                            .weight_type = M3_TYPE_F16,
                            .kv_type = M3_TYPE_F32,
                            .index_type = M3_TYPE_F32,
                            .n_sequences = 2,
                            .n_rows = 9,
                            .context = 40};
  static const char *const names[] = {"attention",   "attended", "ffn",          "mlp down",
                                      "shared down", "experts",  "experts down", "head"};
  m3_isa chosen;
  if (m3_choose_isa(isa, &chosen, &err)) return; /* a machine without it */
  world *w = new_world(&c, &m3_cpu_backend, threads);
  op_sums s = {0};
  add_input(w, &s, M3_INPUT_ATTENTION, 1, c.n_embd);
  add_input(w, &s, M3_INPUT_ATTENDED, 1, c.n_head * c.head_dim);
  add_input(w, &s, M3_INPUT_FFN, 1, c.n_embd);
  add_input(w, &s, M3_INPUT_MLP_DOWN, 1, c.n_ff);
  add_input(w, &s, M3_INPUT_SHARED_DOWN, 1, c.n_ff_shared);
  add_input(w, &s, M3_INPUT_EXPERTS, c.n_expert, c.n_embd);
  add_input(w, &s, M3_INPUT_EXPERTS_DOWN, c.n_expert, c.n_ff_expert);
  add_input(w, &s, M3_INPUT_HEAD, 1, c.n_embd);
  for (int32_t row = 0; row < w->n; row++) expect_row(w, &s, row);
  m3_context x = {.hparams = &w->h, .kernels = m3_kernels_for(chosen), .scratch = &w->scratch, .inputs = s.got};
  run_operations(w, &x);
  for (int i = 0; i < M3_INPUTS; i++) {
    double worst = 0, rows = 0;
    for (int64_t j = 0; j < s.got[i].n_matrix * s.got[i].width; j++) {
      double d = fabs(s.got[i].sums[j] - s.want[i][j]) / (1.0 + s.want[i][j]);
      if (!(d <= worst)) worst = isnan(d) ? INFINITY : d;
    }
    CHECK(worst < 2e-5, "%s, isa %d: relative difference %g", names[i], (int)isa, worst);
    for (int64_t j = 0; j < s.got[i].n_matrix; j++) {
      CHECK(s.got[i].rows[j] == s.want_rows[i][j], "%s: %g rows of matrix %d, expected %g", names[i], s.got[i].rows[j],
            (int)j, s.want_rows[i][j]);
      rows += s.got[i].rows[j];
    }
    CHECK(rows == w->n * (s.got[i].n_matrix > 1 ? c.n_expert_used : 1), "%s: %g rows", names[i], rows);
    size_t size = (size_t)(s.got[i].n_matrix * s.got[i].width) * 8;
    if (!first->want[i]) {
      first->want[i] = malloc(size);
      if (!first->want[i]) abort();
      memcpy(first->want[i], s.got[i].sums, size);
    } else if (isa == M3_ISA_SCALAR) {
      CHECK(memcmp(first->want[i], s.got[i].sums, size) == 0, "%s depends on the number of threads", names[i]);
    }
  }
  free_world(w);
}

/* ---------------------------------------------------------------------------------------------- sessions */

enum { N = 90, Q = T_HEAD * T_DIM };

static m3_model *model;

static const struct {
  const char *name;
  int64_t n_matrix, n_in;
} weights[] = {{"blk.0.attn_q.weight", 1, T_EMBD},
               {"blk.0.attn_output.weight", 1, Q},
               {"blk.0.ffn_gate.weight", 1, T_EMBD},
               {"blk.0.ffn_up.weight", 1, T_EMBD},
               {"blk.0.ffn_down.weight", 1, T_FF},
               {"blk.1.attn_k.weight", 1, T_EMBD},
               {"blk.1.indexer.k_proj.weight", 1, T_EMBD},
               {"blk.1.ffn_gate_inp.weight", 1, T_EMBD},
               {"blk.1.ffn_gate_exps.weight", T_EXPERT, T_EMBD},
               {"blk.1.ffn_up_exps.weight", T_EXPERT, T_EMBD},
               {"blk.1.ffn_down_exps.weight", T_EXPERT, T_EXPERT_FF},
               {"blk.1.ffn_gate_shexp.weight", 1, T_EMBD},
               {"blk.1.ffn_down_shexp.weight", 1, T_EXPERT_FF},
               {"blk.2.attn_v.weight", 1, T_EMBD},
               {"blk.2.indexer.q_proj.weight", 1, T_EMBD},
               {"blk.2.ffn_down_exps.weight", T_EXPERT, T_EXPERT_FF},
               {"output.weight", 1, T_EMBD}};
enum { N_WEIGHTS = sizeof weights / sizeof *weights, MOST = T_EXPERT * 64 };

typedef struct found {
  double sums[N_WEIGHTS][MOST];
  int64_t counts[N_WEIGHTS][T_EXPERT];
} found;

static m3_session *new_session(m3_session_options o) {
  o.struct_size = sizeof o;
  m3_session *s;
  if (m3_session_open(model, &o, &s, &err)) printf("%s\n", err.message), abort();
  return s;
}

static m3_status eval(m3_session *s, const m3_session_options *o, const void *in, int32_t n, int32_t output,
                      float *out) {
  m3_span span = {0, n};
  m3_batch b = {.struct_size = sizeof b,
                .output = output,
                .n_tokens = n,
                .n_spans = 1,
                .spans = &span,
                .out = out,
                .out_count = output == M3_OUTPUT_HIDDEN ? n * T_EMBD : T_VOCAB};
  if (o->layer_first)
    b.hidden = in;
  else
    b.ids = in;
  return m3_session_eval(s, &b, &err);
}

static m3_status importance(const m3_session *s, int i, found *f) {
  m3_importance out = {.struct_size = sizeof out,
                       .n_matrix = weights[i].n_matrix,
                       .n_in = weights[i].n_in,
                       .sums = f->sums[i],
                       .counts = f->counts[i]};
  return m3_session_importance(s, weights[i].name, &out, &err);
}

static void read_all(const m3_session *s, found *f) {
  for (int i = 0; i < N_WEIGHTS; i++) CHECK(importance(s, i, f) == M3_OK, "%s", err.message);
}

static const m3_session_options plain = {
    .context = 160, .record = M3_RECORD_IMPORTANCE, .flags = M3_SESSION_POISON, .n_threads = 1};

/* Several evals, their outputs of different kinds, a rewind to the start between two texts. */
static void check_cuts(const int32_t *ids, const found *want) {
  static found got;
  static float out[N * T_EMBD + T_VOCAB];
  static const int steps[] = {1, 7, 16, 45};
  for (int i = 0; i < 8; i++) {
    m3_session_options o = plain;
    o.n_threads = 1 + i % 3;
    o.chunk = (int32_t[]){0, 1, 5, 64}[i % 4];
    o.page_seed = (uint64_t)i;
    m3_session *s = new_session(o);
    int step = steps[i % 4];
    for (int at = 0; at < N; at += step)
      CHECK(eval(s, &o, ids + at, N - at < step ? N - at : step, at % 2 ? M3_OUTPUT_LAST : M3_OUTPUT_HIDDEN, out) ==
                M3_OK,
            "%s", err.message);
    memset(&got, 0, sizeof got);
    read_all(s, &got);
    CHECK(memcmp(&got, want, sizeof got) == 0, "cut into pieces of %d, variant %d", step, i);
    CHECK(m3_session_rewind(s, 0, 0, &err) == M3_OK && eval(s, &o, ids, N, M3_OUTPUT_HIDDEN, out) == M3_OK, "%s",
          err.message);
    read_all(s, &got);
    for (int k = 0; k < N_WEIGHTS; k++) {
      CHECK(got.counts[k][0] == 2 * want->counts[k][0], "%s: %lld rows after the second text", weights[k].name,
            (long long)got.counts[k][0]);
      double d = fabs(got.sums[k][3] - 2 * want->sums[k][3]);
      CHECK(d <= 1e-12 * want->sums[k][3], "%s: the second text did not add the same", weights[k].name);
    }
    m3_session_close(s);
  }
}

/* One layer at a time gives the sums of the whole; a layer's first input is the norm of what entered it. */
static void check_windows(const tiny_file *t, const int32_t *ids, const found *want) {
  static found got;
  static float hidden[N * T_EMBD], after[N * T_EMBD];
  memset(&got, 0, sizeof got);
  for (int layer = 0; layer < T_LAYER; layer++) {
    m3_session_options o = plain;
    o.layer_first = layer, o.layer_count = 1;
    m3_session *s = new_session(o);
    CHECK(eval(s, &o, layer ? (const void *)hidden : ids, N, M3_OUTPUT_HIDDEN, after) == M3_OK, "%s", err.message);
    for (int i = 0; i < N_WEIGHTS; i++) {
      bool head = i == N_WEIGHTS - 1, mine = head ? layer == T_LAYER - 1 : weights[i].name[4] - '0' == layer;
      CHECK((importance(s, i, &got) == M3_OK) == mine, "%s in a window of layer %d: %s", weights[i].name, layer,
            err.message);
    }
    m3_session_close(s);
    memcpy(hidden, after, sizeof hidden);
    const char *names[] = {"blk.1.attn_norm.weight", "blk.2.attn_norm.weight", "output_norm.weight"};
    const int first[] = {5, 13, 16};
    const float *norm = tiny_data(t, names[layer]);
    for (int i = 0; i < T_EMBD; i++) {
      double sum = 0;
      for (int r = 0; r < N; r++) {
        double mean = 0;
        for (int j = 0; j < T_EMBD; j++) mean += (double)after[r * T_EMBD + j] * (double)after[r * T_EMBD + j] / T_EMBD;
        double x = (double)after[r * T_EMBD + i] / sqrt(mean + 1e-6) * (double)norm[i];
        sum += x * x;
      }
      CHECK(fabs(sum - want->sums[first[layer]][i]) < 1e-5 * (1 + sum), "%s, column %d: %g, expected %g",
            weights[first[layer]].name, i, want->sums[first[layer]][i], sum);
    }
  }
  CHECK(memcmp(&got, want, sizeof got) == 0, "layer by layer differs from the whole");
}

static void check_shared_inputs(const found *f) {
  CHECK(memcmp(f->sums[2], f->sums[3], T_EMBD * 8) == 0 && memcmp(f->sums[5], f->sums[6], T_EMBD * 8) == 0 &&
            memcmp(f->sums[7], f->sums[11], T_EMBD * 8) == 0 && memcmp(f->sums[8], f->sums[9], sizeof f->sums[8]) == 0,
        "matrices with one input");
  for (int i = 0; i < N_WEIGHTS; i++) {
    int64_t rows = 0;
    for (int64_t m = 0; m < weights[i].n_matrix; m++) rows += f->counts[i][m];
    CHECK(rows == (weights[i].n_matrix > 1 ? N * T_USED : N), "%s: %lld rows", weights[i].name, (long long)rows);
  }
  /* What all experts of a layer got is what its router got, as often as experts are used. */
  for (int c = 0; c < T_EMBD; c++) {
    double sum = 0;
    for (int e = 0; e < T_EXPERT; e++) sum += f->sums[8][e * T_EMBD + c];
    CHECK(fabs(sum - T_USED * f->sums[7][c]) <= 1e-12 * sum, "experts and router, column %d", c);
  }
}

static void check_refusals(void) {
  static found f;
  double sums[MOST];
  int64_t counts[T_EXPERT];
  m3_importance out = {sizeof out, 1, T_EMBD, sums, counts};
  m3_session_options o = plain;
  m3_session *s = new_session(o);
#define REFUSED(name) (m3_session_importance(s, name, &out, &err) == M3_ERROR_ARGUMENT)
  CHECK(importance(s, 0, &f) == M3_OK && f.counts[0][0] == 0 && f.sums[0][0] == 0, "before the first eval");
  CHECK(REFUSED("token_embd.weight") && strstr(err.message, "no matrix"), "%s", err.message);
  CHECK(REFUSED("output_norm.weight") && REFUSED("blk.1.attn_norm.weight") && REFUSED("blk.1.exp_probs_b.bias"),
        "norms and bias");
  CHECK(REFUSED("blk.9.attn_q.weight") && REFUSED("") && REFUSED(NULL), "%s", err.message);
  out.n_in = T_EMBD + 1;
  CHECK(REFUSED("blk.0.attn_q.weight") && strstr(err.message, "expected [1, 32]"), "%s", err.message);
  out.n_in = T_EMBD, out.n_matrix = 2;
  CHECK(REFUSED("blk.0.attn_q.weight") && REFUSED("blk.1.ffn_up_exps.weight"), "%s", err.message);
  out.n_matrix = 1, out.counts = NULL;
  CHECK(REFUSED("blk.0.attn_q.weight"), "no room for counts");
  out.counts = counts, out.struct_size = 8;
  CHECK(REFUSED("blk.0.attn_q.weight") && m3_session_importance(s, "blk.0.attn_q.weight", NULL, &err) != M3_OK,
        "another version of the struct");
  out.struct_size = sizeof out;
  m3_session_close(s);
  o.attention = M3_ATTENTION_DENSE;
  s = new_session(o);
  CHECK(REFUSED("blk.1.indexer.q_proj.weight") && strstr(err.message, "dense"), "%s", err.message);
  CHECK(m3_session_importance(s, "blk.1.attn_q.weight", &out, &err) == M3_OK, "%s", err.message);
  m3_session_close(s);
  o = plain, o.record = M3_RECORD_BLOCKS;
  s = new_session(o);
  CHECK(REFUSED("blk.0.attn_q.weight") && strstr(err.message, "does not record importance"), "%s", err.message);
  m3_session_close(s);
#undef REFUSED
  o = plain, o.record = 2 * M3_RECORD_MASS, o.struct_size = sizeof o;
  CHECK(m3_session_open(model, &o, &s, &err) == M3_ERROR_ARGUMENT, "an unknown record bit");
  m3_memory with, without;
  o.record = M3_RECORD_IMPORTANCE;
  CHECK(m3_session_memory(model, &o, &with, &err) == M3_OK, "%s", err.message);
  o.record = 0;
  CHECK(m3_session_memory(model, &o, &without, &err) == M3_OK, "%s", err.message);
  CHECK(with.scratch_bytes - without.scratch_bytes > 2 * 8 * 2 * T_EXPERT * T_EMBD, "memory of the sums");
}

/* An eval that fails in its last layer, and one that never begins, leave the sums as they were. */
static void check_failures(tiny_file *t, const int32_t *ids, const found *want) {
  char path[64];
  new_path(path, sizeof path, "m3-importance-nan");
  static found got;
  static float out[N * T_EMBD];
  static const char *const broken[] = {"blk.2.ffn_down_exps.weight", "output_norm.weight"};
  m3_model *whole = model;
  for (int i = 0; i < 2; i++) {
    float *x = tiny_data(t, broken[i]), old = x[0];
    x[0] = NAN;
    write_file(path, t->file.data, t->file.size);
    x[0] = old;
    CHECK(m3_model_open(path, &cpu, &model, &err) == M3_OK, "%s", err.message);
    m3_session *s = new_session(plain);
    m3_status status = M3_OK;
    for (int at = 0; at < N && !status; at++) status = eval(s, &plain, ids + at, 1, M3_OUTPUT_HIDDEN, out);
    CHECK(status == M3_ERROR_NOT_FINITE, "%s: '%s'", broken[i], err.message);
    int64_t done = m3_session_length(s, 0);
    CHECK(eval(s, &plain, ids, N, M3_OUTPUT_HIDDEN, out) == M3_ERROR_NOT_FINITE &&
              eval(s, &plain, ids, 1000, M3_OUTPUT_LAST, out) != M3_OK,
          "%s", err.message);
    read_all(s, &got);
    for (int k = 0; k < N_WEIGHTS; k++) {
      if (weights[k].n_matrix == 1) CHECK(got.counts[k][0] == done, "%s keeps rows of a failed eval", weights[k].name);
      for (int64_t c = 0; c < weights[k].n_in; c++)
        CHECK(got.sums[k][c] <= want->sums[k][c], "%s: more than of %d rows", weights[k].name, (int)done);
    }
    m3_session_close(s);
    m3_model_close(model);
  }
  model = whole;
  unlink(path);
}

int main(void) {
  op_sums first = {0};
  for (int32_t threads = 1; threads <= 3; threads++) check_operations(M3_ISA_SCALAR, threads, &first);
  check_operations(M3_ISA_AVX2, 2, &first);
  check_operations(M3_ISA_AVX512, 1, &first);
  check_operations(M3_ISA_NEON, 1, &first);
  for (int i = 0; i < M3_INPUTS; i++) free(first.want[i]);

  tiny_file t;
  make_tiny_file(&t);
  char path[64];
  new_path(path, sizeof path, "m3-importance");
  write_file(path, t.file.data, t.file.size);
  if (m3_model_open(path, &cpu, &model, &err)) {
    printf("%s\n", err.message);
    return 1;
  }
  static int32_t ids[1000];
  uint64_t seed = 3;
  for (int i = 0; i < 1000; i++) ids[i] = (int32_t)(next_random(&seed) % T_VOCAB);
  static found want;
  static float out[N * T_EMBD];
  m3_session *s = new_session(plain);
  CHECK(eval(s, &plain, ids, N, M3_OUTPUT_HIDDEN, out) == M3_OK, "%s", err.message);
  read_all(s, &want);
  m3_session_close(s);
  check_shared_inputs(&want);
  check_cuts(ids, &want);
  check_windows(&t, ids, &want);
  check_refusals();
  check_failures(&t, ids, &want);
  m3_model_close(model);
  unlink(path);
  free(t.file.data);
  return finish("test_importance");
}
