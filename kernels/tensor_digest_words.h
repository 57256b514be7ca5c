// SPDX-License-Identifier: Apache-2.0
// The keys of digests of tensors, and their inner loop for each CPU level; tensor_digest.cpp selects the level.
#pragma once

#include "kernels/host_device.h"

#include <array>
#include <cstddef>
#include <cstdint>

namespace reshard::kernels {

/// Words of 32 bits with one block key. Short enough that all place keys stay in the first cache.
constexpr uint64_t kBlockWords = 1024;

/// The finalizer of splitmix64: each bit of the result depends on all bits of the number.
RESHARD_HOST_DEVICE constexpr uint64_t mixed(uint64_t number) {
  number += 0x9e3779b97f4a7c15;
  number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9;
  number = (number ^ number >> 27) * 0x94d049bb133111eb;
  return number ^ number >> 31;
}

/// The keys of both sums for each place in a block, and zeros, so that a vector can be read at the last place.
struct PlaceKeys {
  static constexpr uint64_t kVectorWords = 8;
  alignas(64) std::array<std::array<uint32_t, kBlockWords + kVectorWords>, 2> of;
};
inline constexpr PlaceKeys kPlaceKeys = [] {
  PlaceKeys keys{};
  for (uint64_t place = 0; place < kBlockWords; ++place) {
    keys.of[0][place] = static_cast<uint32_t>(mixed(place));
    keys.of[1][place] = static_cast<uint32_t>(mixed(place) >> 32);
  }
  return keys;
}();

/// Odd, so that no bits of a block's sum are lost.
RESHARD_HOST_DEVICE constexpr uint64_t blockKey(uint64_t block, size_t sum) { return mixed(~(2 * block + sum)) | 1; }

/// The sums of word * place key.
struct WordSums {
  uint64_t of[2];

  void add(const WordSums &other) {
    for (size_t s = 0; s < 2; ++s)
      of[s] += other.of[s];
  }
  void add(uint64_t place, uint32_t word) {
    for (size_t s = 0; s < 2; ++s)
      of[s] += uint64_t{word} * kPlaceKeys.of[s][place];
  }
};
/// Adds `count` words, which are at `place` and later of one block; their memory needs no alignment.
using SumWords = WordSums (*)(const std::byte *data, uint64_t place, uint64_t count);

WordSums sumWordsPortable(const std::byte *data, uint64_t place, uint64_t count);
#if defined(__x86_64__)
WordSums sumWordsAvx2(const std::byte *data, uint64_t place, uint64_t count);
#endif

} // namespace reshard::kernels
