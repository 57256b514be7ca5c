// SPDX-License-Identifier: Apache-2.0
// UTF-8 as Unicode defines it: no overlong forms, no surrogates, nothing above U+10FFFF.
#pragma once

#include <cstddef>
#include <string_view>

namespace reshard {

/// The number of bytes of the UTF-8 character at `at`, which is inside the text; 0 if it is invalid.
inline size_t utf8Bytes(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) -> unsigned {
    return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0;
  };
  const unsigned first = byte(0);
  if (first < 0x80)
    return 1;
  const size_t bytes = first >= 0xc2 && first <= 0xdf   ? 2
                       : first >= 0xe0 && first <= 0xef ? 3
                       : first >= 0xf0 && first <= 0xf4 ? 4
                                                        : 0;
  const unsigned least = first == 0xe0   ? 0xa0
                         : first == 0xf0 ? 0x90
                                         : 0x80, // the least and the greatest second byte
      most = first == 0xed   ? 0x9f
             : first == 0xf4 ? 0x8f
                             : 0xbf;
  for (size_t i = 1; i < bytes; ++i)
    if (byte(i) < (i == 1 ? least : 0x80) || byte(i) > (i == 1 ? most : 0xbf))
      return 0;
  return bytes;
}

} // namespace reshard
