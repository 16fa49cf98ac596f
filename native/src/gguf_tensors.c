/* Tensors of a GGUF header: names, types, shapes, and where their data lies. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "gguf_header.h"
#include "quant/traits.h"

#define MAX_TENSOR_NAME 64u /* the format's limit */

/* ---------------------------------------------------------------------------------------------- reading */

static m3_status take_tensor(m3_cursor *c, m3_tensor *t) {
  const char *file = c->gguf->name;
  m3_status status = m3_take_string(c, &t->name, "a tensor name");
  if (status) return status;
  m3_string name = t->name;
  if (name.size == 0 || name.size > MAX_TENSOR_NAME)
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: a tensor name of %" PRIu64 " bytes, expected 1 to %u", file, name.size,
                   MAX_TENSOR_NAME);
  if (!m3_is_clean(name))
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: tensor '%.*s' has control characters in its name", file, m3_clip(name),
                   name.data);
  uint32_t n_dims = 0, type = 0;
  status = m3_take(c, &n_dims, 4, "the dimensions of a tensor");
  if (status) return status;
  if (n_dims < 1 || n_dims > M3_MAX_DIMS)
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: tensor '%.*s' has %" PRIu32 " dimensions, expected 1 to %d", file,
                   m3_clip(name), name.data, n_dims, M3_MAX_DIMS);
  t->n_dims = (int32_t)n_dims;
  uint64_t elements = 1;
  for (uint32_t d = 0; d < M3_MAX_DIMS; d++) {
    uint64_t ne = 1;
    if (d < n_dims) {
      status = m3_take(c, &ne, 8, "the dimensions of a tensor");
      if (status) return status;
    }
    if (ne == 0 || ne > INT64_MAX || !m3_mul_u64(elements, ne, &elements) || elements > INT64_MAX)
      return m3_fail(c->err, M3_ERROR_FORMAT,
                     "%s: tensor '%.*s': dimension %" PRIu32 " of %" PRIu64 " is zero or makes more elements than 2^63",
                     file, m3_clip(name), name.data, d, ne);
    t->ne[d] = (int64_t)ne;
  }
  status = m3_take(c, &type, 4, "the type of a tensor");
  if (status) return status;
  status = m3_take(c, &t->offset, 8, "the offset of a tensor");
  if (status) return status;
  t->type = (int32_t)type;
  if (!m3_traits(t->type)) {
    const char *known = m3_any_type_name(t->type);
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: tensor '%.*s' has %s type %s (%" PRIu32 "), which cannot be read",
                   file, m3_clip(name), name.data, known ? "the" : "an unknown", known ? known : "number", type);
  }
  if (t->ne[0] % m3_type_block_size(t->type))
    return m3_fail(c->err, M3_ERROR_FORMAT,
                   "%s: tensor '%.*s': rows of %" PRId64 " elements cannot be %s, blocks hold %" PRId64, file,
                   m3_clip(name), name.data, t->ne[0], m3_type_name(t->type), m3_type_block_size(t->type));
  int64_t row = m3_row_bytes(t->type, t->ne[0]);
  if (row < 0 || !m3_mul_u64((uint64_t)row, elements / (uint64_t)t->ne[0], &t->n_bytes))
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: tensor '%.*s' is larger than 2^64 bytes", file, m3_clip(name),
                   name.data);
  return M3_OK;
}

m3_status m3_read_tensors(m3_gguf *g, m3_cursor *c, uint64_t n) {
  g->tensors = calloc(n + 1, sizeof *g->tensors);
  if (!g->tensors) return m3_fail_memory(c->err, n * sizeof *g->tensors, "the tensors of a GGUF header");
  for (; g->n_tensors < n; g->n_tensors++) {
    m3_status status = take_tensor(c, &g->tensors[g->n_tensors]);
    if (status) return status;
  }
  return m3_index_tensors(g, c->err);
}

/* ---------------------------------------------------------------------------------------------- ordering */

static int by_name(const void *a, const void *b) {
  return m3_compare_strings((*(const m3_tensor *const *)a)->name, (*(const m3_tensor *const *)b)->name);
}

static int by_offset(const void *a, const void *b) {
  uint64_t x = (*(const m3_tensor *const *)a)->offset, y = (*(const m3_tensor *const *)b)->offset;
  return (x > y) - (x < y);
}

