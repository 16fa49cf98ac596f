/* The searches of the codebook types give the same bytes with every instruction set of this machine. */
#include <stddef.h>

#include "check.h"
#include "quant/codebook_search.h"

enum { N = 256 };

static const struct {
  const char *name;
  size_t at; /* in m3_codebook_searches */
} types[] = {
    {"IQ3_XXS", offsetof(m3_codebook_searches, iq3_xxs)}, {"IQ3_S", offsetof(m3_codebook_searches, iq3_s)},
    {"IQ2_XXS", offsetof(m3_codebook_searches, iq2_xxs)}, {"IQ2_XS", offsetof(m3_codebook_searches, iq2_xs)},
    {"IQ2_S", offsetof(m3_codebook_searches, iq2_s)},     {"IQ1_S", offsetof(m3_codebook_searches, iq1_s)},
    {"IQ1_M", offsetof(m3_codebook_searches, iq1_m)},
};

static m3_codebook_search search_of(const m3_codebook_searches *searches, int type) {
  m3_codebook_search search;
  memcpy(&search, (const char *)searches + types[type].at, sizeof search);
  return search;
}

/* Kinds of blocks: normal, cubed (long tails), few distinct numbers, tiny, huge, mostly zero. */
static void fill_block(float *x, float *w, int kind, uint64_t *state) {
  static const float scales[] = {0.02f, 1.0f, 1.0f, 3e-7f, 9000.0f, 1.0f};
  fill_random(x, N, 1.0f, state);
  for (int i = 0; i < N; i++) {
    float f = random_float(state);
    w[i] = kind == 2 ? 1.0f : f * f;
    if (kind == 1) x[i] *= x[i] * x[i];
    if (kind == 2) x[i] = roundf(x[i]);
    if (kind == 5 && i % 17) x[i] = 0;
    x[i] *= scales[kind];
  }
}

int main(void) {
  const m3_codebook_searches *machine = m3_machine_codebook_searches();
  uint64_t state = 99;
  for (int type = 0; type < (int)(sizeof types / sizeof *types); type++) {
    m3_codebook_search plain = search_of(&m3_codebook_searches_scalar, type), fast = search_of(machine, type);
    for (int kind = 0; kind < 6; kind++) {
      for (int turn = 0; turn < 4; turn++) {
        float x[N], w[N];
        m3_coded_block a, b;
        fill_block(x, w, kind, &state);
        plain(x, turn % 2 ? NULL : w, &a);
        fast(x, turn % 2 ? NULL : w, &b);
        CHECK(!memcmp(&a, &b, sizeof a), "%s, kind %d, turn %d: codes differ", types[type].name, kind, turn);
      }
    }
  }
  return finish("test_encode_iq");
}
