// SPDX-License-Identifier: Apache-2.0
// Digests of the elements of a grid in the memory of a device.
#pragma once

#include "executor/digests/element_sums.h"
#include "executor/interfaces/device.h"

#include <optional>

namespace reshard {

/// The elements of a grid as digest 0 of a table. No value if the grid has more than kMaxTableDimensions dimensions or
/// its positions more than kMaxTableParts parts: then it is faster to copy the memory to the host.
std::optional<kernels::DigestTable> digestTableOf(const schema::PartGrid &grid, const InstanceMemory &memory);
constexpr size_t kMaxTableDimensions = kernels::kMaxLoops / 2;
constexpr size_t kMaxTableParts = 4096;

/// Adds the digest of a table's memory, which has so many elements.
Status addOnDevice(Device &device, const kernels::DigestTable &table, int64_t elements, CountedDigest &to);

} // namespace reshard
