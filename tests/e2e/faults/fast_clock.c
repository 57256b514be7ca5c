// SPDX-License-Identifier: Apache-2.0
/* Preloaded into a command: for it, CLOCK_MONOTONIC runs 50 times as fast. Short work then takes long by the command's
   own measure, on any machine. A wait until a time of this clock ends later than the command means, the later the older
   the process is; sleeps keep their length. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { kFactor = 50 };
static const int64_t kSecond = 1000000000;
static int64_t start; // of the process, by the real clock

static int64_t real_time(void) {
  struct timespec time = {0, 0};
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

static void begin(void) { start = real_time(); }

int clock_gettime(clockid_t clock, struct timespec *time) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (clock != CLOCK_MONOTONIC)
    return (int)syscall(SYS_clock_gettime, clock, time);
  pthread_once(&once, begin);
  const int64_t now = start + (real_time() - start) * kFactor;
  time->tv_sec = now / kSecond;
  time->tv_nsec = now % kSecond;
  return 0;
}
