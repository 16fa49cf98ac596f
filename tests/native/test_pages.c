/* Pages of a session: one pool for all sequences, blocks that are dropped, pages as bytes. A window of one sparse layer
 * is given its input rows, so that what is cached of a token hangs on nothing but its row and its position: the
 * definition of a shift can be computed. Unused cache rows hold NaN throughout. */
#include "msa_definitions.h"
#include "session.h"
/* after msa_definitions.h, which has a parameter of the name of its struct */
#include "tiny_file.h"

enum {
  ROWS = 40, /* different input rows */
  CONTEXT = 160,
  SEQUENCES = 5,
  HEADS = 2 * T_KV + 1, /* of a token: K, V, index key */
};

static m3_model *model;
static m3_error err;
static m3_model_options options = {.struct_size = sizeof options, .device = M3_DEVICE_CPU};
static float input[ROWS * T_EMBD];

static bool on_cpu(void) { return options.device == M3_DEVICE_CPU; }

/* One sparse layer. */
static const m3_session_options plain = {.struct_size = sizeof(m3_session_options),
                                         .context = CONTEXT,
                                         .layer_first = 1,
                                         .layer_count = 1,
                                         .flags = M3_SESSION_POISON | M3_SESSION_EXACT,
                                         .page_seed = 5,
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

/* Appends input rows to sequences, rows of all spans one after the other; hidden states to out, or nowhere. */
static m3_status append(m3_session *s, const m3_span *spans, int32_t n_spans, const int32_t *rows, float *out) {
  static float hidden[SEQUENCES * CONTEXT * T_EMBD], nowhere[SEQUENCES * CONTEXT * T_EMBD];
  int64_t n = 0;
  for (int32_t i = 0; i < n_spans; i++) n += spans[i].n;
  for (int64_t i = 0; i < n; i++) memcpy(hidden + i * T_EMBD, input + rows[i] * T_EMBD, T_EMBD * sizeof(float));
  m3_batch b = {.struct_size = sizeof b,
                .output = M3_OUTPUT_HIDDEN,
                .n_tokens = n,
                .hidden = hidden,
                .n_spans = n_spans,
                .spans = spans,
                .out = out ? out : nowhere,
                .out_count = n * T_EMBD};
  return m3_session_eval(s, &b, &err);
}

static m3_status append_one(m3_session *s, int32_t seq, const int32_t *rows, int32_t n, float *out) {
  return append(s, &(m3_span){seq, n}, 1, rows, out);
}

/* ---------------------------------------------------------------------------------------------- what is cached */

/* A page as float32: K [T_KV, T_BLOCK, T_DIM], V alike, index keys [T_BLOCK, T_INDEX]; T_DIM and T_INDEX are equal. */
typedef struct page {
  float values[HEADS][T_BLOCK][T_DIM];
} page;

static size_t width_of(int32_t type) { return (size_t)m3_row_bytes(type, 1); }

static void export_page(m3_session *s, int32_t seq, int64_t block, page *out) {
  static unsigned char raw[sizeof(page)];
  uint64_t n = m3_session_page_bytes(s);
  int32_t types[] = {s->options.kv_type, s->options.index_type};
  CHECK(n == 2 * T_KV * T_BLOCK * T_DIM * width_of(types[0]) + T_BLOCK * T_INDEX * width_of(types[1]), "page of %llu",
        (unsigned long long)n);
  CHECK(m3_session_export(s, seq, block, raw, n, &err) == M3_OK, "%s", err.message);
  const unsigned char *at = raw;
  for (int head = 0; head < HEADS; head++) {
    int32_t type = types[head == HEADS - 1];
    m3_traits(type)->to_f32(at, out->values[head][0], T_BLOCK * T_DIM);
    at += T_BLOCK * T_DIM * width_of(type);
  }
}

/* Keys before they turn, and values, of every input row: what stands at position 0, where no channel turns. */
static float unturned[ROWS][HEADS][T_DIM];

static void find_unturned(void) {
  m3_session *s = new_session(plain);
  page p;
  for (int32_t row = 0; row < ROWS; row++) {
    CHECK(append_one(s, 0, &row, 1, NULL) == M3_OK, "%s", err.message);
    export_page(s, 0, 0, &p);
    for (int head = 0; head < HEADS; head++) memcpy(unturned[row][head], p.values[head][0], sizeof p.values[0][0]);
    CHECK(m3_session_rewind(s, 0, 0, &err) == M3_OK, "%s", err.message);
  }
  m3_session_close(s);
}

/* The angle of a pair of channels as the model defines it, rounded to float32 twice. */
static double angle_of(int pair, int64_t pos) {
  float frequency = 1.0f / powf(5e6f, (float)(2 * pair) / (float)T_ROT);
  volatile float angle = (float)pos * frequency;
  return (double)angle;
}

/* A key turned by the difference of two positions' angles, in double precision. */
static void turn(const float *key, int64_t from, int64_t to, double *out) {
  for (int i = 0; i < T_DIM; i++) out[i] = (double)key[i];
  for (int i = 0; i < T_ROT / 2; i++) {
    double angle = angle_of(i, to) - angle_of(i, from), a = out[i], b = out[i + T_ROT / 2];
    out[i] = a * cos(angle) - b * sin(angle);
    out[i + T_ROT / 2] = b * cos(angle) + a * sin(angle);
  }
}

static bool turns(int head, int channel) { return (head < T_KV || head == HEADS - 1) && channel < T_ROT; }

/* Half a unit in the last place of the type, of numbers as large as `key`. */
static double half_unit(int32_t type, const float *key) {
  double most = 0;
  for (int i = 0; i < T_DIM; i++) most = fmax(most, fabs((double)key[i]));
  return most * (type == M3_TYPE_F16 ? 0x1p-11 : type == M3_TYPE_BF16 ? 0x1p-8 : 0);
}

/* Worst distance of the cached keys and values of a sequence from what its rows have at their positions, in F32; values
 * and what does not turn must be equal. Rows behind the last token are zero. */
static double distance(m3_session *s, int32_t seq, const int32_t *rows) {
  int64_t length = m3_session_length(s, seq);
  double worst = 0, exact[T_DIM];
  page p;
  for (int64_t pos = 0; pos < (length + T_BLOCK - 1) / T_BLOCK * T_BLOCK; pos++) {
    if (pos % T_BLOCK == 0) export_page(s, seq, pos / T_BLOCK, &p);
    for (int head = 0; head < HEADS; head++) {
      const float *got = p.values[head][pos % T_BLOCK];
      bool key = turns(head, 0);
      for (int i = 0; i < T_DIM; i++) exact[i] = pos < length ? (double)unturned[rows[pos]][head][i] : 0;
      if (key && pos < length) turn(unturned[rows[pos]][head], 0, pos, exact);
      for (int i = 0; i < T_DIM; i++) {
        double off = fabs((double)got[i] - exact[i]);
        if (!(off <= worst)) worst = off;
        if (!turns(head, i) && off != 0) return INFINITY;
      }
    }
  }
  return worst;
}

/* ---------------------------------------------------------------------------------------------- drop */

static void random_rows(int32_t *rows, int n, uint64_t seed) {
  for (int i = 0; i < n; i++) rows[i] = (int32_t)(next_random(&seed) % ROWS);
}

static void remove_rows(int32_t *rows, int n, int64_t first, int64_t count) {
  memmove(rows + first, rows + first + count, (size_t)(n - first - count) * sizeof *rows);
}

/* Cached keys equal the unturned ones turned at their new positions; what is appended stands behind them. */
static void check_drop(int32_t chunk, int32_t threads) {
  m3_session_options o = plain;
  o.chunk = chunk, o.n_threads = threads;
  m3_session *s = new_session(o);
  int32_t rows[CONTEXT];
  random_rows(rows, CONTEXT, 3);
  CHECK(append_one(s, 0, rows, 150, NULL) == M3_OK && pages_used(s) == 10, "%s", err.message);
  double before = distance(s, 0, rows);
  CHECK(before < 1e-6, "keys of an eval are off by %g", before);
  static const struct {
    int64_t first, n, left;
  } drops[] = {{1, 2, 118}, {0, 1, 102}, {3, 3, 54}, {2, 1, 38}};
  int64_t length = 150;
  for (size_t i = 0; i < sizeof drops / sizeof *drops; i++) {
    CHECK(m3_session_drop(s, 0, drops[i].first, drops[i].n, &err) == M3_OK, "%s", err.message);
    remove_rows(rows, CONTEXT, drops[i].first * T_BLOCK, drops[i].n * T_BLOCK);
    length -= drops[i].n * T_BLOCK;
    CHECK(m3_session_length(s, 0) == drops[i].left && length == drops[i].left && pages_used(s) == (length + 15) / 16,
          "%lld tokens in %lld pages", (long long)m3_session_length(s, 0), (long long)pages_used(s));
    double off = distance(s, 0, rows);
    CHECK(off < 1e-6 + 5e-7 * (double)i, "after drop %zu keys are off by %g", i, off);
  }
  CHECK(append_one(s, 0, rows + 38, 15, NULL) == M3_OK, "%s", err.message);
  double off = distance(s, 0, rows);
  CHECK(off < 3e-6, "what was appended is off by %g", off);
  m3_session_close(s);
}

/* In other types every turned number is what double precision gives from the stored ones, rounded to the type. */
static void check_drop_of_type(int32_t type) {
  m3_session_options o = plain;
  o.kv_type = type, o.index_type = type;
  m3_session *s = new_session(o);
  int32_t rows[CONTEXT];
  random_rows(rows, CONTEXT, 4);
  static page before[10], after;
  CHECK(append_one(s, 0, rows, 150, NULL) == M3_OK, "%s", err.message);
  for (int b = 0; b < 10; b++) export_page(s, 0, b, &before[b]);
  CHECK(m3_session_drop(s, 0, 2, 3, &err) == M3_OK, "%s", err.message);
  double worst = 0, exact[T_DIM];
  for (int64_t pos = 0; pos < 102; pos++) {
    if (pos % T_BLOCK == 0) export_page(s, 0, pos / T_BLOCK, &after);
    int64_t from = pos < 32 ? pos : pos + 48;
    for (int head = 0; head < HEADS; head++) {
      const float *old = before[from / T_BLOCK].values[head][pos % T_BLOCK];
      turn(old, turns(head, 0) ? from : pos, pos, exact);
      for (int i = 0; i < T_DIM; i++) {
        double off = fabs((double)after.values[head][pos % T_BLOCK][i] - exact[i]);
        worst = fmax(worst, off / (half_unit(type, old) * 1.42 + 1e-6));
        if (!turns(head, i)) CHECK(off == 0, "%s: head %d channel %d changed", m3_type_name(type), head, i);
      }
    }
  }
  CHECK(worst <= 1, "%s: more than one rounding: %g", m3_type_name(type), worst);
  m3_session_close(s);
}

/* At positions where the rounding of the angles shows: turning all keys by one angle would be off. */
static void check_far_positions(void) {
  enum { FAR = 65536 };
  m3_session_options o = plain;
  o.context = FAR, o.flags = M3_SESSION_EXACT;
  m3_session *s = new_session(o);
  static page random, got;
  uint64_t seed = 8;
  fill_random(&random.values[0][0][0], sizeof random / sizeof(float), 1.0f, &seed);
  for (int b = 0; b < FAR / T_BLOCK; b++)
    if (m3_session_import(s, 0, T_BLOCK, &random, sizeof random, &err)) CHECK(false, "%s", err.message);
  CHECK(m3_session_length(s, 0) == FAR && m3_session_drop(s, 0, 1, 100, &err) == M3_OK, "%s", err.message);
  double worst = 0, uniform = 0, exact[T_DIM], by_one_angle[T_DIM];
  for (int64_t block = FAR / T_BLOCK - 120; block < FAR / T_BLOCK - 100; block++) {
    export_page(s, 0, block, &got);
    for (int slot = 0; slot < T_BLOCK; slot++)
      for (int head = 0; head < HEADS; head++) {
        int64_t to = block * T_BLOCK + slot, from = to + 100 * T_BLOCK;
        if (!turns(head, 0)) continue;
        turn(random.values[head][slot], from, to, exact);
        turn(random.values[head][slot], 100 * T_BLOCK, 0, by_one_angle);
        for (int i = 0; i < T_DIM; i++) {
          worst = fmax(worst, fabs((double)got.values[head][slot][i] - exact[i]));
          uniform = fmax(uniform, fabs(by_one_angle[i] - exact[i]));
        }
      }
  }
  CHECK(worst < 1e-6 && uniform > 2e-5, "far keys are off by %g, one angle would be by %g", worst, uniform);
  m3_session_close(s);
}

/* Selection and attention on a cache that was shifted, against double precision on that cache. */
static void check_selection(int32_t isa, int32_t index_scan) {
  enum { NEW = 5 };
  m3_model *whole = model;
  m3_model_options other = options;
  other.isa = isa;
  CHECK(m3_model_open(whole->gguf ? m3_gguf_file_name(whole->gguf, 0) : "", &other, &model, &err) == M3_OK, "%s",
        err.message);
  m3_session_options o = plain;
  o.record = M3_RECORD_BLOCKS, o.index_scan = index_scan;
  m3_session *s = new_session(o);
  int32_t rows[CONTEXT], blocks[NEW * T_KV * T_TOP];
  random_rows(rows, CONTEXT, 6);
  CHECK(append_one(s, 0, rows, 150, NULL) == M3_OK && m3_session_drop(s, 0, 1, 2, &err) == M3_OK &&
            append_one(s, 0, rows + 150, NEW, NULL) == M3_OK &&
            m3_session_blocks(s, 1, blocks, NEW * T_KV * T_TOP, &err) == M3_OK,
        "%s", err.message);
  world w = {.c = {.name = "after a shift",
                   .n_head = T_HEAD,
                   .n_head_kv = T_KV,
                   .head_dim = T_DIM,
                   .index_dim = T_INDEX,
                   .block_size = T_BLOCK,
                   .top_k = T_TOP,
                   .local_blocks = 1},
             .scratch = s->scratch,
             .cache = s->cache.layers[0],
             .n = NEW,
             .rows = {.n = NEW, .seq = s->row_seq, .pos = s->row_pos, .tables = s->cache.tables}};
  CHECK(w.rows.pos[0] == 118, "position %lld", (long long)w.rows.pos[0]);
  for (int32_t row = 0; row < NEW; row++)
    for (int32_t head = 0; head < T_KV; head++) {
      static double exact[4096];
      double slack = exact_scores(&w, row, head, exact) * 0x1p-18;
      check_list(&w, m3_model_isa_name(model), row, head, blocks + (row * T_KV + head) * T_TOP, exact, slack);
    }
  check_attention(&w, "attention after a shift", blocks, s->scratch.attended, NULL);
  m3_session_close(s);
  m3_model_close(model);
  model = whole;
}

/* The copies of index keys in few bits are made again: lists and results are those of the full scan. */
static void check_low_bit(void) {
  m3_session *s[2];
  int32_t rows[CONTEXT];
  float out[2][60 * T_EMBD];
  page p;
  random_rows(rows, CONTEXT, 9);
  for (int i = 0; i < 2; i++) {
    m3_session_options o = plain;
    o.flags = M3_SESSION_EXACT; /* NaN in place of a copy would be read as no bound */
    o.sequences = 2, o.index_scan = i ? M3_INDEX_SCAN_LOW_BIT : M3_INDEX_SCAN_FULL;
    s[i] = new_session(o);
    CHECK(append_one(s[i], 0, rows, 140, NULL) == M3_OK && m3_session_drop(s[i], 0, 2, 2, &err) == M3_OK, "%s",
          err.message);
    for (int64_t b = 0; b < 7; b++) {
      CHECK(m3_session_export(s[i], 0, b, &p, sizeof p, &err) == M3_OK, "%s", err.message);
      CHECK(m3_session_import(s[i], 1, b < 6 ? T_BLOCK : 108 % T_BLOCK, &p, sizeof p, &err) == M3_OK, "%s",
            err.message);
    }
    for (int seq = 0; seq < 2; seq++)
      for (int row = 0; row < 30; row++)
        CHECK(append_one(s[i], seq, rows + row, 1, out[i] + (seq * 30 + row) * T_EMBD) == M3_OK, "%s", err.message);
  }
  CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0, "the low-bit scan after a shift or an import reads other blocks");
  CHECK(memcmp(out[0], out[0] + 30 * T_EMBD, sizeof out[0] / 2) == 0, "an imported sequence differs from its source");
  int64_t bounded, rescored;
  m3_session_scan(s[1], &bounded, &rescored);
  CHECK(bounded > 0, "no block was bounded");
  m3_session_close(s[0]);
  m3_session_close(s[1]);
}

