// SPDX-License-Identifier: Apache-2.0
#include "executor/digests/device_sums.h"

namespace reshard {

using schema::IndexBlock;
using schema::PartGrid;

namespace {

/// Adds each combination of one block of each dimension to a table.
class TableBuilder {
public:
  TableBuilder(const PartGrid &grid, const InstanceMemory &memory) : grid_(grid), memory_(memory) {
    shape_.rowBytes = static_cast<uint64_t>(memory.itemBytes);
  }

  /// Adds dimensions `d` and later, whose first element is at these positions, in elements.
  void add(size_t d, int64_t logical, int64_t local) {
    const int64_t item = memory_.itemBytes;
    if (d == grid_.dimensions.size())
      return table.add(0, static_cast<uint64_t>(logical * item),
                       reinterpret_cast<uint64_t>(memory_.data + (local - memory_.first) * item), shape_);
    const PartGrid::Dimension &dimension = grid_.dimensions[d];
    const auto loop = [&](int64_t count, int64_t from, int64_t to) {
      shape_.loops[shape_.loopCount++] = {static_cast<uint64_t>(count), to * dimension.localStride * item,
                                          from * dimension.logicalStride * item};
    };
    for (const IndexBlock &block : dimension.blocks) {
      loop(block.count(), block.from_step(), block.to_step());
      loop(block.length(), 1, 1);
      add(d + 1, logical + block.from() * dimension.logicalStride, local + block.to() * dimension.localStride);
      shape_.loopCount -= 2;
    }
  }

  kernels::DigestTable table;

private:
  const PartGrid &grid_;
  const InstanceMemory &memory_;
  kernels::Strided shape_;
};

} // namespace

std::optional<kernels::DigestTable> digestTableOf(const PartGrid &grid, const InstanceMemory &memory) {
  size_t parts = 1;
  for (const PartGrid::Dimension &dimension : grid.dimensions)
    if (parts *= dimension.blocks.size(); parts > kMaxTableParts)
      return std::nullopt;
  if (grid.dimensions.size() > kMaxTableDimensions)
    return std::nullopt;
  TableBuilder builder(grid, memory);
  builder.add(0, 0, grid.local);
  return std::move(builder.table);
}

Status addOnDevice(Device &device, const kernels::DigestTable &table, int64_t elements, CountedDigest &to) {
  std::vector<uint64_t> sums(2);
  Status status = device.digest(table, sums);
  if (status.ok())
    to.add({{{sums[0], sums[1]}}, static_cast<uint64_t>(elements)});
  return status;
}

} // namespace reshard
