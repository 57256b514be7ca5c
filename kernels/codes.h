// SPDX-License-Identifier: Apache-2.0
// Conversion of one value between fp32 and a stored format in few instructions, and the scale of one block, for GPU
// code and for scalar code of the CPU. The results equal those of decode and encode in kernels/number_formats.h.
#pragma once

#include "kernels/host_device.h"
#include "kernels/number_formats.h"

namespace reshard::kernels {

/// Masks and constants of the fp32 encoding.
constexpr uint32_t kMagnitudeBits = 0x7FFFFFFF, kInfinityBits = 0x7F800000, kNanBits = 0x7FC00000;

/// Returns the fp32 bits of the value of `code`. A NaN keeps the code's sign.
template <NumberFormat From> RESHARD_HOST_DEVICE inline uint32_t decodeBits(uint32_t code) {
  if constexpr (From == NumberFormat::fp32) {
    return code;
  } else if constexpr (From == NumberFormat::bf16) {
    return code << 16;
  } else if constexpr (From == NumberFormat::int4) {
    return bitCast<uint32_t>(static_cast<float>(static_cast<int32_t>(code) - 8));
  } else {
    constexpr Encoding e = encoding(From);
    constexpr uint32_t kSign = e.sign(), kScale = static_cast<uint32_t>(2 * 127 - e.bias) << 23;
    const uint32_t magnitude = code & (kSign - 1), sign = (code & kSign) << (32 - e.bits);
    // Moves exponent and mantissa to their fp32 positions; the multiplication corrects the exponent bias.
    uint32_t value = bitCast<uint32_t>(bitCast<float>(magnitude << (23 - e.mantissaBits)) * bitCast<float>(kScale));
    if (magnitude > e.maxFinite)
      value = magnitude == e.infinity && e.infinity != e.nan ? kInfinityBits : kNanBits;
    return value | sign;
  }
}

/// Returns the code nearest to the value of the fp32 `bits`; ties go to the even code.
template <NumberFormat To> RESHARD_HOST_DEVICE inline uint32_t encodeBits(uint32_t bits, Overflow overflow) {
  constexpr Encoding e = encoding(To);
  constexpr uint32_t kSign = e.sign();
  const uint32_t magnitude = bits & kMagnitudeBits, sign = (bits >> 31) << (e.bits - 1);
  const bool nan = magnitude > kInfinityBits;
  if constexpr (To == NumberFormat::fp32) {
    return nan ? kNanBits | sign : bits;
  } else if constexpr (To == NumberFormat::bf16) {
    const uint32_t code = (magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16;
    return (nan ? e.nan : overflow == Overflow::saturate && code > e.maxFinite ? e.maxFinite : code) | sign;
  } else if constexpr (To == NumberFormat::int4) {
    // Adding 3 * 2^22 rounds to an integer, which is then in the lowest bits of the sum.
    const uint32_t limit = bitCast<uint32_t>(bits >> 31 ? 8.0f : 7.0f), clamped = magnitude < limit ? magnitude : limit;
    return (bitCast<uint32_t>(bitCast<float>(clamped | (bits & ~kMagnitudeBits)) + 0x1.8p23f) + 8) & 0xF;
  } else {
    // The clamp limit: the largest finite value (saturate), or the first value that encodes as infinity or NaN.
    constexpr float kLargest = largest(To);
    constexpr float kBeyond = To == NumberFormat::fp8_e4m3 ? 480 : To == NumberFormat::fp4_e2m1 ? 6 : 65536;
    const uint32_t limit = bitCast<uint32_t>(overflow == Overflow::saturate ? kLargest : kBeyond);
    const uint32_t clamped = magnitude < limit ? magnitude : limit;
    // Adding 2^23 units of the code's last place rounds to whole units, which are then the lowest bits of the sum.
    // Subnormal values of the format use the unit of its smallest normal value. Bits above the code are discarded.
    constexpr uint32_t kLowest = static_cast<uint32_t>(127 - e.bias + 1),
                       kDropped = static_cast<uint32_t>(23 - e.mantissaBits);
    const uint32_t own = clamped & kInfinityBits, exponent = own > kLowest << 23 ? own : kLowest << 23;
    const float sum = bitCast<float>(clamped) + bitCast<float>(exponent + (kDropped << 23));
    const uint32_t code = bitCast<uint32_t>(sum) + (exponent >> kDropped) - (kLowest << e.mantissaBits);
    return (nan && To != NumberFormat::fp4_e2m1 ? e.nan : code & (kSign - 1)) | sign;
  }
}

/// Returns the value of an E8M0 scale, and 1 / the value.
RESHARD_HOST_DEVICE inline float e8m0(uint32_t code) {
  return bitCast<float>(code == 255 ? kNanBits : code == 0 ? 1u << 22 : code << 23);
}
RESHARD_HOST_DEVICE inline float inverseE8m0(uint32_t code) {
  return bitCast<float>(code == 255 ? kNanBits : code == 254 ? 1u << 22 : (254 - code) << 23);
}

/// Scales of a block or matrix, from the fp32 bits of its amax. An amax that is not finite gives the canonical NaN.
/// powerOfTwo: the code of the least E8M0 scale that brings the amax to the largest value of the codes or below. For
/// E4M3, whose largest value is 1.75 * 2^8, the sum rounds the exponent up if the mantissa is above 1.75.
RESHARD_HOST_DEVICE inline uint32_t powerOfTwo(uint32_t amax, NumberFormat codes) {
  const Encoding e = encoding(codes);
  const uint32_t exponent = (amax + (0x7FFFFF - e.largestMantissa())) >> 23,
                 lowered = static_cast<uint32_t>(e.largestExponent());
  return amax >= kInfinityBits ? 255 : exponent > lowered ? exponent - lowered : 0;
}
/// quotientOrOne: the fp32 bits of amax / divisor, or of 1 if that is 0.
RESHARD_HOST_DEVICE inline uint32_t quotientOrOne(uint32_t amax, float divisor) {
  const float scale = bitCast<float>(amax) / divisor;
  return amax >= kInfinityBits ? kNanBits : scale == 0.0f ? bitCast<uint32_t>(1.0f) : bitCast<uint32_t>(scale);
}
/// bf16Quotient: the bf16 code of amax / divisor, rounded, or of 1 if that is 0.
RESHARD_HOST_DEVICE inline uint32_t bf16Quotient(uint32_t amax, float divisor) {
  const uint32_t code = encodeBits<NumberFormat::bf16>(quotientOrOne(amax, divisor), Overflow::infinity);
  return code == 0 ? encodeBits<NumberFormat::bf16>(bitCast<uint32_t>(1.0f), Overflow::infinity) : code;
}

/// Returns `result` with the sign of `of`: arithmetic on a NaN loses the sign.
RESHARD_HOST_DEVICE inline uint32_t withSign(float result, uint32_t of) {
  return (bitCast<uint32_t>(result) & kMagnitudeBits) | (of & ~kMagnitudeBits);
}

} // namespace reshard::kernels
