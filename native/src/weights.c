#include "weights.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "placement.h"
#include "weight_copy.h"

/* Bytes that are copied between two looks at the cancellation. */
#define PIECE ((uint64_t)64 << 20)

struct m3_loading {
  pthread_mutex_t lock; /* held while weights are loaded: sessions of one model may be opened on several threads */
  atomic_ullong done, total;
  atomic_bool cancel;
};

m3_status m3_loading_open(m3_loading **out, m3_error *err) {
  *out = calloc(1, sizeof **out);
  if (!*out) return m3_fail_memory(err, sizeof **out, "a model");
  pthread_mutex_init(&(*out)->lock, NULL);
  return M3_OK;
}

void m3_loading_close(m3_loading *l) {
  if (!l) return;
  pthread_mutex_destroy(&l->lock);
  free(l);
}

void m3_loading_lock(m3_loading *l) { pthread_mutex_lock(&l->lock); }
void m3_loading_unlock(m3_loading *l) { pthread_mutex_unlock(&l->lock); }

/* The i-th weight that a session of the layers needs, NULL behind the last. Embeddings, the layers in order, output
 * norm and head. */
static const m3_weight *weight_of(const m3_model *m, int32_t first, int32_t count, int64_t i) {
  if (first == 0 && i-- == 0) return &m->outer[M3_TOKEN_EMBD];
  if (i < (int64_t)count * M3_LAYER_ROLES) return &m->layers[first + i / M3_LAYER_ROLES].w[i % M3_LAYER_ROLES];
  i -= (int64_t)count * M3_LAYER_ROLES;
  if (first + count != m->hparams.n_layer || i > 1) return NULL;
  return &m->outer[i == 0 ? M3_OUTPUT_NORM : M3_OUTPUT_HEAD];
}

static bool must_load(const m3_model *m, const m3_weight *w) {
  return w->tensor && w->data && !w->device && !w->copy && !m3_stays_on_host(m, w);
}

uint64_t m3_weights_to_load(const m3_model *m, int32_t first, int32_t count) {
  uint64_t bytes = 0;
  if (!m->backend->weight_load && !m->reads) return 0;
  const m3_weight *w;
  for (int64_t i = 0; (w = weight_of(m, first, count, i)); i++)
    if (must_load(m, w)) bytes += w->tensor->n_bytes;
  return bytes;
}

static m3_status alloc_weight(const m3_model *m, const m3_weight *w, void **out, m3_error *err) {
  char purpose[128];
  m3_string name = w->tensor->name;
  snprintf(purpose, sizeof purpose, "tensor '%.*s'", name.size > 96 ? 96 : (int)name.size, name.data);
  return m->backend->weight_alloc(w->tensor->n_bytes, purpose, out, err);
}

static m3_status load_weight(m3_model *m, m3_weight *w, m3_error *err) {
  m3_loading *l = m->loading;
  void *device;
  m3_status status = alloc_weight(m, w, &device, err);
  if (status) return status;
  for (uint64_t at = 0, n = w->tensor->n_bytes; at < n && !status; at += PIECE) {
    uint64_t bytes = n - at < PIECE ? n - at : PIECE;
    if (atomic_load(&l->cancel)) status = m3_fail(err, M3_ERROR_CANCELLED, "loading the weights was cancelled");
    if (!status) status = m->backend->weight_load((char *)device + at, (const char *)w->data + at, bytes, err);
    atomic_fetch_add(&l->done, bytes);
  }
  if (status)
    m->backend->weight_free(device);
  else
    w->device = device;
  return status;
}

