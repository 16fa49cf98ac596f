/* tiny_file.h - a small random M3 model as the bytes of a GGUF file, written here from the format's description so
 * that the reader is not tested against itself. */
#ifndef M3_TESTS_TINY_FILE_H
#define M3_TESTS_TINY_FILE_H

#include <stdlib.h>
#include <unistd.h>

#include "check.h"
#include "m3.h"

typedef struct bytes {
  unsigned char *data;
  size_t size, capacity;
} bytes;

static inline void put(bytes *b, const void *src, size_t n) {
  if (b->size + n > b->capacity) {
    b->capacity = (b->size + n) * 2;
    b->data = realloc(b->data, b->capacity);
    if (!b->data) abort();
  }
  memcpy(b->data + b->size, src, n);
  b->size += n;
}

static inline void put_u32(bytes *b, uint32_t v) { put(b, &v, 4); }
static inline void put_u64(bytes *b, uint64_t v) { put(b, &v, 8); }

static inline void put_string(bytes *b, const char *s) {
  put_u64(b, strlen(s));
  put(b, s, strlen(s));
}

static inline void put_key_u32(bytes *b, const char *key, uint32_t v) {
  put_string(b, key);
  put_u32(b, M3_KV_U32);
  put_u32(b, v);
}

static inline void put_key_f32(bytes *b, const char *key, float v) {
  put_string(b, key);
  put_u32(b, M3_KV_F32);
  put(b, &v, 4);
}

/* Dimensions of the model: 3 layers, 1 dense; block 16, top_k 2, so that 33 tokens give a choice; or the heads and
 * blocks of the release (T_RELEASE_HEADS). */
enum {
  T_LAYER = 3,
  T_DENSE = 1,
  T_EMBD = 32,
#ifdef T_RELEASE_HEADS
  T_HEAD = 64,
  T_KV = 4,
  T_DIM = 128,
  T_INDEX = 128,
  T_ROT = 64,
  T_BLOCK = 128,
  T_TOP = 16,
#else
  T_HEAD = 4,
  T_KV = 2,
  T_DIM = 16,
  T_INDEX = 16,
  T_ROT = 8,
  T_BLOCK = 16,
  T_TOP = 2,
#endif
  T_FF = 48,
  T_EXPERT_FF = 24,
  T_EXPERT = 4,
  T_USED = 2,
  T_VOCAB = 64
};

typedef struct tiny_tensor {
  char name[64];
  uint32_t n_dims;
  uint64_t ne[3];
  uint64_t offset, n_bytes;
} tiny_tensor;

typedef struct tiny_file {
  bytes file;          /* header, padding, data */
  size_t header_bytes; /* without the padding */
  size_t data_start;
  tiny_tensor tensors[80];
  int n_tensors;
} tiny_file;

static inline void add_tensor(tiny_file *t, const char *name, uint64_t a, uint64_t b, uint64_t c) {
  tiny_tensor *x = &t->tensors[t->n_tensors++];
  snprintf(x->name, sizeof x->name, "%s", name);
  x->n_dims = c ? 3 : b ? 2 : 1;
  x->ne[0] = a, x->ne[1] = b ? b : 1, x->ne[2] = c ? c : 1;
  x->n_bytes = x->ne[0] * x->ne[1] * x->ne[2] * 4;
}

static inline void add_layer(tiny_file *t, int layer) {
  char name[64];
#define ADD(suffix, a, b, c) snprintf(name, sizeof name, "blk.%d.%s", layer, suffix), add_tensor(t, name, a, b, c)
  ADD("attn_norm.weight", T_EMBD, 0, 0);
  ADD("attn_q.weight", T_EMBD, T_HEAD * T_DIM, 0);
  ADD("attn_k.weight", T_EMBD, T_KV * T_DIM, 0);
  ADD("attn_v.weight", T_EMBD, T_KV * T_DIM, 0);
  ADD("attn_output.weight", T_HEAD * T_DIM, T_EMBD, 0);
  ADD("attn_q_norm.weight", T_DIM, 0, 0);
  ADD("attn_k_norm.weight", T_DIM, 0, 0);
  ADD("ffn_norm.weight", T_EMBD, 0, 0);
  if (layer < T_DENSE) {
    ADD("ffn_gate.weight", T_EMBD, T_FF, 0);
    ADD("ffn_up.weight", T_EMBD, T_FF, 0);
    ADD("ffn_down.weight", T_FF, T_EMBD, 0);
    return;
  }
  ADD("indexer.q_proj.weight", T_EMBD, T_KV * T_INDEX, 0);
  ADD("indexer.k_proj.weight", T_EMBD, T_INDEX, 0);
  ADD("indexer.q_norm.weight", T_INDEX, 0, 0);
  ADD("indexer.k_norm.weight", T_INDEX, 0, 0);
  ADD("ffn_gate_inp.weight", T_EMBD, T_EXPERT, 0);
  ADD("exp_probs_b.bias", T_EXPERT, 0, 0);
  ADD("ffn_gate_exps.weight", T_EMBD, T_EXPERT_FF, T_EXPERT);
  ADD("ffn_up_exps.weight", T_EMBD, T_EXPERT_FF, T_EXPERT);
  ADD("ffn_down_exps.weight", T_EXPERT_FF, T_EMBD, T_EXPERT);
  ADD("ffn_gate_shexp.weight", T_EMBD, T_EXPERT_FF, 0);
  ADD("ffn_up_shexp.weight", T_EMBD, T_EXPERT_FF, 0);
  ADD("ffn_down_shexp.weight", T_EXPERT_FF, T_EMBD, 0);
#undef ADD
}

