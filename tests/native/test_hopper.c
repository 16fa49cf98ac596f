/* Selection and attention at the release's head geometry, for which a GPU of compute capability 9.0 has kernels of its
 * own: how rows are cut into chunks changes lists only between blocks whose scores are nearly equal, and results by no
 * more than m3.h says; with M3_SESSION_EXACT it changes no bit. `test_hopper cuda` runs the GPU, `test_hopper cuda few`
 * less of it, for the slow tools; else the CPU, at shorter contexts. */
#include "msa_definitions.h"
#define T_RELEASE_HEADS
#include "tiny_file.h"

enum { F32 = M3_TYPE_F32, F16 = M3_TYPE_F16, BF16 = M3_TYPE_BF16, Q8 = M3_TYPE_Q8_0, Q4 = M3_TYPE_Q4_0 };

#define RELEASE_HEADS \
  .n_head = 64, .n_head_kv = 4, .head_dim = 128, .index_dim = 128, .n_rot = 64, .block_size = 128, .top_k = 16
#define SMALL_FFN \
  .n_embd = 32, .n_ff = 32, .n_ff_expert = 32, .n_ff_shared = 32, .n_expert = 2, .n_expert_used = 1, .n_vocab = 50

static m3_error err;
static bool on_cuda, few;
static const m3_backend *backend = &m3_cpu_backend;

/* ---------------------------------------------------------------------------------------------- operations */

/* The cache in the GPU's memory, where the copy engine reads it. The world keeps its own for the definitions. */
static m3_layer_cache cache_of(const world *w, void *copies[3]) {
  m3_layer_cache c = w->cache;
  copies[0] = copies[1] = copies[2] = NULL;
#ifdef M3_TEST_CUDA
  if (on_cuda) {
    size_t kv =
        (size_t)w->n_pages * (size_t)(w->c.n_head_kv * w->c.block_size * m3_row_bytes(c.kv_type, w->c.head_dim));
    size_t index = (size_t)w->n_pages * (size_t)(w->c.block_size * m3_row_bytes(c.index_type, w->c.index_dim));
    void *const from[3] = {c.k, c.v, c.index};
    void **const to[3] = {&c.k, &c.v, &c.index};
    for (int i = 0; i < 3; i++) {
      size_t size = i < 2 ? kv : index;
      if (cudaMalloc(&copies[i], size) || cudaMemcpy(copies[i], from[i], size, cudaMemcpyHostToDevice)) abort();
      *to[i] = copies[i];
    }
  }
#endif
  return c;
}

static void free_copies(void *copies[3]) {
#ifdef M3_TEST_CUDA
  for (int i = 0; i < 3; i++) cudaFree(copies[i]);
#endif
  (void)copies;
}

typedef struct outcome {
  int32_t *blocks;
  float *sparse, *dense;
} outcome;

/* Rows [first, first + n) as a chunk of their own; false if a number was found broken. `lists`: read in place of the
 * chosen ones. */
static bool run_rows(world *w, const m3_layer_cache *cache, int32_t first, int32_t n, const int32_t *lists,
                     const outcome *o) {
  const op_case *c = &w->c;
  int64_t width = (int64_t)c->n_head * c->head_dim, list = (int64_t)c->n_head_kv * c->top_k;
  int64_t half = c->n_rot / 2, longest = 0;
  m3_rows rows = w->rows;
  rows.n = n, rows.seq += first, rows.pos += first, rows.ids += first;
  rows.cos += first * half, rows.sin += first * half;
  m3_scratch scratch = w->scratch;
  scratch.q += first * width;
  scratch.index_q += (int64_t)first * c->n_head_kv * c->index_dim;
  m3_context x = {.hparams = &w->h, .kernels = &m3_kernels_scalar, .scratch = &scratch, .state = w->state};
  for (int32_t r = 0; r < n; r++)
    if (rows.pos[r] > longest) longest = rows.pos[r];
  m3_select_params s = {
      .rows = &rows, .cache = *cache, .blocks = o->blocks + first * list, .max_blocks = longest / c->block_size + 1};
  backend->begin(&x, &rows);
  bool finite = backend->select(&x, &s);
  backend->attend(&x, &(m3_attend_params){&rows, *cache, (lists ? lists : o->blocks) + first * list,
                                          o->sparse + first * width, NULL});
  backend->attend(&x, &(m3_attend_params){&rows, *cache, NULL, o->dense + first * width, NULL});
  m3_broken broken;
  m3_status status = backend->finish(&x, &broken, &err);
  CHECK(status == M3_OK, "%s", err.message);
  if (status) exit(1);
  return finite && broken.part == M3_PARTS;
}

