/* backend.h - the operations that a device must provide. forward.c is written against them, once, for prefill and
 * decode. The CPU functions of the same names are the specification of every other backend.
 *
 * Activations are float32, rows outermost, in memory that the backend allocated; forward.c passes such
 * pointers on and never reads through them. A "row" is one token of the chunk. All counts are at least 1 unless
 * said otherwise. What a row gets must not depend on which other rows are in the chunk, but for what M3_SESSION_EXACT
 * in m3.h allows. */
#ifndef M3_SRC_BACKEND_H
#define M3_SRC_BACKEND_H

#include <stdbool.h>
#include <stdint.h>

#include "error.h"
#include "m3.h"

typedef struct m3_weight m3_weight;
typedef struct m3_layer m3_layer;

/* What a backend keeps for one session: on a GPU the stream, the places of the chunk's rows, flags and work buffers.
 * The CPU keeps nothing, its state is NULL. */
typedef struct m3_device_state m3_device_state;

/* Rows of the chunk: where each stands. Rows of a sequence stand together, in the order of their positions, which
 * follow one another. All of it lies in host memory; `begin` brings to the device what operations need of it. */
typedef struct m3_rows {
  int32_t n;
  const int32_t *seq;           /* [n] */
  const int64_t *pos;           /* [n] position in its sequence, from 0 */
  const int32_t *const *tables; /* [sequences] page of each block of a sequence */
  const float *cos, *sin;       /* [n, n_rot / 2] */
  const int32_t *ids;           /* [n] in [0, n_vocab), checked before; NULL where hidden states enter */
} m3_rows;

/* Pages of one layer. A page is one block: K and V [n_pages, n_head_kv, block_size, head_dim], index keys
 * [n_pages, block_size, index_dim] in a sparse layer, else NULL. low_bit: copies of the index keys in few bits in pages
 * of the backend's own layout, or NULL. */
typedef struct m3_layer_cache {
  void *k, *v, *index;
  int32_t kv_type, index_type;
  void *low_bit;
} m3_layer_cache;

/* Buffers between operations, sized for the chunk (see list_buffers in session.c). */
typedef struct m3_scratch {
  float *normed;     /* [chunk, n_embd] */
  float *q;          /* [chunk, n_head * head_dim] */
  float *k, *v;      /* [chunk, n_head_kv * head_dim] */
  float *index_q;    /* [chunk, n_index_head * index_dim] */
  float *index_k;    /* [chunk, index_dim] */
  float *attended;   /* [chunk, n_head * head_dim] */
  float *gate, *up;  /* [max of chunk * n_ff, chunk * n_ff_shared, chunk * n_expert_used * n_ff_expert] */
  float *expert_in;  /* [chunk * n_expert_used, n_embd] inputs of experts by expert, where needed; sums of outputs */
  float *expert_out; /* [chunk * n_expert_used, n_embd] */
  float *logits;     /* [chunk, n_expert] of the router */
  int32_t *experts;  /* [chunk, n_expert_used] ascending ids */
  float *weights;    /* [chunk, n_expert_used] */
  int32_t *blocks;   /* [chunk, n_index_head, top_k] */
  int32_t *grouping; /* [n_expert + 1 + 2 * chunk * n_expert_used] work of the experts operation */
  void *rounded;     /* input_bytes of the backend: the input of matrix products in the form that it multiplies */
  float *thread;     /* [n_threads, thread_floats] */
  int64_t thread_floats;
  int32_t n_threads;
  int64_t blocks_bounded, blocks_rescored; /* counted by selection with low-bit keys */
} m3_scratch;

/* What the weight matrices of a layer are multiplied with; several share one. */
typedef enum m3_input {
  M3_INPUT_ATTENTION,    /* attn_q, attn_k, attn_v, indexer.q_proj, indexer.k_proj */
  M3_INPUT_ATTENDED,     /* attn_output */
  M3_INPUT_FFN,          /* ffn_gate and ffn_up of the MLP or the shared expert, router */
  M3_INPUT_MLP_DOWN,     /* ffn_down */
  M3_INPUT_SHARED_DOWN,  /* ffn_down_shexp */
  M3_INPUT_EXPERTS,      /* ffn_gate_exps, ffn_up_exps, for each expert */
  M3_INPUT_EXPERTS_DOWN, /* ffn_down_exps, for each expert */
  M3_INPUT_HEAD,         /* output, counted to the last layer */
  M3_INPUTS
} m3_input;

/* Squares of the rows of an input, summed in the order of the rows, on the device. */
typedef struct m3_input_sums {
  int64_t n_matrix; /* experts, or 1; 0 for an input that the layer does not have */
  int64_t width;
  double *sums; /* [n_matrix, width] */
  double *rows; /* [n_matrix] number of rows; exact up to 2^53 */
} m3_input_sums;

