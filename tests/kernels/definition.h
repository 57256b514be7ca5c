// SPDX-License-Identifier: Apache-2.0
// Quantized formats as docs/yaml.md, section 12, defines them: block by block and element by element, with the exact
// conversions of kernels/number_formats.h. Shares no other code with kernels/.
#pragma once

#include "tests/kernels/support.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace reshard::test {

/// A matrix of rows x columns elements of format `wide`, one after the other.
struct Elements {
  NumberFormat wide;
  uint64_t rows, columns;
  Bytes bytes;

  uint32_t code(uint64_t i) const { return codeAt(bytes.data(), wide, i); }
  float value(uint64_t i) const { return decode(wide, code(i)); }
  bool negative(uint64_t i) const { return code(i) & encoding(wide).sign(); }
};

/// The quantized form of a matrix.
struct Defined {
  Bytes codes;  ///< a byte for each element
  Bytes scales; ///< row-major
  Bytes back;   ///< the elements after dequantization
};

/// Returns the least E8M0 scale with which nothing saturates; 255 for NaN.
inline uint8_t leastPowerOfTwo(float amax, float largestCode) {
  uint8_t code = 0;
  while (code < 255 && !(static_cast<double>(amax) <= static_cast<double>(largestCode) * decodeE8m0(code)))
    ++code;
  return code;
}

/// Returns the bits of a block's scale as they are stored, and the number that codes are multiplied by.
inline std::pair<uint32_t, float> scaleOf(const QuantizedFormat &format, float amax, float tensorScale) {
  const float most = format.code == CodeFormat::int4 ? 7.5f : largest(numberFormat(format.code));
  if (format.rule == ScaleRule::powerOfTwo) {
    const uint8_t code = leastPowerOfTwo(amax, most);
    return {code, decodeE8m0(code)};
  }
  const float quotient = amax / (format.rule == ScaleRule::tensorQuotient ? most * tensorScale : most);
  const float scale = std::isnan(quotient) ? std::bit_cast<float>(0x7FC00000) : quotient == 0 ? 1 : quotient;
  if (format.scale == ScaleFormat::bf16) {
    const uint32_t code = encode(NumberFormat::bf16, scale, Overflow::infinity);
    const float rounded = code == 0 ? 1 : decode(NumberFormat::bf16, code);
    return {code == 0 ? 0x3F80 : code, rounded};
  }
  if (format.rule == ScaleRule::quotient)
    return {std::bit_cast<uint32_t>(scale), scale};
  const uint32_t code = encode(NumberFormat::fp8_e4m3, scale, Overflow::saturate) & 0x7F;
  return {code, decode(NumberFormat::fp8_e4m3, code) * tensorScale};
}

/// Returns the elements of a matrix with these codes (a byte each) and factors of its blocks.
inline Bytes dequantized(const QuantizedFormat &format, const Elements &shape, const Bytes &codes,
                         const std::vector<float> &factors) {
  const NumberFormat code = numberFormat(format.code);
  const auto height = static_cast<uint64_t>(format.blockRows), width = static_cast<uint64_t>(format.blockColumns);
  const uint64_t across = (shape.columns + width - 1) / width;
  Bytes back(shape.rows * shape.columns * itemBytes(shape.wide));
  for (uint64_t i = 0; i < codes.size(); ++i) {
    const auto bits = static_cast<uint32_t>(codes[i]);
    const float factor = factors[i / shape.columns / height * across + i % shape.columns / width];
    const uint32_t magnitude =
        encode(shape.wide, std::fabs(decode(code, bits)) * factor, Overflow::infinity) & ~encoding(shape.wide).sign();
    const bool negative = std::signbit(decode(code, bits)) != (!std::isnan(factor) && std::signbit(factor));
    putCode(back.data(), shape.wide, i, magnitude | (negative ? encoding(shape.wide).sign() : 0));
  }
  return back;
}

/// Quantizes a matrix.
inline Defined define(Quantization number, const Elements &of, float tensorScale) {
  const QuantizedFormat &format = formatOf(number);
  const NumberFormat code = numberFormat(format.code);
  const auto height = static_cast<uint64_t>(format.blockRows), width = static_cast<uint64_t>(format.blockColumns);
  const uint64_t across = (of.columns + width - 1) / width, blocks = (of.rows + height - 1) / height * across;
  const auto blockAt = [&](uint64_t i) { return i / of.columns / height * across + i % of.columns / width; };
  std::vector<float> amax(blocks), factors(blocks);
  for (uint64_t i = 0; i < of.rows * of.columns; ++i) {
    const float magnitude = std::fabs(of.value(i));
    float &most = amax[blockAt(i)];
    most = std::isfinite(magnitude) && !std::isnan(most) ? std::max(most, magnitude) : NAN;
  }
  Defined result;
  result.scales.resize(blocks * static_cast<uint64_t>(format.scaleBytes()));
  for (uint64_t block = 0; block < blocks; ++block) {
    const auto [bits, factor] = scaleOf(format, amax[block], tensorScale);
    std::memcpy(result.scales.data() + block * static_cast<uint64_t>(format.scaleBytes()), &bits,
                static_cast<size_t>(format.scaleBytes()));
    factors[block] = factor;
  }
  for (uint64_t i = 0; i < of.rows * of.columns; ++i) {
    const float factor = factors[blockAt(i)];
    const float quotient = factor == 0 ? 0 : std::fabs(of.value(i)) / factor; // a power of two divides exactly
    result.codes.push_back(static_cast<std::byte>(
        encode(code, std::copysign(quotient, of.negative(i) ? -1.0f : 1.0f), Overflow::saturate)));
  }
  result.back = dequantized(format, of, result.codes, factors);
  return result;
}

/// Returns codes as they are stored: `stride` bytes from row to row, the rest of which has the value `fill`.
inline Bytes stored(const QuantizedFormat &format, const Bytes &codes, const Elements &shape, uint64_t stride,
                    std::byte fill) {
  const auto each = static_cast<uint64_t>(format.codesPerByte()), bytes = (shape.columns + each - 1) / each;
  Bytes result(shape.rows * stride, fill);
  for (uint64_t row = 0; row < shape.rows; ++row) {
    std::fill_n(result.begin() + static_cast<long>(row * stride), bytes, std::byte{0});
    for (uint64_t i = 0; i < shape.columns; ++i)
      result[row * stride + i / each] |= codes[row * shape.columns + i] << static_cast<int>(i % each * 4);
  }
  return result;
}

} // namespace reshard::test
