/* The state of a session on the GPU, its memory, and what is told at the end of a chunk. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/few_rows.cuh"
#include "cuda/hopper.cuh"
#include "cuda/launch.cuh"
#include "cuda/many_rows.cuh"
#include "cuda/state.cuh"

static m3_status fail(m3_error *err, cudaError_t error, const char *where) {
  return m3_fail(err, M3_ERROR_DEVICE, "device cuda: %s: %s (%s)", where, cudaGetErrorString(error),
                 cudaGetErrorName(error));
}

static m3_status take(uint64_t bytes, const char *purpose, void **out, m3_error *err) {
  *out = NULL;
  /* Whole 16 bytes: so many are read at a time. */
  cudaError_t error = cudaMalloc(out, bytes ? (bytes + 15) & ~(uint64_t)15 : 1);
  if (error == cudaSuccess) return M3_OK;
  cudaGetLastError(); /* it is told here, not by the next launch */
  *out = NULL;
  if (error != cudaErrorMemoryAllocation) return fail(err, error, purpose);
  return m3_fail(err, M3_ERROR_MEMORY, "not enough memory on device cuda: %.1f MiB for %s could not be allocated (%s)",
                 (double)bytes / (1024.0 * 1024.0), purpose, cudaGetErrorString(error));
}

/* ------------------------------------------------------------------------------------------------ state */

/* One piece of a state: where its pointer goes, and its bytes. */
struct piece {
  void **pointer;
  int64_t bytes;
};

enum { PIECES = 11 };

/* Bytes of `places` for n rows. */
static int64_t places_bytes(const m3_hparams *h, int64_t n) { return n * (16 + (int64_t)(h->n_rot / 2) * 8); }

/* Lays out `places` for n rows. */
static void lay_out_places(const m3_hparams *h, m3_device_state *s, int64_t n) {
  int64_t half = h->n_rot / 2;
  s->pos = (int64_t *)s->places;
  s->cos = (float *)(s->pos + n);
  s->sin = s->cos + n * half;
  s->seq = (int32_t *)(s->sin + n * half);
  s->ids = s->seq + n;
}

static int list_pieces(const m3_state_params *p, m3_device_state *s, piece *list) {
  const m3_hparams *h = p->hparams;
  int64_t pairs = (int64_t)p->chunk * h->n_expert_used;
  int64_t select_rows = p->chunk < M3_SELECT_ROWS ? p->chunk : M3_SELECT_ROWS;
  s->blocks = p->blocks;
  s->select_rows = (int32_t)select_rows;
  s->hopper = m3_hopper_of(p);
  int64_t scores = select_rows * h->n_index_head * (p->blocks + 3) / 4 * 16, low_bit = m3_hopper_low_bit_bytes(p);
  s->attention_floats = s->hopper.attend ? 0 : m3_cuda_attention_floats(h, p->blocks);
  const piece all[] = {
      {(void **)&s->broken, sizeof(m3_told)},
      {(void **)&s->places, places_bytes(h, p->chunk)},
      {(void **)&s->tables, p->sequences * p->blocks * 4},
      {(void **)&s->table_of, p->sequences * (int64_t)sizeof *s->table_of},
      {(void **)&s->grouping.row, pairs * 4},
      {(void **)&s->grouping.place, pairs * 4},
      {(void **)&s->grouping.groups, (h->n_expert + pairs) * (int64_t)sizeof(m3_row_group)},
      {(void **)&s->grouping.n_groups, 4},
      {(void **)&s->block_scores, scores > low_bit ? scores : low_bit},
      {(void **)&s->attention_parts, s->attention_floats * 4},
      {(void **)&s->hopper_work, m3_hopper_bytes(p)},
  };
  static_assert(sizeof all / sizeof *all == PIECES, "PIECES");
  memcpy(list, all, sizeof all);
  return PIECES;
}

static int64_t state_bytes(const m3_state_params *p) {
  m3_device_state blank;
  piece list[PIECES];
  int64_t bytes = 0;
  int n = list_pieces(p, &blank, list);
  for (int i = 0; i < n; i++) bytes += list[i].bytes;
  return bytes;
}

static void close_state(m3_device_state *s) {
  if (!s) return;
  if (s->stream) cudaStreamSynchronize(s->stream);
  m3_cuda_close_replays(s->replays);
  void *const pieces[] = {s->broken,       s->places,          s->tables,          s->table_of,
                          s->grouping.row, s->grouping.place,  s->grouping.groups, s->grouping.n_groups,
                          s->block_scores, s->attention_parts, s->hopper_work};
  static_assert(sizeof pieces / sizeof *pieces == PIECES, "PIECES");
  for (int i = 0; i < PIECES; i++) cudaFree(pieces[i]);
  cudaFreeHost(s->host_told);
  cudaFreeHost(s->host_places);
  free(s->mirror);
  if (s->rows_sent) cudaEventDestroy(s->rows_sent);
  if (s->stream) cudaStreamDestroy(s->stream);
  free(s);
}

