// SPDX-License-Identifier: Apache-2.0
// Sizes in bytes: printed and parsed.

#include "base/text.h"

#include <gtest/gtest.h>

using namespace reshard;

namespace {

TEST(ByteSize, IsPrinted) {
  for (const auto &[bytes, text] : {std::pair{0.0, "0 B"},
                                    {1023.0, "1023 B"},
                                    {1024.0, "1.0 KiB"},
                                    {1.5 * (1 << 30), "1.5 GiB"},
                                    {3e15, "2728.5 TiB"}})
    EXPECT_EQ(humanBytes(bytes), text);
}

TEST(ByteSize, IsParsed) {
  for (const auto &[text, bytes] : {std::pair<std::string_view, int64_t>{"1", 1},
                                    {"3000", 3000},
                                    {"64KiB", 65536},
                                    {"64 KiB", 65536},
                                    {"512MiB", 536870912},
                                    {"5GB", 5'000'000'000},
                                    {"2KB", 2000},
                                    {"2MB", 2'000'000},
                                    {"1GiB", 1 << 30},
                                    {"9223372036854775807", INT64_MAX},
                                    {"8589934591GiB", 8589934591 << 30}}) {
    const Result<int64_t> size = parseBytes(text);
    ASSERT_TRUE(size.ok()) << text;
    EXPECT_EQ(*size, bytes) << text;
  }
}

TEST(ByteSize, ErrorsNameWhatWasExpected) {
  for (const char *text : {"", "KiB", " 1", "-1", "+1", "1.5GiB", "1 B", "1kib", "0x10", "1KiBKiB", "1e3"})
    EXPECT_EQ(parseBytes(text).status().message(),
              "a number of bytes (an integer, optionally with the unit KiB, MiB, GiB, KB, MB or GB)")
        << text;
  for (const char *text : {"0", "00", "01", "0KiB", "9223372036854775808", "8589934592GiB", "99999999999999999999"})
    EXPECT_EQ(parseBytes(text).status().message(), "1 to 2^63 - 1 bytes without leading zeros") << text;
}

} // namespace
