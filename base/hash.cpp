// SPDX-License-Identifier: Apache-2.0
#include "base/hash.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace reshard {

namespace {

constexpr std::string_view kDigits = "0123456789abcdef";

Digest canonical(XXH128_hash_t hash) {
  XXH128_canonical_t bytes;
  XXH128_canonicalFromHash(&bytes, hash);
  Digest digest;
  std::copy(std::begin(bytes.digest), std::end(bytes.digest), digest.begin());
  return digest;
}

} // namespace

uint64_t hashOf(std::string_view text) { return XXH3_64bits(text.data(), text.size()); }

Digest digestOf(const void *data, size_t bytes) { return canonical(XXH3_128bits(data, bytes)); }

struct Digester::State {
  XXH3_state_t xxh;
};

Digester::Digester() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->xxh); }
Digester::~Digester() = default;
void Digester::add(const void *data, size_t bytes) { XXH3_128bits_update(&state_->xxh, data, bytes); }
Digest Digester::digest() const { return canonical(XXH3_128bits_digest(&state_->xxh)); }

std::string hexadecimal(std::span<const uint8_t> bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string hexadecimal(uint64_t number, size_t digits) {
  std::string text;
  for (; number > 0 || text.size() < digits; number >>= 4)
    text += kDigits[number & 15];
  std::reverse(text.begin(), text.end());
  return text;
}

uint64_t hostId() {
  // The host name, since containers and tests share a kernel; the boot id; the pid namespace.
  std::string text(256, '\0');
  gethostname(text.data(), text.size() - 1);
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  char space[64] = "";
  [[maybe_unused]] const auto length = readlink("/proc/self/ns/pid", space, sizeof space - 1);
  text += boot + space;
  return hashOf(text);
}

} // namespace reshard