/* Where numbers that are NaN or infinite are looked for, in the order of a layer. */
typedef enum m3_part {
  M3_PART_INPUT,  /* of the window's first layer */
  M3_PART_SCORES, /* of the index */
  M3_PART_ROUTER, /* logits or bias */
  M3_PART_OUTPUT, /* of the layer */
  M3_PART_LOGITS, /* of the head, counted to layer n_layer */
  M3_PARTS
} m3_part;

/* What every operation gets. */
typedef struct m3_context {
  const m3_hparams *hparams;
  const struct m3_kernels *kernels; /* CPU only */
  m3_scratch *scratch;
  const m3_input_sums *inputs; /* [M3_INPUTS] of the layer at work, to which operations add; NULL: they do not */
  m3_device_state *state;
  int32_t layer; /* at work */
} m3_context;

/* The first broken number of a chunk; part is M3_PARTS if there is none. */
typedef struct m3_broken {
  int32_t layer;
  m3_part part;
} m3_broken;

/* What the state of a session is sized for, and how it computes. */
typedef struct m3_state_params {
  const m3_hparams *hparams;
  int32_t sequences, chunk;
  int64_t blocks; /* of the longest sequence */
  int32_t kv_type, index_type;
  bool exact;   /* M3_SESSION_EXACT */
  bool low_bit; /* index keys have copies in few bits */
} m3_state_params;

/* What the operations of a chunk depend on beside the number of its rows and their places: two chunks of one row a
 * sequence that agree in it put the same operations on the same memory. */
typedef struct m3_step {
  bool head;         /* logits of all rows, or none */
  uint64_t bindings; /* changes of the model's weights */
} m3_step;

typedef struct m3_embed_params {
  const m3_weight *embd; /* [n_vocab, n_embd] */
  const m3_rows *rows;
  float *hidden; /* out [n, n_embd] */
} m3_embed_params;

/* RMSNorm, the q, k, v (and index q, k) projections, per-head norms, RoPE on the first n_rot channels, and the
 * write of k, v and index k to the cache. Leaves q and index_q in the scratch. */
typedef struct m3_prepare_params {
  const m3_layer *layer;
  const m3_rows *rows;
  const float *hidden; /* [n, n_embd] */
  m3_layer_cache cache;
} m3_prepare_params;

/* Block lists from scratch index_q and the index keys: score(j) = q . k_j in float32, block score = maximum over the
 * visible tokens, the last local_blocks blocks rank first, ties to the lower id. With low-bit copies blocks may be left
 * out that a bound proves to be out of the list; the lists are the same. Between backends, and on a GPU between chunks
 * of one row and of many, sums are taken in another order: lists are equal but for blocks whose scores are nearer than
 * 2^-18 of |q| |k|. */
typedef struct m3_select_params {
  const m3_rows *rows;
  m3_layer_cache cache;
  int32_t *blocks;      /* out [n, n_index_head, top_k] ascending, padded with -1 */
  float *scores;        /* out [n, n_index_head, n_blocks] before local blocks are forced, or NULL */
  int64_t n_blocks;     /* row stride of scores */
  int64_t max_blocks;   /* blocks of the longest visible prefix in the chunk; bounds the work buffer */
  int64_t low_bit_from; /* visible blocks from which low-bit copies are worth it */
} m3_select_params;

/* Causal softmax attention of scratch q over the listed blocks, or over all visible blocks if blocks is NULL, with
 * float32 products and sums; but where a GPU may round (see M3_SESSION_EXACT in m3.h). */
typedef struct m3_attend_params {
  const m3_rows *rows;
  m3_layer_cache cache;
  const int32_t *blocks; /* [n, n_head_kv, top_k] or NULL */
  float *out;            /* [n, n_head * head_dim] */
  float *mass;           /* out [n, n_head, top_k] share of the softmax of each listed block, 0 for padding; or NULL */
} m3_attend_params;

/* hidden += projection of x. */
typedef struct m3_output_params {
  const m3_weight *weight;
  const float *x; /* [n, n_head * head_dim] */
  int32_t n;
  float *hidden; /* [n, n_embd] */
} m3_output_params;

/* The feed-forward operations share their arguments. mlp: hidden += MLP(norm(hidden)). router: scratch normed,
 * experts, weights from hidden. experts: hidden += weighted routed experts of scratch normed, then what `shared` does
 * if with_shared. shared: hidden += shared expert of scratch normed. */
typedef struct m3_ffn_params {
  const m3_layer *layer;
  int32_t n;
  float *hidden; /* [n, n_embd] */
  bool with_shared;
} m3_ffn_params;