static inline void put_keys(bytes *b) {
  put_string(b, "general.architecture");
  put_u32(b, M3_KV_STRING);
  put_string(b, "minimax-m3");
#define A "minimax-m3."
  put_key_u32(b, A "block_count", T_LAYER);
  put_key_u32(b, A "context_length", 4096);
  put_key_u32(b, A "embedding_length", T_EMBD);
  put_key_u32(b, A "feed_forward_length", T_FF);
  put_key_u32(b, A "expert_feed_forward_length", T_EXPERT_FF);
  put_key_u32(b, A "attention.head_count", T_HEAD);
  put_key_u32(b, A "attention.head_count_kv", T_KV);
  put_key_u32(b, A "attention.key_length", T_DIM);
  put_key_u32(b, A "attention.value_length", T_DIM);
  put_key_f32(b, A "attention.layer_norm_rms_epsilon", 1e-6f);
  put_key_f32(b, A "rope.freq_base", 5e6f);
  put_key_u32(b, A "rope.dimension_count", T_ROT);
  put_key_u32(b, A "expert_count", T_EXPERT);
  put_key_u32(b, A "expert_used_count", T_USED);
  put_key_u32(b, A "expert_gating_func", 2);
  put_key_u32(b, A "expert_shared_count", 1);
  put_key_f32(b, A "expert_weights_scale", 2.0f);
  put_key_u32(b, A "expert_weights_norm", 1);
  put_key_u32(b, A "leading_dense_block_count", T_DENSE);
  put_key_u32(b, A "attention.indexer.head_count", T_KV);
  put_key_u32(b, A "attention.indexer.key_length", T_INDEX);
  put_key_u32(b, A "attention.indexer.top_k", T_TOP);
  put_key_u32(b, A "attention.indexer.block_size", T_BLOCK);
  put_key_u32(b, A "attention.indexer.local_blocks", 1);
#undef A
}

enum { N_TINY_KEYS = 25 };

static inline void put_data(tiny_file *t) {
  uint64_t seed = 11;
  for (int i = 0; i < t->n_tensors; i++) {
    tiny_tensor *x = &t->tensors[i];
    while ((t->file.size - t->data_start) % 32) put(&t->file, "", 1);
    bool norm = x->n_dims == 1;
    for (uint64_t j = 0; j < x->n_bytes / 4; j++) {
      float v = norm ? 1.0f + 0.2f * random_float(&seed) : random_float(&seed) / sqrtf((float)x->ne[0]);
      put(&t->file, &v, 4);
    }
  }
}

/* The caller frees t->file.data. */
static inline void make_tiny_file(tiny_file *t) {
  memset(t, 0, sizeof *t);
  add_tensor(t, "output.weight", T_EMBD, T_VOCAB, 0);
  add_tensor(t, "token_embd.weight", T_EMBD, T_VOCAB, 0);
  for (int layer = 0; layer < T_LAYER; layer++) add_layer(t, layer);
  add_tensor(t, "output_norm.weight", T_EMBD, 0, 0);
  bytes *b = &t->file;
  put(b, "GGUF", 4);
  put_u32(b, 3);
  put_u64(b, (uint64_t)t->n_tensors);
  put_u64(b, N_TINY_KEYS);
  put_keys(b);
  uint64_t offset = 0;
  for (int i = 0; i < t->n_tensors; i++) {
    tiny_tensor *x = &t->tensors[i];
    put_string(b, x->name);
    put_u32(b, x->n_dims);
    for (uint32_t d = 0; d < x->n_dims; d++) put_u64(b, x->ne[d]);
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

/* Data of a tensor inside the file's bytes. */
static inline float *tiny_data(const tiny_file *t, const char *name) {
  for (int i = 0; i < t->n_tensors; i++)
    if (strcmp(t->tensors[i].name, name) == 0)
      return (float *)(void *)(t->file.data + t->data_start + t->tensors[i].offset);
  abort();
}

/* Puts the name of a new empty file into `path`. */
static inline void new_path(char *path, size_t size, const char *name) {
  snprintf(path, size, "%s/%s-XXXXXX", P_tmpdir, name);
  int fd = mkstemp(path);
  if (fd < 0 || close(fd)) abort();
}

static inline void write_file(const char *path, const void *data, size_t n) {
  FILE *f = fopen(path, "wb");
  if (!f || (n && fwrite(data, n, 1, f) != 1) || fclose(f)) abort();
}

#endif
