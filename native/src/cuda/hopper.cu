/* Selection and attention by the Hopper kernels. A chunk is cut into runs, the rows of one sequence: long runs go to
 * the kernels of prefill one by one, short ones in pieces of a few rows to those of decode, as many at a time as these
 * take. */
#include "cuda/hopper.cuh"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

#include "cuda/msa_kernels.h"
#include "cuda/msa_launch.cuh"

/* Rows of a run from which the kernels of prefill are faster, and of a piece, which shares one pass over the keys. */
enum { LONG_RUN = 17, PIECE = 4 };

/* Of the copies of index keys; rows that select by them in one call; and tokens from which the scan
 * saves (tests/bench/gpu/h200_low_bit.csv) more than the write of the copies costs. */
enum { LOW_BITS = 8, LOW_BIT_ROWS = 16, LOW_BIT_TOKENS_F32 = 262144, LOW_BIT_TOKENS_16 = 524288 };

static m3_msa_shape shape_of(const m3_hparams *h) {
  return m3_msa_shape{h->n_head,    h->n_head_kv,  h->head_dim, h->n_index_head,
                      h->index_dim, h->block_size, h->top_k,    h->local_blocks};
}

static bool is_16_bit(int32_t type) { return type == M3_TYPE_F16 || type == M3_TYPE_BF16; }

/* Its shared memory tells whether the kernels have their bodies, which only code for sm_90a has. */
__global__ static void has_bodies(int32_t *out) {
#if M3_MSA_HOPPER
  __shared__ int32_t x[M3_WARP];
  x[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = x[M3_WARP - 1 - threadIdx.x];
#endif
}

static bool built() {
  cudaFuncAttributes a;
  return cudaFuncGetAttributes(&a, (const void *)has_bodies) == cudaSuccess && a.sharedSizeBytes > 0;
}

/* Why no part of the session takes the kernels, empty if some may. */
static void refusal(const m3_state_params *p, char *out, size_t size) {
  const m3_hparams *h = p->hparams;
  const struct {
    const char *name;
    int64_t is;
    bool taken;
  } sizes[] = {
      {"head_dim", h->head_dim, h->head_dim == m3_msa::DIM},
      {"index dim", h->index_dim, h->index_dim == m3_msa::DIM},
      {"block size", h->block_size, h->block_size == m3_msa::BLOCK},
      {"top_k", h->top_k, h->top_k == m3_msa::TOP_K},
      {"local blocks", h->local_blocks, h->local_blocks >= 1 && h->local_blocks < m3_msa::TOP_K},
      {"K/V heads", h->n_head_kv, h->n_head_kv == m3_msa::HEADS},
      {"query heads", h->n_head, h->n_head == m3_msa::HEADS * m3_msa::GROUP},
      {"index heads", h->n_index_head, h->n_index_head == m3_msa::HEADS},
      {"blocks of context", p->blocks, p->blocks <= M3_MSA_MAX_BLOCKS},
  };
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  *out = '\0';
  if (p->exact) {
    snprintf(out, size, "exact");
  } else if (!m3_msa::hopper_multiprocessors()) {
    snprintf(out, size, "sm_%d%d", major, minor);
  } else if (!built()) {
    snprintf(out, size, "not built for sm_90a");
  } else {
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !*out; i++)
      if (!sizes[i].taken) snprintf(out, size, "%s %" PRId64, sizes[i].name, sizes[i].is);
  }
}

m3_hopper m3_hopper_of(const m3_state_params *p) {
  char why[64];
  refusal(p, why, sizeof why);
  bool select = !*why && (is_16_bit(p->index_type) || p->index_type == M3_TYPE_F32);
  return m3_hopper{select, !*why && is_16_bit(p->kv_type)};
}

void m3_hopper_describe(const m3_state_params *p, char *out, size_t size) {
  char why[64];
  refusal(p, why, sizeof why);
  m3_hopper h = m3_hopper_of(p);
  const char *low_bit = p->low_bit ? ", low-bit index scan" : "";
  if (*why)
    snprintf(out, size, "plain (%s)", why);
  else if (h.select && h.attend)
    snprintf(out, size, "hopper%s", low_bit);
  else if (h.select)
    snprintf(out, size, "hopper%s, attention plain (K/V %s)", low_bit, m3_type_name(p->kv_type));
  else if (h.attend)
    snprintf(out, size, "hopper, selection plain (index keys %s)", m3_type_name(p->index_type));
  else
    snprintf(out, size, "plain (K/V %s, index keys %s)", m3_type_name(p->kv_type), m3_type_name(p->index_type));
}

int64_t m3_hopper_bytes(const m3_state_params *p) {
  m3_hopper h = m3_hopper_of(p);
  int64_t select = h.select ? (int64_t)m3_msa_prefill_select_bytes(p->chunk, p->blocks, p->index_type) : 0;
  int64_t attend = h.attend ? (int64_t)m3_msa_dense_bytes(M3_MSA_MAX_ROWS) : 0;
  return select > attend ? select : attend;
}