/* ---------------------------------------------------------------------------------------------- a naive model */

/* Sequences as lists of rows; a block is a number that stands for its content and is shared by forks. */
typedef struct naive {
  int32_t rows[SEQUENCES][CONTEXT];
  int64_t blocks[SEQUENCES][CONTEXT / T_BLOCK], length[SEQUENCES], next;
} naive;

static int64_t naive_blocks(int64_t length) { return (length + T_BLOCK - 1) / T_BLOCK; }

static int64_t naive_uses(const naive *m, int64_t block) {
  int64_t uses = 0;
  for (int s = 0; s < SEQUENCES; s++)
    for (int64_t b = 0; b < naive_blocks(m->length[s]); b++) uses += m->blocks[s][b] == block;
  return uses;
}

static int64_t naive_pages(const naive *m) {
  int64_t pages = 0;
  for (int s = 0; s < SEQUENCES; s++)
    for (int64_t b = 0; b < naive_blocks(m->length[s]); b++) {
      bool first = true;
      for (int t = 0; t <= s && first; t++)
        for (int64_t i = 0; i < (t < s ? naive_blocks(m->length[t]) : b); i++)
          first &= m->blocks[t][i] != m->blocks[s][b];
      pages += first;
    }
  return pages;
}

static void naive_append(naive *m, int32_t seq, const int32_t *rows, int32_t n) {
  int64_t length = m->length[seq], first = length / T_BLOCK;
  if (length % T_BLOCK && naive_uses(m, m->blocks[seq][first]) > 1) m->blocks[seq][first] = m->next++;
  for (int64_t b = naive_blocks(length); b < naive_blocks(length + n); b++) m->blocks[seq][b] = m->next++;
  memcpy(m->rows[seq] + length, rows, (size_t)n * sizeof *rows);
  m->length[seq] += n;
}

