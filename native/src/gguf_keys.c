/* Metadata of a GGUF header: keys and their values. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gguf_header.h"

#define MAX_KEY 65535u /* the format's limit */
#define MAX_ALIGNMENT 65536u
#define DEFAULT_ALIGNMENT 32u

/* ---------------------------------------------------------------------------------------------- reading */

static uint64_t kv_type_bytes(uint32_t type) {
  switch (type) {
    case M3_KV_U8:
    case M3_KV_I8:
    case M3_KV_BOOL: return 1;
    case M3_KV_U16:
    case M3_KV_I16: return 2;
    case M3_KV_U32:
    case M3_KV_I32:
    case M3_KV_F32: return 4;
    case M3_KV_U64:
    case M3_KV_I64:
    case M3_KV_F64: return 8;
    default: return 0;
  }
}

/* The strings are walked before room is made for them, so that a false count costs no memory. */
static m3_status take_strings(m3_cursor *c, m3_kv_entry *e, uint64_t n) {
  if (n > m3_left(c) / 8) return m3_truncated(c, n > UINT64_MAX / 8 ? UINT64_MAX : n * 8, "an array of strings");
  if (n == 0) return M3_OK;
  m3_cursor ahead = *c;
  m3_string s = {0};
  for (uint64_t i = 0; i < n; i++) {
    m3_status status = m3_take_string(&ahead, &s, "a string");
    if (status) return status;
  }
  e->strings = malloc(n * sizeof(m3_string));
  if (!e->strings) return m3_fail_memory(c->err, n * sizeof(m3_string), "the strings of a GGUF array");
  for (uint64_t i = 0; i < n; i++) m3_take_string(c, &e->strings[i], "a string");
  e->kv.strings = e->strings;
  return M3_OK;
}

static m3_status take_values(m3_cursor *c, m3_kv_entry *e, uint32_t type, uint64_t n) {
  m3_string key = e->kv.key;
  e->kv.element_type = (int32_t)type;
  e->kv.n = n;
  if (type == M3_KV_STRING) {
    if (e->kv.type != M3_KV_ARRAY) {
      e->kv.strings = &e->scalar;
      return m3_take_string(c, &e->scalar, "a string");
    }
    return take_strings(c, e, n);
  }
  uint64_t bytes = kv_type_bytes(type);
  if (!bytes)
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: key '%.*s' has value type %" PRIu32 ", expected one of 0 to 12%s",
                   c->gguf->name, m3_clip(key), key.data, type, type == M3_KV_ARRAY ? " and no array of arrays" : "");
  if (n > m3_left(c) / bytes)
    return m3_truncated(c, n > UINT64_MAX / bytes ? UINT64_MAX : n * bytes, "the value of a key");
  e->kv.data = c->gguf->bytes + c->at;
  c->at += n * bytes;
  return M3_OK;
}

static m3_status take_kv(m3_cursor *c, m3_kv_entry *e) {
  uint32_t type = 0;
  m3_status status = m3_take_string(c, &e->kv.key, "a key");
  if (status) return status;
  if (e->kv.key.size == 0 || e->kv.key.size > MAX_KEY)
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: a key of %" PRIu64 " bytes before byte %" PRIu64 ", expected 1 to %u",
                   c->gguf->name, e->kv.key.size, c->at, MAX_KEY);
  if (!m3_is_clean(e->kv.key))
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: key '%.*s' has control characters", c->gguf->name, m3_clip(e->kv.key),
                   e->kv.key.data);
  status = m3_take(c, &type, 4, "the type of a key");
  if (status) return status;
  e->kv.type = (int32_t)type;
  uint64_t n = 1;
  if (type == M3_KV_ARRAY) {
    status = m3_take(c, &type, 4, "the element type of an array");
    if (status) return status;
    status = m3_take(c, &n, 8, "the length of an array");
    if (status) return status;
  }
  return take_values(c, e, type, n);
}

static int by_key(const void *a, const void *b) {
  return m3_compare_strings((*(const m3_kv_entry *const *)a)->kv.key, (*(const m3_kv_entry *const *)b)->kv.key);
}

static m3_status index_keys(m3_gguf *g, m3_error *err) {
  g->kv_by_key = calloc(g->n_kv + 1, sizeof *g->kv_by_key);
  if (!g->kv_by_key) return m3_fail_memory(err, g->n_kv * sizeof *g->kv_by_key, "the key index");
  for (uint64_t i = 0; i < g->n_kv; i++) g->kv_by_key[i] = &g->kv[i];
  qsort(g->kv_by_key, g->n_kv, sizeof *g->kv_by_key, by_key);
  for (uint64_t i = 1; i < g->n_kv; i++) {
    m3_string key = g->kv_by_key[i]->kv.key;
    if (m3_compare_strings(key, g->kv_by_key[i - 1]->kv.key) == 0)
      return m3_fail(err, M3_ERROR_FORMAT, "%s: key '%.*s' stands twice", g->name, m3_clip(key), key.data);
  }
  return M3_OK;
}

static m3_status read_alignment(m3_gguf *g, m3_error *err) {
  g->alignment = DEFAULT_ALIGNMENT;
  const m3_kv *kv = m3_gguf_find_kv(g, "general.alignment");
  if (!kv) return M3_OK;
  if (kv->type != M3_KV_U32)
    return m3_fail(err, M3_ERROR_FORMAT, "%s: general.alignment has value type %d, expected 4 (u32)", g->name,
                   (int)kv->type);
  uint32_t value;
  memcpy(&value, kv->data, 4);
  if (value < 8 || value > MAX_ALIGNMENT || value & (value - 1))
    return m3_fail(err, M3_ERROR_FORMAT, "%s: general.alignment is %" PRIu32 ", expected a power of two from 8 to %u",
                   g->name, value, MAX_ALIGNMENT);
  g->alignment = value;
  return M3_OK;
}

