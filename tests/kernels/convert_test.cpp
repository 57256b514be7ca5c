// The conversions at every level of this CPU, compared with the definitions of formats.h, element by element and block
// by block; and the definitions, compared with the host functions of CUDA's headers if the build has them.

#include "kernels/convert.h"
#include "kernels/scales.h"
#include "tests/kernels/support.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#ifdef RESHARD_CUDA_HEADERS
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#endif

using namespace reshard::test;

namespace {

constexpr Format kStored[] = {Format::fp32, Format::bf16, Format::fp16, Format::fp8_e4m3, Format::fp8_e5m2};

/// Samples of fp32: every exponent and sign, values around the ties of each narrower format, and random bits.
std::vector<float> floatSample() {
  std::mt19937_64 random(1);
  std::vector<float> values;
  auto add = [&](uint32_t bits) { values.push_back(std::bit_cast<float>(bits)); };
  for (uint32_t top = 0; top < 512; ++top) { // sign and exponent
    for (uint32_t mantissa : {0u, 1u, 0x400000u, 0x7FFFFFu})
      add(top << 23 | mantissa);
    // The number of dropped mantissa bits: of each narrower format, and of its subnormal values.
    for (uint32_t drop = 12; drop <= 23; ++drop)
      for (uint32_t i = 0; i < 8; ++i) {
        const uint32_t tie = (static_cast<uint32_t>(random()) << drop | 1u << (drop - 1)) & 0x7FFFFF;
        for (uint32_t near : {tie - 1, tie, tie + 1})
          add(top << 23 | (near & 0x7FFFFF));
      }
  }
  for (int i = 0; i < 200000; ++i)
    add(static_cast<uint32_t>(random()));
  return values;
}

/// All codes of a format; the sample for fp32.
Bytes everyCode(Format format) {
  if (format == Format::fp32) {
    const std::vector<float> values = floatSample();
    Bytes bytes(values.size() * sizeof(float));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  const uint32_t count = 1u << encoding(format).bits;
  Bytes bytes(count * itemBytes(format));
  for (uint32_t code = 0; code < count; ++code)
    putCode(bytes.data(), format, code, code);
  return bytes;
}

/// Elements whose magnitudes are similar within a block; some are zero, extreme or not finite.
Bytes randomElements(std::mt19937_64 &random, Format format, uint64_t count) {
  Bytes bytes(count * itemBytes(format));
  std::normal_distribution<float> normal;
  float width = 1;
  for (uint64_t i = 0; i < count; ++i) {
    if (i % 16 == 0)
      width = std::ldexp(1.0f,
                         random() % 8 ? static_cast<int>(random() % 40) - 20 : static_cast<int>(random() % 254) - 130);
    float value = random() % 16 ? normal(random) * width : random() % 2 ? 448 * width : -0.0f;
    if (random() % 2000 == 0)
      value = random() % 2 ? -INFINITY : NAN;
    putCode(bytes.data(), format, i, encode(format, value, Overflow::saturate));
  }
  return bytes;
}

float magnitudeAt(const std::byte *elements, Format format, uint64_t i) {
  return std::fabs(decode(format, codeAt(elements, format, i)));
}

/// Returns the sign of element `i` of format `format`, at the sign bit of format `of`.
uint32_t signAt(const std::byte *elements, Format format, uint64_t i, Format of) {
  return codeAt(elements, format, i) & encoding(format).sign() ? encoding(of).sign() : 0;
}

float largestOf(const std::byte *elements, Format format, uint64_t first, uint64_t end) {
  float most = 0;
  for (uint64_t i = first; i < end; ++i) {
    const float magnitude = magnitudeAt(elements, format, i);
    if (!std::isfinite(magnitude))
      return NAN;
    most = std::max(most, magnitude);
  }
  return most;
}

} // namespace

TEST(Formats, CodesRoundTrip) {
  for (const Format format : {Format::bf16, Format::fp16, Format::fp8_e4m3, Format::fp8_e5m2, Format::fp4_e2m1})
    for (uint32_t code = 0; code < 1u << encoding(format).bits; ++code) {
      const float value = decode(format, code);
      const uint32_t sign = code & encoding(format).sign();
      ASSERT_EQ(encode(format, value, Overflow::infinity), std::isnan(value) ? sign | encoding(format).nan : code)
          << code;
    }
  EXPECT_EQ(decode(Format::fp8_e4m3, 0x7E), 448);
  EXPECT_EQ(decode(Format::fp8_e5m2, 0x7B), 57344);
  EXPECT_EQ(decode(Format::fp4_e2m1, 0xF), -6);
  EXPECT_EQ(decode(Format::fp8_e4m3, 1), 0x1p-9f);
  EXPECT_EQ(decodeE8m0(0), 0x1p-127f);
  EXPECT_EQ(decodeE8m0(254), 0x1p127f);
  EXPECT_TRUE(std::isnan(decodeE8m0(255)));
}

TEST(Formats, Overflow) {
  for (const float value : {465.0f, 1e30f, INFINITY}) {
    EXPECT_EQ(encode(Format::fp8_e4m3, -value, Overflow::saturate), 0xFEu);
    EXPECT_EQ(encode(Format::fp8_e4m3, -value, Overflow::infinity), 0xFFu);
    EXPECT_EQ(encode(Format::fp4_e2m1, -value, Overflow::infinity), 0xFu);
  }
  EXPECT_EQ(encode(Format::fp8_e4m3, 464, Overflow::infinity), 0x7Eu); // halfway between 448 and 480; 448 is even
  EXPECT_EQ(encode(Format::fp8_e5m2, 61440, Overflow::saturate), 0x7Bu);
  EXPECT_EQ(encode(Format::fp8_e5m2, 61440, Overflow::infinity), 0x7Cu);
  EXPECT_EQ(encode(Format::fp16, 1e6, Overflow::saturate), 0x7C00u);
}

TEST(Formats, EqualCudaHeaders) {
#ifndef RESHARD_CUDA_HEADERS
  GTEST_SKIP() << "NOT TESTED: the build did not find cuda_fp8.h and cuda_fp4.h";
#else
  auto raw = [](const auto &value) {
    uint16_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return static_cast<uint32_t>(bits);
  };
  auto same = [](Format format, uint32_t ours, uint32_t theirs) { // CUDA's NaNs have other payloads
    return ours == theirs || (std::isnan(decode(format, ours)) && std::isnan(decode(format, theirs)));
  };
  auto check = [&](float value) {
    ASSERT_TRUE(same(Format::bf16, encode(Format::bf16, value, Overflow::saturate), raw(__float2bfloat16_rn(value))))
        << value;
    ASSERT_TRUE(same(Format::fp16, encode(Format::fp16, value, Overflow::saturate), raw(__float2half_rn(value))))
        << value;
    for (const Overflow overflow : {Overflow::saturate, Overflow::infinity}) {
      const auto saturation = overflow == Overflow::saturate ? __NV_SATFINITE : __NV_NOSAT;
      ASSERT_TRUE(same(Format::fp8_e4m3, encode(Format::fp8_e4m3, value, overflow),
                       __nv_cvt_float_to_fp8(value, saturation, __NV_E4M3)))
          << value;
      ASSERT_TRUE(same(Format::fp8_e5m2, encode(Format::fp8_e5m2, value, overflow),
                       __nv_cvt_float_to_fp8(value, saturation, __NV_E5M2)))
          << value;
    }
    const uint32_t sign = std::signbit(value) ? 0x80 : 0; // CUDA's NaN has no sign; kernels/conversion_kernel.h adds it
    ASSERT_EQ(encode(Format::fp8_e4m3, value, Overflow::saturate),
              __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3) | sign)
        << value;
    const uint32_t four = encode(Format::fp4_e2m1, value, Overflow::saturate);
    ASSERT_EQ(std::isnan(value) ? four & 7 : four, __nv_cvt_float_to_fp4(value, __NV_E2M1, cudaRoundNearest)) << value;
  };
  for (const float value : floatSample())
    check(value);
  for (uint32_t code = 0; code < 1 << 16; ++code) {
    check(decode(Format::bf16, code));
    check(decode(Format::fp16, code));
    __nv_bfloat16_raw bf16{static_cast<unsigned short>(code)};
    __half_raw fp16{static_cast<unsigned short>(code)};
    const float wide[] = {__bfloat162float(__nv_bfloat16(bf16)), __half2float(__half(fp16))};
    const float ours[] = {decode(Format::bf16, code), decode(Format::fp16, code)};
    for (int i = 0; i < 2; ++i)
      ASSERT_TRUE(std::bit_cast<uint32_t>(ours[i]) == std::bit_cast<uint32_t>(wide[i]) ||
                  (std::isnan(ours[i]) && std::isnan(wide[i])))
          << code;
  }
  for (uint32_t code = 0; code < 256; ++code) {
    const auto byte = static_cast<__nv_fp8_storage_t>(code);
    ASSERT_TRUE(same(Format::fp16, encode(Format::fp16, decode(Format::fp8_e4m3, code), Overflow::infinity),
                     raw(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)))));
    ASSERT_TRUE(same(Format::fp16, encode(Format::fp16, decode(Format::fp8_e5m2, code), Overflow::infinity),
                     raw(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E5M2)))));
    ASSERT_TRUE(same(Format::bf16, encode(Format::bf16, decodeE8m0(static_cast<uint8_t>(code)), Overflow::infinity),
                     raw(__nv_bfloat16(__nv_cvt_e8m0_to_bf16raw(byte)))));
  }
