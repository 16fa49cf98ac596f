/* The case table of operations. Every backend and instruction set of this machine runs every case and is compared with
 * the scalar CPU code; selection and attention of the scalar code are compared with a plain computation in double
 * precision written from the definition. */
#include "definitions.h"
#include "msa_definitions.h"
#include "quant/codes.h"

enum { F32 = M3_TYPE_F32, F16 = M3_TYPE_F16, BF16 = M3_TYPE_BF16, Q8 = M3_TYPE_Q8_0, Q4 = M3_TYPE_Q4_0 };

/* Sizes that most cases share; M3's head geometry or an odd one. */
#define M3_HEADS .n_head = 8, .n_head_kv = 2, .head_dim = 128, .index_dim = 128, .n_rot = 64, .block_size = 128
#define ODD_HEADS .n_head = 6, .n_head_kv = 3, .head_dim = 40, .index_dim = 24, .n_rot = 16, .block_size = 16
#define SMALL_FFN \
  .n_embd = 96, .n_ff = 80, .n_ff_expert = 48, .n_ff_shared = 64, .n_expert = 5, .n_expert_used = 2, .n_vocab = 50
#define SUPERBLOCK_FFN \
  .n_embd = 512, .n_ff = 256, .n_ff_expert = 256, .n_ff_shared = 512, .n_expert = 5, .n_expert_used = 2, .n_vocab = 50
#define ODD_FFN \
  .n_embd = 33, .n_ff = 37, .n_ff_expert = 29, .n_ff_shared = 58, .n_expert = 3, .n_expert_used = 3, .n_vocab = 17

static const op_case cases[] = {
    {"context 1", M3_HEADS, SMALL_FFN, .top_k = 16, .local_blocks = 1, .n_sequences = 1, .n_rows = 1, .context = 1},
    {"context 127", M3_HEADS, SMALL_FFN, .top_k = 16, .local_blocks = 1, .n_sequences = 1, .n_rows = 1, .context = 127},
    {"context 128", M3_HEADS, SMALL_FFN, .top_k = 16, .local_blocks = 1, .n_sequences = 1, .n_rows = 2, .context = 128},
    {"context 129", M3_HEADS, SMALL_FFN, .top_k = 16, .local_blocks = 1, .n_sequences = 1, .n_rows = 3, .context = 129},
    {"context 1920", M3_HEADS, SMALL_FFN, .top_k = 16, .local_blocks = 1, .n_sequences = 1, .n_rows = 1,
     .context = 1920},
    {"context 2047", M3_HEADS, SMALL_FFN, .top_k = 16, .local_blocks = 1, .n_sequences = 1, .n_rows = 2,
     .context = 2047},
    {"context 2048", M3_HEADS, SMALL_FFN, .top_k = 16, .local_blocks = 1, .n_sequences = 1, .n_rows = 2,
     .context = 2048},
    {"context 2049", M3_HEADS, SMALL_FFN, .top_k = 16, .local_blocks = 1, .n_sequences = 1, .n_rows = 3,
     .context = 2049},
    {"top_k 17", M3_HEADS, SMALL_FFN, .top_k = 17, .local_blocks = 1, .n_sequences = 1, .n_rows = 2, .context = 2400},
    {"top_k 32", M3_HEADS, SMALL_FFN, .top_k = 32, .local_blocks = 2, .n_sequences = 1, .n_rows = 1, .context = 4300},
    {"tokens = heads", .n_head = 4, .n_head_kv = 4, .head_dim = 16, .index_dim = 16, .n_rot = 8, .block_size = 16,
     SMALL_FFN, .top_k = 3, .local_blocks = 1, .n_sequences = 1, .n_rows = 4, .context = 100},
    {"2 heads x 3 tokens", .n_head = 2, .n_head_kv = 2, .head_dim = 16, .index_dim = 16, .n_rot = 16, .block_size = 16,
     SMALL_FFN, .top_k = 1, .local_blocks = 1, .n_sequences = 1, .n_rows = 3, .context = 50},
    {"tail of 241 tokens", M3_HEADS, SMALL_FFN, .top_k = 4, .local_blocks = 1, .n_sequences = 1, .n_rows = 15,
     .context = 255},
    {"16 heads a group", .n_head = 32, .n_head_kv = 2, .head_dim = 128, .index_dim = 128, .n_rot = 64,
     .block_size = 128, SMALL_FFN, .top_k = 16, .local_blocks = 1, .n_sequences = 1, .n_rows = 2, .context = 2300},
    {"odd sizes", ODD_HEADS, ODD_FFN, .top_k = 5, .local_blocks = 2, .n_sequences = 1, .n_rows = 7, .context = 203},
    {"local fills top_k", ODD_HEADS, ODD_FFN, .top_k = 3, .local_blocks = 3, .n_sequences = 1, .n_rows = 5,
     .context = 155},
    {"three sequences", ODD_HEADS, SMALL_FFN, .top_k = 3, .local_blocks = 1, .n_sequences = 3, .n_rows = 4,
     .context = 130},
    {"F16 cache", M3_HEADS, SMALL_FFN, .top_k = 4, .local_blocks = 1, .n_sequences = 1, .n_rows = 3, .context = 1000,
     .weight_type = F16, .kv_type = F16, .index_type = F16},
    {"BF16 cache", M3_HEADS, SMALL_FFN, .top_k = 4, .local_blocks = 1, .n_sequences = 2, .n_rows = 2, .context = 700,
     .weight_type = BF16, .kv_type = BF16, .index_type = BF16},
    {"Q8_0 cache", M3_HEADS, SMALL_FFN, .top_k = 4, .local_blocks = 1, .n_sequences = 2, .n_rows = 2, .context = 700,
     .kv_type = Q8, .index_type = Q8},
    {"Q4_0 cache", M3_HEADS, SMALL_FFN, .top_k = 4, .local_blocks = 1, .n_sequences = 1, .n_rows = 3, .context = 700,
     .kv_type = Q4, .index_type = F16},
    {"Q8_0 weights", M3_HEADS, SMALL_FFN, .top_k = 4, .local_blocks = 1, .n_sequences = 1, .n_rows = 5, .context = 600,
     .weight_type = Q8, .kv_type = F16},
    {"Q4_K weights", M3_HEADS, SUPERBLOCK_FFN, .top_k = 4, .local_blocks = 1, .n_sequences = 1, .n_rows = 7,
     .context = 600, .weight_type = M3_TYPE_Q4_K, .kv_type = F16},
    {"Q6_K weights, many rows", M3_HEADS, SUPERBLOCK_FFN, .top_k = 4, .local_blocks = 1, .n_sequences = 1, .n_rows = 29,
     .context = 600, .weight_type = M3_TYPE_Q6_K, .kv_type = F16},
    {"IQ3_S weights", M3_HEADS, SUPERBLOCK_FFN, .top_k = 4, .local_blocks = 1, .n_sequences = 1, .n_rows = 2,
     .context = 600, .weight_type = M3_TYPE_IQ3_S, .kv_type = F16},
    {"Q8_0, odd rows fall to F16", ODD_HEADS, ODD_FFN, .top_k = 4, .local_blocks = 1, .n_sequences = 1, .n_rows = 2,
     .context = 90, .weight_type = Q8},
    {"block 1024", .n_head = 2, .n_head_kv = 1, .head_dim = 32, .index_dim = 32, .n_rot = 32, .block_size = 1024,
     SMALL_FFN, .top_k = 2, .local_blocks = 1, .n_sequences = 1, .n_rows = 2, .context = 4097},
};