static void naive_drop(naive *m, int32_t seq, int64_t first, int64_t n) {
  int64_t end = naive_blocks(m->length[seq]);
  for (int64_t b = first; b < end - n; b++) {
    bool shared = naive_uses(m, m->blocks[seq][b + n]) > 1;
    m->blocks[seq][b] = shared ? m->next++ : m->blocks[seq][b + n];
    if (!shared) m->blocks[seq][b + n] = -1 - b; /* moved, not shared with itself */
  }
  memmove(m->rows[seq] + first * T_BLOCK, m->rows[seq] + (first + n) * T_BLOCK,
          (size_t)(m->length[seq] - (first + n) * T_BLOCK) * sizeof(int32_t));
  m->length[seq] -= n * T_BLOCK;
}

/* One random operation on both; what the engine refuses for want of pages leaves both as they are. */
static void step(m3_session *s, naive *m, uint64_t *seed, int64_t pool, int *refused) {
  naive before = *m;
  int32_t seq = (int32_t)(next_random(seed) % SEQUENCES), rows[2 * CONTEXT];
  int64_t length = m->length[seq], full = length / T_BLOCK;
  m3_status status = M3_OK;
  switch (next_random(seed) % 5) {
    case 0:
    case 1: { /* two sequences at once, which may share the page they write to */
      int32_t other = (seq + 1 + (int32_t)(next_random(seed) % (SEQUENCES - 1))) % SEQUENCES;
      m3_span spans[2] = {{seq, 1 + (int32_t)(next_random(seed) % 40)}, {other, 1 + (int32_t)(next_random(seed) % 20)}};
      if (spans[0].n > CONTEXT - length || spans[1].n > CONTEXT - m->length[other]) return;
      random_rows(rows, spans[0].n + spans[1].n, next_random(seed));
      status = append(s, spans, 2, rows, NULL);
      naive_append(m, seq, rows, spans[0].n);
      naive_append(m, other, rows + spans[0].n, spans[1].n);
      break;
    }
    case 2: {
      int64_t to = (int64_t)(next_random(seed) % (uint64_t)(length + 1));
      status = m3_session_rewind(s, seq, to, &err);
      m->length[seq] = to;
      break;
    }
    case 3: {
      int32_t dst = (seq + 1 + (int32_t)(next_random(seed) % (SEQUENCES - 1))) % SEQUENCES;
      status = m3_session_fork(s, seq, dst, &err);
      memcpy(m->rows[dst], m->rows[seq], sizeof m->rows[seq]);
      memcpy(m->blocks[dst], m->blocks[seq], sizeof m->blocks[seq]);
      m->length[dst] = length;
      break;
    }
    default: {
      if (!full) return;
      int64_t first = (int64_t)(next_random(seed) % (uint64_t)full);
      int64_t n = 1 + (int64_t)(next_random(seed) % (uint64_t)(full - first));
      status = m3_session_drop(s, seq, first, n, &err);
      naive_drop(m, seq, first, n);
    }
  }
  bool fits = naive_pages(m) <= pool;
  CHECK(status == (fits ? M3_OK : M3_ERROR_CONTEXT), "status %d with %lld pages of %lld: %s", (int)status,
        (long long)naive_pages(m), (long long)pool, err.message);
  if (!fits) *m = before, (*refused)++;
}

