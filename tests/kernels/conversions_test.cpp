// SPDX-License-Identifier: Apache-2.0
// The conversions at every level of this CPU, compared with the definitions of formats.h, element by element and block
// by block; and the definitions, compared with the host functions of CUDA's headers if the build has them.

#include "kernels/cpu/quantized.h"
#include "kernels/scales.h"
#include "tests/kernels/definition.h"

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

using namespace reshard;
using namespace reshard::test;

namespace {

constexpr NumberFormat kStored[] = {NumberFormat::fp32, NumberFormat::bf16, NumberFormat::fp16, NumberFormat::fp8_e4m3,
                                    NumberFormat::fp8_e5m2};

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
Bytes everyCode(NumberFormat format) {
  if (format == NumberFormat::fp32) {
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
Bytes randomElements(std::mt19937_64 &random, NumberFormat format, uint64_t count) {
  Bytes bytes(count * itemBytes(format));
  std::normal_distribution<float> normal;
  const bool strange = random() % 3 == 0; // else no block of many elements would be finite
  float width = 1;
  for (uint64_t i = 0; i < count; ++i) {
    if (i % 16 == 0)
      width = std::ldexp(1.0f,
                         random() % 8 ? static_cast<int>(random() % 40) - 20 : static_cast<int>(random() % 254) - 130);
    float value = random() % 16 ? normal(random) * width : random() % 2 ? 448 * width : -0.0f;
    if (strange && random() % 500 == 0)
      value = random() % 2 ? -INFINITY : NAN;
    putCode(bytes.data(), format, i, encode(format, value, Overflow::saturate));
  }
  return bytes;
}

} // namespace

TEST(Formats, CodesRoundTrip) {
  for (const NumberFormat format :
       {NumberFormat::bf16, NumberFormat::fp16, NumberFormat::fp8_e4m3, NumberFormat::fp8_e5m2, NumberFormat::fp4_e2m1})
    for (uint32_t code = 0; code < 1u << encoding(format).bits; ++code) {
      const float value = decode(format, code);
      const uint32_t sign = code & encoding(format).sign();
      ASSERT_EQ(encode(format, value, Overflow::infinity), std::isnan(value) ? sign | encoding(format).nan : code)
          << code;
    }
  EXPECT_EQ(decode(NumberFormat::fp8_e4m3, 0x7E), 448);
  EXPECT_EQ(decode(NumberFormat::fp8_e5m2, 0x7B), 57344);
  EXPECT_EQ(decode(NumberFormat::fp4_e2m1, 0xF), -6);
  EXPECT_EQ(decode(NumberFormat::fp8_e4m3, 1), 0x1p-9f);
  for (uint32_t code = 0; code < 16; ++code) {
    EXPECT_EQ(decode(NumberFormat::int4, code), static_cast<float>(code) - 8);
    EXPECT_EQ(encode(NumberFormat::int4, static_cast<float>(code) - 8, Overflow::saturate), code);
  }
  EXPECT_EQ(decodeE8m0(0), 0x1p-127f);
  EXPECT_EQ(decodeE8m0(254), 0x1p127f);
  EXPECT_TRUE(std::isnan(decodeE8m0(255)));
}

TEST(Formats, Overflow) {
  for (const float value : {465.0f, 1e30f, INFINITY}) {
    EXPECT_EQ(encode(NumberFormat::fp8_e4m3, -value, Overflow::saturate), 0xFEu);
    EXPECT_EQ(encode(NumberFormat::fp8_e4m3, -value, Overflow::infinity), 0xFFu);
    EXPECT_EQ(encode(NumberFormat::fp4_e2m1, -value, Overflow::infinity), 0xFu);
    EXPECT_EQ(encode(NumberFormat::int4, -value, Overflow::infinity), 0u);
    EXPECT_EQ(encode(NumberFormat::int4, value, Overflow::infinity), 15u);
  }
  for (const auto &[value, code] :
       {std::pair(0.5f, 8u), {1.5f, 10u}, {-0.5f, 8u}, {-1.5f, 6u}, {7.5f, 15u}, {-7.5f, 0u}})
    EXPECT_EQ(encode(NumberFormat::int4, value, Overflow::saturate), code) << value;
  EXPECT_EQ(encode(NumberFormat::fp8_e4m3, 464, Overflow::infinity), 0x7Eu); // halfway between 448 and 480; 448 is even
  EXPECT_EQ(encode(NumberFormat::fp8_e5m2, 61440, Overflow::saturate), 0x7Bu);
  EXPECT_EQ(encode(NumberFormat::fp8_e5m2, 61440, Overflow::infinity), 0x7Cu);
  EXPECT_EQ(encode(NumberFormat::fp16, 1e6, Overflow::saturate), 0x7BFFu);
  EXPECT_EQ(encode(NumberFormat::fp16, -INFINITY, Overflow::saturate), 0xFBFFu);
  EXPECT_EQ(encode(NumberFormat::fp16, 1e6, Overflow::infinity), 0x7C00u);
  EXPECT_EQ(encode(NumberFormat::bf16, 3.4e38f, Overflow::saturate), 0x7F7Fu);
  EXPECT_EQ(encode(NumberFormat::bf16, 3.4e38f, Overflow::infinity), 0x7F80u);
}

/// Whether a cast of a value finds it beyond the range, from the definition: the nearest code is not finite, and the
/// value itself is, or the format has no infinity.
bool beyond(NumberFormat to, float value) {
  if (std::isnan(value) || to == NumberFormat::fp32)
    return false;
  const bool finite = std::isfinite(decode(to, encode(to, value, Overflow::infinity)));
  return !finite && (std::isfinite(value) || to == NumberFormat::fp8_e4m3);
}

TEST(Convert, FindsValuesBeyondTheRange) {
  std::mt19937_64 random(6);
  for (const NumberFormat from : kStored)
    for (const NumberFormat to : kStored) {
      bool any = false;
      const Bytes codes = everyCode(from);
      const uint64_t item = itemBytes(from), count = codes.size() / item;
      for (uint64_t i = 0; i < count; ++i) {
        const float value = decode(from, codeAt(codes.data(), from, i));
        any = any || beyond(to, value);
        if (i % 61 == 0 || std::abs(value) > 400) {
          ASSERT_EQ(anyBeyond(to, from, codes.data() + i * item, 1), beyond(to, value)) << value;
        }
      }
      EXPECT_EQ(mayOverflow(from, to), any) << static_cast<int>(from) << " to " << static_cast<int>(to);
      for (int row = 0; row < 200; ++row) { // of any length, with infinities and NaNs among them
        const uint64_t first = random() % count, some = 1 + random() % std::min<uint64_t>(count - first, 300);
        bool expected = false;
        for (uint64_t i = first; i < first + some; ++i)
          expected = expected || beyond(to, decode(from, codeAt(codes.data(), from, i)));
        atEveryLevel([&](ConvertOptions how) {
          ASSERT_EQ(anyBeyond(to, from, codes.data() + first * item, some, how), expected);
        });
      }
    }
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
  auto same = [](NumberFormat format, uint32_t ours, uint32_t theirs) { // CUDA's NaNs have other payloads
    return ours == theirs || (std::isnan(decode(format, ours)) && std::isnan(decode(format, theirs)));
  };
  auto check = [&](float value) {
    ASSERT_TRUE(same(NumberFormat::bf16, encode(NumberFormat::bf16, value, Overflow::infinity),
                     raw(__float2bfloat16_rn(value))))
        << value;
    ASSERT_TRUE(
        same(NumberFormat::fp16, encode(NumberFormat::fp16, value, Overflow::infinity), raw(__float2half_rn(value))))
        << value;
    for (const Overflow overflow : {Overflow::saturate, Overflow::infinity}) {
      const auto saturation = overflow == Overflow::saturate ? __NV_SATFINITE : __NV_NOSAT;
      ASSERT_TRUE(same(NumberFormat::fp8_e4m3, encode(NumberFormat::fp8_e4m3, value, overflow),
                       __nv_cvt_float_to_fp8(value, saturation, __NV_E4M3)))
          << value;
      ASSERT_TRUE(same(NumberFormat::fp8_e5m2, encode(NumberFormat::fp8_e5m2, value, overflow),
                       __nv_cvt_float_to_fp8(value, saturation, __NV_E5M2)))
          << value;
    }
    const uint32_t sign =
        std::signbit(value) ? 0x80 : 0; // CUDA's NaN has no sign; kernels/gpu/conversion_kernel.h adds it
    ASSERT_EQ(encode(NumberFormat::fp8_e4m3, value, Overflow::saturate),
              __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3) | sign)
        << value;
    const uint32_t four = encode(NumberFormat::fp4_e2m1, value, Overflow::saturate);
    ASSERT_EQ(std::isnan(value) ? four & 7 : four, __nv_cvt_float_to_fp4(value, __NV_E2M1, cudaRoundNearest)) << value;
  };
  for (const float value : floatSample())
    check(value);
  for (uint32_t code = 0; code < 1 << 16; ++code) {
    check(decode(NumberFormat::bf16, code));
    check(decode(NumberFormat::fp16, code));
    __nv_bfloat16_raw bf16{static_cast<unsigned short>(code)};
    __half_raw fp16{static_cast<unsigned short>(code)};
    const float wide[] = {__bfloat162float(__nv_bfloat16(bf16)), __half2float(__half(fp16))};
    const float ours[] = {decode(NumberFormat::bf16, code), decode(NumberFormat::fp16, code)};
    for (int i = 0; i < 2; ++i)
      ASSERT_TRUE(std::bit_cast<uint32_t>(ours[i]) == std::bit_cast<uint32_t>(wide[i]) ||
                  (std::isnan(ours[i]) && std::isnan(wide[i])))
          << code;
  }
  for (uint32_t code = 0; code < 256; ++code) {
    const auto byte = static_cast<__nv_fp8_storage_t>(code);
    ASSERT_TRUE(same(NumberFormat::fp16,
                     encode(NumberFormat::fp16, decode(NumberFormat::fp8_e4m3, code), Overflow::infinity),
                     raw(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)))));
    ASSERT_TRUE(same(NumberFormat::fp16,
                     encode(NumberFormat::fp16, decode(NumberFormat::fp8_e5m2, code), Overflow::infinity),
                     raw(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E5M2)))));
    ASSERT_TRUE(same(NumberFormat::bf16,
                     encode(NumberFormat::bf16, decodeE8m0(static_cast<uint8_t>(code)), Overflow::infinity),
                     raw(__nv_bfloat16(__nv_cvt_e8m0_to_bf16raw(byte)))));
  }
