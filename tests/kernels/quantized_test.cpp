// SPDX-License-Identifier: Apache-2.0
// Conversions of ranges of quantized matrices, compared with conversions of whole matrices (kernels/cpu/convert.h), at
// every level of this CPU: in parts, in any order, at any alignment.

#include "kernels/cpu/quantized.h"
#include "kernels/scales.h"
#include "tests/kernels/support.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>

using namespace reshard;
using namespace reshard::test;

namespace {

constexpr std::byte kUntouched{0x5A}; // the initial bytes of Guarded

/// Quantized matrices, their elements, and the expected codes and scales.
struct Sample {
  Quantized shape; ///< without memory
  Bytes wide, codes, scales, plainScales, tensorScales, back;
};

/// Elements with a similar magnitude within each block; some blocks are zero or subnormal, or have an infinity or a
/// NaN.
Bytes blocks(std::mt19937_64 &random, const Quantized &of) {
  const BlockShape block = blockShape(of.format);
  const uint64_t across = (of.columns + block.columns - 1) / block.columns;
  std::vector<float> widths(of.blockRows() * across);
  std::vector<bool> infinite(widths.size());
  const int least = of.wide == NumberFormat::fp16 ? -24 : -140, most = of.wide == NumberFormat::fp16 ? 6 : 116;
  for (uint64_t i = 0; i < widths.size(); ++i) {
    widths[i] =
        random() % 8 ? std::ldexp(1.0f, least + static_cast<int>(random() % static_cast<uint64_t>(most - least))) : 0;
    infinite[i] = random() % 8 == 0;
  }
  std::normal_distribution<float> normal;
  Bytes bytes(of.elements() * itemBytes(of.wide));
  for (uint64_t i = 0; i < of.elements(); ++i) {
    const uint64_t row = i / of.columns,
                   blockRow = row / of.rows * (of.blockRows() / of.matrices) + row % of.rows / block.rows;
    const uint64_t index = blockRow * across + i % of.columns / block.columns;
    float value = (random() % 16 ? normal(random) : 448) * widths[index];
    if (random() % 16 == 0)
      value = -0.0f;
    if (infinite[index] && random() % (block.rows * block.columns) < 2)
      value = random() % 2 ? -INFINITY : NAN;
    putCode(bytes.data(), of.wide, i, encode(of.wide, value, Overflow::saturate));
  }
  return bytes;
}

/// Quantizes whole matrices, one by one.
Sample sample(std::mt19937_64 &random, Quantized shape) {
  Sample of;
  of.wide = blocks(random, shape);
  of.codes.resize(shape.codeBytes());
  of.back.resize(of.wide.size());
  const uint64_t item = itemBytes(shape.wide), elements = shape.rows * shape.columns;
  const uint64_t codeBytes = shape.codeBytes() / std::max<uint64_t>(shape.matrices, 1);
  Quantized plain = shape;
  plain.layout = ScaleLayout::plain;
  of.plainScales.resize(shape.matrices * plain.scaleBytes());
  of.scales.assign(shape.matrices * shape.scaleBytes(), kUntouched);
  of.tensorScales.resize(shape.matrices * sizeof(float));
  const bool hasTensorScale = formatOf(shape.format).rule == ScaleRule::tensorQuotient;
  for (uint64_t matrix = 0; matrix < shape.matrices; ++matrix) {
    const float tensorScale = matrix % 4 == 3 ? NAN : std::ldexp(1.5f, static_cast<int>(random() % 60) - 40);
    std::memcpy(of.tensorScales.data() + matrix * sizeof(float), &tensorScale, sizeof(float));
    std::byte *const scales = of.plainScales.data() + matrix * plain.scaleBytes();
    const BlockMatrix whole = {.format = shape.format,
                               .wide = shape.wide,
                               .rows = shape.rows,
                               .columns = shape.columns,
                               .wideStride = static_cast<int64_t>(shape.columns * item),
                               .codeStride = static_cast<int64_t>(codeBytes / std::max<uint64_t>(shape.rows, 1)),
                               .codes = of.codes.data() + matrix * codeBytes,
                               .scales = scales,
                               .tensorScale = hasTensorScale ? tensorScale : 1};
    quantize(whole, of.wide.data() + matrix * elements * item);
    dequantize(whole, of.back.data() + matrix * elements * item);
    const ScaleShape scaleShape = shape.scaleShape();
    std::byte *ours = of.scales.data() + matrix * shape.scaleBytes();
    if (shape.layout == ScaleLayout::plain)
      std::copy_n(scales, plain.scaleBytes(), ours);
    else
      for (uint64_t i = 0; i < shape.scaleBytes(); ++i)
        if (const ScalePosition at = scalePosition(shape.layout, scaleShape, i);
            at.row < scaleShape.rows && at.column < scaleShape.columns)
          ours[i] = scales[at.row * scaleShape.columns + at.column];
  }
  of.shape = shape;
  return of;
}

bool inRows(Quantization format) { return formatOf(format).blockRows == 1; }
bool ofOneByte(Quantization format) { return formatOf(format).codesPerByte() == 1; }

/// Calls test(sample, conversion, random) for matrices of each format that has a property, with all options. The scales
/// of the long rows do not fit in the conversion's buffer.
template <class Test> void forSamples(bool (*chosen)(Quantization), Test test) {
  std::mt19937_64 random(11);
  for (const QuantizedFormat &row : kQuantizedFormats)
    for (const NumberFormat wide : kWide)
      for (const ScaleLayout layout : {ScaleLayout::plain, ScaleLayout::swizzled, ScaleLayout::packed}) {
        const Quantization format = row.number;
        const BlockShape block = blockShape(format);
        if (!chosen(format) || (layout != ScaleLayout::plain && row.scaleBytes() > 1))
          continue;
        // Columns must be whole blocks if blocks have one row.
        const uint64_t unit = block.rows > 1 ? 1 : block.columns;
        std::vector<std::array<uint64_t, 3>> shapes = {{1, 1, 1},    {5, 130, 3}, {2, 7, 13},
                                                       {3, 1, 1030}, {0, 3, 1},   {2, 0, 4}};
        if (block.rows > 1)
          shapes = {{1, 1, 1},   {1, 128, 128}, {3, 130, 301}, {2, 5, 7}, {2, 3, 257 * block.columns + 5},
                    {2, 257, 3}, {0, 3, 1},     {2, 0, 4}};
        if (block.rows > 1 && layout != ScaleLayout::plain)
          shapes.push_back({1, 2, 1030 * block.columns + 5});
        for (const auto &[matrices, rows, columns] : shapes) {
          SCOPED_TRACE(testing::Message()
                       << row.name << " from " << static_cast<int>(wide) << ", layout " << static_cast<int>(layout)
                       << ", " << matrices << " of " << rows << " x " << columns * unit);
          Quantized shape;
          shape.format = format;
          shape.wide = wide;
          shape.layout = layout;
          shape.matrices = matrices;
          shape.rows = rows;
          shape.columns = columns * unit;
          const Sample of = sample(random, shape);
          atEveryLevel([&](ConvertOptions how) { test(of, how, random); });
          if (testing::Test::HasFatalFailure())
            return;
        }
      }
}

/// Returns parts of [0, count) in random order, split at multiples of `unit`.
std::vector<std::pair<uint64_t, uint64_t>> parts(std::mt19937_64 &random, uint64_t count, uint64_t unit) {
  std::vector<uint64_t> cuts = {0, count};
  for (uint64_t i = random() % 6; count > 0 && i > 0; --i) {
    cuts.push_back(random() % (count / unit) * unit);
    cuts.push_back(std::min(cuts.back() + random() % 40 * unit, count)); // a second cut nearby: also short parts
  }
  std::sort(cuts.begin(), cuts.end());
  std::vector<std::pair<uint64_t, uint64_t>> parts;
  for (uint64_t i = 0; i + 1 < cuts.size(); ++i)
    parts.emplace_back(cuts[i], cuts[i + 1] - cuts[i]);
  std::shuffle(parts.begin(), parts.end(), random);
  return parts;
}

/// Memory for codes and scales; the scales are not aligned.
struct Target {
  Guarded codes, scales;
  Quantized matrices;
  explicit Target(const Sample &of) : codes(of.codes.size(), 0), scales(of.scales.size(), 3), matrices(of.shape) {
    matrices.codes = codes.data();
    matrices.scales = scales.data();
    matrices.tensorScales = const_cast<std::byte *>(of.tensorScales.data());
  }
};

Quantized source(const Sample &of) {
  Quantized matrices = of.shape;
  matrices.codes = const_cast<std::byte *>(of.codes.data());
  matrices.scales = const_cast<std::byte *>(of.scales.data());
  matrices.tensorScales = const_cast<std::byte *>(of.tensorScales.data());
  return matrices;
}

bool all(Quantization) { return true; }

} // namespace

