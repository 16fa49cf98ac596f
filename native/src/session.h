/* session.h - a session: its cache, its work buffers, and what the last eval recorded. */
#ifndef M3_SRC_SESSION_H
#define M3_SRC_SESSION_H

#include <stdatomic.h>

#include "backend.h"
#include "cache.h"
#include "host_experts.h"
#include "model.h"

struct m3_session {
  m3_model *model;
  m3_session_options options; /* with the defaults filled in */
  m3_device_state *state;
  m3_cache cache;
  m3_scratch scratch;
  float *hidden;         /* [chunk, n_embd] on the backend */
  float *cos, *sin;      /* [chunk, n_rot / 2] */
  float *logits;         /* [logit_rows, n_vocab] on the backend */
  float *picked;         /* [logit_rows, n_embd] rows whose logits are wanted, on the backend */
  int32_t *row_seq;      /* [chunk] */
  int32_t *row_ids;      /* [chunk] ids of a chunk of which some embeddings are given */
  int64_t *row_pos;      /* [chunk] */
  int64_t embedded;      /* given embeddings that the running eval has taken */
  float *scores;         /* [chunk, n_index_head, blocks of the longest sequence] when scores are recorded */
  float *mass;           /* [chunk, n_head, top_k] when masses are recorded */
  int64_t last_rows;     /* of the last eval */
  int64_t last_blocks;   /* blocks of its longest sequence */
  int32_t **blocks;      /* [layer_count] recorded lists [last_rows, n_index_head, top_k], NULL for dense layers */
  float **block_scores;  /* [layer_count] likewise [last_rows, n_index_head, last_blocks] */
  float **masses;        /* [layer_count] likewise [last_rows, n_head, top_k] */
  double *sums;          /* when importance is recorded: of all evals, on the backend; see importance.h */
  double *sums_before;   /* as they were before the running eval */
  m3_input_sums *inputs; /* [layer_count][M3_INPUTS] places in sums; NULL when importance is not recorded */
  atomic_bool cancel;
  atomic_llong done, total;
  /* NULL: none of the window's experts are on the CPU beside a device. */
  m3_host_experts *host_experts;
};

/* Tokens of a sequence from which the low-bit scan pays, as measured by tests/bench/msa.c; by itself
 * (M3_INDEX_SCAN_AUTO) it is used from there on. */
#define M3_LOW_BIT_TOKENS 16384

/* Rows evaluated together where nobody asks for another number. */
#define M3_DEFAULT_CHUNK 512

/* Tokens of a sequence from which a session scans low-bit copies, -1: it keeps none. */
int64_t m3_low_bit_tokens(const m3_model *m, const m3_session_options *o);

/* Rows whose logits are computed together: bounds the logits buffer for a large vocabulary. */
#define M3_LOGIT_ROWS 32

/* M3_ERROR_ARGUMENT unless low <= value <= high. */
m3_status m3_check_range(const char *option, int64_t value, int64_t low, int64_t high, m3_error *err);

/* Runs the layers over one chunk: rows [first, first + n) of the batch, whose places are in row_seq and row_pos, with
 * their pages reserved. Writes out as the batch asks. */
m3_status m3_forward_chunk(m3_session *session, const m3_batch *batch, int64_t first, int32_t n, m3_error *err);

#endif
