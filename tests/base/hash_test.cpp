// SPDX-License-Identifier: Apache-2.0
// Hashes and hexadecimal digits.

#include "base/hash.h"

#include <gtest/gtest.h>

using namespace reshard;

namespace {

TEST(Hash, IsTheSameInEveryBuild) {
  EXPECT_EQ(hashOf(""), 0x2d06800538d394c2u);
  EXPECT_EQ(hexadecimal(digestOf("", 0)), "99aa06d3014798d86001c324468d497f");
}

TEST(Hash, OfPiecesIsThatOfTheWhole) {
  const std::string text(1000, 'x');
  Digester digester;
  digester.add(text.data(), 1);
  digester.add(text.data(), 0);
  digester.add(text.data(), 999);
  EXPECT_EQ(digester.digest(), digestOf(text.data(), text.size()));
}

TEST(Hexadecimal, Digits) {
  EXPECT_EQ(hexadecimal(std::array<uint8_t, 3>{0, 0x1f, 0xab}), "001fab");
  EXPECT_EQ(hexadecimal(0x1f, 8), "0000001f");
  EXPECT_EQ(hexadecimal(0xdeadbeef, 1), "deadbeef");
  EXPECT_EQ(hexadecimal(0, 1), "0");
  EXPECT_EQ(hexadecimal(UINT64_MAX, 1), "ffffffffffffffff");
}

} // namespace