__global__ static void early() { m3_wait_for_previous(); }

/* What launches depend on. */
static cudaError_t inquire(m3_device_state *s) {
  int device = 0, shared = 0;
  cudaFuncAttributes code;
  cudaError_t error = cudaGetDevice(&device);
  if (!error) error = cudaDeviceGetAttribute(&s->multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (!error) error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (!error) error = cudaFuncGetAttributes(&code, (const void *)early);
  if (!error) error = m3_cuda_few_rows_setup();
  if (!error) error = m3_cuda_many_rows_setup();
  if (error) return error;
  s->shared_bytes = (uint32_t)shared - 1024; /* of variables that are declared in kernels */
  s->overlap = code.ptxVersion >= 90;        /* else the code has no m3_wait_for_previous */
  return cudaSuccess;
}

static m3_status fill_state(const m3_state_params *p, m3_device_state *s, m3_error *err) {
  s->exact = p->exact;
  cudaError_t error = cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaHostAlloc((void **)&s->host_told, sizeof *s->host_told, cudaHostAllocDefault);
  size_t places = (size_t)places_bytes(p->hparams, p->chunk);
  if (error == cudaSuccess) error = cudaHostAlloc((void **)&s->host_places, places, cudaHostAllocDefault);
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&s->rows_sent, cudaEventDisableTiming);
  if (error == cudaSuccess) error = inquire(s);
  if (error != cudaSuccess) return fail(err, error, "opening a session");
  piece list[PIECES];
  int n = list_pieces(p, s, list);
  for (int i = 0; i < n; i++) {
    m3_status status = take((uint64_t)list[i].bytes, "the state of a session", list[i].pointer, err);
    if (status) return status;
  }
  /* No page has this number, so that the first rows bring their tables. */
  size_t entries = (size_t)(p->sequences * p->blocks);
  s->mirror = (int32_t *)malloc(entries * sizeof *s->mirror);
  if (!s->mirror) return m3_fail_memory(err, entries * sizeof *s->mirror, "the page tables");
  memset(s->mirror, 0xff, entries * sizeof *s->mirror);
  error = cudaMemsetAsync(s->broken, 0, sizeof(m3_told), s->stream);
  for (int32_t i = 0; i < p->sequences && error == cudaSuccess; i++) {
    const int32_t *table = s->tables + i * p->blocks;
    error = cudaMemcpyAsync(s->table_of + i, &table, sizeof table, cudaMemcpyHostToDevice, s->stream);
  }
  return error == cudaSuccess ? M3_OK : fail(err, error, "opening a session");
}

static m3_status open_state(const m3_state_params *p, m3_device_state **out, m3_error *err) {
  *out = NULL;
  m3_device_state *s = (m3_device_state *)calloc(1, sizeof *s);
  if (!s) return m3_fail_memory(err, sizeof *s, "the state of a session");
  m3_status status = fill_state(p, s, err);
  if (status)
    close_state(s);
  else
    *out = s;
  return status;
}

/* ------------------------------------------------------------------------------------------------ memory */

static m3_status alloc(m3_device_state *s, uint64_t bytes, const char *purpose, void **out, m3_error *err) {
  m3_status status = take(bytes, purpose, out, err);
  if (!status) m3_note(s, cudaMemsetAsync(*out, 0, bytes, s->stream), purpose);
  return status;
}

static void free_memory(m3_device_state *s, void *p) {
  (void)s;
  cudaFree(p); /* waits for what uses it */
}

static void upload(m3_device_state *s, void *dst, const void *src, uint64_t bytes) {
  m3_note(s, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, s->stream), "upload");
}

static void download(m3_device_state *s, void *dst, const void *src, uint64_t bytes) {
  m3_note(s, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, s->stream), "download");
  m3_note(s, cudaStreamSynchronize(s->stream), "download");
}

static void copy(m3_device_state *s, void *dst, const void *src, uint64_t bytes) {
  m3_note(s, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, s->stream), "copy");
}

static void page_copy(m3_device_state *s, const m3_page_params *p) {
  char *pages = (char *)p->pages;
  copy(s, pages + p->dst * p->page_bytes, pages + p->src * p->page_bytes, (uint64_t)p->page_bytes);
}

