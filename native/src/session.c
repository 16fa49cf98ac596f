#include "session.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "importance.h"
#include "placement.h"
#include "quant/traits.h"
#include "threads.h"
#include "weights.h"

#define MAX_CHUNK 65536

/* ---------------------------------------------------------------------------------------------- options */

/* width: elements of a row. */
static m3_status check_cache_type(int32_t type, int64_t width, const char *option, m3_error *err) {
  static const int32_t known[] = {M3_TYPE_F32, M3_TYPE_F16, M3_TYPE_BF16, M3_TYPE_Q8_0, M3_TYPE_Q4_0};
  const char *name = m3_any_type_name(type);
  bool found = false;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) found |= known[i] == type;
  if (!found)
    return m3_fail(err, M3_ERROR_ARGUMENT, "%s %s (%d): F32, F16, BF16, Q8_0 and Q4_0 are supported", option,
                   name ? name : "?", (int)type);
  if (m3_row_bytes(type, width) < 0)
    return m3_fail(err, M3_ERROR_ARGUMENT, "%s %s: its rows have %" PRId64 " elements, no multiple of %" PRId64, option,
                   name, width, m3_type_block_size(type));
  return M3_OK;
}

m3_status m3_check_range(const char *option, int64_t value, int64_t low, int64_t high, m3_error *err) {
  if (value >= low && value <= high) return M3_OK;
  return m3_fail(err, M3_ERROR_ARGUMENT, "%s is %" PRId64 ", expected %" PRId64 " to %" PRId64, option, value, low,
                 high);
}

/* Copies the options with their defaults filled in. */
static m3_state_params state_params(const m3_model *m, const m3_session_options *o, bool low_bit) {
  return (m3_state_params){.hparams = &m->hparams,
                           .sequences = o->sequences,
                           .chunk = o->chunk,
                           .blocks = (o->context + m->hparams.block_size - 1) / m->hparams.block_size,
                           .kv_type = o->kv_type,
                           .index_type = o->index_type,
                           .exact = (o->flags & M3_SESSION_EXACT) != 0,
                           .low_bit = low_bit};
}

/* -1: not at all. By themselves where a sequence can grow so long that they were measured to pay, and where they are
 * smaller than the keys. */
int64_t m3_low_bit_tokens(const m3_model *m, const m3_session_options *o) {
  const m3_backend *b = m->backend;
  if (!b->low_bit_page_bytes || o->index_scan == M3_INDEX_SCAN_FULL) return -1;
  int64_t from = M3_LOW_BIT_TOKENS;
  if (b->low_bit_tokens) {
    m3_state_params state = state_params(m, o, false);
    from = b->low_bit_tokens(&state);
  }
  if (from < 0 || o->index_scan == M3_INDEX_SCAN_LOW_BIT) return from < 0 ? -1 : 0;
  bool smaller = o->index_type == M3_TYPE_F32 || o->index_type == M3_TYPE_F16 || o->index_type == M3_TYPE_BF16;
  return smaller && o->context >= from ? from : -1;
}

