/* cache.h - pages of one block each, shared by sequences.
 *
 * A page id stands for the same place in K, V and (sparse layers) index keys and their low-bit copies of every layer of
 * the window, so that they can only move together. A sequence is a table of page ids and a length; nothing but the
 * table knows where its tokens lie. Pages are counted, and copied when a writer meets a shared one. */
#ifndef M3_SRC_CACHE_H
#define M3_SRC_CACHE_H

#include "backend.h"
#include "m3.h"

typedef struct m3_sequence {
  int32_t *table; /* [blocks_per_sequence] page ids; the first blocks_of(length) are valid */
  int64_t length;
} m3_sequence;

typedef struct m3_cache {
  const m3_backend *backend;
  m3_device_state *state;
  int32_t block_size;
  int64_t context; /* tokens that one sequence can hold */
  int64_t blocks_per_sequence;
  int32_t n_sequences;
  int32_t n_layers;
  m3_layer_cache *layers; /* [n_layers] of the window */
  int64_t kv_page_bytes, index_page_bytes, low_bit_page_bytes;
  int32_t n_head_kv;
  int32_t n_pages, n_free;
  int32_t *free_pages; /* [n_pages] a stack: the next one is free_pages[n_free - 1] */
  int32_t *uses;       /* [n_pages] sequences that hold the page */
  bool poison;
  m3_sequence *sequences;
  const int32_t **tables; /* [n_sequences] the sequences' tables, as operations take them */
} m3_cache;

typedef struct m3_cache_options {
  const m3_hparams *hparams;
  const m3_backend *backend;
  m3_device_state *state;
  int32_t sequences;
  int64_t context;
  int64_t pages; /* 0: enough for every sequence to be full */
  int32_t kv_type, index_type;
  int32_t layer_first, layer_count;
  bool sparse;  /* false: no layer has index keys */
  bool low_bit; /* sparse layers have low-bit copies of them */
  bool poison;
  uint64_t page_seed;
} m3_cache_options;

/* Bytes of K and V, and of index keys with their low-bit copies. M3_ERROR_MEMORY if they do not fit in 64 bits or the
 * pages in 31. */
m3_status m3_cache_bytes(const m3_cache_options *options, uint64_t *kv_bytes, uint64_t *index_bytes, m3_error *err);

/* Fills a zeroed cache; m3_cache_close frees what a failure left. */
m3_status m3_cache_open(m3_cache *cache, const m3_cache_options *options, m3_error *err);
void m3_cache_close(m3_cache *cache);

/* Pages of which every sequence could be full, the most that a cache has; UINT64_MAX if they are too many to count. */
uint64_t m3_cache_most_pages(const m3_hparams *hparams, int64_t context, int32_t sequences);

/* Makes room for the tokens of all spans, each of another sequence: takes pages and copies shared last pages. The
 * lengths stay. On failure (M3_ERROR_CONTEXT) nothing is taken. */
m3_status m3_cache_reserve(m3_cache *cache, const m3_span *spans, int32_t n_spans, m3_error *err);

/* Sets the length (at most what is reserved) and returns the pages beyond it. */
void m3_cache_set_length(m3_cache *cache, int32_t seq, int64_t length);

/* Gives back reserved pages beyond the length. */
void m3_cache_trim(m3_cache *cache, int32_t seq);

/* Drops dst and lets it share all pages of src. */
void m3_cache_fork(m3_cache *cache, int32_t src, int32_t dst);

/* Takes n whole blocks out of a sequence, from block first on, and moves the later ones there, into pages that no other
 * sequence holds. On failure (M3_ERROR_CONTEXT) nothing has changed. */
m3_status m3_cache_drop(m3_cache *cache, int32_t seq, int64_t first, int64_t n, m3_error *err);

/* Bytes of one page of all arrays but the low-bit copies. */
uint64_t m3_cache_page_bytes(const m3_cache *cache);

/* A block of a sequence out of the cache, zeros where no token stands; and into it, tokens 0 to n - 1 of the block. The
 * block's page is there, and no other sequence holds it when it is written. */
void m3_cache_read(m3_cache *cache, int32_t seq, int64_t block, void *dst);
void m3_cache_write(m3_cache *cache, int32_t seq, int64_t block, int64_t n, const void *src);

#endif