typedef struct m3_head_params {
  const m3_weight *norm;
  const m3_weight *head; /* [n_vocab, n_embd] */
  const float *hidden;   /* [n, n_embd] */
  int32_t n;
  float *logits; /* out [n, n_vocab] */
} m3_head_params;

/* Adds the head's input, norm(hidden), to the sums; false if it is not finite. Uses scratch normed. */
typedef struct m3_head_input_params {
  const m3_weight *norm;
  const float *hidden; /* [n, n_embd] */
  int32_t n;           /* up to a chunk */
} m3_head_input_params;

/* Keys and index keys of tokens that are cached already, the rows of the chunk: each is read, turned by the angles of
 * the rows' cos and sin as RoPE does, and stored again in its type; channels (of block types whole blocks) that do not
 * turn, and values, keep their bits. Low-bit copies are made again. */
typedef struct m3_rotate_params {
  const m3_rows *rows;
  m3_layer_cache cache;
} m3_rotate_params;

/* Rows whose routed experts the CPU computes, in memory of host_alloc. */
typedef struct m3_host_rows {
  int32_t n;
  float *normed;    /* [n, n_embd] */
  int32_t *experts; /* [n, n_expert_used] */
  float *weights;   /* [n, n_expert_used] */
  float *sums;      /* [n, n_embd] weighted sums of the experts' outputs */
} m3_host_rows;

/* y (+)= x W^T + bias, or GELU (by the error function) of that, for the layers of the vision tower. */
typedef struct m3_linear_params {
  const m3_weight *weight; /* [n_out, n_in] */
  const m3_weight *bias;   /* [n_out] or NULL */
  const float *x;          /* [n, n_in] */
  int32_t n;
  float *y; /* [n, n_out] */
  bool gelu;
  bool add; /* not with gelu */
} m3_linear_params;

/* out = (x - mean) / sqrt(variance + eps) * weight + bias, of each row. */
typedef struct m3_layer_norm_params {
  const m3_weight *weight, *bias; /* [width] */
  const float *x;                 /* [n, width] */
  int32_t n;
  float eps;
  float *out; /* [n, width]; may be x */
} m3_layer_norm_params;

/* Rotation of scratch q and k by the rows' angles, and the write of k and v to the cache, which is F32 and has the rows
 * as its tokens in their order. n_rot is 6 f: channels of a head are three axes of 2 f, in each of which i turns with
 * i + f by angle axis * f + i. What then attends has rows of one position, the last: none is hidden from another. */
typedef struct m3_turn_params {
  const m3_rows *rows;
  m3_layer_cache cache;
} m3_turn_params;

/* Bytes [offset, offset + bytes) of an array of pages. */
typedef struct m3_page_params {
  void *pages;
  int64_t page_bytes;
  int32_t src, dst;
} m3_page_params;

/* A device may run behind its caller: operations and copies only join a queue, of one session, in their order. What
 * goes wrong there, and what was found broken, is told by `finish`; a backend that knows at once tells it at once, by
 * the result of the operation. Data that an operation or an upload takes from host memory may change when it returns;
 * what a download gives is there when it returns. */
