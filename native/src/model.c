/* Dimensions and weights of a file, checked against each other before anything runs. */
#include "model.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/kernels.h"
#include "paging.h"
#include "placement.h"
#include "quant/traits.h"
#include "weights.h"

#define ARCH "minimax-m3"

/* ---------------------------------------------------------------------------------------------- generations */

static bool any_tensor_contains(const m3_gguf *g, const char *part) {
  size_t n = strlen(part);
  for (int64_t i = 0; i < m3_gguf_n_tensors(g); i++) {
    m3_string name = m3_gguf_tensor(g, i)->name;
    for (uint64_t at = 0; at + n <= name.size; at++)
      if (memcmp(name.data + at, part, n) == 0) return true;
  }
  return false;
}

static const char *const indexer_keys[] = {
    ARCH ".attention.indexer.head_count", ARCH ".attention.indexer.key_length",   ARCH ".attention.indexer.top_k",
    ARCH ".attention.indexer.block_size", ARCH ".attention.indexer.local_blocks",
};

/* Three generations of M3 files exist: without the indexer, with its tensors under the checkpoint's names, and the
 * present one. Only the last holds what sparse attention needs. */
static m3_status check_generation(const m3_gguf *g, m3_error *err) {
  m3_string arch;
  m3_status status = m3_gguf_str(g, "general.architecture", &arch, err);
  if (status) return status;
  if (!m3_string_is(arch, ARCH))
    return m3_fail(err, M3_ERROR_MODEL, "%s: architecture '%.*s', expected '" ARCH "'", m3_gguf_name(g),
                   arch.size > 64 ? 64 : (int)arch.size, arch.data);
  if (any_tensor_contains(g, "index_q_proj"))
    return m3_fail(
        err, M3_ERROR_MODEL,
        "%s: an M3 file of the second generation: its indexer tensors have 'index_q_proj'-style names, expected "
        "'indexer.q_proj'; convert the checkpoint again",
        m3_gguf_name(g));
  const char *missing = NULL;
  int n_missing = 0;
  for (size_t i = 0; i < sizeof indexer_keys / sizeof *indexer_keys; i++)
    if (!m3_gguf_find_kv(g, indexer_keys[i])) {
      if (!missing) missing = indexer_keys[i];
      n_missing++;
    }
  if (n_missing)
    return m3_fail(
        err, M3_ERROR_MODEL,
        "%s: %s: %d of 5 '" ARCH ".attention.indexer.*' keys are missing (first: %s); convert the checkpoint again",
        m3_gguf_name(g),
        any_tensor_contains(g, "indexer.") ? "incomplete indexer"
                                           : "an M3 file of the first generation, converted without MSA (no indexer)",
        n_missing, missing);
  return M3_OK;
}

/* ---------------------------------------------------------------------------------------------- dimensions */

typedef struct int_key {
  const char *key;
  size_t offset;
  int64_t low, high;
} int_key;

#define FIELD(name) offsetof(m3_hparams, name)

static const int_key int_keys[] = {
    {ARCH ".block_count", FIELD(n_layer), 1, M3_MAX_LAYERS},
    {ARCH ".leading_dense_block_count", FIELD(n_dense_layer), 0, M3_MAX_LAYERS},
    {ARCH ".embedding_length", FIELD(n_embd), 1, M3_MAX_DIM},
    {ARCH ".feed_forward_length", FIELD(n_ff), 1, M3_MAX_DIM},
    {ARCH ".expert_feed_forward_length", FIELD(n_ff_expert), 1, M3_MAX_DIM},
    {ARCH ".attention.head_count", FIELD(n_head), 1, M3_MAX_HEADS},
    {ARCH ".attention.head_count_kv", FIELD(n_head_kv), 1, M3_MAX_HEADS},
    {ARCH ".attention.key_length", FIELD(head_dim), 1, M3_MAX_HEAD_DIM},
    {ARCH ".rope.dimension_count", FIELD(n_rot), 2, M3_MAX_HEAD_DIM},
    {ARCH ".expert_count", FIELD(n_expert), 1, M3_MAX_EXPERTS},
    {ARCH ".expert_used_count", FIELD(n_expert_used), 1, M3_MAX_EXPERTS},
    {ARCH ".attention.indexer.head_count", FIELD(n_index_head), 1, M3_MAX_HEADS},
    {ARCH ".attention.indexer.key_length", FIELD(index_dim), 1, M3_MAX_HEAD_DIM},
    {ARCH ".attention.indexer.top_k", FIELD(top_k), 1, M3_MAX_TOP_K},
    {ARCH ".attention.indexer.block_size", FIELD(block_size), M3_MIN_BLOCK, M3_MAX_BLOCK},
    {ARCH ".attention.indexer.local_blocks", FIELD(local_blocks), 1, M3_MAX_TOP_K},
};

