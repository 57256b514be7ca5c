// SPDX-License-Identifier: Apache-2.0
// Libraries that are loaded when they are first needed: SHA-256 and HMAC-SHA256 of OpenSSL's libcrypto, and libzstd.
#pragma once

#include "base/status.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

constexpr size_t kSha256Bytes = 32;

/// An error if libcrypto cannot be loaded. `what`: what needs it.
Status needLibcrypto(const std::string &what);

/// HMAC-SHA256 (RFC 2104), kSha256Bytes long; empty if libcrypto cannot be loaded or fails.
std::string hmacSha256(std::string_view key, std::string_view message);

/// The SHA-256 hash of bytes that are added in pieces.
class Sha256 {
public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256 &) = delete;
  Sha256 &operator=(const Sha256 &) = delete;
  void add(const void *data, size_t bytes);
  /// Call it once. An error if libcrypto cannot be loaded or has failed.
  Result<std::array<uint8_t, kSha256Bytes>> finish();

private:
  void *context_ = nullptr;
  bool good_ = false;
};

/// An error if libzstd cannot be loaded.
Status needLibzstd();

/// One frame of zstd. An error if libzstd cannot be loaded or fails.
Result<std::vector<std::byte>> compressed(std::span<const std::byte> bytes);

/// Fills `to` with the bytes of a frame. An error if the frame is damaged or has another number of bytes, or if libzstd
/// cannot be loaded.
Status decompress(std::span<const std::byte> frame, std::span<std::byte> to);

} // namespace reshard