static void page_poison(m3_device_state *s, const m3_page_params *p) {
  char *page = (char *)p->pages + p->dst * p->page_bytes;
  m3_note(s, cudaMemsetAsync(page, 0xff, (size_t)p->page_bytes, s->stream), "poison");
}

static m3_status weight_load(void *dst, const void *src, uint64_t bytes, m3_error *err) {
  cudaError_t error = cudaMemcpy(dst, src, bytes, cudaMemcpyHostToDevice);
  /* The copy may still be under way when cudaMemcpy returns, and no stream of a session waits for this one. */
  if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamLegacy);
  return error == cudaSuccess ? M3_OK : fail(err, error, "loading weights");
}

static void weight_free(void *p) { cudaFree(p); }

static m3_status memory(uint64_t *free_bytes, uint64_t *total_bytes, m3_error *err) {
  size_t left, all;
  cudaError_t error = cudaMemGetInfo(&left, &all);
  if (error != cudaSuccess) return fail(err, error, "free memory");
  *free_bytes = left;
  *total_bytes = all;
  return M3_OK;
}

static void describe(char *out, size_t size) {
  cudaDeviceProp p;
  if (cudaGetDeviceProperties(&p, 0) == cudaSuccess)
    snprintf(out, size, "%.100s sm_%d%d", p.name, p.major, p.minor);
  else
    snprintf(out, size, "?");
}

/* ------------------------------------------------------------------------------------------------ chunks */

/* Brings the part of the table of a sequence that has changed. */
static void update_table(m3_device_state *s, int32_t seq, const int32_t *table, int64_t n) {
  int32_t *mirror = s->mirror + seq * s->blocks;
  int64_t first = 0;
  while (first < n && mirror[first] == table[first]) first++;
  while (n > first && mirror[n - 1] == table[n - 1]) n--;
  if (first == n) return;
  memcpy(mirror + first, table + first, (size_t)(n - first) * sizeof *table);
  upload(s, s->tables + seq * s->blocks + first, table + first, (uint64_t)(n - first) * sizeof *table);
}

/* A copy on the host of what lies at `to` in `places`. */
static void fill(m3_device_state *s, const void *to, const void *from, int64_t bytes) {
  memcpy(s->host_places + ((const char *)to - s->places), from, (size_t)bytes);
}

/* In a chunk of one row a sequence, which may repeat with later rows, max_blocks is a power of two, so that what
 * depends on it repeats too. */
static int64_t bound_blocks(const m3_context *c, const m3_rows *rows) {
  int64_t blocks = m3_longest(rows) / c->hparams->block_size + 1, bound = 1;
  for (int32_t r = 1; r < rows->n; r++)
    if (rows->seq[r] == rows->seq[r - 1]) return blocks;
  while (bound < blocks) bound *= 2;
  return bound < c->state->blocks ? bound : c->state->blocks;
}

static void begin(const m3_context *c, const m3_rows *rows) {
  m3_device_state *s = c->state;
  int64_t n = rows->n, half = c->hparams->n_rot / 2;
  /* An evaluation that was cancelled has not waited, and may still read what is written here. */
  if (s->running) m3_note(s, cudaStreamSynchronize(s->stream), "a kernel");
  s->running = true;
  s->told = false;
  s->n = rows->n;
  s->max_blocks = bound_blocks(c, rows);
  lay_out_places(c->hparams, s, n);
  fill(s, s->pos, rows->pos, n * (int64_t)sizeof *rows->pos);
  fill(s, s->cos, rows->cos, n * half * (int64_t)sizeof *rows->cos);
  fill(s, s->sin, rows->sin, n * half * (int64_t)sizeof *rows->sin);
  fill(s, s->seq, rows->seq, n * (int64_t)sizeof *rows->seq);
  if (rows->ids) fill(s, s->ids, rows->ids, n * (int64_t)sizeof *rows->ids);
  upload(s, s->places, s->host_places, (uint64_t)places_bytes(c->hparams, n));
  for (int32_t r = 0; r < rows->n; r++)
    if (r + 1 == rows->n || rows->seq[r + 1] != rows->seq[r])
      update_table(s, rows->seq[r], rows->tables[rows->seq[r]], rows->pos[r] / c->hparams->block_size + 1);
  m3_note(s, cudaMemsetAsync(s->broken, 0x7f, sizeof *s->broken, s->stream), "begin");
}

void m3_cuda_tell_broken(m3_device_state *s) {
  m3_note(s, cudaMemcpyAsync(s->host_told, s->broken, sizeof *s->host_told, cudaMemcpyDeviceToHost, s->stream),
          "finish");
}