static void check_random(int64_t pool, int steps, uint64_t seed) {
  m3_session_options o = plain;
  o.sequences = SEQUENCES, o.pages = pool, o.chunk = 24;
  m3_session *s = new_session(o);
  static naive m;
  memset(&m, 0, sizeof m);
  int refused = 0;
  double worst = 0;
  for (int i = 0; i < steps; i++) {
    step(s, &m, &seed, pool, &refused);
    CHECK(pages_used(s) == naive_pages(&m), "step %d: %lld pages are used, %lld are held", i, (long long)pages_used(s),
          (long long)naive_pages(&m));
    for (int32_t seq = 0; seq < SEQUENCES; seq++) {
      CHECK(m3_session_length(s, seq) == m.length[seq], "step %d: length of sequence %d", i, (int)seq);
      if ((i + seq) % 3 == 0) worst = fmax(worst, distance(s, seq, m.rows[seq]));
    }
  }
  CHECK(worst < 1e-5, "keys are off by %g", worst);
  CHECK(pool == SEQUENCES * CONTEXT / T_BLOCK ? refused == 0 : refused > 0, "%d of %d operations found no pages",
        refused, steps);
  for (int32_t seq = 0; seq < SEQUENCES; seq++) CHECK(m3_session_rewind(s, seq, 0, &err) == M3_OK, "%s", err.message);
  CHECK(pages_used(s) == 0, "%lld pages were not returned", (long long)pages_used(s));
  m3_session_close(s);
}

