// SPDX-License-Identifier: Apache-2.0
// Percent-encoding (RFC 3986) of names as parts of keys and as names of files.
#pragma once

#include "base/hash.h"

#include <cctype>
#include <string>
#include <string_view>

namespace reshard {

/// Letters, digits, '-', '_' and '.' stay; each other byte becomes '%' and two hexadecimal digits.
inline std::string percentEncoded(std::string_view text) {
  std::string encoded;
  for (const char each : text)
    if (std::isalnum(static_cast<unsigned char>(each)) || each == '-' || each == '_' || each == '.')
      encoded += each;
    else
      encoded += "%" + hexadecimal(static_cast<unsigned char>(each), 2);
  return encoded;
}

} // namespace reshard
