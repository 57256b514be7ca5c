// SPDX-License-Identifier: Apache-2.0
#include "analysis/digest/digest.h"

#include <cstdio>
#include <cstring>

// One clone for each width of vectors, chosen when the program starts.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define RESHARD_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define RESHARD_CLONES
#endif

namespace reshard::analysis {

namespace {

/// Multiplies the halves of a word, so that each bit of the product depends on many bits: one instruction for a vector
/// of words, where a product of 64-bit words takes several.
inline uint64_t mix(uint64_t word, uint32_t low, uint32_t high) {
  return static_cast<uint64_t>(static_cast<uint32_t>(word) ^ low) * (static_cast<uint32_t>(word >> 32) ^ high) ^
         (word >> 15 | word << 49);
}

/// Inlined into each clone, so that the loop is compiled for its vectors.
template <typename Item>
[[gnu::always_inline]] inline void addItems(const std::byte *data, uint64_t first, uint64_t step, uint64_t count,
                                            uint64_t &sum0, uint64_t &sum1) {
  constexpr uint64_t kIndex = 0x9e3779b97f4a7c15; // odd: different indices give different words
  uint64_t index = first * kIndex;
  const uint64_t next = step * kIndex;
  uint64_t own0 = 0, own1 = 0; // not in memory, which `data` might overlap
  for (uint64_t k = 0; k < count; ++k) {
    Item bits;
    std::memcpy(&bits, data + k * sizeof bits, sizeof bits);
    const uint64_t word = index ^ bits;
    index += next;
    const uint64_t once = mix(word, 0x85ebca6b, 0xc2b2ae35);
    own0 += once;
    own1 += mix(once, 0x7feb352d, 0x846ca68b);
  }
  sum0 += own0;
  sum1 += own1;
}

RESHARD_CLONES void addItems1(const std::byte *data, uint64_t first, uint64_t step, uint64_t count, uint64_t *sums) {
  addItems<uint8_t>(data, first, step, count, sums[0], sums[1]);
}
RESHARD_CLONES void addItems2(const std::byte *data, uint64_t first, uint64_t step, uint64_t count, uint64_t *sums) {
  addItems<uint16_t>(data, first, step, count, sums[0], sums[1]);
}
RESHARD_CLONES void addItems4(const std::byte *data, uint64_t first, uint64_t step, uint64_t count, uint64_t *sums) {
  addItems<uint32_t>(data, first, step, count, sums[0], sums[1]);
}
RESHARD_CLONES void addItems8(const std::byte *data, uint64_t first, uint64_t step, uint64_t count, uint64_t *sums) {
  addItems<uint64_t>(data, first, step, count, sums[0], sums[1]);
}

} // namespace

void TensorDigest::add(const std::byte *data, size_t item, uint64_t first, uint64_t step, uint64_t count) {
  const auto function = item == 1 ? addItems1 : item == 2 ? addItems2 : item == 4 ? addItems4 : addItems8;
  function(data, first, step, count, sums.data());
}

std::string TensorDigest::text() const {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(sums[0]),
                static_cast<unsigned long long>(sums[1]));
  return text;
}

} // namespace reshard::analysis
