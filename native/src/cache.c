#include "cache.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "quant/traits.h"

#define NO_PAGE (-1)

static int64_t blocks_of(const m3_cache *c, int64_t tokens) { return (tokens + c->block_size - 1) / c->block_size; }

static bool layer_is_sparse(const m3_cache_options *o, int32_t i) {
  return o->sparse && o->layer_first + i >= o->hparams->n_dense_layer;
}

/* Sizes that every function below needs; false if they overflow. */
typedef struct cache_sizes {
  uint64_t n_pages, kv_page, index_page, low_bit_page;
} cache_sizes;

uint64_t m3_cache_most_pages(const m3_hparams *h, int64_t context, int32_t sequences) {
  uint64_t blocks = ((uint64_t)context + (uint64_t)h->block_size - 1) / (uint64_t)h->block_size, pages;
  return m3_mul_u64(blocks, (uint64_t)sequences, &pages) ? pages : UINT64_MAX;
}

static bool sizes_of(const m3_cache_options *o, cache_sizes *s) {
  const m3_hparams *h = o->hparams;
  s->kv_page = (uint64_t)h->n_head_kv * (uint64_t)h->block_size * (uint64_t)m3_row_bytes(o->kv_type, h->head_dim);
  s->index_page = (uint64_t)h->block_size * (uint64_t)m3_row_bytes(o->index_type, h->index_dim);
  s->low_bit_page = o->low_bit ? (uint64_t)o->backend->low_bit_page_bytes(h) : 0;
  s->n_pages = o->pages ? (uint64_t)o->pages : m3_cache_most_pages(h, o->context, o->sequences);
  return s->n_pages <= INT32_MAX;
}

m3_status m3_cache_bytes(const m3_cache_options *o, uint64_t *kv_bytes, uint64_t *index_bytes, m3_error *err) {
  cache_sizes s;
  uint64_t sparse = 0, kv = 0, index = 0;
  for (int32_t i = 0; i < o->layer_count; i++) sparse += layer_is_sparse(o, i);
  /* Page bytes are below 2^45 and pages below 2^31 by the limits of m3.h. */
  if (!sizes_of(o, &s) || !m3_mul_u64(s.n_pages, s.kv_page, &kv) ||
      !m3_mul_u64(kv, 2 * (uint64_t)o->layer_count, &kv) ||
      !m3_mul_u64(s.n_pages, s.index_page + s.low_bit_page, &index) || !m3_mul_u64(index, sparse, &index))
    return m3_fail(err, M3_ERROR_MEMORY,
                   "not enough memory: %d sequences of %" PRId64 " tokens are more than can be addressed",
                   (int)o->sequences, o->context);
  *kv_bytes = kv;
  *index_bytes = index;
  return M3_OK;
}

/* A permutation of the pages by the seed (splitmix64, Fisher-Yates); 0 keeps them in order. */
static void shuffle(int32_t *pages, int32_t n, uint64_t seed) {
  if (!seed) return;
  for (int32_t i = n - 1; i > 0; i--) {
    seed += 0x9e3779b97f4a7c15u;
    uint64_t z = seed;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    int32_t j = (int32_t)((z ^ z >> 31) % (uint64_t)(i + 1));
    int32_t t = pages[i];
    pages[i] = pages[j];
    pages[j] = t;
  }
}

static m3_status alloc_pages(m3_cache *c, void **out, uint64_t page_bytes, int32_t type, int32_t *type_out,
                             m3_error *err) {
  *type_out = type;
  return c->backend->alloc(c->state, (uint64_t)c->n_pages * page_bytes, "the cache of one layer", out, err);
}

