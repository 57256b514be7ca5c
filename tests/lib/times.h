// SPDX-License-Identifier: Apache-2.0
// Times of benchmarks.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

namespace reshard::tests {

/// Seconds since a fixed time.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<long>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

} // namespace reshard::tests
