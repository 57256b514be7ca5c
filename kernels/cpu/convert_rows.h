// SPDX-License-Identifier: Apache-2.0
// Row kernels, written once for all levels. `Lanes` is a level's vector of kLanes fp32 values (Floats; Bits as
// integers): load<NumberFormat>(at) decodes; store<NumberFormat>(at, scaled, value, overflow, stream) encodes the
// magnitude of `scaled` with the sign of `value`, because arithmetic on a NaN may lose the sign.
//
// One file for each level includes this header and is compiled for that level. No two of them may share code that is
// compiled here, so everything is in an unnamed namespace and no functions of the standard library are used.
#pragma once

#include "kernels/cpu/convert.h"
#include "kernels/number_formats.h"

#include <cstring>

namespace reshard::kernels {

/// Formats of 8 bits or more. The first kWideFormats of them can be quantized.
constexpr size_t kFormats = 5, kWideFormats = 3;

// Rows are `count` adjacent elements. They may be short, so parameters are passed in registers: a struct of all of them
// takes 4 ns more for each row, a sixth of the time of 128 elements.

/// How a row is written. `stream` requires a target that is aligned to a cache line.
struct Writing {
  Overflow overflow;
  bool stream;
};

/// The scales of a row, one for each block; blocks begin at the first element. The tensor scale is used if the format
/// has one.
struct BlockScales {
  std::byte *scales;
  float tensorScale;
};

/// Kernels of a format whose blocks lie in one row, by wide format. Those of other formats are null.
struct BlockKernels {
  void (*quantize[kWideFormats])(std::byte *codes, BlockScales scales, const std::byte *source, uint64_t count,
                                 bool stream);
  void (*computeScales[kWideFormats])(BlockScales scales, const std::byte *source, uint64_t count);
  void (*quantizeWithScales[kWideFormats])(std::byte *codes, BlockScales scales, const std::byte *source,
                                           uint64_t count, bool stream); ///< null for two codes in a byte
  void (*dequantize[kWideFormats])(std::byte *target, BlockScales scales, const std::byte *codes, uint64_t count,
                                   bool stream);
};

/// The kernels of a level, by wide format, or by [from][to] for casts.
struct ConvertKernels {
  /// target = source * factor
  void (*multiply[kFormats][kFormats])(std::byte *target, const std::byte *source, uint64_t count, float factor,
                                       Writing how);
  /// E4M3 target = source / divisor; saturates
  void (*divide[kWideFormats])(std::byte *target, const std::byte *source, uint64_t count, float divisor, Writing how);
  /// Returns the fp32 bits of a matrix's amax; infinities and NaNs compare above all finite values. `stride` in bytes.
  uint32_t (*amax[kWideFormats])(const std::byte *source, uint64_t rows, uint64_t columns, int64_t stride);
  BlockKernels blocks[std::size(kQuantizedFormats)]; ///< by Quantization
};

#if defined(__x86_64__)
extern const ConvertKernels kConvertAvx2, kConvertAvx512;
#endif

namespace {

constexpr uint32_t kMagnitude = 0x7FFFFFFF, kInfinity = 0x7F800000, kQuietNan = 0x7FC00000;

template <class To, class From> inline To as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

/// itemBytes() as a constant: the function would be shared between levels.
template <NumberFormat Of> constexpr uint64_t kItemBytes = itemBytes(Of);

/// Elements of a cast that are converted at a time: whole lines of every format.
constexpr uint64_t kCastChunk = 64;

/// 4-bit codes that Lanes::pack packs into 8 bytes.
constexpr uint64_t kPacked = 16;

template <class Lanes> struct Rows {
  using Floats = typename Lanes::Floats;
  using Bits = typename Lanes::Bits;
  static constexpr uint64_t kLanes = Lanes::kLanes;

  /// Calls step(chunk, target, source, stream) for each `Chunk` elements, with TargetBytes and SourceBytes on the two
  /// sides. An incomplete last chunk uses zero-padded buffers; results beyond element `count` are dropped, in whole
  /// numbers of `Item` bytes.
  template <uint64_t Chunk, uint64_t TargetBytes, uint64_t SourceBytes, uint64_t Item = 1, class Step>
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
      std::memcpy(target + chunk * TargetBytes, to, (rest * TargetBytes + Chunk * Item - 1) / (Chunk * Item) * Item);
    }
  }

