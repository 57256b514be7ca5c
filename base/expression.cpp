// SPDX-License-Identifier: Apache-2.0
// The parser is a recursive descent; it writes the operations in postfix order, so that evaluation needs no recursion.
#include "base/expression.h"

#include <charconv>
#include <cmath>
#include <string>

namespace reshard {

namespace {

constexpr size_t kMaxBytes = 4096;
constexpr int kMaxNesting = 64; // nested parentheses, `not`, `ceil` and unary minus

bool isDigit(char c) { return c >= '0' && c <= '9'; }
bool isNameStart(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool isName(char c) { return isNameStart(c) || isDigit(c); }

std::string quote(std::string_view text) { return "'" + std::string(text) + "'"; }

} // namespace

// -------------------------------------------------------------------------------------------------------------- parser

class ExpressionParser {
public:
  using Numbers = ParsedExpression::Numbers;

  ExpressionParser(std::string_view text, Numbers numbers) : text_(text), numbers_(numbers) {}

  /// Parses the whole text.
  Result<ParsedExpression> parse(size_t &errorAt) {
    if (text_.size() > kMaxBytes)
      fail(0, "the expression has " + std::to_string(text_.size()) + " characters, expected at most " +
                  std::to_string(kMaxBytes));
    next();
    readOr();
    if (status_.ok() && token_ != Token::end) {
      const bool again =
          token_ == Token::symbol && std::string_view("== != <= >=").find(spelling_) != std::string_view::npos;
      fail(begin_, "expected an operator or the end of the expression, found " + found() +
                       (again ? "; comparisons are not chained, use 'and'" : ""));
    }
    errorAt = errorAt_;
    if (!status_.ok())
      return status_;
    return std::move(result_);
  }

private:
  using Operation = ParsedExpression::Operation;
  enum class Token { end, number, name, symbol };

  /// Records an error, unless there was one before, and skips the rest of the text.
  void fail(size_t offset, std::string message) {
    if (status_.ok()) {
      status_ = failed(std::move(message));
      errorAt_ = offset;
    }
    token_ = Token::end;
    position_ = text_.size();
  }
  std::string found() const { return token_ == Token::end ? "the end of the expression" : quote(spelling_); }

  void add(Operation operation, size_t offset) { result_.steps_.push_back({operation, offset}); }

  // --- tokens

  void next() {
    while (position_ < text_.size() &&
           (text_[position_] == ' ' || text_[position_] == '\t' || text_[position_] == '\n'))
      ++position_;
    begin_ = position_;
    if (position_ == text_.size()) {
      token_ = Token::end;
      spelling_ = {};
      return;
    }
    const char c = text_[position_];
    if (isDigit(c)) {
      token_ = Token::number;
      while (position_ < text_.size() && (isName(text_[position_]) || text_[position_] == '.'))
        ++position_;
    } else if (isNameStart(c)) {
      token_ = Token::name;
      while (position_ < text_.size() && isName(text_[position_]))
        ++position_;
    } else {
      token_ = Token::symbol;
      static constexpr std::string_view kSymbols[] = {"==", "!=", "<=", ">=", "<", ">", "+",
                                                      "-",  "*",  "/",  "(",  ")", ","};
      for (std::string_view symbol : kSymbols)
        if (position_ == begin_ && text_.substr(position_).starts_with(symbol))
          position_ += symbol.size();
      if (position_ == begin_)
        return failCharacter(c);
    }
    spelling_ = text_.substr(begin_, position_ - begin_);
  }

  void failCharacter(char c) {
    const std::string_view two = text_.substr(position_, 2);
    if (c == '$')
      fail(position_, "'$' reads the config and is allowed only at the start of a 'let' value");
    else if (c == '=')
      fail(position_, "expected '==', found '='");
    else if (c == '!')
      fail(position_, "expected '!=' or 'not', found '!'");
    else if (two == "&&" || two == "||")
      fail(position_, std::string("expected '") + (c == '&' ? "and" : "or") + "', found " + quote(two));
    else
      fail(position_, static_cast<unsigned char>(c) < 0x80 ? "unexpected " + quote({&c, 1}) + " in an expression"
                                                           : "unexpected character in an expression");
  }