/* What the format writes as numbers of its own but this architecture fixes. */
static m3_status check_constants(const m3_gguf *g, const m3_hparams *h, m3_error *err) {
  int64_t value;
  m3_status status = m3_gguf_int(g, ARCH ".attention.value_length", h->head_dim, h->head_dim, &value, err);
  if (status) return status;
  status = m3_gguf_int(g, ARCH ".expert_gating_func", 2, 2, &value, err); /* sigmoid */
  if (status) return status;
  status = m3_gguf_int(g, ARCH ".expert_weights_norm", 1, 1, &value, err);
  if (status) return status;
  m3_string scaling;
  if (!m3_gguf_find_kv(g, ARCH ".rope.scaling.type")) return M3_OK;
  status = m3_gguf_str(g, ARCH ".rope.scaling.type", &scaling, err);
  if (status) return status;
  if (!m3_string_is(scaling, "none"))
    return m3_fail(err, M3_ERROR_MODEL, "%s: rope scaling '%.*s', expected 'none'", m3_gguf_name(g),
                   scaling.size > 64 ? 64 : (int)scaling.size, scaling.data);
  return M3_OK;
}

static m3_status check_relations(const m3_gguf *g, const m3_hparams *h, m3_error *err) {
  const char *file = m3_gguf_name(g);
  if (h->n_dense_layer > h->n_layer)
    return m3_fail(err, M3_ERROR_MODEL, "%s: %d leading dense layers of %d layers", file, h->n_dense_layer, h->n_layer);
  if (h->n_head % h->n_head_kv)
    return m3_fail(err, M3_ERROR_MODEL, "%s: %d query heads cannot share %d KV heads evenly", file, h->n_head,
                   h->n_head_kv);
  if (h->n_index_head != h->n_head_kv)
    return m3_fail(err, M3_ERROR_MODEL, "%s: %d index heads, expected as many as KV heads (%d)", file, h->n_index_head,
                   h->n_head_kv);
  if (h->n_rot % 2 || h->n_rot > h->head_dim || h->n_rot > h->index_dim)
    return m3_fail(err, M3_ERROR_MODEL,
                   "%s: rope.dimension_count is %d, expected an even number up to head_dim %d and index dim %d", file,
                   h->n_rot, h->head_dim, h->index_dim);
  if (h->block_size & (h->block_size - 1))
    return m3_fail(err, M3_ERROR_MODEL, "%s: block size %d, expected a power of two", file, h->block_size);
  if (h->local_blocks > h->top_k)
    return m3_fail(err, M3_ERROR_MODEL, "%s: %d local blocks do not fit in top_k %d", file, h->local_blocks, h->top_k);
  if (h->n_expert_used > h->n_expert)
    return m3_fail(err, M3_ERROR_MODEL, "%s: %d experts used of %d", file, h->n_expert_used, h->n_expert);
  if ((int64_t)h->n_head * h->head_dim > M3_MAX_DIM)
    return m3_fail(err, M3_ERROR_MODEL, "%s: %d heads of %d channels, expected at most %d channels in all", file,
                   h->n_head, h->head_dim, M3_MAX_DIM);
  return M3_OK;
}

/* The vocabulary is as large as the embedding; the token list must agree with it. */
static m3_status read_vocab(const m3_gguf *g, m3_hparams *h, m3_error *err) {
  const m3_tensor *embd = m3_gguf_find_tensor(g, "token_embd.weight");
  if (!embd) return m3_fail(err, M3_ERROR_MODEL, "%s: tensor 'token_embd.weight' is missing", m3_gguf_name(g));
  if (embd->n_dims != 2 || embd->ne[1] > M3_MAX_VOCAB)
    return m3_fail(err, M3_ERROR_MODEL,
                   "%s: tensor 'token_embd.weight' has %d dimensions and %" PRId64 " rows, expected 2 and at most %d",
                   m3_gguf_name(g), embd->n_dims, embd->ne[1], M3_MAX_VOCAB);
  h->n_vocab = (int32_t)embd->ne[1];
  const m3_kv *tokens = m3_gguf_find_kv(g, "tokenizer.ggml.tokens");
  if (tokens && (tokens->element_type != M3_KV_STRING || tokens->n != (uint64_t)h->n_vocab))
    return m3_fail(err, M3_ERROR_MODEL,
                   "%s: tokenizer.ggml.tokens has %" PRIu64 " elements of type %d, expected %d strings as token_embd",
                   m3_gguf_name(g), tokens->n, (int)tokens->element_type, h->n_vocab);
  return M3_OK;
}