TEST(Quantized, Sizes) {
  Quantized of;
  of.matrices = 2, of.rows = 130, of.columns = 160;
  EXPECT_EQ(of.codeBytes(), 2u * 130 * 160);
  EXPECT_EQ(of.scaleBytes(), 130u * 5);
  EXPECT_EQ(of.blockRows(), 260u);
  of.layout = ScaleLayout::swizzled;
  EXPECT_EQ(of.scaleBytes(), 2u * 2 * 512); // 256 x 8
  of.format = Quantization::nvfp4;
  EXPECT_EQ(of.codeBytes(), 130u * 160);
  EXPECT_EQ(of.scaleBytes(), 2u * 3 * 512); // 256 x 12
  of.format = Quantization::block_fp8, of.layout = ScaleLayout::plain;
  EXPECT_EQ(of.scaleBytes(), 2u * 2 * 4);
  EXPECT_EQ(of.blockRows(), 4u);
}

TEST(Quantized, RowsOfBlocksEqualTheWhole) {
  forSamples(all, [](const Sample &of, ConvertOptions how, std::mt19937_64 &random) {
    Target both(of), scales(of);
    for (const auto &[first, count] : parts(random, of.shape.blockRows(), 1)) {
      quantizeRows(both.matrices, of.wide.data(), first, count, how);
      scaleRows(scales.matrices, of.wide.data(), first, count, how);
    }
    ASSERT_TRUE(both.scales.contents() == of.scales);
    ASSERT_TRUE(both.codes.contents() == of.codes);
    ASSERT_TRUE(scales.scales.contents() == of.scales);
    ASSERT_TRUE(scales.codes.contents() == Bytes(of.codes.size(), kUntouched));
  });
}

