// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/allocations.h"

#include <cstdlib>
#include <new>

#ifdef COUNT_ALLOCATIONS
std::atomic<long> reshard::tests::allocations{0};
std::atomic<bool> reshard::tests::counting{false};
using reshard::tests::allocations, reshard::tests::counting;

// g++ inlines one operator of the pair, and then warns that malloc's memory is freed by operator delete.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void *operator new(size_t bytes) {
  if (counting)
    ++allocations;
  if (void *memory = std::malloc(bytes ? bytes : 1))
    return memory;
  throw std::bad_alloc();
}
void *operator new(size_t bytes, const std::nothrow_t &) noexcept {
  if (counting)
    ++allocations;
  return std::malloc(bytes ? bytes : 1);
}
void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, size_t) noexcept { std::free(memory); }
void operator delete(void *memory, const std::nothrow_t &) noexcept { std::free(memory); }
#endif
