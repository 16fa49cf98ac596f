/* Where routed experts are: which layers go to a device, what is refused, and that the CPU computes the others with the
 * bits of its own operation. The device is a stand-in whose operations are the CPU's: it has so much memory as a test
 * gives it, notes what is brought there, and sends rows to and fro as a GPU does. */
#include "cpu/cpu.h"
#include "placement.h"
#include "session.h"
#include "tiny_file.h"

enum { N = 60, MOE = T_LAYER - T_DENSE, EXPERTS = T_EXPERT * 3 * T_EMBD * T_EXPERT_FF * 4 /* bytes of a layer's */ };

static m3_error err;
static uint64_t seen_bytes, free_bytes, total_bytes;
static int sums_taken, expert_calls, host_buffers;
static bool device_fails, router_breaks;

static m3_status weight_alloc(uint64_t n_bytes, const char *purpose, void **out, m3_error *e) {
  (void)purpose;
  *out = malloc(n_bytes);
  return *out ? M3_OK : m3_fail_memory(e, n_bytes, "a test");
}

static m3_status weight_load(void *dst, const void *src, uint64_t n_bytes, m3_error *e) {
  (void)e;
  memcpy(dst, src, n_bytes);
  seen_bytes += n_bytes;
  return M3_OK;
}

static m3_status memory(uint64_t *left, uint64_t *all, m3_error *e) {
  (void)e;
  *left = free_bytes;
  *all = total_bytes;
  return M3_OK;
}

static m3_status host_alloc(uint64_t n_bytes, const char *purpose, void **out, m3_error *e) {
  (void)purpose, (void)e;
  host_buffers++;
  *out = calloc(1, n_bytes);
  return M3_OK;
}

static void host_free(m3_device_state *s, void *p) {
  (void)s;
  host_buffers -= p != NULL;
  free(p);
}

static void send_rows(const m3_context *c, const m3_host_rows *rows) {
  int64_t pairs = (int64_t)rows->n * T_USED;
  memcpy(rows->normed, c->scratch->normed, (size_t)rows->n * T_EMBD * 4);
  memcpy(rows->experts, c->scratch->experts, (size_t)pairs * 4);
  memcpy(rows->weights, c->scratch->weights, (size_t)pairs * 4);
}

static bool rows_sent(const m3_context *c) {
  (void)c;
  return !device_fails;
}

/* Compares the sums with those of the CPU's operation of the same rows. */
static void add_sums(const m3_context *c, const m3_host_rows *rows, float *hidden) {
  static float want[N * T_EMBD];
  const m3_session *s = (const m3_session *)(const void *)((const char *)c->scratch - offsetof(m3_session, scratch));
  memset(want, 0, sizeof want);
  m3_cpu_experts(c, &(m3_ffn_params){&s->model->layers[c->layer], rows->n, want, false});
  CHECK(memcmp(want, rows->sums, (size_t)rows->n * T_EMBD * 4) == 0, "the sums of layer %d differ", (int)c->layer);
  for (int64_t i = 0; i < (int64_t)rows->n * T_EMBD; i++) hidden[i] += rows->sums[i];
  sums_taken++;
}

static void experts(const m3_context *c, const m3_ffn_params *p) {
  CHECK(p->layer->w[M3_GATE_EXPS].device, "experts of layer %d are not on the device", (int)c->layer);
  expert_calls++;
  m3_cpu_experts(c, p);
}

static bool router(const m3_context *c, const m3_ffn_params *p) {
  bool found = m3_cpu_router(c, p);
  if (router_breaks) c->scratch->weights[p->n * T_USED - 1] = NAN;
  return found;
}

static m3_status tell(const m3_context *c, m3_broken *broken, m3_error *e) {
  *broken = (m3_broken){T_DENSE, router_breaks ? M3_PART_ROUTER : M3_PARTS};
  (void)c;
  return device_fails ? m3_fail(e, M3_ERROR_DEVICE, "device test: it failed") : M3_OK;
}

static m3_backend device;

static void make_device(void) {
  device = m3_cpu_backend;
  device.name = "test";
  device.weight_alloc = weight_alloc;
  device.weight_load = weight_load;
  device.weight_free = free;
  device.memory = memory;
  device.host_alloc = host_alloc;
  device.host_free = host_free;
  device.send_rows = send_rows;
  device.rows_sent = rows_sent;
  device.add_sums = add_sums;
  device.router = router;
  device.experts = experts;
  device.finish = tell;
}

