// SPDX-License-Identifier: Apache-2.0
// Recomputes the digests of a plan whose bytes a test has altered.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace reshard::test {

inline void digest(std::string &file, size_t at, uint64_t from, uint64_t bytes) {
  if (from > file.size() || bytes > file.size() - from)
    return;
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(file.data() + from, bytes));
  std::memcpy(file.data() + at, canonical.digest, 16);
}

/// Recomputes the digests at the offsets that schema/README.md gives, as far as the header's numbers are within the
/// file. Of a compressed segment that of its frame; that of the segment stays.
inline void updateDigests(std::string &file) {
  auto number = [&](size_t at) {
    uint64_t value = 0;
    std::memcpy(&value, file.data() + at, 8);
    return value;
  };
  const uint64_t segments = number(32) & UINT32_MAX, index = number(40);
  for (uint64_t rank = 0; rank < segments && index < file.size() && file.size() - index >= (rank + 1) * 32; ++rank) {
    const size_t entry = index + rank * 32;
    const uint64_t offset = number(entry), bytes = number(entry + 8) & UINT32_MAX, compressed = number(entry + 8) >> 32;
    if (compressed == 0)
      digest(file, entry + 16, offset, bytes);
    else if (offset <= file.size() && file.size() - offset >= 16 && bytes > 16)
      digest(file, offset, offset + 16, bytes - 16);
  }
  digest(file, 64, number(48), number(56));
  digest(file, 80, index, segments * 32);
  digest(file, 112, 0, 112);
}

} // namespace reshard::test
