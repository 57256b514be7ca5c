// SPDX-License-Identifier: Apache-2.0
// Stored number formats: their constants, and the exact conversion of one value. These functions define the results
// that the kernels of kernels/cpu/convert.h must give.
#pragma once

#include "base/formats/quantized_formats.h"
#include "kernels/host_device.h"

#include <cstddef>
#include <optional>
#include <string_view>

namespace reshard::kernels {

/// Number formats. fp8_e4m3 is OCP's E4M3 (PyTorch: float8_e4m3fn) and has no infinity; fp4_e2m1 has neither infinity
/// nor NaN. int4 is an integer from -8 to 7, stored as itself + 8; it has no sign bit and no negative zero.
enum class NumberFormat : uint8_t { fp32, bf16, fp16, fp8_e4m3, fp8_e5m2, fp4_e2m1, int4 };

/// Conversion of values beyond the finite range of a format of 8 or 16 bits, infinities included. `saturate`: the
/// largest finite value of the same sign (OCP's saturating mode, CUDA's __NV_SATFINITE). `infinity`: an infinity, or
/// NaN in E4M3 (OCP's non-saturating mode; PyTorch, ml_dtypes). fp32 holds every value; formats of four bits always
/// saturate, and a NaN becomes their largest value with its sign.
enum class Overflow : uint8_t { saturate, infinity };

/// Returns the format of a dtype name ("bf16"), or nullopt if the dtype cannot be cast.
std::optional<NumberFormat> numberFormatNamed(std::string_view name);

/// Constants of a format; codes are given without the sign bit. Every conversion of a NaN gives `nan` with the sign of
/// the input.
struct Encoding {
  int bits;           ///< bits of a code, including the sign
  int mantissaBits;   ///< explicit mantissa bits
  int bias;           ///< exponent bias
  uint32_t maxFinite; ///< code of the largest finite value
  uint32_t infinity, nan;
  RESHARD_HOST_DEVICE constexpr uint32_t sign() const { return 1u << (bits - 1); }
  /// The mantissa of the largest finite value, as mantissa of an fp32, and its exponent.
  RESHARD_HOST_DEVICE constexpr uint32_t largestMantissa() const {
    return (maxFinite & ((1u << mantissaBits) - 1)) << (23 - mantissaBits);
  }
  RESHARD_HOST_DEVICE constexpr int largestExponent() const {
    return static_cast<int>(maxFinite >> mantissaBits) - bias;
  }
};

/// Returns the encoding of a format. In fp8_e4m3 `infinity` equals `nan`; in fp4_e2m1 both equal the largest value.
RESHARD_HOST_DEVICE constexpr Encoding encoding(NumberFormat format) {
  switch (format) {
  case NumberFormat::fp32:
    return {32, 23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FC00000};
  case NumberFormat::bf16:
    return {16, 7, 127, 0x7F7F, 0x7F80, 0x7FC0};
  case NumberFormat::fp16:
    return {16, 10, 15, 0x7BFF, 0x7C00, 0x7E00};
  case NumberFormat::fp8_e4m3:
    return {8, 3, 7, 0x7E, 0x7F, 0x7F};
  case NumberFormat::fp8_e5m2:
    return {8, 2, 15, 0x7B, 0x7C, 0x7E};
  case NumberFormat::int4: // has no such parts; only `bits` is used
  case NumberFormat::fp4_e2m1:
    break;
  }
  return {4, 1, 1, 0x7, 0x7, 0x7};
}

/// Returns the largest finite value of a format of at most 16 bits.
RESHARD_HOST_DEVICE constexpr float largest(NumberFormat format) {
  return format == NumberFormat::bf16       ? 0x1.FEp127f
         : format == NumberFormat::fp16     ? 65504.0f
         : format == NumberFormat::fp8_e4m3 ? 448.0f
         : format == NumberFormat::fp8_e5m2 ? 57344.0f
         : format == NumberFormat::int4     ? 7.0f
                                            : 6.0f;
}

/// Returns the fp32 bits of the least magnitude that a cast to this format of 8 bits or more finds beyond its range:
/// it rounds to more than the largest finite value. kNever: there is none.
constexpr uint32_t kNever = 0xFFFFFFFF;
RESHARD_HOST_DEVICE constexpr uint32_t firstBeyond(NumberFormat format) {
  switch (format) {
  case NumberFormat::bf16:
    return 0x7F7F8000;
  case NumberFormat::fp16:
    return 0x477FF000; // 65520
  case NumberFormat::fp8_e4m3:
    return 0x43E80001; // the next one after 464, which is halfway to 480 and rounds to 448
  case NumberFormat::fp8_e5m2:
    return 0x47700000; // 61440
  default:
    return kNever;
  }
}

/// Returns the fp32 bits of the last magnitude that a cast finds beyond the range: an infinity stays one if the format
/// has infinities.
RESHARD_HOST_DEVICE constexpr uint32_t lastBeyond(NumberFormat format) {
  return format == NumberFormat::fp8_e4m3 ? 0x7F800000 : 0x7F7FFFFF;
}

/// Returns the number by which an amax is divided to obtain a scale: the largest value, or, as compressed-tensors does,
/// half of the range of int4.
RESHARD_HOST_DEVICE constexpr float scaleDivisor(NumberFormat codes) {
  return codes == NumberFormat::int4 ? 7.5f : largest(codes);
}

/// Returns the number format of codes.
RESHARD_HOST_DEVICE constexpr NumberFormat numberFormat(CodeFormat code) {
  switch (code) { // without a default: a new format is a warning of the compiler
  case CodeFormat::fp8_e4m3:
    return NumberFormat::fp8_e4m3;
  case CodeFormat::int4:
    return NumberFormat::int4;
  case CodeFormat::fp4_e2m1:
    break;
  }
  return NumberFormat::fp4_e2m1;
}

/// Returns the bytes of an element. A code of four bits counts as one byte here (in its low bits); quantized matrices
/// have two in a byte.
constexpr uint64_t itemBytes(NumberFormat format) { return (static_cast<uint64_t>(encoding(format).bits) + 7) / 8; }

/// Returns the exact value of a code.
float decode(NumberFormat format, uint32_t code);

/// Returns the code nearest to `value`; ties go to the even code.
uint32_t encode(NumberFormat format, float value, Overflow overflow);

} // namespace reshard::kernels
