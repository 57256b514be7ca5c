// SPDX-License-Identifier: Apache-2.0
// Cases with UCX: waits for requests, addresses and bytes of messages.
#pragma once

#include "base/backoff.h"
#include "base/hash.h"
#include "executor/interfaces/channel.h"
#include "tests/lib/threads.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

namespace reshard::tests {

/// Selects UCX's transports by their names; empty: UCX chooses. Skips the case if the build has no UCX.
inline void useUcx(const char *transports) {
  if (!std::filesystem::exists(std::filesystem::read_symlink("/proc/self/exe").parent_path() / "libreshard_ucx.so"))
    GTEST_SKIP() << "libreshard_ucx.so was not built: UCX is missing, or this is a build with ThreadSanitizer";
  if (*transports)
    ::setenv("UCX_TLS", transports, 1);
}

/// The parameter is the argument of useUcx.
class UcxCase : public testing::TestWithParam<const char *> {
protected:
  void SetUp() override { useUcx(GetParam()); }
  void TearDown() override { ::unsetenv("UCX_TLS"); }
};

/// Waits for a request; fails after `seconds`.
inline Status waitFor(Channel &channel, size_t request, double seconds) {
  Backoff backoff;
  for (const Deadline deadline = deadlineIn(seconds);; backoff.wait()) {
    const Result<bool> done = channel.test(request);
    if (!done.ok())
      return done.status();
    if (*done)
      return {};
    if (passed(deadline))
      return timedOut("request " + std::to_string(request) + " of rank " + std::to_string(channel.rank()));
  }
}

/// The address of a UCX worker, in which a test has changed something, with the right check of its bytes.
inline std::string sealed(std::string address) {
  constexpr size_t kCheck = 24; // after the protocol and the token
  address.replace(kCheck, sizeof(uint64_t), sizeof(uint64_t), '\0');
  const uint64_t check = hashOf(address);
  std::memcpy(address.data() + kCheck, &check, sizeof check);
  return address;
}

/// Pseudo-random bytes, the same for the same seed.
inline std::vector<std::byte> bytesOf(uint64_t seed, size_t count) {
  std::vector<std::byte> bytes(count);
  uint32_t value = static_cast<uint32_t>(seed) * 2654435761u + 1;
  for (std::byte &each : bytes)
    each = static_cast<std::byte>((value = value * 1664525 + 1013904223) >> 24);
  return bytes;
}

} // namespace reshard::tests
