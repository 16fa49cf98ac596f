/* Many sequences of one session: what one gets does not depend on the others, to the bit, and thousands of short
 * requests leave nothing behind. */
#include "tiny_file.h"

enum { SEQUENCES = 9, CONTEXT = 400, MOST_ROWS = 2000 };

#if defined __SANITIZE_ADDRESS__
enum { REQUESTS = 1000, STEPS = 12, SANITIZED = 1 };
#else
enum { REQUESTS = 10000, STEPS = 40, SANITIZED = 0 };
#endif

static m3_model *model;
static m3_error err;
static m3_model_options options = {.struct_size = sizeof options, .device = M3_DEVICE_CPU};

static const m3_session_options plain = {.struct_size = sizeof(m3_session_options),
                                         .sequences = SEQUENCES,
                                         .context = CONTEXT,
                                         .flags = M3_SESSION_POISON | M3_SESSION_EXACT,
                                         .page_seed = 3,
                                         .n_threads = 1};

static m3_session *new_session(m3_session_options o) {
  m3_session *s;
  m3_status status = m3_session_open(model, &o, &s, &err);
  CHECK(status == M3_OK, "%s", err.message);
  if (status) abort();
  return s;
}

static int64_t pages_used(const m3_session *s) {
  int64_t used, total;
  m3_session_pages(s, &used, &total);
  return used;
}

/* Logits of the last row of each span. */
static m3_status eval(m3_session *s, const m3_span *spans, int32_t n_spans, const int32_t *ids, float *out) {
  int64_t n = 0;
  for (int32_t i = 0; i < n_spans; i++) n += spans[i].n;
  m3_batch b = {.struct_size = sizeof b,
                .output = M3_OUTPUT_LAST,
                .n_tokens = n,
                .ids = ids,
                .n_spans = n_spans,
                .spans = spans,
                .out = out,
                .out_count = (int64_t)n_spans * T_VOCAB};
  return m3_session_eval(s, &b, &err);
}

static void tokens(int32_t *ids, int n, uint64_t seed) {
  for (int i = 0; i < n; i++) ids[i] = (int32_t)(next_random(&seed) % T_VOCAB);
}

static int32_t below(uint64_t *seed, int32_t n) { return (int32_t)(next_random(seed) % (uint64_t)n); }

/* ---------------------------------------------------------------------------------------------- neighbours */

/* Sequences in one session, and the same text in another one in which each has its own evals and nothing is shared. */
typedef struct pair {
  m3_session *together, *alone;
  int32_t ids[SEQUENCES][CONTEXT];
  int32_t length[SEQUENCES];
} pair;

/* Some of the sequences, in any order, in one batch. */
static void grow(pair *p, uint64_t *seed) {
  static int32_t ids[MOST_ROWS], order[SEQUENCES];
  static float out[SEQUENCES * T_VOCAB], want[T_VOCAB];
  m3_span spans[SEQUENCES];
  int32_t n_spans = 0, n = 0, most = 1 + below(seed, SEQUENCES);
  for (int32_t i = 0; i < SEQUENCES; i++) order[i] = i;
  for (int32_t i = SEQUENCES - 1; i > 0; i--) {
    int32_t j = below(seed, i + 1), t = order[i];
    order[i] = order[j], order[j] = t;
  }
  for (int32_t i = 0; i < most; i++) {
    int32_t seq = order[i], rows = below(seed, 3) ? 1 + below(seed, 5) : 1 + below(seed, 61);
    if (rows > CONTEXT - p->length[seq]) continue;
    tokens(p->ids[seq] + p->length[seq], rows, next_random(seed));
    memcpy(ids + n, p->ids[seq] + p->length[seq], (size_t)rows * sizeof *ids);
    spans[n_spans++] = (m3_span){seq, rows};
    n += rows;
  }
  if (!n_spans) return;
  CHECK(eval(p->together, spans, n_spans, ids, out) == M3_OK, "%s", err.message);
  for (int32_t i = 0; i < n_spans; i++) {
    int32_t seq = spans[i].seq;
    CHECK(eval(p->alone, &spans[i], 1, p->ids[seq] + p->length[seq], want) == M3_OK, "%s", err.message);
    CHECK(memcmp(out + i * T_VOCAB, want, sizeof want) == 0, "sequence %d of %d in a batch of %d rows at %d", (int)seq,
          (int)n_spans, (int)n, (int)p->length[seq]);
    p->length[seq] += spans[i].n;
  }
}

