/* gguf.h - typed look-up of metadata, for the readers of hparams and weights. */
#ifndef M3_SRC_GGUF_H
#define M3_SRC_GGUF_H

#include <stdbool.h>

#include "error.h"
#include "m3.h"

/* One file by itself, be it one of several or not. */
m3_status m3_gguf_open_file(const char *path, m3_gguf **out, m3_error *err);

/* Makes the tensors of `others` [n] tensors of the first file `gguf`, which owns array and files from then on, also if
 * this fails (then only close is left to do). M3_ERROR_FORMAT: a tensor stands twice, or there are too many. */
m3_status m3_gguf_join(m3_gguf *gguf, m3_gguf **others, int64_t n, m3_error *err);

/* Name of the file for messages, of the first one of several; valid until close. */
const char *m3_gguf_name(const m3_gguf *gguf);

/* True if the file holds tensor data (m3_gguf_open), false for a header only. */
bool m3_gguf_has_data(const m3_gguf *gguf);

/* Scalars by key. Any integer type of the file is taken if its value fits; M3_ERROR_MODEL if the key is
 * missing or has another type. */
m3_status m3_gguf_i64(const m3_gguf *gguf, const char *key, int64_t *out, m3_error *err);
m3_status m3_gguf_f32(const m3_gguf *gguf, const char *key, float *out, m3_error *err);
m3_status m3_gguf_str(const m3_gguf *gguf, const char *key, m3_string *out, m3_error *err);

/* The same in a range, and for a float above 0; M3_ERROR_MODEL with the value if it is not. */
m3_status m3_gguf_int(const m3_gguf *gguf, const char *key, int64_t low, int64_t high, int64_t *out, m3_error *err);
m3_status m3_gguf_positive(const m3_gguf *gguf, const char *key, float *out, m3_error *err);

/* strcmp of a string of the file with a NUL-terminated one. */
bool m3_string_is(m3_string s, const char *text);

#endif
