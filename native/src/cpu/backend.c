#include <string.h>

#include "cpu/cpu.h"
#include "cpu/low_bit.h"

static void *cpu_alloc(uint64_t bytes) { return m3_alloc(bytes, 1); }

static void copy(void *dst, const void *src, uint64_t bytes) { memcpy(dst, src, bytes); }

static void page_copy(const m3_page_params *p) {
  memcpy((char *)p->pages + p->dst * p->page_bytes, (char *)p->pages + p->src * p->page_bytes, (size_t)p->page_bytes);
}

static void page_poison(const m3_page_params *p) {
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
    .alloc = cpu_alloc,
    .free = m3_free,
    .upload = copy,
    .download = copy,
    .copy = copy,
    .page_copy = page_copy,
    .page_poison = page_poison,
    .low_bit_page_bytes = m3_low_bit_page_bytes,
    .thread_floats = thread_floats,
    .input_bytes = input_bytes,
    .embed = m3_cpu_embed,
    .prepare = m3_cpu_prepare,
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
};
