/* The forward pass of MiniMax-M3, once for prefill and decode: layers of
 *     hidden += Wo attend(q, cache)        over the selected blocks, or all of them in a dense layer
 *     hidden += MLP(norm(hidden))          or routed experts + shared expert
 * Every step is an operation of the backend. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "paging.h"
#include "rope.h"
#include "session.h"

static void fill_rope(m3_session *s, int32_t n) {
  const m3_hparams *h = &s->model->hparams;
  int32_t half = h->n_rot / 2;
  for (int32_t i = 0; i < half; i++) {
    float frequency = m3_rope_frequency(h, i);
    for (int32_t r = 0; r < n; r++) {
      float angle = m3_rope_angle(frequency, s->row_pos[r]);
      s->cos[r * half + i] = (float)cos((double)angle);
      s->sin[r * half + i] = (float)sin((double)angle);
    }
  }
}

static m3_status not_finite(const m3_session *s, int32_t layer, m3_part part, m3_error *err) {
  static const char *const names[M3_PARTS] = {[M3_PART_SCORES] = "an index score",
                                              [M3_PART_ROUTER] = "a router logit or bias",
                                              [M3_PART_OUTPUT] = "its output"};
  if (part == M3_PART_INPUT)
    return m3_fail(err, M3_ERROR_NOT_FINITE, "the input of layer %d is NaN or infinite", (int)layer);
  if (part == M3_PART_LOGITS)
    return m3_fail(err, M3_ERROR_NOT_FINITE,
                   "the output head: a logit is NaN or infinite; output_norm or output is broken");
  bool f16 = s->options.kv_type == M3_TYPE_F16 || s->options.index_type == M3_TYPE_F16;
  return m3_fail(err, M3_ERROR_NOT_FINITE, "layer %d: %s is NaN or infinite; its weights are broken%s", (int)layer,
                 names[part],
                 f16 ? ", or its keys and values overflow the F16 cache (F32 or BF16 would hold them)" : "");
}

static void record(m3_session *s, int32_t layer, int64_t first, int32_t n) {
  const m3_hparams *h = &s->model->hparams;
  const m3_backend *b = s->model->backend;
  int32_t i = layer - s->options.layer_first;
  int64_t list = (int64_t)h->n_index_head * h->top_k, scores = h->n_index_head * s->last_blocks;
  int64_t masses = (int64_t)h->n_head * h->top_k;
  if (s->options.record & M3_RECORD_BLOCKS)
    b->download(s->state, s->blocks[i] + first * list, s->scratch.blocks, (uint64_t)(n * list) * sizeof(int32_t));
  if (s->options.record & M3_RECORD_SCORES)
    b->download(s->state, s->block_scores[i] + first * scores, s->scores, (uint64_t)(n * scores) * sizeof(float));
  if (s->options.record & M3_RECORD_MASS)
    b->download(s->state, s->masses[i] + first * masses, s->mass, (uint64_t)(n * masses) * sizeof(float));
}

/* Lists that the batch gives in place of selected ones, of the layer of that number among the window's sparse ones. */
static void upload_blocks(m3_session *s, const m3_batch *batch, int32_t layer, int64_t first, int32_t n) {
  const m3_hparams *h = &s->model->hparams;
  int32_t dense = h->n_dense_layer > s->options.layer_first ? h->n_dense_layer : s->options.layer_first;
  int64_t list = (int64_t)h->n_index_head * h->top_k;
  s->model->backend->upload(s->state, s->scratch.blocks,
                            batch->blocks + ((layer - dense) * batch->n_tokens + first) * list,
                            (uint64_t)(n * list) * sizeof(int32_t));
}

