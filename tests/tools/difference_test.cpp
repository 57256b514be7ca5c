// --fail-on: comparisons over names, joined by and and or.

#include "tools/difference.h"

#include <gtest/gtest.h>

using namespace reshard::tools;

namespace {

const std::map<std::string, double> kNames = {
    {"remote_bytes", 100}, {"remote_bytes_ratio", 1.05}, {"messages_delta", -3}};

TEST(FailOn, Holds) {
  for (const char *expression :
       {"remote_bytes > 0", "remote_bytes>0", "remote_bytes == 100", "remote_bytes != 99", "remote_bytes >= 100",
        "remote_bytes <= 100", "remote_bytes_ratio > 1.04", "messages_delta < 0", "messages_delta == -3",
        "-3 == messages_delta", "messages_delta < -messages_delta",
        // and binds tighter than or
        "1 == 1 or 1 == 2 and 1 == 2", "1 == 2 and 1 == 2 or 1 == 1", "  remote_bytes > 99 and messages_delta < 0  "}) {
    std::string error;
    EXPECT_TRUE(holds(expression, kNames, error)) << expression;
    EXPECT_EQ(error, "") << expression;
  }
  for (const char *expression : {"remote_bytes < 100", "remote_bytes > 0 and messages_delta > 0", "1 == 2 or 2 == 3"}) {
    std::string error;
    EXPECT_FALSE(holds(expression, kNames, error)) << expression;
    EXPECT_EQ(error, "") << expression;
  }
}

TEST(FailOn, ErrorsSayWhere) {
  for (const auto &[expression, message] :
       {std::pair{"remote_byte > 0", "unknown name 'remote_byte', did you mean 'remote_bytes'? at character 1"},
        {"", "unknown name '' at character 1"},
        {"remote_bytes", "expected a comparison at character 13"},
        {"remote_bytes = 1", "expected a comparison at character 14"},
        {"remote_bytes >", "unknown name '' at character 15"},
        {"remote_bytes > 1 and", "unknown name '' at character 21"},
        {"remote_bytes > 1 xor 1 == 1", "unexpected 'xor 1 == 1' at character 18"},
        {"1 < 2 < 3", "unexpected '< 3' at character 7"}}) {
    std::string error;
    holds(expression, kNames, error);
    EXPECT_EQ(error, message) << expression;
  }
}

} // namespace