static m3_status alloc_layers(m3_cache *c, const m3_cache_options *o, const cache_sizes *s, m3_error *err) {
  c->layers = calloc((size_t)o->layer_count + 1, sizeof *c->layers); /* a window without layers is no NULL */
  if (!c->layers) return m3_fail_memory(err, (uint64_t)o->layer_count * sizeof *c->layers, "the cache");
  for (int32_t i = 0; i < o->layer_count; i++) {
    m3_layer_cache *l = &c->layers[i];
    m3_status status = alloc_pages(c, &l->k, s->kv_page, o->kv_type, &l->kv_type, err);
    if (!status) status = alloc_pages(c, &l->v, s->kv_page, o->kv_type, &l->kv_type, err);
    if (!status && layer_is_sparse(o, i))
      status = alloc_pages(c, &l->index, s->index_page, o->index_type, &l->index_type, err);
    if (!status && layer_is_sparse(o, i) && o->low_bit)
      status = alloc_pages(c, &l->low_bit, s->low_bit_page, o->index_type, &l->index_type, err);
    if (status) return status;
  }
  return M3_OK;
}

static m3_status alloc_tables(m3_cache *c, m3_error *err) {
  c->free_pages = malloc((size_t)c->n_pages * sizeof *c->free_pages);
  c->uses = calloc((size_t)c->n_pages, sizeof *c->uses);
  c->sequences = calloc((size_t)c->n_sequences, sizeof *c->sequences);
  c->tables = calloc((size_t)c->n_sequences, sizeof *c->tables);
  if (!c->free_pages || !c->uses || !c->sequences || !c->tables)
    return m3_fail_memory(err, (uint64_t)c->n_pages * 8, "the page tables");
  for (int32_t s = 0; s < c->n_sequences; s++) {
    c->sequences[s].table = malloc((size_t)c->blocks_per_sequence * sizeof(int32_t));
    if (!c->sequences[s].table) return m3_fail_memory(err, (uint64_t)c->blocks_per_sequence * 4, "a page table");
    for (int64_t b = 0; b < c->blocks_per_sequence; b++) c->sequences[s].table[b] = NO_PAGE;
    c->tables[s] = c->sequences[s].table;
  }
  return M3_OK;
}

m3_status m3_cache_open(m3_cache *c, const m3_cache_options *o, m3_error *err) {
  uint64_t kv_bytes, index_bytes;
  m3_status status = m3_cache_bytes(o, &kv_bytes, &index_bytes, err);
  if (status) return status;
  cache_sizes s;
  sizes_of(o, &s);
  c->backend = o->backend;
  c->state = o->state;
  c->block_size = o->hparams->block_size;
  c->context = o->context;
  c->blocks_per_sequence = blocks_of(c, o->context);
  c->n_sequences = o->sequences;
  c->n_layers = o->layer_count;
  c->n_head_kv = o->hparams->n_head_kv;
  c->n_pages = c->n_free = (int32_t)s.n_pages;
  c->kv_page_bytes = (int64_t)s.kv_page;
  c->index_page_bytes = (int64_t)s.index_page;
  c->low_bit_page_bytes = (int64_t)s.low_bit_page;
  c->poison = o->poison;
  status = alloc_tables(c, err);
  if (!status) status = alloc_layers(c, o, &s, err);
  if (status) return status;
  for (int32_t i = 0; i < c->n_pages; i++) c->free_pages[i] = c->n_pages - 1 - i; /* page 0 is taken first */
  shuffle(c->free_pages, c->n_pages, o->page_seed);
  return M3_OK;
}

void m3_cache_close(m3_cache *c) {
  for (int32_t i = 0; c->layers && i < c->n_layers; i++) {
    c->backend->free(c->state, c->layers[i].k);
    c->backend->free(c->state, c->layers[i].v);
    c->backend->free(c->state, c->layers[i].index);
    c->backend->free(c->state, c->layers[i].low_bit);
  }
  for (int32_t s = 0; c->sequences && s < c->n_sequences; s++) free(c->sequences[s].table);
  free(c->layers);
  free(c->free_pages);
  free(c->uses);
  free(c->sequences);
  free(c->tables);
}

/* ---------------------------------------------------------------------------------------------- pages */

/* Applies `operation` to page dst (and src) of every array of every layer. */
static void on_every_array(m3_cache *c, void (*operation)(m3_device_state *, const m3_page_params *), int32_t src,
                           int32_t dst) {
  for (int32_t i = 0; i < c->n_layers; i++) {
    m3_layer_cache *l = &c->layers[i];
    operation(c->state, &(m3_page_params){l->k, c->kv_page_bytes, src, dst});
    operation(c->state, &(m3_page_params){l->v, c->kv_page_bytes, src, dst});
    if (l->index) operation(c->state, &(m3_page_params){l->index, c->index_page_bytes, src, dst});
    if (l->low_bit) operation(c->state, &(m3_page_params){l->low_bit, c->low_bit_page_bytes, src, dst});
  }
}