/* A backend with its kernels. */
typedef struct engine {
  const char *name;
  const m3_backend *backend;
  const m3_kernels *kernels;
  int32_t threads;
} engine;

static m3_context context_of(const engine *e, world *w) {
  return (m3_context){.hparams = &w->h, .kernels = e->kernels, .scratch = &w->scratch, .state = w->state};
}

/* Waits for the operations so far. `known` is what the last one said of its numbers; false if one has found a broken
 * number. */
static bool sound(const engine *e, world *w, bool known) {
  m3_context x = context_of(e, w);
  m3_broken broken;
  m3_error err;
  m3_status status = e->backend->finish(&x, &broken, &err);
  CHECK(status == M3_OK, "%s", err.message);
  if (status) exit(finish("test_ops"));
  e->backend->begin(&x, &w->rows);
  return known && broken.part == M3_PARTS;
}

static void wait_for(const engine *e, world *w) { sound(e, w, true); }

/* ---------------------------------------------------------------------------------------------- operations */

static void run_select_and_attend(const engine *e, world *w) {
  const op_case *c = &w->c;
  m3_context x = context_of(e, w);
  int64_t blocks = blocks_of_case(c), lists = (int64_t)w->n * c->n_head_kv;
  float *scores = keep(w, (size_t)(lists * blocks) * sizeof(float));
  int32_t *with_scores = keep(w, (size_t)(lists * c->top_k) * sizeof(int32_t));
  m3_select_params p = {&w->rows, w->cache, with_scores, scores, blocks, blocks, 0};
  CHECK(sound(e, w, e->backend->select(&x, &p)), "%s, %s: not finite", c->name, e->name);
  p.blocks = w->scratch.blocks;
  p.scores = NULL;
  CHECK(sound(e, w, e->backend->select(&x, &p)), "%s, %s: not finite", c->name, e->name);
  CHECK(memcmp(with_scores, w->scratch.blocks, (size_t)(lists * c->top_k) * 4) == 0,
        "%s: recording scores changed the lists", c->name);
  for (int32_t row = 0; row < w->n; row++)
    for (int32_t head = 0; head < c->n_head_kv; head++) {
      int64_t list = (int64_t)row * c->n_head_kv + head;
      static double exact[4096];
      double slack = exact_scores(w, row, head, exact) * 0x1p-18;
      check_list(w, e->name, row, head, w->scratch.blocks + list * c->top_k, exact, slack);
      for (int64_t b = 0; b < blocks; b++) {
        bool visible = b * c->block_size <= w->rows.pos[row];
        float got = scores[list * blocks + b];
        CHECK(visible ? fabs((double)got - exact[b]) <= slack : got == -INFINITY,
              "%s, %s: score of block %lld: %g, exact %g", c->name, e->name, (long long)b, (double)got, exact[b]);
      }
    }
  int64_t n = (int64_t)w->n * c->n_head * c->head_dim;
  float *out = keep(w, (size_t)n * sizeof(float));
  memset(out, 0xff, (size_t)n * sizeof(float)); /* NaN where nothing is written */
  e->backend->attend(&x, &(m3_attend_params){&w->rows, w->cache, w->scratch.blocks, out, NULL});
  wait_for(e, w);
  check_attention(w, "sparse attention", w->scratch.blocks, out, NULL);
  int64_t n_mass = (int64_t)w->n * c->n_head * c->top_k;
  float *with_mass = keep(w, (size_t)n * sizeof(float)), *mass = keep(w, (size_t)n_mass * sizeof(float));
  memset(mass, 0xff, (size_t)n_mass * sizeof(float));
  e->backend->attend(&x, &(m3_attend_params){&w->rows, w->cache, w->scratch.blocks, with_mass, mass});
  wait_for(e, w);
  check_attention(w, "sparse attention with masses", w->scratch.blocks, with_mass, mass);
  CHECK(memcmp(out, with_mass, (size_t)n * sizeof(float)) == 0, "%s: recording masses changed the result", c->name);
  memset(out, 0xff, (size_t)n * sizeof(float));
  e->backend->attend(&x, &(m3_attend_params){&w->rows, w->cache, NULL, out, NULL});
  wait_for(e, w);
  check_attention(w, "dense attention", NULL, out, NULL);
}

