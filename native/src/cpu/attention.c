/* Softmax attention over blocks with a running maximum (flash attention): no array of scores longer than one block.
 *
 * The keys and values of a block are converted once for all query heads of a KV head and all neighboring rows that read
 * the block. A row takes its blocks in ascending order, in parts of PART blocks: within a part the maximum runs, then
 * the part is merged into what came before. Parts are where a single row can be shared out among threads; what a row
 * gets is the same whoever computes its parts and whoever is computed beside it. */
#include <math.h>
#include <string.h>

#include "cpu/cpu.h"

#define PART 4      /* blocks */
#define MAX_ROWS 64 /* that one task takes together */
#define SLOTS 4     /* parts of a single row that wait in one thread's buffer to be merged */

/* Tokens of a block that are converted together where a single reading needs them: they stay in the first cache. */
#define FEW_TOKENS 32

/* The softmax of one query head so far: the sum of exponentials relative to the maximum. The maximum is that of the
 * plain products; they are scaled with the difference. */
typedef struct softmax {
  float max, sum;
} softmax;

/* A thread's buffers; `group` query heads share a KV head. */
typedef struct buffers {
  float *k, *v;   /* [block_size, head_dim] converted */
  float *score;   /* [group, block_size] */
  float *acc;     /* [most of rows and SLOTS, group, head_dim] parts */
  softmax *state; /* [the same, group] of the parts */
  softmax *total; /* [most of rows * group and n_head] of the rows */
} buffers;

/* Rows that share the conversion of a block: as many as keep their sums in the second cache. */
static int64_t rows_together(const m3_hparams *h) {
  int64_t rows = 512 / (h->n_head / h->n_head_kv);
  return rows < SLOTS ? SLOTS : rows > MAX_ROWS ? MAX_ROWS : rows;
}

static int64_t totals(const m3_hparams *h) {
  int64_t together = rows_together(h) * (h->n_head / h->n_head_kv);
  return together > h->n_head ? together : h->n_head;
}

int64_t m3_attend_floats(const m3_hparams *h) {
  int64_t group = h->n_head / h->n_head_kv, parts = rows_together(h) * group;
  return 2 * (int64_t)h->block_size * h->head_dim + group * h->block_size + parts * (h->head_dim + 2) + 2 * totals(h);
}

static buffers buffers_of(const m3_context *c, int64_t thread) {
  const m3_hparams *h = c->hparams;
  int64_t block = (int64_t)h->block_size * h->head_dim, group = h->n_head / h->n_head_kv;
  int64_t parts = rows_together(h) * group;
  buffers b;
  b.k = c->scratch->thread + thread * c->scratch->thread_floats;
  b.v = b.k + block;
  b.score = b.v + block;
  b.acc = b.score + group * h->block_size;
  b.state = (softmax *)(void *)(b.acc + parts * h->head_dim);
  b.total = b.state + parts;
  return b;
}

/* ---------------------------------------------------------------------------------------------- one block, one part */

/* What a row reads for one KV head. */
typedef struct reading {
  int32_t row, kv_head;
  const int32_t *list; /* NULL: block i is number i */
  int64_t n, i;        /* blocks in all and done */
} reading;

static reading reading_of(const m3_context *c, const m3_attend_params *p, int32_t row, int32_t kv_head) {
  const m3_hparams *h = c->hparams;
  reading r = {row, kv_head, NULL, p->rows->pos[row] / h->block_size + 1, 0};
  if (p->blocks) {
    r.list = p->blocks + ((int64_t)row * h->n_head_kv + kv_head) * h->top_k;
    for (r.n = 0; r.n < h->top_k && r.list[r.n] >= 0;) r.n++;
  }
  return r;
}

static int64_t block_at(const reading *r, int64_t i) { return r->list ? r->list[i] : i; }

/* Tokens of a block that a row sees. */
static int64_t visible(const m3_context *c, const m3_attend_params *p, int32_t row, int64_t block) {
  int64_t size = c->hparams->block_size, n = p->rows->pos[row] + 1 - block * size;
  return n < size ? n : size;
}

/* Keys and values of a block, of `type`. */
typedef struct block_data {
  const char *k, *v;
  int32_t type;
} block_data;

