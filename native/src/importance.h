/* importance.h - sums of squares of what the weight matrices of a session's window were multiplied with. */
#ifndef M3_SRC_IMPORTANCE_H
#define M3_SRC_IMPORTANCE_H

#include "backend.h"
#include "model.h"

/* Doubles that the sums of layers [first, first + count) take. */
int64_t m3_importance_doubles(const m3_hparams *hparams, int32_t first, int32_t count);

/* Points the inputs of those layers, [count][M3_INPUTS], into memory of so many doubles. */
void m3_importance_lay_out(const m3_hparams *hparams, int32_t first, int32_t count, double *memory,
                           m3_input_sums *inputs);

#endif
