#include <string.h>

#include "cpu/cpu.h"
#include "cpu/low_bit.h"

static int64_t state_bytes(const m3_state_params *p) {
  (void)p;
  return 0;
}

static m3_status open_state(const m3_state_params *p, m3_device_state **out, m3_error *err) {
  (void)p, (void)err;
  *out = NULL;
  return M3_OK;
}

static void close_state(m3_device_state *s) { (void)s; }

static m3_status alloc(m3_device_state *s, uint64_t bytes, const char *purpose, void **out, m3_error *err) {
  (void)s;
  *out = m3_alloc(bytes, 1);
  return *out ? M3_OK : m3_fail_memory(err, bytes, purpose);
}

static void free_memory(m3_device_state *s, void *p) {
  (void)s;
  m3_free(p);
}

static void copy(m3_device_state *s, void *dst, const void *src, uint64_t bytes) {
  (void)s;
  memcpy(dst, src, bytes);
}

static void begin(const m3_context *c, const m3_rows *rows) { (void)c, (void)rows; }

static m3_status finish(const m3_context *c, m3_broken *broken, m3_error *err) {
  (void)err;
  *broken = (m3_broken){c->layer, M3_PARTS};
  return M3_OK;
}

static void page_copy(m3_device_state *s, const m3_page_params *p) {
  (void)s;
  memcpy((char *)p->pages + p->dst * p->page_bytes, (char *)p->pages + p->src * p->page_bytes, (size_t)p->page_bytes);
}

static void page_poison(m3_device_state *s, const m3_page_params *p) {
  (void)s;
  memset((char *)p->pages + p->dst * p->page_bytes, 0xff, (size_t)p->page_bytes);
}

static int64_t max2(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t thread_floats(const m3_hparams *h, int64_t max_blocks) {
  int64_t floats =
      max2(max2(m3_matmul_floats(), m3_select_floats(h, max_blocks)), max2(m3_attend_floats(h), 2 * h->n_expert));
  return (floats + 15) & ~(int64_t)15; /* whole cache lines, so that threads do not share one */
}

static int64_t input_bytes(const m3_hparams *h, int64_t rows) {
  int64_t widest = max2(max2(h->n_embd, (int64_t)h->n_head * h->head_dim), max2(h->n_ff, h->n_ff_shared));
  return max2(rows * m3_activation_bytes(widest), rows * h->n_expert_used * m3_activation_bytes(h->n_ff_expert));
}

const m3_backend m3_cpu_backend = {
    .name = "cpu",
    .state_bytes = state_bytes,
    .open = open_state,
    .close = close_state,
    .alloc = alloc,
    .free = free_memory,
    .upload = copy,
    .download = copy,
    .copy = copy,
    .page_copy = page_copy,
    .page_poison = page_poison,
    .low_bit_page_bytes = m3_low_bit_page_bytes,
    .thread_floats = thread_floats,
    .input_bytes = input_bytes,
    .begin = begin,
    .finish = finish,
    .embed = m3_cpu_embed,
    .prepare = m3_cpu_prepare,
    .rotate = m3_cpu_rotate,
    .low_bit = m3_cpu_low_bit,
    .select = m3_cpu_select,
    .attend = m3_cpu_attend,
    .output = m3_cpu_output,
    .mlp = m3_cpu_mlp,
    .router = m3_cpu_router,
    .experts = m3_cpu_experts,
    .shared = m3_cpu_shared,
    .head = m3_cpu_head,
    .head_input = m3_cpu_head_input,
    .finite = m3_cpu_finite,
    .linear = m3_cpu_linear,
    .layer_norm = m3_cpu_layer_norm,
    .turn = m3_cpu_turn,
};