static block_data block_of(const m3_context *c, const m3_attend_params *p, const reading *r, int64_t block) {
  const m3_hparams *h = c->hparams;
  int64_t page = p->rows->tables[p->rows->seq[r->row]][block];
  int64_t first = (page * h->n_head_kv + r->kv_head) * h->block_size * m3_row_bytes(p->cache.kv_type, h->head_dim);
  return (block_data){(const char *)p->cache.k + first, (const char *)p->cache.v + first, p->cache.kv_type};
}

/* n rows as float32. */
static const float *floats_of(const m3_context *c, int32_t type, const char *rows, int64_t n, float *converted) {
  if (type == M3_TYPE_F32) return (const float *)(const void *)rows;
  m3_convert_row(c->kernels, type, rows, converted, n * c->hparams->head_dim);
  return converted;
}

/* The first n tokens converted, for many readings. */
static block_data converted(const m3_context *c, block_data block, int64_t n, const buffers *b) {
  return (block_data){(const char *)floats_of(c, block.type, block.k, n, b->k),
                      (const char *)floats_of(c, block.type, block.v, n, b->v), M3_TYPE_F32};
}

static float scale_of(const m3_hparams *h) { return 1.0f / sqrtf((float)h->head_dim); }

/* Masses of the first head of a reading, or NULL. */
static float *mass_of(const m3_context *c, const m3_attend_params *p, const reading *r) {
  const m3_hparams *h = c->hparams;
  if (!p->mass) return NULL;
  return p->mass + ((int64_t)r->row * h->n_head + (int64_t)r->kv_head * (h->n_head / h->n_head_kv)) * h->top_k;
}

static void multiply(float *x, float a, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] *= a;
}

/* Adds n tokens of the i-th block of a row to the part, whose first block is i / PART * PART. next_k: keys that are
 * read after these, or NULL. */
static void absorb(const m3_context *c, const m3_attend_params *p, const reading *r, int64_t i, block_data block,
                   const char *next_k, int64_t n, const buffers *b, float *acc, softmax *state) {
  const m3_hparams *h = c->hparams;
  int64_t group = h->n_head / h->n_head_kv, dim = h->head_dim, first = i / PART * PART;
  int64_t bytes = m3_row_bytes(block.type, dim), step = block.type == M3_TYPE_F32 ? n : FEW_TOKENS;
  float scale = scale_of(h), *mass = mass_of(c, p, r), *score = b->score;
  if (i == first) {
    memset(acc, 0, (size_t)(group * dim) * sizeof *acc);
    for (int64_t g = 0; g < group; g++) state[g] = (softmax){-INFINITY, 0};
  }
  for (int64_t j = 0; j < n; j += step) {
    int64_t tokens = n - j < step ? n - j : step;
    c->kernels->dots(&(m3_dots){.rows = floats_of(c, block.type, block.k + j * bytes, tokens, b->k),
                                .row_stride = dim,
                                .n_rows = tokens,
                                .x = c->scratch->q + ((int64_t)r->row * h->n_head + r->kv_head * group) * dim,
                                .x_stride = dim,
                                .n_x = group,
                                .n = dim,
                                .out = score + j,
                                .out_stride = h->block_size,
                                .next = next_k ? block.v + j * bytes : NULL,
                                .next_bytes = next_k ? tokens * bytes : 0});
  }
  for (int64_t g = 0; g < group; g++) {
    float *s = score + g * h->block_size;
    bool finite = true; /* what is not shows in the result */
    float most = c->kernels->largest(s, n, &finite);
    if (most > state[g].max) {
      float shrink = expf((state[g].max - most) * scale);
      state[g].max = most;
      state[g].sum *= shrink;
      multiply(acc + g * dim, shrink, dim);
      if (mass) multiply(mass + g * h->top_k + first, shrink, i - first);
    }
    float sum = c->kernels->exp_sum(s, n, state[g].max, scale);
    state[g].sum += sum;
    if (mass) mass[g * h->top_k + i] = sum;
  }
  for (int64_t j = 0; j < n; j += step) {
    int64_t tokens = n - j < step ? n - j : step;
    c->kernels->accumulate(&(m3_accumulate){.acc = acc,
                                            .acc_stride = dim,
                                            .n_acc = group,
                                            .p = score + j,
                                            .p_stride = h->block_size,
                                            .v = floats_of(c, block.type, block.v + j * bytes, tokens, b->k),
                                            .v_stride = dim,
                                            .n_v = tokens,
                                            .n = dim,
                                            .next = next_k ? next_k + j * bytes : NULL,
                                            .next_bytes = next_k ? tokens * bytes : 0});
  }
}

