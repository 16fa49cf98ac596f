/* Sessions: how tokens are cut into evals, where pages lie, how many threads work and who shares the session must not
 * change a bit of any result. Unused cache rows hold NaN throughout. */
#include <pthread.h>
#include <time.h>
#include "tiny_file.h"

enum { N = 150 }; /* tokens: ten blocks, of which two are read */

static m3_model *model;
static m3_error err;
static m3_model_options options = {.struct_size = sizeof options, .device = M3_DEVICE_CPU};

static bool low_bit(void) { return options.device == M3_DEVICE_CPU; } /* has low-bit index keys */

static const m3_session_options plain = {.struct_size = sizeof(m3_session_options),
                                         .context = 160,
                                         .record = M3_RECORD_BLOCKS,
                                         .flags = M3_SESSION_POISON | M3_SESSION_EXACT,
                                         .n_threads = 1};

static m3_session *new_session(m3_session_options o) {
  m3_session *s;
  m3_status status = m3_session_open(model, &o, &s, &err);
  CHECK(status == M3_OK, "%s", err.message);
  if (status) abort();
  return s;
}

static void tokens(int32_t *ids, int n, uint64_t seed) {
  for (int i = 0; i < n; i++) ids[i] = (int32_t)(next_random(&seed) % T_VOCAB);
}

/* Appends ids[0..n) to a sequence; all logits to out [n, vocab]. */
static m3_status eval(m3_session *s, int32_t seq, const int32_t *ids, int32_t n, float *out) {
  m3_span span = {seq, n};
  m3_batch b = {.struct_size = sizeof b,
                .output = M3_OUTPUT_ALL,
                .n_tokens = n,
                .ids = ids,
                .n_spans = 1,
                .spans = &span,
                .out = out,
                .out_count = (int64_t)n * T_VOCAB};
  return m3_session_eval(s, &b, &err);
}

typedef struct run {
  float logits[N * T_VOCAB];
  int32_t blocks[T_LAYER][N * T_KV * T_TOP];
} run;

/* Evaluates N tokens in pieces of `step`. */
static void run_in_steps(m3_session *s, int32_t seq, const int32_t *ids, int step, run *r) {
  for (int i = 0; i < N; i += step) {
    int n = N - i < step ? N - i : step;
    m3_status status = eval(s, seq, ids + i, n, r->logits + i * T_VOCAB);
    CHECK(status == M3_OK, "%s", err.message);
    for (int layer = T_DENSE; layer < T_LAYER; layer++) {
      int64_t per_row = T_KV * T_TOP;
      CHECK(m3_session_blocks(s, layer, r->blocks[layer] + i * per_row, n * per_row, &err) == M3_OK, "%s", err.message);
    }
  }
}

static void check_same(const char *what, const run *a, const run *b) {
  int64_t at;
  CHECK(memcmp(a->logits, b->logits, sizeof a->logits) == 0, "%s: logits differ by up to %g", what,
        worst_difference(a->logits, b->logits, N * T_VOCAB, &at));
  for (int layer = T_DENSE; layer < T_LAYER; layer++)
    CHECK(memcmp(a->blocks[layer], b->blocks[layer], sizeof a->blocks[layer]) == 0,
          "%s: block lists of layer %d differ", what, layer);
}