  static Bits larger(Bits a, Bits b) { return a > b ? a : b; }

  /// Returns the maximum of `most` and the magnitudes of `Count` elements, lane by lane.
  template <NumberFormat From, uint64_t Count> static Bits amaxOf(Bits most, const std::byte *source) {
    if constexpr (From == NumberFormat::bf16 && requires { Lanes::template amaxOfPairs<Count>(source); })
      return larger(most, Lanes::template amaxOfPairs<Count>(source));
    for (uint64_t i = 0; i < Count; i += kLanes)
      most = larger(most, Lanes::bits(Lanes::template load<From>(source + i * kItemBytes<From>)) & kMagnitude);
    return most;
  }

  /// Loads `Count` elements, applies `scale` to them, and stores them. `flip`: the sign bit, or 0, by which the signs
  /// of the elements change.
  template <NumberFormat From, NumberFormat To, uint64_t Count, class Scale>
  static void convert(std::byte *target, const std::byte *source, Overflow overflow, bool stream, Scale scale,
                      Bits flip = Bits()) {
    for (uint64_t i = 0; i < Count; i += kLanes) {
      const Floats value = Lanes::template load<From>(source + i * kItemBytes<From>);
      Lanes::template store<To>(target + i * kItemBytes<To>, scale(value), Lanes::bits(value) ^ flip, overflow, stream);
    }
  }

  /// The sign bits of factors. A NaN has none, because its sign depends on how it was computed.
  static Bits signs(Floats factor) { return factor == factor ? Lanes::bits(factor) & ~kMagnitude : Bits{}; }

  template <NumberFormat From, NumberFormat To>
  static void multiply(std::byte *target, const std::byte *source, uint64_t count, float factor, Writing how) {
    walk<kCastChunk, kCastChunk * kItemBytes<To>, kCastChunk * kItemBytes<From>>(
        target, source, count, how.stream,
        [factor, overflow = how.overflow](uint64_t, std::byte *to, const std::byte *from, bool past) {
          const Floats all = Lanes::broadcast(factor);
          convert<From, To, kCastChunk>(
              to, from, overflow, past, [&](Floats value) { return value * all; }, signs(all));
        });
  }

  template <NumberFormat From>
  static void divide(std::byte *target, const std::byte *source, uint64_t count, float divisor, Writing how) {
    walk<kCastChunk, kCastChunk, kCastChunk * kItemBytes<From>>(
        target, source, count, how.stream, [divisor](uint64_t, std::byte *to, const std::byte *from, bool past) {
          convert<From, NumberFormat::fp8_e4m3, kCastChunk>(
              to, from, Overflow::saturate, past, [&](Floats value) { return value / Lanes::broadcast(divisor); });
        });
  }

  template <NumberFormat From>
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

  /// Quantized rows are processed in groups of kLanes blocks, so that the scales of a group are one vector. Returns the
  /// blocks of a group that begins `left` elements before the end of the row.
  static uint64_t blocksOfGroup(uint64_t block, uint64_t left) {
    const uint64_t blocks = (left + block - 1) / block;
    return blocks < kLanes ? blocks : kLanes;
  }