/* ---------------------------------------------------------------------------------------------- the pool */

/* Too few pages: numbers, and nothing taken, not even by the spans that would have fit. */
static void check_pool(void) {
  m3_session_options o = plain;
  m3_memory few, all;
  o.sequences = 3;
  CHECK(m3_session_memory(model, &o, &all, &err) == M3_OK, "%s", err.message);
  o.pages = 6;
  CHECK(m3_session_memory(model, &o, &few, &err) == M3_OK, "%s", err.message);
  CHECK(few.kv_bytes * 5 == all.kv_bytes && few.index_bytes * 5 == all.index_bytes && few.kv_bytes, "bytes of 6 pages");
  m3_session *s = new_session(o);
  int64_t used, total;
  int32_t rows[CONTEXT];
  random_rows(rows, CONTEXT, 1);
  m3_session_pages(s, &used, &total);
  CHECK(used == 0 && total == 6 && m3_session_page_bytes(s) == (few.kv_bytes + few.index_bytes) / 6, "pages and bytes");
  CHECK(append_one(s, 0, rows, 20, NULL) == M3_OK && m3_session_fork(s, 0, 1, &err) == M3_OK, "%s", err.message);
  m3_span spans[2] = {{0, 3}, {1, 80}}; /* a copy and 5 pages, where 4 are free */
  CHECK(
      append(s, spans, 2, rows, NULL) == M3_ERROR_CONTEXT && strstr(err.message, "6 pages are needed, 4 of 6 are free"),
      "%s", err.message);
  CHECK(pages_used(s) == 2 && m3_session_length(s, 0) == 20 && m3_session_length(s, 1) == 20,
        "a failed eval took pages");
  spans[1].n = 40; /* a copy and 2 pages: the last one that writes to a shared page keeps it */
  CHECK(append(s, spans, 2, rows, NULL) == M3_OK && pages_used(s) == 5, "%s", err.message);
  CHECK(append_one(s, 2, rows, 17, NULL) == M3_ERROR_CONTEXT && pages_used(s) == 5, "%s", err.message);
  CHECK(append_one(s, 2, rows, 16, NULL) == M3_OK && append_one(s, 0, rows, 9, NULL) == M3_OK && pages_used(s) == 6,
        "%s", err.message);
  CHECK(append_one(s, 0, rows, 1, NULL) == M3_ERROR_CONTEXT, "%s", err.message);
  CHECK(m3_session_rewind(s, 2, 0, &err) == M3_OK && append_one(s, 0, rows, 1, NULL) == M3_OK, "%s", err.message);
  m3_session_close(s);
  static const int64_t wrong[] = {-1, 31, INT64_MAX};
  for (int i = 0; i < 3; i++) {
    o.pages = wrong[i];
    CHECK(m3_session_open(model, &o, &s, &err) == M3_ERROR_ARGUMENT && strstr(err.message, "expected 1 to 30"), "%s",
          err.message);
  }
}

