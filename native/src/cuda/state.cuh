/* state.cuh - what the files of the CUDA backend share: the state of a session, and the queue that every operation
 * joins.
 *
 * Operations are documented in backend.h, and the CPU functions of the same names are their specification. No
 * multiplication and addition are fused (-fmad=false) unless the source says fmaf, and sums of one row are taken in one
 * order, whatever other rows are computed with it. */
#ifndef M3_SRC_CUDA_STATE_CUH
#define M3_SRC_CUDA_STATE_CUH

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <float.h>
#include <math.h>

extern "C" {
#include "backend.h"
#include "model.h"
}

/* Threads of a block where nothing asks for another number. */
enum { M3_THREADS = 256, M3_WARP = 32 };

/* Rows that are selected for together: bounds the buffer of block scores, whose size grows with the context. */
enum { M3_SELECT_ROWS = 64 };

/* A group of rows of a product: rows [first, first + count) of its input, which `expert` multiplies. */
struct m3_row_group {
  int32_t expert, first, count;
};

/* Pairs of row and expert in the order of the experts. */
struct m3_grouping {
  int32_t *row;         /* [pairs] the row of each place */
  int32_t *place;       /* [pairs] the place of each pair */
  m3_row_group *groups; /* [n_expert + pairs] */
  int32_t *n_groups;
};

/* What of a session takes the Hopper kernels. */
struct m3_hopper {
  bool select, attend;
};

struct m3_replays;

struct m3_device_state {
  cudaStream_t stream;
  bool exact;              /* no rounding but that of float32, see m3_state_params */
  bool overlap;            /* kernels may begin before the ones in front of them end, see launch.cuh */
  int32_t multiprocessors; /* of the GPU */
  uint32_t shared_bytes;   /* of shared memory that a block can have */
  cudaError_t error;       /* the first thing that went wrong since the last finish, and where */
  const char *where;
  int32_t *broken;      /* lowest code of a broken number in the chunk, on the device */
  int32_t *host_broken; /* where it is read to, pinned */
  bool told;            /* it is on its way there */
  bool running;         /* between begin and finish */
  /* The rows of the chunk: what lies in `places`, which is filled on the host (pinned) and travels as one. */
  char *places, *host_places;
  int64_t *pos;       /* [n] */
  float *cos, *sin;   /* [n, n_rot / 2] */
  int32_t *seq, *ids; /* [n] */
  int32_t n;
  int64_t max_blocks;       /* no row sees more; in a step (see m3_step) it may be above the truth */
  int32_t *tables;          /* [sequences, blocks] pages of the sequences */
  const int32_t **table_of; /* [sequences] where each begins */
  int32_t *mirror;          /* the tables on the host, so that only what changed travels */
  int64_t blocks;
  m3_grouping grouping;
  float *block_scores; /* [M3_SELECT_ROWS or fewer, n_index_head, blocks] */
  int32_t select_rows;
  float *attention_parts; /* of chunks of keys that are attended to apart, see attention.cu */
  int64_t attention_floats;
  m3_hopper hopper;
  void *hopper_work;
  m3_replays *replays;   /* steps that were kept, see replay.cu */
  cudaEvent_t rows_sent; /* rows whose experts the CPU computes are in its memory, see host_experts.cu */
};

/* What is larger than every code of a broken number: all bytes equal, so that a memset sets it. */
enum { M3_NOTHING_BROKEN = 0x7f7f7f7f };

static inline int32_t m3_broken_code(const m3_context *c, m3_part part) { return c->layer * M3_PARTS + part; }

/* Remembers the first thing that goes wrong. */
static inline void m3_note(m3_device_state *s, cudaError_t error, const char *where) {
  if (error == cudaSuccess || s->error != cudaSuccess) return;
  s->error = error;
  s->where = where;
}

/* After a launch. */
static inline void m3_launched(m3_device_state *s, const char *where) { m3_note(s, cudaGetLastError(), where); }

static inline unsigned m3_blocks_for(int64_t n, int64_t of) { return (unsigned)((n + of - 1) / of); }

/* The rows of the chunk where kernels see them. */
struct m3_places {
  const int32_t *seq;
  const int64_t *pos;
  const int32_t *tables;
  int64_t blocks; /* row stride of tables */
};

static inline m3_places m3_places_of(const m3_device_state *s) {
  return m3_places{s->seq, s->pos, s->tables, s->blocks};
}

__device__ inline int64_t m3_page_of(const m3_places &p, int32_t row, int64_t block) {
  return p.tables[p.seq[row] * p.blocks + block];
}

static inline int64_t m3_longest(const m3_rows *rows) {
  int64_t longest = 0;
  for (int32_t r = 0; r < rows->n; r++)
    if (rows->pos[r] > longest) longest = rows->pos[r];
  return longest;
}