  /// The traits of a quantized format as constants.
  template <Quantization Of> struct Traits {
    static constexpr uint64_t kBlock = static_cast<uint64_t>(formatOf(Of).blockColumns), kGroup = kBlock * kLanes;
    static constexpr uint64_t kPerByte = static_cast<uint64_t>(formatOf(Of).codesPerByte()); // codes
    static constexpr uint64_t kBlockBytes = kBlock / kPerByte;                               // bytes of a block's codes
    static constexpr NumberFormat kCode = numberFormat(formatOf(Of).code);
    static constexpr float kDivisor = scaleDivisor(kCode);
    static constexpr bool kPowers = formatOf(Of).rule == ScaleRule::powerOfTwo;
    static constexpr uint64_t kScaleBytes = static_cast<uint64_t>(formatOf(Of).scaleBytes());
    static constexpr NumberFormat kScale = // not of powers of two
        formatOf(Of).scale == ScaleFormat::bf16 ? NumberFormat::bf16 : NumberFormat::fp8_e4m3;
    static constexpr uint64_t kGroupScales = kLanes * kScaleBytes; // bytes
    static_assert(formatOf(Of).blockRows == 1 &&
                  (formatOf(Of).rule == ScaleRule::tensorQuotient ? formatOf(Of).scale == ScaleFormat::fp8_e4m3
                   : kPowers                                      ? formatOf(Of).scale == ScaleFormat::e8m0
                                                                  : formatOf(Of).scale == ScaleFormat::bf16));
  };

  /// Returns the amax of each block of a group.
  template <NumberFormat From, uint64_t Block> static Bits amaxOfGroup(const std::byte *source) {
    Bits each[kLanes];
    for (uint64_t block = 0; block < kLanes; ++block)
      each[block] = amaxOf<From, Block>(Bits{}, source + block * Block * kItemBytes<From>);
    return Lanes::maxOfEach(each);
  }

  /// Returns the codes of the least E8M0 scales that bring each amax to the largest value of the codes or below; NaN
  /// for an amax that is not finite. For E4M3, whose largest value is 1.75 * 2^8, the sum rounds the exponent up if the
  /// mantissa is above 1.75.
  template <NumberFormat Code> static Bits powersOfTwo(Bits magnitudes) {
    constexpr Encoding e = encoding(Code);
    constexpr uint32_t kRound = 0x7FFFFF - e.largestMantissa(), kLowered = static_cast<uint32_t>(e.largestExponent());
    const Bits exponents = (magnitudes + kRound) >> 23;
    return magnitudes >= kInfinity ? Bits{} + 255 : exponents > kLowered ? exponents - kLowered : Bits{};
  }

  /// Writes the scales of a group that are quotients. The tensor scale is 1 if the format has none. An E4M3 scale of 0
  /// is kept: only a quotient of 0 becomes 1.
  template <Quantization Of> static void quotients(std::byte *codes, float tensorScale, Bits magnitudes) {
    constexpr float kZero = Traits<Of>::kScale == NumberFormat::bf16 ? 0x1p-134f : 0; // becomes 0 in bf16
    magnitudes = magnitudes >= kInfinity ? Bits{} + kQuietNan : magnitudes;
    Floats scale = Lanes::floats(magnitudes) / Lanes::broadcast(Traits<Of>::kDivisor * tensorScale);
    scale = scale <= kZero ? Floats{} + 1.0f : scale;
    Lanes::template store<Traits<Of>::kScale>(codes, scale, Bits{}, Overflow::saturate, false);
  }

  /// Writes the scales of a group.
  template <Quantization Of, NumberFormat From>
  static void scalesOfGroup(std::byte *codes, float tensorScale, const std::byte *source) {
    const Bits magnitudes = amaxOfGroup<From, Traits<Of>::kBlock>(source);
    if constexpr (!Traits<Of>::kPowers) {
      quotients<Of>(codes, tensorScale, magnitudes);
    } else {
      const Bits powers = powersOfTwo<Traits<Of>::kCode>(magnitudes);
      uint32_t code[kLanes];
      std::memcpy(code, &powers, sizeof(powers));
      for (uint64_t block = 0; block < kLanes; ++block)
        codes[block] = static_cast<std::byte>(code[block]);
    }
  }

  /// Returns the factors that dequantize the blocks of a group whose scales are quotients.
  template <Quantization Of> static Floats factors(const std::byte *scales, float tensorScale) {
    return Lanes::template load<Traits<Of>::kScale>(scales) * Lanes::broadcast(tensorScale);
  }

