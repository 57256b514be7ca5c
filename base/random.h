// SPDX-License-Identifier: Apache-2.0
// Random numbers that no other process can guess.
#pragma once

#include <cstdint>
#include <random>
#include <string>

namespace reshard {

/// Never 0.
inline uint64_t randomNumber() {
  std::random_device device; // libstdc++: the CPU's or the kernel's generator, not a pseudo-random sequence
  uint64_t number = 0;
  while (number == 0)
    number = uint64_t{device()} << 32 | device();
  return number;
}

inline std::string randomBytes(size_t count) {
  std::random_device device;
  std::string bytes;
  while (bytes.size() < count) {
    const uint32_t word = device();
    for (size_t byte = 0; byte < sizeof word && bytes.size() < count; ++byte)
      bytes += static_cast<char>(word >> (8 * byte) & 0xff);
  }
  return bytes;
}

} // namespace reshard
