// Vectors of fp32 values that come from and go to stored formats, for levels that have a `Machine`: the instructions
// that no operator of the compiler's vectors gives. To be included as convert_rows.h is.
#pragma once

#include "kernels/convert_rows.h"

#include <utility>

namespace reshard::kernels {

namespace {

template <class Machine> struct Lanes {
  static constexpr uint64_t kLanes = Machine::kLanes;
  using Floats = typename Machine::Floats;
  using Bits = typename Machine::Bits;
  using Integers = typename Machine::Integers; // compared with fewer instructions
  using Words = typename Machine::Words;
  using Shorts = typename Machine::Shorts;
  using Pairs = typename Machine::Pairs; // two 16-bit values where a lane has one of fp32
  static constexpr uint64_t kPairs = 2 * kLanes;

  static Bits bits(Floats value) { return (Bits)value; }
  static Floats floats(Bits bits) { return (Floats)bits; }
  static Floats broadcast(float value) { return value - Floats{}; }

  /// The larger of neighbours that are `Step` lanes apart: those of `a` where Step is not in the lane's number, of `b`
  /// where it is.
  template <uint64_t Step, size_t... Lane> static Bits merge(Bits a, Bits b, std::index_sequence<Lane...>) {
    const Bits low = __builtin_shufflevector(a, b, (Lane & Step ? kLanes + (Lane ^ Step) : Lane)...);
    const Bits high = __builtin_shufflevector(a, b, (Lane & Step ? kLanes + Lane : Lane | Step)...);
    return low > high ? low : high;
  }

  /// Of vectors each[0], each[Step], each[2 * Step], ...: lane i is the largest of each[i / Step * Step] over its lanes
  /// that are i modulo Step.
  template <uint64_t Step> static Bits mergeAll(const Bits *each) {
    if constexpr (Step == kLanes)
      return *each;
    else
      return merge<Step>(mergeAll<2 * Step>(each), mergeAll<2 * Step>(each + Step), std::make_index_sequence<kLanes>());
  }

  /// Lane i is the largest lane of each[i].
  static Bits maxOfEach(const Bits (&each)[kLanes]) { return mergeAll<1>(each); }

  template <class Vector> static Vector read(const std::byte *at) {
    Vector vector;
    std::memcpy(&vector, at, sizeof(vector));
    return vector;
  }

  static Floats fromHalves(Words halves) {
    return as<Floats>(Machine::fromHalves(as<typename Machine::HalfRegister>(halves)));
  }

  /// 8- and 4-bit codes, one in each byte, are moved to where fp16 has its sign, exponent and mantissa; its larger bias
  /// is made up for.
  template <Format From> static Floats load(const std::byte *at) {
    if constexpr (From == Format::fp32) {
      return read<Floats>(at);
    } else if constexpr (From == Format::bf16) {
      return floats((Bits)Machine::widen(as<typename Machine::HalfRegister>(read<Words>(at))) << 16);
    } else if constexpr (From == Format::fp16) {
      return fromHalves(read<Words>(at));
    } else {
      const Words codes = (Words)Machine::widenBytes(at);
      if constexpr (From == Format::fp8_e5m2)
        return fromHalves(codes << 8);
      if constexpr (From == Format::fp4_e2m1)
        return fromHalves((codes & 8) << 12 | (codes & 7) << 9) * 0x1p14f;
      const Words half =
          (Words)((Shorts)(codes << 8) >> 1) & 0xBF80; // the sign twice, and the one in between taken out
      const Words nan = (Words)((half & 0x3F80) == 0x3F80);
      return fromHalves(half | (nan & 0x7C00)) * 0x1p8f;
    }
  }

  /// Codes of magnitudes below 2^17, in the lowest bits of each lane (what is above them is noise). Adding 2^23 units
  /// of a code's last place to a value rounds it to whole ones, which are then the sum's lowest bits; values below the
  /// format's normal ones have the unit of these.
  template <Format To> static Bits smallCode(Bits magnitude) {
    constexpr Encoding e = encoding(To);
    constexpr int kLowest = encoding(Format::fp32).bias - e.bias + 1, kDropped = 23 - e.mantissaBits;
    Integers exponent = (Integers)(magnitude & kInfinity);
    exponent = exponent > (kLowest << 23) ? exponent : Integers{} + (kLowest << 23);
    const Floats sum = floats(magnitude) + (Floats)(exponent + (kDropped << 23));
    return bits(sum) + (Bits)(exponent >> kDropped) - (static_cast<uint32_t>(kLowest) << e.mantissaBits);
  }

  static Bits smaller(Bits a, uint32_t b) {
    const Integers limit = (Integers)(Bits{} + b);
    return (Bits)(limit < (Integers)a ? limit : (Integers)a);
  }

  static Bits select(Integers condition, uint32_t yes, Bits no) {
    return (Bits)(condition ? (Integers)(Bits{} + yes) : (Integers)no);
  }

  template <Format To> static void store(std::byte *at, Floats scaled, Bits value, Overflow overflow, bool stream) {
    constexpr Encoding e = encoding(To);
    const Bits magnitude = bits(scaled) & kMagnitude, sign = value & ~kMagnitude;
    const Integers nan = (Integers)magnitude > static_cast<int32_t>(kInfinity);
    if constexpr (To == Format::fp32) {
      Machine::store(at, as<typename Machine::Register>(select(nan, kQuietNan, magnitude) | sign), stream);
    } else if constexpr (To == Format::fp16) {
      Machine::store(at, Machine::toHalves(as<typename Machine::Register>(select(nan, kQuietNan, magnitude) | sign)),
                     stream);
    } else if constexpr (To == Format::bf16) {
      const Bits rounded = (magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16;
      Machine::store(at, Machine::words(as<typename Machine::Register>(select(nan, e.nan, rounded) | sign >> 16)),
                     stream);
    } else {
      // The largest value, or the one after it, where the code of infinity or NaN is; so 480 is E4M3's NaN, and NaN is
      // above it.
      constexpr uint32_t kSign = e.sign();
      constexpr float kLargest = To == Format::fp8_e4m3 ? 448 : To == Format::fp8_e5m2 ? 57344 : 6;
      constexpr float kBeyond = To == Format::fp8_e4m3 ? 480 : To == Format::fp8_e5m2 ? 65536 : 6;
      Bits code = smallCode<To>(smaller(magnitude, as<uint32_t>(overflow == Overflow::saturate ? kLargest : kBeyond)));
      if (To == Format::fp8_e5m2 || (To == Format::fp8_e4m3 && overflow == Overflow::saturate))
        code = select(nan, e.nan, code);
      Machine::store(at, Machine::bytes(as<typename Machine::Register>((code & (kSign - 1)) | sign >> (32 - e.bits))),
                     stream);
    }
  }

  /// Magnitudes of bf16 are ordered as their bits are: the largest of `Count` elements, in as many parts as there are
  /// lanes.
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

  /// E4M3 elements of bf16 ones divided by the E8M0 scale of a code, which brings all of them to 448 or below: their
  /// exponents are lowered, and four bits of their mantissas rounded away, in arithmetic on bf16's 16 bits. False, and
  /// nothing is stored, where an element other than zero is not a normal number on both sides.
  template <uint64_t Count>
    requires(Count % kPairs == 0)
  static bool storePairs(std::byte *target, const std::byte *source, uint32_t scale, bool stream) {
    constexpr Encoding e = encoding(Format::fp8_e4m3);
    constexpr uint32_t kBias = static_cast<uint32_t>(e.bias), kDropped = 7 - e.mantissaBits;
    if (scale <= kBias || scale == 255)
      return false;
    const Pairs offset = Pairs{} + static_cast<uint16_t>((scale - kBias) << 7);
    Pairs each[Count / kPairs], least = {};
    for (uint64_t i = 0; i < Count / kPairs; ++i) {
      each[i] = read<Pairs>(source + i * sizeof(Pairs));
      const Pairs below = (each[i] & 0x7FFF) - 1; // zero comes out on top
      least = i == 0 ? below : below < least ? below : least;
    }
    if (Machine::anyBelow(as<typename Machine::Register>(least),
                          as<typename Machine::Register>(offset + ((1 << 7) - 1))))
      return false;
    for (uint64_t i = 0; i < Count / kPairs; ++i) {
      const Pairs magnitude = each[i] & 0x7FFF, lowered = (magnitude > offset ? magnitude : offset) - offset;
      const Pairs code = (lowered + (1 << (kDropped - 1)) - 1 + (lowered >> kDropped & 1)) >>
                         kDropped; // of two that are as near, the even one
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