TEST(Quantized, BlocksEqualTheWhole) {
  forSamples(inRows, [](const Sample &of, ConvertOptions how, std::mt19937_64 &random) {
    Target target(of);
    for (const auto &[first, count] : parts(random, of.shape.elements(), blockShape(of.shape.format).columns)) {
      const auto part = of.wide.begin() + static_cast<long>(first * itemBytes(of.shape.wide));
      const Bytes wide(part, part + static_cast<long>(count * itemBytes(of.shape.wide)));
      if (count > 0)
        quantizeBlocks(target.matrices, {first, count}, wide.data(), how);
    }
    ASSERT_TRUE(target.scales.contents() == of.scales);
    ASSERT_TRUE(target.codes.contents() == of.codes);
  });
}

TEST(Quantized, BlocksOfZeros) {
  forSamples(inRows, [](const Sample &of, ConvertOptions how, std::mt19937_64 &random) {
    Target target(of), expected(of);
    const Bytes zeros(of.wide.size());
    const auto all = parts(random, of.shape.elements(), blockShape(of.shape.format).columns);
    for (uint64_t i = 0; i < all.size(); ++i) {
      const auto [first, count] = all[i];
      const std::byte *wide = i % 2 ? of.wide.data() + first * itemBytes(of.shape.wide) : nullptr;
      quantizeBlocks(target.matrices, {first, count}, wide, how);
      quantizeBlocks(expected.matrices, {first, count}, wide ? wide : zeros.data(), how);
    }
    ASSERT_TRUE(target.scales.contents() == expected.scales.contents());
    ASSERT_TRUE(target.codes.contents() == expected.codes.contents());
  });
}