/* ------------------------------------------------------------------------------------------------ sums */

/* The same sum on all lanes. */
__device__ inline float m3_warp_sum(float x) {
#pragma unroll
  for (int step = M3_WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ inline float m3_warp_max(float x) {
#pragma unroll
  for (int step = M3_WARP / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

/* On all threads of a block; `work` holds a float for each warp and one more, and may be used again after the call. */
__device__ inline float m3_block_sum(float x, float *work) {
  int warps = blockDim.x / M3_WARP;
  x = m3_warp_sum(x);
  if (threadIdx.x % M3_WARP == 0) work[threadIdx.x / M3_WARP] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int i = 0; i < warps; i++) sum += work[i];
    work[warps] = sum;
  }
  __syncthreads();
  x = work[warps];
  __syncthreads();
  return x;
}

__device__ inline bool m3_is_finite(float x) { return fabsf(x) <= FLT_MAX; }

/* ------------------------------------------------------------------------------------------------ the operations */

/* The most weights of one product. */
enum { M3_PRODUCT_PARTS = 5 };

struct m3_product_part {
  const m3_weight *weight;
  float *y;
  int64_t ldy;
};

/* y[r * ldy + j] = x[r] . w[j] as m3_matmul of the CPU backend, for several weights of as many columns. With `gather`
 * row r of x is x[gather[r]]. With `grouping` the rows are cut into groups of at most `group_rows` of an expert each,
 * as many as the device says; else they are one group of a plain weight. */
struct m3_product {
  m3_product_part parts[M3_PRODUCT_PARTS];
  int32_t n_parts;
  const float *x; /* rows of the weights' columns */
  int32_t n;
  bool add = false;
  const int32_t *gather = NULL;
  const m3_grouping *grouping = NULL;
  int32_t group_rows = 0, max_groups = 0;
};

static inline m3_product m3_one_product(const m3_weight *weight, const float *x, int32_t n, float *y, bool add) {
  return m3_product{{{weight, y, weight->tensor->ne[1]}}, 1, x, n, add};
}

/* Rounds x as the CPU does where a weight's type is one of blocks, unless the session is exact. What a row gets depends
 * on no other row, but the order of sums on whether there are more than M3_FEW_ROWS of them (few_rows.cuh). */
void m3_cuda_product(const m3_context *c, const m3_product *p);

/* The same without rounding, in float32, and in one order for any number of rows. */
void m3_cuda_plain_product(m3_device_state *s, const m3_product *p);

/* Rows of a group of the plain product for so many rows (or pairs of row and expert): how often weights are read. */
int32_t m3_cuda_group_rows(int64_t n);

void m3_cuda_norm(m3_device_state *s, const m3_context *c, const float *x, const m3_weight *weight, int32_t n,
                  float *out);

void m3_cuda_embed(const m3_context *c, const m3_embed_params *p);
void m3_cuda_prepare(const m3_context *c, const m3_prepare_params *p);
void m3_cuda_rotate(const m3_context *c, const m3_rotate_params *p);
bool m3_cuda_select(const m3_context *c, const m3_select_params *p);
void m3_cuda_attend(const m3_context *c, const m3_attend_params *p);
void m3_cuda_output(const m3_context *c, const m3_output_params *p);
void m3_cuda_mlp(const m3_context *c, const m3_ffn_params *p);
bool m3_cuda_router(const m3_context *c, const m3_ffn_params *p);
void m3_cuda_experts(const m3_context *c, const m3_ffn_params *p);
void m3_cuda_shared(const m3_context *c, const m3_ffn_params *p);
void m3_cuda_head(const m3_context *c, const m3_head_params *p);
bool m3_cuda_finite(const m3_context *c, const float *x, int64_t n, m3_part part);

m3_status m3_cuda_host_alloc(uint64_t bytes, const char *purpose, void **out, m3_error *err);
void m3_cuda_host_free(m3_device_state *s, void *p);
void m3_cuda_send_rows(const m3_context *c, const m3_host_rows *rows);
bool m3_cuda_rows_sent(const m3_context *c);
void m3_cuda_add_sums(const m3_context *c, const m3_host_rows *rows, float *hidden);

/* Steps of decoding that repeat. close takes NULL. */
bool m3_cuda_replay(const m3_context *c, const m3_step *step);
void m3_cuda_recorded(const m3_context *c, bool whole);
void m3_cuda_close_replays(m3_replays *r);

/* On its way to where finish reads it. */
void m3_cuda_tell_broken(m3_device_state *s);

/* Floats of the parts of one row. */
int64_t m3_cuda_attention_floats(const m3_hparams *h, int64_t blocks);

/* gate = SwiGLU-OAI of gate and up, n elements. */
void m3_cuda_swiglu(m3_device_state *s, const m3_hparams *h, float *gate, const float *up, int64_t n);

#endif
