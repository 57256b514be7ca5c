// SPDX-License-Identifier: Apache-2.0
// The memory that the caller binds to params, and the check that bound ranges do not overlap.
#pragma once

#include "executor/interfaces/channel.h"
#include "executor/memory/local_rank.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace reshard {

/// The params of one mesh rank (or file) of an endpoint that the caller may bind.
struct Bindable {
  std::string role;
  uint32_t meshRank = 0;
  /// Name of an instance -> its index in `pointers`, and its bytes.
  std::unordered_map<std::string, std::pair<uint32_t, uint64_t>> names;
  std::vector<uint32_t> firstInstance; // by param: index in `pointers`
  PointerTable pointers;
};

Bindable bindableOf(const Plan &plan, uint32_t endpoint, uint32_t meshRank);

/// ", did you mean 'x'?" if a known name is a few edits away, else "". Compares at most 100,000 names.
std::string nearest(const std::string &name, const Bindable &bindable);

/// Names the instances of a param that are not bound, for error texts: ": 2 of 3 are not, the first is
/// 'layers.0.up.weight'". `memory` has an entry for each instance.
std::string unboundText(const Plan &plan, const schema::BufferRange &range, const std::byte *const *memory);

/// The bound memory of one instance. `name` is for error texts.
struct BoundRange {
  const std::byte *begin, *end;
  bool target;
  std::string name;
};

/// The rank or file of which memory is bound. `name` is for error texts.
struct BoundPlace {
  bool target;
  std::string name;
};

/// `now`, of another plan, with the memory that `before` has for instances of equal name and bytes. Appends that memory
/// to `ranges`.
Bindable keepBound(const Bindable &before, Bindable now, const BoundPlace &place, std::vector<BoundRange> &ranges);

/// The memory of ranges; touching ranges are joined.
std::vector<MemoryRange> joined(const std::vector<BoundRange> &ranges);

/// Checks that no target range shares memory, or a range of a MAP_SHARED file, with another bound range. The error
/// names both ranges and is of kind badBinding. Sorts `ranges`. Not detected: a private mapping beside a shared one,
/// two addresses of one GPU memory, memory of other processes.
Status checkOverlaps(std::vector<BoundRange> &ranges);

} // namespace reshard
