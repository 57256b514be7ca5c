// SPDX-License-Identifier: Apache-2.0
// Hashes with the same value in every build, unlike std::hash: for values that files hold or processes compare. Also
// the number of this host.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace reshard {

/// XXH3-64.
uint64_t hashOf(std::string_view text);

/// XXH3-128, in its canonical byte order.
using Digest = std::array<uint8_t, 16>;
Digest digestOf(const void *data, size_t bytes);

/// The digest of bytes that are added in pieces.
class Digester {
public:
  Digester();
  ~Digester();
  void add(const void *data, size_t bytes);
  Digest digest() const;

private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Two lower-case digits for each byte.
std::string hexadecimal(std::span<const uint8_t> bytes);
/// The lower-case digits of a number, with leading zeros up to `digits` digits.
std::string hexadecimal(uint64_t number, size_t digits);

/// Equal for processes that share memory and process ids (same host, boot and pid namespace).
uint64_t hostId();

} // namespace reshard