static m3_status attention(m3_session *s, const m3_context *c, const m3_batch *batch, const m3_rows *rows,
                           int32_t layer, int64_t first, m3_error *err) {
  const m3_backend *b = s->model->backend;
  const m3_layer *l = &s->model->layers[layer];
  m3_layer_cache cache = s->cache.layers[layer - s->options.layer_first];
  b->prepare(c, &(m3_prepare_params){l, rows, s->hidden, cache});
  const int32_t *blocks = NULL;
  bool given = cache.index && batch->blocks;
  if (cache.index && (!given || s->options.record & M3_RECORD_SCORES)) {
    int64_t longest = 0;
    for (int32_t r = 0; r < rows->n; r++)
      if (rows->pos[r] > longest) longest = rows->pos[r];
    m3_select_params p = {.rows = rows,
                          .cache = cache,
                          .blocks = s->scratch.blocks,
                          .n_blocks = s->last_blocks,
                          .max_blocks = longest / s->model->hparams.block_size + 1,
                          .low_bit_from = m3_low_bit_tokens(s->model, &s->options) / s->model->hparams.block_size,
                          .scores = s->options.record & M3_RECORD_SCORES ? s->scores : NULL};
    if (!b->select(c, &p)) return not_finite(s, layer, M3_PART_SCORES, err);
  }
  if (given) upload_blocks(s, batch, layer, first, rows->n);
  if (cache.index) blocks = s->scratch.blocks;
  bool mass = blocks && s->options.record & M3_RECORD_MASS;
  b->attend(c, &(m3_attend_params){rows, cache, blocks, s->scratch.attended, mass ? s->mass : NULL});
  if (blocks) record(s, layer, first, rows->n);
  b->output(c, &(m3_output_params){&l->w[M3_ATTN_OUTPUT], s->scratch.attended, rows->n, s->hidden});
  return M3_OK;
}

static m3_status feed_forward(m3_session *s, const m3_context *c, int32_t layer, int32_t n, m3_error *err) {
  const m3_backend *b = s->model->backend;
  m3_ffn_params p = {&s->model->layers[layer], n, s->hidden, s->model->hparams.n_ff_shared > 0};
  if (layer < s->model->hparams.n_dense_layer) {
    b->mlp(c, &p);
    return M3_OK;
  }
  if (!b->router(c, &p)) return not_finite(s, layer, M3_PART_ROUTER, err);
  if (p.layer->host_experts) {
    m3_host_experts_run(s->host_experts, c, &p);
    return M3_OK;
  }
  /* On a device the ids are not to be read, and nothing is in a file any more. */
  if (!b->weight_load) m3_page_in(s->model, p.layer, s->scratch.experts, (int64_t)n * s->model->hparams.n_expert_used);
  b->experts(c, &p);
  return M3_OK;
}

/* Logits of n hidden states, at most M3_LOGIT_ROWS. */
static m3_status logits_of(m3_session *s, const m3_context *c, const float *hidden, int32_t n, m3_error *err) {
  const m3_hparams *h = &s->model->hparams;
  const m3_backend *b = s->model->backend;
  const m3_weight *w = s->model->outer;
  b->head(c, &(m3_head_params){&w[M3_OUTPUT_NORM], &w[M3_OUTPUT_HEAD], hidden, n, s->logits});
  if (!b->finite(c, s->logits, (int64_t)n * h->n_vocab, M3_PART_LOGITS))
    return not_finite(s, h->n_layer, M3_PART_LOGITS, err);
  return M3_OK;
}

/* Logits of the last n picked rows go to their places in batch->out. */
static m3_status write_picked(m3_session *s, const m3_context *c, const m3_batch *batch, const int64_t *places,
                              int32_t n, m3_error *err) {
  int64_t n_vocab = s->model->hparams.n_vocab;
  m3_status status = logits_of(s, c, s->picked, n, err);
  for (int32_t i = 0; i < n && !status; i++)
    s->model->backend->download(s->state, batch->out + places[i] * n_vocab, s->logits + i * n_vocab,
                                (uint64_t)n_vocab * sizeof(float));
  return status;
}

/* Place in the output of each row of the chunk, -1 for a row that is not wanted. The span of row `first` is found by
 * counting, as rows stand in span order. */
