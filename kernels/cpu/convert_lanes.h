// SPDX-License-Identifier: Apache-2.0
// Vectors of fp32 values and their conversion from and to stored formats, for levels that have a `Machine`: the
// instructions that the compiler's vector operators do not provide. Included in the same way as convert_rows.h.
#pragma once

#include "kernels/cpu/convert_rows.h"

#include <utility>

namespace reshard::kernels {

namespace {

template <class Machine> struct Lanes {
  static constexpr uint64_t kLanes = Machine::kLanes;
  using Floats = typename Machine::Floats;
  using Bits = typename Machine::Bits;
  using Integers = typename Machine::Integers; // signed: compared with fewer instructions
  using Words = typename Machine::Words;
  using Shorts = typename Machine::Shorts;
  using Pairs = typename Machine::Pairs; // two 16-bit values in each 32-bit lane
  static constexpr uint64_t kPairs = 2 * kLanes;

  static Bits bits(Floats value) { return (Bits)value; }
  static Floats floats(Bits bits) { return (Floats)bits; }
  static Floats broadcast(float value) { return value - Floats{}; }

  /// Returns the maxima of adjacent lanes that are `Step` apart: of `a` in the lanes whose number lacks the bit Step,
  /// of `b` in the others.
  template <uint64_t Step, size_t... Lane> static Bits merge(Bits a, Bits b, std::index_sequence<Lane...>) {
    const Bits low = __builtin_shufflevector(a, b, (Lane & Step ? kLanes + (Lane ^ Step) : Lane)...);
    const Bits high = __builtin_shufflevector(a, b, (Lane & Step ? kLanes + Lane : Lane | Step)...);
    return low > high ? low : high;
  }

  /// For vectors each[0], each[Step], each[2 * Step], ...: lane i of the result is the maximum over the lanes of
  /// each[i / Step * Step] whose numbers are congruent to i modulo Step.
  template <uint64_t Step> static Bits mergeAll(const Bits *each) {
    if constexpr (Step == kLanes)
      return *each;
    else
      return merge<Step>(mergeAll<2 * Step>(each), mergeAll<2 * Step>(each + Step), std::make_index_sequence<kLanes>());
  }

  /// Lane i of the result is the maximum over all lanes of each[i].
  static Bits maxOfEach(const Bits (&each)[kLanes]) { return mergeAll<1>(each); }

  template <class Vector> static Vector read(const std::byte *at) {
    Vector vector;
    std::memcpy(&vector, at, sizeof(vector));
    return vector;
  }

  static Floats fromHalves(Words halves) {
    return as<Floats>(Machine::fromHalves(as<typename Machine::HalfRegister>(halves)));
  }

  /// Decodes 8- and 4-bit codes, one in each byte, by moving them to the fp16 positions of sign, exponent and mantissa
  /// and correcting the exponent bias.
  template <NumberFormat From> static Floats load(const std::byte *at) {
    if constexpr (From == NumberFormat::fp32) {
      return read<Floats>(at);
    } else if constexpr (From == NumberFormat::bf16) {
      return floats((Bits)Machine::widen(as<typename Machine::HalfRegister>(read<Words>(at))) << 16);
    } else if constexpr (From == NumberFormat::fp16) {
      return fromHalves(read<Words>(at));
    } else {
      const Words codes = (Words)Machine::widenBytes(at);
      if constexpr (From == NumberFormat::fp8_e5m2)
        return fromHalves(codes << 8);
      if constexpr (From == NumberFormat::fp4_e2m1)
        return fromHalves((codes & 8) << 12 | (codes & 7) << 9) * 0x1p14f;
      if constexpr (From == NumberFormat::int4)
        return fromHalves(codes | 0x6400) - 1032; // 0x6400 is 1024, with a unit in its last place
      const Words half =
          (Words)((Shorts)(codes << 8) >> 1) & 0xBF80; // the shift duplicates the sign; the mask removes the copy
      const Words nan = (Words)((half & 0x3F80) == 0x3F80);
      return fromHalves(half | (nan & 0x7C00)) * 0x1p8f;
    }
  }

  /// Returns codes of magnitudes below 2^17 in the lowest bits of each lane; the upper bits are undefined. Adding 2^23
  /// units of a code's last place rounds to whole units, which are then the lowest bits of the sum. Subnormal values of
  /// the format use the unit of its smallest normal value.
  template <NumberFormat To> static Bits smallCode(Bits magnitude) {
    constexpr Encoding e = encoding(To);
    constexpr int kLowest = encoding(NumberFormat::fp32).bias - e.bias + 1, kDropped = 23 - e.mantissaBits;
    Integers exponent = (Integers)(magnitude & kInfinity);
    exponent = exponent > (kLowest << 23) ? exponent : Integers{} + (kLowest << 23);
    const Floats sum = floats(magnitude) + (Floats)(exponent + (kDropped << 23));
    return bits(sum) + (Bits)(exponent >> kDropped) - (static_cast<uint32_t>(kLowest) << e.mantissaBits);
  }

  static Bits smaller(Bits a, uint32_t b) {
    const Integers limit = (Integers)(Bits{} + b);
    return (Bits)(limit < (Integers)a ? limit : (Integers)a);
  }

  /// The bits to which magnitudes of a format of 16 bits are limited before they are rounded.
  template <NumberFormat To> static uint32_t limitOf(Overflow overflow) {
    return overflow == Overflow::saturate ? as<uint32_t>(largest(To)) : kInfinity;
  }

  static Bits select(Integers condition, uint32_t yes, Bits no) {
    return (Bits)(condition ? (Integers)(Bits{} + yes) : (Integers)no);
  }

  template <NumberFormat To>
  static void store(std::byte *at, Floats scaled, Bits value, Overflow overflow, bool stream) {
    constexpr Encoding e = encoding(To);
    const Bits magnitude = bits(scaled) & kMagnitude, sign = value & ~kMagnitude;
    const Integers nan = (Integers)magnitude > static_cast<int32_t>(kInfinity);
    if constexpr (To == NumberFormat::fp32) {
      Machine::store(at, as<typename Machine::Register>(select(nan, kQuietNan, magnitude) | sign), stream);
    } else if constexpr (To == NumberFormat::fp16) {
      const Bits limited = smaller(magnitude, limitOf<To>(overflow));
      Machine::store(at, Machine::toHalves(as<typename Machine::Register>(select(nan, kQuietNan, limited) | sign)),
                     stream);
    } else if constexpr (To == NumberFormat::bf16) {
      const Bits limited = smaller(magnitude, limitOf<To>(overflow));
      const Bits rounded = (limited + 0x7FFF + (limited >> 16 & 1)) >> 16;
      Machine::store(at, Machine::words(as<typename Machine::Register>(select(nan, e.nan, rounded) | sign >> 16)),
                     stream);
    } else if constexpr (To == NumberFormat::int4) {
      // Adding 3 * 2^22 rounds to an integer, which is then in the lowest bits of the sum.
      const Floats limited = floats(smaller(magnitude, as<uint32_t>(8.0f)) | sign), most = broadcast(7);
      const Bits code = (bits((limited < most ? limited : most) + 0x1.8p23f) + 8) & 0xF;
      Machine::store(at, Machine::bytes(as<typename Machine::Register>(code)), stream);
    } else {
      // The clamp limit: the largest finite value, or the first value that encodes as infinity or NaN. So 480 encodes
      // E4M3's NaN, and a NaN input is above the limit.
      constexpr uint32_t kSign = e.sign();
      constexpr float kLargest = largest(To);
      constexpr float kBeyond = To == NumberFormat::fp8_e4m3 ? 480 : To == NumberFormat::fp8_e5m2 ? 65536 : 6;
      Bits code = smallCode<To>(smaller(magnitude, as<uint32_t>(overflow == Overflow::saturate ? kLargest : kBeyond)));
      if (To == NumberFormat::fp8_e5m2 || (To == NumberFormat::fp8_e4m3 && overflow == Overflow::saturate))
        code = select(nan, e.nan, code);
      Machine::store(at, Machine::bytes(as<typename Machine::Register>((code & (kSign - 1)) | sign >> (32 - e.bits))),
                     stream);
    }
  }

  /// Returns the maximum magnitude of `Count` bf16 elements, lane by lane. Magnitudes of bf16 are ordered as their
  /// bits.
  template <uint64_t Count>
    requires(Count % kPairs == 0)
  static Bits amaxOfPairs(const std::byte *source) {
    Pairs most = {};
    for (uint64_t i = 0; i < Count; i += kPairs) {
      const Pairs magnitude = read<Pairs>(source + i * sizeof(uint16_t)) & 0x7FFF;
      most = most > magnitude ? most : magnitude;
    }
    const Bits even = (Bits)most << 16, odd = (Bits)most & 0xFFFF0000;
    return even > odd ? even : odd;
  }

  /// Writes E4M3 elements from bf16 elements divided by the E8M0 scale with this code, which brings all of them to 448
  /// or below. Uses 16-bit integer arithmetic: lowers the exponents and rounds four mantissa bits away. Returns false,
  /// and writes nothing, if an element other than zero is not a normal number in both formats.
  template <uint64_t Count>
    requires(Count % kPairs == 0)
  static bool storePairs(std::byte *target, const std::byte *source, uint32_t scale, bool stream) {
    constexpr Encoding e = encoding(NumberFormat::fp8_e4m3);
    constexpr uint32_t kBias = static_cast<uint32_t>(e.bias), kDropped = 7 - e.mantissaBits;
    if (scale <= kBias || scale == 255)
      return false;
    const Pairs offset = Pairs{} + static_cast<uint16_t>((scale - kBias) << 7);
    Pairs each[Count / kPairs], least = {};
    for (uint64_t i = 0; i < Count / kPairs; ++i) {
      each[i] = read<Pairs>(source + i * sizeof(Pairs));
      const Pairs below = (each[i] & 0x7FFF) - 1; // zero wraps around to the largest value
      least = i == 0 ? below : below < least ? below : least;
    }
    if (Machine::anyBelow(as<typename Machine::Register>(least),
                          as<typename Machine::Register>(offset + ((1 << 7) - 1))))
      return false;
    for (uint64_t i = 0; i < Count / kPairs; ++i) {
      const Pairs magnitude = each[i] & 0x7FFF, lowered = (magnitude > offset ? magnitude : offset) - offset;
      const Pairs code = (lowered + (1 << (kDropped - 1)) - 1 + (lowered >> kDropped & 1)) >> kDropped; // ties to even
      Machine::store(target + i * kPairs,
                     Machine::pairBytes(as<typename Machine::Register>(code | (each[i] >> 8 & 0x80))), stream);
    }
    return true;
  }

  static uint64_t pack(const std::byte *codes) { return Machine::pack(codes); }
  static void unpack(std::byte *codes, uint64_t packed) { Machine::unpack(codes, packed); }
  static void store8(std::byte *at, uint64_t bytes, bool stream) { Machine::store(at, bytes, stream); }
};

} // namespace

} // namespace reshard::kernels
