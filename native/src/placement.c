#include "placement.h"

#include <string.h>

#include "host_experts.h"
#include "weights.h"

static const m3_role expert_roles[] = {M3_GATE_EXPS, M3_UP_EXPS, M3_DOWN_EXPS};

static bool has_experts(const m3_layer *l) { return l->w[M3_GATE_EXPS].tensor != NULL; }

static bool is_expert_role(int role) { return role == M3_GATE_EXPS || role == M3_UP_EXPS || role == M3_DOWN_EXPS; }

static uint64_t expert_bytes(const m3_layer *l) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < sizeof expert_roles / sizeof *expert_roles; i++)
    bytes += l->w[expert_roles[i]].tensor->n_bytes;
  return bytes;
}

m3_status m3_placement_open(m3_model *m, int32_t experts_on, m3_error *err) {
  if (experts_on < M3_EXPERTS_AUTO || experts_on > M3_EXPERTS_CPU)
    return m3_fail(err, M3_ERROR_ARGUMENT, "experts_on is %d, expected auto (0), gpu (1) or cpu (2)", (int)experts_on);
  bool device = m->backend->weight_load != NULL;
  if (experts_on == M3_EXPERTS_GPU && !device)
    return m3_fail(err, M3_ERROR_ARGUMENT, "experts_on is gpu, but the model is on device %s", m->backend->name);
  if (experts_on == M3_EXPERTS_CPU && device && !m->backend->add_sums)
    return m3_fail(err, M3_ERROR_UNSUPPORTED, "experts_on is cpu: backend %s cannot take sums of experts (add_sums)",
                   m->backend->name);
  m->experts_on = experts_on;
  m->placed = !device || experts_on != M3_EXPERTS_AUTO || !m->backend->add_sums || !m3_gguf_has_data(m->gguf);
  for (int32_t l = 0; device && experts_on == M3_EXPERTS_CPU && l < m->hparams.n_layer; l++)
    m->layers[l].host_experts = has_experts(&m->layers[l]);
  return M3_OK;
}

void m3_placement_settle(m3_model *m) { m->placed = true; }

bool m3_stays_on_host(const m3_model *m, const m3_weight *w) {
  for (int32_t l = 0; l < m->hparams.n_layer; l++) {
    const m3_weight *of = m->layers[l].w;
    if (w >= of && w < of + M3_LAYER_ROLES) return m->layers[l].host_experts && is_expert_role((int)(w - of));
  }
  return false;
}

bool m3_any_on_host(const m3_model *m, int32_t first, int32_t count) {
  for (int32_t l = first; l < first + count; l++)
    if (m->layers[l].host_experts) return true;
  return false;
}

uint64_t m3_placement_margin(uint64_t total_bytes) {
  uint64_t most = (uint64_t)2 << 30;
  return total_bytes / 32 < most ? total_bytes / 32 : most;
}

/* ---------------------------------------------------------------------------------------------- plan */

/* The layers of a session whose options were checked. */
typedef struct window {
  int32_t first, end;
} window;

static window window_of(const m3_model *m, const m3_session_options *o) {
  int32_t count = o->layer_count ? o->layer_count : m->hparams.n_layer - o->layer_first;
  return (window){o->layer_first, o->layer_first + count};
}

/* Adds a weight to what lies on the device. */
static void add_weight(const m3_model *m, const m3_weight *w, uint64_t *bytes, m3_plan *plan) {
  if (!w->tensor) return;
  *bytes += w->tensor->n_bytes;
  if (m->backend->weight_load && (w->device || !m3_gguf_has_data(m->gguf))) plan->loaded_bytes += w->tensor->n_bytes;
}

/* Everything but experts, and what the session takes on the device. */
static m3_status plan_rest(const m3_model *m, const m3_session_options *o, m3_plan *plan, m3_error *err) {
  m3_memory session;
  m3_status status = m3_session_memory(m, o, &session, err);
  if (!status) status = m3_model_device_memory(m, &plan->free_bytes, &plan->total_bytes, err);
  if (status) return status;
  plan->kv_bytes = session.kv_bytes;
  plan->index_bytes = session.index_bytes;
  plan->scratch_bytes = session.scratch_bytes;
  window w = window_of(m, o);
  if (w.first == 0) add_weight(m, &m->outer[M3_TOKEN_EMBD], &plan->weight_bytes, plan);
  for (int32_t l = w.first; l < w.end; l++)
    for (int r = 0; r < M3_LAYER_ROLES; r++)
      if (!is_expert_role(r)) add_weight(m, &m->layers[l].w[r], &plan->weight_bytes, plan);
  if (w.end == m->hparams.n_layer) {
    add_weight(m, &m->outer[M3_OUTPUT_NORM], &plan->weight_bytes, plan);
    add_weight(m, &m->outer[M3_OUTPUT_HEAD], &plan->weight_bytes, plan);
  }
  return M3_OK;
}

