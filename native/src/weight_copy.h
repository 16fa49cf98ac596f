/* weight_copy.h - weights of a file in memory of the process, for M3_LOAD_READ. */
#ifndef M3_SRC_WEIGHT_COPY_H
#define M3_SRC_WEIGHT_COPY_H

#include <stdatomic.h>

#include "model.h"

/* Reads the data of n weights of the model's files, which are mapped, into memory; `data` then points there. On an
 * error all weights are as they were. done: bytes read are added. cancel: makes it M3_ERROR_CANCELLED soon.
 * M3_ERROR_MEMORY; M3_ERROR_IO if a file cannot be read or is not the one that was opened. */
m3_status m3_copy_weights(m3_model *model, m3_weight **weights, int64_t n, atomic_ullong *done,
                          const atomic_bool *cancel, m3_error *err);

/* Frees the memory of a weight, if it has some; `data` is then what it was in the file. */
void m3_weight_copy_free(m3_weight *weight);

#endif