static void check_equivalent_runs(const int32_t *ids, const run *want) {
  static run got;
  static const int steps[] = {1, 7, 16, 17, 149};
  for (size_t i = 0; i < 2 * sizeof steps / sizeof *steps; i++) {
    if (i % 2 && !low_bit()) continue;
    m3_session_options o = plain;
    o.index_scan = i % 2 ? M3_INDEX_SCAN_LOW_BIT : M3_INDEX_SCAN_AUTO;
    m3_session *s = new_session(o);
    run_in_steps(s, 0, ids, steps[i / 2], &got);
    check_same("cut into pieces", &got, want);
    int64_t bounded, rescored;
    m3_session_scan(s, &bounded, &rescored);
    CHECK(i % 2 && steps[i / 2] <= 7 ? rescored > 0 && rescored <= bounded : !bounded || i % 2,
          "pieces of %d: %lld of %lld blocks scored", steps[i / 2], (long long)rescored, (long long)bounded);
    m3_session_close(s);
  }
  for (int variant = 0; variant < 12; variant++) {
    m3_session_options o = plain;
    o.n_threads = 1 + variant % 3;
    o.chunk = (int32_t[]){0, 1, 5, 64}[variant % 4];
    o.page_seed = (uint64_t)variant * 1234567;
    o.sequences = 1 + variant % 5;
    o.index_scan = variant % (low_bit() ? 3 : 2);
    m3_session *s = new_session(o);
    run_in_steps(s, o.sequences - 1, ids, 50, &got);
    check_same("other threads, chunks and pages", &got, want);
    m3_session_close(s);
  }
}

/* Three sequences of different text and length, grown together in every batch. */
static void check_neighbours(const int32_t *ids, const run *want) {
  m3_session_options o = plain;
  o.sequences = 3;
  o.page_seed = 77;
  m3_session *s = new_session(o);
  static int32_t other[2][N];
  tokens(other[0], N, 5);
  tokens(other[1], N, 6);
  static float out[3 * T_VOCAB], last[T_VOCAB];
  for (int i = 0; i < N; i += 10) {
    int32_t batch_ids[26];
    m3_span spans[3] = {{2, 7}, {0, 10}, {1, 9}};
    memcpy(batch_ids, other[0] + i / 10 * 7, 7 * 4);
    memcpy(batch_ids + 7, ids + i, 10 * 4);
    memcpy(batch_ids + 17, other[1] + i / 10 * 9, 9 * 4);
    m3_batch b = {.struct_size = sizeof b,
                  .output = M3_OUTPUT_LAST,
                  .n_tokens = 26,
                  .ids = batch_ids,
                  .n_spans = 3,
                  .spans = spans,
                  .out = out,
                  .out_count = 3 * T_VOCAB};
    CHECK(m3_session_eval(s, &b, &err) == M3_OK, "%s", err.message);
    memcpy(last, out + T_VOCAB, sizeof last);
    CHECK(memcmp(last, want->logits + (i + 9) * T_VOCAB, sizeof last) == 0,
          "a sequence depends on its neighbours at %d", i);
  }
  CHECK(m3_session_length(s, 0) == N && m3_session_length(s, 1) == 135 && m3_session_length(s, 2) == 105, "lengths");
  m3_session_close(s);
}

static int64_t pages_used(const m3_session *s) {
  int64_t used, total;
  m3_session_pages(s, &used, &total);
  return used;
}

