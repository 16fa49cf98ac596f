/* Vision files that are damaged, batches that do not fit, broken numbers: answered with an error, and nothing is read
 * or written out of bounds (this runs under AddressSanitizer). What the tower computes is tested in tests/golden. */
#include "tiny_file.h"

enum { EMBD = 32, HEAD = 2, FF = 64, INNER = 40, OUT = 24, PATCH = 2, LAYERS = 2, VALUES = 3 * 2 * PATCH * PATCH };

static char path[64];

static void add_affine(tiny_file *t, const char *name, uint64_t in, uint64_t out) {
  char full[64];
  snprintf(full, sizeof full, "%s.weight", name);
  if (in)
    add_tensor(t, full, in, out, 0);
  else
    add_tensor(t, full, out, 0, 0);
  snprintf(full, sizeof full, "%s.bias", name);
  add_tensor(t, full, out, 0, 0);
}

static void put_key_string(bytes *b, const char *key, const char *value) {
  put_string(b, key);
  put_u32(b, M3_KV_STRING);
  put_string(b, value);
}

static void put_channels(bytes *b, const char *key, float value) {
  put_string(b, key);
  put_u32(b, M3_KV_ARRAY);
  put_u32(b, M3_KV_F32);
  put_u64(b, 3);
  for (int i = 0; i < 3; i++) put(b, &value, 4);
}

static void put_vision_keys(bytes *b) {
  put_key_string(b, "general.architecture", "clip");
  put_key_string(b, "clip.projector_type", "minimax_m3");
  put_key_u32(b, "clip.has_vision_encoder", 1);
  put_key_u32(b, "clip.use_gelu", 1);
  put_key_u32(b, "clip.vision.block_count", LAYERS);
  put_key_u32(b, "clip.vision.embedding_length", EMBD);
  put_key_u32(b, "clip.vision.feed_forward_length", FF);
  put_key_u32(b, "clip.vision.attention.head_count", HEAD);
  put_key_u32(b, "clip.vision.projection_dim", OUT);
  put_key_u32(b, "clip.vision.patch_size", PATCH);
  put_key_u32(b, "clip.vision.spatial_merge_size", 2);
  put_key_f32(b, "clip.vision.attention.layer_norm_epsilon", 1e-5f);
  put_channels(b, "clip.vision.image_mean", 0.5f);
  put_channels(b, "clip.vision.image_std", 0.25f);
}

enum { N_VISION_KEYS = 14 };

static void add_layers(tiny_file *t) {
  char name[64];
  static const struct {
    const char *name;
    uint64_t in, out;
  } parts[] = {{"ln1", 0, EMBD},       {"ln2", 0, EMBD},         {"attn_q", EMBD, EMBD}, {"attn_k", EMBD, EMBD},
               {"attn_v", EMBD, EMBD}, {"attn_out", EMBD, EMBD}, {"ffn_up", EMBD, FF},   {"ffn_down", FF, EMBD}};
  for (int layer = 0; layer < LAYERS; layer++)
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
      snprintf(name, sizeof name, "v.blk.%d.%s", layer, parts[i].name);
      add_affine(t, name, parts[i].in, parts[i].out);
    }
}

/* The patch embeddings have four dimensions, which a tiny_tensor does not hold: n_dims 4 stands for [PATCH, PATCH, 3,
 * EMBD]. */
static void add_patch(tiny_file *t, const char *name) {
  add_tensor(t, name, PATCH * PATCH * 3, EMBD, 0);
  t->tensors[t->n_tensors - 1].n_dims = 4;
}

