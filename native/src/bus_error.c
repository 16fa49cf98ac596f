/* What becomes of a process that touches a page of a mapped file which is not there any more: the kernel sends SIGBUS
 * to the thread that did it, in the middle of an instruction, and no error can be returned from there. A handler can
 * only say which file it was and end the process, with calls that are safe in a signal handler alone. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include "error.h"

#define NAME_SIZE 64
#define PATH_SIZE 4096
#define LINE_SIZE (PATH_SIZE + 512)

/* A signal handler belongs to the process, and so does what it says. Written before the handler is installed. */
static struct {
  char name[NAME_SIZE];
  int changed_code, failed_code;
} program;

/* The place in a file that an address is mapped to. */
typedef struct {
  char path[PATH_SIZE];
  uint64_t at;
} m3_mapped_place;

/* ---------------------------------------------------------------------------------------------- the mapping */

/* Reads a number of lower-case hexadecimal digits and the separator behind it. */
static bool take_hex(const char **text, char separator, uint64_t *out) {
  const char *p = *text;
  uint64_t value = 0;
  for (; (*p >= '0' && *p <= '9') || (*p >= 'a' && *p <= 'f'); p++)
    value = value << 4 | (uint64_t)(*p <= '9' ? *p - '0' : *p - 'a' + 10);
  if (p == *text || *p != separator) return false;
  *text = p + 1;
  *out = value;
  return true;
}

/* A line of /proc/self/maps: "begin-end perms offset device inode   path". True if it maps a file at the address. */
static bool maps_address(const char *line, uint64_t address, m3_mapped_place *out) {
  uint64_t begin, end, offset;
  if (!take_hex(&line, '-', &begin) || !take_hex(&line, ' ', &end) || address < begin || address >= end) return false;
  line = strchr(line, ' ');
  if (!line++ || !take_hex(&line, ' ', &offset)) return false;
  const char *path = strchr(line, '/');
  if (!path || strlen(path) >= PATH_SIZE) return false;
  strcpy(out->path, path);
  out->at = offset + (address - begin);
  return true;
}

static bool find_place(uint64_t address, m3_mapped_place *out) {
  int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  char line[LINE_SIZE], piece[1024];
  size_t length = 0;
  bool found = false;
  for (ssize_t n; !found && (n = read(fd, piece, sizeof piece)) > 0;)
    for (ssize_t i = 0; i < n && !found; i++) {
      if (piece[i] != '\n') {
        if (length < sizeof line - 1) line[length++] = piece[i];
        continue;
      }
      line[length] = 0;
      length = 0;
      found = maps_address(line, address, out);
    }
  close(fd);
  return found;
}

/* ---------------------------------------------------------------------------------------------- the line */

typedef struct {
  char text[LINE_SIZE];
  size_t length;
} m3_line;

static void put(m3_line *line, const char *text) {
  for (; *text && line->length < sizeof line->text - 1; text++)
    line->text[line->length++] = (unsigned char)*text < 0x20 || *text == 0x7f ? '?' : *text;
}

static void put_number(m3_line *line, uint64_t value) {
  char digits[21], *p = digits + sizeof digits - 1;
  *p = 0;
  do *--p = (char)('0' + value % 10);
  while (value /= 10);
  put(line, p);
}

static void write_all(const char *text, size_t n) {
  for (ssize_t written; n > 0 && (written = write(STDERR_FILENO, text, n)) > 0; n -= (size_t)written) text += written;
}

/* Says what happened at the place, and returns the exit code. */
static int say(const m3_mapped_place *place) {
  struct stat st;
  bool there = stat(place->path, &st) == 0; /* "PATH (deleted)" is not */
  bool changed = !there || (uint64_t)st.st_size <= place->at;
  m3_line line = {.length = 0};
  put(&line, program.name);
  put(&line, ": ");
  put(&line, place->path);
  put(&line, changed ? ": changed while it was in use: byte " : ": byte ");
  put_number(&line, place->at);
  if (!changed) {
    put(&line, " cannot be read: the disk or the file system failed");
  } else if (there) {
    put(&line, " was expected, the file has ");
    put_number(&line, (uint64_t)st.st_size);
  } else {
    put(&line, " was expected, the file is gone");
  }
  line.text[line.length++] = '\n';
  /* A line of progress may stand there, with the cursor hidden. */
  struct termios terminal;
  static const char clear[] = "\r\033[K\033[?25h";
  if (tcgetattr(STDERR_FILENO, &terminal) == 0) write_all(clear, sizeof clear - 1);
  write_all(line.text, line.length);
  return changed ? program.changed_code : program.failed_code;
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
  (void)context;
  static atomic_flag taken = ATOMIC_FLAG_INIT;
  m3_mapped_place place;
  /* A code of 0 or less: another process sent the signal. */
  if (info->si_code > 0 && find_place((uint64_t)(uintptr_t)info->si_addr, &place)) {
    while (atomic_flag_test_and_set(&taken)) pause(); /* another thread is saying it and ends the process */
    _exit(say(&place));
  }
  /* Nothing to say: it ends as if this handler was not there. The instruction runs again, or the signal is sent. */
  struct sigaction standard = {.sa_handler = SIG_DFL};
  sigaction(number, &standard, NULL);
  if (info->si_code <= 0) kill(getpid(), number);
}

m3_status m3_end_on_bus_error(const char *name, int32_t changed_code, int32_t failed_code, m3_error *err) {
  if (!name || strlen(name) >= NAME_SIZE)
    return m3_fail(err, M3_ERROR_ARGUMENT, "m3_end_on_bus_error: name is %s, expected fewer than %d bytes",
                   name ? name : "NULL", NAME_SIZE);
  struct sigaction old;
  if (sigaction(SIGBUS, NULL, &old) == 0 && ((old.sa_flags & SA_SIGINFO) || old.sa_handler != SIG_DFL)) return M3_OK;
  strcpy(program.name, name);
  program.changed_code = changed_code;
  program.failed_code = failed_code;
  struct sigaction action = {.sa_flags = SA_SIGINFO};
  action.sa_sigaction = on_bus_error;
  sigfillset(&action.sa_mask);
  if (sigaction(SIGBUS, &action, NULL) != 0)
    return m3_fail(err, M3_ERROR_UNSUPPORTED, "SIGBUS cannot be handled: %s", strerror(errno));
  return M3_OK;
}
