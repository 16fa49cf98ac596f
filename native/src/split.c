/* Models in several files, as llama.cpp splits them: NAME-00001-of-0000N.gguf, each a valid GGUF file with the keys
 * split.no (from 0), split.count and split.tensors.count (of all files), the first with all other keys. Names and keys
 * are untrusted: each must say the same as the others. m3-convert gives all files of a conversion the same m3.split.id:
 * those of two models of one shape would else pass as one. Files of llama.cpp have none. */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gguf.h"

#define SUFFIX_BYTES 20u /* of "-00001-of-00003.gguf" */
#define SPLIT_ID "m3.split.id"

typedef struct split_name {
  size_t prefix; /* bytes before the suffix */
  int no;        /* from 1 */
  int count;
} split_name;

static bool read_digits(const char *s, int *out) {
  *out = 0;
  for (int i = 0; i < 5; i++) {
    if (s[i] < '0' || s[i] > '9') return false;
    *out = *out * 10 + (s[i] - '0');
  }
  return true;
}

static bool parse_name(const char *path, split_name *name) {
  size_t n = strlen(path);
  if (n <= SUFFIX_BYTES || path[n - SUFFIX_BYTES - 1] == '/') return false;
  const char *suffix = path + n - SUFFIX_BYTES;
  name->prefix = n - SUFFIX_BYTES;
  return suffix[0] == '-' && read_digits(suffix + 1, &name->no) && memcmp(suffix + 6, "-of-", 4) == 0 &&
         read_digits(suffix + 10, &name->count) && strcmp(suffix + 15, ".gguf") == 0 && name->no >= 1 &&
         name->no <= name->count;
}

static void write_digits(char *s, int number) {
  for (int i = 4; i >= 0; i--, number /= 10) s[i] = (char)('0' + number % 10);
}

/* The name of file `no` (from 1), to be freed; NULL without memory. */
static char *file_name(const char *path, size_t prefix, int no, int count) {
  char *name = malloc(prefix + SUFFIX_BYTES + 1);
  if (!name) return NULL;
  memcpy(name, path, prefix);
  memcpy(name + prefix, "-00000-of-00000.gguf", SUFFIX_BYTES + 1);
  write_digits(name + prefix + 1, no);
  write_digits(name + prefix + 10, count);
  return name;
}

/* ---------------------------------------------------------------------------------------------- folders */

static bool same_model(const char *a, split_name x, const char *b, split_name y) {
  return x.count == y.count && x.prefix == y.prefix && memcmp(a, b, x.prefix) == 0;
}

/* The first file that is there of the one split model in a folder; `found` is empty if there is none. */
static m3_status scan_folder(DIR *folder, const char *path, char *found, size_t size, m3_error *err) {
  split_name first = {0}, name;
  found[0] = 0;
  for (const struct dirent *entry = readdir(folder); entry; entry = readdir(folder)) {
    if (!parse_name(entry->d_name, &name) || strlen(entry->d_name) >= size) continue;
    if (found[0] && !same_model(found, first, entry->d_name, name))
      return m3_fail(err, M3_ERROR_IO, "%s: holds files of two models, %s and %s; name one of them", path, found,
                     entry->d_name);
    if (found[0] && first.no < name.no) continue;
    strcpy(found, entry->d_name);
    first = name;
  }
  return M3_OK;
}

/* The path of a file in the folder, to be freed. */
static m3_status find_in_folder(const char *path, char **out, m3_error *err) {
  DIR *folder = opendir(path);
  if (!folder) return m3_fail(err, M3_ERROR_IO, "%s: cannot be opened: %s", path, strerror(errno));
  char found[NAME_MAX + 1];
  m3_status status = scan_folder(folder, path, found, sizeof found, err);
  closedir(folder);
  if (status) return status;
  if (!found[0])
    return m3_fail(err, M3_ERROR_IO,
                   "%s: is a folder without a split model, expected a GGUF file or files NAME-00001-of-0000N.gguf",
                   path);
  size_t n = strlen(path) + strlen(found) + 2;
  *out = malloc(n);
  if (!*out) return m3_fail_memory(err, n, "the name of a file");
  snprintf(*out, n, "%s%s%s", path, path[strlen(path) - 1] == '/' ? "" : "/", found);
  return M3_OK;
}

/* ---------------------------------------------------------------------------------------------- files */

typedef struct split_keys {
  int64_t no, count, tensors;
} split_keys;

static m3_status read_keys(const m3_gguf *g, split_keys *keys, m3_error *err) {
  const char *file = m3_gguf_name(g);
  m3_status status = m3_gguf_i64(g, "split.count", &keys->count, err);
  if (!status) status = m3_gguf_i64(g, "split.no", &keys->no, err);
  if (!status) status = m3_gguf_i64(g, "split.tensors.count", &keys->tensors, err);
  if (status) return status;
  if (keys->count < 2 || keys->count > M3_MAX_FILES)
    return m3_fail(err, M3_ERROR_FORMAT, "%s: split.count is %" PRId64 ", expected 2 to %d", file, keys->count,
                   M3_MAX_FILES);
  if (keys->no < 0 || keys->no >= keys->count)
    return m3_fail(err, M3_ERROR_FORMAT, "%s: split.no is %" PRId64 ", expected 0 to %" PRId64, file, keys->no,
                   keys->count - 1);
  split_name name;
  if (!parse_name(file, &name) || name.count != keys->count || name.no != keys->no + 1)
    return m3_fail(err, M3_ERROR_FORMAT,
                   "%s: is file %" PRId64 " of %" PRId64
                   " of a split model, expected a name that ends in -%05d-of-%05d.gguf",
                   file, keys->no + 1, keys->count, (int)keys->no + 1, (int)keys->count);
  return M3_OK;
}