  bool isSymbol(std::string_view symbol) const { return token_ == Token::symbol && spelling_ == symbol; }
  bool isWord(std::string_view word) const { return token_ == Token::name && spelling_ == word; }
  void expect(std::string_view symbol, const char *why) {
    if (isSymbol(symbol))
      return next();
    const bool comma = token_ == Token::end && symbol == ",";
    fail(begin_, "expected " + quote(symbol) + why + ", found " + found() +
                     (comma ? "; in flow style an expression with a comma must be quoted" : ""));
  }

  /// Counts one level of nesting during its lifetime.
  struct Level {
    explicit Level(ExpressionParser &parser) : parser(parser) {
      if (++parser.depth_ > kMaxNesting)
        parser.fail(parser.begin_, "the expression is nested more than " + std::to_string(kMaxNesting) + " deep");
    }
    ~Level() { --parser.depth_; }
    ExpressionParser &parser;
  };

  // --- the grammar, from the weakest to the strongest operator

  void readOr() {
    readAnd();
    while (isWord("or")) {
      const size_t at = begin_;
      next();
      add(Operation::beginOr, at);
      readAnd();
      add(Operation::endOr, at);
    }
  }

  void readAnd() {
    readNot();
    while (isWord("and")) {
      const size_t at = begin_;
      next();
      add(Operation::beginAnd, at);
      readNot();
      add(Operation::endAnd, at);
    }
  }

  void readNot() {
    if (!isWord("not"))
      return readComparison();
    const Level level(*this);
    const size_t at = begin_;
    next();
    readNot();
    add(Operation::invert, at);
  }

  void readComparison() {
    static constexpr std::pair<std::string_view, Operation> kSigns[] = {
        {"==", Operation::equal},       {"!=", Operation::notEqual}, {"<", Operation::less},
        {"<=", Operation::lessOrEqual}, {">", Operation::greater},   {">=", Operation::greaterOrEqual}};
    readSum();
    for (const auto &[sign, operation] : kSigns)
      if (isSymbol(sign)) {
        const size_t at = begin_;
        next();
        readSum();
        return add(operation, at);
      }
  }

  void readSum() {
    readProduct();
    while (isSymbol("+") || isSymbol("-")) {
      const Operation operation = isSymbol("+") ? Operation::add : Operation::subtract;
      const size_t at = begin_;
      next();
      readProduct();
      add(operation, at);
    }
  }

  void readProduct() {
    readUnary();
    while (isSymbol("*") || isSymbol("/")) {
      const Operation operation = isSymbol("*") ? Operation::multiply : Operation::divide;
      const size_t at = begin_;
      next();
      readUnary();
      add(operation, at);
    }
  }

  void readUnary() {
    if (!isSymbol("-"))
      return readPrimary();
    const Level level(*this);
    const size_t at = begin_;
    next();
    readUnary();
    add(Operation::negate, at);
  }

  void readPrimary() {
    if (token_ == Token::number)
      return readNumber();
    if (isSymbol("(")) {
      const Level level(*this);
      next();
      readOr();
      return expect(")", "");
    }
    if (isWord("ceil"))
      return readCeil();
    if (token_ != Token::name || isWord("and") || isWord("or") || isWord("not"))
      return fail(begin_, "expected a number, a name or '(', found " + found());
    readName();
  }

