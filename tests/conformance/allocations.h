// SPDX-License-Identifier: Apache-2.0
// Counts the calls of the allocator, by caller.
#pragma once

#include <cstdint>
#include <string>

namespace reshard::conformance {

/// Sanitizers replace the allocator and use memory and time of their own, so with them allocations and growth are not
/// checked.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kAllocationsAreCounted = false;
#else
constexpr bool kAllocationsAreCounted = true;
#endif

struct Allocations {
  uint64_t ours = 0;      // by this program and libreshard_*.so, directly or through the C and C++ libraries
  uint64_t libraries = 0; // by other libraries, such as MPI
  std::string first;      // the first of ours: file and offset, for addr2line
};

/// Starts to count, on all threads of the process.
void beginCounting();
Allocations endCounting();

} // namespace reshard::conformance
