// SPDX-License-Identifier: Apache-2.0
// Tracks which step used which bytes of a rank's arena last: a step that reuses bytes must wait for it. Compiler and
// loader share this rule.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>

namespace reshard::schema {

class ArenaUse {
public:
  /// Assigns [begin, end) to `step`, and calls `each(earlier)` for the steps that used bytes of it until now.
  template <class Each> void take(int64_t begin, int64_t end, uint32_t step, Each each) {
    auto at = uses_.lower_bound(begin);
    if (at != uses_.begin() && std::prev(at)->second.end > begin)
      --at;
    auto own = uses_.end(); // the use that begins at `begin`: its node is kept, since most steps reuse a slot as it is
    while (at != uses_.end() && at->first < end) {
      const Use use = at->second;
      each(use.step);
      if (use.end > end)
        uses_.emplace(end, use);
      if (at->first > begin) {
        at = uses_.erase(at);
      } else {
        if (at->first < begin)
          at->second.end = begin;
        else
          own = at;
        ++at;
      }
    }
    if (own != uses_.end())
      own->second = {end, step};
    else if (end > begin)
      uses_.emplace(begin, Use{end, step});
  }

private:
  struct Use {
    int64_t end;
    uint32_t step;
  };
  std::map<int64_t, Use> uses_; // by begin, disjoint
};

} // namespace reshard::schema
