/* By which code products with weights of a type are computed, for those who wonder why a file is slow. */
#include "cpu/kernels.h"
#include "model.h"
#include "quant/codes.h"

const char *m3_model_product_path(const m3_model *m, int32_t type) {
  if (!m3_type_name(type)) return NULL;
  if (m->backend != &m3_cpu_backend) return "device";
  const m3_kernels *k = m->kernels;
  if (k == &m3_kernels_scalar) return "plain";
  if (!m3_coding_of(type)) return type == M3_TYPE_F32 || k->to_f32[type] ? "float" : "plain";
  return k->products->row_product[type] || k->products->unpack[type] ? "integer" : "plain";
}
