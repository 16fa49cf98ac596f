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

#include "gguf_header.h"

/* ---------------------------------------------------------------------------------------------- reading */

m3_status m3_truncated(const m3_cursor *c, uint64_t need, const char *what) {
  return m3_fail(c->err, M3_ERROR_FORMAT,
                 "%s: truncated or broken: %s at byte %" PRIu64 " needs %" PRIu64 " bytes, the %s has %" PRIu64 " left",
                 c->gguf->name, what, c->at, need, c->gguf->has_data ? "file" : "header", m3_left(c));
}

m3_status m3_take(m3_cursor *c, void *dst, uint64_t n, const char *what) {
  if (m3_left(c) < n) return m3_truncated(c, n, what);
  memcpy(dst, c->gguf->bytes + c->at, n);
  c->at += n;
  return M3_OK;
}

m3_status m3_take_string(m3_cursor *c, m3_string *out, const char *what) {
  m3_status status = m3_take(c, &out->size, 8, what);
  if (status) return status;
  if (m3_left(c) < out->size) return m3_truncated(c, out->size, what);
  out->data = (const char *)c->gguf->bytes + c->at;
  c->at += out->size;
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
  m3_cursor c = {g, 0, err};
  unsigned char magic[4];
  uint32_t version = 0;
  m3_status status = m3_take(&c, magic, 4, "the magic");
  if (status) return status;
  if (memcmp(magic, "GGUF", 4) != 0)
    return m3_fail(err, M3_ERROR_FORMAT, "%s: not a GGUF file: it starts with %02x %02x %02x %02x, expected 'GGUF'",
                   g->name, magic[0], magic[1], magic[2], magic[3]);
  status = m3_take(&c, &version, 4, "the version");
  if (status) return status;
  if (version != 3)
    return m3_fail(err, M3_ERROR_FORMAT, "%s: GGUF version %" PRIu32 "%s, expected 3", g->name, version,
                   version == 0x03000000 ? " (a big-endian file)" : "");
  uint64_t n_tensors = 0, n_kv = 0;
  status = m3_take(&c, &n_tensors, 8, "the tensor count");
  if (status) return status;
  status = m3_take(&c, &n_kv, 8, "the key count");
  if (status) return status;
  if (n_kv > M3_MAX_KEYS || n_tensors > M3_MAX_TENSORS)
    return m3_fail(err, M3_ERROR_FORMAT, "%s: %" PRIu64 " keys and %" PRIu64 " tensors, expected at most %d and %d",
                   g->name, n_kv, n_tensors, M3_MAX_KEYS, M3_MAX_TENSORS);
  status = m3_read_keys(g, &c, n_kv);
  if (status) return status;
  status = m3_read_tensors(g, &c, n_tensors);
  if (status) return status;
  status = refuse_split(g, err);
  if (status) return status;
  return m3_place_tensors(g, c.at, err);
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
    g->device = st.st_dev;
    g->inode = st.st_ino;
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
  return m3_index_tensors(g, err);
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
  m3_free_keys(g);
  free(g->tensors);
  free(g->tensors_by_name);
  if (g->mapped)
    munmap((void *)(uintptr_t)g->bytes, g->size);
  else
    free((void *)(uintptr_t)g->bytes);
  free(g->name);
  free(g);
}

/* ---------------------------------------------------------------------------------------------- access */

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

bool m3_string_is(m3_string s, const char *text) { return s.size == strlen(text) && memcmp(s.data, text, s.size) == 0; }
