// SPDX-License-Identifier: Apache-2.0
// arc4random for binaries of RESHARD_PORTABLE. LLVM and the static C++ runtime of Debian 12 call it, but glibc has it
// since 2.36 only. With this definition the binaries need glibc 2.34: Ubuntu 22.04 and RHEL 9 can run them.
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>

uint32_t arc4random(void) {
  uint32_t value;
  if (getrandom(&value, sizeof value, 0) != sizeof value) // reads of up to 256 bytes are never interrupted
    abort();
  return value;
}