/* A drop that needs copies of shared pages where there are none, and drops of what is not there: nothing changes. */
static void check_drop_refusals(void) {
  m3_session_options o = plain;
  o.sequences = 2, o.pages = 6;
  m3_session *s = new_session(o);
  int32_t rows[CONTEXT];
  random_rows(rows, CONTEXT, 2);
  CHECK(m3_session_drop(s, 0, 0, 1, &err) == M3_ERROR_ARGUMENT, "%s", err.message);
  CHECK(append_one(s, 0, rows, 5 * T_BLOCK + 3, NULL) == M3_OK && m3_session_fork(s, 0, 1, &err) == M3_OK, "%s",
        err.message);
  CHECK(m3_session_drop(s, 0, 1, 1, &err) == M3_ERROR_CONTEXT && strstr(err.message, "4 pages are needed, 0 of 6"),
        "%s", err.message);
  static const struct {
    int32_t seq;
    int64_t first, n;
  } wrong[] = {{0, 5, 1}, {0, 0, 6}, {0, -1, 1}, {0, 0, 0},        {0, 0, -1},
               {0, 4, 2}, {2, 0, 1}, {-1, 0, 1}, {0, 1, INT64_MAX}};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
    CHECK(m3_session_drop(s, wrong[i].seq, wrong[i].first, wrong[i].n, &err) == M3_ERROR_ARGUMENT, "drop %zu", i);
  CHECK(distance(s, 0, rows) < 1e-6 && distance(s, 1, rows) < 1e-6 && pages_used(s) == 6,
        "a refused drop changed keys");
  CHECK(m3_session_drop(s, 1, 3, 2, &err) == M3_ERROR_CONTEXT, "%s", err.message);
  CHECK(m3_session_rewind(s, 1, 5 * T_BLOCK, &err) == M3_OK && m3_session_drop(s, 1, 2, 3, &err) == M3_OK &&
            m3_session_length(s, 1) == 2 * T_BLOCK && pages_used(s) == 6,
        "dropping the last blocks needs no page: %s", err.message);
  m3_session_close(s);
}

