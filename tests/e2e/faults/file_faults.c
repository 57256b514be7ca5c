// SPDX-License-Identifier: Apache-2.0
/* Preloaded into a command: one call of a file operation fails. RESHARD_FILE_FAULT="KIND COUNT LOG": the COUNT-th call
   (from 0) that KIND applies to. KIND: EINTR, ENOSPC or EIO, an error of the call; short: a read or write of one byte;
   KILL: the process is killed before the call.
   A call whose file is in /proc, /sys, /dev or /etc is not counted. The log gets a line for the failed call: its
   function and its file. At a normal exit it gets the number of calls, as "calls N". Calls inside the C library, for
   example those of printf, are not seen. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* The kinds of faults that a call can have. */
enum { kInterrupted = 1, kFull = 2, kBroken = 4, kShort = 8, kKilled = 16 };

static int kind, number;
static long wanted = -1;
static atomic_long calls;
static char log_path[PATH_MAX];

static void write_log(const char *function, const char *file) {
  char line[2 * PATH_MAX];
  const int length = snprintf(line, sizeof line, "%s %s\n", function, file);
  int (*real_open)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
  ssize_t (*real_write)(int, const void *, size_t) = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
  int (*real_close)(int) = (int (*)(int))dlsym(RTLD_NEXT, "close");
  const int log = real_open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (log < 0 || real_write(log, line, (size_t)length) != length)
    abort();
  real_close(log);
}

__attribute__((constructor)) static void begin(void) {
  const char *fault = getenv("RESHARD_FILE_FAULT");
  char name[16];
  if (!fault || sscanf(fault, "%15s %ld %4095s", name, &wanted, log_path) != 3)
    return;
  const struct {
    const char *name;
    int kind, number;
  } kinds[] = {{"EINTR", kInterrupted, EINTR},
               {"ENOSPC", kFull, ENOSPC},
               {"EIO", kBroken, EIO},
               {"short", kShort, 0},
               {"KILL", kKilled, 0}};
  for (int i = 0; i < 5; ++i)
    if (strcmp(name, kinds[i].name) == 0) {
      kind = kinds[i].kind;
      number = kinds[i].number;
    }
}

__attribute__((destructor)) static void end(void) {
  char text[32];
  snprintf(text, sizeof text, "%ld", (long)calls);
  if (kind)
    write_log("calls", text);
}

/* Whether this call fails. `kinds`: the faults that it can have. */
static int fails(const char *function, int kinds, const char *file) {
  const char *others[] = {"/proc/", "/sys/", "/dev/", "/etc/"};
  if (kinds != kShort) /* shortened() asks again about the same call, which counts once */
    kinds |= kKilled;
  if (!(kinds & kind) || !file || strcmp(file, log_path) == 0)
    return 0;
  for (int i = 0; i < 4; ++i)
    if (strncmp(file, others[i], strlen(others[i])) == 0)
      return 0;
  if (atomic_fetch_add(&calls, 1) != wanted)
    return 0;
  write_log(function, file);
  if (kind == kKilled)
    kill(getpid(), SIGKILL);
  errno = number;
  return 1;
}