static const m3_session_options plain = {
    .struct_size = sizeof(m3_session_options), .context = 64, .record = M3_RECORD_BLOCKS, .n_threads = 1};

static tiny_file file;
static char path[64];
static int32_t ids[N];

/* A model on the device, with nothing loaded yet. */
static m3_model *open_model(int32_t experts_on, m3_status want) {
  m3_model_options o = {.struct_size = sizeof o, .device = M3_DEVICE_CPU};
  m3_model *m;
  if (m3_model_open(path, &o, &m, &err)) abort();
  m->backend = &device;
  seen_bytes = 0;
  m3_status status = m3_placement_open(m, experts_on, &err);
  CHECK(status == want, "status %d: %s", (int)status, err.message);
  return m;
}

typedef struct run {
  float logits[N * T_VOCAB];
  int32_t blocks[MOE][N * T_KV * T_TOP];
} run;

static m3_status eval(m3_session *s, int32_t first, int32_t n, float *out) {
  m3_span span = {0, n};
  m3_batch b = {.struct_size = sizeof b,
                .output = M3_OUTPUT_ALL,
                .n_tokens = n,
                .ids = ids + first,
                .n_spans = 1,
                .spans = &span,
                .out = out,
                .out_count = (int64_t)n * T_VOCAB};
  return m3_session_eval(s, &b, &err);
}

static void run_in_steps(m3_model *m, int32_t step, run *r) {
  m3_session *s;
  if (m3_session_open(m, &plain, &s, &err)) abort();
  for (int32_t i = 0; i < N; i += step) {
    int32_t n = N - i < step ? N - i : step, list = T_KV * T_TOP;
    CHECK(eval(s, i, n, r->logits + i * T_VOCAB) == M3_OK, "%s", err.message);
    for (int l = 0; l < MOE; l++)
      CHECK(m3_session_blocks(s, T_DENSE + l, r->blocks[l] + i * list, n * list, &err) == M3_OK, "%s", err.message);
  }
  m3_session_close(s);
  CHECK(!host_buffers, "%d host buffers are left", host_buffers);
}

static m3_plan plan_of(const m3_model *m) {
  m3_plan p;
  CHECK(m3_session_plan(m, &plain, &p, &err) == M3_OK, "%s", err.message);
  return p;
}

/* The same text on the CPU alone, and on the device with experts here or there; cut into evals of any size. */
static void check_results(void) {
  static run cpu, got, again;
  m3_model_options o = {.struct_size = sizeof o, .device = M3_DEVICE_CPU};
  m3_model *m;
  if (m3_model_open(path, &o, &m, &err)) abort();
  run_in_steps(m, N, &cpu);
  CHECK(m3_model_experts_on(m, T_DENSE) == M3_EXPERTS_CPU && !plan_of(m).cpu_expert_bytes, "a model on the CPU");
  m3_model_close(m);
  for (int32_t on = M3_EXPERTS_GPU; on <= M3_EXPERTS_CPU; on++) {
    m = open_model(on, M3_OK);
    sums_taken = expert_calls = 0;
    run_in_steps(m, N, &got);
    CHECK(sums_taken == (on == M3_EXPERTS_CPU ? MOE : 0) && expert_calls == MOE - sums_taken, "%d sums", sums_taken);
    run_in_steps(m, 7, &again);
    CHECK(memcmp(&got, &again, sizeof got) == 0, "experts %d: cut into pieces", (int)on);
    run_in_steps(m, 1, &again);
    CHECK(memcmp(&got, &again, sizeof got) == 0, "experts %d: token by token", (int)on);
    /* The shared expert is added first where the routed ones are under way. */
    CHECK_CLOSE("logits", got.logits, cpu.logits, N * T_VOCAB, on == M3_EXPERTS_CPU ? 2e-5 : 0);
    CHECK(memcmp(got.blocks, cpu.blocks, sizeof got.blocks) == 0, "experts %d: block lists", (int)on);
    m3_plan p = plan_of(m);
    CHECK(seen_bytes == p.loaded_bytes && p.loaded_bytes == p.weight_bytes + p.expert_bytes, "%llu bytes brought",
          (unsigned long long)seen_bytes);
    m3_model_close(m);
  }
}

static int32_t on_cpu(const m3_model *m) {
  int32_t n = 0;
  for (int32_t l = 0; l < T_LAYER; l++) n += m3_model_experts_on(m, l) == M3_EXPERTS_CPU;
  return n;
}

