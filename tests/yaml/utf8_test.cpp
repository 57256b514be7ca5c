// SPDX-License-Identifier: Apache-2.0
// Characters of UTF-8: the limits of each length, and what is not a character.

#include "base/yaml/diagnostics.h"

#include <gtest/gtest.h>

#include <string>

using namespace reshard;

namespace {

/// The UTF-8 of a code point, surrogates included.
std::string encode(unsigned code) {
  if (code < 0x80)
    return {static_cast<char>(code)};
  std::string text;
  const int rest = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  constexpr unsigned kFirst[] = {0, 0xc0, 0xe0, 0xf0};
  text += static_cast<char>(kFirst[rest] | code >> 6 * rest);
  for (int i = rest; i-- > 0;)
    text += static_cast<char>(0x80 | (code >> 6 * i & 0x3f));
  return text;
}

TEST(Utf8, AcceptsEveryCodePointAndNoOther) {
  for (unsigned code = 0; code < 0x120000; ++code) {
    const std::string text = encode(code);
    const bool valid = code < 0x110000 && (code < 0xd800 || code > 0xdfff);
    ASSERT_EQ(utf8Bytes(text, 0), valid ? text.size() : 0) << code;
  }
}

TEST(Utf8, RefusesBytesThatMakeNoCharacter) {
  for (const char *text : {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xc2", "\xc2\x41", "\xe0\x9f\xbf", "\xe2\x82",
                           "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff"})
    EXPECT_EQ(utf8Bytes(text, 0), 0u) << text;
  EXPECT_EQ(utf8Bytes("\xc3\xa4x", 2), 1u);
}

} // namespace
