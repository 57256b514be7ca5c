// SPDX-License-Identifier: Apache-2.0
// A table of memory whose digests (tensor_digest.h) are computed, and the part of it that one thread of a launch adds
// up.
#pragma once

#include "kernels/gpu/copy_kernel.h"
#include "kernels/tensor_digest_words.h"

#include <type_traits>

namespace reshard::kernels {

/// Each entry of `units` is a copy from memory to a position in a tensor: the row-major byte, instead of an address.
struct DigestTableView {
  CopyTableView units;
  const uint32_t *numbers; // by entry: the number of its digest
  const PlaceKeys *keys;   // kPlaceKeys
  uint64_t *sums;          // two for each digest, to which is added
};

/// A sink that adds units to their digests. A thread has one, and calls finish() at its end.
class DigestedUnits {
public:
  RESHARD_HOST_DEVICE explicit DigestedUnits(const DigestTableView &table) : table_(table) {}

  RESHARD_HOST_DEVICE void begin(uint32_t entry) {
    const uint32_t number = table_.numbers[entry];
    if (number == number_)
      return;
    finish();
    number_ = number;
  }
  template <class T> RESHARD_HOST_DEVICE void put(uint64_t position, const T &value) {
    constexpr uint64_t kWord = sizeof(uint32_t);
    constexpr uint32_t kWords = sizeof(T) < kWord ? 1 : sizeof(T) / kWord;
    if (const uint64_t block = position / (kBlockWords * kWord); block != block_) {
      closeBlock();
      block_ = block;
    }
    uint32_t words[kWords] = {};
    memcpy(words, &value, sizeof value);
    if (sizeof(T) < kWord)
      words[0] <<= 8 * (position % kWord);
    RESHARD_UNROLL
    for (uint32_t s = 0; s < 2; ++s) {
      uint32_t keys[kWords];
      loadKeys(s, position / kWord % kBlockWords, keys);
      RESHARD_UNROLL
      for (uint32_t w = 0; w < kWords; ++w)
        ofBlock_[s] += uint64_t{words[w]} * keys[w];
    }
  }
  RESHARD_HOST_DEVICE void finish() {
    closeBlock();
    for (uint32_t s = 0; s < 2; ++s) {
      if (sums_[s] != 0)
        addTo(table_.sums + 2 * uint64_t{number_} + s, sums_[s]);
      sums_[s] = 0;
    }
  }

private:
  /// The keys of adjacent places, of which the first is a multiple of their number.
  template <uint32_t Words>
  RESHARD_HOST_DEVICE void loadKeys(uint32_t sum, uint64_t place, uint32_t (&keys)[Words]) const {
    using Value = std::conditional_t<Words == 4, detail::Unit16, std::conditional_t<Words == 2, uint64_t, uint32_t>>;
    const uint64_t first = reinterpret_cast<uint64_t>(table_.keys) + sum * sizeof(PlaceKeys) / 2;
    const auto value = detail::load<Value, true>(first + place * sizeof(uint32_t));
    memcpy(keys, &value, sizeof value);
  }
  RESHARD_HOST_DEVICE void closeBlock() {
    for (uint32_t s = 0; s < 2; ++s) {
      sums_[s] += ofBlock_[s] * blockKey(block_, s);
      ofBlock_[s] = 0;
    }
  }

  const DigestTableView &table_;
  uint32_t number_ = 0;
  uint64_t block_ = 0, ofBlock_[2] = {}, sums_[2] = {};
};

/// The part of thread `thread` of block `block` of `blocks`; all threads of all blocks add every byte once.
RESHARD_HOST_DEVICE inline void digestThread(const DigestTableView &table, uint32_t block, uint32_t blocks,
                                             uint32_t thread) {
  DigestedUnits sink(table);
  moveThread(table.units, block, blocks, thread, sink);
  sink.finish();
}

} // namespace reshard::kernels
