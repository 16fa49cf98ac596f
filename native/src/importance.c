#include "importance.h"

#include <inttypes.h>

#include "session.h"

/* Matrices and width of an input of a layer; no matrices if the layer does not have it. */
static m3_input_sums shape_of(const m3_hparams *h, int32_t layer, m3_input input) {
  bool moe = layer >= h->n_dense_layer;
  switch (input) {
    case M3_INPUT_ATTENTION:
    case M3_INPUT_FFN: return (m3_input_sums){.n_matrix = 1, .width = h->n_embd};
    case M3_INPUT_ATTENDED: return (m3_input_sums){.n_matrix = 1, .width = (int64_t)h->n_head * h->head_dim};
    case M3_INPUT_MLP_DOWN: return (m3_input_sums){.n_matrix = !moe, .width = h->n_ff};
    case M3_INPUT_SHARED_DOWN: return (m3_input_sums){.n_matrix = moe && h->n_ff_shared > 0, .width = h->n_ff_shared};
    case M3_INPUT_EXPERTS: return (m3_input_sums){.n_matrix = moe ? h->n_expert : 0, .width = h->n_embd};
    case M3_INPUT_EXPERTS_DOWN: return (m3_input_sums){.n_matrix = moe ? h->n_expert : 0, .width = h->n_ff_expert};
    case M3_INPUT_HEAD: return (m3_input_sums){.n_matrix = layer == h->n_layer - 1, .width = h->n_embd};
    case M3_INPUTS: break;
  }
  return (m3_input_sums){0};
}

int64_t m3_importance_doubles(const m3_hparams *h, int32_t first, int32_t count) {
  int64_t doubles = 0;
  for (int32_t layer = first; layer < first + count; layer++)
    for (int i = 0; i < M3_INPUTS; i++) {
      m3_input_sums in = shape_of(h, layer, (m3_input)i);
      doubles += in.n_matrix * (in.width + 1);
    }
  return doubles;
}

void m3_importance_lay_out(const m3_hparams *h, int32_t first, int32_t count, double *memory, m3_input_sums *inputs) {
  for (int32_t layer = first; layer < first + count; layer++)
    for (int i = 0; i < M3_INPUTS; i++) {
      m3_input_sums in = shape_of(h, layer, (m3_input)i);
      in.sums = memory;
      in.rows = memory + in.n_matrix * in.width;
      memory = in.rows + in.n_matrix;
      *inputs++ = in;
    }
}

/* The input of a role; M3_INPUTS if it is not a matrix that activations are multiplied with. */
static m3_input input_of(int32_t layer, int32_t role) {
  if (layer < 0) return role == M3_OUTPUT_HEAD ? M3_INPUT_HEAD : M3_INPUTS;
  switch ((m3_role)role) {
    case M3_ATTN_Q:
    case M3_ATTN_K:
    case M3_ATTN_V:
    case M3_INDEX_Q:
    case M3_INDEX_K: return M3_INPUT_ATTENTION;
    case M3_ATTN_OUTPUT: return M3_INPUT_ATTENDED;
    case M3_FFN_GATE:
    case M3_FFN_UP:
    case M3_ROUTER:
    case M3_GATE_SHEXP:
    case M3_UP_SHEXP: return M3_INPUT_FFN;
    case M3_FFN_DOWN: return M3_INPUT_MLP_DOWN;
    case M3_DOWN_SHEXP: return M3_INPUT_SHARED_DOWN;
    case M3_GATE_EXPS:
    case M3_UP_EXPS: return M3_INPUT_EXPERTS;
    case M3_DOWN_EXPS: return M3_INPUT_EXPERTS_DOWN;
    default: return M3_INPUTS;
  }
}

/* The sums that belong to a tensor. */
static m3_status find_input(const m3_session *s, const char *tensor, const m3_input_sums **out, m3_error *err) {
  int32_t layer, role, first = s->options.layer_first, end = first + s->options.layer_count;
  if (!(s->options.record & M3_RECORD_IMPORTANCE))
    return m3_fail(err, M3_ERROR_ARGUMENT, "the session does not record importance");
  if (!tensor || !m3_find_role(s->model, tensor, &layer, &role))
    return m3_fail(err, M3_ERROR_ARGUMENT, "there is no tensor '%s'", tensor ? tensor : "(NULL)");
  m3_input input = input_of(layer, role);
  if (input == M3_INPUTS)
    return m3_fail(err, M3_ERROR_ARGUMENT, "tensor '%s' is no matrix that activations are multiplied with", tensor);
  if (input == M3_INPUT_HEAD) layer = s->model->hparams.n_layer - 1;
  if (layer < first || layer >= end)
    return m3_fail(err, M3_ERROR_ARGUMENT, "tensor '%s' belongs to layer %d, expected %d to %d", tensor, (int)layer,
                   (int)first, (int)end - 1);
  if ((role == M3_INDEX_Q || role == M3_INDEX_K) && input == M3_INPUT_ATTENTION &&
      !s->cache.layers[layer - first].index)
    return m3_fail(err, M3_ERROR_ARGUMENT, "tensor '%s' is not used by dense attention", tensor);
  *out = &s->inputs[(layer - first) * M3_INPUTS + input];
  return M3_OK;
}

m3_status m3_session_importance(const m3_session *s, const char *tensor, const m3_importance *out, m3_error *err) {
  if (!out || out->struct_size != sizeof *out)
    return m3_fail(err, M3_ERROR_ARGUMENT,
                   "m3_importance has %u bytes, this library expects %zu: library and header do not belong together",
                   out ? out->struct_size : 0, sizeof *out);
  const m3_input_sums *in = NULL;
  m3_status status = find_input(s, tensor, &in, err);
  if (status) return status;
  if (out->n_matrix != in->n_matrix || out->n_in != in->width || !out->sums || !out->counts)
    return m3_fail(err, M3_ERROR_ARGUMENT,
                   "tensor '%s': room for sums [%" PRId64 ", %" PRId64 "]%s, expected [%" PRId64 ", %" PRId64 "]",
                   tensor, out->n_matrix, out->n_in, out->sums && out->counts ? "" : " at NULL", in->n_matrix,
                   in->width);
  const m3_backend *b = s->model->backend;
  b->download(s->state, out->sums, in->sums, (uint64_t)(in->n_matrix * in->width) * sizeof(double));
  for (int64_t i = 0; i < in->n_matrix; i++) {
    double rows;
    b->download(s->state, &rows, in->rows + i, sizeof rows);
    out->counts[i] = (int64_t)rows;
  }
  return M3_OK;
}
