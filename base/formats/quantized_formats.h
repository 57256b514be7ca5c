// SPDX-License-Identifier: Apache-2.0
// The quantized formats: the one table that the compiler, the checks of plans, the kernels and the commands read.
// docs/yaml.md, section 12, defines each format.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>

namespace reshard {

/// A quantized format, by the number that plans store (schema/plan.fbs).
enum class Quantization : uint8_t { mxfp8, block_fp8, nvfp4, block_fp8_ue8m0, mxfp4, int4 };

/// The number format of a code. Two codes of four bits are stored in a byte, the first in the low bits. int4: an
/// integer from -8 to 7, stored as itself + 8.
enum class CodeFormat : uint8_t { fp8_e4m3, fp4_e2m1, int4 };

/// The number format of a block's scale. e8m0: 2^(code - 127).
enum class ScaleFormat : uint8_t { e8m0, fp32, fp8_e4m3, bf16 };

/// The order of the scales of a matrix in memory, by the number that plans store. plain: row-major; swizzled: as
/// Blackwell's matrix units read them; packed: as DeepGEMM's kernels for Blackwell read them (kernels/scales.h).
enum class ScaleLayout : uint8_t { plain, swizzled, packed };
inline constexpr const char *kScaleLayoutNames[] = {"plain", "swizzled", "packed"}; // in YAML, IR text and reports

/// How the scale of a block follows from its amax.
enum class ScaleRule : uint8_t {
  quotient,       ///< amax / largest code value (int4: 7.5), rounded to the format of scales; 1 if that is 0
  powerOfTwo,     ///< the least power of two with amax / scale <= largest code value
  tensorQuotient, ///< amax / (largest code value * tensor scale), rounded; 1 if the quotient is 0
};

/// What a cast does with a value beyond the range of its target, by the number that plans store (YAML: `convert`).
enum class OverflowRule : uint8_t {
  error,    ///< the run fails and names the param
  saturate, ///< the largest finite value of the same sign; infinities too
  infinity, ///< an infinity
};
inline constexpr const char *kOverflowRuleNames[] = {"rne", "saturate", "inf"}; // in YAML, IR text and reports

/// A row of the table.
struct QuantizedFormat {
  const char *name; // in YAML, IR text and reports
  Quantization number;
  int64_t blockRows, blockColumns; // elements
  CodeFormat code;
  ScaleFormat scale;
  ScaleRule rule;
  ScaleLayout layout;                   // the layout of scales that is allowed besides plain; plain: none
  bool senderQuantizes;                 // the default of `by`
  const char *codeSuffix, *scaleSuffix; // end the default names of the params of codes and of scales

  constexpr int64_t codesPerByte() const { return code == CodeFormat::fp8_e4m3 ? 1 : 2; }
  /// The codes in a number of codeType().
  constexpr int64_t codesPerNumber() const { return code == CodeFormat::int4 ? 8 : codesPerByte(); }
  constexpr int64_t scaleBytes() const { return scale == ScaleFormat::fp32 ? 4 : scale == ScaleFormat::bf16 ? 2 : 1; }
  /// Whether codes may have a row for each block, as in the published gpt-oss.
  constexpr bool codeBlocks() const { return code == CodeFormat::fp4_e2m1 && scale == ScaleFormat::e8m0; }
  /// Whether each matrix has an fp32 scale besides the scales of its blocks. It depends on the whole matrix.
  constexpr bool tensorScale() const { return rule == ScaleRule::tensorQuotient; }
  /// Whether a rank can quantize for others, element by element: with scales of blocks, and a byte for each code.
  constexpr bool sendersCanQuantize() const { return !tensorScale() && codesPerByte() == 1; }
  /// Whether each block lies in one row. If not, the last blocks of a matrix may be short.
  constexpr bool blocksInRows() const { return blockRows == 1; }
  /// Whether codes and scale of a block of positive zeros are zero bytes.
  constexpr bool zerosAreZeroBytes() const { return scale == ScaleFormat::e8m0 && rule == ScaleRule::powerOfTwo; }
  constexpr bool allows(ScaleLayout other) const { return other == ScaleLayout::plain || other == layout; }

  /// The rows and columns of the scales of a matrix of so many rows and columns.
  constexpr int64_t scaleRows(int64_t rows) const { return (rows + blockRows - 1) / blockRows; }
  constexpr int64_t scaleColumns(int64_t columns) const { return (columns + blockColumns - 1) / blockColumns; }

