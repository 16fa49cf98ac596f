/* GGUF version 3, little endian, read as untrusted input: nothing of the file is used as a count, an offset or a
 * size before it has been compared with the bytes that are there. */
#include "gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "quant/traits.h"

#define MAX_KEY 65535u      /* the format's limit */
#define MAX_TENSOR_NAME 64u /* the format's limit */
#define MAX_ALIGNMENT 65536u
#define DEFAULT_ALIGNMENT 32u

typedef struct kv_entry {
  m3_kv kv;
  m3_string scalar;   /* what kv.strings points to for a single string */
  m3_string *strings; /* owned; for an array of strings */
} kv_entry;

struct m3_gguf {
  char *name;
  const unsigned char *bytes; /* the mapping, or a copy of the header */
  uint64_t size;
  bool mapped;
  bool has_data;
  kv_entry *kv;
  m3_tensor *tensors;
  uint64_t n_kv, n_tensors;
  const kv_entry **kv_by_key;        /* sorted, for look-up and to find duplicates */
  const m3_tensor **tensors_by_name; /* sorted likewise */
  uint64_t alignment;
  uint64_t data_start;
  m3_gguf **others; /* the files after this one, if it is the first of several; owned, tensors point into them */
  int64_t n_others;
};

/* ---------------------------------------------------------------------------------------------- reading */

typedef struct cursor {
  const m3_gguf *gguf;
  uint64_t at;
  m3_error *err;
} cursor;

static uint64_t left(const cursor *c) { return c->gguf->size - c->at; }

static m3_status truncated(const cursor *c, uint64_t need, const char *what) {
  return m3_fail(c->err, M3_ERROR_FORMAT,
                 "%s: truncated or broken: %s at byte %" PRIu64 " needs %" PRIu64 " bytes, the %s has %" PRIu64 " left",
                 c->gguf->name, what, c->at, need, c->gguf->has_data ? "file" : "header", left(c));
}

static m3_status take(cursor *c, void *dst, uint64_t n, const char *what) {
  if (left(c) < n) return truncated(c, n, what);
  memcpy(dst, c->gguf->bytes + c->at, n);
  c->at += n;
  return M3_OK;
}

static m3_status take_string(cursor *c, m3_string *out, const char *what) {
  m3_status status = take(c, &out->size, 8, what);
  if (status) return status;
  if (left(c) < out->size) return truncated(c, out->size, what);
  out->data = (const char *)c->gguf->bytes + c->at;
  c->at += out->size;
  return M3_OK;
}

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

/* Keys and names end up in messages and in other programs: no control characters, and no NUL that would end them
 * early there. */
static bool is_clean(m3_string s) {
  for (uint64_t i = 0; i < s.size; i++)
    if ((unsigned char)s.data[i] < 0x20 || s.data[i] == 0x7f) return false;
  return true;
}

static int clip(m3_string s) { return s.size > 80 ? 80 : (int)s.size; }

/* The strings are walked before room is made for them, so that a false count costs no memory. */
static m3_status take_strings(cursor *c, kv_entry *e, uint64_t n) {
  if (n > left(c) / 8) return truncated(c, n > UINT64_MAX / 8 ? UINT64_MAX : n * 8, "an array of strings");
  if (n == 0) return M3_OK;
  cursor ahead = *c;
  m3_string s = {0};
  for (uint64_t i = 0; i < n; i++) {
    m3_status status = take_string(&ahead, &s, "a string");
    if (status) return status;
  }
  e->strings = malloc(n * sizeof(m3_string));
  if (!e->strings) return m3_fail_memory(c->err, n * sizeof(m3_string), "the strings of a GGUF array");
  for (uint64_t i = 0; i < n; i++) take_string(c, &e->strings[i], "a string");
  e->kv.strings = e->strings;
  return M3_OK;
}

