/* check.h - what the C tests share: counted checks, a random generator, and a comparison that prints the worst place.
 * A test program returns 0 if every check held; its last line counts them. */
#ifndef M3_TESTS_CHECK_H
#define M3_TESTS_CHECK_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int checks_passed, checks_failed;

#define CHECK(condition, ...)                                \
  do {                                                       \
    if (condition) {                                         \
      checks_passed++;                                       \
    } else {                                                 \
      checks_failed++;                                       \
      printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      printf(__VA_ARGS__);                                   \
      printf("\n");                                          \
    }                                                        \
  } while (0)

static inline int finish(const char *name) {
  printf("%s: %d passed, %d failed\n", name, checks_passed, checks_failed);
  return checks_failed != 0 || checks_passed == 0;
}

/* splitmix64: the same numbers on every machine. */
static inline uint64_t next_random(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

/* Roughly normal: the sum of four uniform numbers, centered. */
static inline float random_float(uint64_t *state) {
  float sum = 0;
  for (int i = 0; i < 4; i++) sum += (float)(next_random(state) >> 40) * 0x1p-24f;
  return (sum - 2.0f) * 1.7f;
}

static inline void fill_random(float *x, int64_t n, float scale, uint64_t *state) {
  for (int64_t i = 0; i < n; i++) x[i] = scale * random_float(state);
}

/* Largest |a - b|, and where; NaN counts as infinitely far unless both are NaN. */
static inline double worst_difference(const float *a, const float *b, int64_t n, int64_t *where) {
  double worst = 0;
  *where = -1;
  for (int64_t i = 0; i < n; i++) {
    if (isnan(a[i]) && isnan(b[i])) continue;
    double d = fabs((double)a[i] - (double)b[i]);
    if (!(d <= worst)) {
      if (isnan(d)) d = INFINITY;
      worst = d;
      *where = i;
    }
  }
  return worst;
}

#define CHECK_CLOSE(what, got, want, n, tolerance)                                                      \
  do {                                                                                                  \
    int64_t at_;                                                                                        \
    double d_ = worst_difference(got, want, n, &at_);                                                   \
    CHECK(d_ <= (tolerance), "%s: |difference| %.3g at %lld (got %g, want %g), allowed %.3g", what, d_, \
          (long long)at_, at_ < 0 ? 0.0 : (double)(got)[at_], at_ < 0 ? 0.0 : (double)(want)[at_],      \
          (double)(tolerance));                                                                         \
  } while (0)

#endif