  /// Writes the codes of a block whose elements are given by `scale`. Two 4-bit codes are stored in a byte.
  template <Quantization Of, NumberFormat From, class Scale>
  static void storeBlock(std::byte *target, const std::byte *source, bool stream, Scale scale) {
    constexpr uint64_t kBlock = Traits<Of>::kBlock;
    if constexpr (Traits<Of>::kPerByte == 1) {
      // Overflow::infinity converts values beyond the largest one and NaNs to NaN in one step.
      convert<From, Traits<Of>::kCode, kBlock>(target, source, Overflow::infinity, stream, scale);
    } else {
      alignas(kLine) std::byte codes[kBlock];
      convert<From, Traits<Of>::kCode, kBlock>(codes, source, Overflow::saturate, false, scale);
      for (uint64_t i = 0; i < kBlock; i += kPacked)
        Lanes::store8(target + i / 2, Lanes::pack(codes + i), stream);
    }
  }

  /// Writes the elements of a block whose E8M0 scale has this code. The inverse of code 254 is subnormal; powersOfTwo
  /// never gives that code, but given scales may contain it.
  template <Quantization Of, NumberFormat From>
  static void e8m0Block(std::byte *target, const std::byte *source, uint32_t code, bool stream) {
    const Floats inverse = Lanes::broadcast(as<float>(code == 255   ? kQuietNan
                                                      : code == 254 ? 1u << 22
                                                                    : (254 - code) << 23));
    storeBlock<Of, From>(target, source, stream, [&](Floats value) { return value * inverse; });
  }

  /// A separate function, so that its constants use no registers in a loop that rarely calls it.
  template <Quantization Of, NumberFormat From>
  [[gnu::noinline]] static void e8m0BlockApart(std::byte *target, const std::byte *source, uint32_t code, bool stream) {
    e8m0Block<Of, From>(target, source, code, stream);
  }

  /// Quantizes a group of a format with E8M0 scales, which begins `left` elements before the end of the row.
  template <Quantization Of, NumberFormat From>
  static void e8m0Group(std::byte *target, BlockScales scales, const std::byte *source, uint64_t left, bool stream) {
    constexpr uint64_t kBlock = Traits<Of>::kBlock;
    const uint64_t blocks = blocksOfGroup(kBlock, left);
    const Bits codes = powersOfTwo<Traits<Of>::kCode>(amaxOfGroup<From, kBlock>(source));
    uint32_t code[kLanes];
    std::memcpy(code, &codes, sizeof(codes));
    for (uint64_t block = 0; block < blocks; ++block) {
      scales.scales[block] = static_cast<std::byte>(code[block]);
      std::byte *const to = target + block * Traits<Of>::kBlockBytes;
      const std::byte *const from = source + block * kBlock * kItemBytes<From>;
      if constexpr (From == NumberFormat::bf16 && Traits<Of>::kCode == NumberFormat::fp8_e4m3 &&
                    requires { Lanes::template storePairs<kBlock>(to, from, 0, stream); }) {
        if (!Lanes::template storePairs<kBlock>(to, from, code[block], stream))
          e8m0BlockApart<Of, From>(to, from, code[block], stream);
      } else {
        e8m0Block<Of, From>(to, from, code[block], stream);
      }
    }
  }

  /// The same with scales that are quotients.
  template <Quantization Of, NumberFormat From>
  static void quotientGroup(std::byte *target, BlockScales scales, const std::byte *source, uint64_t left,
                            bool stream) {
    constexpr uint64_t kBlock = Traits<Of>::kBlock;
    const uint64_t blocks = blocksOfGroup(kBlock, left);
    alignas(kLine) std::byte codes[Traits<Of>::kGroupScales];
    scalesOfGroup<Of, From>(codes, scales.tensorScale, source);
    std::memcpy(scales.scales, codes, blocks * Traits<Of>::kScaleBytes);
    Floats factor = factors<Of>(codes, scales.tensorScale);
    factor = factor == 0.0f ? Floats{} + as<float>(kInfinity) : factor;
    alignas(kLine) float divisors[kLanes];
    std::memcpy(divisors, &factor, sizeof(factor));
    for (uint64_t block = 0; block < blocks; ++block) {
      const Floats divisor = Lanes::broadcast(divisors[block]);
      storeBlock<Of, From>(target + block * Traits<Of>::kBlockBytes, source + block * kBlock * kItemBytes<From>, stream,
                           [&](Floats value) { return value / divisor; });
    }
  }