static m3_status take_values(cursor *c, kv_entry *e, uint32_t type, uint64_t n) {
  m3_string key = e->kv.key;
  e->kv.element_type = (int32_t)type;
  e->kv.n = n;
  if (type == M3_KV_STRING) {
    if (e->kv.type != M3_KV_ARRAY) {
      e->kv.strings = &e->scalar;
      return take_string(c, &e->scalar, "a string");
    }
    return take_strings(c, e, n);
  }
  uint64_t bytes = kv_type_bytes(type);
  if (!bytes)
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: key '%.*s' has value type %" PRIu32 ", expected one of 0 to 12%s",
                   c->gguf->name, clip(key), key.data, type, type == M3_KV_ARRAY ? " and no array of arrays" : "");
  if (n > left(c) / bytes) return truncated(c, n > UINT64_MAX / bytes ? UINT64_MAX : n * bytes, "the value of a key");
  e->kv.data = c->gguf->bytes + c->at;
  c->at += n * bytes;
  return M3_OK;
}

static m3_status take_kv(cursor *c, kv_entry *e) {
  uint32_t type = 0;
  m3_status status = take_string(c, &e->kv.key, "a key");
  if (status) return status;
  if (e->kv.key.size == 0 || e->kv.key.size > MAX_KEY)
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: a key of %" PRIu64 " bytes before byte %" PRIu64 ", expected 1 to %u",
                   c->gguf->name, e->kv.key.size, c->at, MAX_KEY);
  if (!is_clean(e->kv.key))
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: key '%.*s' has control characters", c->gguf->name, clip(e->kv.key),
                   e->kv.key.data);
  status = take(c, &type, 4, "the type of a key");
  if (status) return status;
  e->kv.type = (int32_t)type;
  uint64_t n = 1;
  if (type == M3_KV_ARRAY) {
    status = take(c, &type, 4, "the element type of an array");
    if (status) return status;
    status = take(c, &n, 8, "the length of an array");
    if (status) return status;
  }
  return take_values(c, e, type, n);
}

static m3_status take_tensor(cursor *c, m3_tensor *t) {
  const char *file = c->gguf->name;
  m3_status status = take_string(c, &t->name, "a tensor name");
  if (status) return status;
  m3_string name = t->name;
  if (name.size == 0 || name.size > MAX_TENSOR_NAME)
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: a tensor name of %" PRIu64 " bytes, expected 1 to %u", file, name.size,
                   MAX_TENSOR_NAME);
  if (!is_clean(name))
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: tensor '%.*s' has control characters in its name", file, clip(name),
                   name.data);
  uint32_t n_dims = 0, type = 0;
  status = take(c, &n_dims, 4, "the dimensions of a tensor");
  if (status) return status;
  if (n_dims < 1 || n_dims > M3_MAX_DIMS)
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: tensor '%.*s' has %" PRIu32 " dimensions, expected 1 to %d", file,
                   clip(name), name.data, n_dims, M3_MAX_DIMS);
  t->n_dims = (int32_t)n_dims;
  uint64_t elements = 1;
  for (uint32_t d = 0; d < M3_MAX_DIMS; d++) {
    uint64_t ne = 1;
    if (d < n_dims) {
      status = take(c, &ne, 8, "the dimensions of a tensor");
      if (status) return status;
    }
    if (ne == 0 || ne > INT64_MAX || !m3_mul_u64(elements, ne, &elements) || elements > INT64_MAX)
      return m3_fail(c->err, M3_ERROR_FORMAT,
                     "%s: tensor '%.*s': dimension %" PRIu32 " of %" PRIu64 " is zero or makes more elements than 2^63",
                     file, clip(name), name.data, d, ne);
    t->ne[d] = (int64_t)ne;
  }
  status = take(c, &type, 4, "the type of a tensor");
  if (status) return status;
  status = take(c, &t->offset, 8, "the offset of a tensor");
  if (status) return status;
  t->type = (int32_t)type;
  if (!m3_traits(t->type)) {
    const char *known = m3_any_type_name(t->type);
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: tensor '%.*s' has %s type %s (%" PRIu32 "), which cannot be read",
                   file, clip(name), name.data, known ? "the" : "an unknown", known ? known : "number", type);
  }
  if (t->ne[0] % m3_type_block_size(t->type))
    return m3_fail(c->err, M3_ERROR_FORMAT,
                   "%s: tensor '%.*s': rows of %" PRId64 " elements cannot be %s, blocks hold %" PRId64, file,
                   clip(name), name.data, t->ne[0], m3_type_name(t->type), m3_type_block_size(t->type));
  int64_t row = m3_row_bytes(t->type, t->ne[0]);
  if (row < 0 || !m3_mul_u64((uint64_t)row, elements / (uint64_t)t->ne[0], &t->n_bytes))
    return m3_fail(c->err, M3_ERROR_FORMAT, "%s: tensor '%.*s' is larger than 2^64 bytes", file, clip(name), name.data);
  return M3_OK;
}