m3_status m3_read_hparams(const m3_gguf *g, m3_hparams *h, m3_error *err) {
  memset(h, 0, sizeof *h);
  m3_status status = check_generation(g, err);
  if (status) return status;
  int64_t value;
  for (size_t i = 0; i < sizeof int_keys / sizeof *int_keys; i++) {
    const int_key *k = &int_keys[i];
    status = m3_gguf_int(g, k->key, k->low, k->high, &value, err);
    if (status) return status;
    int32_t narrow = (int32_t)value;
    memcpy((char *)h + k->offset, &narrow, sizeof narrow);
  }
  status = m3_gguf_int(g, ARCH ".context_length", 1, INT32_MAX, &h->context_train, err);
  if (status) return status;
  int64_t n_shared;
  status = m3_gguf_int(g, ARCH ".expert_shared_count", 0, M3_MAX_EXPERTS, &n_shared, err);
  if (status) return status;
  if (n_shared * h->n_ff_expert > M3_MAX_DIM)
    return m3_fail(err, M3_ERROR_MODEL, "%s: shared experts of width %" PRId64 ", expected at most %d", m3_gguf_name(g),
                   n_shared * h->n_ff_expert, M3_MAX_DIM);
  h->n_ff_shared = (int32_t)(n_shared * h->n_ff_expert);
  status = m3_gguf_positive(g, ARCH ".rope.freq_base", &h->rope_theta, err);
  if (status) return status;
  status = m3_gguf_positive(g, ARCH ".attention.layer_norm_rms_epsilon", &h->rms_eps, err);
  if (status) return status;
  status = m3_gguf_positive(g, ARCH ".expert_weights_scale", &h->expert_scale, err);
  if (status) return status;
  h->swiglu_alpha = 1.702f;
  h->swiglu_limit = 7.0f;
  status = check_constants(g, h, err);
  if (status) return status;
  status = check_relations(g, h, err);
  if (status) return status;
  return read_vocab(g, h, err);
}

/* ---------------------------------------------------------------------------------------------- weights */

typedef enum dim { NONE, EMBD, Q, KV, HEAD, INDEX_Q, INDEX, FF, FF_EXPERT, FF_SHARED, EXPERT, VOCAB } dim;

typedef enum presence { ALWAYS, IN_SPARSE, IN_DENSE, IN_MOE, IN_SHARED } presence;

typedef struct weight_spec {
  const char *name;
  presence in;
  dim ne[3];
  bool f32; /* vectors and the router: read as float32 without conversion */
} weight_spec;