  template <Quantization Of, NumberFormat From>
  static void quantize(std::byte *target, BlockScales scales, const std::byte *source, uint64_t count, bool stream) {
    constexpr uint64_t kGroup = Traits<Of>::kGroup, kPerByte = Traits<Of>::kPerByte;
    walk<kGroup, kGroup / kPerByte, kGroup * kItemBytes<From>>(
        target, source, count, stream,
        [scales, count](uint64_t group, std::byte *to, const std::byte *from, bool past) {
          const BlockScales part = {scales.scales + group * Traits<Of>::kGroupScales, scales.tensorScale};
          if constexpr (Traits<Of>::kPowers)
            e8m0Group<Of, From>(to, part, from, count - group * kGroup, past);
          else
            quotientGroup<Of, From>(to, part, from, count - group * kGroup, past);
        });
    if (kPerByte == 2 && count % 2 == 1) // in a NaN block the padding code would be NaN too, but must be 0
      target[count / 2] = static_cast<std::byte>(static_cast<uint8_t>(target[count / 2]) & 0x0F);
  }

  template <Quantization Of, NumberFormat From>
  static void computeScales(BlockScales scales, const std::byte *source, uint64_t count) {
    constexpr uint64_t kGroup = Traits<Of>::kGroup;
    walk<kGroup, Traits<Of>::kGroupScales, kGroup * kItemBytes<From>, Traits<Of>::kScaleBytes>(
        scales.scales, source, count, false,
        [tensorScale = scales.tensorScale](uint64_t, std::byte *to, const std::byte *from, bool) {
          scalesOfGroup<Of, From>(to, tensorScale, from);
        });
  }

  /// Writes the codes as quantize does, with given scales.
  template <Quantization Of, NumberFormat From>
  static void quantizeWithScales(std::byte *target, BlockScales scales, const std::byte *source, uint64_t count,
                                 bool stream) {
    constexpr uint64_t kBlock = Traits<Of>::kBlock;
    walk<kBlock, kBlock, kBlock * kItemBytes<From>>(
        target, source, count, stream,
        [scales = scales.scales](uint64_t block, std::byte *to, const std::byte *from, bool past) {
          e8m0Block<Of, From>(to, from, static_cast<uint32_t>(scales[block]), past);
        });
  }

  /// Writes the elements of a block: its codes times `factor`.
  template <Quantization Of, NumberFormat To>
  static void loadBlock(std::byte *target, const std::byte *source, Floats factor, bool stream) {
    constexpr uint64_t kBlock = Traits<Of>::kBlock;
    const Bits flip = Traits<Of>::kPowers ? Bits{} : signs(factor);
    auto scale = [&](Floats value) { return value * factor; };
    if constexpr (Traits<Of>::kPerByte == 1) {
      convert<Traits<Of>::kCode, To, kBlock>(target, source, Overflow::infinity, stream, scale, flip);
    } else {
      alignas(kLine) std::byte codes[kBlock];
      for (uint64_t i = 0; i < kBlock; i += kPacked) {
        uint64_t packed;
        std::memcpy(&packed, source + i / 2, sizeof(packed));
        Lanes::unpack(codes + i, packed);
      }
      convert<Traits<Of>::kCode, To, kBlock>(target, codes, Overflow::infinity, stream, scale, flip);
    }
  }