  void readNumber() {
    const size_t at = begin_;
    const std::string_view digits = spelling_;
    const char *const begin = digits.data(), *const end = begin + digits.size();
    ParsedExpression::Step step{Operation::number, at};
    const auto integer = std::from_chars(begin, end, step.integer);
    const auto fraction = std::from_chars(begin, end, step.fraction);
    if (numbers_ == Numbers::fractions) {
      if (fraction.ec != std::errc() || fraction.ptr != end)
        return fail(at, "expected a number, found " + quote(digits));
    } else if (integer.ptr != end) {
      return fail(at, "expected a decimal integer, found " + quote(digits));
    } else if (digits.size() > 1 && digits[0] == '0') {
      return fail(at, "expected a decimal integer without leading zeros, found " + quote(digits));
    } else if (integer.ec != std::errc()) {
      return fail(at, "number " + quote(digits) + " is 2^63 or more");
    }
    result_.steps_.push_back(step);
    next();
  }

  void readCeil() {
    const size_t at = begin_;
    const Level level(*this);
    next();
    expect("(", " after 'ceil'");
    readSum();
    expect(",", " and a multiple in 'ceil(x, multiple)'");
    readSum();
    expect(")", " after 'ceil(x, multiple'");
    add(Operation::ceil, at);
  }

  void readName() {
    const size_t at = begin_;
    const std::string_view name = spelling_;
    next();
    if (isSymbol("("))
      return fail(at, "unknown function " + quote(name) + ", expected 'ceil'");
    if (name == "true" || name == "false")
      result_.steps_.push_back({Operation::number, at, {}, name == "true", name == "true" ? 1.0 : 0.0});
    else
      result_.steps_.push_back({Operation::name, at, name});
  }