static const weight_spec layer_specs[M3_LAYER_ROLES] = {
    [M3_ATTN_NORM] = {"attn_norm.weight", ALWAYS, {EMBD}, true},
    [M3_ATTN_Q] = {"attn_q.weight", ALWAYS, {EMBD, Q}, false},
    [M3_ATTN_K] = {"attn_k.weight", ALWAYS, {EMBD, KV}, false},
    [M3_ATTN_V] = {"attn_v.weight", ALWAYS, {EMBD, KV}, false},
    [M3_ATTN_OUTPUT] = {"attn_output.weight", ALWAYS, {Q, EMBD}, false},
    [M3_ATTN_Q_NORM] = {"attn_q_norm.weight", ALWAYS, {HEAD}, true},
    [M3_ATTN_K_NORM] = {"attn_k_norm.weight", ALWAYS, {HEAD}, true},
    [M3_INDEX_Q] = {"indexer.q_proj.weight", IN_SPARSE, {EMBD, INDEX_Q}, false},
    [M3_INDEX_K] = {"indexer.k_proj.weight", IN_SPARSE, {EMBD, INDEX}, false},
    [M3_INDEX_Q_NORM] = {"indexer.q_norm.weight", IN_SPARSE, {INDEX}, true},
    [M3_INDEX_K_NORM] = {"indexer.k_norm.weight", IN_SPARSE, {INDEX}, true},
    [M3_FFN_NORM] = {"ffn_norm.weight", ALWAYS, {EMBD}, true},
    [M3_FFN_GATE] = {"ffn_gate.weight", IN_DENSE, {EMBD, FF}, false},
    [M3_FFN_UP] = {"ffn_up.weight", IN_DENSE, {EMBD, FF}, false},
    [M3_FFN_DOWN] = {"ffn_down.weight", IN_DENSE, {FF, EMBD}, false},
    [M3_ROUTER] = {"ffn_gate_inp.weight", IN_MOE, {EMBD, EXPERT}, true},
    [M3_ROUTER_BIAS] = {"exp_probs_b.bias", IN_MOE, {EXPERT}, true},
    [M3_GATE_EXPS] = {"ffn_gate_exps.weight", IN_MOE, {EMBD, FF_EXPERT, EXPERT}, false},
    [M3_UP_EXPS] = {"ffn_up_exps.weight", IN_MOE, {EMBD, FF_EXPERT, EXPERT}, false},
    [M3_DOWN_EXPS] = {"ffn_down_exps.weight", IN_MOE, {FF_EXPERT, EMBD, EXPERT}, false},
    [M3_GATE_SHEXP] = {"ffn_gate_shexp.weight", IN_SHARED, {EMBD, FF_SHARED}, false},
    [M3_UP_SHEXP] = {"ffn_up_shexp.weight", IN_SHARED, {EMBD, FF_SHARED}, false},
    [M3_DOWN_SHEXP] = {"ffn_down_shexp.weight", IN_SHARED, {FF_SHARED, EMBD}, false},
};

static const weight_spec outer_specs[M3_OUTER_ROLES] = {
    [M3_TOKEN_EMBD] = {"token_embd.weight", ALWAYS, {EMBD, VOCAB}, false},
    [M3_OUTPUT_NORM] = {"output_norm.weight", ALWAYS, {EMBD}, true},
    [M3_OUTPUT_HEAD] = {"output.weight", ALWAYS, {EMBD, VOCAB}, false},
};

static int64_t dim_of(const m3_hparams *h, dim d) {
  switch (d) {
    case EMBD: return h->n_embd;
    case Q: return (int64_t)h->n_head * h->head_dim;
    case KV: return (int64_t)h->n_head_kv * h->head_dim;
    case HEAD: return h->head_dim;
    case INDEX_Q: return (int64_t)h->n_index_head * h->index_dim;
    case INDEX: return h->index_dim;
    case FF: return h->n_ff;
    case FF_EXPERT: return h->n_ff_expert;
    case FF_SHARED: return h->n_ff_shared;
    case EXPERT: return h->n_expert;
    case VOCAB: return h->n_vocab;
    case NONE: break;
  }
  return 1;
}

static bool layer_has(const m3_hparams *h, int32_t layer, presence in) {
  bool sparse = layer >= h->n_dense_layer; /* in this format the sparse layers are the MoE layers */
  switch (in) {
    case ALWAYS: return true;
    case IN_DENSE: return !sparse;
    case IN_SPARSE:
    case IN_MOE: return sparse;
    case IN_SHARED: return sparse && h->n_ff_shared > 0;
  }
  return false;
}

static m3_status bind_spec(m3_model *m, const weight_spec *spec, const char *name, m3_weight *w, m3_error *err) {
  const char *file = m3_gguf_name(m->gguf);
  const m3_tensor *t = m3_gguf_find_tensor(m->gguf, name);
  if (!t) return m3_fail(err, M3_ERROR_MODEL, "%s: tensor '%s' is missing", file, name);
  int64_t want[M3_MAX_DIMS] = {1, 1, 1, 1};
  for (int d = 0; d < 3; d++) want[d] = dim_of(&m->hparams, spec->ne[d]);
  if (memcmp(want, t->ne, sizeof want) != 0)
    return m3_fail(err, M3_ERROR_MODEL,
                   "%s: tensor '%s' has shape [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "], expected [%" PRId64
                   ", %" PRId64 ", %" PRId64 ", 1]",
                   file, name, t->ne[0], t->ne[1], t->ne[2], t->ne[3], want[0], want[1], want[2]);
  if (spec->f32 && t->type != M3_TYPE_F32)
    return m3_fail(err, M3_ERROR_MODEL, "%s: tensor '%s' is %s, expected F32", file, name, m3_type_name(t->type));
  w->tensor = t;
  w->data = t->data;
  return M3_OK;
}