/* M3_EXPERTS_AUTO with room for all, for some and for no layer's experts. */
static void check_auto(void) {
  total_bytes = 512 << 10;
  uint64_t margin = m3_placement_margin(total_bytes), large = (uint64_t)1 << 30;
  CHECK(margin == 16384 && margin < EXPERTS && m3_placement_margin(64 * large) == 2 * large &&
            m3_placement_margin(140 * large) == 2 * large,
        "margins");
  m3_model *m = open_model(M3_EXPERTS_GPU, M3_OK);
  m3_plan all = plan_of(m);
  m3_model_close(m);
  CHECK(all.expert_bytes == MOE * EXPERTS && all.expert_layers == MOE && !all.cpu_expert_layers && !all.loaded_bytes,
        "%llu bytes of experts", (unsigned long long)all.expert_bytes);
  uint64_t rest = all.weight_bytes + all.kv_bytes + all.index_bytes + all.scratch_bytes;
  const struct {
    uint64_t free;
    int32_t cpu;
  } cases[] = {{rest + MOE * EXPERTS, 0}, /* all of it fits: no margin is kept */
               {rest + MOE * EXPERTS - 1, MOE - 1},
               {rest + margin + EXPERTS, MOE - 1},
               {rest + margin + EXPERTS - 1, MOE},
               {rest, MOE}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    free_bytes = cases[i].free;
    m = open_model(M3_EXPERTS_AUTO, M3_OK);
    CHECK(m3_model_experts_on(m, T_DENSE) == M3_EXPERTS_AUTO && !on_cpu(m), "placed already");
    m3_plan p = plan_of(m);
    CHECK(p.cpu_expert_layers == cases[i].cpu && p.cpu_expert_bytes == (uint64_t)cases[i].cpu * EXPERTS &&
              p.expert_bytes == (uint64_t)(MOE - cases[i].cpu) * EXPERTS && p.weight_bytes == all.weight_bytes &&
              p.free_bytes == free_bytes && p.total_bytes == total_bytes && !p.pinned_bytes == !cases[i].cpu &&
              p.host_bytes >= p.pinned_bytes,
          "case %zu: %d layers on the CPU", i, (int)p.cpu_expert_layers);
    m3_session *s;
    CHECK(m3_session_open(m, &plain, &s, &err) == M3_OK, "case %zu: %s", i, err.message);
    CHECK(m3_model_experts_on(m, T_LAYER - 1) == (cases[i].cpu ? M3_EXPERTS_CPU : M3_EXPERTS_GPU),
          "the last layer's experts are the first to stay");
    CHECK(on_cpu(m) == cases[i].cpu && seen_bytes == p.weight_bytes + p.expert_bytes, "case %zu: placed otherwise", i);
    static float out[N * T_VOCAB];
    sums_taken = expert_calls = 0;
    CHECK(eval(s, 0, N, out) == M3_OK && sums_taken == cases[i].cpu && expert_calls == MOE - sums_taken, "%s",
          err.message);
    m3_session_options later = plain; /* later sessions find what the first one decided */
    later.context = 16;
    CHECK(m3_model_place(m, &later, &err) == M3_OK && on_cpu(m) == cases[i].cpu, "placed again");
    m3_session_close(s);
    m3_model_close(m);
  }
  m = open_model(M3_EXPERTS_AUTO, M3_OK);
  free_bytes = rest + MOE * EXPERTS;
  CHECK(m3_model_load(m, 0, 0, &err) == M3_OK && m3_model_experts_on(m, T_DENSE) == M3_EXPERTS_GPU &&
            seen_bytes == all.weight_bytes + all.expert_bytes,
        "loaded without a plan: %s", err.message);
  m3_model_close(m);
}

