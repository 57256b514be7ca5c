// SPDX-License-Identifier: Apache-2.0
// Adds up the digests of the elements of a grid: on the host range by range, or tile by tile where a transpose is
// faster; on a device as a table.
#include "executor/digests/element_sums.h"

#include <algorithm>
#include <cstring>

namespace reshard {

using schema::ElementRange;
using schema::IndexBlock;
using schema::PartGrid;

namespace {

/// Adds elements that follow each other in the tensor.
void addRange(const ElementRange &range, const InstanceMemory &memory, CountedDigest &to) {
  const int64_t item = memory.itemBytes, step = range.localStep * item;
  const std::byte *from = memory.data + (range.local - memory.first) * item;
  to.elements += static_cast<uint64_t>(range.count);
  if (!memory.cast)
    return to.digest.add(from, static_cast<size_t>(item), step, static_cast<uint64_t>(range.logical),
                         static_cast<uint64_t>(range.count));
  constexpr int64_t kAtOnce = 1024;
  const auto stored = static_cast<int64_t>(kernels::itemBytes(memory.cast.stored));
  std::byte sent[kAtOnce * sizeof(float)], cast[kAtOnce * sizeof(float)];
  for (int64_t done = 0; done < range.count; done += kAtOnce) {
    const int64_t some = std::min(kAtOnce, range.count - done);
    for (int64_t k = 0; k < some; ++k)
      std::memcpy(sent + k * item, from + (done + k) * step, static_cast<size_t>(item));
    kernels::convertRow(cast, sent, static_cast<uint64_t>(some * item), {.read = {}, .write = memory.cast});
    to.digest.add(cast, static_cast<size_t>(stored), stored, static_cast<uint64_t>(range.logical + done),
                  static_cast<uint64_t>(some));
  }
}

/// Calls visit(range) for the longest ranges whose places are not in `except`.
template <class Visit> void forEachOther(const ElementRange &range, const PlaceSet *except, const Visit &visit) {
  if (!except)
    return visit(range);
  for (int64_t k = 0; k < range.count;) {
    ElementRange part = range.at(k);
    part.count = 0;
    for (; k < range.count && !except->contains(range.local + k * range.localStep); ++k)
      ++part.count;
    if (part.count > 0)
      visit(part);
    else
      ++k;
  }
}

/// Whether all indices of a grid are in one piece.
bool inOnePiece(const PartGrid &grid, const Pieces &pieces) {
  int64_t first = 0, last = 0;
  for (const PartGrid::Dimension &dimension : grid.dimensions) {
    int64_t least = INT64_MAX, greatest = INT64_MIN;
    for (const schema::IndexBlock &block : dimension.blocks) {
      least = std::min(least, block.from());
      greatest = std::max(greatest, block.from() + (block.count() - 1) * block.from_step() + block.length() - 1);
    }
    first += least * dimension.logicalStride;
    last += greatest * dimension.logicalStride;
  }
  return pieces.count() == 1 && first >= pieces.begin && last < pieces.end;
}

/// Adds the elements of a grid of which one dimension, not the last, is contiguous in memory. Returns false if it has
/// no such dimension.
bool addTransposed(const PartGrid &grid, const InstanceMemory &memory, CountedDigest &to) {
  if (grid.dimensions.empty())
    return false;
  const size_t last = grid.dimensions.size() - 1;
  size_t d = 0;
  while (d < last && grid.dimensions[d].localStride != 1)
    ++d;
  if (d >= last || grid.dimensions[last].localStride == 1)
    return false;
  const PartGrid::Dimension rows = grid.dimensions[d];
  PartGrid others = grid;
  others.dimensions.erase(others.dimensions.begin() + static_cast<ptrdiff_t>(d));
  const int64_t item = memory.itemBytes;
  for (const schema::IndexBlock &block : rows.blocks)
    for (int64_t i = 0; i < block.count(); ++i)
      forEachRangeOf(others, [&](const ElementRange &range) {
        const int64_t place = range.local + block.to() + i * block.to_step();
        const int64_t index = range.logical + (block.from() + i * block.from_step()) * rows.logicalStride;
        to.digest.add(memory.data + (place - memory.first) * item, static_cast<size_t>(item),
                      {.rows = static_cast<uint64_t>(block.length()),
                       .columns = static_cast<uint64_t>(range.count),
                       .step = range.localStep * item,
                       .first = static_cast<uint64_t>(index),
                       .rowIndices = static_cast<uint64_t>(rows.logicalStride)});
        to.elements += static_cast<uint64_t>(range.count * block.length());
      });
  return true;
}

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

void PlaceSet::add(const PartGrid &grid) {
  forEachRangeOf(grid, [&](const ElementRange &range) {
    for (int64_t k = 0; k < range.count; ++k) {
      const int64_t place = range.local + k * range.localStep;
      words_[static_cast<size_t>(place / 64)] |= uint64_t{1} << place % 64;
    }
  });
}

void addElements(const PartGrid &grid, const InstanceMemory &memory, const PlaceSet *except, const Pieces &pieces,
                 std::vector<CountedDigest> &digests) {
  PartGrid collapsed = grid;
  collapsed.collapse();
  // Only the search for the first wrong index has several pieces.
  if (!except && !memory.cast && inOnePiece(collapsed, pieces) && addTransposed(collapsed, memory, digests[0]))
    return;
  forEachRangeOf(collapsed, [&](const ElementRange &range) {
    forEachOther(range, except, [&](const ElementRange &part) {
      for (int64_t at = std::max(part.logical, pieces.begin); at < std::min(part.logical + part.count, pieces.end);) {
        const int64_t piece = (at - pieces.begin) / pieces.length;
        const int64_t end =
            std::min({part.logical + part.count, pieces.begin + (piece + 1) * pieces.length, pieces.end});
        ElementRange inside = part.at(at - part.logical);
        inside.count = end - at;
        addRange(inside, memory, digests[static_cast<size_t>(piece)]);
        at = end;
      }
    });
  });
}

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
