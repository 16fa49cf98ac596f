/* Sums of squares of what weight matrices are multiplied with. */
#include "cpu/cpu.h"

#define COLUMNS 64 /* of one piece of work: their sums stay in registers or close by while the rows go past */

void m3_sum_squares(const m3_context *c, m3_input input, int32_t matrix, const float *x, int64_t n) {
  if (!c->inputs) return;
  const m3_input_sums *in = &c->inputs[input];
  int64_t width = in->width;
  double *sums = in->sums + matrix * width;
  in->rows[matrix] += (double)n;
#pragma omp parallel for num_threads(m3_threads_for(c, n *width)) schedule(static)
  for (int64_t first = 0; first < width; first += COLUMNS) {
    int64_t end = width - first < COLUMNS ? width : first + COLUMNS;
    for (int64_t r = 0; r < n; r++)
      for (int64_t i = first; i < end; i++) {
        double v = (double)x[r * width + i];
        sums[i] += v * v; /* the square of a float32 is exact */
      }
  }
}
