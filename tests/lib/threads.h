// SPDX-License-Identifier: Apache-2.0
// Work on several threads at a time, such as that of the ranks of a job.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace reshard::tests {

/// Calls run(number) for each number below `count`, each on a thread of its own, and waits for all.
template <class Run> void onThreads(size_t count, const Run &run) {
  std::vector<std::thread> threads;
  for (uint32_t number = 0; number < count; ++number)
    threads.emplace_back(std::cref(run), number);
  for (std::thread &thread : threads)
    thread.join();
}

} // namespace reshard::tests
