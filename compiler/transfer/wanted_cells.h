// SPDX-License-Identifier: Apache-2.0
// The elements that targets want from the source, divided into disjoint cells, so that elements which several params or
// several targets want are counted once.
#pragma once

#include "ir/ir.h"

#include "llvm/ADT/ArrayRef.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace reshard {

/// Elements that the same ranks hold and the same overlaps want.
struct WantedCell {
  int pattern = 0;
  int64_t elements = 0;
  llvm::ArrayRef<int32_t> holders;           // world ranks that may be read, ascending
  llvm::ArrayRef<const ir::Overlap *> wants; // a rank in several of them wants the elements at several positions
};

/// Visits disjoint cells of all overlaps between ranks. The overlaps of one target param are cells, unless its shards
/// overlap each other; overlaps of several params of one tensor pattern are compared in pairs, if they have the same
/// holders. After 2^21 pairs the others are left out: what the cells want is then less than what the overlaps want.
void forEachWantedCell(const ir::Layout &layout, const ir::Transfers &transfers,
                       const std::function<void(const WantedCell &)> &visit);

} // namespace reshard