/* Fork, go different ways from inside a block, rewind into shared blocks: nobody's past changes. */
static void check_fork_and_rewind(const int32_t *ids, const run *want, int32_t index_scan) {
  m3_session_options o = plain;
  o.index_scan = index_scan;
  o.sequences = 3;
  o.page_seed = 9;
  m3_session *s = new_session(o);
  static float out[N * T_VOCAB];
  static int32_t other[N];
  tokens(other, N, 99);
  CHECK(eval(s, 0, ids, 100, out) == M3_OK, "%s", err.message);
  CHECK(pages_used(s) == 7, "pages of 100 tokens: %lld", (long long)pages_used(s));
  CHECK(m3_session_fork(s, 0, 1, &err) == M3_OK && m3_session_fork(s, 0, 2, &err) == M3_OK, "%s", err.message);
  CHECK(pages_used(s) == 7 && m3_session_length(s, 1) == 100, "a fork took pages");
  CHECK(eval(s, 1, other, 40, out) == M3_OK, "%s", err.message); /* writes into the shared, partly filled block */
  CHECK(pages_used(s) == 7 + 3, "copy on write took %lld pages", (long long)pages_used(s) - 7);
  CHECK(eval(s, 0, ids + 100, 50, out) == M3_OK, "%s", err.message);
  CHECK(memcmp(out, want->logits + 100 * T_VOCAB, 50 * T_VOCAB * 4) == 0, "the source changed after a fork wrote");
  CHECK(eval(s, 2, ids + 100, 50, out) == M3_OK, "%s", err.message);
  CHECK(memcmp(out, want->logits + 100 * T_VOCAB, 50 * T_VOCAB * 4) == 0, "a fork differs from its source");
  static const int cuts[] = {149, 128, 127, 113, 112, 100, 33, 1, 0};
  for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
    CHECK(m3_session_rewind(s, 2, cuts[i], &err) == M3_OK, "%s", err.message);
    if (N - cuts[i] > 10) CHECK(eval(s, 2, other, 10, out) == M3_OK, "%s", err.message);
    CHECK(m3_session_rewind(s, 2, cuts[i], &err) == M3_OK, "%s", err.message);
    CHECK(eval(s, 2, ids + cuts[i], N - cuts[i], out) == M3_OK, "%s", err.message);
    CHECK(memcmp(out, want->logits + cuts[i] * T_VOCAB, (size_t)(N - cuts[i]) * T_VOCAB * 4) == 0,
          "after a rewind to %d", cuts[i]);
  }
  CHECK(m3_session_fork(s, 1, 0, &err) == M3_OK && m3_session_length(s, 0) == 140, "fork onto a used sequence");
  for (int seq = 0; seq < 3; seq++) CHECK(m3_session_rewind(s, seq, 0, &err) == M3_OK, "%s", err.message);
  CHECK(pages_used(s) == 0, "%lld pages were not returned", (long long)pages_used(s));
  m3_session_close(s);
}