#endif
}

TEST(Convert, Casts) {
  for (const NumberFormat from : kStored) {
    const Bytes source = everyCode(from);
    const uint64_t count = source.size() / itemBytes(from);
    for (const NumberFormat to : kStored)
      for (const Overflow overflow : {Overflow::saturate, Overflow::infinity}) {
        if (to == from)
          continue;
        Bytes expected(count * itemBytes(to));
        for (uint64_t i = 0; i < count; ++i)
          putCode(expected.data(), to, i, encode(to, decode(from, codeAt(source.data(), from, i)), overflow));
        atEveryLevel([&](ConvertOptions how) {
          Guarded target(expected.size(), 0);
          cast({to, target.data(), from, source.data(), count, overflow}, how);
          ASSERT_TRUE(target.contents() == expected) << static_cast<int>(from) << " to " << static_cast<int>(to);
        });
      }
  }
}

// Every length up to a few cache lines, at many alignments.
TEST(Convert, CastsOfShortRowsAtAnyAlignment) {
  std::mt19937_64 random(2);
  for (uint64_t count = 0; count < 200; ++count) {
    const NumberFormat from = kStored[random() % 5], to = kStored[random() % 5];
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
      cast({to, target.data(), from, source.data() + shift, count, Overflow::saturate}, how);
      ASSERT_TRUE(target.contents() == expected) << count;
    });
  }
}