static void check_refusals(void) {
  m3_session *s;
  m3_model_options o = {.struct_size = sizeof o, .device = M3_DEVICE_CPU, .experts_on = M3_EXPERTS_GPU};
  m3_model *m;
  CHECK(m3_model_open(path, &o, &m, &err) == M3_ERROR_ARGUMENT && strstr(err.message, "experts_on is gpu") && !m,
        "experts on a GPU that is not there: %s", err.message);
  o.experts_on = 3;
  CHECK(m3_model_open(path, &o, &m, &err) == M3_ERROR_ARGUMENT, "%s", err.message);
  o.experts_on = M3_EXPERTS_CPU;
  CHECK(m3_model_open(path, &o, &m, &err) == M3_OK && m3_model_experts_on(m, T_DENSE) == M3_EXPERTS_CPU &&
            m3_model_experts_on(m, 0) == M3_EXPERTS_AUTO && m3_model_experts_on(m, T_LAYER) == M3_EXPERTS_AUTO,
        "%s", err.message);
  m3_model_close(m);
  device.add_sums = NULL;
  m3_model_close(open_model(M3_EXPERTS_CPU, M3_ERROR_UNSUPPORTED));
  CHECK(strstr(err.message, "backend test") && strstr(err.message, "add_sums"), "%s", err.message);
  m = open_model(M3_EXPERTS_AUTO, M3_OK);
  CHECK(m3_model_experts_on(m, T_DENSE) == M3_EXPERTS_GPU, "a backend that takes no sums has all experts");
  m3_model_close(m);
  device.add_sums = add_sums;
  for (int32_t on = M3_EXPERTS_AUTO; on <= M3_EXPERTS_CPU; on++) {
    free_bytes = 1000;
    m = open_model(on, M3_OK);
    CHECK(m3_session_open(m, &plain, &s, &err) == M3_ERROR_MEMORY && !s && !seen_bytes &&
              strstr(err.message, "weights to load") && !host_buffers,
          "experts %d: %s", (int)on, err.message);
    m3_model_close(m);
  }
  free_bytes = total_bytes;
}

/* What goes wrong on the device leaves the session as it was, and numbers that are broken reach no product. */
static void check_failures(void) {
  static float out[N * T_VOCAB];
  m3_model *m = open_model(M3_EXPERTS_CPU, M3_OK);
  m3_session *s;
  if (m3_session_open(m, &plain, &s, &err)) abort();
  sums_taken = 0;
  device_fails = true;
  CHECK(eval(s, 0, N, out) == M3_ERROR_DEVICE && !sums_taken && m3_session_length(s, 0) == 0, "%s", err.message);
  device_fails = false, router_breaks = true;
  CHECK(eval(s, 0, N, out) == M3_ERROR_NOT_FINITE && strstr(err.message, "router") && !sums_taken, "%s", err.message);
  router_breaks = false;
  CHECK(eval(s, 0, N, out) == M3_OK && sums_taken == MOE && m3_session_length(s, 0) == N, "%s", err.message);
  m3_session_close(s);
  m3_model_close(m);
}

/* From a header: experts that are bound stay where they are, all else is brought. */
static void check_header(void) {
  for (int32_t on = M3_EXPERTS_AUTO; on <= M3_EXPERTS_CPU; on += M3_EXPERTS_CPU) {
    m3_model_options o = {.struct_size = sizeof o, .device = M3_DEVICE_CPU};
    m3_model *m;
    if (m3_model_open_header(file.file.data, file.header_bytes, "header", &o, &m, &err)) abort();
    m->backend = &device;
    CHECK(m3_placement_open(m, on, &err) == M3_OK, "%s", err.message);
    seen_bytes = 0;
    for (int i = 0; i < file.n_tensors; i++) {
      const tiny_tensor *x = &file.tensors[i];
      CHECK(m3_model_bind(m, x->name, -1, tiny_data(&file, x->name), x->n_bytes, &err) == M3_OK, "%s", err.message);
    }
    m3_plan p = plan_of(m);
    CHECK(seen_bytes == p.weight_bytes + p.expert_bytes && p.loaded_bytes == seen_bytes &&
              p.cpu_expert_layers == (on ? MOE : 0),
          "experts %d: %llu bytes brought", (int)on, (unsigned long long)seen_bytes);
    static run got;
    run_in_steps(m, N, &got);
    m3_model_close(m);
  }
}

int main(void) {
  make_device();
  make_tiny_file(&file);
  new_path(path, sizeof path, "m3-placement");
  write_file(path, file.file.data, file.file.size);
  uint64_t seed = 1;
  for (int i = 0; i < N; i++) ids[i] = (int32_t)(next_random(&seed) % T_VOCAB);
  total_bytes = free_bytes = (uint64_t)1 << 31;
  check_results();
  check_refusals();
  check_auto();
  total_bytes = (uint64_t)1 << 31;
  free_bytes = total_bytes;
  check_failures();
  check_header();
  unlink(path);
  free(file.file.data);
  return finish("test_placement");
}