static void check_refusals(const int32_t *ids) {
  m3_session_options o = plain;
  o.sequences = 2;
  m3_session *s = new_session(o);
  static float out[N * T_VOCAB + 1];
  out[N * T_VOCAB] = 4242;
  int32_t many[200] = {0};
  CHECK(eval(s, 0, ids, N, out) == M3_OK, "%s", err.message);
  CHECK(eval(s, 0, many, 11, out) == M3_ERROR_CONTEXT && m3_session_length(s, 0) == N, "%s", err.message);
  CHECK(eval(s, 0, many, 10, out) == M3_OK && eval(s, 0, many, 1, out) == M3_ERROR_CONTEXT,
        "the last place of the context");
  many[0] = T_VOCAB;
  CHECK(eval(s, 1, many, 1, out) == M3_ERROR_ARGUMENT, "an id past the vocabulary");
  many[0] = -1;
  CHECK(eval(s, 1, many, 1, out) == M3_ERROR_ARGUMENT && eval(s, 2, ids, 1, out) == M3_ERROR_ARGUMENT &&
            eval(s, -1, ids, 1, out) == M3_ERROR_ARGUMENT && eval(s, 1, ids, 0, out) == M3_ERROR_ARGUMENT,
        "bad ids, sequences and counts");
  m3_span twice[2] = {{1, 2}, {1, 2}};
  m3_batch b = {.struct_size = sizeof b,
                .output = M3_OUTPUT_LAST,
                .n_tokens = 4,
                .ids = ids,
                .n_spans = 2,
                .spans = twice,
                .out = out,
                .out_count = 2 * T_VOCAB};
  CHECK(m3_session_eval(s, &b, &err) == M3_ERROR_ARGUMENT, "a sequence twice in a batch");
  b.n_spans = 1, b.n_tokens = 2, b.out_count = T_VOCAB + 1;
  CHECK(m3_session_eval(s, &b, &err) == M3_ERROR_ARGUMENT, "an output of the wrong size");
  b.struct_size = 8;
  CHECK(m3_session_eval(s, &b, &err) == M3_ERROR_ARGUMENT, "a batch of another version");
  int32_t blocks[T_KV * T_TOP + 1];
  CHECK(eval(s, 1, ids, 1, out) == M3_OK, "%s", err.message);
  CHECK(m3_session_blocks(s, 0, blocks, T_KV * T_TOP, &err) == M3_ERROR_ARGUMENT, "blocks of a dense layer");
  CHECK(m3_session_blocks(s, 1, blocks, T_KV * T_TOP + 1, &err) == M3_ERROR_ARGUMENT, "room for too much");
  CHECK(m3_session_rewind(s, 1, 2, &err) == M3_ERROR_ARGUMENT &&
            m3_session_rewind(s, 5, 0, &err) == M3_ERROR_ARGUMENT &&
            m3_session_fork(s, 1, 1, &err) == M3_ERROR_ARGUMENT && m3_session_length(s, 9) == -1,
        "rewind, fork and length out of range");
  CHECK(out[N * T_VOCAB] == 4242, "the guard after the output was overwritten");
  m3_session_close(s);
  o = plain, o.kv_type = M3_TYPE_Q4_K;
  CHECK(m3_session_open(model, &o, &s, &err) == M3_ERROR_ARGUMENT && !s, "a cache type that is not there");
  o = plain, o.context = M3_MAX_CONTEXT, o.sequences = M3_MAX_SEQUENCES;
  CHECK(m3_session_open(model, &o, &s, &err) == M3_ERROR_MEMORY && !s, "a cache of petabytes: %s", err.message);
  o = plain, o.index_scan = M3_INDEX_SCAN_LOW_BIT + 1;
  CHECK(m3_session_open(model, &o, &s, &err) == M3_ERROR_ARGUMENT && !s, "an index scan that is not there");
  m3_memory full, low;
  o = plain, o.index_scan = M3_INDEX_SCAN_FULL;
  CHECK(m3_session_memory(model, &o, &full, &err) == M3_OK, "%s", err.message);
  o.index_scan = M3_INDEX_SCAN_LOW_BIT;
  if (low_bit()) {
    CHECK(m3_session_memory(model, &o, &low, &err) == M3_OK, "%s", err.message);
    CHECK(low.index_bytes - full.index_bytes == (T_LAYER - T_DENSE) * 160 * (8 + (T_INDEX + 31) / 32 * 32),
          "low-bit keys take %llu bytes", (unsigned long long)(low.index_bytes - full.index_bytes));
  } else {
    CHECK(m3_session_memory(model, &o, &low, &err) == M3_ERROR_UNSUPPORTED, "low-bit keys that are not there");
  }
  o = plain, o.context = 0;
  CHECK(m3_session_open(model, &o, &s, &err) == M3_ERROR_ARGUMENT, "an empty context");
  o = plain, o.layer_first = T_LAYER + 1;
  CHECK(m3_session_open(model, &o, &s, &err) == M3_ERROR_ARGUMENT, "a window past the head");
  o = plain, o.layer_first = T_LAYER, o.record = M3_RECORD_BLOCKS;
  CHECK(m3_session_open(model, &o, &s, &err) == M3_ERROR_ARGUMENT, "records of a window without layers");
}