/* ---------------------------------------------------------------------------------------------- ordering */

static int compare_strings(m3_string a, m3_string b) {
  int order = memcmp(a.data, b.data, a.size < b.size ? a.size : b.size);
  return order ? order : (a.size > b.size) - (a.size < b.size);
}

static int by_key(const void *a, const void *b) {
  return compare_strings((*(const kv_entry *const *)a)->kv.key, (*(const kv_entry *const *)b)->kv.key);
}

static int by_name(const void *a, const void *b) {
  return compare_strings((*(const m3_tensor *const *)a)->name, (*(const m3_tensor *const *)b)->name);
}

static int by_offset(const void *a, const void *b) {
  uint64_t x = (*(const m3_tensor *const *)a)->offset, y = (*(const m3_tensor *const *)b)->offset;
  return (x > y) - (x < y);
}

static m3_status index_keys(m3_gguf *g, m3_error *err) {
  g->kv_by_key = calloc(g->n_kv + 1, sizeof *g->kv_by_key);
  if (!g->kv_by_key) return m3_fail_memory(err, g->n_kv * sizeof *g->kv_by_key, "the key index");
  for (uint64_t i = 0; i < g->n_kv; i++) g->kv_by_key[i] = &g->kv[i];
  qsort(g->kv_by_key, g->n_kv, sizeof *g->kv_by_key, by_key);
  for (uint64_t i = 1; i < g->n_kv; i++) {
    m3_string key = g->kv_by_key[i]->kv.key;
    if (compare_strings(key, g->kv_by_key[i - 1]->kv.key) == 0)
      return m3_fail(err, M3_ERROR_FORMAT, "%s: key '%.*s' stands twice", g->name, clip(key), key.data);
  }
  return M3_OK;
}

static m3_status index_tensors(m3_gguf *g, m3_error *err) {
  g->tensors_by_name = calloc(g->n_tensors + 1, sizeof *g->tensors_by_name);
  if (!g->tensors_by_name) return m3_fail_memory(err, g->n_tensors * sizeof *g->tensors_by_name, "the tensor index");
  for (uint64_t i = 0; i < g->n_tensors; i++) g->tensors_by_name[i] = &g->tensors[i];
  qsort(g->tensors_by_name, g->n_tensors, sizeof *g->tensors_by_name, by_name);
  for (uint64_t i = 1; i < g->n_tensors; i++) {
    const m3_tensor *a = g->tensors_by_name[i - 1], *b = g->tensors_by_name[i];
    if (compare_strings(a->name, b->name) != 0) continue;
    if (a->file == b->file)
      return m3_fail(err, M3_ERROR_FORMAT, "%s: tensor '%.*s' stands twice", g->name, clip(a->name), a->name.data);
    return m3_fail(err, M3_ERROR_FORMAT, "%s: tensor '%.*s' stands in %s as well", m3_gguf_file_name(g, a->file),
                   clip(a->name), a->name.data, m3_gguf_file_name(g, b->file));
  }
  return M3_OK;
}

/* ---------------------------------------------------------------------------------------------- placement */

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

