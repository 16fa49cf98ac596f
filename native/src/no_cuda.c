/* In place of cuda/backend.cu where the library is built without CUDA. */
#include "backend.h"

m3_status m3_cuda_backend(const m3_backend **out, m3_error *err) {
  *out = NULL;
  return m3_fail(err, M3_ERROR_UNSUPPORTED, "device cuda: this library was built without CUDA; cpu works");
}