/* All are looked for before any is opened, so that the message counts them. */
static m3_status check_present(const char *path, split_name name, m3_error *err) {
  int missing = 0;
  char *first = NULL;
  for (int no = 1; no <= name.count; no++) {
    char *file = file_name(path, name.prefix, no, name.count);
    struct stat st;
    bool gone = file && stat(file, &st) != 0 && errno == ENOENT;
    missing += gone;
    if (gone && !first)
      first = file;
    else
      free(file);
  }
  if (!first) return M3_OK;
  m3_status status =
      m3_fail(err, M3_ERROR_IO, "%s: is missing (%d of the %d files of this model are)", first, missing, name.count);
  free(first);
  return status;
}

static m3_status check_id(const m3_gguf *g, const m3_gguf *opened, m3_error *err) {
  const m3_gguf *files[2] = {g, opened};
  m3_string ids[2] = {{0}, {0}};
  int n_ids = 0;
  for (int i = 0; i < 2; i++) {
    if (!m3_gguf_find_kv(files[i], SPLIT_ID)) continue;
    m3_status status = m3_gguf_str(files[i], SPLIT_ID, &ids[i], err);
    if (status) return status;
    n_ids++;
  }
  bool same = ids[0].size == ids[1].size && (!ids[0].size || memcmp(ids[0].data, ids[1].data, ids[0].size) == 0);
  if (n_ids != 1 && same) return M3_OK;
  const char *other = m3_gguf_name(opened), *slash = strrchr(other, '/');
  return m3_fail(err, M3_ERROR_FORMAT, "%s: is of another conversion than %s (" SPLIT_ID "), expected files of one",
                 m3_gguf_name(g), slash ? slash + 1 : other);
}

/* `opened`: a file of the model, with the keys `first`. */
static m3_status open_other(const m3_gguf *opened, split_name name, int no, const split_keys *first, m3_gguf **out,
                            m3_error *err) {
  char *file = file_name(m3_gguf_name(opened), name.prefix, no, name.count);
  if (!file) return m3_fail_memory(err, name.prefix, "the name of a file");
  m3_status status = m3_gguf_open_file(file, out, err);
  free(file);
  split_keys keys;
  if (!status) status = read_keys(*out, &keys, err);
  if (!status && keys.tensors != first->tensors)
    status = m3_fail(err, M3_ERROR_FORMAT, "%s: split.tensors.count is %" PRId64 ", in another file %" PRId64,
                     m3_gguf_name(*out), keys.tensors, first->tensors);
  if (!status) status = check_id(*out, opened, err);
  return status;
}

static void close_all(m3_gguf **files, int64_t n) {
  for (int64_t i = 0; files && i < n; i++) m3_gguf_close(files[i]);
  free(files);
}

/* Opens the files beside `opened`, which is one of them, and joins them. Takes `opened` over. */
static m3_status open_others(m3_gguf *opened, m3_gguf **out, m3_error *err) {
  const char *path = m3_gguf_name(opened);
  split_keys keys = {0};
  split_name name = {0};
  m3_status status = read_keys(opened, &keys, err);
  if (!status) {
    parse_name(path, &name);
    status = check_present(path, name, err);
  }
  m3_gguf **files = status ? NULL : calloc((size_t)keys.count, sizeof *files);
  if (!status && !files) status = m3_fail_memory(err, (uint64_t)keys.count * sizeof *files, "the files of a model");
  if (status) {
    m3_gguf_close(opened);
    return status;
  }
  files[keys.no] = opened;
  for (int no = 1; no <= name.count && !status; no++)
    if (no - 1 != keys.no) status = open_other(opened, name, no, &keys, &files[no - 1], err);
  if (status) {
    close_all(files, keys.count);
    return status;
  }
  m3_gguf *first = files[0];
  memmove(files, files + 1, (size_t)(keys.count - 1) * sizeof *files);
  status = m3_gguf_join(first, files, keys.count - 1, err);
  if (!status && m3_gguf_n_tensors(first) != keys.tensors)
    status = m3_fail(err, M3_ERROR_FORMAT, "%s: split.tensors.count is %" PRId64 ", its files have %" PRId64 " tensors",
                     m3_gguf_name(first), keys.tensors, m3_gguf_n_tensors(first));
  if (status) {
    m3_gguf_close(first);
    return status;
  }
  *out = first;
  return M3_OK;
}

static bool is_folder(const char *path) {
  struct stat st;
  return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

m3_status m3_gguf_open(const char *path, m3_gguf **out, m3_error *err) {
  if (!out) return m3_fail(err, M3_ERROR_ARGUMENT, "m3_gguf_open: out is NULL");
  *out = NULL;
  if (!path) return m3_fail(err, M3_ERROR_ARGUMENT, "m3_gguf_open: path is NULL");
  char *found = NULL;
  m3_status status = is_folder(path) ? find_in_folder(path, &found, err) : M3_OK;
  m3_gguf *g = NULL;
  int64_t count = 1;
  if (!status) status = m3_gguf_open_file(found ? found : path, &g, err);
  if (!status && m3_gguf_find_kv(g, "split.count")) status = m3_gguf_i64(g, "split.count", &count, err);
  split_name name;
  bool several = count > 1 || (found && parse_name(found, &name) && name.count > 1);
  free(found);
  if (status) {
    m3_gguf_close(g);
    return status;
  }
  if (several) return open_others(g, out, err);
  *out = g;
  return M3_OK;
}
