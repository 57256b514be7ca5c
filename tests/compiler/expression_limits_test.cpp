// SPDX-License-Identifier: Apache-2.0
// Values of expressions, and the locations of their errors. Complete messages are in errors/let_expressions.yaml and
// others.

#include "compiler/frontend/frontend.h"

#include <gtest/gtest.h>

namespace reshard {
namespace {

const Environment kNames = {{"hidden", 1024}, {"heads", 16},      {"tied", 1},
                            {"pp", 2},        {"max", INT64_MAX}, {"lost", kUnknownValue}};

std::optional<int64_t> value(const std::string &text) {
  Diagnostics diagnostics;
  const auto result = evaluate({text, {}}, kNames, diagnostics);
  EXPECT_EQ(result.has_value(), diagnostics.ok()) << text << "\n" << diagnostics.text();
  return result;
}

/// The column of the only error, from 0.
int column(const std::string &text) {
  Diagnostics diagnostics;
  const uint32_t file = diagnostics.addFile("x", text);
  EXPECT_FALSE(evaluate({text, {file, 1, 1}}, kNames, diagnostics)) << text;
  EXPECT_EQ(diagnostics.errors(), 1u) << text;
  const std::string message = diagnostics.text();
  const size_t colon = message.find(':', 2);
  return colon == std::string::npos ? -1 : std::stoi(message.substr(4)) - 1;
}

TEST(Expression, Arithmetic) {
  EXPECT_EQ(value("8"), 8);
  EXPECT_EQ(value(" hidden / heads "), 64);
  EXPECT_EQ(value("2 + 3 * 4"), 14);
  EXPECT_EQ(value("(2 + 3) * 4"), 20);
  EXPECT_EQ(value("10 - 4 - 3"), 3);
  EXPECT_EQ(value("100 / 10 / 5"), 2);
  EXPECT_EQ(value("-2 * -3"), 6);
  EXPECT_EQ(value("--2"), 2);
  EXPECT_EQ(value("-7 / 7"), -1);
  EXPECT_EQ(value("ceil(50257, 128)"), 50304);
  EXPECT_EQ(value("ceil(0, 128)"), 0);
  EXPECT_EQ(value("ceil(128, 128) + ceil(1, ceil(3, 2))"), 132);
  EXPECT_EQ(value("9223372036854775807"), INT64_MAX);
  EXPECT_EQ(value("-9223372036854775807"), -INT64_MAX);
}

TEST(Expression, Logic) {
  EXPECT_EQ(value("not tied or pp > 1"), 1);
  EXPECT_EQ(value("not tied and pp > 1"), 0);
  EXPECT_EQ(value("not (tied and pp == 1)"), 1);
  EXPECT_EQ(value("1 or 1 and 0"), 1); // `and` binds tighter than `or`
  EXPECT_EQ(value("not 0 == 0"), 0);   // comparisons bind tighter than `not`
  EXPECT_EQ(value("1 + 1 < 3 * 1"), 1);
  EXPECT_EQ(value("5 and 7"), 1);
  EXPECT_EQ(value("true != false"), 1);
  for (const auto &[text, holds] :
       {std::pair("1 <= 1", 1), std::pair("1 >= 2", 0), std::pair("1 < 1", 0), std::pair("2 > 1", 1)})
    EXPECT_EQ(value(text), holds) << text;
}

TEST(Expression, ShortCircuit) {
  EXPECT_EQ(value("0 and 1 / 0"), 0);
  EXPECT_EQ(value("1 or max + 1"), 1);
  EXPECT_FALSE(value("1 and 1 / 0"));
  EXPECT_FALSE(value("1 or nothing")); // names are checked in operands that are not evaluated
}

TEST(Expression, Errors) {
  for (const char *text : {"",
                           " ",
                           "1 +",
                           "(1",
                           "1)",
                           "1 2",
                           "a b",
                           "()",
                           "ceil",
                           "ceil(1)",
                           "ceil(1, 0)",
                           "ceil(-1, 2)",
                           "ceil(1, 2, 3)",
                           "7 / 2",
                           "1 / 0",
                           "max + 1",
                           "-max - 2",
                           "max * 2",
                           "-max - 1",
                           "ceil(max, 2)",
                           "1 < 2 < 3",
                           "1 == 1 == 1",
                           "010",
                           "00",
                           "1_0",
                           "0x10",
                           "1.5",
                           "1e3",
                           "9223372036854775808",
                           "99999999999999999999999",
                           "$x",
                           "a = 1",
                           "1 && 1",
                           "! 1",
                           "1 % 2",
                           "max(1, 2)",
                           "nothing",
                           "and",
                           "not",
                           "1 and",
                           "\xc3\xa9",
                           "1 // 2",
                           "\"1\""})
    EXPECT_FALSE(value(text)) << text;
}

TEST(Expression, ErrorsPointAtTheCharacter) {
  EXPECT_EQ(column("1 + hiden"), 4);
  EXPECT_EQ(column("1 + 7 / 2"), 6);
  EXPECT_EQ(column("(1 + 2"), 6);
  EXPECT_EQ(column("1 < 2 < 3"), 6);
  EXPECT_EQ(column("hidden % 2"), 7);
}

TEST(Expression, UnknownValuesGiveNoFurtherErrors) {
  Diagnostics diagnostics;
  EXPECT_FALSE(evaluate({"lost * 2", {}}, kNames, diagnostics));
  EXPECT_FALSE(evaluate({"lost and 0 or 1", {}}, kNames, diagnostics));
  EXPECT_TRUE(diagnostics.ok());
}

TEST(Expression, NestingAndLengthAreLimited) {
  const auto nested = [](int n) { return std::string(n, '(') + "1" + std::string(n, ')'); };
  EXPECT_EQ(value(nested(60)), 1);
  EXPECT_FALSE(value(nested(70)));
  EXPECT_FALSE(value(std::string(1000000, '(')));
  EXPECT_FALSE(value(std::string(2000, '-') + "1"));
  EXPECT_FALSE(value(std::string(100000, '1')));
}

TEST(Expression, Checks) {
  Diagnostics diagnostics;
  EXPECT_TRUE(checkSyntax({"a / 0 + b", {}}, diagnostics));
  EXPECT_TRUE(checkNames({"hidden / 0", {}}, kNames, diagnostics));
  EXPECT_TRUE(diagnostics.ok());
  EXPECT_FALSE(checkSyntax({"a +", {}}, diagnostics));
  EXPECT_FALSE(checkNames({"a / 0", {}}, kNames, diagnostics));
  EXPECT_EQ(diagnostics.errors(), 2u);
}

} // namespace
} // namespace reshard
