/* Several threads read pieces in the order of the file list, so that a disk has more than one request at a time. A
 * piece that the system's file cache holds is copied from there; another one is read past the cache (O_DIRECT) where
 * the file system can: the file would else be in memory twice, and push out what else is there. */
#include "weight_copy.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gguf_header.h"

#define PIECE ((uint64_t)8 << 20)
#define ALIGNMENT 4096u /* of O_DIRECT: at least that of every disk */
#define PAGE 4096u      /* a vector of mincore is large enough for pages of this size or larger */
#define HUGE_PAGE ((uint64_t)2 << 20)
#define READERS 4

/* ---------------------------------------------------------------------------------------------- memory */

/* Bytes of a weight and what lies before it in its aligned piece of the file. */
static uint64_t span_of(const m3_weight *w) { return w->tensor->offset % ALIGNMENT + w->tensor->n_bytes; }

static uint64_t mapped_bytes(const m3_weight *w) {
  uint64_t bytes = (span_of(w) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  return bytes < 2 * HUGE_PAGE ? bytes : bytes + HUGE_PAGE;
}

/* Where the aligned piece of the file goes. Large weights lie on huge pages, if the system gives them: filling these
 * takes less time than a fault for every 4 KiB. (Products are no faster for it.) */
static char *start_of(const m3_weight *w) {
  uintptr_t p = (uintptr_t)w->copy;
  if (w->copy_bytes >= 2 * HUGE_PAGE) p = (p + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  return (char *)p;
}

static m3_status reserve(m3_weight *w, m3_error *err) {
  uint64_t bytes = mapped_bytes(w);
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return m3_fail_memory(err, bytes, "a weight that is to be read from its file");
  w->copy = p;
  w->copy_bytes = bytes;
  madvise(p, bytes, MADV_HUGEPAGE);
  return M3_OK;
}

void m3_weight_copy_free(m3_weight *w) {
  if (!w->copy) return;
  munmap(w->copy, w->copy_bytes);
  w->copy = NULL;
  w->copy_bytes = 0;
  w->data = w->tensor->data;
}

/* ---------------------------------------------------------------------------------------------- reading */

/* A file of the model; direct is -1 where O_DIRECT is not to be had. */
typedef struct source {
  const m3_gguf *gguf;
  int plain, direct;
} source;

typedef struct job {
  source *sources; /* [files] */
  m3_weight **weights;
  int64_t n;
  atomic_ullong *done;
  const atomic_bool *cancel;
  pthread_mutex_t lock; /* of what follows */
  int64_t weight;       /* the next piece: of this weight, */
  uint64_t at;          /* from here in its span */
  m3_status status;
  m3_error error;
} job;

typedef struct piece {
  const m3_weight *weight;
  uint64_t at, end; /* in the span */
} piece;

static bool next_piece(job *j, piece *p) {
  pthread_mutex_lock(&j->lock);
  if (!j->status && atomic_load(j->cancel))
    j->status = m3_fail(&j->error, M3_ERROR_CANCELLED, "loading the weights was cancelled");
  bool found = !j->status && j->weight < j->n;
  if (found) {
    uint64_t span = span_of(j->weights[j->weight]);
    *p = (piece){j->weights[j->weight], j->at, span - j->at < PIECE ? span : j->at + PIECE};
    j->at = p->end;
    if (j->at == span) j->weight++, j->at = 0;
  }
  pthread_mutex_unlock(&j->lock);
  return found;
}

/* Whether the file cache holds all of the mapped bytes. */
static bool is_cached(const unsigned char *mapping, uint64_t from, uint64_t bytes) {
  unsigned char pages[PIECE / PAGE + 1];
  long page = sysconf(_SC_PAGESIZE);
  if (page < (long)PAGE) return false;
  uint64_t start = from / (uint64_t)page * (uint64_t)page;
  uint64_t n = (from + bytes - start + (uint64_t)page - 1) / (uint64_t)page;
  if (mincore((void *)(uintptr_t)(mapping + start), from + bytes - start, pages)) return false;
  for (uint64_t i = 0; i < n; i++)
    if (!(pages[i] & 1)) return false;
  return true;
}

/* pread of all of it; less only if the file ends, or with -1. */
static int64_t read_all(int fd, char *dst, uint64_t bytes, uint64_t from) {
  uint64_t got = 0;
  while (got < bytes) {
    ssize_t n = pread(fd, dst + got, bytes - got, (off_t)(from + got));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    if (n == 0) break;
    got += (uint64_t)n;
    if (got % ALIGNMENT) break; /* O_DIRECT cannot go on here: the end of the file */
  }
  return (int64_t)got;
}

static m3_status read_piece(const source *s, const piece *p, m3_error *err) {
  const m3_tensor *t = p->weight->tensor;
  uint64_t from = t->offset / ALIGNMENT * ALIGNMENT + p->at, bytes = p->end - p->at;
  uint64_t whole = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  char *dst = start_of(p->weight) + p->at;
  int64_t got = -1;
  if (s->direct >= 0 && !is_cached(s->gguf->bytes, from, bytes)) got = read_all(s->direct, dst, whole, from);
  if (got < (int64_t)bytes) got = read_all(s->plain, dst, bytes, from);
  if (got >= (int64_t)bytes) return M3_OK;
  if (got < 0)
    return m3_fail(err, M3_ERROR_IO, "%s: tensor '%.*s' cannot be read: %s", s->gguf->name, m3_clip(t->name),
                   t->name.data, strerror(errno));
  return m3_fail(err, M3_ERROR_IO, "%s: tensor '%.*s' cannot be read: the file ends at byte %" PRIu64, s->gguf->name,
                 m3_clip(t->name), t->name.data, from + (uint64_t)got);
}

static void *run_reader(void *argument) {
  job *j = argument;
  piece p;
  while (next_piece(j, &p)) {
    m3_error error;
    m3_status status = read_piece(&j->sources[p.weight->tensor->file], &p, &error);
    uint64_t before = p.weight->tensor->offset % ALIGNMENT;
    atomic_fetch_add(j->done, p.end - (p.at ? p.at : before));
    if (!status) continue;
    pthread_mutex_lock(&j->lock);
    if (!j->status) j->status = status, j->error = error;
    pthread_mutex_unlock(&j->lock);
  }
  return NULL;
}

/* ---------------------------------------------------------------------------------------------- files */

static void close_source(source *s) {
  if (s->plain >= 0) close(s->plain);
  if (s->direct >= 0) close(s->direct);
}

/* Only files that weights lie in are opened; the others stay at -1. */
static m3_status open_source(source *s, m3_error *err) {
  const m3_gguf *g = s->gguf;
  s->plain = open(g->name, O_RDONLY | O_CLOEXEC);
  if (s->plain < 0) return m3_fail(err, M3_ERROR_IO, "%s: cannot be opened: %s", g->name, strerror(errno));
  struct stat st;
  if (fstat(s->plain, &st) != 0) return m3_fail(err, M3_ERROR_IO, "%s: cannot be read: %s", g->name, strerror(errno));
  if (st.st_dev != g->device || st.st_ino != g->inode || (uint64_t)st.st_size != g->size)
    return m3_fail(err, M3_ERROR_IO, "%s: is another file than the one that was opened before", g->name);
  s->direct = open(g->name, O_RDONLY | O_CLOEXEC | O_DIRECT);
  return M3_OK;
}

static m3_status read_weights(job *j, m3_error *err) {
  pthread_t threads[READERS - 1];
  int n = 0;
  pthread_mutex_init(&j->lock, NULL);
  while (n < READERS - 1 && pthread_create(&threads[n], NULL, run_reader, j) == 0) n++;
  run_reader(j); /* also alone, if there are no more threads */
  for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
  pthread_mutex_destroy(&j->lock);
  if (j->status && err) *err = j->error;
  return j->status;
}

m3_status m3_copy_weights(m3_model *m, m3_weight **weights, int64_t n, atomic_ullong *done, const atomic_bool *cancel,
                          m3_error *err) {
  int64_t files = m3_gguf_n_files(m->gguf);
  source *sources = calloc((size_t)files, sizeof *sources);
  if (!sources) return m3_fail_memory(err, (uint64_t)files * sizeof *sources, "the files of a model");
  for (int64_t i = 0; i < files; i++) sources[i] = (source){i ? m->gguf->others[i - 1] : m->gguf, -1, -1};
  m3_status status = M3_OK;
  for (int64_t i = 0; i < n && !status; i++) {
    source *s = &sources[weights[i]->tensor->file];
    if (s->plain < 0) status = open_source(s, err);
    if (!status) status = reserve(weights[i], err);
  }
  job j = {.sources = sources, .weights = weights, .n = n, .done = done, .cancel = cancel};
  if (!status) status = read_weights(&j, err);
  for (int64_t i = 0; i < n; i++)
    if (status)
      m3_weight_copy_free(weights[i]);
    else
      weights[i]->data = start_of(weights[i]) + weights[i]->tensor->offset % ALIGNMENT;
  for (int64_t i = 0; i < files; i++) close_source(&sources[i]);
  free(sources);
  return status;
}
