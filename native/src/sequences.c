/* The sequences of a session between evals: lengths, forks, dropped blocks, and pages that come and go as bytes. */
#include <inttypes.h>
#include <math.h>

#include "rope.h"
#include "session.h"

static m3_status check_seq(const m3_session *s, int32_t seq, m3_error *err) {
  if (seq >= 0 && seq < s->options.sequences) return M3_OK;
  return m3_fail(err, M3_ERROR_ARGUMENT, "sequence %d, expected 0 to %d", (int)seq, (int)s->options.sequences - 1);
}

int64_t m3_session_length(const m3_session *s, int32_t seq) {
  return check_seq(s, seq, NULL) ? -1 : s->cache.sequences[seq].length;
}

m3_status m3_session_rewind(m3_session *s, int32_t seq, int64_t length, m3_error *err) {
  m3_status status = check_seq(s, seq, err);
  if (!status) status = m3_check_range("length", length, 0, s->cache.sequences[seq].length, err);
  if (!status) m3_cache_set_length(&s->cache, seq, length);
  return status;
}

m3_status m3_session_fork(m3_session *s, int32_t src, int32_t dst, m3_error *err) {
  m3_status status = check_seq(s, src, err);
  if (!status) status = check_seq(s, dst, err);
  if (!status && src == dst)
    status = m3_fail(err, M3_ERROR_ARGUMENT, "sequence %d cannot be forked onto itself", (int)src);
  if (!status) m3_cache_fork(&s->cache, src, dst);
  return status;
}

void m3_session_pages(const m3_session *s, int64_t *used, int64_t *total) {
  *used = s->cache.n_pages - s->cache.n_free;
  *total = s->cache.n_pages;
}

/* ---------------------------------------------------------------------------------------------- rows of the cache */

/* Tokens of a sequence as rows: the next ones from `pos` on, as many as a chunk has room for. */
static m3_rows rows_from(m3_session *s, int32_t seq, int64_t pos) {
  int64_t left = s->cache.sequences[seq].length - pos;
  int32_t n = left < s->options.chunk ? (int32_t)left : s->options.chunk;
  for (int32_t r = 0; r < n; r++) {
    s->row_seq[r] = seq;
    s->row_pos[r] = pos + r;
  }
  return (m3_rows){n, s->row_seq, s->row_pos, s->cache.tables, s->cos, s->sin, NULL};
}

static m3_context context_of(m3_session *s) {
  return (m3_context){.hparams = &s->model->hparams,
                      .kernels = s->model->kernels,
                      .scratch = &s->scratch,
                      .state = s->state,
                      .layer = s->options.layer_first};
}

/* What the device has to say of the operations so far. They look for no broken numbers. */
static m3_status wait_for_device(m3_session *s, m3_error *err) {
  m3_context c = context_of(s);
  m3_broken broken;
  return s->model->backend->finish(&c, &broken, err);
}

/* Angles from `back` positions behind each row to its own. */
static void fill_turns(m3_session *s, int32_t n, int64_t back) {
  const m3_hparams *h = &s->model->hparams;
  int32_t half = h->n_rot / 2;
  for (int32_t i = 0; i < half; i++) {
    float frequency = m3_rope_frequency(h, i);
    for (int32_t r = 0; r < n; r++) {
      double turn =
          (double)m3_rope_angle(frequency, s->row_pos[r]) - (double)m3_rope_angle(frequency, s->row_pos[r] + back);
      s->cos[r * half + i] = (float)cos(turn);
      s->sin[r * half + i] = (float)sin(turn);
    }
  }
}

/* Turns the keys from position `first` on, which stood `back` positions further behind. */
static m3_status turn(m3_session *s, int32_t seq, int64_t first, int64_t back, m3_error *err) {
  const m3_backend *b = s->model->backend;
  m3_status status = M3_OK;
  for (int64_t pos = first; pos < s->cache.sequences[seq].length && !status;) {
    m3_context c = context_of(s);
    m3_rows rows = rows_from(s, seq, pos);
    fill_turns(s, rows.n, back);
    b->begin(&c, &rows);
    for (int32_t i = 0; i < s->options.layer_count; i++, c.layer++)
      b->rotate(&c, &(m3_rotate_params){&rows, s->cache.layers[i]});
    status = wait_for_device(s, err);
    pos += rows.n;
  }
  return status;
}