/* The largest difference of some heads of some rows, the last among them, from the definition. */
static double attention_error(const world *w, const int32_t *blocks, const float *got) {
  const op_case *c = &w->c;
  double worst = 0, exact[128], mass[64];
  for (int32_t row = w->n - 1; row >= 0; row -= 61)
    for (int32_t head = row % 7; head < c->n_head; head += 7) {
      const int32_t *list = blocks ? blocks + ((int64_t)row * c->n_head_kv + head / 16) * c->top_k : NULL;
      exact_attention(w, row, head, list, exact, mass);
      for (int32_t i = 0; i < c->head_dim; i++) {
        double d = fabs((double)got[((int64_t)row * c->n_head + head) * c->head_dim + i] - exact[i]);
        if (!(d <= worst)) worst = isnan(d) ? INFINITY : d;
      }
    }
  return worst;
}

/* What attention may be off by: values are of size 1 and averaged over a thousand and more. Many rows of a sequence
 * round queries and weights to the cache's type. */
static double allowed(const op_case *c, int32_t chunk) {
  if (!on_cuda || c->exact || chunk <= 16 || (c->kv_type != F16 && c->kv_type != BF16)) return 2e-5;
  return c->kv_type == F16 ? 2e-4 : 1.5e-3;
}

static void check_cuts(const op_case *c) {
  static const int32_t chunks[] = {300, 1, 2, 7, 16, 17, 128};
  world *w = new_world(c, backend, 2);
  void *copies[3];
  m3_layer_cache cache = cache_of(w, copies);
  int64_t width = (int64_t)c->n_head * c->head_dim, lists = (int64_t)w->n * c->n_head_kv;
  int64_t blocks = blocks_of_case(c);
  double *scores = keep(w, (size_t)(lists * blocks) * sizeof(double)), *slack = keep(w, (size_t)lists * sizeof(double));
  for (int32_t i = 0; i < lists; i++)
    slack[i] = exact_scores(w, i / c->n_head_kv, i % c->n_head_kv, scores + i * blocks) * 0x1p-18;
  int32_t *whole = NULL;
  for (size_t k = 0; k < (on_cuda ? sizeof chunks / sizeof *chunks : 3); k++) {
    outcome o = {keep(w, (size_t)(lists * c->top_k) * 4), keep(w, (size_t)(w->n * width) * 4),
                 keep(w, (size_t)(w->n * width) * 4)};
    memset(o.blocks, 0x77, (size_t)(lists * c->top_k) * 4);
    memset(o.sparse, 0xff, (size_t)(w->n * width) * 4);
    memset(o.dense, 0xff, (size_t)(w->n * width) * 4);
    bool finite = true;
    for (int32_t first = 0; first < w->n; first += chunks[k])
      finite &= run_rows(w, &cache, first, w->n - first < chunks[k] ? w->n - first : chunks[k], NULL, &o);
    CHECK(finite, "%s: not finite", c->name);
    int64_t other = 0;
    for (int32_t i = 0; i < lists; i++) {
      check_list(w, "cut", i / c->n_head_kv, i % c->n_head_kv, o.blocks + (int64_t)i * c->top_k, scores + i * blocks,
                 slack[i]);
      other += whole && memcmp(o.blocks + (int64_t)i * c->top_k, whole + (int64_t)i * c->top_k, (size_t)c->top_k * 4);
    }
    if (!whole) whole = o.blocks;
    double sparse = attention_error(w, o.blocks, o.sparse), dense = attention_error(w, NULL, o.dense);
    CHECK(sparse <= allowed(c, chunks[k]) && dense <= allowed(c, chunks[k]),
          "%s, chunks of %d: attention is off by %.2e, dense by %.2e, allowed %.1e", c->name, (int)chunks[k], sparse,
          dense, allowed(c, chunks[k]));
    if (on_cuda)
      printf("%s, chunks of %d: %lld of %lld lists other than in one chunk; attention within %.1e, dense %.1e\n",
             c->name, (int)chunks[k], (long long)other, (long long)lists, sparse, dense);
  }
  free_copies(copies);
  free_world(w);
}

