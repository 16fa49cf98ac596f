/* What goes to the CPU and comes back where it computes the routed experts of a layer. An event marks that the rows are
 * there, so that the shared expert, which is launched behind it, is at work while the CPU is. */
#include <string.h>

#include "cuda/launch.cuh"
#include "cuda/state.cuh"

m3_status m3_cuda_host_alloc(uint64_t bytes, const char *purpose, void **out, m3_error *err) {
  *out = NULL;
  cudaError_t error = cudaHostAlloc(out, bytes ? bytes : 1, cudaHostAllocDefault);
  if (error != cudaSuccess) {
    cudaGetLastError(); /* it is told here, not by the next launch */
    *out = NULL;
    return m3_fail(err, error == cudaErrorMemoryAllocation ? M3_ERROR_MEMORY : M3_ERROR_DEVICE,
                   "%.1f MiB of pinned memory for %s could not be allocated (%s)", (double)bytes / (1024.0 * 1024.0),
                   purpose, cudaGetErrorString(error));
  }
  memset(*out, 0, bytes);
  return M3_OK;
}

void m3_cuda_host_free(m3_device_state *s, void *p) {
  if (p && s) cudaStreamSynchronize(s->stream); /* an evaluation that was cancelled has not waited */
  cudaFreeHost(p);
}

void m3_cuda_send_rows(const m3_context *c, const m3_host_rows *rows) {
  m3_device_state *s = c->state;
  const m3_scratch *w = c->scratch;
  size_t pairs = (size_t)rows->n * (size_t)c->hparams->n_expert_used;
  size_t normed = (size_t)rows->n * (size_t)c->hparams->n_embd * sizeof(float);
  m3_note(s, cudaMemcpyAsync(rows->normed, w->normed, normed, cudaMemcpyDeviceToHost, s->stream), "rows of experts");
  m3_note(s, cudaMemcpyAsync(rows->experts, w->experts, pairs * 4, cudaMemcpyDeviceToHost, s->stream),
          "rows of experts");
  m3_note(s, cudaMemcpyAsync(rows->weights, w->weights, pairs * 4, cudaMemcpyDeviceToHost, s->stream),
          "rows of experts");
  m3_note(s, cudaEventRecord(s->rows_sent, s->stream), "rows of experts");
}

bool m3_cuda_rows_sent(const m3_context *c) {
  m3_device_state *s = c->state;
  m3_note(s, cudaEventSynchronize(s->rows_sent), "rows of experts");
  return s->error == cudaSuccess;
}

__global__ static void add(const float *x, int64_t n, float *hidden) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  m3_wait_for_previous();
  m3_let_next_begin();
  if (i < n) hidden[i] += x[i];
}

void m3_cuda_add_sums(const m3_context *c, const m3_host_rows *rows, float *hidden) {
  m3_device_state *s = c->state;
  int64_t n = (int64_t)rows->n * c->hparams->n_embd;
  float *sums = c->scratch->expert_out;
  m3_note(s, cudaMemcpyAsync(sums, rows->sums, (size_t)n * sizeof(float), cudaMemcpyHostToDevice, s->stream),
          "sums of experts");
  m3_launch(s, "sums of experts", add, dim3(m3_blocks_for(n, M3_THREADS)), M3_THREADS, 0, (const float *)sums, n,
            hidden);
}