  template <Quantization Of, NumberFormat To>
  static void dequantize(std::byte *target, BlockScales scales, const std::byte *source, uint64_t count, bool stream) {
    constexpr uint64_t kBlock = Traits<Of>::kBlock, kBytes = Traits<Of>::kBlockBytes, kGroup = Traits<Of>::kGroup;
    if constexpr (!Traits<Of>::kPowers)
      walk<kGroup, kGroup * kItemBytes<To>, kBytes * kLanes>(
          target, source, count, stream,
          [scales, count](uint64_t group, std::byte *to, const std::byte *from, bool past) {
            alignas(kLine) std::byte codes[Traits<Of>::kGroupScales] = {};
            const uint64_t blocks = blocksOfGroup(kBlock, count - group * kGroup);
            std::memcpy(codes, scales.scales + group * Traits<Of>::kGroupScales, blocks * Traits<Of>::kScaleBytes);
            const Floats factor = factors<Of>(codes, scales.tensorScale);
            alignas(kLine) float each[kLanes];
            std::memcpy(each, &factor, sizeof(factor));
            for (uint64_t block = 0; block < blocks; ++block)
              loadBlock<Of, To>(to + block * kBlock * kItemBytes<To>, from + block * kBytes,
                                Lanes::broadcast(each[block]), past);
          });
    else
      walk<kBlock, kBlock * kItemBytes<To>, kBytes>(
          target, source, count, stream,
          [scales = scales.scales](uint64_t block, std::byte *to, const std::byte *from, bool past) {
            const auto code = static_cast<uint32_t>(scales[block]);
            loadBlock<Of, To>(to, from,
                              Lanes::broadcast(as<float>(code == 255 ? kQuietNan
                                                         : code == 0 ? 1u << 22
                                                                     : code << 23)),
                              past);
          });
  }

  template <Quantization Of> static constexpr BlockKernels blockKernels() {
    using enum NumberFormat;
    if constexpr (formatOf(Of).blockRows > 1) {
      return {};
    } else {
      BlockKernels kernels = {{quantize<Of, fp32>, quantize<Of, bf16>, quantize<Of, fp16>},
                              {computeScales<Of, fp32>, computeScales<Of, bf16>, computeScales<Of, fp16>},
                              {},
                              {dequantize<Of, fp32>, dequantize<Of, bf16>, dequantize<Of, fp16>}};
      if constexpr (formatOf(Of).codesPerByte() == 1) {
        kernels.quantizeWithScales[0] = quantizeWithScales<Of, fp32>;
        kernels.quantizeWithScales[1] = quantizeWithScales<Of, bf16>;
        kernels.quantizeWithScales[2] = quantizeWithScales<Of, fp16>;
      }
      return kernels;
    }
  }

  /// Adds the kernels of the formats from number `From` on.
  template <size_t From = 0> static constexpr void addBlockKernels(ConvertKernels &kernels) {
    if constexpr (From < std::size(kQuantizedFormats)) {
      kernels.blocks[From] = blockKernels<static_cast<Quantization>(From)>();
      addBlockKernels<From + 1>(kernels);
    }
  }

  static constexpr ConvertKernels table() {
    using enum NumberFormat;
    ConvertKernels kernels = {
        {{nullptr, multiply<fp32, bf16>, multiply<fp32, fp16>, multiply<fp32, fp8_e4m3>, multiply<fp32, fp8_e5m2>},
         {multiply<bf16, fp32>, nullptr, multiply<bf16, fp16>, multiply<bf16, fp8_e4m3>, multiply<bf16, fp8_e5m2>},
         {multiply<fp16, fp32>, multiply<fp16, bf16>, nullptr, multiply<fp16, fp8_e4m3>, multiply<fp16, fp8_e5m2>},
         {multiply<fp8_e4m3, fp32>, multiply<fp8_e4m3, bf16>, multiply<fp8_e4m3, fp16>, nullptr,
          multiply<fp8_e4m3, fp8_e5m2>},
         {multiply<fp8_e5m2, fp32>, multiply<fp8_e5m2, bf16>, multiply<fp8_e5m2, fp16>, multiply<fp8_e5m2, fp8_e4m3>,
          nullptr}},
        {divide<fp32>, divide<bf16>, divide<fp16>},
        {amax<fp32>, amax<bf16>, amax<fp16>},
        {}};
    addBlockKernels(kernels);
    return kernels;
  }
};

} // namespace

} // namespace reshard::kernels
