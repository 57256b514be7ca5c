// Counts the calls of the allocator, by who makes them.
#pragma once

#include <cstdint>
#include <string>

namespace reshard::conformance {

/// Sanitizers bring their own allocator, and keep records of what runs: with them neither calls nor the growth of
/// memory or time count.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kAllocationsAreCounted = false;
#else
constexpr bool kAllocationsAreCounted = true;
#endif

struct Allocations {
  uint64_t ours = 0;      // of this program and of libreshard_*.so, straight or through the C and C++ libraries
  uint64_t libraries = 0; // of all others, such as MPI's
  std::string first;      // of ours: file and offset in it, as addr2line wants them
};

/// Counts from here, on all threads of the process.
void beginCounting();
Allocations endCounting();

} // namespace reshard::conformance