/* Merges the part of blocks [first, end) of a row into its result, which after the last part is divided by the sum. */
static void merge(const m3_context *c, const m3_attend_params *p, const reading *r, int64_t first, int64_t end,
                  const float *acc, const softmax *state, softmax *total) {
  const m3_hparams *h = c->hparams;
  int64_t group = h->n_head / h->n_head_kv, dim = h->head_dim;
  float scale = scale_of(h), *masses = mass_of(c, p, r);
  for (int64_t g = 0; g < group; g++) {
    float *out = p->out + ((int64_t)r->row * h->n_head + r->kv_head * group + g) * dim;
    float *mass = masses ? masses + g * h->top_k : NULL;
    if (first == 0) {
      memcpy(out, acc + g * dim, (size_t)dim * sizeof *out);
      total[g] = state[g];
    } else {
      float max = state[g].max > total[g].max ? state[g].max : total[g].max;
      float before = expf((total[g].max - max) * scale), now = expf((state[g].max - max) * scale);
      total[g] = (softmax){max, total[g].sum * before + state[g].sum * now};
      multiply(out, before, dim);
      c->kernels->axpy(out, now, acc + g * dim, dim);
      if (mass) multiply(mass, before, first), multiply(mass + first, now, end - first);
    }
    if (end < r->n) continue;
    for (int64_t i = 0; i < dim; i++) out[i] /= total[g].sum;
    for (int64_t i = 0; mass && i < h->top_k; i++) mass[i] = i < end ? mass[i] / total[g].sum : 0;
  }
}

/* ---------------------------------------------------------------------------------------------- neighboring rows */

/* Rows [first, first + n) of one sequence: over all blocks that any of them reads, in ascending order. */
static void attend_rows(const m3_context *c, const m3_attend_params *p, int32_t first, int32_t n, int32_t kv_head,
                        const buffers *b) {
  const m3_hparams *h = c->hparams;
  int64_t group = h->n_head / h->n_head_kv, dim = h->head_dim;
  reading readings[MAX_ROWS];
  for (int32_t k = 0; k < n; k++) readings[k] = reading_of(c, p, first + k, kv_head);
  for (;;) {
    int64_t block = INT64_MAX, most = 0;
    for (int32_t k = 0; k < n; k++) {
      const reading *r = &readings[k];
      if (r->i == r->n || block_at(r, r->i) > block) continue;
      int64_t seen = visible(c, p, r->row, block_at(r, r->i));
      most = block_at(r, r->i) < block || seen > most ? seen : most;
      block = block_at(r, r->i);
    }
    if (block == INT64_MAX) return;
    block_data data = block_of(c, p, &readings[0], block);
    const char *next_k = NULL;
    if (n > 1)
      data = converted(c, data, most, b);
    else if (readings[0].i + 1 < readings[0].n)
      next_k = block_of(c, p, &readings[0], block_at(&readings[0], readings[0].i + 1)).k;
    else
      next_k = data.k;
    for (int32_t k = 0; k < n; k++) {
      reading *r = &readings[k];
      if (r->i == r->n || block_at(r, r->i) != block) continue;
      float *acc = b->acc + k * group * dim;
      softmax *state = b->state + k * group;
      absorb(c, p, r, r->i, data, next_k, visible(c, p, r->row, block), b, acc, state);
      r->i++;
      if (r->i % PART == 0 || r->i == r->n)
        merge(c, p, r, (r->i - 1) / PART * PART, r->i, acc, state, b->total + k * group);
    }
  }
}

static void attend_tiles(const m3_context *c, const m3_attend_params *p, int32_t threads) {
  const m3_hparams *h = c->hparams;
  /* Smaller tiles than the buffers would hold where threads would have none. */
  int64_t wanted = (4 * (int64_t)threads + h->n_head_kv - 1) / h->n_head_kv;
  int64_t size = p->rows->n / wanted, most = rows_together(h);
  size = size < 1 ? 1 : size > most ? most : size;
#pragma omp parallel num_threads(threads)
  {
    buffers b = buffers_of(c, m3_thread_index());
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t first = 0; first < p->rows->n; first += size)
      for (int32_t kv_head = 0; kv_head < h->n_head_kv; kv_head++) {
        int64_t end = first + size < p->rows->n ? first + size : p->rows->n;
        for (int64_t from = first, to; from < end; from = to) { /* rows of one sequence */
          for (to = from + 1; to < end && p->rows->seq[to] == p->rows->seq[from];) to++;
          attend_rows(c, p, (int32_t)from, (int32_t)(to - from), kv_head, &b);
        }
      }
  }
}