/* Every tensor of the file has a role: one without would be a part of the model that is not computed. */
static m3_status find_extra(const m3_model *m, int64_t bound, m3_error *err) {
  int64_t n = m3_gguf_n_tensors(m->gguf);
  if (bound == n) return M3_OK;
  for (int64_t i = 0; i < n; i++) {
    const m3_tensor *t = m3_gguf_tensor(m->gguf, i);
    bool used = false;
    for (int r = 0; r < M3_OUTER_ROLES && !used; r++) used = m->outer[r].tensor == t;
    for (int32_t l = 0; l < m->hparams.n_layer && !used; l++)
      for (int r = 0; r < M3_LAYER_ROLES && !used; r++) used = m->layers[l].w[r].tensor == t;
    if (!used)
      return m3_fail(err, M3_ERROR_MODEL,
                     "%s: tensor '%.*s' is not part of a " ARCH " model of %d layers (%" PRId64
                     " tensors, expected %" PRId64 ")",
                     m3_gguf_name(m->gguf), (int)t->name.size, t->name.data, m->hparams.n_layer, n, bound);
  }
  return M3_OK;
}

static m3_status bind_all(m3_model *m, m3_error *err) {
  int64_t bound = 0;
  for (int r = 0; r < M3_OUTER_ROLES; r++, bound++) {
    m3_status status = bind_spec(m, &outer_specs[r], outer_specs[r].name, &m->outer[r], err);
    if (status) return status;
  }
  for (int32_t l = 0; l < m->hparams.n_layer; l++) {
    m->layers[l].index = l;
    for (int r = 0; r < M3_LAYER_ROLES; r++) {
      const weight_spec *spec = &layer_specs[r];
      if (!layer_has(&m->hparams, l, spec->in)) continue;
      char name[96];
      snprintf(name, sizeof name, "blk.%d.%s", (int)l, spec->name);
      m3_status status = bind_spec(m, spec, name, &m->layers[l].w[r], err);
      if (status) return status;
      bound++;
    }
  }
  return find_extra(m, bound, err);
}

/* ---------------------------------------------------------------------------------------------- open, close */

static m3_status choose_backend(m3_model *m, const m3_model_options *options, m3_error *err) {
  int32_t device = options ? options->device : M3_DEVICE_AUTO;
  int32_t isa = options ? options->isa : M3_ISA_AUTO;
  if (device < M3_DEVICE_AUTO || device > M3_DEVICE_CUDA)
    return m3_fail(err, M3_ERROR_ARGUMENT, "device is %d, expected auto (0), cpu (1) or cuda (2)", (int)device);
  m->backend = &m3_cpu_backend;
  if (device != M3_DEVICE_CPU) {
    m3_status missing = m3_cuda_backend(&m->backend, err);
    if (missing && device == M3_DEVICE_CUDA) return missing;
    if (missing) m->backend = &m3_cpu_backend;
  }
  m3_isa chosen;
  m3_status status = m3_choose_isa(isa, &chosen, err);
  if (status) return status;
  m->kernels = m3_kernels_for(chosen);
  if (m->backend->describe)
    m->backend->describe(m->device_name, sizeof m->device_name);
  else
    snprintf(m->device_name, sizeof m->device_name, "%s", m->kernels->name);
  int32_t load = options ? options->load : M3_LOAD_MAP;
  if (load < M3_LOAD_MAP || load > M3_LOAD_READ)
    return m3_fail(err, M3_ERROR_ARGUMENT, "load is %d, expected map (0) or read (1)", (int)load);
  m->reads = load == M3_LOAD_READ;
  if (m->reads && (m->backend->weight_load || !m3_gguf_has_data(m->gguf)))
    return m3_fail(err, M3_ERROR_ARGUMENT, "%s: load is read, which is for the CPU and a file: %s",
                   m3_gguf_name(m->gguf),
                   m->backend->weight_load ? "a GPU gets a copy of the weights anyway" : "this is a header");
  bool mapped = !m->reads && m3_gguf_has_data(m->gguf);
  status = mapped ? m3_pager_open(&m->pager, err) : M3_OK;
  return status ? status : m3_loading_open(&m->loading, err);
}

