#include "quant.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "threads.h"

static inline uint32_t bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

static inline float float_of(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

float m3_f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16;
  uint32_t exponent = (h >> 10) & 0x1f;
  uint32_t mantissa = h & 0x3ff;
  if (exponent == 0x1f) return float_of(sign | 0x7f800000 | mantissa << 13);
  if (exponent) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  /* Subnormal: mantissa * 2^-24, exact in float32. */
  float f = (float)mantissa * 0x1p-24f;
  return float_of(sign | bits_of(f));
}

uint16_t m3_f32_to_f16(float f) {
  uint32_t u = bits_of(f);
  uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7e00 | (uint16_t)(u >> 13 & 0x1ff); /* NaN, quiet */
  if (u >= 0x477ff000) return sign | 0x7c00;                              /* 65520 and above round to infinity */
  if (u < 0x38800000) {
    /* Subnormal result: adding 0.5 puts the unit of the last place at 2^-24, and the addition rounds. */
    float shifted = float_of(u) + 0.5f;
    return sign | (uint16_t)(bits_of(shifted) - bits_of(0.5f));
  }
  uint32_t odd = u >> 13 & 1;
  return sign | (uint16_t)((u - 0x38000000 + 0xfff + odd) >> 13);
}

float m3_bf16_to_f32(uint16_t h) { return float_of((uint32_t)h << 16); }

uint16_t m3_f32_to_bf16(float f) {
  uint32_t u = bits_of(f);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40); /* NaN, quiet */
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static void f32_copy_to(const void *src, float *dst, int64_t n) { memcpy(dst, src, (size_t)n * 4); }
static void f32_copy_from(const float *src, void *dst, int64_t n) { memcpy(dst, src, (size_t)n * 4); }

static void f16_to_f32(const void *src, float *dst, int64_t n) {
  const uint16_t *s = src;
  for (int64_t i = 0; i < n; i++) dst[i] = m3_f16_to_f32(s[i]);
}

static void f16_from_f32(const float *src, void *dst, int64_t n) {
  uint16_t *d = dst;
  for (int64_t i = 0; i < n; i++) d[i] = m3_f32_to_f16(src[i]);
}

static void bf16_to_f32(const void *src, float *dst, int64_t n) {
  const uint16_t *s = src;
  for (int64_t i = 0; i < n; i++) dst[i] = m3_bf16_to_f32(s[i]);
}

static void bf16_from_f32(const float *src, void *dst, int64_t n) {
  uint16_t *d = dst;
  for (int64_t i = 0; i < n; i++) d[i] = m3_f32_to_bf16(src[i]);
}

static void q8_0_to_f32(const void *src, float *dst, int64_t n) {
  const m3_block_q8_0 *b = src;
  for (int64_t i = 0; i < n / M3_Q8_0_BLOCK; i++) {
    float d = m3_f16_to_f32(b[i].d);
    for (int j = 0; j < M3_Q8_0_BLOCK; j++) dst[i * M3_Q8_0_BLOCK + j] = (float)b[i].q[j] * d;
  }
}

static void q8_0_from_f32(const float *src, void *dst, int64_t n) {
  m3_block_q8_0 *b = dst;
  for (int64_t i = 0; i < n / M3_Q8_0_BLOCK; i++) {
    const float *x = src + i * M3_Q8_0_BLOCK;
    float absmax = 0;
    for (int j = 0; j < M3_Q8_0_BLOCK; j++) absmax = fmaxf(absmax, fabsf(x[j]));
    float d = absmax / 127.0f;
    /* The division by the float32 scale, not by the stored float16 one, is what the format's writers do: the
     * bytes must be the same everywhere. */
    float inverse = d != 0 ? 1.0f / d : 0.0f;
    if (isinf(inverse)) inverse = 0.0f; /* a scale below 2^-128 is stored as zero anyway */
    b[i].d = m3_f32_to_f16(d);
    for (int j = 0; j < M3_Q8_0_BLOCK; j++) b[i].q[j] = (int8_t)roundf(x[j] * inverse);
  }
}

static const m3_type_traits traits[] = {
    {M3_TYPE_F32, "F32", 1, 4, f32_copy_to, f32_copy_from},
    {M3_TYPE_F16, "F16", 1, 2, f16_to_f32, f16_from_f32},
    {M3_TYPE_BF16, "BF16", 1, 2, bf16_to_f32, bf16_from_f32},
    {M3_TYPE_Q8_0, "Q8_0", M3_Q8_0_BLOCK, sizeof(m3_block_q8_0), q8_0_to_f32, q8_0_from_f32},
};

const m3_type_traits *m3_traits(int32_t type) {
  for (size_t i = 0; i < sizeof traits / sizeof *traits; i++)
    if (traits[i].type == type) return &traits[i];
  return NULL;
}

const char *m3_any_type_name(int32_t type) {
  /* GGUF's numbers; the gaps are types that were withdrawn from the format. */
  static const char *const names[] = {"F32",     "F16",    "Q4_0",    "Q4_1",  NULL,     NULL,    "Q5_0",  "Q5_1",
                                      "Q8_0",    "Q8_1",   "Q2_K",    "Q3_K",  "Q4_K",   "Q5_K",  "Q6_K",  "Q8_K",
                                      "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS",
                                      "I8",      "I16",    "I32",     "I64",   "F64",    "IQ1_M", "BF16",  NULL,
                                      NULL,      NULL,     "TQ1_0",   "TQ2_0", NULL,     NULL,    NULL,    "MXFP4"};
  if (type < 0 || (size_t)type >= sizeof names / sizeof *names) return NULL;
  return names[type];
}

