// SPDX-License-Identifier: Apache-2.0
// Tracks which step used which bytes of a rank's arena last: a step that reuses bytes must wait for it. Compiler and
// loader share this rule.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace reshard::schema {

class ArenaUse {
public:
  /// Assigns [begin, end) to `step`; returns the steps that used bytes of it until now.
  std::vector<uint32_t> take(int64_t begin, int64_t end, uint32_t step) {
    std::vector<uint32_t> before;
    auto at = uses_.lower_bound(begin);
    if (at != uses_.begin() && std::prev(at)->second.end > begin)
      --at;
    while (at != uses_.end() && at->first < end) {
      const auto [from, use] = *at;
      before.push_back(use.step);
      at = uses_.erase(at);
      if (from < begin)
        uses_[from] = {begin, use.step};
      if (use.end > end)
        at = uses_.emplace(end, use).first;
    }
    if (end > begin)
      uses_[begin] = {end, step};
    return before;
  }

private:
  struct Use {
    int64_t end;
    uint32_t step;
  };
  std::map<int64_t, Use> uses_; // by begin, disjoint
};

} // namespace reshard::schema
