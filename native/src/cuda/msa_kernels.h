/* msa_kernels.h - launchers of the Hopper kernels of MSA: block selection and attention over the selected blocks.
 *
 * All pointers in the params are device memory. Kernels are put on a stream and nothing waits. A launcher returns
 * M3_MSA_REFUSED, having launched nothing, for a shape, type or device that it was not built for (the plain kernels
 * take those), and M3_MSA_FAILED if the CUDA runtime refused a launch (cudaGetLastError says why).
 *
 * Taken: a device of compute capability 9.0; head_dim and index_dim 128, block_size 128, 16 query heads for each KV
 * head, as many index heads as KV heads, 4 of them, top_k 16, local_blocks 1 to 15.
 *
 * Sums are in a fixed order and no float is added atomically: a call gives the same bits again. What a row gets does
 * not depend on what the other rows are; in decode attention the last bits depend on how many there are, because few
 * rows are split over more thread blocks. Keys and values past a row's position are never used, whatever they hold.
 *
 * Kernels are launched programmatically: they may start while the kernel before them in the stream still runs, and wait
 * for it before they read what it may have written: queries, and index keys in the blocks of the rows' own positions.
 * They read seq, pos, tables and index keys of earlier blocks before that, so the last few kernels before a launcher
 * must not write these, unless one of them was launched in the ordinary way and came after. */
#ifndef M3_SRC_CUDA_MSA_KERNELS_H
#define M3_SRC_CUDA_MSA_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define M3_MSA_MAX_BLOCKS 8192 /* of one sequence: 1,048,576 tokens */
#define M3_MSA_MAX_ROWS 128    /* of one decode call */

typedef enum m3_msa_result { M3_MSA_LAUNCHED, M3_MSA_REFUSED, M3_MSA_FAILED } m3_msa_result;

typedef struct m3_msa_shape {
  int32_t n_head, n_head_kv, head_dim, n_index_head, index_dim, block_size, top_k, local_blocks;
} m3_msa_shape;

/* Rows of a call. In decode, row r is in the sequence of row r - r % per_sequence, and rows of one sequence share one
 * pass over its index keys; per_sequence 1 is right for any rows. */
typedef struct m3_msa_rows {
  int32_t n;
  int32_t per_sequence;         /* decode: 1 to 4, divides n */
  const int32_t *seq;           /* [n] */
  const int64_t *pos;           /* [n] position of the row in its sequence */
  const int32_t *const *tables; /* [sequences] page of each block of a sequence */
  int64_t max_blocks;           /* no row sees more blocks; bounds grids and work, may be far above the truth */
} m3_msa_rows;

/* Block lists of decode rows, as m3_cpu_select makes them; scores are exact to float32 rounding. */
typedef struct m3_msa_select {
  m3_msa_shape shape;
  m3_msa_rows rows;
  const void *index;    /* [n_pages, 128, 128] */
  int32_t index_type;   /* M3_TYPE_BF16, M3_TYPE_F16 or M3_TYPE_F32 */
  const float *index_q; /* [n, 4, 128] */
  int32_t *blocks;      /* out [n, 4, 16] ascending, padded with -1 */
  int32_t *not_finite;  /* lowered to `code` if a score is not finite, else left alone */
  void *work;           /* m3_msa_select_bytes(n, max_blocks), aligned to 16 */
  int32_t code;
} m3_msa_select;

/* Attention of decode rows over listed blocks, as m3_cpu_attend. Queries and softmax weights enter the tensor cores in
 * two 16-bit parts, so the error is that of float32 sums (some 1e-5 of the largest value). */
typedef struct m3_msa_attend {
  m3_msa_shape shape;
  m3_msa_rows rows;
  const void *k, *v;     /* [n_pages, 4, 128, 128] */
  int32_t kv_type;       /* M3_TYPE_BF16 or M3_TYPE_F16 */
  const float *q;        /* [n, 64, 128] */
  const int32_t *blocks; /* [n, 4, 16] */
  float *out;            /* [n, 64, 128] */
} m3_msa_attend;

/* Bytes of m3_msa_select.work. */
size_t m3_msa_select_bytes(int32_t n_rows, int64_t max_blocks);

m3_msa_result m3_msa_select_decode(const m3_msa_select *p, cudaStream_t stream);
m3_msa_result m3_msa_attend_decode(const m3_msa_attend *p, cudaStream_t stream);

/* Both; up to 1024 blocks in two launches, the lists chosen by the attention kernel. a->blocks is not read, s->blocks
 * gets the lists. The rows of both are the same. */
m3_msa_result m3_msa_decode(const m3_msa_select *s, const m3_msa_attend *a, cudaStream_t stream);

/* Attention of decode rows over all visible blocks (dense layers): blocks is not read. work: m3_msa_dense_bytes(n),
 * which is enough for fewer rows too; 0 on another device. */
size_t m3_msa_dense_bytes(int32_t n_rows);
m3_msa_result m3_msa_dense_decode(const m3_msa_attend *p, void *work, cudaStream_t stream);

/* Prefill: rows are n consecutive tokens of one sequence from first_pos on, up to 1,048,576 tokens with what is before
 * them. Rows of any number are taken, many are efficient. */
typedef struct m3_msa_prefill {
  m3_msa_shape shape;
  int32_t n;
  int64_t first_pos;
  const int32_t *table; /* page of each block of the sequence */
  const void *index;    /* [n_pages, 128, 128] */
  int32_t index_type;   /* M3_TYPE_BF16, M3_TYPE_F16 or M3_TYPE_F32 */
  const float *index_q; /* [n, 4, 128] */
  const void *k, *v;    /* [n_pages, 4, 128, 128] */
  int32_t kv_type;      /* M3_TYPE_BF16 or M3_TYPE_F16 */
  const float *q;       /* [n, 64, 128] */
  int32_t *blocks;      /* [n, 4, 16] ascending, padded with -1: written by select, read by attend */
  float *out;           /* [n, 64, 128] */
  int32_t *not_finite;  /* select: lowered to `code` if a query or a key is not finite, else left alone */
  void *work;           /* select: m3_msa_prefill_select_bytes, aligned to 256 */
  int32_t code;
} m3_msa_prefill;

/* Enough for n rows or fewer, the last of which sees max_blocks blocks or fewer: some 260 bytes for each token, 520
 * with float32 keys, and up to 6 KB for each row; 0 on another device. */
size_t m3_msa_prefill_select_bytes(int32_t n, int64_t max_blocks, int32_t index_type);

/* Block lists as m3_cpu_select makes them. Keys and queries enter the tensor cores in float16 parts with a power of two
 * for each page and query, 22 bits and more of each number: products lose less than 2^-20 of |q| |k|. */
m3_msa_result m3_msa_prefill_select(const m3_msa_prefill *p, cudaStream_t stream);

/* Queries and softmax weights are rounded to kv_type before the tensor cores, as in dense flash attention: in the worst
 * head of a row up to 7e-3 of its norm with bfloat16 and 8e-4 with float16. */
m3_msa_result m3_msa_prefill_attend(const m3_msa_prefill *p, cudaStream_t stream);

/* The same over all visible blocks (dense layers): blocks is not read. */
m3_msa_result m3_msa_prefill_dense(const m3_msa_prefill *p, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