/* A key that is no number is told, by one row and by many, and so is a query. Types of blocks have no such keys. */
static void check_not_finite(const op_case *c) {
  static const int32_t chunks[] = {1, 12, 40};
  for (int i = m3_type_block_size(c->index_type) > 1 ? 3 : 0; i < 6; i++) {
    world *w = new_world(c, backend, 2);
    float key[128] = {0};
    key[77] = i % 2 ? INFINITY : NAN;
    if (i < 3)
      store_row(c->index_type, w->cache.index, (int64_t)w->rows.tables[0][3] * c->block_size + 5, key, 128);
    else
      w->scratch.index_q[11] = key[77];
    void *copies[3];
    m3_layer_cache cache = cache_of(w, copies);
    int64_t width = (int64_t)c->n_head * c->head_dim;
    outcome o = {keep(w, (size_t)w->n * 4 * 16 * 4), keep(w, (size_t)(w->n * width) * 4),
                 keep(w, (size_t)(w->n * width) * 4)};
    CHECK(!run_rows(w, &cache, 0, chunks[i % 3], NULL, &o), "%s: %g among %s of %d rows was not found", c->name,
          (double)key[77], i < 3 ? "keys" : "queries", (int)chunks[i % 3]);
    free_copies(copies);
    free_world(w);
  }
}

static void check_operations(void) {
  static const struct {
    int32_t kv, index;
  } types[] = {{F16, F32}, {F16, F16}, {BF16, BF16}, {F32, F32}, {Q8, BF16}, {F16, Q8}, {Q4, Q4}};
  for (size_t i = 0; i < sizeof types / sizeof *types; i++)
    for (int shape = 0; shape < (i < 3 ? 3 : 1); shape++) {
      char name[96];
      op_case c = {.name = name,
                   RELEASE_HEADS,
                   SMALL_FFN,
                   .local_blocks = 1 + 2 * (shape == 1),
                   .kv_type = types[i].kv,
                   .index_type = types[i].index,
                   .n_sequences = shape == 2 ? 3 : 1,
                   .n_rows = shape == 2 ? 101 : 300,
                   .context = shape == 1 ? 4321 : 2900};
      if (!on_cuda) c.n_rows = 5, c.context = 2100;
      if (few) c.n_rows = 40, c.context = 2400;
      snprintf(name, sizeof name, "K/V %s, index %s, %d x %d rows of %d", m3_type_name(c.kv_type),
               m3_type_name(c.index_type), (int)c.n_sequences, (int)c.n_rows, (int)c.context);
      check_cuts(&c);
      if (!on_cuda) return; /* other types, lengths and chunks are those of test_ops and test_msa */
      if (shape == 0) check_not_finite(&c);
    }
}

/* ---------------------------------------------------------------------------------------------- sessions */

enum { MOST = 2600, ROW = T_KV * T_TOP };

static m3_model *model;
static int n_tokens, n_steps; /* of the sessions' runs */
static bool low_bit_too;

static m3_session *new_session(m3_session_options o) {
  m3_session *s;
  if (m3_session_open(model, &o, &s, &err)) {
    printf("%s\n", err.message);
    exit(1);
  }
  return s;
}

static const m3_session_options plain = {.struct_size = sizeof(m3_session_options),
                                         .context = MOST,
                                         .kv_type = M3_TYPE_F16,
                                         .flags = M3_SESSION_POISON,
                                         .n_threads = 2};

/* A sparse layer by itself over the same hidden states. */
typedef struct layer_run {
  float hidden[MOST * T_EMBD];
  int32_t blocks[MOST * ROW];
  float scores[MOST * T_KV * (MOST / T_BLOCK + 1)];
} layer_run;

static float entering[MOST * T_EMBD];