/* Reads what is not in memory yet. */
static m3_status read_weights(m3_model *m, int32_t first, int32_t count, m3_error *err) {
  const m3_weight *w;
  int64_t n = 0;
  for (int64_t i = 0; (w = weight_of(m, first, count, i)); i++) n += must_load(m, w);
  if (!n) return M3_OK;
  m3_weight **list = calloc((size_t)n, sizeof *list);
  if (!list) return m3_fail_memory(err, (uint64_t)n * sizeof *list, "a list of weights");
  n = 0;
  for (int64_t i = 0; (w = weight_of(m, first, count, i)); i++)
    if (must_load(m, w)) list[n++] = (m3_weight *)(uintptr_t)w;
  m3_status status = m3_copy_weights(m, list, n, &m->loading->done, &m->loading->cancel, err);
  free(list);
  return status;
}

/* Refuses what does not fit before the first byte of it is loaded. */
static m3_status check_room(const m3_model *m, uint64_t bytes, m3_error *err) {
  uint64_t free_bytes, total_bytes;
  m3_status status = m->backend->memory(&free_bytes, &total_bytes, err);
  if (status || bytes <= free_bytes) return status;
  return m3_fail(err, M3_ERROR_MEMORY,
                 "not enough memory on %s: weights of %.2f GB are to be loaded, %.2f of %.2f GB are free",
                 m->device_name, (double)bytes * 1e-9, (double)free_bytes * 1e-9, (double)total_bytes * 1e-9);
}

m3_status m3_model_load(m3_model *m, int32_t first, int32_t count, m3_error *err) {
  int32_t n_layer = m->hparams.n_layer;
  if (first < 0 || first > n_layer || count < 0 || count > n_layer - first)
    return m3_fail(err, M3_ERROR_ARGUMENT, "layers %d to %d, the model has %d", (int)first, (int)(first + count) - 1,
                   (int)n_layer);
  if (!m->backend->weight_load && !m->reads) return M3_OK;
  if (!count) count = n_layer - first;
  m3_loading *l = m->loading;
  m3_status status = M3_OK;
  m3_loading_lock(l);
  m3_placement_settle(m);
  atomic_store(&l->cancel, false);
  atomic_store(&l->done, 0);
  uint64_t total = m3_weights_to_load(m, first, count);
  atomic_store(&l->total, total);
  status = m->reads ? read_weights(m, first, count, err) : check_room(m, total, err);
  const m3_weight *w;
  for (int64_t i = 0; !m->reads && !status && (w = weight_of(m, first, count, i)); i++)
    if (must_load(m, w)) status = load_weight(m, (m3_weight *)(uintptr_t)w, err);
  m3_loading_unlock(l);
  return status;
}

void m3_model_cancel_load(m3_model *m) { atomic_store(&m->loading->cancel, true); }

void m3_model_load_progress(const m3_model *m, uint64_t *done, uint64_t *total) {
  *done = atomic_load(&m->loading->done);
  *total = atomic_load(&m->loading->total);
}

m3_status m3_weight_bound(const m3_model *m, m3_weight *w, int32_t expert, m3_error *err) {
  if (!m->backend->weight_load || m3_stays_on_host(m, w)) return M3_OK;
  m3_status status = w->device ? M3_OK : alloc_weight(m, w, &w->device, err);
  if (status) return status;
  if (expert < 0) return m->backend->weight_load(w->device, w->data, w->tensor->n_bytes, err);
  uint64_t bytes = w->tensor->n_bytes / (uint64_t)w->tensor->ne[2];
  return m->backend->weight_load((char *)w->device + (uint64_t)expert * bytes, w->experts[expert], bytes, err);
}

void m3_weight_drop(const m3_model *m, m3_weight *w) {
  if (w->device) m->backend->weight_free(w->device);
  w->device = NULL;
  m3_weight_copy_free(w);
}

m3_status m3_model_device_memory(const m3_model *m, uint64_t *free_bytes, uint64_t *total_bytes, m3_error *err) {
  *free_bytes = *total_bytes = 0;
  return m->backend->memory ? m->backend->memory(free_bytes, total_bytes, err) : M3_OK;
}

const char *m3_model_device_name(const m3_model *m) { return m->device_name; }