static m3_status finish(const m3_context *c, m3_broken *broken, m3_error *err) {
  m3_device_state *s = c->state;
  if (!s->told) m3_cuda_tell_broken(s);
  m3_note(s, cudaStreamSynchronize(s->stream), "a kernel");
  s->running = false;
  if (s->error != cudaSuccess) {
    cudaError_t error = s->error;
    s->error = cudaSuccess;
    return fail(err, error, s->where);
  }
  m3_hopper_count(c);
  int32_t code = s->host_told->broken;
  bool found = code != M3_NOTHING_BROKEN;
  broken->layer = found ? code / M3_PARTS : 0;
  broken->part = found ? (m3_part)(code % M3_PARTS) : M3_PARTS;
  return M3_OK;
}

static int64_t thread_floats(const m3_hparams *h, int64_t max_blocks) {
  (void)h, (void)max_blocks;
  return 0;
}

/* ------------------------------------------------------------------------------------------------ the backend */

static const m3_backend cuda_backend = {
    .name = "cuda",
    .state_bytes = state_bytes,
    .open = open_state,
    .close = close_state,
    .alloc = alloc,
    .free = free_memory,
    .upload = upload,
    .download = download,
    .copy = copy,
    .page_copy = page_copy,
    .page_poison = page_poison,
    .weight_alloc = take,
    .weight_load = weight_load,
    .weight_free = weight_free,
    .host_alloc = m3_cuda_host_alloc,
    .host_free = m3_cuda_host_free,
    .send_rows = m3_cuda_send_rows,
    .rows_sent = m3_cuda_rows_sent,
    .add_sums = m3_cuda_add_sums,
    .memory = memory,
    .describe = describe,
    .describe_msa = m3_hopper_describe,
    .low_bit_page_bytes = m3_hopper_low_bit_page_bytes,
    .low_bit_tokens = m3_hopper_low_bit_tokens,
    .thread_floats = thread_floats,
    .input_bytes = m3_cuda_input_bytes,
    .begin = begin,
    .finish = finish,
    .replay = m3_cuda_replay,
    .recorded = m3_cuda_recorded,
    .embed = m3_cuda_embed,
    .prepare = m3_cuda_prepare,
    .rotate = m3_cuda_rotate,
    .low_bit = m3_cuda_low_bit,
    .select = m3_cuda_select,
    .attend = m3_cuda_attend,
    .output = m3_cuda_output,
    .mlp = m3_cuda_mlp,
    .router = m3_cuda_router,
    .experts = m3_cuda_experts,
    .shared = m3_cuda_shared,
    .head = m3_cuda_head,
    .head_input = NULL,
    .finite = m3_cuda_finite,
    .linear = NULL,
    .layer_norm = NULL,
    .turn = NULL,
};

__global__ static void probe() {}

static m3_status no_driver(int version, m3_error *err) {
  if (!version)
    return m3_fail(err, M3_ERROR_UNSUPPORTED, "device cuda: no NVIDIA driver is installed (libcuda.so.1); cpu works");
  return m3_fail(err, M3_ERROR_UNSUPPORTED,
                 "device cuda: the NVIDIA driver supports CUDA %d.%d, this library needs %d.%d; cpu works",
                 version / 1000, version % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

extern "C" m3_status m3_cuda_backend(const m3_backend **out, m3_error *err) {
  *out = NULL;
  int version = 0, count = 0;
  cudaDriverGetVersion(&version);
  cudaError_t error = version ? cudaGetDeviceCount(&count) : cudaErrorInsufficientDriver;
  if (error == cudaErrorInsufficientDriver) return no_driver(version, err);
  if (error == cudaErrorNoDevice || (error == cudaSuccess && !count))
    return m3_fail(err, M3_ERROR_UNSUPPORTED, "device cuda: no NVIDIA GPU is visible; cpu works");
  if (error != cudaSuccess)
    return m3_fail(err, M3_ERROR_UNSUPPORTED, "device cuda: %s (%s); cpu works", cudaGetErrorString(error),
                   cudaGetErrorName(error));
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, (const void *)probe);
  if (error != cudaSuccess) {
    cudaGetLastError();
    char name[128];
    describe(name, sizeof name);
    return m3_fail(err, M3_ERROR_UNSUPPORTED,
                   "device cuda: this library was not built for %s (make cuda CUDA_ARCHS=): %s; cpu works", name,
                   cudaGetErrorString(error));
  }
  *out = &cuda_backend;
  return M3_OK;
}
