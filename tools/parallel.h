// Work in items, dealt out to several threads.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace reshard::tools {

/// Calls work(i) for each i below `count` on `threads` threads; `progress`, where there is one, on this thread.
template <class Work>
void parallelFor(size_t count, unsigned threads, Work work, const std::function<void(double)> &progress = {}) {
  std::atomic<size_t> next{0};
  auto run = [&](bool reports) {
    for (size_t i = next++; i < count; i = next++) {
      if (reports && progress)
        progress(static_cast<double>(i) / static_cast<double>(count));
      work(i);
    }
  };
  std::vector<std::thread> helpers;
  for (size_t t = 1; t < threads && t < count; ++t)
    helpers.emplace_back(run, false);
  run(true);
  for (std::thread &helper : helpers)
    helper.join();
}

} // namespace reshard::tools
