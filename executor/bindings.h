// What memory the caller gives, param by param, and what can be wrong with it.
#pragma once

#include "executor/transport.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace reshard {

/// What a place of an endpoint can be bound to.
struct Bindable {
  std::string role;
  uint32_t meshRank = 0;                                                // of the endpoint
  std::unordered_map<std::string, std::pair<uint32_t, uint64_t>> names; // param -> instance over all params, bytes
  std::vector<uint32_t> firstInstance;                                  // by param
  PointerTable pointers;
};

Bindable bindableOf(const Plan &plan, uint32_t endpoint, uint32_t meshRank);

/// A known name at most a few edits away, for the message: ", did you mean 'x'?", or nothing.
std::string nearest(const std::string &name, const Bindable &bindable);

/// A bound range, for the check of overlaps.
struct BoundRange {
  const std::byte *begin, *end;
  bool target;
  std::string name;
};

/// No target may share memory with anything else that is bound, nor a part of a file that is mapped (MAP_SHARED) at
/// several addresses: an error text that names the two, empty on success. Sorts them. Not seen: a private mapping
/// beside a shared one, two names of one memory of a GPU, other processes' memory.
std::string checkOverlaps(std::vector<BoundRange> &ranges);

} // namespace reshard