static m3_status complete_options(const m3_model *m, const m3_session_options *in, m3_session_options *o,
                                  m3_error *err) {
  if (!in || in->struct_size != sizeof *in)
    return m3_fail(
        err, M3_ERROR_ARGUMENT,
        "m3_session_options has %u bytes, this library expects %zu: library and header do not belong together",
        in ? in->struct_size : 0, sizeof *in);
  *o = *in;
  if (o->sequences == 0) o->sequences = 1;
  if (o->chunk == 0) o->chunk = M3_DEFAULT_CHUNK;
  if (o->layer_count == 0) o->layer_count = m->hparams.n_layer - o->layer_first;
  m3_status status = m3_check_range("sequences", o->sequences, 1, M3_MAX_SEQUENCES, err);
  if (!status) status = m3_check_range("context", o->context, 1, M3_MAX_CONTEXT, err);
  if (!status) status = m3_resolve_threads(o->n_threads, &o->n_threads, err);
  if (!status) status = m3_check_range("chunk", o->chunk, 1, MAX_CHUNK, err);
  if (!status) status = m3_check_range("attention", o->attention, M3_ATTENTION_SPARSE, M3_ATTENTION_DENSE, err);
  if (!status) status = m3_check_range("layer_first", o->layer_first, 0, m->hparams.n_layer, err);
  int32_t left = m->hparams.n_layer - o->layer_first;
  if (!status) status = m3_check_range("layer_count", o->layer_count, left ? 1 : 0, left, err);
  if (!status) status = m3_check_range("record", o->record, 0, 2 * M3_RECORD_MASS - 1, err);
  if (!status && !left && o->record)
    status = m3_fail(err, M3_ERROR_ARGUMENT, "record is %u, but a window at layer %d has no layer to record", o->record,
                     (int)o->layer_first);
  if (!status && o->record & M3_RECORD_IMPORTANCE && !m->backend->head_input)
    status = m3_fail(err, M3_ERROR_UNSUPPORTED, "backend %s does not record importance; cpu does", m->backend->name);
  if (!status) status = m3_check_range("index_scan", o->index_scan, M3_INDEX_SCAN_AUTO, M3_INDEX_SCAN_LOW_BIT, err);
  if (!status) status = m3_check_range("flags", o->flags, 0, 2 * M3_SESSION_EXACT - 1, err);
  if (!status) status = check_cache_type(o->kv_type, m->hparams.head_dim, "kv_type", err);
  if (!status) status = check_cache_type(o->index_type, m->hparams.index_dim, "index_type", err);
  if (!status && o->index_scan == M3_INDEX_SCAN_LOW_BIT && m3_low_bit_tokens(m, o) < 0)
    status = m3_fail(err, M3_ERROR_UNSUPPORTED,
                     "index_scan low_bit: backend %s has no low-bit index keys for such a session; cpu has",
                     m->backend->name);
  if (status) return status;
  uint64_t most = m3_cache_most_pages(&m->hparams, o->context, o->sequences);
  if (o->pages) status = m3_check_range("pages", o->pages, 1, (int64_t)most, err);
  if (status) return status;
  /* A chunk longer than everything the session can hold would only cost memory. */
  int64_t held = o->context * o->sequences;
  if (o->pages && o->pages * m->hparams.block_size < held) held = o->pages * m->hparams.block_size;
  if (o->chunk > held) o->chunk = (int32_t)held;
  return status;
}

static m3_cache_options cache_options(const m3_model *m, const m3_session_options *o) {
  return (m3_cache_options){
      .hparams = &m->hparams,
      .backend = m->backend,
      .sequences = o->sequences,
      .context = o->context,
      .pages = o->pages,
      .kv_type = o->kv_type,
      .index_type = o->index_type,
      .layer_first = o->layer_first,
      .layer_count = o->layer_count,
      .sparse = o->attention == M3_ATTENTION_SPARSE,
      .low_bit = m3_low_bit_tokens(m, o) >= 0,
      .poison = (o->flags & M3_SESSION_POISON) != 0,
      .page_seed = o->page_seed,
  };
}

/* ---------------------------------------------------------------------------------------------- buffers */

/* One buffer of the session: where its pointer goes, its elements, and whether it lies on the device. */
typedef struct buffer {
  void **pointer;
  int64_t count;
  size_t size;
  bool host;
} buffer;

#define MAX_BUFFERS 32

