/* gguf_header.h - a GGUF header while it is read, for gguf.c (file), gguf_keys.c (metadata) and gguf_tensors.c. */
#ifndef M3_SRC_GGUF_HEADER_H
#define M3_SRC_GGUF_HEADER_H

#include <string.h>

#include "gguf.h"

typedef struct m3_kv_entry {
  m3_kv kv;
  m3_string scalar;   /* what kv.strings points to for a single string */
  m3_string *strings; /* owned; for an array of strings */
} m3_kv_entry;

struct m3_gguf {
  char *name;
  const unsigned char *bytes; /* the mapping, or a copy of the header */
  uint64_t size;
  bool mapped;
  uint64_t device, inode; /* of the mapped file */
  bool has_data;
  m3_kv_entry *kv;
  m3_tensor *tensors;
  uint64_t n_kv, n_tensors;
  const m3_kv_entry **kv_by_key;     /* sorted, for look-up and to find duplicates */
  const m3_tensor **tensors_by_name; /* sorted likewise */
  uint64_t alignment;
  uint64_t data_start;
  m3_gguf **others; /* the files after this one, if it is the first of several; owned, tensors point into them */
  int64_t n_others;
};

/* Where the next value is read. */
typedef struct m3_cursor {
  const m3_gguf *gguf;
  uint64_t at;
  m3_error *err;
} m3_cursor;

static inline uint64_t m3_left(const m3_cursor *c) { return c->gguf->size - c->at; }

/* Copies the next n bytes; M3_ERROR_FORMAT if they are not there. `what` names them in the message. */
m3_status m3_take(m3_cursor *c, void *dst, uint64_t n, const char *what);

/* A string with its length before it; it points into the header. */
m3_status m3_take_string(m3_cursor *c, m3_string *out, const char *what);

/* The message about bytes that are not there. */
m3_status m3_truncated(const m3_cursor *c, uint64_t need, const char *what);

/* Keys and names end up in messages and in other programs: no control characters, and no NUL that would end them
 * early there. */
static inline bool m3_is_clean(m3_string s) {
  for (uint64_t i = 0; i < s.size; i++)
    if ((unsigned char)s.data[i] < 0x20 || s.data[i] == 0x7f) return false;
  return true;
}

/* Length for messages. */
static inline int m3_clip(m3_string s) { return s.size > 80 ? 80 : (int)s.size; }

/* Of bytes; a shorter string comes before those that it begins. */
static inline int m3_compare_strings(m3_string a, m3_string b) {
  int order = memcmp(a.data, b.data, a.size < b.size ? a.size : b.size);
  return order ? order : (a.size > b.size) - (a.size < b.size);
}

/* gguf_keys.c: reads n keys, indexes them, and reads the alignment. What was made belongs to the header, also after an
 * error, until m3_free_keys. */
m3_status m3_read_keys(m3_gguf *g, m3_cursor *c, uint64_t n);
void m3_free_keys(m3_gguf *g);

/* gguf_tensors.c: reads the infos of n tensors and indexes them; the table is freed with the header. */
m3_status m3_read_tensors(m3_gguf *g, m3_cursor *c, uint64_t n);

/* Orders the tensors by name; M3_ERROR_FORMAT if one stands twice. */
m3_status m3_index_tensors(m3_gguf *g, m3_error *err);

/* Checks where the tensors lie in the data, which follows the header, and turns offsets into addresses. */
m3_status m3_place_tensors(m3_gguf *g, uint64_t header_end, m3_error *err);

#endif
