// How much arena a message takes; schedule and assign-buffers must agree.
#pragma once

#include <cstdint>

namespace reshard {

/// Every chunk starts on such a boundary of the arena (bytes): enough for any vector or network transfer.
constexpr int64_t kStagingAlignment = 256;

constexpr int64_t staged(int64_t bytes) { return (bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment; }

} // namespace reshard