/* What an operation wrote, to be compared with the scalar code's. */
typedef struct result {
  const char *what;
  float *values;
  int64_t n;
} result;

static result copy_of(world *w, const char *what, const void *values, int64_t n) {
  result r = {what, keep(w, (size_t)n * sizeof(float)), n};
  memcpy(r.values, values, (size_t)n * sizeof(float));
  return r;
}

/* Cache rows of the chunk as float32, and whether any other row changed from what it was. */
static result cache_rows(world *w, const char *what, int32_t type, const void *base, int32_t heads, int64_t dim) {
  const op_case *c = &w->c;
  float *out = keep(w, (size_t)((int64_t)w->n * heads * dim) * sizeof(float));
  for (int32_t row = 0; row < w->n; row++)
    for (int32_t head = 0; head < heads; head++) {
      int64_t pos = w->rows.pos[row], page = w->rows.tables[w->rows.seq[row]][pos / c->block_size];
      int64_t at = (page * heads + head) * c->block_size + pos % c->block_size;
      m3_traits(type)->to_f32((const char *)base + at * m3_row_bytes(type, dim),
                              out + ((int64_t)row * heads + head) * dim, dim);
    }
  return (result){what, out, (int64_t)w->n * heads * dim};
}

/* What stands in the cache are the bytes that the type's encoder makes of keys and values in the scratch. */
static void check_cached(const engine *e, world *w, int32_t type, const void *base, const float *x, int32_t heads,
                         int64_t dim) {
  const op_case *c = &w->c;
  static uint8_t want[M3_MAX_HEAD_DIM * 4];
  int64_t bytes = m3_row_bytes(type, dim), different = 0;
  for (int32_t row = 0; row < w->n; row++)
    for (int32_t head = 0; head < heads; head++) {
      int64_t pos = w->rows.pos[row], page = w->rows.tables[w->rows.seq[row]][pos / c->block_size];
      int64_t at = (page * heads + head) * c->block_size + pos % c->block_size;
      m3_traits(type)->from_f32(x + ((int64_t)row * heads + head) * dim, want, dim, NULL);
      different += memcmp(want, (const char *)base + at * bytes, (size_t)bytes) != 0;
    }
  CHECK(different == 0, "%s, %s: %lld cached rows of type %s are not what its encoder makes", c->name, e->name,
        (long long)different, m3_type_name(type));
}

/* Distance between neighbors in a type, of numbers up to `most`. */
static double unit_of(int32_t type, double most) {
  return type == F16    ? most * 0x1p-10
         : type == BF16 ? most * 0x1p-7
         : type == Q8   ? most / 127
         : type == Q4   ? most / 8
                        : 0;
}

/* Cached rows of the chunk after a rotation: what double precision makes of the rows before it, rounded to the type
 * once more; channels behind the last block that turns, and all other rows, are as they were in `old`. */
