// SPDX-License-Identifier: Apache-2.0
// Each library is opened once, by its soname; its functions are looked up by name. Without the library, the callers get
// an error that names it.
#include "base/libraries.h"

#include <dlfcn.h>
#include <type_traits>

namespace reshard {

namespace {

/// The functions of libcrypto, declared as in openssl/evp.h and openssl/hmac.h of versions 1.1 and 3.
struct Crypto {
  const void *(*sha256)() = nullptr;
  unsigned char *(*hmac)(const void *algorithm, const void *key, int keyBytes, const unsigned char *data, size_t bytes,
                         unsigned char *mac, unsigned int *macBytes) = nullptr;
  void *(*newContext)() = nullptr;
  void (*freeContext)(void *context) = nullptr;
  int (*begin)(void *context, const void *algorithm, void *engine) = nullptr;
  int (*add)(void *context, const void *data, size_t bytes) = nullptr;
  int (*finish)(void *context, unsigned char *hash, unsigned int *bytes) = nullptr;

  bool loaded() const { return sha256 && hmac && newContext && freeContext && begin && add && finish; }
};

Crypto load() {
  Crypto crypto;
  for (const char *name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL); // never unloaded
    if (!library)
      continue;
    const auto find = [&](auto &function, const char *symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    };
    find(crypto.sha256, "EVP_sha256");
    find(crypto.hmac, "HMAC");
    find(crypto.newContext, "EVP_MD_CTX_new");
    find(crypto.freeContext, "EVP_MD_CTX_free");
    find(crypto.begin, "EVP_DigestInit_ex");
    find(crypto.add, "EVP_DigestUpdate");
    find(crypto.finish, "EVP_DigestFinal_ex");
    if (crypto.loaded())
      break;
  }
  return crypto;
}

const Crypto &crypto() {
  static const Crypto loaded = load();
  return loaded;
}

} // namespace

Status needLibcrypto(const std::string &what) {
  if (crypto().loaded())
    return {};
  return failed(what + " needs OpenSSL: found neither libcrypto.so.3 nor libcrypto.so.1.1; install the package openssl "
                       "(libssl3)");
}

std::string hmacSha256(std::string_view key, std::string_view message) {
  std::string mac(kSha256Bytes, '\0');
  unsigned int bytes = kSha256Bytes;
  if (!crypto().loaded() || !crypto().hmac(crypto().sha256(), key.data(), static_cast<int>(key.size()),
                                           reinterpret_cast<const unsigned char *>(message.data()), message.size(),
                                           reinterpret_cast<unsigned char *>(mac.data()), &bytes))
    return {};
  return mac;
}

Sha256::Sha256() {
  if (!crypto().loaded())
    return;
  context_ = crypto().newContext();
  good_ = context_ && crypto().begin(context_, crypto().sha256(), nullptr) == 1;
}

Sha256::~Sha256() {
  if (context_)
    crypto().freeContext(context_);
}

void Sha256::add(const void *data, size_t bytes) { good_ = good_ && crypto().add(context_, data, bytes) == 1; }

Result<std::array<uint8_t, kSha256Bytes>> Sha256::finish() {
  std::array<uint8_t, kSha256Bytes> hash{};
  unsigned int bytes = kSha256Bytes;
  if (!good_ || crypto().finish(context_, hash.data(), &bytes) != 1) {
    const Status missing = needLibcrypto("a SHA-256 hash");
    return missing.ok() ? failed("libcrypto failed to compute a SHA-256 hash") : missing;
  }
  good_ = false;
  return hash;
}

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