/* Scores: the recorded lists are the best of the recorded scores. Dense mode records nothing and reads everything. */
static void check_scores_and_dense(const int32_t *ids, const run *want) {
  m3_session_options o = plain;
  o.record = M3_RECORD_BLOCKS | M3_RECORD_SCORES;
  m3_session *s = new_session(o);
  static float out[N * T_VOCAB], scores[N * T_KV * 10];
  CHECK(eval(s, 0, ids, N, out) == M3_OK && m3_session_n_blocks(s) == 10, "%s", err.message);
  CHECK(m3_session_block_scores(s, 1, scores, N * T_KV * 10, &err) == M3_OK, "%s", err.message);
  for (int row = 0; row < N; row++)
    for (int head = 0; head < T_KV; head++) {
      const float *score = scores + (row * T_KV + head) * 10;
      const int32_t *list = want->blocks[1] + (row * T_KV + head) * T_TOP;
      int own = row / T_BLOCK, best = 0;
      for (int b = 1; b < own; b++)
        if (score[b] > score[best]) best = b;
      CHECK(own == 0 ? list[0] == 0 && list[1] == -1 : list[0] == best && list[1] == own, "row %d head %d", row, head);
      for (int b = own + 1; b < 10; b++) CHECK(score[b] == -INFINITY, "row %d sees block %d", row, b);
    }
  m3_session_close(s);
  o = plain;
  o.attention = M3_ATTENTION_DENSE;
  s = new_session(o);
  CHECK(eval(s, 0, ids, N, out) == M3_OK, "%s", err.message);
  CHECK(memcmp(out, want->logits, T_TOP * T_BLOCK * T_VOCAB * 4) == 0, "dense and sparse differ where all is visible");
  CHECK(memcmp(out + 140 * T_VOCAB, want->logits + 140 * T_VOCAB, T_VOCAB * 4) != 0,
        "dense equals sparse where it cannot");
  int32_t blocks[N * T_KV * T_TOP];
  CHECK(m3_session_blocks(s, 1, blocks, N * T_KV * T_TOP, &err) == M3_ERROR_ARGUMENT, "dense attention has no lists");
  m3_session_close(s);
}

/* A layer at a time, from a header and bound buffers, gives the whole model's bits. */
static void check_layer_windows(const tiny_file *t, const int32_t *ids, const run *want) {
  m3_model *whole = model;
  CHECK(m3_model_open_header(t->file.data, t->header_bytes, "tiny header", &options, &model, &err) == M3_OK, "%s",
        err.message);
  static float hidden[N * T_EMBD], out[N * T_VOCAB];
  for (int layer = 0; layer < T_LAYER; layer++) {
    m3_session_options o = plain;
    o.layer_first = layer, o.layer_count = 1;
    m3_session *s = new_session(o);
    bool last = layer == T_LAYER - 1;
    m3_span span = {0, N};
    m3_batch b = {.struct_size = sizeof b,
                  .output = last ? M3_OUTPUT_ALL : M3_OUTPUT_HIDDEN,
                  .n_tokens = N,
                  .n_spans = 1,
                  .spans = &span,
                  .out = last ? out : hidden,
                  .out_count = last ? N * T_VOCAB : N * T_EMBD};
    static float before[N * T_EMBD];
    memcpy(before, hidden, sizeof before);
    if (layer == 0)
      b.ids = ids;
    else
      b.hidden = before;
    CHECK(m3_session_eval(s, &b, &err) == M3_ERROR_UNBOUND, "ran without weights");
    for (int i = 0; i < t->n_tensors; i++) {
      const tiny_tensor *x = &t->tensors[i];
      const char *data = (const char *)tiny_data(t, x->name);
      uint64_t part = x->n_bytes / x->ne[2];
      for (uint64_t e = 0; e < x->ne[2]; e++)
        CHECK(m3_model_bind(model, x->name, x->n_dims == 3 ? (int32_t)e : -1, data + e * part, part, &err) == M3_OK,
              "%s", err.message);
    }
    CHECK(m3_session_eval(s, &b, &err) == M3_OK, "%s", err.message);
    for (int l = -1; l < T_LAYER; l++) CHECK(m3_model_unbind_layer(model, l, &err) == M3_OK, "%s", err.message);
    CHECK(m3_session_eval(s, &b, &err) == M3_ERROR_UNBOUND, "ran after unbind");
    m3_session_close(s);
  }
  CHECK(memcmp(out, want->logits, sizeof out) == 0, "layer by layer differs from the whole");
  CHECK(m3_model_bind(model, "no.such", -1, out, 4, &err) == M3_ERROR_ARGUMENT, "bound nothing");
  CHECK(m3_model_bind(model, "output.weight", -1, out, 4, &err) == M3_ERROR_ARGUMENT, "bound too few bytes");
  CHECK(m3_model_bind(model, "output.weight", 0, out, T_EMBD * T_VOCAB * 4, &err) == M3_ERROR_ARGUMENT,
        "an expert of a matrix");
  CHECK(m3_model_bind(model, "blk.1.ffn_up_exps.weight", T_EXPERT, out, 4, &err) == M3_ERROR_ARGUMENT,
        "an expert too many");
  m3_model_close(model);
  model = whole;
  CHECK(m3_model_bind(model, "output.weight", -1, out, T_EMBD * T_VOCAB * 4, &err) == M3_ERROR_ARGUMENT,
        "bound over a file");
}