/* The list of all work buffers. Used with a blank session to estimate, with the real one to allocate. */
static int list_buffers(m3_session *s, const m3_model *m, const m3_session_options *o, buffer list[MAX_BUFFERS]) {
  const m3_hparams *h = &m->hparams;
  m3_scratch *w = &s->scratch;
  int64_t rows = o->chunk, pairs = rows * h->n_expert_used, half = h->n_rot / 2;
  int64_t blocks = (o->context + h->block_size - 1) / h->block_size;
  int64_t mlp = rows * (h->n_ff > h->n_ff_shared ? h->n_ff : h->n_ff_shared);
  if (mlp < pairs * h->n_ff_expert) mlp = pairs * h->n_ff_expert;
  int64_t logit_rows = rows < M3_LOGIT_ROWS ? rows : M3_LOGIT_ROWS;
  w->n_threads = o->n_threads;
  w->thread_floats = m->backend->thread_floats(h, blocks);
  bool scores = o->record & M3_RECORD_SCORES, importance = o->record & M3_RECORD_IMPORTANCE;
  bool mass = o->record & M3_RECORD_MASS;
  int64_t sums = importance ? m3_importance_doubles(h, o->layer_first, o->layer_count) : 0;
  const buffer all[] = {
      {(void **)&w->normed, rows * h->n_embd, sizeof(float), false},
      {(void **)&w->q, rows * h->n_head * h->head_dim, sizeof(float), false},
      {(void **)&w->k, rows * h->n_head_kv * h->head_dim, sizeof(float), false},
      {(void **)&w->v, rows * h->n_head_kv * h->head_dim, sizeof(float), false},
      {(void **)&w->index_q, rows * h->n_index_head * h->index_dim, sizeof(float), false},
      {(void **)&w->index_k, rows * h->index_dim, sizeof(float), false},
      {(void **)&w->attended, rows * h->n_head * h->head_dim, sizeof(float), false},
      {(void **)&w->gate, mlp, sizeof(float), false},
      {(void **)&w->up, mlp, sizeof(float), false},
      {(void **)&w->expert_in, pairs * h->n_embd, sizeof(float), false},
      {(void **)&w->expert_out, pairs * h->n_embd, sizeof(float), false},
      {(void **)&w->logits, rows * h->n_expert, sizeof(float), false},
      {(void **)&w->experts, pairs, sizeof(int32_t), false},
      {(void **)&w->weights, pairs, sizeof(float), false},
      {(void **)&w->blocks, rows * h->n_index_head * h->top_k, sizeof(int32_t), false},
      {(void **)&w->grouping, h->n_expert + 1 + 2 * pairs, sizeof(int32_t), false},
      {(void **)&w->rounded, m->backend->input_bytes ? m->backend->input_bytes(h, rows) : 0, 1, false},
      {(void **)&w->thread, w->thread_floats * o->n_threads, sizeof(float), false},
      {(void **)&s->hidden, rows * h->n_embd, sizeof(float), false},
      {(void **)&s->cos, rows * half, sizeof(float), true},
      {(void **)&s->sin, rows * half, sizeof(float), true},
      {(void **)&s->logits, logit_rows * h->n_vocab, sizeof(float), false},
      {(void **)&s->picked, logit_rows * h->n_embd, sizeof(float), false},
      {(void **)&s->row_seq, rows, sizeof(int32_t), true},
      {(void **)&s->row_ids, rows, sizeof(int32_t), true},
      {(void **)&s->row_pos, rows, sizeof(int64_t), true},
      {(void **)&s->scores, scores ? rows * h->n_index_head * blocks : 0, sizeof(float), false},
      {(void **)&s->mass, mass ? rows * h->n_head * h->top_k : 0, sizeof(float), false},
      {(void **)&s->sums, sums, sizeof(double), false},
      {(void **)&s->sums_before, sums, sizeof(double), false},
      {(void **)&s->inputs, importance ? (int64_t)o->layer_count * M3_INPUTS : 0, sizeof(m3_input_sums), true},
  };
  int n = (int)(sizeof all / sizeof *all);
  memcpy(list, all, sizeof all);
  return n;
}

static m3_status alloc_buffers(m3_session *s, m3_error *err) {
  buffer list[MAX_BUFFERS];
  int n = list_buffers(s, s->model, &s->options, list);
  for (int i = 0; i < n; i++) {
    uint64_t bytes = (uint64_t)list[i].count * list[i].size;
    if (!bytes) continue;
    static const char *const purpose = "a work buffer (a smaller chunk needs less)";
    if (list[i].host) {
      *list[i].pointer = m3_alloc(bytes, 1);
      if (!*list[i].pointer) return m3_fail_memory(err, bytes, purpose);
      continue;
    }
    m3_status status = s->model->backend->alloc(s->state, bytes, purpose, list[i].pointer, err);
    if (status) return status;
  }
  return M3_OK;
}

