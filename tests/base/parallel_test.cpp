// SPDX-License-Identifier: Apache-2.0
// Parallel loops end on all threads if one thread fails, and report the first failure.

#include "base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <new>
#include <stdexcept>

using namespace reshard;

TEST(Parallel, EveryItemOnce) {
  for (const unsigned threads : {1u, 4u, 64u}) {
    std::vector<std::atomic<int>> seen(100);
    parallelFor(seen.size(), threads, [&](size_t i) { ++seen[i]; });
    for (const auto &times : seen)
      EXPECT_EQ(times, 1);
  }
  parallelFor(0, 4, [](size_t) { FAIL(); });
}

// The first two items run on two threads at the same time. Each fails once: on the helper thread, or on this thread.
TEST(Parallel, ExceptionsAreRethrown) {
  const std::thread::id own = std::this_thread::get_id();
  for (const bool helper : {true, false}) {
    std::atomic<int> begun{0}, working{0};
    auto work = [&](size_t) {
      ++working;
      for (++begun; begun < 2;)
        std::this_thread::yield();
      const bool fails = (std::this_thread::get_id() != own) == helper;
      if (!fails)
        std::this_thread::sleep_for(std::chrono::milliseconds(
            50)); // it still runs when the other item throws: parallelFor must join its thread
      --working;
      if (fails)
        throw std::bad_alloc();
    };
    EXPECT_THROW(parallelFor(1000, 2, work), std::bad_alloc) << helper;
    EXPECT_EQ(working, 0);
    EXPECT_LT(begun, 10) << "items were begun after the exception";
  }
  EXPECT_THROW(
      parallelFor(10, 1, [](size_t) {}, [](double) { throw std::runtime_error("progress"); }), std::runtime_error);
}