TEST(Convert, MxScalesAroundPowersOfTwo) {
  auto scaleOf = [](float value, CpuLevel level) {
    std::byte element, scale;
    quantize({Quantization::mxfp8, NumberFormat::fp32, 1, 1, 0, 0, &element, &scale},
             reinterpret_cast<const std::byte *>(&value), {false, level});
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

/// A matrix on both sides of a conversion; rows have gaps unless there is only one.
struct Case {
  Quantization number;
  Elements elements;
  float tensorScale;

  const QuantizedFormat &format() const { return formatOf(number); }
  uint64_t codeStride() const {
    const auto each = static_cast<uint64_t>(format().codesPerByte());
    const uint64_t bytes = (elements.columns + each - 1) / each;
    return elements.rows > 1 ? bytes + (bytes % 64 ? 11 : 64) : bytes;
  }
  uint64_t wideStride() const { return (elements.columns + (elements.rows > 1 ? 9 : 0)) * itemBytes(elements.wide); }
  /// Returns the elements with the gaps of rows.
  Bytes wide(const Bytes &elementBytes) const {
    const uint64_t row = elements.columns * itemBytes(elements.wide);
    Bytes result(elements.rows * wideStride(), std::byte{0x5A});
    for (uint64_t r = 0; r < elements.rows; ++r)
      std::copy_n(elementBytes.begin() + static_cast<long>(r * row), row,
                  result.begin() + static_cast<long>(r * wideStride()));
    return result;
  }
  BlockMatrix matrix(std::byte *codes, std::byte *scales) const {
    return {number,
            elements.wide,
            elements.rows,
            elements.columns,
            static_cast<int64_t>(wideStride()),
            static_cast<int64_t>(codeStride()),
            codes,
            scales,
            tensorScale};
  }
};

/// Compares all conversions of a matrix with the definition.
void compare(const Case &one) {
  SCOPED_TRACE(testing::Message() << one.format().name << " from format " << static_cast<int>(one.elements.wide) << ", "
                                  << one.elements.rows << " x " << one.elements.columns << ", tensor scale "
                                  << one.tensorScale);
  const Defined expected = define(one.number, one.elements, one.tensorScale);
  const Bytes codes = stored(one.format(), expected.codes, one.elements, one.codeStride(), std::byte{0x5A}),
              source = one.wide(one.elements.bytes), back = one.wide(expected.back);
  atEveryLevel([&](ConvertOptions how) {
    for (const uint64_t offset : {0, 7}) {
      Guarded target(codes.size(), offset), scales(expected.scales.size(), 3), alone(expected.scales.size(), offset),
          again(codes.size(), offset), wideAgain(back.size(), offset);
      quantize(one.matrix(target.data(), scales.data()), source.data(), how);
      ASSERT_TRUE(scales.contents() == expected.scales);
      ASSERT_TRUE(target.contents() == codes);
      computeScales(one.matrix(nullptr, alone.data()), source.data(), how);
      ASSERT_TRUE(alone.contents() == expected.scales);
      dequantize(one.matrix(target.data(), scales.data()), wideAgain.data(), how);
      ASSERT_TRUE(wideAgain.contents() == back);
      if (one.format().codesPerByte() == 1) {
        quantizeWithScales(one.matrix(again.data(), scales.data()), source.data(), how);
        ASSERT_TRUE(again.contents() == codes);
      }
    }
  });
}

std::vector<float> tensorScales(const QuantizedFormat &format) {
  return format.rule == ScaleRule::tensorQuotient ? std::vector{1.0f, 0.001f, 0x1p-120f, 0x1p120f, NAN}
                                                  : std::vector{1.0f};
}

// Incomplete blocks at the edges, odd rows, and gaps between rows on both sides.
TEST(Convert, QuantizedFormats) {
  std::mt19937_64 random(3);
  for (const QuantizedFormat &format : kQuantizedFormats)
    for (const NumberFormat wide : kWide) {
      std::vector<std::pair<uint64_t, uint64_t>> shapes;
      for (const uint64_t count : {0, 1, 2, 15, 16, 17, 31, 32, 33, 127, 256, 257, 511, 512, 513, 4096, 5000, 5001})
        shapes.emplace_back(1, count);
      for (const auto &shape : {std::pair<uint64_t, uint64_t>{0, 5}, {3, 5}, {5, 7}, {7, 64}, {2, 1000}, {33, 129}})
        shapes.push_back(shape);
      if (format.blockRows > 1)
        for (const auto &shape : {std::pair<uint64_t, uint64_t>{128, 128}, {256, 256}, {130, 300}})
          shapes.push_back(shape);
      for (const auto &[rows, columns] : shapes)
        for (const float tensorScale : tensorScales(format))
          compare({format.number, {wide, rows, columns, randomElements(random, wide, rows * columns)}, tensorScale});
      if (HasFatalFailure())
        return;
    }
}

/// Values around all ties of a format of codes, times a power of two; the first makes this power the scale.
std::vector<float> ties(NumberFormat code, int exponent) {
  std::vector<float> values = {std::ldexp(scaleDivisor(code), exponent)};
  for (uint32_t i = 0; i < encoding(code).maxFinite; ++i) {
    const float tie = (decode(code, i) + decode(code, i + 1)) / 2;
    for (const float near : {std::nextafter(tie, 0.0f), tie, std::nextafter(tie, 1e9f), decode(code, i)})
      values.push_back(std::ldexp(i % 2 ? -near : near, exponent));
  }
  return values;
}

// Blocks whose amax is the largest code value times a power of two or the next value, with elements around all ties;
// blocks of zeros and of subnormal values; a NaN and an infinity in each position of a block.
TEST(Convert, BlocksAtTheLimits) {
  std::mt19937_64 random(5);
  for (const QuantizedFormat &format : kQuantizedFormats) {
    const auto width = static_cast<uint64_t>(format.blockColumns);
    const NumberFormat code = numberFormat(format.code);
    for (const NumberFormat wide : kWide) {
      Elements of{wide, 1, 0, {}};
      auto add = [&](float value) {
        const uint64_t i = of.columns++;
        of.bytes.resize(of.columns * itemBytes(wide));
        putCode(of.bytes.data(), wide, i, encode(wide, value, Overflow::infinity));
      };
      auto fill = [&](float value) {
        while (of.columns % width > 0)
          add(value);
      };
      for (const int exponent : {-149, -135, -133, -127, -126, -100, -24, -8, -1, 0, 1, 5, 100, 118, 119, 120, 125}) {
        const std::vector<float> values = ties(code, exponent);
        const float above = std::nextafter(values[0], INFINITY);
        for (size_t i = 1; i < values.size(); ++i) {
          if (of.columns % width == 0)
            add(i / width % 8 == 7 ? above : values[0]);
          add(values[i]);
        }
        fill(-0.0f);
      }
      for (const float value : {0.0f, -0.0f, 0x1p-149f, 0x1p-133f, 0x1p-126f, 0x1p-24f, 65504.0f, 3e38f}) {
        add(value);
        fill(value / 2);
      }
      for (uint64_t i = 0; i < 2 * width; ++i) {
        for (uint64_t k = 0; k < width; ++k)
          add(k != i / 2 ? static_cast<float>(k) - 5 : i % 2 ? -INFINITY : std::copysign(NAN, -1.0f));
      }
      for (const float tensorScale : tensorScales(format))
        compare({format.number, of, tensorScale});
      if (HasFatalFailure())
        return;
    }
  }
}

// Every code with every scale, including combinations that quantization never gives.
TEST(Convert, EveryCodeWithEveryScale) {
  std::mt19937_64 random(6);
  for (const QuantizedFormat &format : kQuantizedFormats) {
    const auto each = static_cast<uint64_t>(format.codesPerByte()), width = static_cast<uint64_t>(format.blockColumns);
    Bytes codes(256), bytes(256 * each);
    for (uint64_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = each == 1 ? static_cast<std::byte>(i) : static_cast<std::byte>(i / 2 >> i % 2 * 4 & 0xF);
      codes[i / each] |= bytes[i] << static_cast<int>(i % each * 4);
    }
    std::vector<uint32_t> scales;
    for (uint32_t i = 0; i < 256; ++i)
      scales.push_back(format.scale == ScaleFormat::fp32   ? i % 2 ? static_cast<uint32_t>(random()) : i << 23
                       : format.scale == ScaleFormat::bf16 ? i % 2 ? static_cast<uint32_t>(random()) & 0xFFFF : i << 7
                                                           : i);
    for (const NumberFormat wide : kWide)
      for (const float tensorScale : tensorScales(format))
        for (const uint32_t scale : scales) {
          const Elements shape{wide, 1, bytes.size(), {}};
          const float factor = format.scale == ScaleFormat::e8m0   ? decodeE8m0(static_cast<uint8_t>(scale))
                               : format.scale == ScaleFormat::fp32 ? std::bit_cast<float>(scale)
                               : format.scale == ScaleFormat::bf16
                                   ? decode(NumberFormat::bf16, scale)
                                   : decode(NumberFormat::fp8_e4m3, scale) * tensorScale;
          const uint64_t blocks = (bytes.size() + width - 1) / width;
          const Bytes expected = dequantized(format, shape, bytes, std::vector<float>(blocks, factor));
          Bytes repeated;
          for (uint64_t i = 0; i < blocks; ++i)
            for (int64_t b = 0; b < format.scaleBytes(); ++b)
              repeated.push_back(static_cast<std::byte>(scale >> 8 * b & 0xFF));
          atEveryLevel([&](ConvertOptions how) {
            Guarded target(expected.size(), 0);
            dequantize({format.number, wide, 1, bytes.size(), 0, 0, codes.data(), repeated.data(), tensorScale},
                       target.data(), how);
            ASSERT_TRUE(target.contents() == expected)
                << format.name << " to format " << static_cast<int>(wide) << ", scale " << scale << ", " << tensorScale;
          });
          if (HasFatalFailure())
            return;
        }
  }
}

// A block of which two ranks hold one half each: the scale of the whole block gives the codes of both halves.
TEST(Convert, SplitBlock) {
  constexpr uint64_t kSide = 128;
  std::mt19937_64 random(5);
  Bytes source(kSide * kSide * 2);
  std::normal_distribution<float> normal;
  for (uint64_t i = 0; i < kSide * kSide; ++i)
    putCode(source.data(), NumberFormat::bf16, i, encode(NumberFormat::bf16, normal(random), Overflow::saturate));
  Bytes expected(kSide * kSide), ours(expected.size());
  float scale;
  BlockMatrix whole = {Quantization::block_fp8,
                       NumberFormat::bf16,
                       kSide,
                       kSide,
                       kSide * 2,
                       kSide,
                       expected.data(),
                       reinterpret_cast<std::byte *>(&scale)};
  quantize(whole, source.data());
  BlockMatrix part = whole, rest = whole;
  part.columns = 48;
  rest.columns = kSide - 48;
  part.codes = ours.data();
  rest.codes = ours.data() + 48;
  const int64_t stride = kSide * 2;
  const float most = std::max(amax(NumberFormat::bf16, source.data(), {kSide, 48, 0, stride}),
                              amax(NumberFormat::bf16, source.data() + 48 * 2, {kSide, kSide - 48, 0, stride}));
  EXPECT_EQ(most / 448, scale);
  quantizeWithScales(part, source.data());
  quantizeWithScales(rest, source.data() + 48 * 2);
  EXPECT_TRUE(ours == expected);
}

TEST(Convert, TensorScaleOfZeros) {
  EXPECT_EQ(nvfp4TensorScale(0), 1);
  EXPECT_EQ(nvfp4TensorScale(2688), 1);
}

TEST(Scales, SwizzledOffsets) {
  const ScaleShape shape = {300, 13}; // 3 x 4 tiles
  const auto at = [&](uint64_t row, uint64_t column) { return scaleOffset(ScaleLayout::swizzled, shape, row, column); };
  EXPECT_EQ(storedScales(ScaleLayout::swizzled, shape), 384u * 16);
  EXPECT_EQ(at(0, 0), 0u);
  EXPECT_EQ(at(1, 0), 16u);
  EXPECT_EQ(at(32, 0), 4u);
  EXPECT_EQ(at(0, 5), 513u);
  EXPECT_EQ(at(129, 4), (4 + 1) * 512u + 16);
  EXPECT_EQ(at(127, 3), 511u);
}

TEST(Scales, PackedOffsets) {
  const ScaleShape shape = {3, 6, 128, 301}; // 2 groups of 304 int32
  const auto at = [&](uint64_t row, uint64_t column) { return scaleOffset(ScaleLayout::packed, shape, row, column); };
  EXPECT_EQ(storedScales(ScaleLayout::packed, shape), 2u * 304 * 4);
  EXPECT_EQ(at(0, 0), 0u);
  EXPECT_EQ(at(0, 3), 3u);
  EXPECT_EQ(at(1, 0), 128u * 4);
  EXPECT_EQ(at(0, 4), 304u * 4);
  EXPECT_EQ(at(2, 5), (304u + 256) * 4 + 1);
  EXPECT_EQ(scaleCopies(ScaleLayout::packed, shape, 1), 128u);
  EXPECT_EQ(scaleCopies(ScaleLayout::packed, shape, 2), 48u); // rows 256 to 303
  EXPECT_EQ(scaleCopies(ScaleLayout::swizzled, shape, 2), 1u);
}

TEST(Scales, SlicesRoundTrip) {
  std::mt19937_64 random(7);
  for (const ScaleLayout layout : {ScaleLayout::plain, ScaleLayout::swizzled, ScaleLayout::packed})
    for (const ScaleShape &shape :
         {ScaleShape{1, 1}, {128, 4}, {300, 13}, {129, 8}, {1, 1, 128, 1}, {3, 9, 128, 257}}) {
      Bytes plain(shape.rows * shape.columns), expected(storedScales(layout, shape)), back(plain.size());
      for (std::byte &scale : plain)
        scale = static_cast<std::byte>(1 + random() % 255);
      uint64_t inside = 0;
      for (uint64_t i = 0; i < expected.size(); ++i)
        if (const ScalePosition at = scalePosition(layout, shape, i);
            at.row < shape.rows && at.column < shape.columns) {
          expected[i] = plain[at.row * shape.columns + at.column];
          ++inside;
          const uint64_t first = scaleOffset(layout, shape, at.row, at.column);
          ASSERT_EQ((i - first) % kPackedScales, 0u);
          ASSERT_LT((i - first) / kPackedScales, scaleCopies(layout, shape, at.row));
        }
      uint64_t copies = 0;
      for (uint64_t row = 0; row < shape.rows; ++row)
        copies += scaleCopies(layout, shape, row) * shape.columns;
      ASSERT_EQ(inside, copies);
      Guarded target(expected.size(), 3);
      const ScaleMatrix ours{target.data(), layout, shape}, theirs{expected.data(), layout, shape};
      clearScalePadding(ours);
      const uint64_t row = random() % shape.rows, column = random() % shape.columns;
      for (const ScaleSlice &slice : {ScaleSlice{0, 0, row, shape.columns},
                                      {row, 0, shape.rows - row, column},
                                      {row, column, shape.rows - row, shape.columns - column}}) {
        const uint64_t first = slice.row * shape.columns + slice.column;
        writeScales(ours, slice, plain.data() + first, static_cast<int64_t>(shape.columns));
        readScales(back.data() + first, static_cast<int64_t>(shape.columns), theirs, slice);
      }
      EXPECT_TRUE(target.contents() == expected);
      EXPECT_TRUE(back == plain);
    }
}