static void make_vision_file(tiny_file *t) {
  memset(t, 0, sizeof *t);
  add_affine(t, "mm.1", EMBD, INNER);
  add_affine(t, "mm.2", INNER, OUT);
  add_affine(t, "mm.merger.fc1", 4 * OUT, INNER + 8);
  add_affine(t, "mm.merger.fc2", INNER + 8, OUT);
  add_patch(t, "v.patch_embd.weight");
  add_patch(t, "v.patch_embd.weight.1");
  add_layers(t);
  add_affine(t, "v.pre_ln", 0, EMBD);
  bytes *b = &t->file;
  put(b, "GGUF", 4);
  put_u32(b, 3);
  put_u64(b, (uint64_t)t->n_tensors);
  put_u64(b, N_VISION_KEYS);
  put_vision_keys(b);
  uint64_t offset = 0;
  for (int i = 0; i < t->n_tensors; i++) {
    tiny_tensor *x = &t->tensors[i];
    const uint64_t four[] = {PATCH, PATCH, 3, EMBD};
    put_string(b, x->name);
    put_u32(b, x->n_dims);
    for (uint32_t d = 0; d < x->n_dims; d++) put_u64(b, x->n_dims == 4 ? four[d] : x->ne[d]);
    put_u32(b, M3_TYPE_F32);
    put_u64(b, offset);
    x->offset = offset;
    offset += (x->n_bytes + 31) / 32 * 32;
  }
  t->header_bytes = b->size;
  while (b->size % 32) put(b, "", 1);
  t->data_start = b->size;
  put_data(t);
}

static m3_status open_bytes(const void *data, size_t n) {
  m3_error err = {0};
  m3_vision *v;
  write_file(path, data, n);
  m3_status status = m3_vision_open(path, NULL, &v, &err);
  if (status)
    CHECK(err.code == (int32_t)status && strstr(err.message, "m3-vision") && !strchr(err.message, '\n') && !v,
          "bad report: %d '%s'", err.code, err.message);
  m3_vision_close(v);
  return status;
}

static void check_damage(const tiny_file *t) {
  for (size_t n = 0; n < t->file.size; n += n < t->data_start ? 7 : 1777)
    CHECK(open_bytes(t->file.data, n) != M3_OK, "a file cut to %zu bytes was accepted", n);
  static const uint64_t values[] = {0, 1, 0x7f, 1u << 30, 0xffffffffu, 1ull << 63, ~0ull};
  unsigned char *copy = malloc(t->file.size);
  uint64_t seed = 5;
  int refused = 0;
  for (int round = 0; round < 700; round++) {
    memcpy(copy, t->file.data, t->file.size);
    size_t at = next_random(&seed) % (t->header_bytes - 8);
    uint64_t value = values[next_random(&seed) % 7];
    memcpy(copy + at, &value, (size_t)1 << next_random(&seed) % 4);
    refused += open_bytes(copy, t->file.size) != M3_OK;
  }
  CHECK(refused > 300, "only %d of 700 damaged files were refused", refused);
  free(copy);
}

/* Two images and a clip. */
static const m3_vision_grid grids[] = {{1, 2, 2}, {1, 12, 14}, {2, 4, 6}};
enum { PATCHES = 4 + 168 + 48, TOKENS = PATCHES / 4 };

static float pixels[PATCHES * VALUES], out[TOKENS * OUT], again[TOKENS * OUT];

static m3_vision_batch whole(float *to, int32_t threads) {
  return (m3_vision_batch){sizeof(m3_vision_batch), threads, 3, grids, pixels, PATCHES * VALUES, to, TOKENS * OUT};
}

static void refuse(m3_vision *v, m3_vision_batch b, m3_status wanted, const char *what) {
  m3_error err = {0};
  m3_status status = m3_vision_encode(v, &b, &err);
  CHECK(status == wanted && strstr(err.message, what), "status %d '%s', expected '%s'", (int)status, err.message, what);
}

static void check_encode(m3_vision *v) {
  m3_error err = {0};
  uint64_t seed = 9;
  for (int i = 0; i < PATCHES * VALUES; i++) pixels[i] = random_float(&seed);
  m3_vision_batch b = whole(out, 1);
  CHECK(m3_vision_encode(v, &b, &err) == M3_OK, "%s", err.message);
  b = whole(again, 2);
  CHECK(m3_vision_encode(v, &b, &err) == M3_OK && !memcmp(out, again, sizeof out), "threads change the result");
  double squares = 0;
  for (int i = 0; i < TOKENS * OUT; i++) squares += (double)out[i] * out[i];
  CHECK(squares > 1, "tokens are %g", squares);
}

