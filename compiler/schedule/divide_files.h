// SPDX-License-Identifier: Apache-2.0
// Divides the copies from files to files among the ranks.
#pragma once

#include "compiler/schedule/descriptor_cutter.h"

#include "llvm/ADT/STLFunctionalExtras.h"

#include <vector>

namespace reshard {

/// A descriptor that one rank executes alone.
struct LocalDescriptor {
  ir::Descriptor descriptor;
  int32_t rank;
};

/// Cuts descriptors so that each of `world` ranks gets consecutive ones with about the same bytes, and appends them to
/// `local`. Cuts are between rows, or, in rows that are longer than 1 MiB, at multiples of `granule(descriptor)` bytes.
void divideFiles(const std::vector<ir::Descriptor> &descriptors, int64_t world, Interner<ir::Shape> &shapes,
                 llvm::function_ref<int64_t(const ir::Descriptor &)> granule, std::vector<LocalDescriptor> &local);

} // namespace reshard
