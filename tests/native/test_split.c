/* The reader on split models with damaged files: an error or a model, never a read outside the bytes (this runs under
 * AddressSanitizer), nothing left allocated. */
#include <sys/stat.h>

#include "tiny_file.h"

enum { N_FILES = 3, ROUNDS = 4000 };

static char folder[64];
static char paths[N_FILES][128];

static void make_shard(bytes *b, uint32_t no) {
  put(b, "GGUF", 4);
  put_u32(b, 3);
  put_u64(b, 1);
  put_u64(b, no ? 4 : 5);
  put_key_u32(b, "split.no", no);
  put_key_u32(b, "split.count", N_FILES);
  put_key_u32(b, "split.tensors.count", N_FILES);
  put_string(b, "m3.split.id");
  put_u32(b, M3_KV_STRING);
  put_string(b, "an id");
  if (!no) put_key_u32(b, "some.key", 7);
  char name[24];
  snprintf(name, sizeof name, "tensor%u", no);
  put_string(b, name);
  put_u32(b, 1);
  put_u64(b, 8);
  put_u32(b, M3_TYPE_F32);
  put_u64(b, 0);
  while (b->size % 32) put(b, "", 1);
  for (int i = 0; i < 8; i++) put(b, &(float){(float)no}, 4);
}

static void write_all(const bytes *shards) {
  for (int i = 0; i < N_FILES; i++) write_file(paths[i], shards[i].data, shards[i].size);
}

static void check_good(const char *path) {
  m3_error err;
  m3_gguf *g;
  CHECK(m3_gguf_open(path, &g, &err) == M3_OK, "%s: %s", path, err.message);
  CHECK(m3_gguf_n_files(g) == N_FILES && m3_gguf_n_tensors(g) == N_FILES && m3_gguf_n_kv(g) == 5, "counts");
  CHECK(m3_gguf_find_kv(g, "some.key") && !m3_gguf_file_name(g, -1) && !m3_gguf_file_name(g, N_FILES), "look-up");
  for (int i = 0; i < N_FILES; i++) {
    char name[24];
    snprintf(name, sizeof name, "tensor%d", i);
    const m3_tensor *t = m3_gguf_find_tensor(g, name);
    CHECK(t && t == m3_gguf_tensor(g, i) && t->file == i && *(const float *)t->data == (float)i, "%s", name);
    CHECK(strcmp(m3_gguf_file_name(g, i), paths[i]) == 0, "%s", m3_gguf_file_name(g, i));
  }
  m3_gguf_close(g);
}

static void check_damage(const bytes *shards) {
  static const uint64_t values[] = {0, 1, 2, 3, 4, 0xffff, 1u << 30, 0xffffffffu, 1ull << 63, ~0ull};
  uint64_t seed = 5;
  int refused = 0;
  for (int round = 0; round < ROUNDS; round++) {
    const bytes *shard = &shards[round % N_FILES];
    unsigned char *copy = malloc(shard->size);
    memcpy(copy, shard->data, shard->size);
    size_t at = next_random(&seed) % (shard->size - 40);
    uint64_t value = values[next_random(&seed) % 10];
    memcpy(copy + at, &value, (size_t)1 << next_random(&seed) % 4);
    size_t size = round % 5 ? shard->size : next_random(&seed) % shard->size;
    write_file(paths[round % N_FILES], copy, size);
    free(copy);
    m3_error err = {0};
    m3_gguf *g = NULL;
    const char *path = round % 4 ? paths[round % 4 - 1] : folder;
    m3_status status = m3_gguf_open(path, &g, &err);
    CHECK(status ? err.code == (int32_t)status && err.message[0] && !strchr(err.message, '\n') && !g
                 : m3_gguf_n_tensors(g) >= 1,
          "bad report: %d '%s'", err.code, err.message);
    refused += status != M3_OK;
    m3_gguf_close(g);
    write_file(paths[round % N_FILES], shard->data, shard->size);
  }
  CHECK(refused > ROUNDS / 3, "only %d of %d damaged models were refused", refused, ROUNDS);
}

static void check_missing(const bytes *shards) {
  for (int i = 0; i < N_FILES; i++) {
    m3_error err;
    m3_gguf *g;
    unlink(paths[i]);
    CHECK(m3_gguf_open(paths[(i + 1) % N_FILES], &g, &err) == M3_ERROR_IO && strstr(err.message, paths[i]) && !g, "%s",
          err.message);
    CHECK(m3_gguf_open(folder, &g, &err) == M3_ERROR_IO && strstr(err.message, paths[i] + strlen(folder)), "%s",
          err.message);
    write_file(paths[i], shards[i].data, shards[i].size);
  }
}

int main(void) {
  snprintf(folder, sizeof folder, "%s/m3-split-XXXXXX", P_tmpdir);
  if (!mkdtemp(folder)) abort();
  bytes shards[N_FILES] = {0};
  for (int i = 0; i < N_FILES; i++) {
    snprintf(paths[i], sizeof paths[i], "%s/m-%05d-of-%05d.gguf", folder, i + 1, N_FILES);
    make_shard(&shards[i], (uint32_t)i);
  }
  write_all(shards);
  for (int i = 0; i < N_FILES; i++) check_good(paths[i]);
  check_good(folder);
  check_damage(shards);
  check_missing(shards);
  check_good(folder);
  for (int i = 0; i < N_FILES; i++) {
    unlink(paths[i]);
    free(shards[i].data);
  }
  rmdir(folder);
  return finish("test_split");
}
