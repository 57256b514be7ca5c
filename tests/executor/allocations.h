// How often memory is asked for while it is counted; executor_test.cpp has the operators that count.
#pragma once

#include <atomic>

// The sanitizers bring their own allocator; there the count is left out.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNT_ALLOCATIONS
namespace reshard::tests {
extern std::atomic<long> allocations;
extern std::atomic<bool> counting;
} // namespace reshard::tests
#endif