static m3_status place_tensor(const m3_gguf *g, m3_tensor *t, m3_error *err) {
  m3_string name = t->name;
  if (t->offset % g->alignment)
    return m3_fail(err, M3_ERROR_FORMAT, "%s: tensor '%.*s' at offset %" PRIu64 " is not aligned to %" PRIu64, g->name,
                   clip(name), name.data, t->offset, g->alignment);
  uint64_t start, end;
  if (!m3_add_u64(g->data_start, t->offset, &start) || !m3_add_u64(start, t->n_bytes, &end) ||
      (g->has_data && end > g->size))
    return m3_fail(err, M3_ERROR_FORMAT,
                   "%s: truncated or broken: tensor '%.*s' needs %" PRIu64 " bytes at offset %" PRIu64
                   " of the data, which starts at byte %" PRIu64 "; the file has %" PRIu64 " bytes",
                   g->name, clip(name), name.data, t->n_bytes, t->offset, g->data_start, g->size);
  return M3_OK;
}

static m3_status place_tensors(m3_gguf *g, uint64_t header_end, m3_error *err) {
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
      status = m3_fail(
          err, M3_ERROR_FORMAT,
          "%s: tensors '%.*s' and '%.*s' overlap: the first ends at %" PRIu64 ", the second starts at %" PRIu64,
          g->name, clip(a), a.data, clip(b), b.data, order[i - 1]->offset + order[i - 1]->n_bytes, order[i]->offset);
  }
  free(order);
  if (status) return status;
  for (uint64_t i = 0; i < g->n_tensors; i++) {
    if (g->has_data) g->tensors[i].data = g->bytes + g->data_start + g->tensors[i].offset;
    g->tensors[i].offset = g->has_data ? g->data_start + g->tensors[i].offset : 0;
  }
  return M3_OK;
}

/* A header has no neighbors to read the rest from. */
static m3_status refuse_split(const m3_gguf *g, m3_error *err) {
  if (g->has_data || !m3_gguf_find_kv(g, "split.count")) return M3_OK;
  int64_t files;
  m3_status status = m3_gguf_i64(g, "split.count", &files, err);
  if (status || files <= 1) return status;
  return m3_fail(err, M3_ERROR_MODEL,
                 "%s: the header of one of %" PRId64 " files (split.count), expected one of a whole", g->name, files);
}

static m3_status parse(m3_gguf *g, m3_error *err) {
  cursor c = {g, 0, err};
  unsigned char magic[4];
  uint32_t version = 0;
  m3_status status = take(&c, magic, 4, "the magic");
  if (status) return status;
  if (memcmp(magic, "GGUF", 4) != 0)
    return m3_fail(err, M3_ERROR_FORMAT, "%s: not a GGUF file: it starts with %02x %02x %02x %02x, expected 'GGUF'",
                   g->name, magic[0], magic[1], magic[2], magic[3]);
  status = take(&c, &version, 4, "the version");
  if (status) return status;
  if (version != 3)
    return m3_fail(err, M3_ERROR_FORMAT, "%s: GGUF version %" PRIu32 "%s, expected 3", g->name, version,
                   version == 0x03000000 ? " (a big-endian file)" : "");
  uint64_t n_tensors = 0, n_kv = 0;
  status = take(&c, &n_tensors, 8, "the tensor count");
  if (status) return status;
  status = take(&c, &n_kv, 8, "the key count");
  if (status) return status;
  if (n_kv > M3_MAX_KEYS || n_tensors > M3_MAX_TENSORS)
    return m3_fail(err, M3_ERROR_FORMAT, "%s: %" PRIu64 " keys and %" PRIu64 " tensors, expected at most %d and %d",
                   g->name, n_kv, n_tensors, M3_MAX_KEYS, M3_MAX_TENSORS);
  g->kv = calloc(n_kv + 1, sizeof *g->kv);
  g->tensors = calloc(n_tensors + 1, sizeof *g->tensors);
  if (!g->kv || !g->tensors)
    return m3_fail_memory(err, n_kv * sizeof *g->kv + n_tensors * sizeof *g->tensors, "the GGUF header");
  for (; g->n_kv < n_kv; g->n_kv++) {
    status = take_kv(&c, &g->kv[g->n_kv]);
    if (status) {
      g->n_kv++; /* its strings may have been allocated */
      return status;
    }
  }
  status = index_keys(g, err);
  if (status) return status;
  status = read_alignment(g, err);
  if (status) return status;
  for (; g->n_tensors < n_tensors; g->n_tensors++) {
    status = take_tensor(&c, &g->tensors[g->n_tensors]);
    if (status) return status;
  }
  status = index_tensors(g, err);
  if (status) return status;
  status = refuse_split(g, err);
  if (status) return status;
  return place_tensors(g, c.at, err);
}

