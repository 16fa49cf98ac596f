/* gguf.h - typed look-up of metadata, for the readers of hparams and weights. */
#ifndef M3_SRC_GGUF_H
#define M3_SRC_GGUF_H

#include <stdbool.h>

#include "error.h"
#include "m3.h"

/* Name of the file for messages; valid until close. */
const char *m3_gguf_name(const m3_gguf *gguf);

/* True if the file holds tensor data (m3_gguf_open), false for a header only. */
bool m3_gguf_has_data(const m3_gguf *gguf);

/* Scalars by key. Any integer type of the file is taken if its value fits; M3_ERROR_MODEL if the key is
 * missing or has another type. */
m3_status m3_gguf_i64(const m3_gguf *gguf, const char *key, int64_t *out, m3_error *err);
m3_status m3_gguf_f32(const m3_gguf *gguf, const char *key, float *out, m3_error *err);
m3_status m3_gguf_str(const m3_gguf *gguf, const char *key, m3_string *out, m3_error *err);

/* strcmp of a string of the file with a NUL-terminated one. */
bool m3_string_is(m3_string s, const char *text);

#endif
