// SPDX-License-Identifier: Apache-2.0
#include "kernels/codes.h"
#include "kernels/cpu/convert_rows.h"

namespace reshard::kernels {

namespace {

/// One value at a time, without vector instructions.
struct Single {
  static constexpr uint64_t kLanes = 1;
  using Floats = float;
  using Bits = uint32_t;
  static Bits bits(Floats value) { return as<Bits>(value); }
  static Floats floats(Bits bits) { return as<Floats>(bits); }
  static Floats broadcast(float value) { return value; }
  static Bits maxOfEach(const Bits (&each)[kLanes]) { return each[0]; }

  template <NumberFormat From> static Floats load(const std::byte *at) {
    uint32_t code = 0;
    std::memcpy(&code, at, kItemBytes<From>); // stored elements are little-endian
    return floats(decodeBits<From>(code));
  }

  template <NumberFormat To> static void store(std::byte *at, Floats scaled, Bits value, Overflow overflow, bool) {
    const uint32_t code = encodeBits<To>(withSign(scaled, value), overflow);
    std::memcpy(at, &code, kItemBytes<To>);
  }

  static uint64_t pack(const std::byte *codes) {
    uint64_t packed = 0;
    for (uint64_t i = 0; i < kPacked; ++i)
      packed |= static_cast<uint64_t>(codes[i]) << 4 * i;
    return packed;
  }

  static void unpack(std::byte *codes, uint64_t packed) {
    for (uint64_t i = 0; i < kPacked; ++i)
      codes[i] = static_cast<std::byte>(packed >> 4 * i & 0xF);
  }

  static void store8(std::byte *at, uint64_t bytes, bool) { std::memcpy(at, &bytes, sizeof(bytes)); }
};

} // namespace

constinit const ConvertKernels kConvertPortable = Rows<Single>::table();

} // namespace reshard::kernels