static void run_layer(uint32_t flags, uint32_t record, m3_index_scan scan, int32_t chunk, int step, layer_run *r) {
  m3_session_options o = plain;
  o.flags |= flags, o.record = record, o.index_scan = scan, o.chunk = chunk;
  o.layer_first = T_DENSE, o.layer_count = 1;
  m3_session *s = new_session(o);
  for (int first = 0; first < n_tokens; first += step) {
    int n = n_tokens - first < step ? n_tokens - first : step;
    m3_batch b = {.struct_size = sizeof b,
                  .output = M3_OUTPUT_HIDDEN,
                  .n_tokens = n,
                  .hidden = entering + first * T_EMBD,
                  .n_spans = 1,
                  .spans = &(m3_span){0, n},
                  .out = r->hidden + first * T_EMBD,
                  .out_count = n * T_EMBD};
    CHECK(m3_session_eval(s, &b, &err) == M3_OK, "%s", err.message);
    CHECK(m3_session_blocks(s, T_DENSE, r->blocks + first * ROW, n * ROW, &err) == M3_OK, "%s", err.message);
  }
  if (record & M3_RECORD_SCORES) {
    int64_t n = (int64_t)n_tokens * T_KV * m3_session_n_blocks(s);
    CHECK(m3_session_block_scores(s, T_DENSE, r->scores, n, &err) == M3_OK, "%s", err.message);
  }
  m3_session_close(s);
}

static bool contains(const int32_t *list, int32_t block) {
  for (int i = 0; i < T_TOP; i++)
    if (list[i] == block) return true;
  return false;
}

/* How far the scores of blocks that only one of two lists has are apart. */
static double gap(const int32_t *a, const int32_t *b, const float *scores) {
  double low = INFINITY, high = -INFINITY;
  for (int i = 0; i < T_TOP; i++) {
    const int32_t only[2] = {contains(b, a[i]) ? -1 : a[i], contains(a, b[i]) ? -1 : b[i]};
    for (int k = 0; k < 2; k++)
      if (only[k] >= 0) low = fmin(low, (double)scores[only[k]]), high = fmax(high, (double)scores[only[k]]);
  }
  return high - low;
}

/* Lists of a chunked prefill are those of token after token, and both are the exact ones, but for near ties. */
static void check_layer(void) {
  static layer_run exact, other, low_bit;
  static const int chunks[] = {1, 2, 7, 128, 300, MOST};
  uint64_t seed = 5;
  fill_random(entering, MOST * T_EMBD, 1.0f, &seed);
  run_layer(M3_SESSION_EXACT, M3_RECORD_BLOCKS | M3_RECORD_SCORES, M3_INDEX_SCAN_AUTO, 0, MOST, &exact);
  int n_blocks = (n_tokens + T_BLOCK - 1) / T_BLOCK;
  int64_t at;
  double size = 0;
  for (int i = 0; i < n_tokens * T_EMBD; i++) size = fmax(size, fabs((double)exact.hidden[i] - (double)entering[i]));
  for (size_t k = 0; k < 2 * sizeof chunks / sizeof *chunks; k++) {
    int chunk = chunks[k / 2];
    bool is_exact = k % 2;
    if ((few || !on_cuda) && chunk != 7 && chunk != MOST) continue;
    /* By the session's chunks or by evals of as many. */
    int32_t of_session = k % 4 < 2 ? chunk : 0, of_eval = k % 4 < 2 ? MOST : chunk;
    run_layer(is_exact ? M3_SESSION_EXACT : 0, M3_RECORD_BLOCKS, M3_INDEX_SCAN_FULL, of_session, of_eval, &other);
    if (is_exact) {
      CHECK(memcmp(other.hidden, exact.hidden, (size_t)(n_tokens * T_EMBD) * 4) == 0 &&
                memcmp(other.blocks, exact.blocks, (size_t)(n_tokens * ROW) * 4) == 0,
            "exact, chunks of %d: not the bits of one chunk", chunk);
      continue;
    }
    if (low_bit_too) {
      run_layer(0, M3_RECORD_BLOCKS, M3_INDEX_SCAN_LOW_BIT, of_session, of_eval, &low_bit);
      CHECK(memcmp(other.hidden, low_bit.hidden, (size_t)(n_tokens * T_EMBD) * 4) == 0 &&
                memcmp(other.blocks, low_bit.blocks, (size_t)(n_tokens * ROW) * 4) == 0,
            "low-bit scan, chunks of %d: not the bits of the full scan", chunk);
    }
    int differ = 0;
    for (int i = 0; i < n_tokens * T_KV; i++) {
      const int32_t *a = exact.blocks + i * T_TOP, *b = other.blocks + i * T_TOP;
      if (memcmp(a, b, T_TOP * 4) == 0) continue;
      differ++;
      double apart = gap(a, b, exact.scores + i * n_blocks); /* |q| |k| is about 150 */
      CHECK(apart < 150 * 0x1p-18, "chunks of %d: list %d differs by blocks whose scores are %.2e apart", chunk, i,
            apart);
    }
    double worst = worst_difference(other.hidden, exact.hidden, n_tokens * T_EMBD, &at);
    if (on_cuda)
      printf("a layer, chunks of %d: %d of %d lists are not the exact ones; its output within %.1e of %.1e\n", chunk,
             differ, n_tokens * T_KV, worst, size);
    CHECK(worst < 3e-3 * size, "chunks of %d: the layer's output is off by %.2e of %.2e", chunk, worst, size);
  }
}

