/* placement.h - where the routed experts of each layer are: on the device with the rest, or in host memory for the CPU.
 */
#ifndef M3_SRC_PLACEMENT_H
#define M3_SRC_PLACEMENT_H

#include "model.h"

/* Marks what the options decide already: all of it but for M3_EXPERTS_AUTO of a file on a device, which m3_model_place
 * decides. M3_ERROR_ARGUMENT, M3_ERROR_UNSUPPORTED. */
m3_status m3_placement_open(m3_model *model, int32_t experts_on, m3_error *err);

/* Leaves undecided experts to the device. The lock of loading is held. */
void m3_placement_settle(m3_model *model);

/* Whether a weight is of experts in host memory, and so is not brought to the device. */
bool m3_stays_on_host(const m3_model *model, const m3_weight *weight);

/* Whether any of layers [first, first + count) has such experts. */
bool m3_any_on_host(const m3_model *model, int32_t first, int32_t count);

/* Bytes of the device that stay free when experts are placed. */
uint64_t m3_placement_margin(uint64_t total_bytes);

#endif