m3_status m3_session_drop(m3_session *s, int32_t seq, int64_t first_block, int64_t n_blocks, m3_error *err) {
  m3_status status = check_seq(s, seq, err);
  if (status) return status;
  int64_t block_size = s->cache.block_size, full = s->cache.sequences[seq].length / block_size;
  if (full < 1)
    return m3_fail(err, M3_ERROR_ARGUMENT, "sequence %d has %" PRId64 " tokens, no whole block of %" PRId64 " to drop",
                   (int)seq, s->cache.sequences[seq].length, block_size);
  status = m3_check_range("first_block", first_block, 0, full - 1, err);
  if (!status) status = m3_check_range("n_blocks", n_blocks, 1, full - first_block, err);
  if (!status) status = m3_cache_drop(&s->cache, seq, first_block, n_blocks, err);
  return status ? status : turn(s, seq, first_block * block_size, n_blocks * block_size, err);
}

/* ---------------------------------------------------------------------------------------------- pages as bytes */

uint64_t m3_session_page_bytes(const m3_session *s) { return m3_cache_page_bytes(&s->cache); }

static m3_status check_bytes(const m3_session *s, const void *page, uint64_t n_bytes, m3_error *err) {
  uint64_t want = m3_session_page_bytes(s);
  if (page && n_bytes == want) return M3_OK;
  return m3_fail(err, M3_ERROR_ARGUMENT, "a page of %" PRIu64 " bytes at %s, expected %" PRIu64, n_bytes,
                 page ? "an address" : "NULL", want);
}

m3_status m3_session_export(m3_session *s, int32_t seq, int64_t block, void *dst, uint64_t n_bytes, m3_error *err) {
  m3_status status = check_seq(s, seq, err);
  if (status) return status;
  int64_t blocks = (s->cache.sequences[seq].length + s->cache.block_size - 1) / s->cache.block_size;
  if (blocks < 1) return m3_fail(err, M3_ERROR_ARGUMENT, "sequence %d is empty: it has no block", (int)seq);
  status = m3_check_range("block", block, 0, blocks - 1, err);
  if (!status) status = check_bytes(s, dst, n_bytes, err);
  if (status) return status;
  m3_cache_read(&s->cache, seq, block, dst);
  return wait_for_device(s, err);
}

/* Low-bit copies of the tokens from position `first` on. */
static void copy_low_bit(m3_session *s, int32_t seq, int64_t first) {
  for (int64_t pos = first; pos < s->cache.sequences[seq].length;) {
    m3_context c = context_of(s);
    m3_rows rows = rows_from(s, seq, pos);
    for (int32_t i = 0; i < s->options.layer_count; i++)
      if (s->cache.layers[i].low_bit) s->model->backend->low_bit(&c, &rows, s->cache.layers[i]);
    pos += rows.n;
  }
}

m3_status m3_session_import(m3_session *s, int32_t seq, int32_t n_tokens, const void *src, uint64_t n_bytes,
                            m3_error *err) {
  m3_status status = check_seq(s, seq, err);
  if (status) return status;
  int64_t length = s->cache.sequences[seq].length, block = length / s->cache.block_size;
  if (length % s->cache.block_size)
    return m3_fail(err, M3_ERROR_ARGUMENT, "sequence %d has %" PRId64 " tokens, no whole number of blocks of %d",
                   (int)seq, length, (int)s->cache.block_size);
  status = m3_check_range("n_tokens", n_tokens, 1, s->cache.block_size, err);
  if (!status) status = check_bytes(s, src, n_bytes, err);
  m3_span span = {seq, n_tokens};
  if (!status) status = m3_cache_reserve(&s->cache, &span, 1, err);
  if (status) return status;
  m3_cache_write(&s->cache, seq, block, n_tokens, src);
  m3_cache_set_length(&s->cache, seq, length + n_tokens);
  copy_low_bit(s, seq, length);
  return wait_for_device(s, err);
}