static void check_turned(const engine *e, world *w, int32_t type, const char *base, char *old, int32_t heads,
                         int64_t dim) {
  const op_case *c = &w->c;
  static float before[M3_MAX_HEAD_DIM], after[M3_MAX_HEAD_DIM];
  int64_t bytes = m3_row_bytes(type, dim), block = m3_type_block_size(type), half = c->n_rot / 2;
  int64_t turning = (c->n_rot + block - 1) / block * block;
  double worst = 0, moved = 0;
  for (int32_t i = 0; i < w->n * heads; i++) {
    int32_t row = i / heads;
    int64_t pos = w->rows.pos[row], page = w->rows.tables[w->rows.seq[row]][pos / c->block_size];
    int64_t at = ((page * heads + i % heads) * c->block_size + pos % c->block_size) * bytes;
    m3_traits(type)->to_f32(old + at, before, dim);
    m3_traits(type)->to_f32(base + at, after, dim);
    double most = 0;
    for (int64_t j = 0; j < dim; j++) most = fmax(most, fabs((double)before[j]));
    for (int64_t j = 0; j < half; j++) {
      double cosine = (double)w->rows.cos[row * half + j], sine = (double)w->rows.sin[row * half + j];
      double first = before[j] * cosine - before[j + half] * sine,
             second = before[j + half] * cosine + before[j] * sine;
      double off = fmax(fabs(after[j] - first), fabs(after[j + half] - second));
      worst = fmax(worst, off / (1.01 * unit_of(type, 1.42 * most) + 1e-6 * (1 + most)));
      moved = fmax(moved, fabs(first - (double)before[j]));
    }
    memcpy(old + at, base + at, (size_t)m3_row_bytes(type, turning));
  }
  CHECK(worst <= 1 && (moved > 0.01 || c->context == 1), "%s, %s: %s rows are turned wrong: %g units", c->name, e->name,
        m3_type_name(type), worst);
  CHECK(memcmp(old, base, (size_t)(w->n_pages * heads * c->block_size * bytes)) == 0,
        "%s, %s: a rotation changed other rows or channels", c->name, e->name);
}

static char *copy_of_pages(world *w, const void *pages, int32_t heads, int64_t row_bytes) {
  size_t bytes = (size_t)(w->n_pages * heads * w->c.block_size * row_bytes);
  return memcpy(keep(w, bytes), pages, bytes);
}

/* Turns the chunk's rows in the cache. */
static void run_rotate(const engine *e, world *w) {
  const op_case *c = &w->c;
  m3_context x = context_of(e, w);
  int64_t kv_bytes = m3_row_bytes(c->kv_type, c->head_dim), index_bytes = m3_row_bytes(c->index_type, c->index_dim);
  char *k = copy_of_pages(w, w->cache.k, c->n_head_kv, kv_bytes);
  char *v = copy_of_pages(w, w->cache.v, c->n_head_kv, kv_bytes);
  char *index = copy_of_pages(w, w->cache.index, 1, index_bytes);
  e->backend->rotate(&x, &(m3_rotate_params){&w->rows, w->cache});
  wait_for(e, w);
  check_turned(e, w, c->kv_type, w->cache.k, k, c->n_head_kv, c->head_dim);
  check_turned(e, w, c->index_type, w->cache.index, index, 1, c->index_dim);
  CHECK(memcmp(v, w->cache.v, (size_t)(w->n_pages * c->n_head_kv * c->block_size * kv_bytes)) == 0,
        "%s, %s: a rotation changed values", c->name, e->name);
}

enum { MAX_RESULTS = 16 };

/* Runs everything but selection and attention on fresh numbers. */
static int run_rest(const engine *e, world *w, result *r) {
  const op_case *c = &w->c;
  const m3_backend *b = e->backend;
  m3_context x = context_of(e, w);
  int64_t hidden = (int64_t)w->n * c->n_embd;
  int n = 0;
  m3_ffn_params ffn = {&w->layer, w->n, w->hidden, false};
  b->prepare(&x, &(m3_prepare_params){&w->layer, &w->rows, w->hidden, w->cache});
  wait_for(e, w);
  check_cached(e, w, c->kv_type, w->cache.k, w->scratch.k, c->n_head_kv, c->head_dim);
  check_cached(e, w, c->kv_type, w->cache.v, w->scratch.v, c->n_head_kv, c->head_dim);
  check_cached(e, w, c->index_type, w->cache.index, w->scratch.index_k, 1, c->index_dim);
  r[n++] = copy_of(w, "q", w->scratch.q, (int64_t)w->n * c->n_head * c->head_dim);
  r[n++] = copy_of(w, "index q", w->scratch.index_q, (int64_t)w->n * c->n_head_kv * c->index_dim);
  r[n++] = cache_rows(w, "cached k", c->kv_type, w->cache.k, c->n_head_kv, c->head_dim);
  r[n++] = cache_rows(w, "cached v", c->kv_type, w->cache.v, c->n_head_kv, c->head_dim);
  r[n++] = cache_rows(w, "cached index k", c->index_type, w->cache.index, 1, c->index_dim);
  run_rotate(e, w);
  b->output(&x, &(m3_output_params){&w->layer.w[M3_ATTN_OUTPUT], w->scratch.attended, w->n, w->hidden});
  wait_for(e, w);
  r[n++] = copy_of(w, "output", w->hidden, hidden);
  b->mlp(&x, &ffn);
  wait_for(e, w);
  r[n++] = copy_of(w, "mlp", w->hidden, hidden);
  CHECK(sound(e, w, b->router(&x, &ffn)), "%s: router not finite", c->name);
  r[n++] = copy_of(w, "router weights", w->scratch.weights, (int64_t)w->n * c->n_expert_used);
  result before = copy_of(w, "router", w->hidden, hidden);
  b->experts(&x, &ffn);
  wait_for(e, w);
  r[n++] = copy_of(w, "experts", w->hidden, hidden);
  b->shared(&x, &ffn);
  wait_for(e, w);
  r[n++] = copy_of(w, "shared", w->hidden, hidden);
  memcpy(w->hidden, before.values, (size_t)hidden * sizeof(float));
  ffn.with_shared = true;
  b->experts(&x, &ffn);
  wait_for(e, w);
  CHECK(memcmp(w->hidden, r[n - 1].values, (size_t)hidden * sizeof(float)) == 0, "%s, %s: experts with the shared one",
        c->name, e->name);
  CHECK(sound(e, w, b->finite(&x, w->hidden, hidden, M3_PART_OUTPUT)), "%s: hidden not finite", c->name);
  float *logits = keep(w, (size_t)((int64_t)w->n * c->n_vocab) * sizeof(float));
  b->head(&x, &(m3_head_params){&w->output_norm, &w->head, w->hidden, w->n, logits});
  wait_for(e, w);
  r[n++] = (result){"head", logits, (int64_t)w->n * c->n_vocab};
  b->embed(&x, &(m3_embed_params){&w->embd, &w->rows, w->hidden});
  wait_for(e, w);
  r[n++] = copy_of(w, "embed", w->hidden, hidden);
  return n;
}

