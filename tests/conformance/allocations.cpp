// SPDX-License-Identifier: Apache-2.0
#include "tests/conformance/allocations.h"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <execinfo.h>

namespace reshard::conformance {
namespace {

std::atomic<bool> counting{false};
std::atomic<uint64_t> ours{0}, libraries{0};
void *first = nullptr; // the caller of the first of ours

[[maybe_unused]] bool startsWith(const char *text, const char *with) {
  return std::strncmp(text, with, std::strlen(with)) == 0;
}

const char *fileOf(void *address, Dl_info &info) {
  if (!dladdr(address, &info) || !info.dli_fname)
    return "";
  const char *slash = std::strrchr(info.dli_fname, '/');
  return slash ? slash + 1 : info.dli_fname;
}

/// Counts one call, which returns to `caller`. If that is in the C or C++ library, its own caller counts.
[[maybe_unused]] void count(void *caller) {
  static thread_local bool inside = false;
  if (!counting || inside)
    return;
  inside = true;
  constexpr int kFrames = 32;
  void *frames[kFrames];
  const int depth = backtrace(frames, kFrames);
  int f = 0;
  while (f < depth && frames[f] != caller)
    ++f;
  const char *file = "";
  Dl_info info{};
  for (; f < depth; ++f) {
    file = fileOf(frames[f], info);
    if (!startsWith(file, "libc.so") && !startsWith(file, "libstdc++.so"))
      break;
  }
  Dl_info program{};
  const char *own = fileOf(reinterpret_cast<void *>(&beginCounting), program);
  if (f >= depth || !*file || std::strcmp(file, own) == 0 ||
      startsWith(file, "libreshard_")) { // an unknown caller counts as ours
    if (ours++ == 0)
      first = f < depth ? frames[f] : caller;
  } else {
    ++libraries;
  }
  inside = false;
}

} // namespace

void beginCounting() {
  void *frame[1];
  backtrace(frame, 1); // loads the unwinder, which allocates
  ours = libraries = 0;
  first = nullptr;
  counting = true;
}

Allocations endCounting() {
  counting = false;
  Allocations result{ours, libraries, {}};
  if (Dl_info info{}; first && dladdr(first, &info)) {
    char text[512];
    const auto offset = static_cast<size_t>(static_cast<char *>(first) - static_cast<char *>(info.dli_fbase));
    std::snprintf(text, sizeof text, "%s+0x%zx", info.dli_fname, offset);
    result.first = text;
  }
  return result;
}

} // namespace reshard::conformance

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Replace glibc's functions for the whole process, and call glibc's internal ones. operator new calls malloc.
extern "C" {
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

void *malloc(size_t bytes) noexcept {
  reshard::conformance::count(__builtin_return_address(0));
  return __libc_malloc(bytes);
}
void *calloc(size_t count, size_t bytes) noexcept {
  reshard::conformance::count(__builtin_return_address(0));
  return __libc_calloc(count, bytes);
}
void *realloc(void *memory, size_t bytes) noexcept {
  reshard::conformance::count(__builtin_return_address(0));
  return __libc_realloc(memory, bytes);
}
void *aligned_alloc(size_t alignment, size_t bytes) noexcept {
  reshard::conformance::count(__builtin_return_address(0));
  return __libc_memalign(alignment, bytes);
}
void *memalign(size_t alignment, size_t bytes) noexcept {
  reshard::conformance::count(__builtin_return_address(0));
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void **memory, size_t alignment, size_t bytes) noexcept {
  reshard::conformance::count(__builtin_return_address(0));
  void *made = __libc_memalign(alignment, bytes);
  if (!made)
    return ENOMEM;
  *memory = made;
  return 0;
}
}
#endif