static void free_buffers(m3_session *s) {
  buffer list[MAX_BUFFERS];
  int n = list_buffers(s, s->model, &s->options, list);
  for (int i = 0; i < n; i++) {
    if (list[i].host)
      m3_free(*list[i].pointer);
    else
      s->model->backend->free(s->state, *list[i].pointer);
  }
}

/* ---------------------------------------------------------------------------------------------- open, close */

m3_status m3_session_memory(const m3_model *m, const m3_session_options *options, m3_memory *out, m3_error *err) {
  m3_session_options o;
  memset(out, 0, sizeof *out);
  m3_status status = complete_options(m, options, &o, err);
  if (status) return status;
  m3_cache_options c = cache_options(m, &o);
  status = m3_cache_bytes(&c, &out->kv_bytes, &out->index_bytes, err);
  if (status) return status;
  m3_session blank = {0};
  buffer list[MAX_BUFFERS];
  int n = list_buffers(&blank, m, &o, list);
  for (int i = 0; i < n; i++) out->scratch_bytes += (uint64_t)list[i].count * list[i].size;
  m3_state_params state = state_params(m, &o, m3_low_bit_tokens(m, &o) >= 0);
  out->scratch_bytes += (uint64_t)m->backend->state_bytes(&state);
  return M3_OK;
}

m3_status m3_session_msa(const m3_model *m, const m3_session_options *options, char *out, uint64_t n_bytes,
                         m3_error *err) {
  m3_session_options o;
  if (!out || !n_bytes) return m3_fail(err, M3_ERROR_ARGUMENT, "m3_session_msa: out is NULL or empty");
  *out = '\0';
  m3_status status = complete_options(m, options, &o, err);
  if (status || !m->backend->describe_msa) return status;
  m3_state_params state = state_params(m, &o, m3_low_bit_tokens(m, &o) >= 0);
  m->backend->describe_msa(&state, out, (size_t)n_bytes);
  return M3_OK;
}

/* Refuses what does not fit on the device, before anything is brought there. */
static m3_status check_fits(const m3_model *m, const m3_session_options *o, m3_error *err) {
  if (!m->backend->memory) return M3_OK;
  m3_memory session;
  uint64_t free_bytes, total_bytes, weights = m3_weights_to_load(m, o->layer_first, o->layer_count);
  m3_status status = m3_session_memory(m, o, &session, err);
  if (!status) status = m->backend->memory(&free_bytes, &total_bytes, err);
  if (status) return status;
  double need =
      (double)weights + (double)session.kv_bytes + (double)session.index_bytes + (double)session.scratch_bytes;
  if (need <= (double)free_bytes) return M3_OK;
  return m3_fail(err, M3_ERROR_MEMORY,
                 "not enough memory on device %s: %.2f GB are needed (weights to load %.2f, K/V %.2f, index keys %.2f, "
                 "scratch %.2f), %.2f of %.2f GB are free",
                 m->backend->name, need * 1e-9, (double)weights * 1e-9, (double)session.kv_bytes * 1e-9,
                 (double)session.index_bytes * 1e-9, (double)session.scratch_bytes * 1e-9, (double)free_bytes * 1e-9,
                 (double)total_bytes * 1e-9);
}

