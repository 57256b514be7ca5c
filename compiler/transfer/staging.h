// How much arena a message takes; schedule and assign-staging must agree.
#pragma once

#include <cstdint>
#include <string>

namespace reshard {

/// Every chunk starts on such a boundary of the arena (bytes): enough for any vector or network transfer.
constexpr int64_t kStagingAlignment = 256;

constexpr int64_t alignUp(int64_t bytes) {
  return (bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
}

/// How an error begins that asks for a higher limit. It is the job's, not the pass's: compile.cpp points at
/// options.staging.
constexpr const char *kStagingLimit = "a staging limit of ";
inline std::string stagingTooSmall(int64_t limit) {
  return kStagingLimit + std::to_string(limit) + " bytes is too small";
}

} // namespace reshard