static double largest(const float *x, int64_t n) {
  double size = 0;
  for (int64_t i = 0; i < n; i++) size = fmax(size, fabs((double)x[i]));
  return size;
}

/* Relative to the values: float32, and before weights of block types inputs that round to different neighbors, or that
 * the GPU does not round. */
static double rounding(const engine *e, const op_case *c) {
  if (!m3_coding_of(c->weight_type)) return 1e-5;
  return e->backend != &m3_cpu_backend && c->exact ? 1.5e-3 : 1.5e-4;
}

/* Sums of float32 in another order, relative to the values. A cached value may differ by one unit of its type where the
 * float32 results round to different neighbours. */
static double tolerance(const engine *e, const op_case *c, const result *r) {
  bool cached = strncmp(r->what, "cached", 6) == 0;
  int32_t type = strcmp(r->what, "cached index k") == 0 ? c->index_type : c->kv_type;
  if (cached && type == F16) return 4e-3;
  if (cached && type == BF16) return 4e-2;
  if (cached && type == Q8) return 1.01 * largest(r->values, r->n) / 127;
  if (cached && type == Q4) return 1.01 * largest(r->values, r->n) / 8;
  if (strcmp(r->what, "embed") == 0) return 0; /* what is stored has one value */
  return rounding(e, c) * (1 + largest(r->values, r->n));
}

static void run_case(const op_case *c, const engine *spec, const engine *e) {
  world *want = new_world(c, spec->backend, spec->threads), *got = new_world(c, e->backend, e->threads);
  result a[MAX_RESULTS], b[MAX_RESULTS];
  run_select_and_attend(e, got);
  free_world(got);
  got = new_world(c, e->backend, e->threads);
  int n = run_rest(spec, want, a), m = run_rest(e, got, b);
  CHECK(n == m, "results");
  for (int i = 0; i < n; i++) {
    char what[160];
    snprintf(what, sizeof what, "%s, %s with %d threads: %s", c->name, e->name, e->threads, a[i].what);
    CHECK_CLOSE(what, b[i].values, a[i].values, a[i].n, tolerance(e, c, &a[i]));
  }
  CHECK(memcmp(want->scratch.experts, got->scratch.experts, (size_t)(want->n * c->n_expert_used) * 4) == 0,
        "%s, %s: other experts chosen", c->name, e->name);
  free_world(want);
  free_world(got);
}