m3_status m3_session_open(m3_model *m, const m3_session_options *options, m3_session **out, m3_error *err) {
  if (!out) return m3_fail(err, M3_ERROR_ARGUMENT, "m3_session_open: out is NULL");
  *out = NULL;
  m3_session_options o;
  m3_status status = complete_options(m, options, &o, err);
  if (status) return status;
  m3_session *s = calloc(1, sizeof *s);
  if (!s) return m3_fail_memory(err, sizeof *s, "a session");
  s->model = m;
  s->options = o;
  size_t records = (size_t)o.layer_count + 1; /* a window without layers is no NULL */
  s->blocks = calloc(records, sizeof *s->blocks);
  s->block_scores = calloc(records, sizeof *s->block_scores);
  s->masses = calloc(records, sizeof *s->masses);
  if (!s->blocks || !s->block_scores || !s->masses) status = m3_fail_memory(err, records * 24, "a session");
  if (!status) status = m3_model_place(m, &o, err);
  if (!status) status = check_fits(m, &o, err);
  if (!status) status = m3_model_load(m, o.layer_first, o.layer_count, err);
  m3_state_params state = state_params(m, &o, m3_low_bit_tokens(m, &o) >= 0);
  if (!status) status = m->backend->open(&state, &s->state, err);
  if (!status) status = alloc_buffers(s, err);
  if (!status && m3_any_on_host(m, o.layer_first, o.layer_count))
    status = m3_host_experts_open(m, &o, s->state, &s->host_experts, err);
  if (!status && s->inputs) m3_importance_lay_out(&m->hparams, o.layer_first, o.layer_count, s->sums, s->inputs);
  m3_cache_options c = cache_options(m, &o);
  c.state = s->state;
  if (!status) status = m3_cache_open(&s->cache, &c, err);
  if (status) {
    m3_session_close(s);
    return status;
  }
  *out = s;
  return M3_OK;
}

static void free_records(m3_session *s) {
  for (int32_t i = 0; i < s->options.layer_count; i++) {
    if (s->blocks) free(s->blocks[i]), s->blocks[i] = NULL;
    if (s->block_scores) free(s->block_scores[i]), s->block_scores[i] = NULL;
    if (s->masses) free(s->masses[i]), s->masses[i] = NULL;
  }
}

void m3_session_close(m3_session *s) {
  if (!s) return;
  free_records(s);
  free(s->blocks);
  free(s->block_scores);
  free(s->masses);
  m3_cache_close(&s->cache);
  free_buffers(s);
  m3_host_experts_close(s->host_experts);
  s->model->backend->close(s->state);
  free(s);
}

/* ---------------------------------------------------------------------------------------------- eval */

static m3_status check_spans(const m3_session *s, const m3_batch *b, m3_error *err) {
  int64_t sum = 0;
  if (b->n_spans < 1 || b->n_spans > s->options.sequences || !b->spans)
    return m3_fail(err, M3_ERROR_ARGUMENT, "a batch of %d spans, expected 1 to %d", (int)b->n_spans,
                   (int)s->options.sequences);
  for (int32_t i = 0; i < b->n_spans; i++) {
    m3_span span = b->spans[i];
    if (span.seq < 0 || span.seq >= s->options.sequences)
      return m3_fail(err, M3_ERROR_ARGUMENT, "sequence %d, expected 0 to %d", (int)span.seq,
                     (int)s->options.sequences - 1);
    if (span.n < 1) return m3_fail(err, M3_ERROR_ARGUMENT, "a span of %d rows, expected at least 1", (int)span.n);
    for (int32_t j = 0; j < i; j++)
      if (b->spans[j].seq == span.seq)
        return m3_fail(err, M3_ERROR_ARGUMENT, "sequence %d stands twice in the batch", (int)span.seq);
    sum += span.n;
  }
  if (sum != b->n_tokens)
    return m3_fail(err, M3_ERROR_ARGUMENT, "the spans have %" PRId64 " rows, the batch %" PRId64, sum, b->n_tokens);
  return M3_OK;
}

static m3_status check_input(const m3_session *s, const m3_batch *b, m3_error *err) {
  bool from_ids = s->options.layer_first == 0;
  if (from_ids ? !b->ids || b->hidden : !b->hidden || b->ids)
    return m3_fail(err, M3_ERROR_ARGUMENT, "a window that starts at layer %d takes %s and nothing else",
                   (int)s->options.layer_first, from_ids ? "ids" : "hidden states");
  int64_t given = 0;
  for (int64_t i = 0; from_ids && i < b->n_tokens; i++) {
    bool embedded = b->ids[i] == -1 && b->embeddings;
    given += embedded;
    if (!embedded && (b->ids[i] < 0 || b->ids[i] >= s->model->hparams.n_vocab))
      return m3_fail(err, M3_ERROR_ARGUMENT, "token id %d at row %" PRId64 ", expected 0 to %d%s", (int)b->ids[i], i,
                     s->model->hparams.n_vocab - 1, b->embeddings ? ", or -1 for a given embedding" : "");
  }
  int64_t count = b->embeddings ? b->embeddings_count : 0;
  if (count != given * s->model->hparams.n_embd)
    return m3_fail(err, M3_ERROR_ARGUMENT,
                   "embeddings: %" PRId64 " values, expected %" PRId64 " for %" PRId64 " rows of id -1", count,
                   given * s->model->hparams.n_embd, given);
  return M3_OK;
}

