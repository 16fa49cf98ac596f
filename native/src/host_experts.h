/* host_experts.h - routed experts in host memory, computed by the CPU backend for a session on a device. */
#ifndef M3_SRC_HOST_EXPERTS_H
#define M3_SRC_HOST_EXPERTS_H

#include "model.h"

/* What a session keeps for it, NULL where all its experts are on the device. */
typedef struct m3_host_experts m3_host_experts;

/* Bytes of host memory of a session with these options, which were checked; `pinned`: those of them that transfers use.
 */
uint64_t m3_host_experts_bytes(const m3_model *model, const m3_session_options *options, uint64_t *pinned);

/* The options have their defaults filled in. */
m3_status m3_host_experts_open(const m3_model *model, const m3_session_options *options, m3_device_state *state,
                               m3_host_experts **out, m3_error *err);
void m3_host_experts_close(m3_host_experts *host); /* takes NULL */

/* The experts operation, and what `shared` does, of a layer with host_experts, behind the router. */
void m3_host_experts_run(m3_host_experts *host, const m3_context *c, const m3_ffn_params *p);

#endif
