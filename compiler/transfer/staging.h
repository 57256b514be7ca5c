// The alignment of messages in the arena, which the passes schedule and assign-staging must agree on, and their common
// error.
#pragma once

#include <cstdint>
#include <string>

namespace reshard {

/// Every chunk starts at a multiple of this in the arena (bytes): enough for vector instructions and network transfers.
constexpr int64_t kStagingAlignment = 256;

constexpr int64_t alignUp(int64_t bytes) {
  return (bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
}

/// The beginning of an error that asks for a higher limit. Its cause is in the job, not in the pass: compile.cpp points
/// it at options.staging.
constexpr const char *kStagingLimit = "a staging limit of ";
inline std::string stagingTooSmall(int64_t limit) {
  return kStagingLimit + std::to_string(limit) + " bytes is too small";
}

} // namespace reshard