static void check_batches(m3_vision *v) {
  m3_vision_batch b = whole(out, 1);
  b.struct_size = 3;
  refuse(v, b, M3_ERROR_ARGUMENT, "m3_vision_batch has 3 bytes");
  b = whole(out, 1), b.n_images = 0;
  refuse(v, b, M3_ERROR_ARGUMENT, "a batch of 0 images");
  b = whole(out, 1), b.n_images = 2;
  refuse(v, b, M3_ERROR_ARGUMENT, "pixels: 5280 values, expected 4128 in 172 patches");
  b = whole(out, 1), b.pixels = NULL;
  refuse(v, b, M3_ERROR_ARGUMENT, "pixels: 0 values");
  b = whole(out, 1), b.out_count--;
  refuse(v, b, M3_ERROR_ARGUMENT, "it must hold 1320 values and holds 1319");
  b = whole(out, -1);
  refuse(v, b, M3_ERROR_ARGUMENT, "threads is -1");
  static const m3_vision_grid bad[] = {{1, 2, 3},
                                       {1, 3, 2},
                                       {0, 2, 2},
                                       {-1, 2, 2},
                                       {1, 1 << 30, 1 << 30},
                                       {1 << 30, 2, 2},
                                       {1, 65536, 2},
                                       {INT32_MAX, INT32_MAX - 1, INT32_MAX - 1}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    b = whole(out, 1), b.grids = &bad[i], b.n_images = 1;
    refuse(v, b, M3_ERROR_ARGUMENT, "image 0: a grid of");
  }
  pixels[777] = NAN;
  refuse(v, whole(out, 1), M3_ERROR_ARGUMENT, "pixels: value 777 is NaN or infinite");
  pixels[777] = 0;
}

static void check_broken(tiny_file *t, const char *tensor, const char *what) {
  float *data = tiny_data(t, tensor), kept = data[0];
  data[0] = NAN;
  write_file(path, t->file.data, t->file.size);
  m3_vision *v;
  m3_error err;
  CHECK(m3_vision_open(path, NULL, &v, &err) == M3_OK, "%s", err.message);
  refuse(v, whole(out, 1), M3_ERROR_NOT_FINITE, what);
  m3_vision_close(v);
  data[0] = kept;
}

int main(void) {
  tiny_file t;
  make_vision_file(&t);
  new_path(path, sizeof path, "m3-vision");
  CHECK(open_bytes(t.file.data, t.file.size) == M3_OK, "the undamaged file");
  check_damage(&t);
  write_file(path, t.file.data, t.file.size);
  m3_error err;
  m3_vision *v = (m3_vision *)&t;
  CHECK(m3_vision_open("/nowhere/m3-vision", NULL, &v, &err) == M3_ERROR_IO && !v, "%s", err.message);
  m3_vision_options options = {.struct_size = 3};
  CHECK(m3_vision_open(path, &options, &v, &err) == M3_ERROR_ARGUMENT, "%s", err.message);
  options = (m3_vision_options){.struct_size = sizeof options, .device = M3_DEVICE_CUDA};
  CHECK(m3_vision_open(path, &options, &v, &err) == M3_ERROR_UNSUPPORTED, "%s", err.message);
  options.device = 7;
  CHECK(m3_vision_open(path, &options, &v, &err) == M3_ERROR_ARGUMENT, "%s", err.message);
  CHECK(m3_vision_open(path, NULL, &v, &err) == M3_OK, "%s", err.message);
  const m3_vision_hparams *h = m3_vision_dimensions(v);
  CHECK(h->head_dim == 16 && h->n_rot == 12 && h->n_merger == INNER + 8 && h->n_out == OUT, "dimensions");
  check_encode(v);
  check_batches(v);
  m3_vision_close(v);
  check_broken(&t, "v.blk.1.attn_v.weight", "vision layer 1: its output is NaN or infinite");
  check_broken(&t, "v.patch_embd.weight.1", "vision layer 0: its output is NaN or infinite");
  check_broken(&t, "mm.merger.fc2.bias", "the vision projector");
  unlink(path);
  free(t.file.data);
  return finish("test_vision");
}