m3_status m3_read_keys(m3_gguf *g, m3_cursor *c, uint64_t n) {
  g->kv = calloc(n + 1, sizeof *g->kv);
  if (!g->kv) return m3_fail_memory(c->err, n * sizeof *g->kv, "the keys of a GGUF header");
  while (g->n_kv < n) {
    m3_status status = take_kv(c, &g->kv[g->n_kv++]); /* counted first: its strings may have been allocated */
    if (status) return status;
  }
  m3_status status = index_keys(g, c->err);
  return status ? status : read_alignment(g, c->err);
}

void m3_free_keys(m3_gguf *g) {
  for (uint64_t i = 0; g->kv && i < g->n_kv; i++) free(g->kv[i].strings);
  free(g->kv);
  free(g->kv_by_key);
}

/* ---------------------------------------------------------------------------------------------- access */

int64_t m3_gguf_n_kv(const m3_gguf *g) { return (int64_t)g->n_kv; }

const m3_kv *m3_gguf_kv(const m3_gguf *g, int64_t i) { return i >= 0 && (uint64_t)i < g->n_kv ? &g->kv[i].kv : NULL; }

const m3_kv *m3_gguf_find_kv(const m3_gguf *g, const char *key) {
  m3_kv_entry wanted = {.kv = {.key = {key, strlen(key)}}};
  const m3_kv_entry *p = &wanted, **found = bsearch(&p, g->kv_by_key, g->n_kv, sizeof *g->kv_by_key, by_key);
  return found ? &(*found)->kv : NULL;
}

static m3_status find_scalar(const m3_gguf *g, const char *key, const m3_kv **kv, m3_error *err) {
  *kv = m3_gguf_find_kv(g, key);
  if (!*kv) return m3_fail(err, M3_ERROR_MODEL, "%s: key '%s' is missing", g->name, key);
  if ((*kv)->type == M3_KV_ARRAY)
    return m3_fail(err, M3_ERROR_MODEL, "%s: key '%s' is an array, expected one value", g->name, key);
  return M3_OK;
}

static m3_status wrong_type(const m3_gguf *g, const char *key, const char *expected, const m3_kv *kv, m3_error *err) {
  return m3_fail(err, M3_ERROR_MODEL, "%s: key '%s' has value type %d, expected %s", g->name, key, (int)kv->type,
                 expected);
}

#define READ_AS(c_type)                     \
  {                                         \
    c_type value;                           \
    memcpy(&value, kv->data, sizeof value); \
    *out = (int64_t)value;                  \
    return M3_OK;                           \
  }

m3_status m3_gguf_i64(const m3_gguf *g, const char *key, int64_t *out, m3_error *err) {
  const m3_kv *kv;
  m3_status status = find_scalar(g, key, &kv, err);
  if (status) return status;
  switch (kv->type) {
    case M3_KV_BOOL:
    case M3_KV_U8: READ_AS(uint8_t)
    case M3_KV_I8: READ_AS(int8_t)
    case M3_KV_U16: READ_AS(uint16_t)
    case M3_KV_I16: READ_AS(int16_t)
    case M3_KV_U32: READ_AS(uint32_t)
    case M3_KV_I32: READ_AS(int32_t)
    case M3_KV_I64: READ_AS(int64_t)
    case M3_KV_U64: {
      uint64_t value;
      memcpy(&value, kv->data, 8);
      if (value > INT64_MAX)
        return m3_fail(err, M3_ERROR_MODEL, "%s: key '%s' is %" PRIu64 ", too large", g->name, key, value);
      *out = (int64_t)value;
      return M3_OK;
    }
    default: return wrong_type(g, key, "an integer", kv, err);
  }
}

m3_status m3_gguf_f32(const m3_gguf *g, const char *key, float *out, m3_error *err) {
  const m3_kv *kv;
  m3_status status = find_scalar(g, key, &kv, err);
  if (status) return status;
  if (kv->type != M3_KV_F32) return wrong_type(g, key, "6 (float32)", kv, err);
  memcpy(out, kv->data, 4);
  return M3_OK;
}

m3_status m3_gguf_int(const m3_gguf *g, const char *key, int64_t low, int64_t high, int64_t *out, m3_error *err) {
  m3_status status = m3_gguf_i64(g, key, out, err);
  if (status) return status;
  if (*out < low || *out > high)
    return m3_fail(err, M3_ERROR_MODEL, "%s: key '%s' is %" PRId64 ", expected %" PRId64 " to %" PRId64, g->name, key,
                   *out, low, high);
  return M3_OK;
}

m3_status m3_gguf_positive(const m3_gguf *g, const char *key, float *out, m3_error *err) {
  m3_status status = m3_gguf_f32(g, key, out, err);
  if (status) return status;
  if (!isfinite(*out) || *out <= 0)
    return m3_fail(err, M3_ERROR_MODEL, "%s: key '%s' is %g, expected a positive number", g->name, key, (double)*out);
  return M3_OK;
}

m3_status m3_gguf_str(const m3_gguf *g, const char *key, m3_string *out, m3_error *err) {
  const m3_kv *kv;
  m3_status status = find_scalar(g, key, &kv, err);
  if (status) return status;
  if (kv->type != M3_KV_STRING) return wrong_type(g, key, "8 (string)", kv, err);
  *out = kv->strings[0];
  return M3_OK;
}