/* NaN in a weight stops the eval with the layer's number, and the sequence is as before. */
static void check_nan(tiny_file *t, const int32_t *ids) {
  char path[64]; /* of its own: the first model's file is mapped */
  new_path(path, sizeof path, "m3-nan");
  static const struct {
    const char *tensor, *says;
  } places[] = {{"blk.0.ffn_up.weight", "layer 0"},
                {"blk.1.attn_v.weight", "layer 1"},
                {"blk.2.indexer.k_proj.weight", "layer 2"},
                {"blk.2.ffn_gate_inp.weight", "layer 2"},
                {"blk.1.exp_probs_b.bias", "layer 1"},
                {"output.weight", "head"},
                {"token_embd.weight", "input"}};
  m3_model *whole = model;
  static float out[N * T_VOCAB];
  for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
    float *x = tiny_data(t, places[i].tensor), old[T_EXPERT];
    bool all = strstr(places[i].tensor, "exp_probs") != NULL; /* one expert without a bias would not be chosen */
    memcpy(old, x, sizeof old);
    for (int k = 0; k < (all ? T_EXPERT : 1); k++) x[k] = NAN;
    if (i == 6) x = tiny_data(t, "token_embd.weight") + ids[0] * T_EMBD, x[0] = NAN;
    write_file(path, t->file.data, t->file.size);
    CHECK(m3_model_open(path, &options, &model, &err) == M3_OK, "%s", err.message);
    m3_session *s = new_session(plain);
    CHECK(eval(s, 0, ids, N, out) == M3_ERROR_NOT_FINITE && strstr(err.message, places[i].says), "%s: '%s'",
          places[i].tensor, err.message);
    CHECK(m3_session_length(s, 0) == 0 && pages_used(s) == 0, "%s: the sequence kept tokens", places[i].tensor);
    m3_session_close(s);
    m3_model_close(model);
    memcpy(tiny_data(t, places[i].tensor), old, sizeof old);
  }
  unlink(path);
  model = whole;
}

/* Waits until the eval has done something, then cancels it. */
static void *cancel_when_running(void *session) {
  int64_t done = 0, total = 0;
  for (int i = 0; i < 5000 && done == 0; i++) {
    nanosleep(&(struct timespec){0, 1000000}, NULL);
    m3_session_progress(session, &done, &total);
  }
  m3_session_cancel(session);
  return NULL;
}

/* Cancelled from another thread while it runs; afterwards the session works as before. */
static void check_cancel(const int32_t *ids, const run *want) {
  m3_session_options o = plain;
  o.context = 200000, o.chunk = 16;
  m3_session *s = new_session(o);
  int32_t n = 100000;
  int32_t *many = calloc((size_t)n, 4);
  float *out = malloc(T_VOCAB * 4);
  m3_span span = {0, n};
  m3_batch b = {.struct_size = sizeof b,
                .output = M3_OUTPUT_LAST,
                .n_tokens = n,
                .ids = many,
                .n_spans = 1,
                .spans = &span,
                .out = out,
                .out_count = T_VOCAB};
  pthread_t thread;
  if (pthread_create(&thread, NULL, cancel_when_running, s)) abort();
  m3_status status = m3_session_eval(s, &b, &err);
  pthread_join(thread, NULL);
  CHECK(status == M3_ERROR_CANCELLED && m3_session_length(s, 0) == 0 && pages_used(s) == 0, "status %d: %s",
        (int)status, err.message);
  free(many);
  free(out);
  static run got;
  run_in_steps(s, 0, ids, 40, &got);
  check_same("after a cancelled eval", &got, want);
  m3_session_close(s);
}