/* The scalar code against the definitions: what is left of the hidden state after each operation. */
static void check_definitions(const engine *e, const op_case *c) {
  static const m3_role mlp[] = {M3_FFN_GATE, M3_FFN_UP, M3_FFN_DOWN};
  static const m3_role routed[] = {M3_GATE_EXPS, M3_UP_EXPS, M3_DOWN_EXPS};
  static const m3_role shared[] = {M3_GATE_SHEXP, M3_UP_SHEXP, M3_DOWN_SHEXP};
  static const m3_role q_roles[] = {M3_ATTN_Q, M3_ATTN_Q_NORM}, index_roles[] = {M3_INDEX_Q, M3_INDEX_Q_NORM};
  static double normed[MAX_WIDTH], exact[MAX_WIDTH], weights[M3_MAX_EXPERTS];
  static float want[MAX_WIDTH];
  world *w = new_world(c, e->backend, e->threads);
  m3_context x = context_of(e, w);
  m3_ffn_params ffn = {&w->layer, w->n, w->hidden, false};
  int64_t n_embd = c->n_embd;
  float *before = keep(w, (size_t)(w->n * n_embd) * sizeof(float));
  e->backend->prepare(&x, &(m3_prepare_params){&w->layer, &w->rows, w->hidden, w->cache});
  wait_for(e, w);
  for (int32_t row = 0; row < w->n; row++) {
    exact_head(w, row, q_roles, c->n_head - 1, c->head_dim, want);
    CHECK_CLOSE("q by definition", w->scratch.q + ((int64_t)row * c->n_head + c->n_head - 1) * c->head_dim, want,
                c->head_dim, 10 * rounding(e, c));
    exact_head(w, row, index_roles, 0, c->index_dim, want);
    CHECK_CLOSE("index q by definition", w->scratch.index_q + (int64_t)row * c->n_head_kv * c->index_dim, want,
                c->index_dim, 10 * rounding(e, c));
  }
  for (int step = 0; step < 2; step++) { /* the dense MLP, then router, experts and shared expert */
    memcpy(before, w->hidden, (size_t)(w->n * n_embd) * sizeof(float));
    if (step == 0) {
      e->backend->mlp(&x, &ffn);
    } else {
      e->backend->router(&x, &ffn);
      e->backend->experts(&x, &ffn);
      e->backend->shared(&x, &ffn);
    }
    wait_for(e, w);
    for (int32_t row = 0; row < w->n; row++) {
      int32_t experts[M3_MAX_EXPERTS];
      exact_norm(w, before + row * n_embd, &w->layer.w[M3_FFN_NORM], n_embd, normed);
      for (int64_t i = 0; i < n_embd; i++) exact[i] = (double)before[row * n_embd + i];
      if (step == 0) {
        add_gated(w->layer.w, mlp, 0, normed, 1.0, exact);
      } else {
        exact_router(w, normed, experts, weights);
        CHECK(memcmp(experts, w->scratch.experts + row * c->n_expert_used, (size_t)c->n_expert_used * 4) == 0,
              "%s: row %d chose other experts", c->name, row);
        for (int32_t k = 0; k < c->n_expert_used; k++)
          add_gated(w->layer.w, routed, experts[k], normed, weights[k], exact);
        add_gated(w->layer.w, shared, 0, normed, 1.0, exact);
      }
      for (int64_t i = 0; i < n_embd; i++) want[i] = (float)exact[i];
      CHECK_CLOSE(step ? "experts by definition" : "mlp by definition", w->hidden + row * n_embd, want, n_embd,
                  rounding(e, c) * (1 + largest(want, n_embd)));
    }
  }
  float *logits = keep(w, (size_t)((int64_t)w->n * c->n_vocab) * sizeof(float));
  e->backend->head(&x, &(m3_head_params){&w->output_norm, &w->head, w->hidden, w->n, logits});
  wait_for(e, w);
  exact_norm(w, w->hidden, &w->output_norm, n_embd, normed);
  exact_product(&w->head, 0, normed, exact);
  for (int64_t i = 0; i < c->n_vocab; i++) want[i] = (float)exact[i];
  CHECK_CLOSE("head by definition", logits, want, c->n_vocab, 1e-4);
  free_world(w);
}

/* ---------------------------------------------------------------------------------------------- edges */

/* Equal scores across the cut: the lower ids win, on every path. Twenty blocks, all keys equal. */
static void check_ties(const engine *e) {
  op_case c = {"ties",           ODD_HEADS,   SMALL_FFN,     .top_k = 6, .local_blocks = 1,
               .n_sequences = 1, .n_rows = 3, .context = 320};
  for (int rows = 1; rows <= 3; rows += 2) {
    c.n_rows = rows;
    world *w = new_world(&c, e->backend, e->threads);
    float key[24];
    for (int i = 0; i < 24; i++) key[i] = 0.25f * (float)(i % 5);
    for (int64_t i = 0; i < (int64_t)w->n_pages * c.block_size; i++) store_row(F32, w->cache.index, i, key, 24);
    m3_context x = context_of(e, w);
    m3_select_params p = {.rows = &w->rows, .cache = w->cache, .blocks = w->scratch.blocks, .max_blocks = 20};
    CHECK(sound(e, w, e->backend->select(&x, &p)), "ties: not finite");
    static const int32_t want[] = {0, 1, 2, 3, 4, 19};
    for (int32_t list = 0; list < w->n * c.n_head_kv; list++)
      CHECK(memcmp(w->scratch.blocks + list * c.top_k, want, sizeof want) == 0, "ties, %s: list %d is %d %d %d ...",
            e->name, list, w->scratch.blocks[list * c.top_k], w->scratch.blocks[list * c.top_k + 1],
            w->scratch.blocks[list * c.top_k + 2]);
    free_world(w);
  }
}

/* NaN and infinity that matter are reported, wherever they come from. */
static void check_not_finite(const engine *e) {
  op_case c = {"not finite",      ODD_HEADS,        SMALL_FFN,   .top_k = 3,
               .local_blocks = 1, .n_sequences = 1, .n_rows = 2, .context = 200};
  static const float bad[] = {NAN, INFINITY, -INFINITY};
  for (int i = 0; i < 3; i++) {
    world *w = new_world(&c, e->backend, e->threads);
    m3_context x = context_of(e, w);
    float key[24] = {0};
    key[23] = bad[i];
    store_row(F32, w->cache.index, (int64_t)w->rows.tables[0][2] * c.block_size + 5, key, 24);
    m3_select_params p = {.rows = &w->rows, .cache = w->cache, .blocks = w->scratch.blocks, .max_blocks = 13};
    CHECK(!sound(e, w, e->backend->select(&x, &p)), "%s: a key with %g was accepted", e->name, (double)bad[i]);
    m3_ffn_params ffn = {&w->layer, w->n, w->hidden, false};
    float *router = (float *)(uintptr_t)w->layer.w[M3_ROUTER].data;
    router[7] = bad[i];
    CHECK(!sound(e, w, e->backend->router(&x, &ffn)), "%s: a router with %g was accepted", e->name, (double)bad[i]);
    w->hidden[11] = bad[i];
    CHECK(!sound(e, w, e->backend->finite(&x, w->hidden, (int64_t)w->n * c.n_embd, M3_PART_OUTPUT)),
          "%s: %g is not finite", e->name, (double)bad[i]);
    float *gate = (float *)(uintptr_t)w->layer.w[M3_FFN_GATE].data;
    gate[3] = NAN; /* must come through the clamps of SwiGLU */
    w->hidden[11] = 1;
    e->backend->mlp(&x, &ffn);
    CHECK(!sound(e, w, e->backend->finite(&x, w->hidden, (int64_t)w->n * c.n_embd, M3_PART_OUTPUT)),
          "%s: NaN was lost in the MLP", e->name);
    free_world(w);
  }
}