/* A fork, of all or of a prefix; alone, the text is evaluated again. */
static void share(pair *p, uint64_t *seed) {
  static float out[T_VOCAB];
  int32_t src = below(seed, SEQUENCES), dst = (src + 1 + below(seed, SEQUENCES - 1)) % SEQUENCES;
  int32_t keep = below(seed, p->length[src] + 1);
  CHECK(m3_session_fork(p->together, src, dst, &err) == M3_OK &&
            m3_session_rewind(p->together, dst, keep, &err) == M3_OK &&
            m3_session_rewind(p->alone, dst, 0, &err) == M3_OK,
        "%s", err.message);
  memcpy(p->ids[dst], p->ids[src], sizeof p->ids[dst]);
  p->length[dst] = keep;
  if (keep) CHECK(eval(p->alone, &(m3_span){dst, keep}, 1, p->ids[dst], out) == M3_OK, "%s", err.message);
}

static void check_neighbours(int32_t chunk, int32_t threads, int32_t kv_type) {
  static pair p;
  memset(&p, 0, sizeof p);
  m3_session_options o = plain;
  o.kv_type = o.index_type = kv_type;
  p.alone = new_session(o);
  o.chunk = chunk, o.n_threads = threads, o.page_seed = 11;
  p.together = new_session(o);
  uint64_t seed = (uint64_t)chunk + 5;
  for (int i = 0; i < STEPS; i++) {
    grow(&p, &seed);
    share(&p, &seed);
  }
  m3_session_close(p.together);
  m3_session_close(p.alone);
}

/* ---------------------------------------------------------------------------------------------- steps of decoding */

/* Token by token, with drops and forks in between: steps that a backend may replay, and the same steps with records,
 * which it never does. */
static void check_steps(void) {
  m3_session_options o = plain;
  m3_session *s[2];
  float out[2][2 * T_VOCAB];
  for (int i = 0; i < 2; i++) o.record = i ? M3_RECORD_BLOCKS : 0, s[i] = new_session(o);
  static int32_t ids[CONTEXT];
  tokens(ids, CONTEXT, 21);
  const m3_span both[2] = {{0, 1}, {4, 1}};
  for (int step = 0; step < 120; step++) {
    for (int i = 0; i < 2; i++) {
      if (step == 0) CHECK(eval(s[i], &(m3_span){0, 130}, 1, ids, out[i]) == M3_OK, "%s", err.message);
      if (step == 0 || step == 60) CHECK(m3_session_fork(s[i], 0, 4, &err) == M3_OK, "%s", err.message);
      if (step % 17 == 9) CHECK(m3_session_drop(s[i], step % 2 ? 0 : 4, 1, 1, &err) == M3_OK, "%s", err.message);
      if (step % 29 == 20) CHECK(m3_session_rewind(s[i], 4, 70, &err) == M3_OK, "%s", err.message);
      CHECK(eval(s[i], both, 2, ids + 2 * step, out[i]) == M3_OK, "%s", err.message);
    }
    CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0, "step %d", step);
  }
  m3_session_close(s[0]);
  m3_session_close(s[1]);
}

/* ---------------------------------------------------------------------------------------------- thousands of requests
 */

static int64_t resident_pages(void) {
  long long size, resident = -1;
  FILE *f = fopen("/proc/self/statm", "r");
  if (!f || fscanf(f, "%lld %lld", &size, &resident) != 2) resident = -1;
  if (f) fclose(f);
  return resident;
}

