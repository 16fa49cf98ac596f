#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

m3_status m3_fail(m3_error *err, m3_status code, const char *format, ...) {
  if (!err) return code;
  err->code = code;
  va_list args;
  va_start(args, format);
  int n = vsnprintf(err->message, sizeof err->message, format, args);
  va_end(args);
  if (n < 0) n = 0;
  if ((size_t)n >= sizeof err->message) {
    n = (int)sizeof err->message - 1;
    memcpy(err->message + n - 3, "...", 3);
  }
  for (int i = 0; i < n; i++) {
    unsigned char c = (unsigned char)err->message[i];
    if (c < 0x20 || c == 0x7f) err->message[i] = '?';
  }
  return code;
}

m3_status m3_fail_memory(m3_error *err, uint64_t bytes, const char *purpose) {
  return m3_fail(err, M3_ERROR_MEMORY, "not enough memory: %.1f MiB for %s could not be allocated",
                 (double)bytes / (1024.0 * 1024.0), purpose);
}

void *m3_alloc(uint64_t n, uint64_t size) {
  uint64_t bytes;
  if (!m3_mul_u64(n, size, &bytes) || bytes > SIZE_MAX - 64) return NULL;
  /* calloc leaves large blocks untouched by the kernel until they are written, which is what keeps an unused
   * cache free of cost; aligned_alloc plus memset would touch all of it. Hence the alignment by hand. */
  unsigned char *raw = calloc(1, (size_t)bytes + 64 + sizeof(void *));
  if (!raw) return NULL;
  uintptr_t p = ((uintptr_t)raw + sizeof(void *) + 63) & ~(uintptr_t)63;
  memcpy((void *)(p - sizeof(void *)), &raw, sizeof(void *));
  return (void *)p;
}

void m3_free(void *p) {
  if (!p) return;
  void *raw;
  memcpy(&raw, (unsigned char *)p - sizeof(void *), sizeof(void *));
  free(raw);
}
