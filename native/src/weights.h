/* weights.h - weights on a device that does not read host memory, or in memory rather than in the mapped file. */
#ifndef M3_SRC_WEIGHTS_H
#define M3_SRC_WEIGHTS_H

#include "model.h"

/* Lock and progress of loading, one for each model. */
typedef struct m3_loading m3_loading;

m3_status m3_loading_open(m3_loading **out, m3_error *err);
void m3_loading_close(m3_loading *loading); /* takes NULL */

/* Held while weights are loaded or placed. */
void m3_loading_lock(m3_loading *loading);
void m3_loading_unlock(m3_loading *loading);

/* Bytes of the weights that sessions of layers [first, first + count) need and that are in a file but not on the device
 * yet; those before and behind the layers count to the first and the last one. */
uint64_t m3_weights_to_load(const m3_model *model, int32_t first, int32_t count);

/* Brings data that was bound to a weight, or to one of its experts (else -1), to the device, if it belongs there. */
m3_status m3_weight_bound(const m3_model *model, m3_weight *weight, int32_t expert, m3_error *err);

/* Frees what the device holds of a weight, and what memory does. */
void m3_weight_drop(const m3_model *model, m3_weight *weight);

#endif