static m3_status write_logits(m3_session *s, const m3_context *c, const m3_batch *batch, int64_t first, int32_t n,
                              m3_error *err) {
  const m3_hparams *h = &s->model->hparams;
  int64_t places[M3_LOGIT_ROWS], end = 0;
  int32_t span = 0, picked = 0;
  for (int32_t r = 0; r < n; r++) {
    int64_t row = first + r;
    while (end <= row) end += batch->spans[span++].n;
    bool last = row == end - 1;
    if (batch->output == M3_OUTPUT_ALL || last) {
      places[picked] = batch->output == M3_OUTPUT_ALL ? row : span - 1;
      s->model->backend->copy(s->state, s->picked + (int64_t)picked * h->n_embd, s->hidden + (int64_t)r * h->n_embd,
                              (uint64_t)h->n_embd * sizeof(float));
      picked++;
    }
    if (picked && (picked == M3_LOGIT_ROWS || r == n - 1)) {
      m3_status status = write_picked(s, c, batch, places, picked, err);
      if (status) return status;
      picked = 0;
    }
  }
  return M3_OK;
}

/* Given embeddings over what `embed` looked up for their rows. */
static void upload_embeddings(m3_session *s, const m3_batch *batch, const int32_t *ids, int32_t n) {
  int64_t n_embd = s->model->hparams.n_embd;
  for (int32_t r = 0, end; r < n; r = end + 1) {
    for (end = r; end < n && ids[end] == -1;) end++;
    if (end == r) continue;
    s->model->backend->upload(s->state, s->hidden + r * n_embd, batch->embeddings + s->embedded * n_embd,
                              (uint64_t)((end - r) * n_embd) * sizeof(float));
    s->embedded += end - r;
  }
}

static void enter(m3_session *s, const m3_context *c, const m3_batch *batch, const m3_rows *rows, int64_t first) {
  const m3_backend *b = s->model->backend;
  int64_t n_embd = s->model->hparams.n_embd;
  if (s->options.layer_first > 0) {
    b->upload(s->state, s->hidden, batch->hidden + first * n_embd, (uint64_t)(rows->n * n_embd) * sizeof(float));
    return;
  }
  b->embed(c, &(m3_embed_params){&s->model->outer[M3_TOKEN_EMBD], rows, s->hidden});
  if (batch->embeddings) upload_embeddings(s, batch, batch->ids + first, rows->n);
}

/* Ids of the chunk as operations take them: a row of a given embedding has the first one of the vocabulary. */
static const int32_t *ids_of(m3_session *s, const m3_batch *batch, int64_t first, int32_t n) {
  if (s->options.layer_first > 0) return NULL;
  if (!batch->embeddings) return batch->ids + first;
  for (int32_t r = 0; r < n; r++) s->row_ids[r] = batch->ids[first + r] < 0 ? 0 : batch->ids[first + r];
  return s->row_ids;
}

static m3_status cancelled(m3_error *err) { return m3_fail(err, M3_ERROR_CANCELLED, "the evaluation was cancelled"); }

/* What comes behind the last layer. */
static void leave(m3_session *s, m3_context *c) { c->layer = s->model->hparams.n_layer; }

static m3_status run_layers(m3_session *s, m3_context *c, const m3_batch *batch, const m3_rows *rows, int64_t first,
                            m3_error *err) {
  const m3_hparams *h = &s->model->hparams;
  const m3_backend *b = s->model->backend;
  int32_t n = rows->n;
  enter(s, c, batch, rows, first);
  if (!b->finite(c, s->hidden, (int64_t)n * h->n_embd, M3_PART_INPUT))
    return not_finite(s, c->layer, M3_PART_INPUT, err);
  int32_t end = s->options.layer_first + s->options.layer_count;
  for (int32_t layer = s->options.layer_first; layer < end; layer++) {
    if (atomic_load(&s->cancel)) return cancelled(err);
    c->layer = layer;
    if (s->inputs) c->inputs = s->inputs + (layer - s->options.layer_first) * M3_INPUTS;
    m3_status status = attention(s, c, batch, rows, layer, first, err);
    if (!status) status = feed_forward(s, c, layer, n, err);
    if (status) return status;
    if (!b->finite(c, s->hidden, (int64_t)n * h->n_embd, M3_PART_OUTPUT))
      return not_finite(s, layer, M3_PART_OUTPUT, err);
    atomic_fetch_add(&s->done, n);
  }
  leave(s, c);
  if (s->inputs && end == h->n_layer &&
      !b->head_input(c, &(m3_head_input_params){&s->model->outer[M3_OUTPUT_NORM], s->hidden, n}))
    return m3_fail(err, M3_ERROR_NOT_FINITE, "the input of the output head is NaN or infinite; output_norm is broken");
  return M3_OK;
}

