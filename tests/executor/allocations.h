// SPDX-License-Identifier: Apache-2.0
// Counts allocations while `counting` is true.
#pragma once

#include <atomic>

// Sanitizers replace the allocator, so builds with them do not count.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNT_ALLOCATIONS
namespace reshard::tests {
extern std::atomic<long> allocations;
extern std::atomic<bool> counting;
} // namespace reshard::tests
#endif