TEST(Quantized, EncodeElementsWithGivenScales) {
  forSamples(ofOneByte, [](const Sample &of, ConvertOptions how, std::mt19937_64 &random) {
    for (const auto &[first, count] : parts(random, of.shape.elements(), 1)) {
      const uint64_t item = itemBytes(of.shape.wide);
      Guarded codes(count, random() % 2 * 5);
      const Bytes wide(of.wide.begin() + static_cast<long>(first * item),
                       of.wide.begin() + static_cast<long>((first + count) * item));
      encodeElements(source(of), {first, count}, codes.data(), wide.data(), how);
      const auto part = of.codes.begin() + static_cast<long>(first);
      ASSERT_TRUE(codes.contents() == Bytes(part, part + static_cast<long>(count))) << first << " + " << count;
    }
  });
}

TEST(Quantized, DecodeElements) {
  forSamples(all, [](const Sample &of, ConvertOptions how, std::mt19937_64 &random) {
    for (const auto &[first, count] : parts(random, of.shape.elements(), 1)) {
      const uint64_t item = itemBytes(of.shape.wide);
      Guarded wide(count * item, random() % 2 * 6);
      decodeElements(source(of), {first, count}, wide.data(), how);
      const auto part = of.back.begin() + static_cast<long>(first * item);
      ASSERT_TRUE(wide.contents() == Bytes(part, part + static_cast<long>(count * item))) << first << " + " << count;
    }
  });
}

// Scales that quantization would not give: too small, too large, the maximum.
TEST(Quantized, ElementsWithArbitraryScales) {
  std::mt19937_64 random(12);
  for (const NumberFormat wide : kWide) {
    Quantized shape;
    shape.wide = wide, shape.rows = 256, shape.columns = kMxBlock;
    Bytes elements(shape.elements() * itemBytes(wide)), scales(shape.rows), expected(shape.elements());
    std::normal_distribution<float> normal;
    for (uint64_t row = 0; row < shape.rows; ++row) {
      scales[row] = static_cast<std::byte>(row);
      for (uint64_t i = row * kMxBlock; i < (row + 1) * kMxBlock; ++i)
        putCode(
            elements.data(), wide, i,
            encode(wide, std::ldexp(normal(random), static_cast<int>(row + random() % 24) - 139), Overflow::saturate));
    }
    for (uint64_t i = 0; i < expected.size(); ++i) {
      const float value = decode(wide, codeAt(elements.data(), wide, i));
      const double scaled = std::fabs(static_cast<double>(value)) / decodeE8m0(static_cast<uint8_t>(i / kMxBlock));
      const uint32_t code = encode(NumberFormat::fp8_e4m3, static_cast<float>(scaled), Overflow::infinity) & 0x7F;
      expected[i] = static_cast<std::byte>(code | (std::signbit(value) ? 0x80 : 0));
    }
    shape.scales = scales.data();
    atEveryLevel([&](ConvertOptions how) {
      Guarded codes(expected.size(), 0);
      encodeElements(shape, {0, expected.size()}, codes.data(), elements.data(), how);
      ASSERT_TRUE(codes.contents() == expected);
    });
  }
}

TEST(Quantized, ScaleLayoutsRoundTrip) {
  std::mt19937_64 random(13);
  for (const QuantizedFormat &format : kQuantizedFormats)
    for (const ScaleLayout layout : {ScaleLayout::plain, ScaleLayout::swizzled, ScaleLayout::packed}) {
      if (format.scaleBytes() > 1)
        continue;
      Quantized shape;
      shape.format = format.number, shape.layout = layout;
      shape.matrices = 3, shape.rows = 131, shape.columns = 9 * blockShape(format.number).columns;
      Sample of = sample(random, shape);
      Guarded plain(of.plainScales.size(), 0), laidOut(of.scales.size(), 0);
      toPlainScales(source(of), plain.data());
      EXPECT_TRUE(plain.contents() == of.plainScales);
      shape.scales = laidOut.data();
      fromPlainScales(shape, of.plainScales.data());
      shape.scales = of.scales.data();
      clearScalePadding(shape);
      EXPECT_TRUE(laidOut.contents() == of.scales) << format.name << ", layout " << static_cast<int>(layout);
    }
}
