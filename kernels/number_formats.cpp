// SPDX-License-Identifier: Apache-2.0
#include "kernels/number_formats.h"

#include <utility>

#include <algorithm>
#include <bit>
#include <cmath>

namespace reshard::kernels {

std::optional<NumberFormat> numberFormatNamed(std::string_view name) {
  constexpr std::pair<std::string_view, NumberFormat> kNames[] = {{"fp32", NumberFormat::fp32},
                                                                  {"bf16", NumberFormat::bf16},
                                                                  {"fp16", NumberFormat::fp16},
                                                                  {"fp8_e4m3", NumberFormat::fp8_e4m3},
                                                                  {"fp8_e5m2", NumberFormat::fp8_e5m2}};
  for (const auto &[known, format] : kNames)
    if (known == name)
      return format;
  return std::nullopt;
}

namespace {

constexpr Encoding kFloat = encoding(NumberFormat::fp32);

} // namespace

float decode(NumberFormat format, uint32_t code) {
  if (format == NumberFormat::int4)
    return static_cast<float>(static_cast<int32_t>(code) - 8);
  const Encoding e = encoding(format);
  const uint32_t magnitude = code & (e.sign() - 1);
  const float sign = code & e.sign() ? -1.0f : 1.0f;
  if (magnitude > e.maxFinite)
    return std::copysign(
        std::bit_cast<float>(magnitude == e.infinity && e.infinity != e.nan ? kFloat.infinity : kFloat.nan), sign);
  const uint32_t exponent = magnitude >> e.mantissaBits, mantissa = magnitude & ((1u << e.mantissaBits) - 1);
  const uint32_t significand = exponent > 0 ? mantissa | 1u << e.mantissaBits : mantissa;
  return sign *
         std::ldexp(static_cast<float>(significand), std::max(static_cast<int>(exponent), 1) - e.bias - e.mantissaBits);
}

uint32_t encode(NumberFormat format, float value, Overflow overflow) {
  const Encoding e = encoding(format);
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & (kFloat.sign() - 1);
  const uint32_t sign = bits & kFloat.sign() ? e.sign() : 0;
  if (format == NumberFormat::int4) { // std::nearbyint: ties to even
    const float limited = std::isnan(value) ? std::copysign(8.0f, value) : value;
    return static_cast<uint32_t>(static_cast<int>(std::nearbyint(std::clamp(limited, -8.0f, 7.0f))) + 8);
  }
  if (magnitude > kFloat.infinity)
    return sign | e.nan;
  if (format == NumberFormat::fp32)
    return bits;
  // The value is significand * 2^(exponent - 127 - 23). Subnormal fp32 values use the exponent of the smallest normal
  // value.
  int exponent = static_cast<int>(magnitude >> kFloat.mantissaBits);
  const uint32_t mantissa = magnitude & ((1u << kFloat.mantissaBits) - 1);
  const uint32_t significand = exponent > 0 ? mantissa | 1u << kFloat.mantissaBits : mantissa;
  exponent = std::max(exponent, 1);
  // The exponent of the format's smallest normal value, which its subnormal values use too.
  const int lowest = kFloat.bias - e.bias + 1;
  const int drop = kFloat.mantissaBits - e.mantissaBits + std::max(lowest - exponent, 0);
  if (drop > kFloat.mantissaBits + 1) // less than half of the smallest subnormal value: rounds to zero
    return sign;
  const uint32_t rest = significand & ((1u << drop) - 1), half = 1u << (drop - 1);
  uint32_t kept = significand >> drop;
  if (rest > half || (rest == half && kept % 2 == 1))
    ++kept;
  // `kept` includes the leading one of normal values. The sum adds it to the exponent field, as it adds a carry.
  const uint32_t code = (static_cast<uint32_t>(std::max(exponent - lowest, 0)) << e.mantissaBits) + kept;
  if (code <= e.maxFinite)
    return sign | code;
  return sign | (overflow == Overflow::saturate ? e.maxFinite : e.infinity);
}

} // namespace reshard::kernels
