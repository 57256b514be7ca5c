// SPDX-License-Identifier: Apache-2.0
// Formats with blocks in one row are converted by the row kernels of the CPU's level (convert_rows.h); blocks of
// several rows are converted here.
#include "kernels/cpu/convert.h"

#include "kernels/codes.h"
#include "kernels/cpu/convert_rows.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>

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

constinit const ConvertKernels kConvertPortable = Rows<Single>::table();

const ConvertKernels &kernels(CpuLevel level) {
#if defined(__x86_64__)
  if (level >= CpuLevel::Avx512)
    return kConvertAvx512;
  if (level >= CpuLevel::Avx2)
    return kConvertAvx2;
#endif
  (void)level;
  return kConvertPortable;
}

size_t wideIndex(NumberFormat wide) {
  assert(static_cast<size_t>(wide) < kWideFormats);
  return static_cast<size_t>(wide);
}

/// Streaming needs a target that is aligned to whole lines; other targets are written with usual stores.
bool streams(const ConvertOptions &how, const std::byte *target) {
  return how.stream && how.level != CpuLevel::Portable && reinterpret_cast<uintptr_t>(target) % kLine == 0;
}

/// Ends a conversion, so that another thread may read the target.
void finish(const ConvertOptions &how) {
  if (how.stream && how.finish)
    finishStreaming();
}

/// Scales of blocks of several rows. The row kernels handle the scales of other formats.
constexpr bool scalesAreSupported() {
  for (const QuantizedFormat &format : kQuantizedFormats)
    if (format.blockRows > 1 && (format.code != CodeFormat::fp8_e4m3 ||
                                 !((format.rule == ScaleRule::quotient && format.scale == ScaleFormat::fp32) ||
                                   (format.rule == ScaleRule::powerOfTwo && format.scale == ScaleFormat::e8m0))))
      return false;
  return true;
}
static_assert(scalesAreSupported(), "storeScale and encodeBlock have one case for each kind of scale");

/// Writes the scale of a block from the fp32 bits of its amax.
void storeScale(const QuantizedFormat &format, std::byte *at, uint32_t amaxBits) {
  const NumberFormat code = numberFormat(format.code);
  const uint32_t scale =
      format.scale == ScaleFormat::e8m0 ? powerOfTwo(amaxBits, code) : quotientOrOne(amaxBits, scaleDivisor(code));
  std::memcpy(at, &scale, static_cast<size_t>(format.scaleBytes()));
}

/// Reads the scale of a block: fp32 bits, or the code of an E8M0 scale.
uint32_t loadScale(const QuantizedFormat &format, const std::byte *at) {
  uint32_t scale = 0;
  std::memcpy(&scale, at, static_cast<size_t>(format.scaleBytes()));
  return scale;
}

/// A block of a BlockMatrix, and its offsets there.
struct Block {
  uint64_t rows, columns;
  int64_t wide, code; // bytes
  std::byte *scale;
};

/// Calls visit(block) for each block.
template <class Visit> void forBlocks(const BlockMatrix &matrix, const Visit &visit) {
  const QuantizedFormat &format = formatOf(matrix.format);
  const auto height = static_cast<uint64_t>(format.blockRows), width = static_cast<uint64_t>(format.blockColumns);
  std::byte *scale = matrix.scales;
  for (uint64_t row = 0; row < matrix.rows; row += height)
    for (uint64_t column = 0; column < matrix.columns; column += width, scale += format.scaleBytes())
      visit(Block{std::min(height, matrix.rows - row), std::min(width, matrix.columns - column),
                  static_cast<int64_t>(row) * matrix.wideStride + static_cast<int64_t>(column * itemBytes(matrix.wide)),
                  static_cast<int64_t>(row) * matrix.codeStride + static_cast<int64_t>(column), scale});
}

