// SPDX-License-Identifier: Apache-2.0
// Expressions of the YAML and of reshard-diff --fail-on (docs/yaml.md, section 4).
#pragma once

#include "base/status.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

namespace reshard {

/// A parsed expression of numbers, names, + - * / ( ), ceil(x, multiple), comparisons, and, or, not, true (1) and false
/// (0). A comparison has the value 0 or 1. It refers to the text that was parsed.
class ParsedExpression {
public:
  /// The numbers that the text may contain: decimal integers only, or also fractions.
  enum class Numbers { integers, fractions };
  /// A name in the expression and the offset of its first byte.
  struct Name {
    std::string_view text;
    size_t offset;
  };

  /// `errorAt` receives the offset in `text` of an error.
  static Result<ParsedExpression> parse(std::string_view text, Numbers numbers, size_t &errorAt);

  /// All names, in the order of the text.
  std::vector<Name> names() const;
  /// Whether the outermost operation is a comparison, `and`, `or` or `not`.
  bool isCondition() const;

  /// Computes the value, of type int64_t or double; an int64_t only of an expression with integers. No int64_t is
  /// -2^63. The value is empty if it depends on a name without a value. Errors: a division by zero, a division of
  /// integers with a remainder, an overflow, a wrong argument of `ceil`; `errorAt` receives the offset. An operand of
  /// `and` or `or` that does not affect the value causes no error.
  template <class Number>
  Result<std::optional<Number>> evaluate(const std::function<std::optional<Number>(std::string_view name)> &valueOf,
                                         size_t &errorAt) const;

private:
  friend class ExpressionParser;
  enum class Operation : uint8_t {
    number,
    name,
    negate,
    add,
    subtract,
    multiply,
    divide,
    ceil,
    beginAnd, ///< between the operands of `and`
    beginOr,
    // Only in conditions:
    endAnd,
    endOr,
    invert,
    equal,
    notEqual,
    less,
    lessOrEqual,
    greater,
    greaterOrEqual,
  };
  /// In postfix order: an operation follows its operands.
  struct Step {
    Operation operation;
    size_t offset = 0;
    std::string_view name{};
    int64_t integer = 0;
    double fraction = 0; // the number as a double, also if it is an integer
  };
  template <class Number> class Evaluator;

  std::vector<Step> steps_;
};

} // namespace reshard
