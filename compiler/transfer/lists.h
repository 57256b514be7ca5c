// SPDX-License-Identifier: Apache-2.0
// The long lists of the passes: sorting, where they are often in order already or have small keys, and freeing them
// before their owner ends.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace reshard {

/// A stable sort that only compares neighbors if all are in order already.
template <class Range, class Less> void sortUnlessSorted(Range &range, Less less) {
  if (!std::is_sorted(range.begin(), range.end(), less))
    std::stable_sort(range.begin(), range.end(), less);
}

/// The numbers below `count` in the order of key(number), which is below `keys`. Numbers of equal keys ascend. Time:
/// linear in `count` if there are not many more keys.
template <class Key> std::vector<uint32_t> orderBy(size_t count, size_t keys, Key key) {
  constexpr size_t kKeysPerNumber = 4;
  std::vector<uint32_t> order(count);
  if (keys / kKeysPerNumber > count) {
    std::iota(order.begin(), order.end(), 0u);
    sortUnlessSorted(order, [&](uint32_t a, uint32_t b) { return key(a) < key(b); });
    return order;
  }
  std::vector<uint32_t> next(keys + 1); // by key: the index of its next number in `order`
  for (uint32_t number = 0; number < count; ++number)
    ++next[key(number) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  for (uint32_t number = 0; number < count; ++number)
    order[next[key(number)]++] = number;
  return order;
}

/// Empties a container and frees its memory, which assigning {} to a vector keeps.
template <class Container> void freeMemory(Container &container) { Container().swap(container); }

} // namespace reshard