static m3_status check_output(const m3_session *s, const m3_batch *b, m3_error *err) {
  const m3_hparams *h = &s->model->hparams;
  m3_status status = m3_check_range("output", b->output, M3_OUTPUT_LAST, M3_OUTPUT_HIDDEN, err);
  if (status) return status;
  if (b->output != M3_OUTPUT_HIDDEN && s->options.layer_first + s->options.layer_count != h->n_layer)
    return m3_fail(err, M3_ERROR_ARGUMENT, "logits need a window that ends with layer %d, it ends with %d",
                   h->n_layer - 1, (int)(s->options.layer_first + s->options.layer_count) - 1);
  int64_t rows = b->output == M3_OUTPUT_LAST ? b->n_spans : b->n_tokens;
  int64_t want = rows * (b->output == M3_OUTPUT_HIDDEN ? h->n_embd : h->n_vocab);
  if (!b->out || b->out_count != want)
    return m3_fail(err, M3_ERROR_ARGUMENT, "out is %s, it must hold %" PRId64 " values and holds %" PRId64,
                   b->out ? "there" : "NULL", want, b->out_count);
  return M3_OK;
}

/* A list as select gives them: ascending, what the row can see, and padded at the end. */
static bool is_list(const int32_t *list, int32_t top_k, int64_t last) {
  int32_t n = 0;
  while (n < top_k && list[n] >= 0) n++;
  for (int32_t i = 0; i < top_k; i++)
    if (i < n ? list[i] > last || (i && list[i] <= list[i - 1]) : list[i] != -1) return false;
  return n > 0;
}

/* Given block lists. */
static m3_status check_blocks(const m3_session *s, const m3_batch *b, m3_error *err) {
  if (!b->blocks) return M3_OK;
  const m3_hparams *h = &s->model->hparams;
  int32_t sparse = 0;
  for (int32_t i = 0; i < s->options.layer_count; i++) sparse += s->cache.layers[i].index != NULL;
  if (!sparse)
    return m3_fail(err, M3_ERROR_ARGUMENT, "blocks are given, and the window reads every token (dense attention)");
  int64_t want = sparse * b->n_tokens * h->n_index_head * h->top_k;
  if (b->blocks_count != want)
    return m3_fail(err, M3_ERROR_ARGUMENT, "blocks: %" PRId64 " values, expected %" PRId64, b->blocks_count, want);
  const int32_t *list = b->blocks;
  for (int32_t layer = 0; layer < sparse; layer++)
    for (int32_t i = 0; i < b->n_spans; i++)
      for (int64_t row = 0; row < b->spans[i].n; row++) {
        int64_t pos = s->cache.sequences[b->spans[i].seq].length + row;
        for (int32_t head = 0; head < h->n_index_head; head++, list += h->top_k)
          if (!is_list(list, h->top_k, pos / h->block_size))
            return m3_fail(err, M3_ERROR_ARGUMENT,
                           "blocks: the list of position %" PRId64
                           ", head %d, starting with %d: expected ascending "
                           "blocks up to %" PRId64 ", at least one, padded with -1",
                           pos, (int)head, (int)list[0], pos / h->block_size);
      }
  return M3_OK;
}

/* What behind the layers the batch needs. */
static m3_end end_of(const m3_session *s, const m3_batch *b) {
  if (b->output != M3_OUTPUT_HIDDEN) return M3_END_HEAD;
  bool last = s->options.layer_first + s->options.layer_count == s->model->hparams.n_layer;
  return s->inputs && last ? M3_END_NORM : M3_END_NONE;
}