typedef struct m3_backend {
  const char *name;

  /* Memory for a session's state. state_bytes: what open takes of the device, apart from what alloc gives. */
  int64_t (*state_bytes)(const m3_state_params *p);
  m3_status (*open)(const m3_state_params *p, m3_device_state **out, m3_error *err);
  void (*close)(m3_device_state *state); /* waits; takes NULL */

  /* Zeroed memory of the device. `purpose` is for the message. free takes NULL. */
  m3_status (*alloc)(m3_device_state *state, uint64_t bytes, const char *purpose, void **out, m3_error *err);
  void (*free)(m3_device_state *state, void *p);
  void (*upload)(m3_device_state *state, void *dst, const void *src, uint64_t bytes);
  void (*download)(m3_device_state *state, void *dst, const void *src, uint64_t bytes);
  void (*copy)(m3_device_state *state, void *dst, const void *src, uint64_t bytes); /* within the device */
  void (*page_copy)(m3_device_state *state, const m3_page_params *p);
  void (*page_poison)(m3_device_state *state, const m3_page_params *p); /* fills dst with NaN (all bits set) */

  /* Weights, which belong to the model and not to a session. NULL: operations read them in host memory, where
   * m3_weight.data says; else in `device`. load waits until the data is there. */
  m3_status (*weight_alloc)(uint64_t bytes, const char *purpose, void **out, m3_error *err);
  m3_status (*weight_load)(void *dst, const void *src, uint64_t bytes, m3_error *err);
  void (*weight_free)(void *p);

  /* Routed experts of a layer in host memory, between `router` and the next layer; NULL: they are always this
   * backend's. host_alloc: zeroed host memory from and to which transfers do not keep the caller waiting. host_free
   * waits for them, and takes NULL. send_rows: scratch normed, experts and weights of the chunk's rows on their way to
   * `rows`, as the router left them. rows_sent: waits until they are there; false: the device failed, which `finish`
   * tells. add_sums: hidden += sums, which must stay as they are until rows_sent of the next layer, or finish. */
  m3_status (*host_alloc)(uint64_t bytes, const char *purpose, void **out, m3_error *err);
  void (*host_free)(m3_device_state *state, void *p);
  void (*send_rows)(const m3_context *c, const m3_host_rows *rows);
  bool (*rows_sent)(const m3_context *c);
  void (*add_sums)(const m3_context *c, const m3_host_rows *rows, float *hidden);

  /* Bytes of the device that are free and there in all; NULL: host memory, which is the operating system's matter. */
  m3_status (*memory)(uint64_t *free_bytes, uint64_t *total_bytes, m3_error *err);

  /* What people call the device; NULL: nothing but its name above. */
  void (*describe)(char *out, size_t size);

  /* Which kernels select and attend in such a session, see m3_session_msa; NULL: there is one way only. */
  void (*describe_msa)(const m3_state_params *p, char *out, size_t size);

  /* Bytes of a page of low-bit copies; NULL: the backend has none. */
  int64_t (*low_bit_page_bytes)(const m3_hparams *hparams);

  /* Tokens of a sequence from which a scan of low-bit copies was measured to pay in such a session, -1 if it has none;
   * NULL: M3_LOW_BIT_TOKENS. */
  int64_t (*low_bit_tokens)(const m3_state_params *p);

  /* Floats of the per-thread buffer that the operations need, for sequences of at most max_blocks blocks. */
  int64_t (*thread_floats)(const m3_hparams *hparams, int64_t max_blocks);

  /* Bytes of the scratch's `rounded` for chunks of so many rows; NULL: it is not used. */
  int64_t (*input_bytes)(const m3_hparams *hparams, int64_t rows);

  /* Around the operations of a chunk. finish waits for them, unless they are done anyway. */
  void (*begin)(const m3_context *c, const m3_rows *rows);
  m3_status (*finish)(const m3_context *c, m3_broken *broken, m3_error *err);

  /* Chunks of one row a sequence that repeat, as decoding makes them, without another download or upload than that of
   * the logits or the hidden states at the end; NULL: the backend does not keep operations. replay, after begin: true
   * if it does all operations itself, as the caller called them for another such step; else the caller calls them,
   * which may only keep them, and then `recorded`, `whole` if it called all. */
  bool (*replay)(const m3_context *c, const m3_step *step);
  void (*recorded)(const m3_context *c, bool whole);

  void (*embed)(const m3_context *c, const m3_embed_params *p);
  void (*prepare)(const m3_context *c, const m3_prepare_params *p);
  void (*rotate)(const m3_context *c, const m3_rotate_params *p);
  void (*low_bit)(const m3_context *c, const m3_rows *rows, m3_layer_cache cache); /* copies of index keys, again; NULL
                                                                                      where there are none */
  bool (*select)(const m3_context *c, const m3_select_params *p); /* false: a score is not finite, M3_PART_SCORES */
  void (*attend)(const m3_context *c, const m3_attend_params *p);
  void (*output)(const m3_context *c, const m3_output_params *p);
  void (*mlp)(const m3_context *c, const m3_ffn_params *p);
  bool (*router)(const m3_context *c, const m3_ffn_params *p); /* false: a logit or bias is not: M3_PART_ROUTER */
  void (*experts)(const m3_context *c, const m3_ffn_params *p);
  void (*shared)(const m3_context *c, const m3_ffn_params *p);
  void (*head)(const m3_context *c, const m3_head_params *p);
  bool (*head_input)(const m3_context *c, const m3_head_input_params *p);       /* NULL: no operation adds to sums */
  bool (*finite)(const m3_context *c, const float *x, int64_t n, m3_part part); /* false: x is not finite */

  /* Of the vision tower; all NULL in a backend that has none. */
  void (*linear)(const m3_context *c, const m3_linear_params *p);
  void (*layer_norm)(const m3_context *c, const m3_layer_norm_params *p);
  void (*turn)(const m3_context *c, const m3_turn_params *p);
} m3_backend;

extern const m3_backend m3_cpu_backend;

/* The backend of an NVIDIA GPU. M3_ERROR_UNSUPPORTED says what is missing: the build, the driver, the GPU. */
m3_status m3_cuda_backend(const m3_backend **out, m3_error *err);

#endif