/* One request: a prefix is shared, a few tokens follow, some of them are taken back or a block of the prefix is. */
static void request(m3_session *s, int i, int32_t seq, const int32_t *ids, float *out) {
  m3_span span = {seq, 1 + i % 3};
  bool ok = m3_session_fork(s, 0, seq, &err) == M3_OK && eval(s, &span, 1, ids + i % 50, out) == M3_OK;
  if (i % 4 == 1) ok = ok && m3_session_rewind(s, seq, 33 + i % 7, &err) == M3_OK;
  if (i % 4 == 2) ok = ok && m3_session_drop(s, seq, i % 2, 1, &err) == M3_OK;
  if (i % 4 >= 2) ok = ok && eval(s, &span, 1, ids + i % 50, out) == M3_OK;
  CHECK(ok, "request %d: %s", i, err.message);
}

static void check_requests(int32_t n_requests) {
  m3_session_options o = plain;
  o.pages = 12;
  o.flags = M3_SESSION_EXACT;
  m3_session *s = new_session(o);
  static int32_t ids[CONTEXT];
  static float out[T_VOCAB], first[T_VOCAB], again[T_VOCAB];
  tokens(ids, CONTEXT, 31);
  CHECK(eval(s, &(m3_span){0, 42}, 1, ids, out) == M3_OK && pages_used(s) == 3, "%s", err.message);
  int64_t before = 0;
  int refused = 0;
  for (int i = 0; i < n_requests; i++) {
    int32_t seq = 1 + i % (SEQUENCES - 1);
    request(s, i, seq, ids, i == 0 ? first : out);
    if (i % 5) CHECK(m3_session_rewind(s, seq, 0, &err) == M3_OK, "%s", err.message);
    if (i % 100 == 99) {
      m3_span all = {0, CONTEXT - 42};
      refused += eval(s, &all, 1, ids, out) == M3_ERROR_CONTEXT;
      for (int32_t other = 1; other < SEQUENCES; other++) m3_session_rewind(s, other, 0, &err);
      CHECK(pages_used(s) == 3, "%lld pages after %d requests", (long long)pages_used(s), i + 1);
    }
    if (i == n_requests / 10) before = resident_pages();
  }
  int64_t grown = resident_pages() - before;
  int64_t most = options.device == M3_DEVICE_CPU ? 256 : 8192; /* the driver has memory of its own */
  CHECK(SANITIZED || (before > 0 && grown < most), "%lld pages of memory more", (long long)grown);
  CHECK(refused == n_requests / 100, "%d requests found no pages", refused);
  CHECK(m3_session_fork(s, 0, 1, &err) == M3_OK && eval(s, &(m3_span){1, 1}, 1, ids, again) == M3_OK &&
            memcmp(first, again, sizeof first) == 0,
        "the first request gets another answer after %d", n_requests);
  for (int32_t seq = 0; seq < SEQUENCES; seq++) CHECK(m3_session_rewind(s, seq, 0, &err) == M3_OK, "%s", err.message);
  CHECK(pages_used(s) == 0, "%lld pages were not returned", (long long)pages_used(s));
  m3_session_close(s);
}

/* `test_many cuda` runs on the GPU. */
int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "cuda") == 0) options.device = M3_DEVICE_CUDA;
  tiny_file t;
  make_tiny_file(&t);
  char path[64];
  new_path(path, sizeof path, "m3-many");
  write_file(path, t.file.data, t.file.size);
  if (m3_model_open(path, &options, &model, &err)) {
    printf("%s\n", err.message);
    return 1;
  }
  check_neighbours(0, 1, M3_TYPE_F32);
  check_neighbours(23, 3, M3_TYPE_F16);
  check_neighbours(1, 1, M3_TYPE_BF16);
  check_steps();
  check_requests(REQUESTS);
  m3_model_close(model);
  unlink(path);
  free(t.file.data);
  return finish("test_many");
}
