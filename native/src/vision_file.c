/* The vision file: dimensions and weights, checked against each other before anything runs. */
#include "vision.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/kernels.h"
#include "quant/traits.h"

#define PREFIX "clip.vision."
#define ROPE_THETA 10000.0f /* of the architecture, not in the file */

static m3_status check_kind(const m3_gguf *g, m3_error *err) {
  static const struct {
    const char *key, *expected;
  } strings[] = {{"general.architecture", "clip"}, {"clip.projector_type", "minimax_m3"}};
  for (size_t i = 0; i < sizeof strings / sizeof *strings; i++) {
    m3_string found;
    m3_status status = m3_gguf_str(g, strings[i].key, &found, err);
    if (status) return status;
    if (!m3_string_is(found, strings[i].expected))
      return m3_fail(err, M3_ERROR_MODEL, "%s: %s is '%.*s', expected '%s', a vision file of MiniMax-M3",
                     m3_gguf_name(g), strings[i].key, found.size > 64 ? 64 : (int)found.size, found.data,
                     strings[i].expected);
  }
  return M3_OK;
}

/* Three numbers, one for each channel. */
static m3_status read_channels(const m3_gguf *g, const char *key, float low, float *out, m3_error *err) {
  const m3_kv *kv = m3_gguf_find_kv(g, key);
  if (!kv) return m3_fail(err, M3_ERROR_MODEL, "%s: key '%s' is missing", m3_gguf_name(g), key);
  if (kv->type != M3_KV_ARRAY || kv->element_type != M3_KV_F32 || kv->n != M3_VISION_CHANNELS)
    return m3_fail(err, M3_ERROR_MODEL,
                   "%s: key '%s' has %" PRIu64 " values of type %d, expected %d of type 6 (float32)", m3_gguf_name(g),
                   key, kv->n, (int)kv->element_type, M3_VISION_CHANNELS);
  memcpy(out, kv->data, M3_VISION_CHANNELS * sizeof *out);
  for (int i = 0; i < M3_VISION_CHANNELS; i++)
    if (!(out[i] >= low && out[i] <= 1))
      return m3_fail(err, M3_ERROR_MODEL, "%s: key '%s' holds %g, expected %g to 1", m3_gguf_name(g), key,
                     (double)out[i], (double)low);
  return M3_OK;
}

#define FIELD(name) offsetof(m3_vision_hparams, name)

static const struct {
  const char *key;
  size_t offset;
  int64_t low, high;
} int_keys[] = {
    {PREFIX "block_count", FIELD(n_layer), 1, M3_MAX_LAYERS},
    {PREFIX "embedding_length", FIELD(n_embd), 1, M3_MAX_DIM},
    {PREFIX "feed_forward_length", FIELD(n_ff), 1, M3_MAX_DIM},
    {PREFIX "attention.head_count", FIELD(n_head), 1, M3_MAX_HEADS},
    {PREFIX "projection_dim", FIELD(n_out), 1, M3_MAX_DIM},
    {PREFIX "patch_size", FIELD(patch_size), 1, M3_MAX_PATCH_SIZE},
};

