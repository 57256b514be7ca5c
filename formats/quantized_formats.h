// The quantized formats: the one table that the compiler, the checks of plans, the kernels and the commands read.
// docs/yaml.md, section 12, defines each format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>

namespace reshard {

/// A quantized format, by the number that plans store (schema/plan.fbs).
enum class Quantization : uint8_t { mxfp8, block_fp8, nvfp4 };

/// The number format of a code. Two fp4_e2m1 codes are stored in a byte, the first in the low bits.
enum class CodeFormat : uint8_t { fp8_e4m3, fp4_e2m1 };

/// The number format of a block's scale. e8m0: 2^(code - 127).
enum class ScaleFormat : uint8_t { e8m0, fp32, fp8_e4m3 };

/// The order of the scales of a matrix in memory. plain: row-major; swizzled: as Blackwell's matrix units read them
/// (kernels/scales.h).
enum class ScaleLayout : uint8_t { plain, swizzled };

/// How the scale of a block follows from its amax.
enum class ScaleRule : uint8_t {
  quotient,       ///< amax / largest code value, or 1 if that is 0
  powerOfTwo,     ///< the least power of two with amax / scale <= largest code value
  tensorQuotient, ///< amax / (largest code value * tensor scale), rounded; 1 if the quotient is 0
};

/// A row of the table.
struct QuantizedFormat {
  std::string_view name; // in YAML, IR text and reports
  Quantization number;
  int64_t blockRows, blockColumns; // elements
  CodeFormat code;
  ScaleFormat scale;
  ScaleRule rule;
  bool swizzles;                // ScaleLayout::swizzled is allowed
  bool tensorScale;             // each matrix has an fp32 scale besides those of its blocks
  bool senderQuantizes;         // the default of `by`
  std::string_view scaleSuffix; // of the default name of the param of scales

  constexpr int64_t codesPerByte() const { return code == CodeFormat::fp4_e2m1 ? 2 : 1; }
  constexpr int64_t scaleBytes() const { return scale == ScaleFormat::fp32 ? 4 : 1; }
};

// clang-format off
inline constexpr QuantizedFormat kQuantizedFormats[] = {
    // name       number                   block     code                  scale                  rule                       swizzles tensor sender suffix
    {"mxfp8",     Quantization::mxfp8,     1,   32,  CodeFormat::fp8_e4m3, ScaleFormat::e8m0,     ScaleRule::powerOfTwo,     true,    false, false, "_scale"},
    {"block_fp8", Quantization::block_fp8, 128, 128, CodeFormat::fp8_e4m3, ScaleFormat::fp32,     ScaleRule::quotient,       false,   false, true,  "_scale_inv"},
    {"nvfp4",     Quantization::nvfp4,     1,   16,  CodeFormat::fp4_e2m1, ScaleFormat::fp8_e4m3, ScaleRule::tensorQuotient, true,    true,  false, "_scale"},
};
// clang-format on

/// The row of a format.
constexpr const QuantizedFormat &formatOf(Quantization number) {
  return kQuantizedFormats[static_cast<size_t>(number)];
}

/// The format of a name; nullopt if there is none.
constexpr std::optional<Quantization> quantizationNamed(std::string_view name) {
  for (const QuantizedFormat &format : kQuantizedFormats)
    if (format.name == name)
      return format.number;
  return std::nullopt;
}

namespace detail {
constexpr bool rowsAreNumbered() {
  for (size_t i = 0; i < std::size(kQuantizedFormats); ++i)
    if (static_cast<size_t>(kQuantizedFormats[i].number) != i)
      return false;
  return true;
}
} // namespace detail
static_assert(detail::rowsAreNumbered(), "formatOf() reads row i for number i");

} // namespace reshard
