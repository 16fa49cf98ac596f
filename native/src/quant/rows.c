/* Sets of rows to and from a storage type, checked and shared out among threads. */
#include <float.h>
#include <math.h>

#include "error.h"
#include "quant/half.h"
#include "quant/traits.h"
#include "threads.h"

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
    return m3_fail(err, M3_ERROR_ARGUMENT, "type %s (%d) is not supported; m3.h lists those that are",
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
  if ((uintptr_t)r->values % _Alignof(float) || (uintptr_t)r->data % (uintptr_t)(*t)->alignment)
    return m3_fail(err, M3_ERROR_ARGUMENT, "values or data is not aligned: float32 to 4 bytes, %s to %lld", (*t)->name,
                   (long long)(*t)->alignment);
  return m3_resolve_threads(r->n_threads, threads, err);
}

/* Rows that a thread takes at a time: 64 KiB of float32, so that one which is late does not hold up the others. */
static int64_t chunk_of(int64_t n_per_row) { return 1 + 16384 / (n_per_row + 1); }

/* Rounding and reading have done 4 MiB of float32 in the time that a thread may need to wake up on a busy machine, so
 * they take one more only for that much. A search is worth a thread for every row. */
static int32_t worth_waking(const m3_row_set *r, int32_t threads) {
  uint64_t most = 1 + ((uint64_t)r->n_rows * (uint64_t)r->n_per_row >> 20);
  return most < (uint64_t)threads ? (int32_t)most : threads;
}

static bool only_rounds(const m3_row_set *r) {
  switch (r->type) {
    case M3_TYPE_F32:
    case M3_TYPE_F16:
    case M3_TYPE_BF16:
    case M3_TYPE_Q8_0: return true;
    case M3_TYPE_Q4_0:
    case M3_TYPE_Q4_1:
    case M3_TYPE_Q5_0:
    case M3_TYPE_Q5_1: return !r->importance;
    default: return false;
  }
}

/* What one row holds that the target type cannot. */
typedef struct row_fault {
  int64_t count;  /* values that are NaN, infinite or too large */
  int64_t column; /* of the first */
} row_fault;

/* The width that every machine has. */
typedef int32_t four_bits __attribute__((vector_size(16)));

/* Whether all magnitudes are at most `limit`. */
static bool holds(const float *x, int64_t n, float limit) {
  /* Bits of magnitudes are in the order of the magnitudes, NaN above infinity; no difference of them overflows. */
  int32_t most = (int32_t)m3_bits_of(limit), difference = 0;
  four_bits a = {0}, b = {0};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    four_bits first, second;
    memcpy(&first, x + i, sizeof first);
    memcpy(&second, x + i + 4, sizeof second);
    a |= most - (first & 0x7fffffff);
    b |= most - (second & 0x7fffffff);
  }
  a |= b;
  for (int k = 0; k < 4; k++) difference |= a[k];
  for (; i < n; i++) difference |= most - (int32_t)(m3_bits_of(x[i]) & 0x7fffffff);
  return difference >= 0;
}

static row_fault find_fault(const float *x, int64_t n, float limit) {
  row_fault fault = {0, -1};
  if (holds(x, n, limit)) return fault; /* almost every row */
  for (int64_t i = 0; i < n; i++) fault.count += !(fabsf(x[i]) <= limit);
  while (fabsf(x[++fault.column]) <= limit) continue;
  return fault;
}

static m3_status check_encoder(const m3_row_set *r, const m3_type_traits *t, m3_error *err) {
  if (t->needs_importance && !r->importance)
    return m3_fail(err, M3_ERROR_ARGUMENT, "type %s needs importance data: with so few bits it is useless without",
                   t->name);
  if (!t->from_f32)
    return m3_fail(err, M3_ERROR_UNSUPPORTED, "type %s can be read but not written by this version", t->name);
  for (int64_t i = 0; r->importance && i < r->n_per_row; i++)
    if (!(r->importance[i] >= 0 && r->importance[i] <= FLT_MAX))
      return m3_fail(err, M3_ERROR_ARGUMENT, "importance of column %lld is %g, expected a finite number of at least 0",
                     (long long)i, (double)r->importance[i]);
  return M3_OK;
}

m3_status m3_quantize(const m3_row_set *rows, m3_error *err) {
  const m3_type_traits *t;
  int64_t row;
  int32_t threads;
  m3_status status = check_rows(rows, &t, &row, &threads, err);
  if (!status) status = check_encoder(rows, t, err);
  if (status) return status;
  int64_t n = rows->n_per_row, faults = 0, first_row = rows->n_rows;
  int64_t chunk = chunk_of(n);
  if (only_rounds(rows)) threads = worth_waking(rows, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk) reduction(+ : faults) reduction(min : first_row)
  for (int64_t r = 0; r < rows->n_rows; r++) {
    row_fault fault = find_fault(rows->values + r * n, n, t->largest);
    if (fault.count) {
      faults += fault.count;
      if (r < first_row) first_row = r;
    } else {
      t->from_f32(rows->values + r * n, (char *)rows->data + r * row, n, rows->importance);
    }
  }
  if (!faults) return M3_OK;
  int64_t column = find_fault(rows->values + first_row * n, n, t->largest).column;
  float value = rows->values[first_row * n + column];
  const char *what = isfinite(value) ? "overflow" : "not finite";
  return m3_fail(err, M3_ERROR_NOT_FINITE, "%s: %g at row %lld, column %lld; %lld values do not fit %s (largest %g)",
                 what, (double)value, (long long)first_row, (long long)column, (long long)faults, t->name,
                 (double)t->largest);
}

m3_status m3_dequantize(const m3_row_set *rows, m3_error *err) {
  const m3_type_traits *t;
  int64_t row;
  int32_t threads;
  m3_status status = check_rows(rows, &t, &row, &threads, err);
  if (status) return status;
  int64_t n = rows->n_per_row, chunk = chunk_of(n);
  threads = worth_waking(rows, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk)
  for (int64_t r = 0; r < rows->n_rows; r++) t->to_f32((const char *)rows->data + r * row, rows->values + r * n, n);
  return M3_OK;
}
