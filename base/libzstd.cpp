// SPDX-License-Identifier: Apache-2.0
#include "base/libzstd.h"

#include <dlfcn.h>
#include <type_traits>

namespace reshard {

namespace {

/// The functions of libzstd, declared as in zstd.h of versions 1.x.
struct Zstd {
  size_t (*bound)(size_t bytes) = nullptr;
  size_t (*compress)(void *to, size_t capacity, const void *from, size_t bytes, int level) = nullptr;
  size_t (*decompress)(void *to, size_t capacity, const void *from, size_t bytes) = nullptr;
  unsigned (*isError)(size_t code) = nullptr;
  const char *(*errorName)(size_t code) = nullptr;

  bool loaded() const { return bound && compress && decompress && isError && errorName; }
};

const Zstd &zstd() {
  static const Zstd loaded = [] {
    Zstd zstd;
    void *library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL); // never unloaded
    if (!library)
      return zstd;
    const auto find = [&](auto &function, const char *symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    };
    find(zstd.bound, "ZSTD_compressBound");
    find(zstd.compress, "ZSTD_compress");
    find(zstd.decompress, "ZSTD_decompress");
    find(zstd.isError, "ZSTD_isError");
    find(zstd.errorName, "ZSTD_getErrorName");
    return zstd;
  }();
  return loaded;
}

} // namespace

Status needLibzstd() {
  return zstd().loaded() ? Status()
                         : failed("found no libzstd.so.1; install the package libzstd1 (Debian, Ubuntu) or libzstd");
}

Result<std::vector<std::byte>> compressed(std::span<const std::byte> bytes) {
  constexpr int kLevel = 1; // higher levels take longer and make segments no smaller
  if (Status status = needLibzstd(); !status.ok())
    return status;
  std::vector<std::byte> frame(zstd().bound(bytes.size()));
  const size_t size = zstd().compress(frame.data(), frame.size(), bytes.data(), bytes.size(), kLevel);
  if (zstd().isError(size))
    return failed(std::string("libzstd failed: ") + zstd().errorName(size));
  frame.resize(size);
  return frame;
}

Status decompress(std::span<const std::byte> frame, std::span<std::byte> to) {
  if (Status status = needLibzstd(); !status.ok())
    return status;
  const size_t size = zstd().decompress(to.data(), to.size(), frame.data(), frame.size());
  if (zstd().isError(size))
    return failed(std::string("libzstd failed: ") + zstd().errorName(size));
  return size == to.size() ? Status()
                           : failed("found " + std::to_string(size) + " bytes, expected " + std::to_string(to.size()));
}

} // namespace reshard
