/* The roundings of every instruction set write the same bytes: those of the scalar code, whose hash stands here. */
#include <float.h>
#include <stddef.h>

#include "check.h"
#include "quant/half.h"
#include "quant/rounding.h"
#include "quant/traits.h"

enum { N = 256, N_KINDS = 12, N_TURNS = 30 };

static const struct {
  size_t at; /* in m3_roundings */
  int32_t type;
  uint64_t hash;
} types[] = {
    {offsetof(m3_roundings, f16), M3_TYPE_F16, 0xe1306064b2e8f355u},
    {offsetof(m3_roundings, bf16), M3_TYPE_BF16, 0xc40fbdf2ce348c4bu},
    {offsetof(m3_roundings, q4_0), M3_TYPE_Q4_0, 0xd4491c5112225d5bu},
    {offsetof(m3_roundings, q4_1), M3_TYPE_Q4_1, 0x33f003222955cdfu},
    {offsetof(m3_roundings, q5_0), M3_TYPE_Q5_0, 0x6384f880a8eb8873u},
    {offsetof(m3_roundings, q5_1), M3_TYPE_Q5_1, 0x5cbd6c80f394ff84u},
    {offsetof(m3_roundings, q8_0), M3_TYPE_Q8_0, 0x809b6c4838078edeu},
};

static m3_rounding rounding_of(const m3_roundings *roundings, int type) {
  m3_rounding rounding;
  memcpy(&rounding, (const char *)roundings + types[type].at, sizeof rounding);
  return rounding;
}

/* 2^-149 to 2^20 */
static float power_of_two(uint64_t random) { return ldexpf(1.0f, (int)(random % 170) - 149); }

/* Kinds of values: normal, multiples of half a step (ties of most types), both zeros, zeros among others above and
 * below, two values of equal magnitude, subnormal, the largest, one far out, all equal, any bits. */
static float make_value(int kind, int i, float scale, float largest, uint64_t *state) {
  uint64_t r = next_random(state);
  float sign = r & 1 ? -1.0f : 1.0f, normal = random_float(state);
  switch (kind) {
    case 0: return normal;
    case 1: return scale * normal;
    case 2: return (float)((int)(r >> 1 & 63) - 32) * (0.5f * scale);
    case 3: return 0.0f * sign;
    case 4: return r & 6 ? 0.0f * sign : scale * fabsf(normal);
    case 5: return r & 6 ? 0.0f * sign : -scale * fabsf(normal);
    case 6: return scale * sign;
    case 7: return m3_float_of((uint32_t)(r >> 32) & 0x807fffffu);
    case 8: return r & 6 ? largest * sign : normal;
    case 9: return i % 32 == 21 ? 1000.0f * normal : normal;
    case 10: return scale;
    default: return m3_float_of((uint32_t)(r >> 32));
  }
}

static void make_row(float *x, int kind, float largest, uint64_t *state) {
  float scale = power_of_two(next_random(state));
  for (int i = 0; i < N; i++) {
    x[i] = make_value(kind, i, scale, largest, state);
    if (!(fabsf(x[i]) <= largest)) x[i] = largest;
  }
}

static void check_type(int k) {
  const m3_type_traits *t = m3_traits(types[k].type);
  m3_rounding plain = rounding_of(&m3_roundings_scalar, k), fast = rounding_of(m3_machine_roundings(), k);
  uint64_t state = 11, hash = 0xcbf29ce484222325u;
  size_t bytes = (size_t)m3_row_bytes(t->type, N);
  for (int kind = 0; kind < N_KINDS; kind++)
    for (int turn = 0; turn < N_TURNS; turn++) {
      float x[N];
      uint16_t want[N], got[N];
      make_row(x, kind, t->largest, &state);
      plain(x, want, N);
      fast(x, got, N);
      CHECK(memcmp(got, want, bytes) == 0, "%s, kind %d, turn %d", t->name, kind, turn);
      for (size_t i = 0; i < bytes; i++) hash = (hash ^ ((const uint8_t *)want)[i]) * 0x100000001b3u;
    }
  CHECK(hash == types[k].hash, "%s: hash 0x%llx, expected 0x%llx", t->name, (unsigned long long)hash,
        (unsigned long long)types[k].hash);
}

/* The plain types take any number of values, NaN and infinity among them, and write nothing beyond. */
static void check_plain(int k) {
  m3_rounding plain = rounding_of(&m3_roundings_scalar, k), fast = rounding_of(m3_machine_roundings(), k);
  uint64_t state = 5;
  for (int n = 0; n <= 40; n++) {
    float x[41];
    uint16_t want[42], got[42];
    memset(want, 0xa5, sizeof want);
    memset(got, 0xa5, sizeof got);
    for (int i = 0; i < n; i++) {
      uint32_t bits = (uint32_t)next_random(&state);
      x[i] = m3_float_of(i % 3 ? bits : bits | 0x7f800000u);
    }
    plain(x, want, n);
    fast(x, got, n);
    CHECK(memcmp(got, want, sizeof got) == 0, "%s, %d values", m3_type_name(types[k].type), n);
    CHECK(got[n] == 0xa5a5, "%s, %d values: one more is written", m3_type_name(types[k].type), n);
  }
}

int main(void) {
#if defined(__x86_64__)
  if (m3_machine_roundings() == &m3_roundings_scalar) printf("not run here: AVX2\n");
#endif
  for (int k = 0; k < (int)(sizeof types / sizeof *types); k++) check_type(k);
  check_plain(0);
  check_plain(1);
  return finish("test_rounding");
}
