// SPDX-License-Identifier: Apache-2.0
#include "rendezvous/hmac.h"

#include <dlfcn.h>

namespace reshard {

namespace {

/// The functions of libcrypto, declared as in openssl/evp.h and openssl/hmac.h of versions 1.1 and 3.
struct Crypto {
  const void *(*sha256)() = nullptr;
  unsigned char *(*hmac)(const void *algorithm, const void *key, int keyBytes, const unsigned char *data, size_t bytes,
                         unsigned char *mac, unsigned int *macBytes) = nullptr;

  bool loaded() const { return sha256 && hmac; }
};

Crypto load() {
  Crypto crypto;
  for (const char *name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL); // never unloaded
    if (!library)
      continue;
    crypto.sha256 = reinterpret_cast<decltype(crypto.sha256)>(dlsym(library, "EVP_sha256"));
    crypto.hmac = reinterpret_cast<decltype(crypto.hmac)>(dlsym(library, "HMAC"));
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

Result<Authenticator> Authenticator::create(const std::string &secret) {
  constexpr size_t kMaxSecret = 4096;
  if (secret.size() > kMaxSecret)
    return invalid("the secret has " + std::to_string(secret.size()) + " bytes, expected at most " +
                   std::to_string(kMaxSecret));
  Authenticator result;
  result.secret_ = secret;
  if (result.hasSecret() && result.mac("").empty())
    return failed("a secret needs OpenSSL: found neither libcrypto.so.3 nor libcrypto.so.1.1; install the package "
                  "openssl (libssl3), or give no secret");
  return result;
}

std::string Authenticator::mac(std::string_view message) const {
  if (!hasSecret() || !crypto().loaded())
    return {};
  std::string mac(kMacBytes, '\0');
  unsigned int bytes = kMacBytes;
  if (!crypto().hmac(crypto().sha256(), secret_.data(), static_cast<int>(secret_.size()),
                     reinterpret_cast<const unsigned char *>(message.data()), message.size(),
                     reinterpret_cast<unsigned char *>(mac.data()), &bytes))
    return {};
  return mac;
}

bool Authenticator::verify(std::string_view message, std::string_view given) const {
  const std::string expected = mac(message);
  if (expected.size() != kMacBytes || given.size() != kMacBytes)
    return false;
  unsigned difference = 0;
  for (size_t i = 0; i < kMacBytes; ++i)
    difference |= static_cast<unsigned>(static_cast<unsigned char>(expected[i] ^ given[i]));
  return difference == 0;
}

} // namespace reshard