/// Writes the codes of a block: elements / scale. A division by a power of two is a multiplication, which is faster.
void encodeBlock(const BlockMatrix &matrix, const Block &block, const std::byte *wide, const ConvertOptions &how) {
  const ConvertKernels &level = kernels(how.level);
  const QuantizedFormat &format = formatOf(matrix.format);
  const uint32_t scale = loadScale(format, block.scale);
  const bool powers = format.scale == ScaleFormat::e8m0;
  const auto convert = powers ? level.multiply[wideIndex(matrix.wide)][static_cast<size_t>(NumberFormat::fp8_e4m3)]
                              : level.divide[wideIndex(matrix.wide)];
  const float factor = powers ? inverseE8m0(scale) : std::bit_cast<float>(scale);
  for (uint64_t row = 0; row < block.rows; ++row) {
    std::byte *const to = matrix.codes + block.code + static_cast<int64_t>(row) * matrix.codeStride;
    convert(to, wide + block.wide + static_cast<int64_t>(row) * matrix.wideStride, block.columns, factor,
            {Overflow::saturate, streams(how, to)});
  }
}

void decodeBlock(const BlockMatrix &matrix, const Block &block, std::byte *wide, const ConvertOptions &how) {
  const QuantizedFormat &format = formatOf(matrix.format);
  const auto convert = kernels(how.level).multiply[static_cast<size_t>(NumberFormat::fp8_e4m3)][wideIndex(matrix.wide)];
  const uint32_t scale = loadScale(format, block.scale);
  const float factor = format.scale == ScaleFormat::e8m0 ? e8m0(scale) : std::bit_cast<float>(scale);
  for (uint64_t row = 0; row < block.rows; ++row) {
    std::byte *const to = wide + block.wide + static_cast<int64_t>(row) * matrix.wideStride;
    convert(to, matrix.codes + block.code + static_cast<int64_t>(row) * matrix.codeStride, block.columns, factor,
            {Overflow::infinity, streams(how, to)});
  }
}

/// Calls visit(offset of the elements, offset of the codes, scales) for each row of a matrix whose blocks have one row.
template <class Visit> void forRows(const BlockMatrix &matrix, const Visit &visit) {
  const auto block = static_cast<uint64_t>(formatOf(matrix.format).blockColumns),
             scales =
                 (matrix.columns + block - 1) / block * static_cast<uint64_t>(formatOf(matrix.format).scaleBytes());
  for (uint64_t row = 0; row < matrix.rows; ++row)
    visit(static_cast<int64_t>(row) * matrix.wideStride, static_cast<int64_t>(row) * matrix.codeStride,
          matrix.scales + row * scales);
}

bool blocksInRows(const BlockMatrix &matrix) { return formatOf(matrix.format).blockRows == 1; }

const BlockKernels &blockKernels(const BlockMatrix &matrix, const ConvertOptions &how) {
  return kernels(how.level).blocks[static_cast<size_t>(matrix.format)];
}

uint32_t amaxBits(const BlockMatrix &matrix, const Block &block, const std::byte *wide, const ConvertOptions &how) {
  return kernels(how.level).amax[wideIndex(matrix.wide)](wide + block.wide, block.rows, block.columns,
                                                         matrix.wideStride);
}

} // namespace

void cast(const Cast &cast, const ConvertOptions &how) {
  const auto multiply = kernels(how.level).multiply[static_cast<size_t>(cast.from)][static_cast<size_t>(cast.to)];
  assert(multiply);
  multiply(cast.target, cast.source, cast.count, 1, {cast.overflow, streams(how, cast.target)});
  finish(how);
}

bool mayOverflow(NumberFormat from, NumberFormat to) {
  const float most = decode(from, encoding(from).maxFinite);
  return std::bit_cast<uint32_t>(most) >= firstBeyond(to);
}

bool anyBeyond(NumberFormat to, NumberFormat from, const std::byte *source, uint64_t count, const ConvertOptions &how) {
  const uint32_t first = firstBeyond(to), last = lastBeyond(to);
  if (static_cast<size_t>(from) < kWideFormats)
    if (const uint32_t most = kernels(how.level).amax[wideIndex(from)](source, 1, count, 0); most <= last)
      return most >= first;
  // An element that is not finite hides the others; formats of 8 bits have no amax.
  const uint64_t item = itemBytes(from);
  for (uint64_t i = 0; i < count; ++i) {
    uint32_t code = 0;
    std::memcpy(&code, source + i * item, item);
    const uint32_t magnitude = std::bit_cast<uint32_t>(decode(from, code)) & kMagnitudeBits;
    if (magnitude >= first && magnitude <= last)
      return true;
  }
  return false;
}