m3_status m3_index_tensors(m3_gguf *g, m3_error *err) {
  g->tensors_by_name = calloc(g->n_tensors + 1, sizeof *g->tensors_by_name);
  if (!g->tensors_by_name) return m3_fail_memory(err, g->n_tensors * sizeof *g->tensors_by_name, "the tensor index");
  for (uint64_t i = 0; i < g->n_tensors; i++) g->tensors_by_name[i] = &g->tensors[i];
  qsort(g->tensors_by_name, g->n_tensors, sizeof *g->tensors_by_name, by_name);
  for (uint64_t i = 1; i < g->n_tensors; i++) {
    const m3_tensor *a = g->tensors_by_name[i - 1], *b = g->tensors_by_name[i];
    if (m3_compare_strings(a->name, b->name) != 0) continue;
    if (a->file == b->file)
      return m3_fail(err, M3_ERROR_FORMAT, "%s: tensor '%.*s' stands twice", g->name, m3_clip(a->name), a->name.data);
    return m3_fail(err, M3_ERROR_FORMAT, "%s: tensor '%.*s' stands in %s as well", m3_gguf_file_name(g, a->file),
                   m3_clip(a->name), a->name.data, m3_gguf_file_name(g, b->file));
  }
  return M3_OK;
}

/* ---------------------------------------------------------------------------------------------- placement */

static m3_status place_tensor(const m3_gguf *g, m3_tensor *t, m3_error *err) {
  m3_string name = t->name;
  if (t->offset % g->alignment)
    return m3_fail(err, M3_ERROR_FORMAT, "%s: tensor '%.*s' at offset %" PRIu64 " is not aligned to %" PRIu64, g->name,
                   m3_clip(name), name.data, t->offset, g->alignment);
  uint64_t start, end;
  if (!m3_add_u64(g->data_start, t->offset, &start) || !m3_add_u64(start, t->n_bytes, &end) ||
      (g->has_data && end > g->size))
    return m3_fail(err, M3_ERROR_FORMAT,
                   "%s: truncated or broken: tensor '%.*s' needs %" PRIu64 " bytes at offset %" PRIu64
                   " of the data, which starts at byte %" PRIu64 "; the file has %" PRIu64 " bytes",
                   g->name, m3_clip(name), name.data, t->n_bytes, t->offset, g->data_start, g->size);
  return M3_OK;
}

m3_status m3_place_tensors(m3_gguf *g, uint64_t header_end, m3_error *err) {
  uint64_t padded;
  if (!m3_add_u64(header_end, g->alignment - 1, &padded))
    return m3_fail(err, M3_ERROR_FORMAT, "%s: the header ends beyond 2^64", g->name);
  g->data_start = padded & ~(g->alignment - 1);
  const m3_tensor **order = calloc(g->n_tensors + 1, sizeof *order);
  if (!order) return m3_fail_memory(err, g->n_tensors * sizeof *order, "the tensor index");
  m3_status status = M3_OK;
  for (uint64_t i = 0; i < g->n_tensors && !status; i++) {
    order[i] = &g->tensors[i];
    status = place_tensor(g, &g->tensors[i], err);
  }
  if (!status) qsort(order, g->n_tensors, sizeof *order, by_offset);
  for (uint64_t i = 1; i < g->n_tensors && !status; i++) {
    m3_string a = order[i - 1]->name, b = order[i]->name;
    if (order[i - 1]->offset + order[i - 1]->n_bytes > order[i]->offset)
      status =
          m3_fail(err, M3_ERROR_FORMAT,
                  "%s: tensors '%.*s' and '%.*s' overlap: the first ends at %" PRIu64 ", the second starts at %" PRIu64,
                  g->name, m3_clip(a), a.data, m3_clip(b), b.data, order[i - 1]->offset + order[i - 1]->n_bytes,
                  order[i]->offset);
  }
  free(order);
  if (status) return status;
  for (uint64_t i = 0; i < g->n_tensors; i++) {
    if (g->has_data) g->tensors[i].data = g->bytes + g->data_start + g->tensors[i].offset;
    g->tensors[i].offset = g->has_data ? g->data_start + g->tensors[i].offset : 0;
  }
  return M3_OK;
}

/* ---------------------------------------------------------------------------------------------- access */

int64_t m3_gguf_n_tensors(const m3_gguf *g) { return (int64_t)g->n_tensors; }

const m3_tensor *m3_gguf_tensor(const m3_gguf *g, int64_t i) {
  return i >= 0 && (uint64_t)i < g->n_tensors ? &g->tensors[i] : NULL;
}

const m3_tensor *m3_gguf_find_tensor(const m3_gguf *g, const char *name) {
  m3_tensor wanted = {.name = {name, strlen(name)}};
  const m3_tensor *p = &wanted;
  const m3_tensor **found = bsearch(&p, g->tensors_by_name, g->n_tensors, sizeof *g->tensors_by_name, by_name);
  return found ? *found : NULL;
}