static void write_hidden(m3_session *s, const m3_batch *batch, int64_t first, int32_t n) {
  int64_t n_embd = s->model->hparams.n_embd;
  s->model->backend->download(s->state, batch->out + first * n_embd, s->hidden, (uint64_t)(n * n_embd) * sizeof(float));
}

/* Whether the chunk is a step of decoding, which a backend may replay: token ids in, one row a sequence, each the one
 * that its span wants, and nothing given or recorded. Experts on the CPU are no operation of the backend: with them the
 * others are called one by one. `place`: of the first row's output. */
static bool is_step(const m3_session *s, const m3_batch *batch, const m3_rows *rows, int64_t first, int64_t *place) {
  if (!s->model->backend->replay || s->host_experts || !rows->ids || batch->blocks || batch->embeddings ||
      s->options.record || rows->n > M3_LOGIT_ROWS)
    return false;
  int64_t end = 0;
  int32_t span = 0;
  for (int32_t r = 0; r < rows->n; r++) {
    while (end <= first + r) end += batch->spans[span++].n;
    if (r && rows->seq[r] == rows->seq[r - 1]) return false;
    if (batch->output == M3_OUTPUT_LAST && first + r != end - 1) return false;
    if (r == 0) *place = batch->output == M3_OUTPUT_LAST ? span - 1 : first;
  }
  return true;
}

/* Rows of a step want logits in the order in which they stand. */
static m3_status run_step(m3_session *s, m3_context *c, const m3_batch *batch, const m3_rows *rows, int64_t first,
                          int64_t place, m3_error *err) {
  const m3_backend *b = s->model->backend;
  int64_t n_vocab = s->model->hparams.n_vocab;
  m3_step step = {batch->output != M3_OUTPUT_HIDDEN, s->model->bindings};
  if (b->replay(c, &step)) {
    leave(s, c);
    atomic_fetch_add(&s->done, rows->n * s->options.layer_count);
  } else {
    m3_status status = run_layers(s, c, batch, rows, first, err);
    if (!status && step.head) status = logits_of(s, c, s->hidden, rows->n, err);
    b->recorded(c, !status);
    if (status) return status;
  }
  if (step.head)
    b->download(s->state, batch->out + place * n_vocab, s->logits, (uint64_t)(rows->n * n_vocab) * sizeof(float));
  else
    write_hidden(s, batch, first, rows->n);
  return M3_OK;
}

static m3_status run_chunk(m3_session *s, m3_context *c, const m3_batch *batch, int64_t first, int32_t n,
                           m3_error *err) {
  m3_rows rows = {n, s->row_seq, s->row_pos, s->cache.tables, s->cos, s->sin, ids_of(s, batch, first, n)};
  int64_t place = 0;
  if (atomic_load(&s->cancel)) return cancelled(err);
  fill_rope(s, n);
  s->model->backend->begin(c, &rows);
  if (is_step(s, batch, &rows, first, &place)) return run_step(s, c, batch, &rows, first, place, err);
  m3_status status = run_layers(s, c, batch, &rows, first, err);
  if (status) return status;
  if (batch->output != M3_OUTPUT_HIDDEN) return write_logits(s, c, batch, first, n, err);
  write_hidden(s, batch, first, n);
  return M3_OK;
}

m3_status m3_forward_chunk(m3_session *s, const m3_batch *batch, int64_t first, int32_t n, m3_error *err) {
  m3_context c = {.hparams = &s->model->hparams,
                  .kernels = s->model->kernels,
                  .scratch = &s->scratch,
                  .state = s->state,
                  .layer = s->options.layer_first};
  m3_status status = run_chunk(s, &c, batch, first, n, err);
  if (status) return status;
  m3_broken broken;
  status = s->model->backend->finish(&c, &broken, err);
  if (status || broken.part == M3_PARTS) return status;
  return not_finite(s, broken.layer, broken.part, err);
}
