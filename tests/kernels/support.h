// SPDX-License-Identifier: Apache-2.0
// Test helpers for conversions: stored elements, CPU levels and guarded targets.
#pragma once

#include "kernels/cpu/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

namespace reshard::test {

using namespace kernels;

using Bytes = std::vector<std::byte>;

constexpr NumberFormat kWide[] = {NumberFormat::fp32, NumberFormat::bf16, NumberFormat::fp16};

inline uint32_t codeAt(const std::byte *elements, NumberFormat format, uint64_t i) {
  uint32_t code = 0;
  std::memcpy(&code, elements + i * itemBytes(format), itemBytes(format));
  return code;
}

inline void putCode(std::byte *elements, NumberFormat format, uint64_t i, uint32_t code) {
  std::memcpy(elements + i * itemBytes(format), &code, itemBytes(format));
}

/// Returns the value of an E8M0 scale: 2^(code - 127), or NaN for code 255.
inline float decodeE8m0(uint8_t code) { return code == 255 ? std::nanf("") : std::ldexp(1.0f, code - 127); }

/// Calls test(conversion) for each level, with and without streaming.
template <class Test> void atEveryLevel(Test test) {
  for (int level = 0; level <= static_cast<int>(cpuLevel()); ++level)
    for (const bool stream : {false, true}) {
      SCOPED_TRACE("level " + std::to_string(level) + (stream ? ", streaming" : ""));
      test(ConvertOptions{stream, static_cast<CpuLevel>(level)});
    }
}

/// Memory between guards that begins `offset` bytes after a cache line boundary.
class Guarded {
public:
  Guarded(uint64_t bytes, uint64_t offset) : bytes_(bytes), memory_(bytes + 4 * kLine, kGuard) {
    first_ = kLine + offset + (kLine - reinterpret_cast<uintptr_t>(memory_.data()) % kLine);
  }
  std::byte *data() { return memory_.data() + first_; }
  /// Returns the bytes between the guards, and checks the guards.
  Bytes contents() {
    for (uint64_t i = 0; i < memory_.size(); ++i)
      if ((i < first_ || i >= first_ + bytes_) && memory_[i] != kGuard) {
        ADD_FAILURE() << "a guard byte was overwritten at offset "
                      << static_cast<int64_t>(i) - static_cast<int64_t>(first_) << " of " << bytes_;
        break;
      }
    return Bytes(data(), data() + bytes_);
  }

private:
  static constexpr std::byte kGuard{0x5A};
  uint64_t bytes_, first_;
  Bytes memory_;
};

} // namespace reshard::test