/* The same for an open file; pipes and sockets are not counted. */
static int fails_at(const char *function, int kinds, int fd) {
  char link[64], path[PATH_MAX];
  if (!kind || fd < 0)
    return 0;
  const int before = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  errno = before;
  if (length <= 0 || path[0] != '/')
    return 0;
  path[length] = 0;
  return fails(function, kinds, path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int open_kinds(int flags) {
  return kBroken | (flags & O_DIRECTORY ? 0 : kInterrupted) | (flags & O_CREAT ? kFull : 0);
}

static int mode_of(int flags, va_list list) { return flags & (O_CREAT | __O_TMPFILE) ? va_arg(list, int) : 0; }

#define OPEN(name)                                                                                                     \
  int name(const char *path, int flags, ...) {                                                                         \
    va_list list;                                                                                                      \
    va_start(list, flags);                                                                                             \
    const int mode = mode_of(flags, list);                                                                             \
    va_end(list);                                                                                                      \
    return fails(#name, open_kinds(flags), path) ? -1 : NEXT(name)(path, flags, mode);                                 \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                   \
  int name(int folder, const char *path, int flags, ...) {                                                             \
    va_list list;                                                                                                      \
    va_start(list, flags);                                                                                             \
    const int mode = mode_of(flags, list);                                                                             \
    va_end(list);                                                                                                      \
    return fails(#name, open_kinds(flags), path) ? -1 : NEXT(name)(folder, path, flags, mode);                         \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                                                                    \
  FILE *name(const char *path, const char *mode) { return fails(#name, kBroken, path) ? NULL : NEXT(name)(path, mode); }
FOPEN(fopen)
FOPEN(fopen64)

static size_t shortened(const char *function, int fd, size_t bytes) {
  return bytes > 1 && fails_at(function, kShort, fd) ? 1 : bytes;
}

ssize_t read(int fd, void *data, size_t bytes) {
  if (fails_at("read", kInterrupted | kBroken, fd))
    return -1;
  return NEXT(read)(fd, data, shortened("read", fd, bytes));
}

ssize_t write(int fd, const void *data, size_t bytes) {
  if (fails_at("write", kInterrupted | kFull | kBroken, fd))
    return -1;
  return NEXT(write)(fd, data, shortened("write", fd, bytes));
}

#define PREAD(name, type)                                                                                              \
  ssize_t name(int fd, void *data, size_t bytes, type at) {                                                            \
    if (fails_at(#name, kInterrupted | kBroken, fd))                                                                   \
      return -1;                                                                                                       \
    return NEXT(name)(fd, data, shortened(#name, fd, bytes), at);                                                      \
  }
PREAD(pread, off_t)
PREAD(pread64, off64_t)

#define PWRITE(name, type)                                                                                             \
  ssize_t name(int fd, const void *data, size_t bytes, type at) {                                                      \
    if (fails_at(#name, kInterrupted | kFull | kBroken, fd))                                                           \
      return -1;                                                                                                       \
    return NEXT(name)(fd, data, shortened(#name, fd, bytes), at);                                                      \
  }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t copy_file_range(int from, off64_t *read, int to, off64_t *written, size_t bytes, unsigned flags) {
  if (fails_at("copy_file_range", kInterrupted | kFull | kBroken, to))
    return -1;
  return NEXT(copy_file_range)(from, read, to, written, shortened("copy_file_range", to, bytes), flags);
}

#define ALLOCATE(name, type)                                                                                           \
  int name(int fd, type at, type bytes) {                                                                              \
    return fails_at(#name, kInterrupted | kFull | kBroken, fd) ? errno : NEXT(name)(fd, at, bytes);                    \
  }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

#define TRUNCATE(name, type)                                                                                           \
  int name(int fd, type bytes) {                                                                                       \
    return fails_at(#name, kInterrupted | kFull | kBroken, fd) ? -1 : NEXT(name)(fd, bytes);                           \
  }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

#define MAP(name, type)                                                                                                \
  void *name(void *at, size_t bytes, int protection, int flags, int fd, type offset) {                                 \
    return fails_at(#name, kBroken, fd) ? MAP_FAILED : NEXT(name)(at, bytes, protection, flags, fd, offset);           \
  }
MAP(mmap, off_t)
MAP(mmap64, off64_t)

#define SYNC(name)                                                                                                     \
  int name(int fd) { return fails_at(#name, kInterrupted | kFull | kBroken, fd) ? -1 : NEXT(name)(fd); }
SYNC(fsync)
SYNC(fdatasync)

int close(int fd) {
  if (!fails_at("close", kInterrupted | kFull | kBroken, fd))
    return NEXT(close)(fd);
  NEXT(close)(fd); /* Linux closes the file in any case */
  errno = number;
  return -1;
}

int fstat(int fd, struct stat *status) { return fails_at("fstat", kBroken, fd) ? -1 : NEXT(fstat)(fd, status); }
int stat(const char *path, struct stat *status) { return fails("stat", kBroken, path) ? -1 : NEXT(stat)(path, status); }
int lstat(const char *path, struct stat *status) {
  return fails("lstat", kBroken, path) ? -1 : NEXT(lstat)(path, status);
}
int mkdir(const char *path, mode_t mode) {
  return fails("mkdir", kFull | kBroken, path) ? -1 : NEXT(mkdir)(path, mode);
}
int rename(const char *from, const char *to) {
  return fails("rename", kFull | kBroken, from) ? -1 : NEXT(rename)(from, to);
}
int renameat2(int one, const char *from, int other, const char *to, unsigned flags) {
  return fails("renameat2", kFull | kBroken, from) ? -1 : NEXT(renameat2)(one, from, other, to, flags);
}