static m3_status read_hparams(const m3_gguf *g, m3_vision_hparams *h, m3_error *err) {
  m3_status status = check_kind(g, err);
  int64_t value;
  for (size_t i = 0; i < sizeof int_keys / sizeof *int_keys && !status; i++) {
    status = m3_gguf_int(g, int_keys[i].key, int_keys[i].low, int_keys[i].high, &value, err);
    if (status) break;
    int32_t narrow = (int32_t)value;
    memcpy((char *)h + int_keys[i].offset, &narrow, sizeof narrow);
  }
  /* What the format writes but this architecture fixes. */
  if (!status) status = m3_gguf_int(g, PREFIX "spatial_merge_size", M3_VISION_MERGE, M3_VISION_MERGE, &value, err);
  if (!status) status = m3_gguf_int(g, "clip.has_vision_encoder", 1, 1, &value, err);
  if (!status) status = m3_gguf_int(g, "clip.use_gelu", 1, 1, &value, err);
  if (!status) status = m3_gguf_positive(g, PREFIX "attention.layer_norm_epsilon", &h->eps, err);
  if (!status) status = read_channels(g, PREFIX "image_mean", 0, h->mean, err);
  if (!status) status = read_channels(g, PREFIX "image_std", 0x1p-16f, h->std, err);
  if (status) return status;
  h->head_dim = h->n_embd / h->n_head;
  if (h->n_embd % h->n_head || h->head_dim % 2 || h->head_dim < 6 || h->head_dim > M3_MAX_HEAD_DIM)
    return m3_fail(err, M3_ERROR_MODEL, "%s: width %d in %d heads, expected heads of an even number from 6 to %d",
                   m3_gguf_name(g), h->n_embd, h->n_head, M3_MAX_HEAD_DIM);
  h->n_rot = 6 * (h->head_dim / 6);
  h->merge = M3_VISION_MERGE;
  h->frames = M3_VISION_FRAMES;
  h->rope_theta = ROPE_THETA;
  return M3_OK;
}

/* ---------------------------------------------------------------------------------------------- weights */

typedef enum dim { EMBD, FF, PROJECTOR, MERGER, MERGED, OUT } dim;

typedef struct affine_spec {
  const char *name;
  dim in, out;
  bool norm; /* weight is a vector too */
} affine_spec;

static const affine_spec layer_specs[M3_VISION_LAYER_ROLES] = {
    [M3_VISION_LN1] = {"ln1", EMBD, EMBD, true},   [M3_VISION_LN2] = {"ln2", EMBD, EMBD, true},
    [M3_VISION_Q] = {"attn_q", EMBD, EMBD, false}, [M3_VISION_K] = {"attn_k", EMBD, EMBD, false},
    [M3_VISION_V] = {"attn_v", EMBD, EMBD, false}, [M3_VISION_OUT] = {"attn_out", EMBD, EMBD, false},
    [M3_VISION_UP] = {"ffn_up", EMBD, FF, false},  [M3_VISION_DOWN] = {"ffn_down", FF, EMBD, false},
};

static const affine_spec outer_specs[M3_VISION_OUTER_ROLES] = {
    [M3_VISION_PRE_LN] = {"v.pre_ln", EMBD, EMBD, true},
    [M3_VISION_PROJECTOR_1] = {"mm.1", EMBD, PROJECTOR, false},
    [M3_VISION_PROJECTOR_2] = {"mm.2", PROJECTOR, OUT, false},
    [M3_VISION_MERGER_1] = {"mm.merger.fc1", MERGED, MERGER, false},
    [M3_VISION_MERGER_2] = {"mm.merger.fc2", MERGER, OUT, false},
};

static int64_t dim_of(const m3_vision_hparams *h, dim d) {
  switch (d) {
    case EMBD: return h->n_embd;
    case FF: return h->n_ff;
    case PROJECTOR: return h->n_projector;
    case MERGER: return h->n_merger;
    case MERGED: return (int64_t)M3_VISION_MERGE * M3_VISION_MERGE * h->n_out;
    case OUT: return h->n_out;
  }
  return 0;
}

static m3_status find(const m3_vision *v, const char *name, const int64_t *ne, const m3_tensor **out, m3_error *err) {
  const char *file = m3_gguf_name(v->gguf);
  const m3_tensor *t = m3_gguf_find_tensor(v->gguf, name);
  if (!t) return m3_fail(err, M3_ERROR_MODEL, "%s: tensor '%s' is missing", file, name);
  if (memcmp(ne, t->ne, sizeof t->ne) != 0)
    return m3_fail(err, M3_ERROR_MODEL,
                   "%s: tensor '%s' has shape [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "], expected [%" PRId64
                   ", %" PRId64 ", %" PRId64 ", %" PRId64 "]",
                   file, name, t->ne[0], t->ne[1], t->ne[2], t->ne[3], ne[0], ne[1], ne[2], ne[3]);
  *out = t;
  return M3_OK;
}