/* One token of each of the first n sequences; logits of all. */
static void step(m3_session *s, int n, const int32_t *ids, float *out) {
  m3_span spans[3] = {{0, 1}, {1, 1}, {2, 1}};
  m3_batch b = {.struct_size = sizeof b,
                .output = M3_OUTPUT_LAST,
                .n_tokens = n,
                .ids = ids,
                .n_spans = n,
                .spans = spans,
                .out = out,
                .out_count = n * T_VOCAB};
  CHECK(m3_session_eval(s, &b, &err) == M3_OK, "%s", err.message);
}

/* Steps that a backend replays give the bits of steps whose operations are called one by one, as they are where
 * something is recorded: across the ends of blocks, after a rewind and a fork, with other pages, alone and several at a
 * time. Those that are called scan all index keys; `scan` is that of the others. */
static void check_steps(uint32_t flags, m3_index_scan scan) {
  m3_session_options o = plain;
  o.flags |= flags, o.sequences = 3, o.chunk = 128, o.index_scan = scan;
  m3_session *replayed = new_session(o);
  o.record = M3_RECORD_BLOCKS, o.page_seed = 99, o.index_scan = M3_INDEX_SCAN_FULL;
  m3_session *called = new_session(o);
  m3_session *both[2] = {replayed, called};
  static int32_t ids[MOST];
  static float out[2][3 * T_VOCAB];
  uint64_t seed = 8;
  for (int i = 0; i < MOST; i++) ids[i] = (int32_t)(next_random(&seed) % T_VOCAB);
  int prompt = n_tokens - 3 * n_steps - 20;
  for (int i = 0; i < 2; i++) {
    m3_batch b = {.struct_size = sizeof b,
                  .n_tokens = prompt,
                  .ids = ids,
                  .n_spans = 1,
                  .spans = &(m3_span){0, prompt},
                  .out = out[i],
                  .out_count = T_VOCAB};
    CHECK(m3_session_eval(both[i], &b, &err) == M3_OK, "%s", err.message);
  }
  int at = prompt, wrong = 0, n = 1;
  int64_t seen = 0, bounded, rescored;
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < n_steps; i++, at++) {
      for (int seq = 0; seq < n; seq++) seen += (m3_session_length(replayed, seq) / T_BLOCK + 1) * (T_LAYER - T_DENSE);
      for (int k = 0; k < 2; k++) step(both[k], n, ids + at - prompt, out[k]);
      wrong += memcmp(out[0], out[1], (size_t)(n * T_VOCAB) * 4) != 0;
    }
    for (int k = 0; k < 2; k++) {
      CHECK(m3_session_rewind(both[k], 0, m3_session_length(both[k], 0) - n_steps * 5 / 6, &err) == M3_OK, "%s",
            err.message);
      for (int seq = 1; seq < 3; seq++) CHECK(m3_session_fork(both[k], 0, seq, &err) == M3_OK, "%s", err.message);
    }
    n = 3 - round;
  }
  CHECK(wrong == 0, "flags %u, scan %d: %d of %d steps differ", flags, (int)scan, wrong, 3 * n_steps);
  m3_session_scan(replayed, &bounded, &rescored);
  if (scan == M3_INDEX_SCAN_LOW_BIT && on_cuda) /* the CPU's contexts are no longer than a list */
    CHECK(bounded == seen && rescored > 0 && rescored <= bounded, "%lld of %lld blocks bounded, %lld scored",
          (long long)bounded, (long long)seen, (long long)rescored);
  else
    CHECK(!bounded && !rescored, "%lld blocks bounded", (long long)bounded);
  m3_session_close(replayed);
  m3_session_close(called);
}

