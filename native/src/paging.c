/* Where a file is larger than memory, a thread that touches a page which is not there waits for the disk, and asks for
 * little at a time: the disk idles between requests, and the threads while it reads. After the router, all that the
 * layer is going to read is known. */
#include "paging.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Bytes of one request. The system cuts off what is beyond a device's readahead, which is 128 KiB where nobody has set
 * it. */
#define REQUEST ((size_t)128 << 10)

typedef struct range {
  uintptr_t at, end; /* pages */
} range;

struct m3_pager {
  pthread_mutex_t lock; /* of all below */
  pthread_cond_t wanted;
  pthread_t thread;
  bool running, stop;
  range *ranges; /* [room], those from `next` on are still to be read */
  int64_t n, next, room;
};

m3_status m3_pager_open(m3_pager **out, m3_error *err) {
  *out = calloc(1, sizeof **out);
  if (!*out) return m3_fail_memory(err, sizeof **out, "a model");
  pthread_mutex_init(&(*out)->lock, NULL);
  pthread_cond_init(&(*out)->wanted, NULL);
  return M3_OK;
}

void m3_pager_close(m3_pager *p) {
  if (!p) return;
  pthread_mutex_lock(&p->lock);
  p->stop = true;
  pthread_cond_signal(&p->wanted);
  pthread_mutex_unlock(&p->lock);
  if (p->running) pthread_join(p->thread, NULL);
  pthread_cond_destroy(&p->wanted);
  pthread_mutex_destroy(&p->lock);
  free(p->ranges);
  free(p);
}

static void *run(void *argument) {
  m3_pager *p = argument;
  pthread_mutex_lock(&p->lock);
  while (!p->stop) {
    if (p->next == p->n) {
      pthread_cond_wait(&p->wanted, &p->lock);
      continue;
    }
    range *r = &p->ranges[p->next];
    uintptr_t at = r->at, size = r->end - at < REQUEST ? r->end - at : REQUEST;
    r->at += size;
    if (r->at == r->end) p->next++;
    pthread_mutex_unlock(&p->lock);
    madvise((void *)at, size, MADV_WILLNEED);
    pthread_mutex_lock(&p->lock);
  }
  pthread_mutex_unlock(&p->lock);
  return NULL;
}

/* Looks at one page in the middle: what is read is read whole, and what is given up goes in long stretches. */
static bool is_resident(range r, uintptr_t page) {
  unsigned char there = 1;
  uintptr_t middle = (r.at + (r.end - r.at) / 2) / page * page;
  return mincore((void *)middle, page, &there) || there & 1;
}

static void add(m3_pager *p, const m3_weight *w, int32_t expert, uintptr_t page) {
  uint64_t bytes = w->tensor->n_bytes / (uint64_t)w->tensor->ne[2];
  uintptr_t at = (uintptr_t)w->data + (uint64_t)expert * bytes;
  range r = {at / page * page, (at + bytes + page - 1) / page * page};
  if (!is_resident(r, page)) p->ranges[p->n++] = r;
}

/* Whether there is room for the ranges of all experts. */
static bool reserve(m3_pager *p, int64_t room) {
  if (p->room >= room) return true;
  range *ranges = realloc(p->ranges, (size_t)room * sizeof *ranges);
  if (!ranges) return false;
  p->ranges = ranges;
  p->room = room;
  return true;
}

void m3_page_in(const m3_model *m, const m3_layer *layer, const int32_t *experts, int64_t n) {
  const m3_weight *w = layer->w;
  if (!m->pager || !w[M3_GATE_EXPS].data || w[M3_GATE_EXPS].copy) return;
  m3_pager *p = m->pager;
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  bool chosen[M3_MAX_EXPERTS] = {false};
  for (int64_t i = 0; i < n; i++) chosen[experts[i]] = true;
  pthread_mutex_lock(&p->lock);
  p->n = p->next = 0;
  if (reserve(p, 3 * (int64_t)m->hparams.n_expert)) {
    for (int32_t e = 0; e < m->hparams.n_expert; e++)
      if (chosen[e]) add(p, &w[M3_GATE_EXPS], e, page), add(p, &w[M3_UP_EXPS], e, page);
    for (int32_t e = 0; e < m->hparams.n_expert; e++)
      if (chosen[e]) add(p, &w[M3_DOWN_EXPS], e, page);
  }
  /* Without the thread the pages come as they are touched. */
  if (p->n && !p->running) p->running = pthread_create(&p->thread, NULL, run, p) == 0;
  if (p->n) pthread_cond_signal(&p->wanted);
  pthread_mutex_unlock(&p->lock);
}