static m3_status open_gguf(m3_gguf *gguf, const m3_model_options *options, m3_model **out, m3_error *err) {
  m3_model *m = calloc(1, sizeof *m);
  if (!m) {
    m3_gguf_close(gguf);
    return m3_fail_memory(err, sizeof *m, "a model");
  }
  m->gguf = gguf;
  m3_status status = choose_backend(m, options, err);
  if (!status) status = m3_read_hparams(gguf, &m->hparams, err);
  if (!status) {
    m->layers = calloc((size_t)m->hparams.n_layer, sizeof *m->layers);
    if (!m->layers)
      status = m3_fail_memory(err, (uint64_t)m->hparams.n_layer * sizeof *m->layers, "the layers of a model");
  }
  if (!status) status = bind_all(m, err);
  if (!status) status = m3_placement_open(m, options ? options->experts_on : M3_EXPERTS_AUTO, err);
  if (status) {
    m3_model_close(m);
    return status;
  }
  *out = m;
  return M3_OK;
}

static m3_status check_options(const m3_model_options *options, m3_model **out, m3_error *err) {
  if (!out) return m3_fail(err, M3_ERROR_ARGUMENT, "m3_model_open: out is NULL");
  *out = NULL;
  if (options && options->struct_size != sizeof *options)
    return m3_fail(err, M3_ERROR_ARGUMENT,
                   "m3_model_options has %u bytes, this library expects %zu: library and header do not belong together",
                   options->struct_size, sizeof *options);
  return M3_OK;
}

m3_status m3_model_open(const char *path, const m3_model_options *options, m3_model **out, m3_error *err) {
  m3_status status = check_options(options, out, err);
  if (status) return status;
  m3_gguf *gguf;
  status = m3_gguf_open(path, &gguf, err);
  return status ? status : open_gguf(gguf, options, out, err);
}

m3_status m3_model_open_header(const void *bytes, uint64_t n_bytes, const char *name, const m3_model_options *options,
                               m3_model **out, m3_error *err) {
  m3_status status = check_options(options, out, err);
  if (status) return status;
  m3_gguf *gguf;
  status = m3_gguf_parse_header(bytes, n_bytes, name, &gguf, err);
  return status ? status : open_gguf(gguf, options, out, err);
}

static void unbind(const m3_model *m, m3_weight *w) {
  m3_weight_drop(m, w);
  free(w->experts);
  w->experts = NULL;
  w->data = NULL;
}

void m3_model_close(m3_model *m) {
  if (!m) return;
  for (int r = 0; r < M3_OUTER_ROLES; r++) unbind(m, &m->outer[r]);
  for (int32_t l = 0; m->layers && l < m->hparams.n_layer; l++)
    for (int r = 0; r < M3_LAYER_ROLES; r++) unbind(m, &m->layers[l].w[r]);
  free(m->layers);
  m3_loading_close(m->loading);
  m3_pager_close(m->pager);
  m3_gguf_close(m->gguf);
  free(m);
}

/* ---------------------------------------------------------------------------------------------- binding */

bool m3_find_role(const m3_model *m, const char *name, int32_t *layer, int32_t *role) {
  const m3_tensor *t = m3_gguf_find_tensor(m->gguf, name);
  if (!t) return false;
  for (*layer = -1; *layer < m->hparams.n_layer; ++*layer) {
    const m3_weight *w = *layer < 0 ? m->outer : m->layers[*layer].w;
    int32_t n = *layer < 0 ? (int32_t)M3_OUTER_ROLES : (int32_t)M3_LAYER_ROLES;
    for (*role = 0; *role < n; ++*role)
      if (w[*role].tensor == t) return true;
  }
  return false;
}

static m3_weight *find_weight(m3_model *m, const char *name) {
  int32_t layer, role;
  if (!m3_find_role(m, name, &layer, &role)) return NULL;
  return layer < 0 ? &m->outer[role] : &m->layers[layer].w[role];
}

static m3_status check_header_only(const m3_model *m, m3_error *err) {
  if (!m3_gguf_has_data(m->gguf)) return M3_OK;
  return m3_fail(err, M3_ERROR_ARGUMENT,
                 "%s: its weights come from the file; only a model opened from a header can be bound",
                 m3_gguf_name(m->gguf));
}