static m3_status check_batch(const m3_session *s, const m3_batch *b, m3_error *err) {
  if (!b || b->struct_size != sizeof *b)
    return m3_fail(err, M3_ERROR_ARGUMENT,
                   "m3_batch has %u bytes, this library expects %zu: library and header do not belong together",
                   b ? b->struct_size : 0, sizeof *b);
  m3_status status = check_spans(s, b, err);
  if (!status) status = check_input(s, b, err);
  if (!status) status = check_output(s, b, err);
  if (!status) status = check_blocks(s, b, err);
  if (!status) status = m3_check_bound(s->model, s->options.layer_first, s->options.layer_count, end_of(s, b), err);
  return status;
}

/* Copies the sums, so that an eval that fails can leave them as they were. */
static void copy_sums(m3_session *s, double *dst, const double *src) {
  if (!s->inputs) return;
  int64_t n = m3_importance_doubles(&s->model->hparams, s->options.layer_first, s->options.layer_count);
  s->model->backend->copy(s->state, dst, src, (uint64_t)n * sizeof(double));
}

/* Buffers for what this eval records. */
static m3_status open_records(m3_session *s, const m3_batch *b, m3_error *err) {
  const m3_hparams *h = &s->model->hparams;
  free_records(s);
  s->last_rows = b->n_tokens;
  s->last_blocks = 0;
  for (int32_t i = 0; i < b->n_spans; i++) {
    int64_t blocks = (s->cache.sequences[b->spans[i].seq].length + b->spans[i].n + h->block_size - 1) / h->block_size;
    if (blocks > s->last_blocks) s->last_blocks = blocks;
  }
  uint64_t lists = (uint64_t)b->n_tokens * (uint64_t)h->n_index_head;
  for (int32_t i = 0; i < s->options.layer_count; i++) {
    if (!s->cache.layers[i].index) continue;
    uint64_t list_bytes = lists * (uint64_t)h->top_k * sizeof(int32_t),
             score_bytes = lists * (uint64_t)s->last_blocks * sizeof(float),
             mass_bytes = (uint64_t)b->n_tokens * (uint64_t)h->n_head * (uint64_t)h->top_k * sizeof(float);
    if (s->options.record & M3_RECORD_BLOCKS && !(s->blocks[i] = malloc(list_bytes)))
      return m3_fail_memory(err, list_bytes, "the recorded block lists of a layer");
    if (s->options.record & M3_RECORD_SCORES && !(s->block_scores[i] = malloc(score_bytes)))
      return m3_fail_memory(err, score_bytes, "the recorded block scores of a layer");
    if (s->options.record & M3_RECORD_MASS && !(s->masses[i] = malloc(mass_bytes)))
      return m3_fail_memory(err, mass_bytes, "the recorded attention masses of a layer");
  }
  return M3_OK;
}

static m3_status run_chunks(m3_session *s, const m3_batch *b, m3_error *err) {
  int32_t span = 0, in_span = 0;
  s->embedded = 0;
  for (int64_t first = 0; first < b->n_tokens;) {
    int32_t n = 0;
    for (; n < s->options.chunk && first + n < b->n_tokens; n++) {
      if (in_span == b->spans[span].n) span++, in_span = 0;
      s->row_seq[n] = b->spans[span].seq;
      s->row_pos[n] = s->cache.sequences[b->spans[span].seq].length + in_span++;
    }
    m3_status status = m3_forward_chunk(s, b, first, n, err);
    if (status) return status;
    first += n;
  }
  return M3_OK;
}

m3_status m3_session_eval(m3_session *s, const m3_batch *b, m3_error *err) {
  m3_status status = check_batch(s, b, err);
  if (status) return status;
  atomic_store(&s->cancel, false);
  atomic_store(&s->done, 0);
  atomic_store(&s->total, b->n_tokens * s->options.layer_count);
  status = open_records(s, b, err);
  copy_sums(s, s->sums_before, s->sums);
  if (!status) status = m3_cache_reserve(&s->cache, b->spans, b->n_spans, err);
  if (!status) status = run_chunks(s, b, err);
  for (int32_t i = 0; i < b->n_spans; i++) {
    int32_t seq = b->spans[i].seq;
    if (status)
      m3_cache_trim(&s->cache, seq);
    else
      m3_cache_set_length(&s->cache, seq, s->cache.sequences[seq].length + b->spans[i].n);
  }
  if (status) {
    free_records(s);
    copy_sums(s, s->sums, s->sums_before);
    s->last_rows = 0;
  }
  return status;
}