#endif
}

TEST(Convert, Casts) {
  for (const Format from : kStored) {
    const Bytes source = everyCode(from);
    const uint64_t count = source.size() / itemBytes(from);
    for (const Format to : kStored)
      for (const Overflow overflow : {Overflow::saturate, Overflow::infinity}) {
        if (to == from)
          continue;
        Bytes expected(count * itemBytes(to));
        for (uint64_t i = 0; i < count; ++i)
          putCode(expected.data(), to, i, encode(to, decode(from, codeAt(source.data(), from, i)), overflow));
        atEveryLevel([&](ConvertOptions how) {
          Guarded target(expected.size(), 0);
          cast(to, target.data(), from, source.data(), count, overflow, how);
          ASSERT_TRUE(target.contents() == expected) << static_cast<int>(from) << " to " << static_cast<int>(to);
        });
      }
  }
}

// Every length up to a few cache lines, at many alignments.
TEST(Convert, CastsOfShortRowsAtAnyAlignment) {
  std::mt19937_64 random(2);
  for (uint64_t count = 0; count < 200; ++count) {
    const Format from = kStored[random() % 5], to = kStored[random() % 5];
    if (from == to)
      continue;
    const uint64_t shift = random() % 64;
    const Bytes elements = randomElements(random, from, count);
    Bytes source(shift + elements.size()), expected(count * itemBytes(to));
    std::copy(elements.begin(), elements.end(), source.begin() + static_cast<long>(shift));
    for (uint64_t i = 0; i < count; ++i)
      putCode(expected.data(), to, i, encode(to, decode(from, codeAt(elements.data(), from, i)), Overflow::saturate));
    atEveryLevel([&](ConvertOptions how) {
      Guarded target(expected.size(), random() % 2 ? random() % 64 : 0);
      cast(to, target.data(), from, source.data() + shift, count, Overflow::saturate, how);
      ASSERT_TRUE(target.contents() == expected) << count;
    });
  }
}