/* Results must not depend on which rows share a chunk: rows give the same bits in pieces of `piece` as all together. */
static void check_row_independence(const engine *e, op_case many, int32_t piece) {
  world *w = new_world(&many, e->backend, e->threads);
  float *start = keep(w, (size_t)(w->n * many.n_embd) * sizeof(float));
  memcpy(start, w->hidden, (size_t)(w->n * many.n_embd) * sizeof(float));
  m3_context x = context_of(e, w);
  m3_ffn_params ffn = {&w->layer, w->n, w->hidden, false};
  e->backend->mlp(&x, &ffn);
  e->backend->router(&x, &ffn);
  e->backend->experts(&x, &ffn);
  e->backend->shared(&x, &ffn);
  wait_for(e, w);
  float *all = keep(w, (size_t)(w->n * many.n_embd) * sizeof(float));
  memcpy(all, w->hidden, (size_t)(w->n * many.n_embd) * sizeof(float));
  for (int32_t row = 0; row + piece <= w->n; row++) {
    m3_ffn_params part = {&w->layer, piece, w->hidden, false};
    size_t bytes = (size_t)piece * (size_t)many.n_embd * sizeof(float);
    memcpy(w->hidden, start + row * many.n_embd, bytes);
    e->backend->mlp(&x, &part);
    e->backend->router(&x, &part);
    e->backend->experts(&x, &part);
    e->backend->shared(&x, &part);
    wait_for(e, w);
    CHECK(memcmp(w->hidden, all + row * many.n_embd, bytes) == 0, "%s, %s: rows from %d on depend on their neighbours",
          many.name, e->name, row);
  }
  free_world(w);
}

/* Products of M3's widths: logits of many rows, of each number of rows up to which kernels or tiles differ, against a
 * CPU; the same numbers of rows give the same bits where they are computed in one way (see M3_SESSION_EXACT). */
static void check_wide(const engine *spec, const engine *e, int32_t type, bool exact) {
  static const int32_t rows[] = {1, 2, 5, 8, 9, 64, 130};
  enum { ROWS = 130, OUT = 3072 };
  char name[64];
  snprintf(name, sizeof name, "%s, 6144 x 3072%s", m3_type_name(type), exact ? ", exact" : "");
  op_case c = {.name = name,
               .n_head = 2,
               .n_head_kv = 1,
               .head_dim = 32,
               .index_dim = 32,
               .n_rot = 16,
               .block_size = 128,
               .top_k = 2,
               .local_blocks = 1,
               .n_embd = 6144,
               .n_ff = 32,
               .n_ff_expert = 32,
               .n_ff_shared = 32,
               .n_expert = 2,
               .n_expert_used = 1,
               .n_vocab = OUT,
               .weight_type = type,
               .n_sequences = 1,
               .n_rows = ROWS,
               .context = ROWS,
               .exact = exact};
  world *want = new_world(&c, spec->backend, spec->threads), *got = new_world(&c, e->backend, e->threads);
  float *a = keep(want, sizeof(float[ROWS * OUT])), *b = keep(got, sizeof(float[ROWS * OUT]));
  float *first = keep(got, sizeof(float[ROWS * OUT]));
  m3_context x = context_of(spec, want), y = context_of(e, got);
  spec->backend->head(&x, &(m3_head_params){&want->output_norm, &want->head, want->hidden, ROWS, a});
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    memset(b, 0xff, sizeof(float[ROWS * OUT]));
    e->backend->head(&y, &(m3_head_params){&got->output_norm, &got->head, got->hidden, rows[i], b});
    wait_for(e, got);
    char what[128];
    snprintf(what, sizeof what, "%s, %d rows", name, rows[i]);
    CHECK_CLOSE(what, b, a, (int64_t)rows[i] * OUT, rounding(e, &c) * (1 + largest(a, (int64_t)rows[i] * OUT)));
    bool new_way = !exact && i > 0 && rows[i] > 8 && rows[i - 1] <= 8;
    if (i > 0 && !new_way)
      CHECK(memcmp(first, b, (size_t)(rows[i - 1] * OUT) * sizeof(float)) == 0, "%s: rows depend on their number",
            what);
    memcpy(first, b, (size_t)(rows[i] * OUT) * sizeof(float));
    m3_ffn_params p = {&want->layer, rows[i], want->hidden, false}, q = {&got->layer, rows[i], got->hidden, false};
    int64_t n = (int64_t)rows[i] * c.n_embd;
    memset(got->scratch.normed, 0xff, (size_t)n * sizeof(float));
    CHECK(spec->backend->router(&x, &p) && sound(e, got, e->backend->router(&y, &q)), "%s: router not finite", what);
    CHECK_CLOSE(what, got->scratch.normed, want->scratch.normed, n, 1e-5 * (1 + largest(want->scratch.normed, n)));
  }
  free_world(want);
  free_world(got);
}