/* The first layer of the window whose experts stay on the CPU, if they are placed for this plan. */
static int32_t choose_cut(const m3_model *m, window w, const m3_plan *plan) {
  uint64_t taken = plan->weight_bytes - plan->loaded_bytes + plan->kv_bytes + plan->index_bytes + plan->scratch_bytes;
  uint64_t all = 0;
  for (int32_t l = w.first; l < w.end; l++)
    if (has_experts(&m->layers[l])) all += expert_bytes(&m->layers[l]);
  /* A model that fits as a whole is not split for the sake of the margin. */
  if (taken + all <= plan->free_bytes) return w.end;
  taken += m3_placement_margin(plan->total_bytes);
  for (int32_t l = w.first; l < w.end; l++) {
    if (!has_experts(&m->layers[l])) continue;
    uint64_t bytes = expert_bytes(&m->layers[l]);
    if (taken + bytes > plan->free_bytes) return l;
    taken += bytes;
  }
  return w.end;
}

static void plan_experts(const m3_model *m, const m3_session_options *o, int32_t cut, m3_plan *plan) {
  window w = window_of(m, o);
  for (int32_t l = w.first; l < w.end; l++) {
    const m3_layer *layer = &m->layers[l];
    if (!has_experts(layer)) continue;
    plan->expert_layers++;
    if (layer->host_experts || l >= cut) {
      plan->cpu_expert_layers++;
      plan->cpu_expert_bytes += expert_bytes(layer);
      continue;
    }
    for (size_t i = 0; i < sizeof expert_roles / sizeof *expert_roles; i++)
      add_weight(m, &layer->w[expert_roles[i]], &plan->expert_bytes, plan);
  }
  if (plan->cpu_expert_layers) plan->host_bytes = m3_host_experts_bytes(m, o, &plan->pinned_bytes);
}

/* The lock of loading is held. */
static m3_status make_plan(const m3_model *m, const m3_session_options *o, int32_t *cut, m3_plan *plan, m3_error *err) {
  memset(plan, 0, sizeof *plan);
  m3_status status = plan_rest(m, o, plan, err);
  if (status) return status;
  *cut = m->placed ? m->hparams.n_layer : choose_cut(m, window_of(m, o), plan);
  plan_experts(m, o, *cut, plan);
  return M3_OK;
}

m3_status m3_session_plan(const m3_model *m, const m3_session_options *o, m3_plan *out, m3_error *err) {
  if (!out) return m3_fail(err, M3_ERROR_ARGUMENT, "m3_session_plan: out is NULL");
  int32_t cut;
  m3_loading_lock(m->loading);
  m3_status status = make_plan(m, o, &cut, out, err);
  m3_loading_unlock(m->loading);
  return status;
}

m3_status m3_model_place(m3_model *m, const m3_session_options *o, m3_error *err) {
  m3_status status = M3_OK;
  m3_loading_lock(m->loading);
  if (!m->placed) {
    m3_plan plan;
    int32_t cut;
    status = make_plan(m, o, &cut, &plan, err);
    window w = status ? (window){0, 0} : window_of(m, o);
    for (int32_t l = w.first > cut ? w.first : cut; !status && l < w.end; l++)
      m->layers[l].host_experts = has_experts(&m->layers[l]);
    m->placed = !status;
  }
  m3_loading_unlock(m->loading);
  return status;
}

int32_t m3_model_experts_on(const m3_model *m, int32_t layer) {
  if (layer < 0 || layer >= m->hparams.n_layer || !has_experts(&m->layers[layer])) return M3_EXPERTS_AUTO;
  if (!m->backend->weight_load) return M3_EXPERTS_CPU;
  if (!m->placed) return M3_EXPERTS_AUTO;
  return m->layers[layer].host_experts ? M3_EXPERTS_CPU : M3_EXPERTS_GPU;
}
