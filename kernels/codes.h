// Conversion of one value between fp32 and a stored format in a few instructions, for a GPU; what kernels/formats.h
// defines.
#pragma once

#include "kernels/formats.h"
#include "kernels/host_device.h"

namespace reshard::kernels {

/// Bits of fp32.
constexpr uint32_t kMagnitudeBits = 0x7FFFFFFF, kInfinityBits = 0x7F800000, kNanBits = 0x7FC00000;

/// The fp32 bits of a code's value; a NaN has the code's sign.
template <Format From> RESHARD_HOST_DEVICE inline uint32_t decodeBits(uint32_t code) {
  if constexpr (From == Format::fp32) {
    return code;
  } else if constexpr (From == Format::bf16) {
    return code << 16;
  } else {
    constexpr Encoding e = encoding(From);
    constexpr uint32_t kSign = e.sign(), kScale = static_cast<uint32_t>(2 * 127 - e.bias) << 23;
    const uint32_t magnitude = code & (kSign - 1), sign = (code & kSign) << (32 - e.bits);
    // Where fp32 has its exponent and mantissa; its larger bias is made up for.
    uint32_t value = bitCast<uint32_t>(bitCast<float>(magnitude << (23 - e.mantissaBits)) * bitCast<float>(kScale));
    if (magnitude > e.maxFinite)
      value = magnitude == e.infinity && e.infinity != e.nan ? kInfinityBits : kNanBits;
    return value | sign;
  }
}

/// The code of the value nearest to that of fp32 bits, of two the even one.
template <Format To> RESHARD_HOST_DEVICE inline uint32_t encodeBits(uint32_t bits, Overflow overflow) {
  constexpr Encoding e = encoding(To);
  constexpr uint32_t kSign = e.sign();
  const uint32_t magnitude = bits & kMagnitudeBits, sign = (bits >> 31) << (e.bits - 1);
  const bool nan = magnitude > kInfinityBits;
  if constexpr (To == Format::fp32) {
    return nan ? kNanBits | sign : bits;
  } else if constexpr (To == Format::bf16) {
    return (nan ? e.nan : (magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16) | sign;
  } else {
    // The largest value, or the one after it, where the code of infinity or NaN is.
    constexpr float kLargest = To == Format::fp16       ? 65536
                               : To == Format::fp8_e4m3 ? 448
                               : To == Format::fp8_e5m2 ? 57344
                                                        : 6;
    constexpr float kBeyond = To == Format::fp8_e4m3 ? 480 : To == Format::fp4_e2m1 ? 6 : 65536;
    const uint32_t limit = bitCast<uint32_t>(overflow == Overflow::saturate ? kLargest : kBeyond);
    const uint32_t clamped = magnitude < limit ? magnitude : limit;
    // Adding 2^23 units of the code's last place rounds to whole ones, which are then the sum's lowest bits; values
    // below the format's normal ones have the unit of these. What is above the code's bits is noise.
    constexpr uint32_t kLowest = static_cast<uint32_t>(127 - e.bias + 1),
                       kDropped = static_cast<uint32_t>(23 - e.mantissaBits);
    const uint32_t own = clamped & kInfinityBits, exponent = own > kLowest << 23 ? own : kLowest << 23;
    const float sum = bitCast<float>(clamped) + bitCast<float>(exponent + (kDropped << 23));
    const uint32_t code = bitCast<uint32_t>(sum) + (exponent >> kDropped) - (kLowest << e.mantissaBits);
    return (nan && To != Format::fp4_e2m1 ? e.nan : code & (kSign - 1)) | sign;
  }
}

/// A result of arithmetic with the sign of what it came from, which a NaN's arithmetic loses.
RESHARD_HOST_DEVICE inline uint32_t withSign(float result, uint32_t of) {
  return (bitCast<uint32_t>(result) & kMagnitudeBits) | (of & ~kMagnitudeBits);
}

} // namespace reshard::kernels
