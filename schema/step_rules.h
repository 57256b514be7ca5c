// SPDX-License-Identifier: Apache-2.0
// The rules about the steps of a rank that compiler and loader share: the use of the arena, and dependency levels.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>

namespace reshard::schema {

/// Tracks which step used which bytes of a rank's arena last: a step that reuses bytes must wait for it.
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

/// The number of levels of a plan: Step::level has 16 bits. Elements that are staged in phases of 32 MiB need two
/// levels for each phase; the limit is 1 TiB of them on one rank.
inline constexpr uint32_t kMaxLevels = 1 << 16;

/// Whether a step must have a greater dependency level than a step of its `after`. A transport that copies between the
/// ranks of one process runs level after level, without slots of the arena. So the level need not grow where `after`
/// only hands over a slot: between two sends, between two receives, and from a send to a local step. A receive that
/// waits for a send overwrites bytes that the send relays. `Kind`: StepKind of the plan or of the IR.
template <class Kind> constexpr bool raisesLevel(Kind before, Kind step) {
  return before == Kind::send ? step == Kind::recv : before != Kind::recv || step != Kind::recv;
}

} // namespace reshard::schema
