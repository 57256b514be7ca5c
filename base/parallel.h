// SPDX-License-Identifier: Apache-2.0
// A parallel loop over work items.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace reshard {

/// Calls work(i) for each i below `count` on `threads` threads, or fewer if the system cannot start more. Calls
/// `progress`, if given, on this thread. After the first exception no thread starts another item; the exception is
/// rethrown on this thread once all threads have ended.
template <class Work>
void parallelFor(size_t count, unsigned threads, Work work, const std::function<void(double)> &progress = {}) {
  std::atomic<size_t> next{0};
  std::exception_ptr first;
  std::mutex mutex;
  auto run = [&](bool reports) {
    try {
      for (size_t i = next++; i < count; i = next++) {
        if (reports && progress)
          progress(static_cast<double>(i) / static_cast<double>(count));
        work(i);
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      next = count;
      if (!first)
        first = std::current_exception();
    }
  };
  std::vector<std::thread> helpers;
  helpers.reserve(threads);
  for (size_t t = 1; t < threads && t < count; ++t)
    try {
      helpers.emplace_back(run, false);
    } catch (const std::system_error &) {
      break; // the threads that started do the work
    }
  run(true);
  for (std::thread &helper : helpers)
    helper.join();
  if (first)
    std::rethrow_exception(first);
}

} // namespace reshard