/* ------------------------------------------------------------------------------------------------ low-bit copies */

int64_t m3_hopper_low_bit_page_bytes(const m3_hparams *h) {
  (void)h; /* of no other sizes, see m3_hopper_low_bit_tokens */
  return m3_msa_low_bit_page_bytes(LOW_BITS);
}

int64_t m3_hopper_low_bit_tokens(const m3_state_params *p) {
  if (!m3_hopper_of(p).select) return -1;
  return p->index_type == M3_TYPE_F32 ? LOW_BIT_TOKENS_F32 : LOW_BIT_TOKENS_16;
}

int64_t m3_hopper_low_bit_bytes(const m3_state_params *p) {
  int32_t rows = p->chunk < LOW_BIT_ROWS ? p->chunk : LOW_BIT_ROWS;
  return p->low_bit ? (int64_t)m3_msa_low_bit_work_bytes(rows, p->blocks) : 0;
}

/* The counter beside the broken number, see m3_told. */
static uint64_t *rescored_of(const m3_device_state *s) {
  return (uint64_t *)((char *)s->broken + offsetof(m3_told, rescored));
}

void m3_hopper_count(const m3_context *c) {
  /* Tokens are scored one by one, and counted as the blocks that as many would fill. */
  uint64_t of_block = (uint64_t)c->hparams->n_index_head * (uint64_t)c->hparams->block_size;
  c->scratch->blocks_rescored = (int64_t)((c->state->host_told->rescored + of_block - 1) / of_block);
}

void m3_hopper_count_blocks(const m3_context *c, int64_t layers) {
  const m3_device_state *s = c->state;
  const int64_t *pos = (const int64_t *)(s->host_places + ((const char *)s->pos - s->places));
  for (int32_t r = 0; layers && r < s->n; r++)
    c->scratch->blocks_bounded += layers * (pos[r] / c->hparams->block_size + 1);
}

/* ------------------------------------------------------------------------------------------------ calls */

/* Rows of one call: a long run, or pieces of as many rows each. */
struct call {
  int32_t first, n;
  int32_t per; /* rows of a piece; 0: a long run */
};

static int32_t run_from(const m3_rows *rows, int32_t first) {
  int32_t n = 1;
  while (first + n < rows->n && rows->seq[first + n] == rows->seq[first]) n++;
  return n;
}

/* Rows of the piece that begins with the row `first`, 0 where a long run begins. */
static int32_t piece_at(const m3_rows *rows, int32_t first) {
  int32_t before = 0, left = run_from(rows, first);
  while (before < first && rows->seq[first - before - 1] == rows->seq[first]) before++;
  return before + left >= LONG_RUN ? 0 : left < PIECE ? left : PIECE;
}

/* The call that begins with the row `first`; pieces up to `most` rows. */
static call call_at(const m3_rows *rows, int32_t first, int32_t most) {
  int32_t per = piece_at(rows, first), n = per;
  if (!per) return call{first, run_from(rows, first), 0};
  while (first + n < rows->n && n + per <= most && piece_at(rows, first + n) == per) n += per;
  return call{first, n, per};
}

static m3_msa_rows rows_of(const m3_device_state *s, const call &c, int32_t per) {
  return m3_msa_rows{c.n, per, s->seq + c.first, s->pos + c.first, s->table_of, s->max_blocks};
}

static m3_msa_prefill prefill_of(const m3_context *x, const m3_rows *rows, const m3_layer_cache *cache, const call &c) {
  const m3_device_state *s = x->state;
  m3_msa_prefill p = {};
  p.shape = shape_of(x->hparams);
  p.n = c.n;
  p.first_pos = rows->pos[c.first];
  p.table = s->tables + rows->seq[c.first] * s->blocks;
  p.index = cache->index;
  p.index_type = cache->index_type;
  p.index_q = x->scratch->index_q + (int64_t)c.first * x->hparams->n_index_head * x->hparams->index_dim;
  p.k = cache->k;
  p.v = cache->v;
  p.kv_type = cache->kv_type;
  p.q = x->scratch->q + (int64_t)c.first * x->hparams->n_head * x->hparams->head_dim;
  p.not_finite = s->broken;
  p.code = m3_broken_code(x, M3_PART_SCORES);
  p.work = s->hopper_work;
  return p;
}

/* A refusal here contradicts m3_hopper_of. */
static void note(m3_device_state *s, m3_msa_result result, const char *where) {
  cudaError_t error = cudaGetLastError();
  if (result == M3_MSA_LAUNCHED) return;
  m3_note(s, error != cudaSuccess ? error : cudaErrorNotSupported, where);
}

