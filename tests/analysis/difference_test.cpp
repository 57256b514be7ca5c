// --fail-on: comparisons over names, joined by and, or, not and parentheses.

#include "analysis/report/difference.h"

#include <gtest/gtest.h>

using namespace reshard::analysis;

namespace {

const std::map<std::string, double> kNames = {
    {"world", 4}, {"remote_bytes", 100}, {"remote_bytes_ratio", 1.05}, {"messages_delta", -3}};

TEST(FailOn, Holds) {
  for (const char *expression :
       {"remote_bytes > 0", "remote_bytes>0", "remote_bytes == 100", "remote_bytes != 99", "remote_bytes >= 100",
        "remote_bytes <= 100", "remote_bytes_ratio > 1.04", "messages_delta < 0", "messages_delta == -3",
        "-3 == messages_delta", "messages_delta < -messages_delta",
        // and binds tighter than or
        "1 == 1 or 1 == 2 and 1 == 2", "1 == 2 and 1 == 2 or 1 == 1", "  remote_bytes > 99 and messages_delta < 0  ",
        "(remote_bytes > 0)", "((remote_bytes) > (0))", "1 == 1 and (1 == 2 or 1 == 1)", "not remote_bytes < 100",
        "not (1 == 1 and 1 == 2) and 2 > 1", "(remote_bytes + 20) / 2 * 3 == 180", "10 - 2 - 3 == 5", "1 + 2 * 3 == 7",
        "remote_bytes - -messages_delta == 97", "-(1 + 2) == messages_delta", "remote_bytes>0 and(world>1)"}) {
    std::string error;
    EXPECT_TRUE(holds(expression, kNames, error)) << expression;
    EXPECT_EQ(error, "") << expression;
  }
  for (const char *expression :
       {"remote_bytes < 100", "remote_bytes > 0 and messages_delta > 0", "1 == 2 or 2 == 3", "(1 == 2)",
        "(1 == 1 or 1 == 2) and 1 == 2", "not (remote_bytes > 0)", "not 1 == 1 or 1 == 2"}) {
    std::string error;
    EXPECT_FALSE(holds(expression, kNames, error)) << expression;
    EXPECT_EQ(error, "") << expression;
  }
}

TEST(FailOn, ErrorsNameThePosition) {
  for (const auto &[expression, message] :
       {std::pair{"remote_byte > 0", "unknown name 'remote_byte', did you mean 'remote_bytes'? at character 1"},
        {"", "expected a number, a name or '(' at character 1"},
        {"remote_bytes", "expected a comparison at character 13"},
        {"remote_bytes = 1", "expected a comparison at character 14"},
        {"remote_bytes >", "expected a number, a name or '(' at character 15"},
        {"(remote_bytes > 0", "expected ')' at character 18"},
        {"remote_bytes > 0)", "unexpected ')' at character 17"},
        {"()", "expected a number, a name or '(' at character 2"},
        {"(remote_bytes)", "expected a comparison at character 15"},
        {"not remote_bytes", "expected a comparison at character 17"},
        {"(1 < 2) + 1 > 0", "expected a number, found a comparison at character 10"},
        {"1 / 0 > 1", "found a division by zero at character 6"},
        {"nan > 1", "unknown name 'nan'; known here: messages_delta, remote_bytes, remote_bytes_ratio, world at character 1"},
        {"remote_bytes > 1 and", "expected a number, a name or '(' at character 21"},
        {"remote_bytes > 1 xor 1 == 1", "unexpected 'xor 1 == 1' at character 18"},
        {"1 < 2 < 3", "unexpected '< 3' at character 7"}}) {
    std::string error;
    holds(expression, kNames, error);
    EXPECT_EQ(error, message) << expression;
  }
  for (const char *deep : {"(", "-", "not "}) {
    std::string text, error;
    for (int i = 0; i < 100'000; ++i)
      text += deep;
    holds(text, kNames, error);
    EXPECT_EQ(error.find("the expression is nested too deeply: expected at most 64 levels"), 0u) << deep;
  }
}

} // namespace