static m3_status find_f32(const m3_vision *v, const char *name, const int64_t *ne, const m3_tensor **out,
                          m3_error *err) {
  m3_status status = find(v, name, ne, out, err);
  if (!status && (*out)->type != M3_TYPE_F32)
    status = m3_fail(err, M3_ERROR_MODEL, "%s: tensor '%s' is %s, expected F32", m3_gguf_name(v->gguf), name,
                     m3_type_name((*out)->type));
  return status;
}

static m3_status bind_affine(const m3_vision *v, const char *prefix, const affine_spec *spec, m3_affine *a,
                             m3_error *err) {
  char name[96];
  int64_t in = dim_of(&v->hparams, spec->in), out = dim_of(&v->hparams, spec->out);
  const int64_t vector[M3_MAX_DIMS] = {out, 1, 1, 1}, matrix[M3_MAX_DIMS] = {in, out, 1, 1};
  snprintf(name, sizeof name, "%s%s.weight", prefix, spec->name);
  m3_status status =
      spec->norm ? find_f32(v, name, vector, &a->weight.tensor, err) : find(v, name, matrix, &a->weight.tensor, err);
  if (status) return status;
  snprintf(name, sizeof name, "%s%s.bias", prefix, spec->name);
  status = find_f32(v, name, vector, &a->bias.tensor, err);
  if (status) return status;
  a->weight.data = a->weight.tensor->data;
  a->bias.data = a->bias.tensor->data;
  return M3_OK;
}

/* Widths that no key tells: those of the inner biases. */
static m3_status read_width(const m3_vision *v, const char *name, int32_t *out, m3_error *err) {
  const m3_tensor *t = m3_gguf_find_tensor(v->gguf, name);
  if (!t) return m3_fail(err, M3_ERROR_MODEL, "%s: tensor '%s' is missing", m3_gguf_name(v->gguf), name);
  if (t->ne[0] > M3_MAX_DIM)
    return m3_fail(err, M3_ERROR_MODEL, "%s: tensor '%s' has %" PRId64 " elements, expected at most %d",
                   m3_gguf_name(v->gguf), name, t->ne[0], M3_MAX_DIM);
  *out = (int32_t)t->ne[0];
  return M3_OK;
}

static m3_status bind_patch(m3_vision *v, int frame, m3_error *err) {
  const m3_vision_hparams *h = &v->hparams;
  const char *name = frame ? "v.patch_embd.weight.1" : "v.patch_embd.weight";
  const int64_t ne[M3_MAX_DIMS] = {h->patch_size, h->patch_size, M3_VISION_CHANNELS, h->n_embd};
  const m3_tensor *t = NULL;
  m3_status status = find_f32(v, name, ne, &t, err);
  if (status) return status;
  v->patch_tensors[frame] = *t;
  v->patch_tensors[frame].n_dims = 2;
  const int64_t matrix[M3_MAX_DIMS] = {ne[0] * ne[1] * ne[2], ne[3], 1, 1};
  memcpy(v->patch_tensors[frame].ne, matrix, sizeof matrix);
  v->patch[frame].tensor = &v->patch_tensors[frame];
  v->patch[frame].data = t->data;
  return M3_OK;
}

/* All tensors are found by names that differ, so that a file with more has one without a role. */
static m3_status check_count(const m3_vision *v, m3_error *err) {
  int64_t n = m3_gguf_n_tensors(v->gguf);
  int64_t want = M3_VISION_FRAMES + 2 * (M3_VISION_OUTER_ROLES + (int64_t)M3_VISION_LAYER_ROLES * v->hparams.n_layer);
  if (n == want) return M3_OK;
  return m3_fail(err, M3_ERROR_MODEL, "%s: %" PRId64 " tensors, expected %" PRId64 " of a vision tower of %d layers",
                 m3_gguf_name(v->gguf), n, want, v->hparams.n_layer);
}