/* Whether sessions that round have low-bit index keys: where they select by the kernels of this geometry, and then it
 * is told. Exact ones on a GPU have none. */
static bool has_low_bit(void) {
  char full[64], low[64];
  m3_session_options o = plain;
  CHECK(m3_session_msa(model, &o, full, sizeof full, &err) == M3_OK, "%s", err.message);
  o.index_scan = M3_INDEX_SCAN_LOW_BIT;
  m3_status status = m3_session_msa(model, &o, low, sizeof low, &err);
  bool is = !on_cuda || strncmp(full, "hopper", 6) == 0;
  CHECK(status == (is ? M3_OK : M3_ERROR_UNSUPPORTED), "%s: status %d", full, (int)status);
  CHECK(!on_cuda || !is || (strcmp(full, "hopper") == 0 && strcmp(low, "hopper, low-bit index scan") == 0),
        "'%s', '%s'", full, low);
  o.index_scan = M3_INDEX_SCAN_AUTO, o.context = 1 << 20;
  CHECK(m3_session_msa(model, &o, low, sizeof low, &err) == M3_OK && (!on_cuda || !is || strstr(low, "low-bit")),
        "1M tokens: %s", low);
  o.index_scan = M3_INDEX_SCAN_LOW_BIT, o.context = MOST, o.flags |= M3_SESSION_EXACT;
  CHECK(m3_session_msa(model, &o, low, sizeof low, &err) == (on_cuda ? M3_ERROR_UNSUPPORTED : M3_OK), "exact: %s", low);
  return is;
}

static void check_sessions(void) {
  tiny_file t;
  make_tiny_file(&t);
  char path[64];
  new_path(path, sizeof path, "m3-hopper");
  write_file(path, t.file.data, t.file.size);
  m3_model_options options = {.struct_size = sizeof options, .device = on_cuda ? M3_DEVICE_CUDA : M3_DEVICE_CPU};
  if (m3_model_open(path, &options, &model, &err)) {
    printf("%s\n", err.message);
    exit(1);
  }
  n_tokens = few ? 2200 : on_cuda ? MOST : 150;
  n_steps = few ? 6 : on_cuda ? 180 : 3;
  char way[64];
  CHECK(m3_session_msa(model, &plain, way, sizeof way, &err) == M3_OK, "%s", err.message);
  if (on_cuda) printf("msa %s\n", way);
  CHECK(on_cuda || !*way, "the CPU has one way: '%s'", way);
  m3_session_options o = plain;
  o.flags = M3_SESSION_EXACT;
  CHECK(m3_session_msa(model, &o, way, sizeof way, &err) == M3_OK && (!on_cuda || !strcmp(way, "plain (exact)")), "%s",
        way);
  CHECK(m3_session_msa(model, &o, way, 0, &err) == M3_ERROR_ARGUMENT, "no room for a byte");
  low_bit_too = has_low_bit();
  check_layer();
  check_steps(0, M3_INDEX_SCAN_AUTO);
  check_steps(M3_SESSION_EXACT, M3_INDEX_SCAN_AUTO);
  if (low_bit_too) check_steps(0, M3_INDEX_SCAN_LOW_BIT);
  m3_model_close(model);
  unlink(path);
  free(t.file.data);
}

int main(int argc, char **argv) {
  on_cuda = argc > 1 && strcmp(argv[1], "cuda") == 0;
  few = argc > 2;
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (on_cuda && m3_cuda_backend(&backend, &err)) {
    printf("%s\n", err.message);
    return 1;
  }
  check_operations();
  check_sessions();
  return finish(on_cuda ? "test_hopper cuda" : "test_hopper");
}