float amax(NumberFormat wide, const std::byte *source, const Matrix &matrix, const ConvertOptions &how) {
  const uint32_t bits =
      kernels(how.level).amax[wideIndex(wide)](source, matrix.rows, matrix.columns, matrix.sourceStride);
  return std::bit_cast<float>(bits < kInfinityBits ? bits : kNanBits);
}

void quantize(const BlockMatrix &target, const std::byte *wide, const ConvertOptions &how) {
  if (blocksInRows(target)) {
    const auto kernel = blockKernels(target, how).quantize[wideIndex(target.wide)];
    forRows(target, [&](int64_t from, int64_t to, std::byte *scales) {
      std::byte *const codes = target.codes + to;
      kernel(codes, {scales, target.tensorScale}, wide + from, target.columns, streams(how, codes));
    });
  } else {
    forBlocks(target, [&](const Block &block) {
      storeScale(formatOf(target.format), block.scale, amaxBits(target, block, wide, how));
      encodeBlock(target, block, wide, how);
    });
  }
  finish(how);
}

void computeScales(const BlockMatrix &target, const std::byte *wide, const ConvertOptions &how) {
  if (blocksInRows(target)) {
    const auto kernel = blockKernels(target, how).computeScales[wideIndex(target.wide)];
    return forRows(target, [&](int64_t from, int64_t, std::byte *scales) {
      kernel({scales, target.tensorScale}, wide + from, target.columns);
    });
  }
  // Row by row, in memory order: block by block takes twice as long (docs/performance.md).
  const QuantizedFormat &format = formatOf(target.format);
  const auto height = static_cast<uint64_t>(format.blockRows), width = static_cast<uint64_t>(format.blockColumns);
  const uint64_t blocks = (target.columns + width - 1) / width;
  constexpr uint64_t kAtOnce = 256; // blocks
  std::byte *scale = target.scales;
  for (uint64_t top = 0; top < target.rows; top += height)
    for (uint64_t left = 0; left < blocks; left += kAtOnce) {
      const uint64_t some = std::min(kAtOnce, blocks - left);
      uint32_t most[kAtOnce] = {};
      for (uint64_t row = top; row < std::min(top + height, target.rows); ++row)
        for (uint64_t b = 0; b < some; ++b) {
          const uint64_t column = (left + b) * width;
          const Block part = {1, std::min(width, target.columns - column),
                              static_cast<int64_t>(row) * target.wideStride +
                                  static_cast<int64_t>(column * itemBytes(target.wide)),
                              0, nullptr};
          most[b] = std::max(most[b], amaxBits(target, part, wide, how));
        }
      for (uint64_t b = 0; b < some; ++b, scale += format.scaleBytes())
        storeScale(format, scale, most[b]);
    }
}

void quantizeWithScales(const BlockMatrix &target, const std::byte *wide, const ConvertOptions &how) {
  assert(formatOf(target.format).codesPerByte() == 1);
  if (blocksInRows(target)) {
    const auto kernel = blockKernels(target, how).quantizeWithScales[wideIndex(target.wide)];
    forRows(target, [&](int64_t from, int64_t to, std::byte *scales) {
      std::byte *const codes = target.codes + to;
      kernel(codes, {scales, target.tensorScale}, wide + from, target.columns, streams(how, codes));
    });
  } else {
    forBlocks(target, [&](const Block &block) { encodeBlock(target, block, wide, how); });
  }
  finish(how);
}

void dequantize(const BlockMatrix &source, std::byte *wide, const ConvertOptions &how) {
  if (blocksInRows(source)) {
    const auto kernel = blockKernels(source, how).dequantize[wideIndex(source.wide)];
    forRows(source, [&](int64_t to, int64_t from, std::byte *scales) {
      std::byte *const elements = wide + to;
      kernel(elements, {scales, source.tensorScale}, source.codes + from, source.columns, streams(how, elements));
    });
  } else {
    forBlocks(source, [&](const Block &block) { decodeBlock(source, block, wide, how); });
  }
  finish(how);
}

float nvfp4TensorScale(float amax) {
  const float scale = amax / (largest(NumberFormat::fp8_e4m3) * largest(NumberFormat::fp4_e2m1));
  return scale == 0 ? 1 : scale;
}

} // namespace reshard::kernels
