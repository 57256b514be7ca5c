// SPDX-License-Identifier: Apache-2.0
// --fail-on: comparisons over names, joined by and, or, not and parentheses.

#include "report/diff/difference.h"

#include <gtest/gtest.h>

using namespace reshard::report;

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
        "remote_bytes - -messages_delta == 97", "-(1 + 2) == messages_delta", "remote_bytes>0 and(world>1)",
        "(world > 1)", "not not world", "ceil(remote_bytes + 0.5, 8) == 104", "remote_bytes_ratio * 100 >= 105.0",
        "1 == 1 or 1 / 0 > 1"}) {
    std::string error;
    EXPECT_TRUE(holds(expression, kNames, error)) << expression;
    EXPECT_EQ(error, "") << expression;
  }
  for (const char *expression :
       {"remote_bytes < 100", "remote_bytes > 0 and messages_delta > 0", "1 == 2 or 2 == 3", "(1 == 2)",
        "(1 == 1 or 1 == 2) and 1 == 2", "not (remote_bytes > 0)", "not 1 == 1 or 1 == 2", "not remote_bytes"}) {
    std::string error;
    EXPECT_FALSE(holds(expression, kNames, error)) << expression;
    EXPECT_EQ(error, "") << expression;
  }
}

TEST(FailOn, SaysWhichConditionHeld) {
  const std::map<std::string, double> ratio{{"remote_bytes_ratio", 1.05}};
  struct Case {
    std::string expression;
    std::vector<std::string> held;
    std::map<std::string, double> values; // of the first
  };
  for (const auto &[expression, texts, values] :
       {Case{"remote_bytes_ratio > 1.04", {"remote_bytes_ratio > 1.04"}, ratio},
        {"remote_bytes_ratio > 1.06 or world == 4", {"world == 4"}, {{"world", 4}}},
        {"(world == 4) or remote_bytes_ratio > 1 or world < 3",
         {"(world == 4)", "remote_bytes_ratio > 1"},
         {{"world", 4}}},
        {"world == 4 and (world < 2 or remote_bytes > 99)",
         {"world == 4 and (world < 2 or remote_bytes > 99)"},
         {{"world", 4}, {"remote_bytes", 100}}},
        {"1 == 1 or 1 / 0 > 1", {"1 == 1"}, {}},
        {"world or 1 == 2", {"world or 1 == 2"}, {{"world", 4}}},
        {"world > 4", {}, {}}}) {
    const std::vector<HeldCondition> held = heldConditions(expression, kNames);
    std::vector<std::string> found;
    for (const HeldCondition &each : held)
      found.push_back(each.text);
    EXPECT_EQ(found, texts) << expression;
    EXPECT_EQ(held.empty() ? values : held[0].values, values) << expression;
  }
}

TEST(FailOn, ErrorsNameThePosition) {
  for (const auto &[expression, message] :
       {std::pair{"remote_byte > 0", "unknown name 'remote_byte', did you mean 'remote_bytes'? at character 1"},
        {"", "expected a number, a name or '(', found the end of the expression at character 1"},
        {"remote_bytes", "expected a comparison, found a number at character 1"},
        {"remote_bytes = 1", "expected '==', found '=' at character 14"},
        {"remote_bytes >", "expected a number, a name or '(', found the end of the expression at character 15"},
        {"(remote_bytes > 0", "expected ')', found the end of the expression at character 18"},
        {"remote_bytes > 0)", "expected an operator or the end of the expression, found ')' at character 17"},
        {"()", "expected a number, a name or '(', found ')' at character 2"},
        {"(remote_bytes)", "expected a comparison, found a number at character 1"},
        {"-(1 < 2)", "expected a comparison, found a number at character 1"},
        {"1 / 0 > 1", "division by zero: 1 / 0 at character 3"},
        {"1.2.3 > 1", "expected a number, found '1.2.3' at character 1"},
        {"nan > 1",
         "unknown name 'nan'; known here: messages_delta, remote_bytes, remote_bytes_ratio, world at character 1"},
        {"remote_bytes > 1 and", "expected a number, a name or '(', found the end of the expression at character 21"},
        {"remote_bytes > 1 xor 1 == 1",
         "expected an operator or the end of the expression, found 'xor' at character 18"},
        {"1 < 2 < 3", "expected an operator or the end of the expression, found '<'; comparisons are not chained, use "
                      "'and' at character 7"}}) {
    std::string error;
    holds(expression, kNames, error);
    EXPECT_EQ(error, message) << expression;
  }
  for (const char *deep : {"(", "-", "not "}) {
    std::string text, error;
    for (int i = 0; i < 1'000; ++i)
      text += deep;
    holds(text, kNames, error);
    EXPECT_EQ(error.find("the expression is nested more than 64 deep"), 0u) << deep;
  }
}

} // namespace
