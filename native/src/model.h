/* model.h - the weights of one model by role, and where their data lies. */
#ifndef M3_SRC_MODEL_H
#define M3_SRC_MODEL_H

#include "backend.h"
#include "gguf.h"
#include "m3.h"

/* Roles of the tensors of a layer. GGUF names stand in model.c. */
typedef enum m3_role {
  M3_ATTN_NORM,
  M3_ATTN_Q,
  M3_ATTN_K,
  M3_ATTN_V,
  M3_ATTN_OUTPUT,
  M3_ATTN_Q_NORM,
  M3_ATTN_K_NORM,
  M3_INDEX_Q,
  M3_INDEX_K,
  M3_INDEX_Q_NORM,
  M3_INDEX_K_NORM,
  M3_FFN_NORM,
  M3_FFN_GATE,
  M3_FFN_UP,
  M3_FFN_DOWN,
  M3_ROUTER,
  M3_ROUTER_BIAS,
  M3_GATE_EXPS,
  M3_UP_EXPS,
  M3_DOWN_EXPS,
  M3_GATE_SHEXP,
  M3_UP_SHEXP,
  M3_DOWN_SHEXP,
  M3_LAYER_ROLES
} m3_role;

/* Roles outside the layers. */
typedef enum m3_outer_role { M3_TOKEN_EMBD, M3_OUTPUT_NORM, M3_OUTPUT_HEAD, M3_OUTER_ROLES } m3_outer_role;

struct m3_weight {
  const m3_tensor *tensor; /* NULL for a role that the layer does not have */
  const void *data;        /* the whole tensor, or NULL */
  const void **experts;    /* [ne[2]] one matrix each, when bound one by one; owned by the model */
  void *device;            /* the whole tensor on the backend's device, see weights.h; owned by the model */
  void *copy;              /* memory of copy_bytes that `data` lies in, see weight_copy.h; owned by the model */
  uint64_t copy_bytes;
};

struct m3_layer {
  int32_t index;
  m3_weight w[M3_LAYER_ROLES];
  bool host_experts; /* routed experts stay in host memory while the rest is on a device, see placement.h */
};

struct m3_model {
  m3_gguf *gguf;
  m3_hparams hparams;
  m3_layer *layers;
  m3_weight outer[M3_OUTER_ROLES];
  const m3_backend *backend;
  const struct m3_kernels *kernels; /* of the CPU backend */
  char device_name[128];
  int32_t experts_on;         /* an m3_experts_on */
  bool placed;                /* host_experts of all layers are final */
  bool reads;                 /* weights into memory of the process: M3_LOAD_READ */
  struct m3_loading *loading; /* see weights.h */
  uint64_t bindings;          /* how often data was bound to or taken from a weight */
  struct m3_pager *pager;     /* see paging.h; NULL where the weights are not in a mapped file */
};

/* Reads and validates the dimensions. */
m3_status m3_read_hparams(const m3_gguf *gguf, m3_hparams *out, m3_error *err);

/* Layer (-1 for none) and role (an m3_role or m3_outer_role) of a tensor; false if there is none of that name. */
bool m3_find_role(const m3_model *model, const char *name, int32_t *layer, int32_t *role);

/* What of the tensors behind the layers an eval needs. */
typedef enum m3_end { M3_END_NONE, M3_END_NORM, M3_END_HEAD } m3_end;

/* M3_ERROR_UNBOUND with the name of the first tensor without data that layers [first, first + count) need; the
 * embeddings count to layer 0; END_NORM needs the output norm too, END_HEAD norm and head. */
m3_status m3_check_bound(const m3_model *model, int32_t first, int32_t count, m3_end end, m3_error *err);

#endif