  std::string_view text_;
  const Numbers numbers_;
  ParsedExpression result_;
  Status status_;
  size_t errorAt_ = 0;
  size_t position_ = 0, begin_ = 0; // end and begin of the current token
  Token token_ = Token::end;
  std::string_view spelling_; // the text of the current token
  int depth_ = 0;
};

// ---------------------------------------------------------------------------------------------------------- evaluation

template <class Number> class ParsedExpression::Evaluator {
public:
  using Value = std::optional<Number>;
  using ValueOf = std::function<Value(std::string_view)>;

  explicit Evaluator(const ValueOf &valueOf) : valueOf_(valueOf) {}

  Result<Value> run(const std::vector<Step> &steps, size_t &errorAt) {
    for (const Step &step : steps) {
      error_.clear();
      apply(step);
      if (!error_.empty() && skipping_ == 0) {
        errorAt = step.offset;
        return failed(std::move(error_));
      }
    }
    return pop();
  }

private:
  Value pop() {
    const Value value = values_.back();
    values_.pop_back();
    return value;
  }

  /// Records an error of arithmetic. It does not count in an operand that `and` or `or` skips.
  Value fail(std::string message) {
    error_ = std::move(message);
    return std::nullopt;
  }

  void apply(const Step &step) {
    switch (step.operation) {
    case Operation::number:
      if constexpr (std::is_integral_v<Number>)
        values_.push_back(step.integer);
      else
        values_.push_back(step.fraction);
      return;
    case Operation::name:
      values_.push_back(valueOf_(step.name));
      return;
    case Operation::beginAnd:
    case Operation::beginOr: {
      const Value &left = values_.back();
      const bool decided = left && (*left != 0) == (step.operation == Operation::beginOr);
      decided_.push_back(decided);
      skipping_ += decided;
      return;
    }
    default:
      break;
    }
    const Value right = pop();
    if (step.operation == Operation::negate || step.operation == Operation::invert) {
      if (right)
        values_.push_back(step.operation == Operation::negate ? -*right : *right == 0);
      else
        values_.push_back(std::nullopt);
      return;
    }
    const Value left = pop();
    if (step.operation == Operation::endAnd || step.operation == Operation::endOr)
      return endLogic(left, right, step.operation == Operation::endOr);
    values_.push_back(left && right ? binary(step.operation, *left, *right) : std::nullopt);
  }

  void endLogic(const Value &left, const Value &right, bool isOr) {
    const bool decided = decided_.back();
    decided_.pop_back();
    skipping_ -= decided;
    if (decided)
      values_.push_back(isOr);
    else if (left && right)
      values_.push_back(*right != 0);
    else
      values_.push_back(std::nullopt);
  }

  static std::string text(Number number) {
    if constexpr (std::is_integral_v<Number>) {
      return std::to_string(number);
    } else {
      char digits[40];
      return {digits, std::to_chars(std::begin(digits), std::end(digits), number).ptr};
    }
  }

  Value binary(Operation operation, Number left, Number right) {
    switch (operation) {
    case Operation::equal:
      return left == right;
    case Operation::notEqual:
      return left != right;
    case Operation::less:
      return left < right;
    case Operation::lessOrEqual:
      return left <= right;
    case Operation::greater:
      return left > right;
    case Operation::greaterOrEqual:
      return left >= right;
    case Operation::divide:
      return divide(left, right);
    case Operation::ceil:
      return ceil(left, right);
    default:
      return combine(operation, left, right);
    }
  }

  Value divide(Number left, Number right) {
    const std::string both = text(left) + " / " + text(right);
    if (right == 0)
      return fail("division by zero: " + both);
    if constexpr (std::is_integral_v<Number>)
      if (left % right != 0)
        return fail("division leaves a remainder: " + both);
    return left / right;
  }

  /// Adds, subtracts or multiplies.
  Value combine(Operation operation, Number left, Number right) {
    const char sign = operation == Operation::multiply ? '*' : operation == Operation::add ? '+' : '-';
    if constexpr (std::is_integral_v<Number>) {
      Number result = 0;
      const bool overflow = sign == '*'   ? __builtin_mul_overflow(left, right, &result)
                            : sign == '+' ? __builtin_add_overflow(left, right, &result)
                                          : __builtin_sub_overflow(left, right, &result);
      if (overflow || result == INT64_MIN)
        return fail("overflow past 2^63: " + text(left) + " " + sign + " " + text(right));
      return result;
    } else {
      return sign == '*' ? left * right : sign == '+' ? left + right : left - right;
    }
  }

  Value ceil(Number x, Number multiple) {
    const std::string call = "ceil(" + text(x) + ", " + text(multiple) + ")";
    if (x < 0)
      return fail(call + ": expected a first number of at least 0");
    if (multiple < 1)
      return fail(call + ": expected a multiple of at least 1");
    if constexpr (std::is_integral_v<Number>) {
      Number result = 0;
      if (__builtin_mul_overflow(x / multiple + (x % multiple != 0), multiple, &result))
        return fail("overflow past 2^63: " + call);
      return result;
    } else {
      return std::ceil(x / multiple) * multiple;
    }
  }

  const ValueOf &valueOf_;
  std::vector<Value> values_;
  std::vector<bool> decided_; // for each open `and` and `or`: whether the left operand decides
  int skipping_ = 0;          // number of open `and` and `or` whose left operand decides
  std::string error_;         // why the current step fails
};

// ---------------------------------------------------------------------------------------------------- public functions

Result<ParsedExpression> ParsedExpression::parse(std::string_view text, Numbers numbers, size_t &errorAt) {
  return ExpressionParser(text, numbers).parse(errorAt);
}

std::vector<ParsedExpression::Name> ParsedExpression::names() const {
  std::vector<Name> result;
  for (const Step &step : steps_)
    if (step.operation == Operation::name)
      result.push_back({step.name, step.offset});
  return result;
}

bool ParsedExpression::isCondition() const { return steps_.back().operation >= Operation::endAnd; }

template <class Number>
Result<std::optional<Number>>
ParsedExpression::evaluate(const std::function<std::optional<Number>(std::string_view)> &valueOf,
                           size_t &errorAt) const {
  return Evaluator<Number>(valueOf).run(steps_, errorAt);
}

template Result<std::optional<int64_t>>
ParsedExpression::evaluate(const std::function<std::optional<int64_t>(std::string_view)> &, size_t &) const;
template Result<std::optional<double>>
ParsedExpression::evaluate(const std::function<std::optional<double>(std::string_view)> &, size_t &) const;

} // namespace reshard