m3_status m3_model_bind(m3_model *m, const char *tensor, int32_t expert, const void *data, uint64_t n_bytes,
                        m3_error *err) {
  m3_status status = check_header_only(m, err);
  if (status) return status;
  m3_weight *w = find_weight(m, tensor);
  if (!w) return m3_fail(err, M3_ERROR_ARGUMENT, "%s: there is no tensor '%s'", m3_gguf_name(m->gguf), tensor);
  m->bindings++;
  const m3_tensor *t = w->tensor;
  int64_t n_expert = t->n_dims == 3 ? t->ne[2] : 0;
  if (expert < -1 || expert >= n_expert)
    return m3_fail(err, M3_ERROR_ARGUMENT, "tensor '%s': expert %d, expected -1%s", tensor, (int)expert,
                   n_expert ? " or one of its experts" : "");
  uint64_t want = expert >= 0 ? t->n_bytes / (uint64_t)n_expert : t->n_bytes;
  if (n_bytes != want)
    return m3_fail(err, M3_ERROR_ARGUMENT, "tensor '%s': %" PRIu64 " bytes, expected %" PRIu64, tensor, n_bytes, want);
  if (!data || (uintptr_t)data % (uintptr_t)m3_traits(t->type)->alignment)
    return m3_fail(err, M3_ERROR_ARGUMENT, "tensor '%s': the data is NULL or not aligned to its elements", tensor);
  if (expert < 0) {
    free(w->experts);
    w->experts = NULL;
    w->data = data;
    return m3_weight_bound(m, w, expert, err);
  }
  if (!w->experts) {
    w->experts = calloc((size_t)n_expert, sizeof *w->experts);
    if (!w->experts) return m3_fail_memory(err, (uint64_t)n_expert * sizeof *w->experts, "the experts of a tensor");
    w->data = NULL;
  }
  w->experts[expert] = data;
  return m3_weight_bound(m, w, expert, err);
}

m3_status m3_model_unbind_layer(m3_model *m, int32_t layer, m3_error *err) {
  m3_status status = check_header_only(m, err);
  if (status) return status;
  if (layer < -1 || layer >= m->hparams.n_layer)
    return m3_fail(err, M3_ERROR_ARGUMENT, "layer %d, expected -1 to %d", (int)layer, m->hparams.n_layer - 1);
  m3_weight *w = layer < 0 ? m->outer : m->layers[layer].w;
  m->bindings++;
  for (int r = 0; r < (layer < 0 ? (int)M3_OUTER_ROLES : (int)M3_LAYER_ROLES); r++) unbind(m, &w[r]);
  return M3_OK;
}

static m3_status check_weight(const m3_model *m, const m3_weight *w, m3_error *err) {
  if (!w->tensor || w->data) return M3_OK;
  m3_string name = w->tensor->name;
  int64_t missing = -1;
  if (w->experts) {
    missing = 0;
    while (missing < w->tensor->ne[2] && w->experts[missing]) missing++;
    if (missing == w->tensor->ne[2]) return M3_OK;
  }
  if (missing >= 0)
    return m3_fail(err, M3_ERROR_UNBOUND, "%s: tensor '%.*s' has no data bound for expert %" PRId64,
                   m3_gguf_name(m->gguf), (int)name.size, name.data, missing);
  return m3_fail(err, M3_ERROR_UNBOUND, "%s: tensor '%.*s' has no data bound", m3_gguf_name(m->gguf), (int)name.size,
                 name.data);
}

m3_status m3_check_bound(const m3_model *m, int32_t first, int32_t count, m3_end end, m3_error *err) {
  m3_status status = first == 0 ? check_weight(m, &m->outer[M3_TOKEN_EMBD], err) : M3_OK;
  for (int32_t l = first; l < first + count && !status; l++)
    for (int r = 0; r < M3_LAYER_ROLES && !status; r++) status = check_weight(m, &m->layers[l].w[r], err);
  if (!status && end >= M3_END_NORM) status = check_weight(m, &m->outer[M3_OUTPUT_NORM], err);
  if (!status && end >= M3_END_HEAD) status = check_weight(m, &m->outer[M3_OUTPUT_HEAD], err);
  return status;
}

const m3_hparams *m3_model_hparams(const m3_model *m) { return &m->hparams; }
const m3_gguf *m3_model_gguf(const m3_model *m) { return m->gguf; }
const char *m3_model_backend_name(const m3_model *m) { return m->backend->name; }
const char *m3_model_isa_name(const m3_model *m) { return m->kernels->name; }
