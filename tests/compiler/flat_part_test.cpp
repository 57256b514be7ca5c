// SPDX-License-Identifier: Apache-2.0
// The cuts of a part of a flat buffer, against its elements one by one.

#include "compiler/resolve/flat_part.h"

#include "ir/index_map.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

using namespace reshard;
using ir::IndexMap;

namespace {

using Elements = std::map<int64_t, std::vector<int64_t>>; // by position in the buffer: the logical positions

void addElements(const FlatOffsets &offsets, size_t d, int64_t at, std::vector<int64_t> &logical, Elements &found) {
  if (d == offsets.size()) {
    EXPECT_TRUE(found.emplace(at, logical).second) << "position " << at << " twice";
    return;
  }
  for (const ir::IndexBlock &block : offsets[d])
    for (int64_t k = 0; k < block.count; ++k)
      for (int64_t l = 0; l < block.length; ++l) {
        logical[d] = block.from + k * block.fromStep + l;
        addElements(offsets, d + 1, at + block.to + k * block.toStep + l, logical, found);
      }
}

Elements elementsOf(const std::vector<FlatOffsets> &products) {
  Elements found;
  for (const FlatOffsets &offsets : products) {
    std::vector<int64_t> logical(offsets.size());
    addElements(offsets, 0, 0, logical, found);
  }
  return found;
}

/// A tensor in a buffer from `base` on: dimension d has `lengths[d]` positions, `strides[d]` apart.
FlatOffsets strided(const std::vector<int64_t> &lengths, const std::vector<int64_t> &strides, int64_t base) {
  FlatOffsets offsets;
  for (size_t d = 0; d < lengths.size(); ++d) {
    const int64_t at = d == 0 ? base : 0;
    offsets.push_back(ir::normalize(strides[d] == 1 ? IndexMap{{0, at, lengths[d], 1, 0, 0}}
                                                    : IndexMap{{0, at, 1, lengths[d], 1, strides[d]}}));
  }
  return offsets;
}

TEST(FlatPart, CutsGiveEachElementOnce) {
  std::mt19937 random(5);
  for (int round = 0; round < 2000; ++round) {
    const size_t rank = 1 + random() % 4;
    std::vector<size_t> order(rank);
    for (size_t d = 0; d < rank; ++d)
      order[d] = d;
    std::shuffle(order.begin(), order.end(), random); // a transposed tensor
    std::vector<int64_t> lengths(rank), strides(rank);
    int64_t size = 1;
    for (const size_t d : order) {
      lengths[d] = 1 + static_cast<int64_t>(random() % 5);
      strides[d] = size;
      size *= lengths[d];
      if (random() % 3 == 0)
        size += static_cast<int64_t>(random() % 4); // other tensors between rows
    }
    const int64_t base = static_cast<int64_t>(random() % 7), end = base + size + 3;
    const FlatOffsets part = strided(lengths, strides, base);
    const Elements all = elementsOf({part});
    Elements joined;
    for (int64_t at = 0; at < end;) {
      const int64_t next = std::min(end, at + 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(end)));
      const std::vector<FlatOffsets> products = FlatPart(part).within({at, next});
      EXPECT_LE(products.size(), 2 * rank - 1);
      for (const auto &[position, logical] : elementsOf(products)) {
        EXPECT_GE(position, 0);
        EXPECT_LT(position, next - at);
        joined[at + position] = logical;
      }
      at = next;
    }
    EXPECT_EQ(joined, all);
  }
}

TEST(FlatPart, APartThatIsNowhereHasNoCuts) {
  EXPECT_TRUE(FlatPart({IndexMap{}, IndexMap{{0, 0, 3, 1, 0, 0}}}).within({0, 10}).empty());
  EXPECT_TRUE(FlatPart(strided({2, 3}, {3, 1}, 4)).within({0, 4}).empty());
  EXPECT_TRUE(FlatPart(strided({2, 3}, {3, 1}, 4)).within({10, 12}).empty());
}

} // namespace
