// SPDX-License-Identifier: Apache-2.0
// Expressions: the grammar, values of integers and fractions, the positions of errors.
// tests/compiler/expression_limits_test.cpp has those of the YAML.

#include "base/expression.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

using namespace reshard;

namespace {

const std::map<std::string, int64_t, std::less<>> kNames = {{"hidden", 1024}, {"heads", 16}, {"zero", 0}};

template <class Number> std::optional<Number> valueOf(std::string_view name) {
  const auto found = kNames.find(name);
  return found == kNames.end() ? std::nullopt : std::optional(static_cast<Number>(found->second));
}

/// The value as text, or "error at OFFSET: message".
template <class Number> std::string value(std::string_view text) {
  size_t at = 0;
  const auto numbers =
      std::is_integral_v<Number> ? ParsedExpression::Numbers::integers : ParsedExpression::Numbers::fractions;
  auto error = [&](const Status &status) { return "error at " + std::to_string(at) + ": " + status.message(); };
  const auto parsed = ParsedExpression::parse(text, numbers, at);
  if (!parsed.ok())
    return error(parsed.status());
  const auto result = parsed->template evaluate<Number>(valueOf<Number>, at);
  if (!result.ok())
    return error(result.status());
  return *result ? std::to_string(**result) : "none";
}

TEST(Expression, Integers) {
  EXPECT_EQ(value<int64_t>("hidden / heads - 2 * -3"), "70");
  EXPECT_EQ(value<int64_t>("ceil(50257, 128)"), "50304");
  EXPECT_EQ(value<int64_t>("not zero and (heads > 1 or zero)"), "1");
  EXPECT_EQ(value<int64_t>("true + true - false"), "2");
  EXPECT_EQ(value<int64_t>("5 or 7"), "1");
  EXPECT_EQ(value<int64_t>("nothing + 1"), "none");
  EXPECT_EQ(value<int64_t>("zero and nothing"), "0");
  EXPECT_EQ(value<int64_t>("nothing and zero"), "none");
}

TEST(Expression, Fractions) {
  EXPECT_EQ(value<double>("3 / 2"), "1.500000");
  EXPECT_EQ(value<double>("1.05 * 100 == 105"), "1.000000");
  EXPECT_EQ(value<double>("ceil(10.5, 4)"), "12.000000");
  EXPECT_EQ(value<double>("not 0.5"), "0.000000");
  EXPECT_EQ(value<double>("9223372036854775807 * 2 > 1e19"), "1.000000");
}

TEST(Expression, SkippedOperandsCauseNoError) {
  EXPECT_EQ(value<int64_t>("zero and 1 / zero"), "0");
  EXPECT_EQ(value<int64_t>("heads or 7 / 2 or 1 / 0"), "1");
  EXPECT_EQ(value<int64_t>("zero and (1 / 0 or 1 / 0) or heads"), "1");
  EXPECT_EQ(value<int64_t>("heads and 1 / zero"), "error at 12: division by zero: 1 / 0");
}

TEST(Expression, ErrorsHaveAnOffset) {
  EXPECT_EQ(value<int64_t>("7 / 2"), "error at 2: division leaves a remainder: 7 / 2");
  EXPECT_EQ(value<int64_t>("1.5"), "error at 0: expected a decimal integer, found '1.5'");
  EXPECT_EQ(value<int64_t>("1 + 010"), "error at 4: expected a decimal integer without leading zeros, found '010'");
  EXPECT_EQ(value<int64_t>("9223372036854775808"), "error at 0: number '9223372036854775808' is 2^63 or more");
  EXPECT_EQ(value<int64_t>("-9223372036854775807 - 1"), "error at 21: overflow past 2^63: -9223372036854775807 - 1");
  EXPECT_EQ(value<int64_t>("ceil(1, 0)"), "error at 0: ceil(1, 0): expected a multiple of at least 1");
  EXPECT_EQ(value<double>("1 / (heads - 16.0)"), "error at 2: division by zero: 1 / 0");
  EXPECT_EQ(value<double>("1.5.2"), "error at 0: expected a number, found '1.5.2'");
  EXPECT_EQ(value<double>("(1"), "error at 2: expected ')', found the end of the expression");
  EXPECT_EQ(value<double>("max(1, 2)"), "error at 0: unknown function 'max', expected 'ceil'");
  EXPECT_EQ(value<double>(std::string(70, '(')), "error at 64: the expression is nested more than 64 deep");
  EXPECT_EQ(value<double>(std::string(5000, '1')),
            "error at 0: the expression has 5000 characters, expected at most 4096");
}

TEST(Expression, LongChainsNeedNoRecursion) {
  std::string text = "1";
  for (int i = 0; i < 2000; ++i)
    text += "+1";
  EXPECT_EQ(value<int64_t>(text), "2001");
}

TEST(Expression, NamesAndConditions) {
  size_t at = 0;
  const auto parsed = ParsedExpression::parse("a + ceil(b, 2) > a and true", ParsedExpression::Numbers::integers, at);
  ASSERT_TRUE(parsed.ok());
  std::string names;
  for (const auto &[name, offset] : parsed->names())
    names += std::string(name) + std::to_string(offset) + " ";
  EXPECT_EQ(names, "a0 b9 a17 ");
  for (const auto &[text, condition] :
       {std::pair("a < b", true), std::pair("not a", true), std::pair("a or b", true), std::pair("(a == b)", true),
        std::pair("a", false), std::pair("-(a < b)", false), std::pair("1 + (a < b)", false)}) {
    const auto one = ParsedExpression::parse(text, ParsedExpression::Numbers::fractions, at);
    ASSERT_TRUE(one.ok()) << text;
    EXPECT_EQ(one->isCondition(), condition) << text;
  }
}

} // namespace