static m3_status bind_all(m3_vision *v, m3_error *err) {
  m3_status status = read_width(v, "mm.1.bias", &v->hparams.n_projector, err);
  if (!status) status = read_width(v, "mm.merger.fc1.bias", &v->hparams.n_merger, err);
  for (int frame = 0; frame < M3_VISION_FRAMES && !status; frame++) status = bind_patch(v, frame, err);
  for (int r = 0; r < M3_VISION_OUTER_ROLES && !status; r++)
    status = bind_affine(v, "", &outer_specs[r], &v->outer[r], err);
  for (int32_t l = 0; l < v->hparams.n_layer && !status; l++) {
    char prefix[32];
    snprintf(prefix, sizeof prefix, "v.blk.%d.", (int)l);
    for (int r = 0; r < M3_VISION_LAYER_ROLES && !status; r++)
      status = bind_affine(v, prefix, &layer_specs[r], &v->layers[l].a[r], err);
  }
  return status ? status : check_count(v, err);
}

/* ---------------------------------------------------------------------------------------------- open, close */

static m3_status choose_backend(m3_vision *v, const m3_vision_options *o, m3_error *err) {
  int32_t device = o ? o->device : M3_DEVICE_AUTO;
  if (device < M3_DEVICE_AUTO || device > M3_DEVICE_CUDA)
    return m3_fail(err, M3_ERROR_ARGUMENT, "device is %d, expected auto (0), cpu (1) or cuda (2)", (int)device);
  if (device == M3_DEVICE_CUDA)
    return m3_fail(err, M3_ERROR_UNSUPPORTED, "device cuda has no operations of the vision tower; cpu has");
  v->backend = &m3_cpu_backend;
  m3_isa isa;
  m3_status status = m3_choose_isa(o ? o->isa : M3_ISA_AUTO, &isa, err);
  if (!status) v->kernels = m3_kernels_for(isa);
  return status;
}

m3_status m3_vision_open(const char *path, const m3_vision_options *o, m3_vision **out, m3_error *err) {
  if (!out) return m3_fail(err, M3_ERROR_ARGUMENT, "m3_vision_open: out is NULL");
  *out = NULL;
  if (o && o->struct_size != sizeof *o)
    return m3_fail(
        err, M3_ERROR_ARGUMENT,
        "m3_vision_options has %u bytes, this library expects %zu: library and header do not belong together",
        o->struct_size, sizeof *o);
  m3_vision *v = calloc(1, sizeof *v);
  if (!v) return m3_fail_memory(err, sizeof *v, "a vision tower");
  m3_status status = choose_backend(v, o, err);
  if (!status) status = m3_gguf_open(path, &v->gguf, err);
  if (!status) status = read_hparams(v->gguf, &v->hparams, err);
  if (!status) {
    v->layers = calloc((size_t)v->hparams.n_layer, sizeof *v->layers);
    if (!v->layers)
      status = m3_fail_memory(err, (uint64_t)v->hparams.n_layer * sizeof *v->layers, "the layers of a vision tower");
  }
  if (!status) status = bind_all(v, err);
  if (status) {
    m3_vision_close(v);
    return status;
  }
  *out = v;
  return M3_OK;
}

void m3_vision_close(m3_vision *v) {
  if (!v) return;
  free(v->layers);
  m3_gguf_close(v->gguf);
  free(v);
}

const m3_vision_hparams *m3_vision_dimensions(const m3_vision *v) { return &v->hparams; }
const m3_gguf *m3_vision_gguf(const m3_vision *v) { return v->gguf; }
void m3_vision_cancel(m3_vision *v) { atomic_store(&v->cancel, true); }
