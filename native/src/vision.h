/* vision.h - the weights of a vision file by role. */
#ifndef M3_SRC_VISION_H
#define M3_SRC_VISION_H

#include <stdatomic.h>

#include "model.h"

/* Linear layers and norms, each a weight and a bias; GGUF names stand in vision_file.c. */
typedef enum m3_vision_role {
  M3_VISION_LN1,
  M3_VISION_LN2,
  M3_VISION_Q,
  M3_VISION_K,
  M3_VISION_V,
  M3_VISION_OUT,
  M3_VISION_UP,
  M3_VISION_DOWN,
  M3_VISION_LAYER_ROLES
} m3_vision_role;

typedef enum m3_vision_outer_role {
  M3_VISION_PRE_LN,
  M3_VISION_PROJECTOR_1,
  M3_VISION_PROJECTOR_2,
  M3_VISION_MERGER_1,
  M3_VISION_MERGER_2,
  M3_VISION_OUTER_ROLES
} m3_vision_outer_role;

enum { M3_VISION_MERGE = 2, M3_VISION_FRAMES = 2, M3_VISION_CHANNELS = 3 };

typedef struct m3_affine {
  m3_weight weight, bias;
} m3_affine;

typedef struct m3_vision_layer {
  m3_affine a[M3_VISION_LAYER_ROLES];
} m3_vision_layer;

struct m3_vision {
  m3_gguf *gguf;
  m3_vision_hparams hparams;
  m3_weight patch[M3_VISION_FRAMES];         /* [n_embd, channels * patch_size^2], of each frame */
  m3_tensor patch_tensors[M3_VISION_FRAMES]; /* those of the file, seen as matrices */
  m3_vision_layer *layers;
  m3_affine outer[M3_VISION_OUTER_ROLES];
  const m3_backend *backend;
  const struct m3_kernels *kernels;
  atomic_bool cancel;
};

/* Values of a patch: channel by channel, in it frame by frame, in it row by row. */
static inline int64_t m3_patch_values(const m3_vision_hparams *h) {
  return (int64_t)M3_VISION_CHANNELS * M3_VISION_FRAMES * h->patch_size * h->patch_size;
}

#endif