const char *m3_type_name(int32_t type) {
  const m3_type_traits *t = m3_traits(type);
  return t ? t->name : NULL;
}

int64_t m3_type_block_size(int32_t type) {
  const m3_type_traits *t = m3_traits(type);
  return t ? t->block : 0;
}

int64_t m3_row_bytes(int32_t type, int64_t n) {
  const m3_type_traits *t = m3_traits(type);
  int64_t bytes;
  if (!t || n < 0 || n % t->block || __builtin_mul_overflow(n / t->block, t->block_bytes, &bytes)) return -1;
  return bytes;
}

/* Checks what both directions share; gives the traits, the bytes of a row and the number of threads. */
static m3_status check_rows(const m3_row_set *r, const m3_type_traits **t, int64_t *row, int32_t *threads,
                            m3_error *err) {
  if (!r || r->struct_size != sizeof *r)
    return m3_fail(err, M3_ERROR_ARGUMENT,
                   "m3_row_set has %u bytes, this library expects %zu: library and header do not belong together",
                   r ? r->struct_size : 0, sizeof *r);
  *t = m3_traits(r->type);
  if (!*t) {
    const char *name = m3_any_type_name(r->type);
    return m3_fail(err, M3_ERROR_ARGUMENT, "type %s (%d) is not supported; F32, F16, BF16 and Q8_0 are",
                   name ? name : "?", (int)r->type);
  }
  *row = m3_row_bytes(r->type, r->n_per_row);
  if (*row < 0)
    return m3_fail(err, M3_ERROR_ARGUMENT, "rows of %lld elements cannot be %s: its blocks hold %lld",
                   (long long)r->n_per_row, (*t)->name, (long long)(*t)->block);
  int64_t want;
  if (r->n_rows < 0 || __builtin_mul_overflow(r->n_rows, *row, &want) || want != r->data_bytes)
    return m3_fail(err, M3_ERROR_ARGUMENT, "%lld rows of %lld bytes do not make %lld bytes", (long long)r->n_rows,
                   (long long)*row, (long long)r->data_bytes);
  if (r->n_rows && (!r->values || !r->data)) return m3_fail(err, M3_ERROR_ARGUMENT, "values or data is NULL");
  return m3_resolve_threads(r->n_threads, threads, err);
}

/* What one row holds that the target type cannot. */
typedef struct row_fault {
  int64_t count;  /* values that are NaN, infinite or too large */
  int64_t column; /* of the first */
} row_fault;

/* Largest magnitude that survives the conversion as a finite value: for F16 the last float32 below 65520, which
 * still rounds to 65504; for Q8_0 the same of its scale, absmax / 127; for BF16 the last below its own tie. */
static float largest_finite(int32_t type) {
  const float f16_limit = 0x1.ffdffep15f;
  if (type == M3_TYPE_F16) return f16_limit;
  if (type == M3_TYPE_Q8_0) return f16_limit * 127.0f;
  if (type == M3_TYPE_BF16) return 0x1.fefffep127f;
  return FLT_MAX;
}

static row_fault find_fault(const float *x, int64_t n, float limit) {
  /* A sum of comparisons first: it vectorizes, and almost every row is clean. */
  row_fault fault = {0, -1};
  for (int64_t i = 0; i < n; i++) fault.count += !(fabsf(x[i]) <= limit);
  if (fault.count)
    for (fault.column = 0; fabsf(x[fault.column]) <= limit;) fault.column++;
  return fault;
}

m3_status m3_quantize(const m3_row_set *rows, m3_error *err) {
  const m3_type_traits *t;
  int64_t row;
  int32_t threads;
  m3_status status = check_rows(rows, &t, &row, &threads, err);
  if (status) return status;
  int64_t n = rows->n_per_row, faults = 0, first_row = rows->n_rows;
  float limit = largest_finite(rows->type);
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : faults) reduction(min : first_row)
  for (int64_t r = 0; r < rows->n_rows; r++) {
    row_fault fault = find_fault(rows->values + r * n, n, limit);
    if (fault.count) {
      faults += fault.count;
      if (r < first_row) first_row = r;
    } else {
      t->from_f32(rows->values + r * n, (char *)rows->data + r * row, n);
    }
  }
  if (!faults) return M3_OK;
  int64_t column = find_fault(rows->values + first_row * n, n, limit).column;
  float value = rows->values[first_row * n + column];
  const char *what = isfinite(value) ? "overflow" : "not finite";
  return m3_fail(err, M3_ERROR_NOT_FINITE, "%s: %g at row %lld, column %lld; %lld values do not fit %s (largest %g)",
                 what, (double)value, (long long)first_row, (long long)column, (long long)faults, t->name,
                 (double)limit);
}

m3_status m3_dequantize(const m3_row_set *rows, m3_error *err) {
  const m3_type_traits *t;
  int64_t row;
  int32_t threads;
  m3_status status = check_rows(rows, &t, &row, &threads, err);
  if (status) return status;
  int64_t n = rows->n_per_row;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t r = 0; r < rows->n_rows; r++) t->to_f32((const char *)rows->data + r * row, rows->values + r * n, n);
  return M3_OK;
}