/* Embeddings of the vocabulary, given for some rows: what ids give, bit by bit, in one chunk and in many. */
static void check_embeddings(const tiny_file *t, const int32_t *ids, const run *want) {
  static int32_t mixed[N];
  static float given[N * T_EMBD];
  const float *table = tiny_data(t, "token_embd.weight");
  for (int32_t chunk = 0; chunk <= 5; chunk += 5) {
    m3_session_options o = plain;
    o.chunk = chunk;
    m3_session *s = new_session(o);
    static run got;
    int64_t rows = 0;
    for (int i = 0; i < N; i++) {
      bool embedded = i % 7 < 3 || i == N - 1;
      mixed[i] = embedded ? -1 : ids[i];
      if (embedded) memcpy(given + rows++ * T_EMBD, table + ids[i] * T_EMBD, T_EMBD * sizeof *given);
    }
    m3_span span = {0, N};
    m3_batch b = {.struct_size = sizeof b,
                  .output = M3_OUTPUT_ALL,
                  .n_tokens = N,
                  .ids = mixed,
                  .n_spans = 1,
                  .spans = &span,
                  .out = got.logits,
                  .out_count = (int64_t)N * T_VOCAB,
                  .embeddings = given,
                  .embeddings_count = rows * T_EMBD};
    CHECK(m3_session_eval(s, &b, &err) == M3_OK, "%s", err.message);
    CHECK(memcmp(got.logits, want->logits, sizeof got.logits) == 0, "given embeddings, chunk %d", (int)chunk);
    b.embeddings_count--;
    CHECK(m3_session_eval(s, &b, &err) == M3_ERROR_ARGUMENT && strstr(err.message, "embeddings: "), "%s", err.message);
    b.embeddings = NULL, b.embeddings_count = 0;
    CHECK(m3_session_eval(s, &b, &err) == M3_ERROR_ARGUMENT && strstr(err.message, "token id -1"), "%s", err.message);
    CHECK(m3_session_length(s, 0) == N, "a refused batch changed the length");
    m3_session_close(s);
  }
}

/* `test_session cuda` runs on the GPU, `test_session cuda experts` with the routed experts on the CPU. */
int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "cuda") == 0) options.device = M3_DEVICE_CUDA;
  if (argc > 2 && strcmp(argv[2], "experts") == 0) options.experts_on = M3_EXPERTS_CPU;
  tiny_file t;
  make_tiny_file(&t);
  char path[64];
  new_path(path, sizeof path, "m3-session");
  write_file(path, t.file.data, t.file.size);
  if (m3_model_open(path, &options, &model, &err)) {
    printf("%s\n", err.message);
    return 1;
  }
  static run want;
  static int32_t ids[N];
  tokens(ids, N, 1);
  m3_session *s = new_session(plain);
  run_in_steps(s, 0, ids, N, &want);
  m3_session_close(s);
  check_equivalent_runs(ids, &want);
  check_neighbours(ids, &want);
  check_embeddings(&t, ids, &want);
  check_fork_and_rewind(ids, &want, M3_INDEX_SCAN_FULL);
  if (low_bit()) check_fork_and_rewind(ids, &want, M3_INDEX_SCAN_LOW_BIT);
  check_refusals(ids);
  check_scores_and_dense(ids, &want);
  check_layer_windows(&t, ids, &want);
  check_nan(&t, ids);
  check_cancel(ids, &want);
  m3_model_close(model);
  unlink(path);
  free(t.file.data);
  return finish("test_session");
}
