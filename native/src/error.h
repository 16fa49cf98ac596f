/* error.h - filling an m3_error, and arithmetic that cannot wrap. */
#ifndef M3_SRC_ERROR_H
#define M3_SRC_ERROR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "m3.h"

#if defined(__GNUC__)
#define M3_PRINTF(fmt_index, first_arg) __attribute__((format(printf, fmt_index, first_arg)))
#else
#define M3_PRINTF(fmt_index, first_arg)
#endif

/* Fills err (may be NULL) with the code and one formatted line, and returns the code. Control characters in
 * the result become '?', so that a hostile name cannot write to a terminal; a line that is too long ends in "...". */
m3_status m3_fail(m3_error *err, m3_status code, const char *format, ...) M3_PRINTF(3, 4);

/* M3_ERROR_MEMORY with the size and purpose. */
m3_status m3_fail_memory(m3_error *err, uint64_t bytes, const char *purpose);

/* Products and sums of sizes; false if the result does not fit in 64 bits. */
static inline bool m3_mul_u64(uint64_t a, uint64_t b, uint64_t *out) { return !__builtin_mul_overflow(a, b, out); }
static inline bool m3_add_u64(uint64_t a, uint64_t b, uint64_t *out) { return !__builtin_add_overflow(a, b, out); }

/* Zeroed memory for n * size bytes, aligned to 64; NULL if it cannot be had. Freed with m3_free. */
void *m3_alloc(uint64_t n, uint64_t size);
void m3_free(void *p);

#endif