static void check_bytes(void) {
  m3_session_options o = plain;
  o.sequences = 2, o.pages = 3;
  m3_session *s = new_session(o);
  static page p;
  int32_t rows[CONTEXT], n = (int32_t)sizeof p;
  random_rows(rows, CONTEXT, 7);
  CHECK(m3_session_export(s, 0, 0, &p, sizeof p, &err) == M3_ERROR_ARGUMENT, "%s", err.message);
  CHECK(append_one(s, 0, rows, T_BLOCK + 5, NULL) == M3_OK, "%s", err.message);
  CHECK(m3_session_export(s, 0, 2, &p, sizeof p, &err) == M3_ERROR_ARGUMENT &&
            m3_session_export(s, 0, -1, &p, sizeof p, &err) == M3_ERROR_ARGUMENT &&
            m3_session_export(s, 2, 0, &p, sizeof p, &err) == M3_ERROR_ARGUMENT &&
            m3_session_export(s, 0, 0, &p, sizeof p - 1, &err) == M3_ERROR_ARGUMENT &&
            m3_session_export(s, 0, 0, NULL, sizeof p, &err) == M3_ERROR_ARGUMENT,
        "exports of what is not there");
  CHECK(m3_session_export(s, 0, 0, &p, sizeof p, &err) == M3_OK, "%s", err.message);
  CHECK(m3_session_import(s, 0, 1, &p, sizeof p, &err) == M3_ERROR_ARGUMENT, "%s", err.message); /* inside a block */
  CHECK(m3_session_import(s, 1, 0, &p, sizeof p, &err) == M3_ERROR_ARGUMENT &&
            m3_session_import(s, 1, T_BLOCK + 1, &p, sizeof p, &err) == M3_ERROR_ARGUMENT &&
            m3_session_import(s, 1, 1, &p, sizeof p + 1, &err) == M3_ERROR_ARGUMENT &&
            m3_session_import(s, 1, 1, NULL, sizeof p, &err) == M3_ERROR_ARGUMENT && n > 0,
        "imports of what is no page");
  CHECK(m3_session_import(s, 1, T_BLOCK, &p, sizeof p, &err) == M3_OK && distance(s, 1, rows) < 1e-6, "%s",
        err.message);
  CHECK(m3_session_import(s, 1, 1, &p, sizeof p, &err) == M3_ERROR_CONTEXT && m3_session_length(s, 1) == T_BLOCK &&
            pages_used(s) == 3,
        "%s", err.message);
  CHECK(m3_session_rewind(s, 1, 0, &err) == M3_OK && m3_session_import(s, 1, 9, &p, sizeof p, &err) == M3_OK &&
            distance(s, 1, rows) < 1e-6,
        "a part of a page: %s", err.message);
  m3_session_close(s);
}