static int32_t take_page(m3_cache *c) {
  int32_t page = c->free_pages[--c->n_free];
  c->uses[page] = 1;
  if (c->poison) on_every_array(c, c->backend->page_poison, page, page);
  return page;
}

static void release_page(m3_cache *c, int32_t *entry) {
  if (*entry == NO_PAGE) return;
  if (--c->uses[*entry] == 0) c->free_pages[c->n_free++] = *entry;
  *entry = NO_PAGE;
}

/* A page of its own in place of one that other sequences hold too. */
static void unshare(m3_cache *c, int32_t *entry) {
  int32_t copy = take_page(c);
  on_every_array(c, c->backend->page_copy, *entry, copy);
  release_page(c, entry);
  *entry = copy;
}

/* The page that the next token of a sequence goes to, if it holds tokens already; else NULL. */
static int32_t *partly_filled(m3_cache *c, int32_t seq) {
  m3_sequence *s = &c->sequences[seq];
  return s->length % c->block_size ? &s->table[s->length / c->block_size] : NULL;
}

static m3_status too_few_pages(const m3_cache *c, int64_t need, m3_error *err) {
  return m3_fail(err, M3_ERROR_CONTEXT, "the cache is full: %" PRId64 " pages are needed, %d of %d are free", need,
                 c->n_free, c->n_pages);
}

/* Pages that the spans take. Of the sequences that hold a page and write to it, the last one that still holds it needs
 * no copy. */
static int64_t pages_needed(m3_cache *c, const m3_span *spans, int32_t n_spans) {
  int64_t need = 0;
  for (int32_t i = 0; i < n_spans; i++) {
    int64_t length = c->sequences[spans[i].seq].length;
    const int32_t *page = partly_filled(c, spans[i].seq);
    need += blocks_of(c, length + spans[i].n) - blocks_of(c, length);
    if (page) need += c->uses[*page]-- > 1;
  }
  for (int32_t i = 0; i < n_spans; i++) {
    const int32_t *page = partly_filled(c, spans[i].seq);
    if (page) c->uses[*page]++;
  }
  return need;
}

m3_status m3_cache_reserve(m3_cache *c, const m3_span *spans, int32_t n_spans, m3_error *err) {
  for (int32_t i = 0; i < n_spans; i++) {
    int64_t length = c->sequences[spans[i].seq].length, n = spans[i].n;
    if (n > c->context - length)
      return m3_fail(err, M3_ERROR_CONTEXT,
                     "the context is full: sequence %d holds %" PRId64 " of %" PRId64 " tokens, %" PRId64
                     " more do not fit",
                     (int)spans[i].seq, length, c->context, n);
  }
  int64_t need = pages_needed(c, spans, n_spans);
  if (need > c->n_free) return too_few_pages(c, need, err);
  for (int32_t i = 0; i < n_spans; i++) {
    m3_sequence *s = &c->sequences[spans[i].seq];
    int32_t *page = partly_filled(c, spans[i].seq);
    if (page && c->uses[*page] > 1) unshare(c, page);
    for (int64_t b = blocks_of(c, s->length); b < blocks_of(c, s->length + spans[i].n); b++) s->table[b] = take_page(c);
  }
  return M3_OK;
}

void m3_cache_set_length(m3_cache *c, int32_t seq, int64_t length) {
  c->sequences[seq].length = length;
  m3_cache_trim(c, seq);
}

void m3_cache_trim(m3_cache *c, int32_t seq) {
  m3_sequence *s = &c->sequences[seq];
  for (int64_t b = blocks_of(c, s->length); b < c->blocks_per_sequence && s->table[b] != NO_PAGE; b++)
    release_page(c, &s->table[b]);
}