/* ---------------------------------------------------------------------------------------------- single rows */

/* A part of a row for one KV head, number `unit` of all of them. */
typedef struct part_of_row {
  reading r;
  int64_t first, end; /* blocks; first >= end: it has none */
} part_of_row;

static part_of_row part_at(const m3_context *c, const m3_attend_params *p, int32_t row, int64_t unit) {
  int64_t heads = c->hparams->n_head_kv;
  part_of_row x = {reading_of(c, p, row, (int32_t)(unit % heads)), unit / heads * PART, 0};
  x.end = x.first + PART < x.r.n ? x.first + PART : x.r.n;
  return x;
}

/* A part into a place of its own. `next` follows it. */
static void attend_part(const m3_context *c, const m3_attend_params *p, const part_of_row *x, const part_of_row *next,
                        const buffers *b, float *acc, softmax *state) {
  for (int64_t i = x->first; i < x->end; i++) {
    int64_t block = block_at(&x->r, i), n = visible(c, p, x->r.row, block);
    block_data data = block_of(c, p, &x->r, block);
    const char *next_k = data.k;
    if (i + 1 < x->end)
      next_k = block_of(c, p, &x->r, block_at(&x->r, i + 1)).k;
    else if (next->first < next->end)
      next_k = block_of(c, p, &next->r, block_at(&next->r, next->first)).k;
    absorb(c, p, &x->r, i, data, next_k, n, b, acc, state);
  }
}

/* One row, its parts shared out among the threads of the enclosing parallel region and merged in order. */
static void attend_single(const m3_context *c, const m3_attend_params *p, int32_t row, const buffers *b) {
  const m3_hparams *h = c->hparams;
  int64_t group = h->n_head / h->n_head_kv, heads = h->n_head_kv, wave = (int64_t)SLOTS * c->scratch->n_threads;
  int64_t parts = 0;
  for (int32_t head = 0; head < heads; head++) {
    reading r = reading_of(c, p, row, head);
    if ((r.n + PART - 1) / PART > parts) parts = (r.n + PART - 1) / PART;
  }
  softmax *total = buffers_of(c, 0).total;
  for (int64_t start = 0; start < parts * heads; start += wave) {
    int64_t end = start + wave < parts * heads ? start + wave : parts * heads;
#pragma omp for schedule(static)
    for (int64_t unit = start; unit < end; unit++) {
      part_of_row x = part_at(c, p, row, unit), next = part_at(c, p, row, unit + 1);
      buffers owner = buffers_of(c, (unit - start) / SLOTS);
      int64_t slot = (unit - start) % SLOTS * group;
      attend_part(c, p, &x, &next, b, owner.acc + slot * h->head_dim, owner.state + slot);
    }
#pragma omp for schedule(static)
    for (int32_t head = 0; head < heads; head++)
      for (int64_t unit = start; unit < end; unit++) {
        part_of_row x = part_at(c, p, row, unit);
        int64_t slot = (unit - start) % SLOTS * group;
        if (unit % heads != head || x.first >= x.end) continue;
        buffers owner = buffers_of(c, (unit - start) / SLOTS);
        merge(c, p, &x.r, x.first, x.end, owner.acc + slot * h->head_dim, owner.state + slot, total + head * group);
      }
  }
}

void m3_cpu_attend(const m3_context *c, const m3_attend_params *p) {
  const m3_hparams *h = c->hparams;
  int64_t read = p->blocks ? h->top_k : 1; /* blocks of the row that reads most */
  for (int32_t r = 0; r < p->rows->n && !p->blocks; r++)
    if (p->rows->pos[r] / h->block_size >= read) read = p->rows->pos[r] / h->block_size + 1;
  int32_t threads = m3_threads_for(c, (int64_t)p->rows->n * h->n_head * h->head_dim * read * h->block_size);
  if ((int64_t)p->rows->n * h->n_head_kv >= 2 * (int64_t)threads) {
    attend_tiles(c, p, threads);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    buffers b = buffers_of(c, m3_thread_index());
    for (int32_t row = 0; row < p->rows->n; row++) attend_single(c, p, row, &b);
  }
}
