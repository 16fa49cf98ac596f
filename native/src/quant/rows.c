/* Sets of rows to and from a storage type, checked and shared out among threads. */
#include <float.h>
#include <math.h>

#include "error.h"
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

/* What one row holds that the target type cannot. */
typedef struct row_fault {
  int64_t count;  /* values that are NaN, infinite or too large */
  int64_t column; /* of the first */
} row_fault;

static row_fault find_fault(const float *x, int64_t n, float limit) {
  /* A sum of comparisons first: it vectorizes, and almost every row is clean. */
  row_fault fault = {0, -1};
  for (int64_t i = 0; i < n; i++) fault.count += !(fabsf(x[i]) <= limit);
  if (fault.count)
    for (fault.column = 0; fabsf(x[fault.column]) <= limit;) fault.column++;
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
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : faults) reduction(min : first_row)
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
  int64_t n = rows->n_per_row;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t r = 0; r < rows->n_rows; r++) t->to_f32((const char *)rows->data + r * row, rows->values + r * n, n);
  return M3_OK;
}