TEST(Convert, Mxfp8) {
  std::mt19937_64 random(3);
  for (const Format wide : kWide)
    for (const uint64_t count : {0, 1, 31, 32, 33, 511, 512, 513, 4096, 5000}) {
      const Bytes source = randomElements(random, wide, count);
      const uint64_t blocks = (count + kMxBlock - 1) / kMxBlock;
      Bytes expected(count), expectedScales(blocks), back(count * itemBytes(wide));
      for (uint64_t block = 0; block < blocks; ++block) {
        const uint64_t first = block * kMxBlock, end = std::min(first + kMxBlock, count);
        const float most = largestOf(source.data(), wide, first, end);
        uint8_t code = 0; // the smallest scale with which nothing saturates
        while (code < 255 && !(most <= 448 * static_cast<double>(decodeE8m0(code))))
          ++code;
        expectedScales[block] = static_cast<std::byte>(code);
        for (uint64_t i = first; i < end; ++i) {
          const double scaled = static_cast<double>(magnitudeAt(source.data(), wide, i)) / decodeE8m0(code);
          const uint32_t element = encode(Format::fp8_e4m3, static_cast<float>(scaled), Overflow::infinity) & 0x7F;
          expected[i] = static_cast<std::byte>(element | signAt(source.data(), wide, i, Format::fp8_e4m3));
          const float value = decode(Format::fp8_e4m3, element) * decodeE8m0(code);
          putCode(back.data(), wide, i, encode(wide, value, Overflow::infinity) | signAt(source.data(), wide, i, wide));
        }
      }
      atEveryLevel([&](ConvertOptions how) {
        for (const uint64_t offset : {0, 7}) {
          Guarded target(count, offset), scales(blocks, 3), wideAgain(back.size(), offset);
          quantizeMxfp8(target.data(), scales.data(), wide, source.data(), count, how);
          ASSERT_TRUE(scales.contents() == expectedScales) << count;
          ASSERT_TRUE(target.contents() == expected) << count;
          dequantizeMxfp8(wide, wideAgain.data(), target.data(), scales.data(), count, how);
          ASSERT_TRUE(wideAgain.contents() == back) << count;
        }
      });
    }
}