__global__ static void settle() {}

/* A scan reads keys in blocks before those of its own rows while the kernels before it still run. Where a run is cut,
 * those may be keys of this chunk: a kernel between that is launched in the ordinary way has them written. */
static void settle_keys(m3_device_state *s, const m3_rows *rows) {
  for (int32_t first = 0, n; first < rows->n; first += n) {
    n = run_from(rows, first);
    if (n <= PIECE || n >= LONG_RUN) continue;
    settle<<<1, 1, 0, s->stream>>>();
    m3_launched(s, "selection");
    return;
  }
}

void m3_hopper_store_low_bit(const m3_context *x, const m3_layer_cache *cache) {
  const m3_device_state *s = x->state;
  m3_msa_low_bit_store_params p = {s->n,         LOW_BITS,          s->seq,        s->pos, s->table_of,
                                   cache->index, cache->index_type, cache->low_bit};
  note(x->state, m3_msa_low_bit_store(&p, s->stream), "low-bit index keys");
}

/* Decided by what repeated steps agree in. */
static bool scans_low_bit(const m3_device_state *s, const m3_select_params *p) {
  return p->cache.low_bit && (p->low_bit_from == 0 || s->max_blocks > p->low_bit_from);
}

void m3_hopper_select(const m3_context *x, const m3_select_params *p) {
  m3_device_state *s = x->state;
  const m3_hparams *h = x->hparams;
  int64_t list = (int64_t)h->n_index_head * h->top_k;
  bool low_bit = scans_low_bit(s, p);
  settle_keys(s, p->rows);
  for (int32_t first = 0; first < p->rows->n;) {
    call c = call_at(p->rows, first, low_bit ? LOW_BIT_ROWS : s->select_rows);
    m3_msa_result result;
    if (c.per) {
      m3_msa_select a = {};
      a.shape = shape_of(h);
      a.rows = rows_of(s, c, c.per);
      a.index = p->cache.index;
      a.index_type = p->cache.index_type;
      a.index_q = x->scratch->index_q + (int64_t)first * h->n_index_head * h->index_dim;
      a.blocks = p->blocks + first * list;
      a.not_finite = s->broken;
      a.work = s->block_scores;
      a.code = m3_broken_code(x, M3_PART_SCORES);
      if (low_bit) {
        m3_msa_low_bit b = {a, p->cache.low_bit, LOW_BITS, rescored_of(s)};
        result = m3_msa_low_bit_select(&b, s->stream);
        for (int32_t r = first; r < first + c.n; r++) x->scratch->blocks_bounded += p->rows->pos[r] / h->block_size + 1;
      } else {
        result = m3_msa_select_decode(&a, s->stream);
      }
    } else {
      m3_msa_prefill a = prefill_of(x, p->rows, &p->cache, c);
      a.blocks = p->blocks + first * list;
      result = m3_msa_prefill_select(&a, s->stream);
    }
    note(s, result, "selection");
    first += c.n;
  }
  s->low_bit_layers += low_bit;
}

void m3_hopper_attend(const m3_context *x, const m3_attend_params *p) {
  m3_device_state *s = x->state;
  const m3_hparams *h = x->hparams;
  int64_t width = (int64_t)h->n_head * h->head_dim, list = (int64_t)h->n_head_kv * h->top_k;
  for (int32_t first = 0, n; first < p->rows->n; first += n) {
    n = run_from(p->rows, first);
    bool is_long = n >= LONG_RUN;
    /* Each short row reads for itself: runs go together. */
    while (!is_long && first + n < p->rows->n) {
      int32_t next = run_from(p->rows, first + n);
      if (next >= LONG_RUN || n + next > M3_MSA_MAX_ROWS) break;
      n += next;
    }
    call c = {first, n, is_long ? 0 : 1};
    m3_msa_result result;
    if (is_long) {
      m3_msa_prefill a = prefill_of(x, p->rows, &p->cache, c);
      a.blocks = p->blocks ? (int32_t *)(uintptr_t)p->blocks + first * list : NULL;
      a.out = p->out + first * width;
      result = p->blocks ? m3_msa_prefill_attend(&a, s->stream) : m3_msa_prefill_dense(&a, s->stream);
    } else {
      m3_msa_attend a = {};
      a.shape = shape_of(h);
      a.rows = rows_of(s, c, 1);
      a.k = p->cache.k;
      a.v = p->cache.v;
      a.kv_type = p->cache.kv_type;
      a.q = x->scratch->q + first * width;
      a.blocks = p->blocks ? p->blocks + first * list : NULL;
      a.out = p->out + first * width;
      result = p->blocks ? m3_msa_attend_decode(&a, s->stream) : m3_msa_dense_decode(&a, s->hopper_work, s->stream);
    }
    note(s, result, "attention");
  }
}
