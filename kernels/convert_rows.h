// Row kernels, written once for all levels. `Lanes` is a level's vector of kLanes fp32 values (Floats; Bits as
// integers): load<Format>(at) decodes; store<Format>(at, scaled, value, overflow, stream) encodes the magnitude of
// `scaled` with the sign of `value`, because arithmetic on a NaN may lose the sign.
//
// One file for each level includes this header and is compiled for that level. No two of them may share code that is
// compiled here, so everything is in an unnamed namespace and no functions of the standard library are used.
#pragma once

#include "kernels/convert.h"
#include "kernels/convert_kernels.h"

#include <cstring>

namespace reshard::kernels {

namespace {

constexpr uint32_t kMagnitude = 0x7FFFFFFF, kInfinity = 0x7F800000, kQuietNan = 0x7FC00000;

template <class To, class From> inline To as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

/// itemBytes() as a constant: the function would be shared between levels.
template <Format Of> constexpr uint64_t kItemBytes = itemBytes(Of);

/// Elements of a cast that are converted at a time: whole lines of every format.
constexpr uint64_t kCastChunk = 64;

template <class Lanes> struct Rows {
  using Floats = typename Lanes::Floats;
  using Bits = typename Lanes::Bits;
  static constexpr uint64_t kLanes = Lanes::kLanes;

  /// Calls step(chunk, target, source, stream) for each `Chunk` elements, with TargetBytes and SourceBytes on the two
  /// sides. An incomplete last chunk uses zero-padded buffers; results beyond element `count` are dropped.
  template <uint64_t Chunk, uint64_t TargetBytes, uint64_t SourceBytes, class Step>
  static void walk(std::byte *target, const std::byte *source, uint64_t count, bool stream, Step step) {
    uint64_t chunk = 0;
    for (; (chunk + 1) * Chunk <= count; ++chunk) {
      const std::byte *from = source + chunk * SourceBytes;
      for (uint64_t at = 0; at < SourceBytes; at += kLine)
        __builtin_prefetch(from + at + kAhead);
      step(chunk, target + chunk * TargetBytes, from, stream);
    }
    if (const uint64_t rest = count - chunk * Chunk; rest > 0) {
      alignas(kLine) std::byte from[SourceBytes] = {}, to[TargetBytes];
      std::memcpy(from, source + chunk * SourceBytes, (rest * SourceBytes + Chunk - 1) / Chunk);
      step(chunk, to, from, false);
      std::memcpy(target + chunk * TargetBytes, to, (rest * TargetBytes + Chunk - 1) / Chunk);
    }
  }

  static Bits larger(Bits a, Bits b) { return a > b ? a : b; }

  /// Returns the maximum of `most` and the magnitudes of `Count` elements, lane by lane.
  template <Format From, uint64_t Count> static Bits amaxOf(Bits most, const std::byte *source) {
    if constexpr (From == Format::bf16 && requires { Lanes::template amaxOfPairs<Count>(source); })
      return larger(most, Lanes::template amaxOfPairs<Count>(source));
    for (uint64_t i = 0; i < Count; i += kLanes)
      most = larger(most, Lanes::bits(Lanes::template load<From>(source + i * kItemBytes<From>)) & kMagnitude);
    return most;
  }

  /// Loads `Count` elements, applies `scale` to them, and stores them.
  template <Format From, Format To, uint64_t Count, class Scale>
  static void convert(std::byte *target, const std::byte *source, Overflow overflow, bool stream, Scale scale) {
    for (uint64_t i = 0; i < Count; i += kLanes) {
      const Floats value = Lanes::template load<From>(source + i * kItemBytes<From>);
      Lanes::template store<To>(target + i * kItemBytes<To>, scale(value), Lanes::bits(value), overflow, stream);
    }
  }

  template <Format From, Format To>
  static void multiply(std::byte *target, const std::byte *source, uint64_t count, float factor, Overflow overflow,
                       bool stream) {
    walk<kCastChunk, kCastChunk * kItemBytes<To>, kCastChunk * kItemBytes<From>>(
        target, source, count, stream, [&](uint64_t, std::byte *to, const std::byte *from, bool past) {
          convert<From, To, kCastChunk>(to, from, overflow, past,
                                        [&](Floats value) { return value * Lanes::broadcast(factor); });
        });
  }

  template <Format From>
  static void divide(std::byte *target, const std::byte *source, uint64_t count, float divisor, bool stream) {
    walk<kCastChunk, kCastChunk, kCastChunk * kItemBytes<From>>(
        target, source, count, stream, [&](uint64_t, std::byte *to, const std::byte *from, bool past) {
          convert<From, Format::fp8_e4m3, kCastChunk>(to, from, Overflow::saturate, past,
                                                      [&](Floats value) { return value / Lanes::broadcast(divisor); });
        });
  }

  template <Format From>
  static uint32_t amax(const std::byte *source, uint64_t rows, uint64_t columns, int64_t stride) {
    Bits most = {};
    for (uint64_t row = 0; row < rows; ++row, source += stride) {
      uint64_t at = 0;
      for (; at + kCastChunk <= columns; at += kCastChunk) {
        __builtin_prefetch(source + at * kItemBytes<From> + kAhead);
        most = amaxOf<From, kCastChunk>(most, source + at * kItemBytes<From>);
      }
      if (at < columns) {
        alignas(kLine) std::byte rest[kCastChunk * kItemBytes<From>] = {};
        std::memcpy(rest, source + at * kItemBytes<From>, (columns - at) * kItemBytes<From>);
        most = amaxOf<From, kCastChunk>(most, rest);
      }
    }
    uint32_t each[kLanes], all = 0;
    std::memcpy(each, &most, sizeof(most));
    for (const uint32_t one : each)
      all = one > all ? one : all;
    return all;
  }

  /// Quantized rows are processed in groups of kLanes blocks, so that the scales of a group are one vector.
  static uint64_t blocksOfGroup(uint64_t block, uint64_t count, uint64_t group) {
    const uint64_t left = (count + block - 1) / block - group * kLanes;
    return left < kLanes ? left : kLanes;
  }

  /// Returns the amax of each block of a group.
  template <Format From, uint64_t Block> static Bits amaxOfGroup(const std::byte *source) {
    Bits each[kLanes];
    for (uint64_t block = 0; block < kLanes; ++block)
      each[block] = amaxOf<From, Block>(Bits{}, source + block * Block * kItemBytes<From>);
    return Lanes::maxOfEach(each);
  }

  /// Returns the codes of the smallest E8M0 scales that bring each amax to 448 = 1.75 * 2^8 or below; NaN for an amax
  /// that is not finite.
  static Bits mxScales(Bits magnitudes) {
    const Bits exponents = (magnitudes + 0x1FFFFF) >> 23; // rounds up if the mantissa is above 1.75
    return magnitudes >= kInfinity ? Bits{} + 255 : exponents > 8 ? exponents - 8 : Bits{};
  }

  /// Writes the elements of a block whose scale has this code. The inverse of code 254 is subnormal; mxScales never
  /// gives that code, but given scales may contain it.
  template <Format From> static void mxBlock(std::byte *target, const std::byte *source, uint32_t code, bool stream) {
    const Floats inverse = Lanes::broadcast(as<float>(code == 255   ? kQuietNan
                                                      : code == 254 ? 1u << 22
                                                                    : (254 - code) << 23));
    // Overflow::infinity converts values beyond 448 and NaNs to NaN in one step.
    convert<From, Format::fp8_e4m3, kMxBlock>(target, source, Overflow::infinity, stream,
                                              [&](Floats value) { return value * inverse; });
  }

  /// A separate function, so that its constants use no registers in a loop that rarely calls it.
  template <Format From>
  [[gnu::noinline]] static void mxBlockApart(std::byte *target, const std::byte *source, uint32_t code, bool stream) {
    mxBlock<From>(target, source, code, stream);
  }

  template <Format From>
  static void quantizeMxfp8(std::byte *target, std::byte *scales, const std::byte *source, uint64_t count,
                            bool stream) {
    constexpr uint64_t kGroup = kMxBlock * kLanes;
    walk<kGroup, kGroup, kGroup * kItemBytes<From>>(
        target, source, count, stream, [&](uint64_t group, std::byte *to, const std::byte *from, bool past) {
          const uint64_t blocks = blocksOfGroup(kMxBlock, count, group);
          const Bits codes = mxScales(amaxOfGroup<From, kMxBlock>(from));
          uint32_t code[kLanes];
          std::memcpy(code, &codes, sizeof(codes));
          for (uint64_t block = 0; block < blocks; ++block) {
            scales[group * kLanes + block] = static_cast<std::byte>(code[block]);
            std::byte *const elements = to + block * kMxBlock;
            const std::byte *const values = from + block * kMxBlock * kItemBytes<From>;
            if constexpr (From == Format::bf16 &&
                          requires { Lanes::template storePairs<kMxBlock>(elements, values, 0, past); }) {
              if (!Lanes::template storePairs<kMxBlock>(elements, values, code[block], past))
                mxBlockApart<From>(elements, values, code[block], past);
            } else {
              mxBlock<From>(elements, values, code[block], past);
            }
          }
        });
  }

  template <Format From> static void scaleMxfp8(std::byte *scales, const std::byte *source, uint64_t count) {
    constexpr uint64_t kGroup = kMxBlock * kLanes;
    walk<kGroup, kLanes, kGroup * kItemBytes<From>>(scales, source, count, false,
                                                    [&](uint64_t, std::byte *to, const std::byte *from, bool) {
                                                      const Bits codes = mxScales(amaxOfGroup<From, kMxBlock>(from));
                                                      uint32_t code[kLanes];
                                                      std::memcpy(code, &codes, sizeof(codes));
                                                      for (uint64_t block = 0; block < kLanes; ++block)
                                                        to[block] = static_cast<std::byte>(code[block]);
                                                    });
  }

  /// Writes the elements as quantizeMxfp8 does, with given scales.
  template <Format From>
  static void encodeMxfp8(std::byte *target, const std::byte *scales, const std::byte *source, uint64_t count,
                          bool stream) {
    walk<kMxBlock, kMxBlock, kMxBlock * kItemBytes<From>>(
        target, source, count, stream, [&](uint64_t block, std::byte *to, const std::byte *from, bool past) {
          mxBlock<From>(to, from, static_cast<uint32_t>(scales[block]), past);
        });
  }

  template <Format To>
  static void dequantizeMxfp8(std::byte *target, const std::byte *source, const std::byte *scales, uint64_t count,
                              bool stream) {
    walk<kMxBlock, kMxBlock * kItemBytes<To>, kMxBlock>(
        target, source, count, stream, [&](uint64_t block, std::byte *to, const std::byte *from, bool past) {
          const auto code = static_cast<uint32_t>(scales[block]);
          const Floats scale = Lanes::broadcast(as<float>(code == 255 ? kQuietNan : code == 0 ? 1u << 22 : code << 23));
          convert<Format::fp8_e4m3, To, kMxBlock>(to, from, Overflow::infinity, past,
                                                  [&](Floats value) { return value * scale; });
        });
  }

  static constexpr uint64_t kNvfp4Group = kNvfp4Block * kLanes;

  /// Returns the factors that dequantize the blocks of a group.
  static Floats factors(const std::byte *scales, float tensorScale) {
    return Lanes::template load<Format::fp8_e4m3>(scales) * Lanes::broadcast(tensorScale);
  }

  /// Writes the codes of the scales of a group.
  template <Format From> static void nvfp4Scales(std::byte *codes, float tensorScale, const std::byte *source) {
    Bits magnitude = amaxOfGroup<From, kNvfp4Block>(source);
    magnitude = magnitude >= kInfinity ? Bits{} + kQuietNan : magnitude;
    Floats scale = Lanes::floats(magnitude) / Lanes::broadcast(6 * tensorScale);
    scale = scale == 0.0f ? Floats{} + 1.0f : scale;
    Lanes::template store<Format::fp8_e4m3>(codes, scale, Bits{}, Overflow::saturate, false);
  }

  template <Format From>
  static void scaleNvfp4(std::byte *scales, float tensorScale, const std::byte *source, uint64_t count) {
    walk<kNvfp4Group, kLanes, kNvfp4Group * kItemBytes<From>>(
        scales, source, count, false,
        [&](uint64_t, std::byte *to, const std::byte *from, bool) { nvfp4Scales<From>(to, tensorScale, from); });
  }

  template <Format From>
  static void quantizeNvfp4(std::byte *target, std::byte *scales, float tensorScale, const std::byte *source,
                            uint64_t count, bool stream) {
    walk<kNvfp4Group, kNvfp4Group / 2, kNvfp4Group * kItemBytes<From>>(
        target, source, count, stream, [&](uint64_t group, std::byte *to, const std::byte *from, bool past) {
          const uint64_t blocks = blocksOfGroup(kNvfp4Block, count, group);
          alignas(kLine) std::byte codes[kLanes];
          nvfp4Scales<From>(codes, tensorScale, from);
          std::memcpy(scales + group * kLanes, codes, blocks);
          Floats factor = factors(codes, tensorScale);
          factor = factor == 0.0f ? Floats{} + as<float>(kInfinity) : factor;
          alignas(kLine) float divisors[kLanes];
          std::memcpy(divisors, &factor, sizeof(factor));
          for (uint64_t block = 0; block < blocks; ++block) {
            alignas(kLine) std::byte elements[kNvfp4Block];
            const Floats divisor = Lanes::broadcast(divisors[block]);
            convert<From, Format::fp4_e2m1, kNvfp4Block>(elements, from + block * kNvfp4Block * kItemBytes<From>,
                                                         Overflow::saturate, false,
                                                         [&](Floats value) { return value / divisor; });
            Lanes::store8(to + block * sizeof(uint64_t), Lanes::pack(elements), past);
          }
        });
    if (count % 2 == 1) // in a NaN block the padding code would be NaN too, but must be 0
      target[count / 2] = static_cast<std::byte>(static_cast<uint8_t>(target[count / 2]) & 0x0F);
  }

  template <Format To>
  static void dequantizeNvfp4(std::byte *target, const std::byte *source, const std::byte *scales, float tensorScale,
                              uint64_t count, bool stream) {
    walk<kNvfp4Group, kNvfp4Group * kItemBytes<To>, kNvfp4Group / 2>(
        target, source, count, stream, [&](uint64_t group, std::byte *to, const std::byte *from, bool past) {
          alignas(kLine) std::byte codes[kLanes] = {};
          const uint64_t blocks = blocksOfGroup(kNvfp4Block, count, group);
          std::memcpy(codes, scales + group * kLanes, blocks);
          const Floats factor = factors(codes, tensorScale);
          alignas(kLine) float each[kLanes];
          std::memcpy(each, &factor, sizeof(factor));
          for (uint64_t block = 0; block < blocks; ++block) {
            uint64_t packed;
            std::memcpy(&packed, from + block * sizeof(packed), sizeof(packed));
            alignas(kLine) std::byte elements[kNvfp4Block];
            Lanes::unpack(elements, packed);
            convert<Format::fp4_e2m1, To, kNvfp4Block>(
                to + block * kNvfp4Block * kItemBytes<To>, elements, Overflow::infinity, past,
                [&](Floats value) { return value * Lanes::broadcast(each[block]); });
          }
        });
  }

  static constexpr ConvertKernels table() {
    using enum Format;
    return {
        {{nullptr, multiply<fp32, bf16>, multiply<fp32, fp16>, multiply<fp32, fp8_e4m3>, multiply<fp32, fp8_e5m2>},
         {multiply<bf16, fp32>, nullptr, multiply<bf16, fp16>, multiply<bf16, fp8_e4m3>, multiply<bf16, fp8_e5m2>},
         {multiply<fp16, fp32>, multiply<fp16, bf16>, nullptr, multiply<fp16, fp8_e4m3>, multiply<fp16, fp8_e5m2>},
         {multiply<fp8_e4m3, fp32>, multiply<fp8_e4m3, bf16>, multiply<fp8_e4m3, fp16>, nullptr,
          multiply<fp8_e4m3, fp8_e5m2>},
         {multiply<fp8_e5m2, fp32>, multiply<fp8_e5m2, bf16>, multiply<fp8_e5m2, fp16>, multiply<fp8_e5m2, fp8_e4m3>,
          nullptr}},
        {divide<fp32>, divide<bf16>, divide<fp16>},
        {amax<fp32>, amax<bf16>, amax<fp16>},
        {quantizeMxfp8<fp32>, quantizeMxfp8<bf16>, quantizeMxfp8<fp16>},
        {scaleMxfp8<fp32>, scaleMxfp8<bf16>, scaleMxfp8<fp16>},
        {encodeMxfp8<fp32>, encodeMxfp8<bf16>, encodeMxfp8<fp16>},
        {dequantizeMxfp8<fp32>, dequantizeMxfp8<bf16>, dequantizeMxfp8<fp16>},
        {quantizeNvfp4<fp32>, quantizeNvfp4<bf16>, quantizeNvfp4<fp16>},
        {scaleNvfp4<fp32>, scaleNvfp4<bf16>, scaleNvfp4<fp16>},
        {dequantizeNvfp4<fp32>, dequantizeNvfp4<bf16>, dequantizeNvfp4<fp16>},
    };
  }
};

} // namespace

} // namespace reshard::kernels