TEST(Convert, MxScalesAroundPowersOfTwo) {
  auto scaleOf = [](float value, Level level) {
    std::byte element, scale;
    quantizeMxfp8(&element, &scale, Format::fp32, reinterpret_cast<const std::byte *>(&value), 1, {false, level});
    return static_cast<int>(scale);
  };
  atEveryLevel([&](ConvertOptions how) {
    EXPECT_EQ(scaleOf(448, how.level), 127);
    EXPECT_EQ(scaleOf(std::nextafter(448.0f, 1e9f), how.level),
              128); // the formula floor(log2(amax)) - 8 would give 127 and saturate
    EXPECT_EQ(scaleOf(-1, how.level), 119);
    EXPECT_EQ(scaleOf(0, how.level), 0);
    EXPECT_EQ(scaleOf(0x1p-149f, how.level), 0);
    EXPECT_EQ(scaleOf(448 * 0x1p-127f, how.level), 0);
    EXPECT_EQ(scaleOf(448 * 0x1.2p-127f, how.level), 1);
    EXPECT_EQ(scaleOf(std::numeric_limits<float>::max(), how.level), 247);
    EXPECT_EQ(scaleOf(INFINITY, how.level), 255);
    EXPECT_EQ(scaleOf(NAN, how.level), 255);
  });
}

