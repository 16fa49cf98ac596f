/* The GGUF reader and the model loader on damaged files: they answer with an error or, where the damage does not
 * matter, with a model; they never read outside the bytes (this runs under AddressSanitizer). */
#include "tiny_file.h"

static char path[64];

/* Opens the bytes as a file and as a header; a failure must carry a code and one line that names the file. */
static m3_status open_bytes(const void *data, size_t n) {
  m3_error err = {0};
  m3_model *model;
  write_file(path, data, n);
  m3_status status = m3_model_open(path, NULL, &model, &err);
  if (status) {
    CHECK(err.code == (int32_t)status && strstr(err.message, "m3-reader") && !strchr(err.message, '\n') && !model,
          "bad report: %d '%s'", err.code, err.message);
  }
  m3_model_close(model);
  m3_model *from_header;
  if (m3_model_open_header(data, n, "header", NULL, &from_header, NULL) == M3_OK) m3_model_close(from_header);
  return status;
}

static void check_whole(const tiny_file *t) {
  m3_error err;
  m3_gguf *g;
  CHECK(open_bytes(t->file.data, t->file.size) == M3_OK, "the undamaged file");
  CHECK(m3_gguf_open(path, &g, &err) == M3_OK, "%s", err.message);
  CHECK(m3_gguf_n_tensors(g) == t->n_tensors && m3_gguf_n_kv(g) == N_TINY_KEYS, "counts");
  for (int i = 0; i < t->n_tensors; i++) {
    const m3_tensor *x = m3_gguf_find_tensor(g, t->tensors[i].name);
    CHECK(x && x->n_bytes == t->tensors[i].n_bytes && x->offset == t->data_start + t->tensors[i].offset &&
              memcmp(x->data, t->file.data + x->offset, x->n_bytes) == 0,
          "tensor %s", t->tensors[i].name);
  }
  CHECK(!m3_gguf_find_tensor(g, "blk.9.attn_q.weight") && !m3_gguf_find_kv(g, "none") && !m3_gguf_kv(g, -1) &&
            !m3_gguf_kv(g, N_TINY_KEYS) && !m3_gguf_tensor(g, t->n_tensors),
        "absent things are found");
  m3_gguf_close(g);
}

/* Every shorter file is refused: all lengths through the header, then a sample of the data. */
static void check_truncations(const tiny_file *t) {
  for (size_t n = 0; n < t->file.size; n += n < t->data_start ? 1 : 977)
    CHECK(open_bytes(t->file.data, n) != M3_OK, "a file cut to %zu bytes was accepted", n);
  CHECK(open_bytes(t->file.data, t->file.size - 1) != M3_OK, "a file one byte short was accepted");
}

/* Random damage to the header: any answer, no crash. Deterministic. */
static void check_damage(const tiny_file *t) {
  static const uint64_t values[] = {0,           1,           0x7f,       0xff,  1u << 30,
                                    0x7fffffffu, 0xffffffffu, 1ull << 63, ~0ull, ~0ull - 31};
  unsigned char *copy = malloc(t->file.size);
  uint64_t seed = 3;
  int refused = 0;
  for (int round = 0; round < 3000; round++) {
    memcpy(copy, t->file.data, t->file.size);
    for (int k = 0; k <= round % 3; k++) {
      size_t at = next_random(&seed) % (t->header_bytes - 8);
      uint64_t value = values[next_random(&seed) % 10];
      size_t width = (size_t)1 << next_random(&seed) % 4;
      if (round % 2)
        copy[at] = (unsigned char)next_random(&seed);
      else
        memcpy(copy + at, &value, width);
    }
    refused += open_bytes(copy, t->file.size) != M3_OK;
  }
  CHECK(refused > 1000, "only %d of 3000 damaged files were refused", refused);
  free(copy);
}

int main(void) {
  tiny_file t;
  make_tiny_file(&t);
  new_path(path, sizeof path, "m3-reader");
  check_whole(&t);
  check_truncations(&t);
  check_damage(&t);
  m3_error err;
  m3_model *model = (m3_model *)&t;
  CHECK(m3_model_open("/nowhere/m3-reader", NULL, &model, &err) == M3_ERROR_IO && !model, "%s", err.message);
  CHECK(m3_model_open(P_tmpdir, NULL, &model, &err) == M3_ERROR_IO, "%s", err.message);
  write_file(path, t.file.data, t.file.size);
  m3_model_options options = {.struct_size = 3};
  CHECK(m3_model_open(path, &options, &model, &err) == M3_ERROR_ARGUMENT, "%s", err.message);
  options = (m3_model_options){.struct_size = sizeof options, .device = M3_DEVICE_CUDA};
  CHECK(m3_model_open(path, &options, &model, &err) == M3_ERROR_UNSUPPORTED, "%s", err.message);
  options = (m3_model_options){.struct_size = sizeof options, .device = M3_DEVICE_CPU, .load = 2};
  CHECK(m3_model_open(path, &options, &model, &err) == M3_ERROR_ARGUMENT, "%s", err.message);
  options.load = M3_LOAD_READ;
  CHECK(m3_model_open_header(t.file.data, t.file.size, "header", &options, &model, &err) == M3_ERROR_ARGUMENT, "%s",
        err.message);
  CHECK(m3_model_open(path, &options, &model, &err) == M3_OK && m3_model_load(model, 0, 0, &err) == M3_OK, "%s",
        err.message);
  CHECK(strcmp(m3_model_product_path(model, M3_TYPE_F32), "device") != 0 && !m3_model_product_path(model, 999),
        "path of F32: %s", m3_model_product_path(model, M3_TYPE_F32));
  m3_model_close(model);
  unlink(path);
  free(t.file.data);
  return finish("test_reader");
}