/* `test_pages cuda` runs on the GPU. */
int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "cuda") == 0) options.device = M3_DEVICE_CUDA;
  tiny_file t;
  make_tiny_file(&t);
  char path[64];
  new_path(path, sizeof path, "m3-pages");
  write_file(path, t.file.data, t.file.size);
  if (m3_model_open(path, &options, &model, &err)) {
    printf("%s\n", err.message);
    return 1;
  }
  uint64_t seed = 12;
  fill_random(input, ROWS * T_EMBD, 1.0f, &seed);
  find_unturned();
  check_drop(0, 1);
  check_drop(7, 3);
  check_drop_of_type(M3_TYPE_F16);
  check_drop_of_type(M3_TYPE_BF16);
  check_far_positions();
  if (on_cpu()) {
    check_selection(M3_ISA_SCALAR, M3_INDEX_SCAN_FULL);
    check_selection(M3_ISA_AUTO, M3_INDEX_SCAN_FULL);
    check_selection(M3_ISA_AUTO, M3_INDEX_SCAN_LOW_BIT);
    check_low_bit();
  }
  check_pool();
  check_drop_refusals();
  check_bytes();
  check_random(SEQUENCES * CONTEXT / T_BLOCK, 300, 1);
  check_random(17, 700, 2);
  m3_model_close(model);
  unlink(path);
  free(t.file.data);
  return finish("test_pages");
}