  /// The dtypes of the params of codes and of scales in a layout.
  constexpr std::string_view codeType() const {
    return code == CodeFormat::int4 ? "i32" : code == CodeFormat::fp4_e2m1 ? "u8" : "fp8_e4m3";
  }
  constexpr std::string_view scaleType(ScaleLayout stored = ScaleLayout::plain) const {
    if (stored == ScaleLayout::packed)
      return "i32";
    switch (scale) { // without a default: a new format is a warning of the compiler
    case ScaleFormat::e8m0:
      return "u8";
    case ScaleFormat::fp32:
      return "fp32";
    case ScaleFormat::bf16:
      return "bf16";
    case ScaleFormat::fp8_e4m3:
      break;
    }
    return "fp8_e4m3";
  }
};

// clang-format off
inline constexpr QuantizedFormat kQuantizedFormats[] = {
    // name             number                         block     code                  scale                  rule                       layout                 sender suffixes
    {"mxfp8",           Quantization::mxfp8,           1,   32,  CodeFormat::fp8_e4m3, ScaleFormat::e8m0,     ScaleRule::powerOfTwo,     ScaleLayout::swizzled, false, "", "_scale"},
    {"block_fp8",       Quantization::block_fp8,       128, 128, CodeFormat::fp8_e4m3, ScaleFormat::fp32,     ScaleRule::quotient,       ScaleLayout::plain,    true,  "", "_scale_inv"},
    {"nvfp4",           Quantization::nvfp4,           1,   16,  CodeFormat::fp4_e2m1, ScaleFormat::fp8_e4m3, ScaleRule::tensorQuotient, ScaleLayout::swizzled, false, "", "_scale"},
    {"block_fp8_ue8m0", Quantization::block_fp8_ue8m0, 128, 128, CodeFormat::fp8_e4m3, ScaleFormat::e8m0,     ScaleRule::powerOfTwo,     ScaleLayout::packed,   true,  "", "_scale_inv"},
    {"mxfp4",           Quantization::mxfp4,           1,   32,  CodeFormat::fp4_e2m1, ScaleFormat::e8m0,     ScaleRule::powerOfTwo,     ScaleLayout::swizzled, false, "", "_scale"},
    {"int4",            Quantization::int4,            1,   32,  CodeFormat::int4,     ScaleFormat::bf16,     ScaleRule::quotient,       ScaleLayout::plain,    false, "_packed", "_scale"},
};
// clang-format on

/// The row of a format.
constexpr const QuantizedFormat &formatOf(Quantization number) {
  return kQuantizedFormats[static_cast<size_t>(number)];
}

constexpr const char *name(ScaleLayout layout) { return kScaleLayoutNames[static_cast<size_t>(layout)]; }

/// The format of a name; nullopt if there is none.
constexpr std::optional<Quantization> quantizationNamed(std::string_view name) {
  for (const QuantizedFormat &format : kQuantizedFormats)
    if (format.name == name)
      return format.number;
  return std::nullopt;
}

/// The lengths that a param of scales has in place of the rows and columns of its matrix.
struct ScaleLengths {
  std::array<int64_t, 2> at;
  size_t count; // how many entries of `at` are used
};
/// `rows` and `columns` count scales.
constexpr ScaleLengths scaleLengths(ScaleLayout layout, int64_t matrixRows, int64_t rows, int64_t columns) {
  if (layout == ScaleLayout::plain)
    return {{rows, columns}, 2};
  if (layout == ScaleLayout::packed) // a number for each row of the matrix and four columns; rows in multiples of four
    return {{(columns + 3) / 4, (matrixRows + 3) / 4 * 4}, 2};
  return {{(rows + 127) / 128 * ((columns + 3) / 4) * 512, 0}, 1}; // tiles of 128 rows by 4 columns
}

/// The rows of a matrix, or these rounded up, from the rows of its scales and the last length of their param.
constexpr int64_t matrixRows(const QuantizedFormat &format, ScaleLayout layout, int64_t scaleRows, int64_t length) {
  return layout == ScaleLayout::packed ? length : scaleRows * format.blockRows;
}

static_assert(
    [] {
      for (size_t i = 0; i < std::size(kQuantizedFormats); ++i)
        if (static_cast<size_t>(kQuantizedFormats[i].number) != i)
          return false;
      return true;
    }(),
    "formatOf() reads row i for number i");

} // namespace reshard
