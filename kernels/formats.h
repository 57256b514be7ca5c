// Stored number formats: their constants, and the exact conversion of one value. What is here defines what
// kernels/convert.h must give.
#pragma once

#include "kernels/host_device.h"

#include <cstddef>
#include <optional>
#include <string_view>

namespace reshard::kernels {

/// fp8_e4m3 is OCP's E4M3 (PyTorch: float8_e4m3fn), which has no infinity; fp4_e2m1 has neither infinity nor NaN.
enum class Format : uint8_t { fp32, bf16, fp16, fp8_e4m3, fp8_e5m2, fp4_e2m1 };

/// What becomes of values beyond the largest of an 8-bit format, infinities included: `saturate`, the largest of their
/// sign (OCP's saturating mode, CUDA's __NV_SATFINITE); `infinity`, an infinity, or the NaN of E4M3 (OCP's
/// non-saturating mode; PyTorch, ml_dtypes). fp32, bf16 and fp16 always overflow to infinity, fp4_e2m1 always
/// saturates.
enum class Overflow : uint8_t { saturate, infinity };

/// The format of a dtype's name ("bf16"), for those that can be cast.
std::optional<Format> formatNamed(std::string_view name);

/// Codes of a format without their sign bit. Every conversion makes a NaN the one `nan` of its target, with its sign.
struct Encoding {
  int bits;           ///< of a code
  int mantissaBits;   ///< behind the point
  int bias;           ///< of the exponent
  uint32_t maxFinite; ///< largest finite value
  uint32_t infinity, nan;
  RESHARD_HOST_DEVICE constexpr uint32_t sign() const { return 1u << (bits - 1); }
};

/// That of a format. In fp8_e4m3 the infinity is the NaN, in fp4_e2m1 both are the largest value.
RESHARD_HOST_DEVICE constexpr Encoding encoding(Format format) {
  switch (format) {
  case Format::fp32:
    return {32, 23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FC00000};
  case Format::bf16:
    return {16, 7, 127, 0x7F7F, 0x7F80, 0x7FC0};
  case Format::fp16:
    return {16, 10, 15, 0x7BFF, 0x7C00, 0x7E00};
  case Format::fp8_e4m3:
    return {8, 3, 7, 0x7E, 0x7F, 0x7F};
  case Format::fp8_e5m2:
    return {8, 2, 15, 0x7B, 0x7C, 0x7E};
  case Format::fp4_e2m1:
    break;
  }
  return {4, 1, 1, 0x7, 0x7, 0x7};
}

/// Bytes of an element; of fp4_e2m1, where a code stands alone in the low bits of a byte (quantizeNvfp4 packs two),
/// one.
constexpr uint64_t itemBytes(Format format) { return (static_cast<uint64_t>(encoding(format).bits) + 7) / 8; }

/// The value of a code, exactly.
float decode(Format format, uint32_t code);

/// The code of the value nearest to `value`, of two the even one.
uint32_t encode(Format format, float value, Overflow overflow);

/// The value of a scale of format E8M0: 2^(code - 127); 255 is NaN.
float decodeE8m0(uint8_t code);

} // namespace reshard::kernels