/* Weights of every storage type, in products with one row and with more rows than a tile has, of which the experts get
 * few or many. */
static void check_types(const engine *spec, const engine *e, int n_rows, bool exact) {
  static const int32_t rows[] = {6, 1, 70};
  for (int32_t type = 0; type <= M3_TYPE_MXFP4; type++)
    for (int i = 0; i < n_rows && m3_traits(type); i++) {
      char name[48];
      snprintf(name, sizeof name, "%s weights, %d rows", m3_type_name(type), rows[i]);
      op_case c = {.name = name,
                   .n_head = 4,
                   .n_head_kv = 2,
                   .head_dim = 64,
                   .index_dim = 32,
                   .n_rot = 32,
                   .block_size = 16,
                   .top_k = 3,
                   .local_blocks = 1,
                   .n_embd = 256,
                   .n_ff = 256,
                   .n_ff_expert = 256,
                   .n_ff_shared = 512,
                   .n_expert = 3,
                   .n_expert_used = 2,
                   .n_vocab = 45,
                   .weight_type = type,
                   .kv_type = F16,
                   .n_sequences = 1,
                   .n_rows = rows[i],
                   .context = 75,
                   .exact = exact};
      run_case(&c, spec, e);
    }
}

static const op_case independent[] = {
    {"Q8_0 and F16 weights", ODD_HEADS, SMALL_FFN, .top_k = 3, .local_blocks = 1, .n_sequences = 1, .n_rows = 9,
     .context = 150, .weight_type = Q8},
    {"Q5_K weights", ODD_HEADS, SUPERBLOCK_FFN, .top_k = 3, .local_blocks = 1, .n_sequences = 1, .n_rows = 9,
     .context = 150, .weight_type = M3_TYPE_Q5_K},
    {"F32 weights", ODD_HEADS, ODD_FFN, .top_k = 3, .local_blocks = 1, .n_sequences = 1, .n_rows = 9, .context = 150},
};

static void run_all(const engine *spec, const engine *e, size_t n_cases) {
  printf("%s, %d threads\n", e->name, (int)e->threads);
  for (size_t k = 0; k < n_cases; k++) run_case(&cases[k], spec, e), check_definitions(e, &cases[k]);
  check_ties(e);
  check_not_finite(e);
  for (size_t k = 0; k < sizeof independent / sizeof *independent; k++) {
    op_case c = independent[k];
    c.exact = true;
    check_row_independence(e, c, 1);
    if (e->backend == &m3_cpu_backend) continue;
    c.exact = false, c.n_rows = 8; /* the most that are few */
    check_row_independence(e, c, 1);
    c.n_rows = 21;
    check_row_independence(e, c, 9);
  }
}

/* `test_ops cuda` runs the GPU, `test_ops cuda few` less of it, for the slow tools; else the CPU. */
int main(int argc, char **argv) {
  const engine spec = {"scalar", &m3_cpu_backend, &m3_kernels_scalar, 1};
  size_t n_cases = sizeof cases / sizeof *cases;
  if (argc > 1 && strcmp(argv[1], "cuda") == 0) {
    engine e = {"cuda", NULL, &m3_kernels_scalar, 1};
    m3_error err;
    if (m3_cuda_backend(&e.backend, &err)) {
      printf("%s\n", err.message);
      return 1;
    }
    bool few = argc > 2;
    run_all(&spec, &e, few ? 4 : n_cases);
    check_types(&spec, &e, few ? 1 : 3, false);
    if (!few) check_types(&spec, &e, 3, true);
    m3_isa isa;
    if (m3_choose_isa(M3_ISA_AUTO, &isa, &err)) return 1;
    const engine fast = {m3_kernels_for(isa)->name, &m3_cpu_backend, m3_kernels_for(isa), m3_default_threads()};
    for (int32_t type = 0; type <= M3_TYPE_MXFP4 && !few; type++)
      if (m3_traits(type)) check_wide(&fast, &e, type, false);
    if (!few) check_wide(&fast, &e, M3_TYPE_Q4_K, true);
    return finish("test_ops cuda");
  }
  static const m3_isa isas[] = {M3_ISA_SCALAR, M3_ISA_AVX2, M3_ISA_AVX512, M3_ISA_NEON};
  for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
    m3_isa isa;
    m3_error err;
    if (m3_choose_isa((int32_t)isas[i], &isa, &err)) {
      printf("not run here: %s\n", err.message);
      continue;
    }
    for (int32_t threads = 1; threads <= 3; threads += 2) {
      engine e = {m3_kernels_for(isa)->name, &m3_cpu_backend, m3_kernels_for(isa), threads};
      run_all(&spec, &e, n_cases);
      if (threads > 1 && isa != M3_ISA_SCALAR) check_types(&spec, &e, 1, false);
    }
  }
  return finish("test_ops");
}