// Incomplete blocks at the edges; row strides larger than the rows on both sides.
TEST(Convert, BlockFp8) {
  std::mt19937_64 random(4);
  for (const Format wide : kWide)
    for (const auto &[rows, columns] : {std::pair<uint64_t, uint64_t>{128, 128}, {256, 256}, {130, 300}, {5, 7}}) {
      const uint64_t pitch = columns + 9, blockColumns = (columns + kFp8Block - 1) / kFp8Block;
      const Bytes source = randomElements(random, wide, rows * pitch);
      const uint64_t targetPitch = columns + (columns % 64 ? 11 : 64);
      std::vector<float> expectedScales((rows + kFp8Block - 1) / kFp8Block * blockColumns);
      for (uint64_t block = 0; block < expectedScales.size(); ++block) {
        float most = 0;
        const uint64_t firstRow = block / blockColumns * kFp8Block, firstColumn = block % blockColumns * kFp8Block;
        for (uint64_t row = firstRow; row < std::min(firstRow + kFp8Block, rows); ++row) {
          const uint64_t first = row * pitch + firstColumn;
          const float each = largestOf(source.data(), wide, first, first + std::min(kFp8Block, columns - firstColumn));
          most = std::isnan(most) || std::isnan(each) ? NAN : std::max(most, each);
        }
        expectedScales[block] = most / 448 == 0 ? 1 : most / 448;
      }
      Bytes expected(rows * targetPitch, std::byte{0x5A}), back(rows * columns * itemBytes(wide));
      for (uint64_t row = 0; row < rows; ++row)
        for (uint64_t column = 0; column < columns; ++column) {
          const float scale = expectedScales[row / kFp8Block * blockColumns + column / kFp8Block];
          const uint64_t i = row * pitch + column;
          const uint32_t element =
              encode(Format::fp8_e4m3, magnitudeAt(source.data(), wide, i) / scale, Overflow::saturate) & 0x7F;
          expected[row * targetPitch + column] =
              static_cast<std::byte>(element | signAt(source.data(), wide, i, Format::fp8_e4m3));
          const uint32_t value =
              encode(wide, decode(Format::fp8_e4m3, element) * scale, Overflow::infinity) & ~encoding(wide).sign();
          putCode(back.data(), wide, row * columns + column, value | signAt(source.data(), wide, i, wide));
        }
      atEveryLevel([&](ConvertOptions how) {
        Guarded target(expected.size(), 0), wideAgain(back.size(), 0);
        std::vector<float> scales(expectedScales.size());
        const auto item = static_cast<int64_t>(itemBytes(wide));
        quantizeBlockFp8(target.data(), scales.data(), wide, source.data(),
                         {rows, columns, static_cast<int64_t>(targetPitch), static_cast<int64_t>(pitch) * item}, how);
        for (uint64_t block = 0; block < scales.size(); ++block)
          ASSERT_TRUE(scales[block] == expectedScales[block] ||
                      (std::isnan(scales[block]) && std::isnan(expectedScales[block])))
              << block;
        ASSERT_TRUE(target.contents() == expected) << rows << " x " << columns;
        dequantizeBlockFp8(wide, wideAgain.data(), target.data(), scales.data(),
                           {rows, columns, static_cast<int64_t>(columns) * item, static_cast<int64_t>(targetPitch)},
                           how);
        ASSERT_TRUE(wideAgain.contents() == back) << rows << " x " << columns;
      });
    }
}

// A block of which two ranks hold one half each: the larger amax gives the scale of both halves.
TEST(Convert, BlockFp8OfASplitBlock) {
  std::mt19937_64 random(5);
  Bytes source(kFp8Block * kFp8Block * 2);
  std::normal_distribution<float> normal;
  for (uint64_t i = 0; i < kFp8Block * kFp8Block; ++i)
    putCode(source.data(), Format::bf16, i, encode(Format::bf16, normal(random), Overflow::saturate));
  const int64_t stride = kFp8Block * 2;
  const Matrix whole = {kFp8Block, kFp8Block, kFp8Block, stride};
  const Matrix part = {kFp8Block, 48, kFp8Block, stride}, rest = {kFp8Block, 80, kFp8Block, stride};
  Bytes expected(kFp8Block * kFp8Block), ours(expected.size());
  float scale;
  quantizeBlockFp8(expected.data(), &scale, Format::bf16, source.data(), whole);
  const float most =
      std::max(amax(Format::bf16, source.data(), part), amax(Format::bf16, source.data() + 48 * 2, rest));
  EXPECT_EQ(fp8Scale(most), scale);
  quantizeFp8(ours.data(), scale, Format::bf16, source.data(), part);
  quantizeFp8(ours.data() + 48, scale, Format::bf16, source.data() + 48 * 2, rest);
  EXPECT_TRUE(ours == expected);
}

