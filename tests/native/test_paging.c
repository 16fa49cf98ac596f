/* That the experts of a layer come into memory without being touched, and that nothing goes wrong where they are there
 * or the model is closed meanwhile. */
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "gguf.h"
#include "gguf_header.h"
#include "model.h"
#include "paging.h"
#include "tiny_file.h"

static char path[256];

/* Whether all pages of an expert are in memory. */
static bool is_resident(const m3_weight *w, int32_t expert) {
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  uint64_t size = w->tensor->n_bytes / (uint64_t)w->tensor->ne[2];
  uintptr_t at = (uintptr_t)w->data + (uint64_t)expert * size;
  for (uintptr_t p = at / page * page; p < at + size; p += page) {
    unsigned char there = 0;
    CHECK(mincore((void *)p, page, &there) == 0, "mincore failed at %p", (void *)p);
    if (!(there & 1)) return false;
  }
  return true;
}

/* Takes the file out of the file cache; false where that cannot be done, as in a file system that lies in memory. */
static bool forget(const m3_model *m, const m3_weight *w) {
  int fd = open(path, O_RDONLY);
  madvise((void *)(uintptr_t)m->gguf->bytes, m->gguf->size, MADV_DONTNEED);
  CHECK(fd >= 0 && fsync(fd) == 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0, "%s: cannot be forgotten",
        path);
  close(fd);
  return !is_resident(w, 0);
}

/* Waits for up to ten seconds in all. */
static bool comes(const m3_weight *w, int32_t expert) {
  static int waited;
  for (; waited < 2000; waited++) {
    if (is_resident(w, expert)) return true;
    nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
  }
  return false;
}

int main(void) {
  tiny_file t;
  make_tiny_file(&t);
  new_path(path, sizeof path, "m3-paging");
  write_file(path, t.file.data, t.file.size);
  m3_model_options options = {.struct_size = sizeof options, .device = M3_DEVICE_CPU};
  m3_model *m = NULL;
  m3_error err;
  CHECK(m3_model_open(path, &options, &m, &err) == M3_OK, "%s", err.message);
  const m3_layer *layer = &m->layers[m->hparams.n_layer - 1];
  const int32_t last = m->hparams.n_expert - 1, chosen[] = {last, 0, last};
  static const m3_role roles[] = {M3_GATE_EXPS, M3_UP_EXPS, M3_DOWN_EXPS};
  for (int round = 0; round < 3; round++) {
    if (!forget(m, &layer->w[M3_GATE_EXPS])) {
      printf("not run here: the file stays in memory\n");
      break;
    }
    m3_page_in(m, layer, chosen, 3);
    for (int r = 0; r < 3; r++) {
      CHECK(comes(&layer->w[roles[r]], 0), "round %d: expert 0 of role %d does not come", round, (int)roles[r]);
      CHECK(comes(&layer->w[roles[r]], last), "round %d: expert %d of role %d does not come", round, (int)last,
            (int)roles[r]);
    }
  }
  m3_page_in(m, layer, chosen, 3); /* all is there */
  forget(m, &layer->w[M3_GATE_EXPS]);
  m3_page_in(m, layer, chosen, 3);
  m3_model_close(m);

  options.load = M3_LOAD_READ;
  CHECK(m3_model_open(path, &options, &m, &err) == M3_OK && m3_model_load(m, 0, 0, &err) == M3_OK, "%s", err.message);
  CHECK(!m->pager, "a pager for weights in memory");
  m3_page_in(m, &m->layers[m->hparams.n_layer - 1], chosen, 3);
  m3_model_close(m);
  unlink(path);
  free(t.file.data);
  return finish("test_paging");
}