void m3_session_cancel(m3_session *s) { atomic_store(&s->cancel, true); }

void m3_session_progress(const m3_session *s, int64_t *done, int64_t *total) {
  /* atomic_load of a const object is not allowed by C11 as first published; the loads do not write. */
  m3_session *mutable = (m3_session *)(uintptr_t)s;
  *done = atomic_load(&mutable->done);
  *total = atomic_load(&mutable->total);
}

/* ---------------------------------------------------------------------------------------------- taps */

/* Checks that a record of a layer is there and has `count` values, per_row in each row. */
static m3_status find_record(const m3_session *s, int32_t layer, uint32_t bit, int64_t per_row, int64_t count,
                             m3_error *err) {
  const char *what = bit == M3_RECORD_BLOCKS ? "blocks" : bit == M3_RECORD_SCORES ? "scores" : "masses";
  int32_t end = s->options.layer_first + s->options.layer_count;
  if (!(s->options.record & bit)) return m3_fail(err, M3_ERROR_ARGUMENT, "the session does not record %s", what);
  if (layer < s->options.layer_first || layer >= end)
    return m3_fail(err, M3_ERROR_ARGUMENT, "layer %d, expected %d to %d", (int)layer, (int)s->options.layer_first,
                   (int)end - 1);
  if (!s->cache.layers[layer - s->options.layer_first].index)
    return m3_fail(err, M3_ERROR_ARGUMENT, "layer %d reads every token (dense attention): it selects no blocks",
                   (int)layer);
  if (!s->last_rows) return m3_fail(err, M3_ERROR_ARGUMENT, "nothing is recorded: no eval has succeeded yet");
  int64_t want = s->last_rows * per_row;
  if (count != want)
    return m3_fail(err, M3_ERROR_ARGUMENT, "%s of layer %d: %" PRId64 " values, room for %" PRId64, what, (int)layer,
                   want, count);
  return M3_OK;
}

m3_status m3_session_blocks(const m3_session *s, int32_t layer, int32_t *dst, int64_t count, m3_error *err) {
  const m3_hparams *h = &s->model->hparams;
  m3_status status = find_record(s, layer, M3_RECORD_BLOCKS, (int64_t)h->n_index_head * h->top_k, count, err);
  if (!status) memcpy(dst, s->blocks[layer - s->options.layer_first], (size_t)count * sizeof *dst);
  return status;
}

m3_status m3_session_block_scores(const m3_session *s, int32_t layer, float *dst, int64_t count, m3_error *err) {
  int64_t per_row = s->model->hparams.n_index_head * s->last_blocks;
  m3_status status = find_record(s, layer, M3_RECORD_SCORES, per_row, count, err);
  if (!status) memcpy(dst, s->block_scores[layer - s->options.layer_first], (size_t)count * sizeof *dst);
  return status;
}

m3_status m3_session_mass(const m3_session *s, int32_t layer, float *dst, int64_t count, m3_error *err) {
  const m3_hparams *h = &s->model->hparams;
  m3_status status = find_record(s, layer, M3_RECORD_MASS, (int64_t)h->n_head * h->top_k, count, err);
  if (!status) memcpy(dst, s->masses[layer - s->options.layer_first], (size_t)count * sizeof *dst);
  return status;
}

int64_t m3_session_n_blocks(const m3_session *s) { return s->last_rows ? s->last_blocks : 0; }

void m3_session_scan(const m3_session *s, int64_t *bounded, int64_t *rescored) {
  *bounded = s->scratch.blocks_bounded;
  *rescored = s->scratch.blocks_rescored;
}