void m3_cache_fork(m3_cache *c, int32_t src, int32_t dst) {
  m3_cache_set_length(c, dst, 0);
  m3_sequence *from = &c->sequences[src], *to = &c->sequences[dst];
  for (int64_t b = 0; b < blocks_of(c, from->length); b++) {
    to->table[b] = from->table[b];
    c->uses[to->table[b]]++;
  }
  to->length = from->length;
}

m3_status m3_cache_drop(m3_cache *c, int32_t seq, int64_t first, int64_t n, m3_error *err) {
  m3_sequence *s = &c->sequences[seq];
  int64_t end = blocks_of(c, s->length), need = 0;
  /* Sequences share pages from the first block on: where a later page is shared, none of the dropped ones gets free. */
  for (int64_t b = first + n; b < end; b++) need += c->uses[s->table[b]] > 1;
  if (need > c->n_free) return too_few_pages(c, need, err);
  for (int64_t b = first; b < first + n; b++) release_page(c, &s->table[b]);
  for (int64_t b = first; b < end - n; b++) {
    s->table[b] = s->table[b + n];
    s->table[b + n] = NO_PAGE;
    if (c->uses[s->table[b]] > 1) unshare(c, &s->table[b]);
  }
  s->length -= n * c->block_size;
  return M3_OK;
}

/* ---------------------------------------------------------------------------------------------- bytes */

/* An array of rows in a page: [heads, block_size] rows. */
typedef struct page_array {
  char *page;
  int64_t bytes; /* of the page */
  int32_t heads;
} page_array;

/* The arrays of a page of a layer, in the order in which they are exported. */
static int arrays_of(const m3_cache *c, const m3_layer_cache *l, int64_t page, page_array out[3]) {
  out[0] = (page_array){(char *)l->k + page * c->kv_page_bytes, c->kv_page_bytes, c->n_head_kv};
  out[1] = (page_array){(char *)l->v + page * c->kv_page_bytes, c->kv_page_bytes, c->n_head_kv};
  if (!l->index) return 2;
  out[2] = (page_array){(char *)l->index + page * c->index_page_bytes, c->index_page_bytes, 1};
  return 3;
}

uint64_t m3_cache_page_bytes(const m3_cache *c) {
  uint64_t bytes = 0;
  for (int32_t i = 0; i < c->n_layers; i++)
    bytes += 2 * (uint64_t)c->kv_page_bytes + (c->layers[i].index ? (uint64_t)c->index_page_bytes : 0);
  return bytes;
}

void m3_cache_read(m3_cache *c, int32_t seq, int64_t block, void *dst) {
  const m3_sequence *s = &c->sequences[seq];
  int64_t n = s->length - block * c->block_size;
  char *out = dst;
  for (int32_t i = 0; i < c->n_layers; i++) {
    page_array arrays[3];
    int count = arrays_of(c, &c->layers[i], s->table[block], arrays);
    for (int a = 0; a < count; out += arrays[a++].bytes) {
      int64_t head_bytes = arrays[a].bytes / arrays[a].heads, row_bytes = head_bytes / c->block_size;
      c->backend->download(c->state, out, arrays[a].page, (uint64_t)arrays[a].bytes);
      for (int32_t head = 0; head < arrays[a].heads && n < c->block_size; head++)
        memset(out + head * head_bytes + n * row_bytes, 0, (size_t)((c->block_size - n) * row_bytes));
    }
  }
}

void m3_cache_write(m3_cache *c, int32_t seq, int64_t block, int64_t n, const void *src) {
  const char *in = src;
  for (int32_t layer = 0; layer < c->n_layers; layer++) {
    page_array arrays[3];
    int count = arrays_of(c, &c->layers[layer], c->sequences[seq].table[block], arrays);
    for (int a = 0; a < count; in += arrays[a++].bytes) {
      /* A full page goes as one; of another one the rows without tokens stay as they are. */
      int32_t pieces = n < c->block_size ? arrays[a].heads : 1;
      int64_t stride = arrays[a].bytes / pieces, bytes = stride / c->block_size * n;
      for (int32_t i = 0; i < pieces; i++)
        c->backend->upload(c->state, arrays[a].page + i * stride, in + i * stride, (uint64_t)bytes);
    }
  }
}