/* ---------------------------------------------------------------------------------------------- open, close */

static m3_gguf *new_gguf(const char *name) {
  m3_gguf *g = calloc(1, sizeof *g);
  if (g) g->name = strdup(name);
  if (g && !g->name) {
    free(g);
    g = NULL;
  }
  return g;
}

static m3_status map_file(m3_gguf *g, m3_error *err) {
  /* O_NONBLOCK: opening a pipe must not wait for its writer; it has no effect on files. */
  int fd = open(g->name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return m3_fail(err, M3_ERROR_IO, "%s: cannot be opened: %s", g->name, strerror(errno));
  struct stat st;
  m3_status status = M3_OK;
  if (fstat(fd, &st) != 0)
    status = m3_fail(err, M3_ERROR_IO, "%s: cannot be read: %s", g->name, strerror(errno));
  else if (!S_ISREG(st.st_mode))
    status = m3_fail(err, M3_ERROR_IO, "%s: is %s, expected a GGUF file", g->name,
                     S_ISDIR(st.st_mode) ? "a folder" : "not a regular file");
  else if (st.st_size < 24)
    status = m3_fail(err, M3_ERROR_FORMAT, "%s: truncated: %lld bytes, a GGUF header needs 24", g->name,
                     (long long)st.st_size);
  if (!status) {
    g->size = (uint64_t)st.st_size;
    void *p = mmap(NULL, g->size, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
      status = m3_fail(err, errno == ENOMEM ? M3_ERROR_MEMORY : M3_ERROR_IO,
                       "%s: cannot be mapped (%" PRIu64 " bytes): %s", g->name, g->size, strerror(errno));
    else
      g->bytes = p, g->mapped = true;
  }
  close(fd);
  return status;
}

m3_status m3_gguf_open_file(const char *path, m3_gguf **out, m3_error *err) {
  *out = NULL;
  m3_gguf *g = new_gguf(path);
  if (!g) return m3_fail_memory(err, sizeof *g, "a GGUF reader");
  g->has_data = true;
  m3_status status = map_file(g, err);
  if (!status) status = parse(g, err);
  if (status) {
    m3_gguf_close(g);
    return status;
  }
  *out = g;
  return M3_OK;
}

m3_status m3_gguf_join(m3_gguf *g, m3_gguf **others, int64_t n, m3_error *err) {
  g->others = others;
  g->n_others = n;
  uint64_t total = g->n_tensors;
  for (int64_t i = 0; i < n; i++) total += others[i]->n_tensors; /* each at most M3_MAX_TENSORS, n small */
  if (total > M3_MAX_TENSORS)
    return m3_fail(err, M3_ERROR_FORMAT, "%s: %" PRIu64 " tensors in %" PRId64 " files, expected at most %d", g->name,
                   total, n + 1, M3_MAX_TENSORS);
  m3_tensor *tensors = realloc(g->tensors, (total + 1) * sizeof *tensors);
  if (!tensors) return m3_fail_memory(err, (total + 1) * sizeof *tensors, "the tensors of several files");
  g->tensors = tensors;
  for (int64_t i = 0; i < n; i++)
    for (uint64_t t = 0; t < others[i]->n_tensors; t++) {
      m3_tensor *joined = &g->tensors[g->n_tensors++];
      *joined = others[i]->tensors[t];
      joined->file = (int32_t)(i + 1);
    }
  free(g->tensors_by_name);
  g->tensors_by_name = NULL;
  return index_tensors(g, err);
}

m3_status m3_gguf_parse_header(const void *bytes, uint64_t n_bytes, const char *name, m3_gguf **out, m3_error *err) {
  if (!out) return m3_fail(err, M3_ERROR_ARGUMENT, "m3_gguf_parse_header: out is NULL");
  *out = NULL;
  if (!bytes || !name) return m3_fail(err, M3_ERROR_ARGUMENT, "m3_gguf_parse_header: bytes or name is NULL");
  m3_gguf *g = new_gguf(name);
  if (!g) return m3_fail_memory(err, sizeof *g, "a GGUF reader");
  unsigned char *copy = malloc(n_bytes ? n_bytes : 1);
  if (!copy) {
    m3_gguf_close(g);
    return m3_fail_memory(err, n_bytes, "a GGUF header");
  }
  memcpy(copy, bytes, n_bytes);
  g->bytes = copy;
  g->size = n_bytes;
  m3_status status = parse(g, err);
  if (status) {
    m3_gguf_close(g);
    return status;
  }
  *out = g;
  return M3_OK;
}

void m3_gguf_close(m3_gguf *g) {
  if (!g) return;
  for (int64_t i = 0; i < g->n_others; i++) m3_gguf_close(g->others[i]);
  free(g->others);
  for (uint64_t i = 0; g->kv && i < g->n_kv; i++) free(g->kv[i].strings);
  free(g->kv);
  free(g->tensors);
  free(g->kv_by_key);
  free(g->tensors_by_name);
  if (g->mapped)
    munmap((void *)(uintptr_t)g->bytes, g->size);
  else
    free((void *)(uintptr_t)g->bytes);
  free(g->name);
  free(g);
}

/* ---------------------------------------------------------------------------------------------- access */

int64_t m3_gguf_n_kv(const m3_gguf *g) { return (int64_t)g->n_kv; }
int64_t m3_gguf_n_tensors(const m3_gguf *g) { return (int64_t)g->n_tensors; }
int64_t m3_gguf_n_files(const m3_gguf *g) { return 1 + g->n_others; }

const char *m3_gguf_file_name(const m3_gguf *g, int64_t i) {
  if (i < 0 || i > g->n_others) return NULL;
  return i ? g->others[i - 1]->name : g->name;
}

uint64_t m3_gguf_file_bytes(const m3_gguf *g) {
  uint64_t bytes = g->size;
  for (int64_t i = 0; i < g->n_others; i++) bytes += g->others[i]->size;
  return bytes;
}

const char *m3_gguf_name(const m3_gguf *g) { return g->name; }
bool m3_gguf_has_data(const m3_gguf *g) { return g->has_data; }

const m3_kv *m3_gguf_kv(const m3_gguf *g, int64_t i) { return i >= 0 && (uint64_t)i < g->n_kv ? &g->kv[i].kv : NULL; }

const m3_tensor *m3_gguf_tensor(const m3_gguf *g, int64_t i) {
  return i >= 0 && (uint64_t)i < g->n_tensors ? &g->tensors[i] : NULL;
}

const m3_kv *m3_gguf_find_kv(const m3_gguf *g, const char *key) {
  kv_entry wanted = {.kv = {.key = {key, strlen(key)}}};
  const kv_entry *p = &wanted, **found = bsearch(&p, g->kv_by_key, g->n_kv, sizeof *g->kv_by_key, by_key);
  return found ? &(*found)->kv : NULL;
}

const m3_tensor *m3_gguf_find_tensor(const m3_gguf *g, const char *name) {
  m3_tensor wanted = {.name = {name, strlen(name)}};
  const m3_tensor *p = &wanted;
  const m3_tensor **found = bsearch(&p, g->tensors_by_name, g->n_tensors, sizeof *g->tensors_by_name, by_name);
  return found ? *found : NULL;
}

bool m3_string_is(m3_string s, const char *text) { return s.size == strlen(text) && memcmp(s.data, text, s.size) == 0; }

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

m3_status m3_gguf_str(const m3_gguf *g, const char *key, m3_string *out, m3_error *err) {
  const m3_kv *kv;
  m3_status status = find_scalar(g, key, &kv, err);
  if (status) return status;
  if (kv->type != M3_KV_STRING) return wrong_type(g, key, "8 (string)", kv, err);
  *out = kv->strings[0];
  return M3_OK;
}