TEST(Convert, Nvfp4) {
  std::mt19937_64 random(6);
  for (const Format wide : kWide)
    for (const uint64_t count : {0, 1, 2, 15, 16, 17, 127, 256, 257, 4096, 5001}) {
      const Bytes source = randomElements(random, wide, count);
      for (const float tensorScale : {1.0f, 0.001f, 0x1p-120f, 0x1p120f}) {
        const uint64_t blocks = (count + kNvfp4Block - 1) / kNvfp4Block;
        Bytes expected((count + 1) / 2), expectedScales(blocks), back(count * itemBytes(wide));
        for (uint64_t block = 0; block < blocks; ++block) {
          const uint64_t first = block * kNvfp4Block, end = std::min(first + kNvfp4Block, count);
          const float quotient = largestOf(source.data(), wide, first, end) / (6 * tensorScale);
          const uint32_t code = encode(Format::fp8_e4m3, quotient == 0 ? 1 : quotient, Overflow::saturate);
          expectedScales[block] = static_cast<std::byte>(code);
          const float scale = decode(Format::fp8_e4m3, code) * tensorScale;
          for (uint64_t i = first; i < end; ++i) {
            const float scaled = scale == 0 ? 0 : magnitudeAt(source.data(), wide, i) / scale;
            const uint32_t sign = signAt(source.data(), wide, i, Format::fp4_e2m1);
            const uint32_t element = (encode(Format::fp4_e2m1, scaled, Overflow::saturate) & 7) | sign;
            expected[i / 2] |= static_cast<std::byte>(element << i % 2 * 4);
            const uint32_t value = encode(wide, decode(Format::fp4_e2m1, element & 7) * scale, Overflow::infinity);
            putCode(back.data(), wide, i, (value & ~encoding(wide).sign()) | signAt(source.data(), wide, i, wide));
          }
        }
        atEveryLevel([&](ConvertOptions how) {
          Guarded target(expected.size(), 0), scales(blocks, 5), wideAgain(back.size(), 0);
          quantizeNvfp4(target.data(), scales.data(), tensorScale, wide, source.data(), count, how);
          ASSERT_TRUE(scales.contents() == expectedScales) << count << " " << tensorScale;
          ASSERT_TRUE(target.contents() == expected) << count << " " << tensorScale;
          dequantizeNvfp4(wide, wideAgain.data(), target.data(), scales.data(), tensorScale, count, how);
          ASSERT_TRUE(wideAgain.contents() == back) << count << " " << tensorScale;
        });
      }
    }
}

TEST(Convert, TensorScaleOfZeros) {
  EXPECT_EQ(nvfp4TensorScale(0), 1);
  EXPECT_EQ(nvfp4TensorScale(2688), 1);
  EXPECT_EQ(fp8Scale(0), 1);
  EXPECT_EQ(fp8Scale(896), 2);
  EXPECT_TRUE(std::isnan(fp8Scale(NAN)));
}

TEST(Scales, SwizzledOffsets) {
  const ScaleShape shape = {300, 13}; // 3 x 4 tiles
  EXPECT_EQ(swizzledBytes(shape), 384u * 16);
  EXPECT_EQ(swizzledOffset(shape, 0, 0), 0u);
  EXPECT_EQ(swizzledOffset(shape, 1, 0), 16u);
  EXPECT_EQ(swizzledOffset(shape, 32, 0), 4u);
  EXPECT_EQ(swizzledOffset(shape, 0, 5), 513u);
  EXPECT_EQ(swizzledOffset(shape, 129, 4), (4 + 1) * 512u + 16);
  EXPECT_EQ(swizzledOffset(shape, 127, 3), 511u);
}

TEST(Scales, SlicesRoundTrip) {
  std::mt19937_64 random(7);
  for (const ScaleShape shape : {ScaleShape{1, 1}, {128, 4}, {300, 13}, {129, 8}}) {
    Bytes plain(shape.rows * shape.columns), swizzled(swizzledBytes(shape), std::byte{0x5A}), expected(swizzled.size()),
        back(plain.size());
    for (uint64_t i = 0; i < plain.size(); ++i) {
      plain[i] = static_cast<std::byte>(random());
      expected[swizzledOffset(shape, i / shape.columns, i % shape.columns)] = plain[i];
    }
    clearScalePadding(swizzled.data(), shape);
    const uint64_t row = random() % shape.rows, column = random() % shape.columns;
    for (const ScaleSlice &slice : {ScaleSlice{0, 0, row, shape.columns},
                                    {row, 0, shape.rows - row, column},
                                    {row, column, shape.rows - row, shape.columns - column}}) {
      const uint64_t first = slice.row * shape.columns + slice.column;
      swizzleScales(swizzled.data(), shape, slice, plain.data() + first, static_cast<int64_t>(shape.columns));
      unswizzleScales(back.data() + first, static_cast<int64_t>(shape.columns), expected.data(), shape, slice);
    }
    EXPECT_TRUE(swizzled == expected);
    EXPECT_TRUE(back == plain);
  }
}
