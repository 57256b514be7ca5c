// SPDX-License-Identifier: Apache-2.0
// Message authentication codes with the secret of a job: HMAC-SHA256 (base/libraries.h).
#pragma once

#include "base/libraries.h"
#include "base/status.h"

#include <cstddef>
#include <string>
#include <string_view>

namespace reshard {

constexpr size_t kMacBytes = kSha256Bytes;

class Authenticator {
public:
  /// Without a secret.
  Authenticator() = default;
  /// An empty text: without a secret. Fails if libcrypto cannot be loaded.
  static Result<Authenticator> create(const std::string &secret);

  bool hasSecret() const { return !secret_.empty(); }
  bool sameSecret(const Authenticator &other) const { return secret_ == other.secret_; }
  /// The code of a message, kMacBytes long; empty without a secret.
  std::string mac(std::string_view message) const;
  /// Whether `mac` is the code of `message`. Takes the same time wherever they differ. False without a secret.
  bool verify(std::string_view message, std::string_view mac) const;

private:
  std::string secret_;
};

} // namespace reshard
