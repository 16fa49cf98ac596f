/* paging.h - experts of a mapped file on their way into memory before they are multiplied. */
#ifndef M3_SRC_PAGING_H
#define M3_SRC_PAGING_H

#include "model.h"

/* What asks the system for pages of the file, on a thread of its own; one for each model. */
typedef struct m3_pager m3_pager;

m3_status m3_pager_open(m3_pager **out, m3_error *err);
void m3_pager_close(m3_pager *pager); /* takes NULL */

/* Has the matrices of the experts experts[0 .. n) of a layer, in any order and more than once, read in the order of
 * their use, as far as they are not in memory. Returns at once; what an earlier call asked for is dropped. Nothing
 * happens where the weights are not in a mapped file. */
void m3_page_in(const m3_model *model, const m3_layer *layer, const int32_t *experts, int64_t n);

#endif
