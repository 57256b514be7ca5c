// Recursive descent over the text of an expression; nothing is kept of it but its value.

#include "compiler/frontend.h"

#include <string_view>

namespace reshard {

namespace {

constexpr size_t kMaxBytes = 4096; // of one expression
constexpr int kMaxDepth = 64;      // of parentheses, `not` and unary minus

bool isDigit(char c) { return c >= '0' && c <= '9'; }
bool isNameStart(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool isName(char c) { return isNameStart(c) || isDigit(c); }

std::string quote(std::string_view text) { return "'" + std::string(text) + "'"; }

/// How much is asked of an expression.
enum class Mode { syntax, names, value };

class Parser {
public:
  Parser(const Expression &expression, Mode mode, const Environment &names, Diagnostics &diagnostics)
      : text_(expression.text), at_(expression.at), names_(names), mode_(mode), diagnostics_(diagnostics) {}

  /// Empty after errors, and where a name's value is unknown.
  std::optional<int64_t> parse() {
    if (text_.size() > kMaxBytes) {
      diagnostics_.error(at_, "an expression of " + std::to_string(text_.size()) + " characters, expected at most " +
                                  std::to_string(kMaxBytes));
      failed_ = true;
      return std::nullopt;
    }
    next();
    const auto value = readOr();
    if (!failed_ && token_ != Token::end) {
      const bool again =
          token_ == Token::symbol && std::string_view("== != <= >=").find(spelling_) != std::string_view::npos;
      fail(begin_, "expected an operator or the end of the expression, found " + found() +
                       (again ? "; comparisons are not chained, use 'and'" : ""));
    }
    return failed_ ? std::nullopt : value;
  }
  bool failed() const { return failed_; }

private:
  using Value = std::optional<int64_t>;
  enum class Token { end, number, name, symbol };

  // --- errors: the first one of syntax ends the reading; arithmetic ones leave a value unknown.

  Location place(size_t offset) const {
    Location at = at_;
    at.column += static_cast<uint32_t>(offset);
    return at;
  }
  void fail(size_t offset, const std::string &message) {
    if (!failed_)
      diagnostics_.error(place(offset), message);
    failed_ = true;
    token_ = Token::end;
    position_ = text_.size();
  }
  /// An error of arithmetic, if this part of the expression counts.
  Value refuse(size_t offset, const std::string &message) {
    if (!failed_ && mode_ == Mode::value && skipping_ == 0) {
      diagnostics_.error(place(offset), message);
      failed_ = true;
    }
    return std::nullopt;
  }
  std::string found() const { return token_ == Token::end ? "the end of the expression" : quote(spelling_); }

  // --- tokens

  void next() {
    while (position_ < text_.size() &&
           (text_[position_] == ' ' || text_[position_] == '\t' || text_[position_] == '\n'))
      ++position_;
    begin_ = position_;
    if (position_ == text_.size() || failed_) {
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
      fail(position_, "'$' reads the config, and stands at the start of a 'let' value only");
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

  /// One level of nesting for as long as it lives.
  struct Level {
    explicit Level(Parser &parser) : parser(parser) {
      if (++parser.depth_ > kMaxDepth)
        parser.fail(parser.begin_, "an expression nested more than " + std::to_string(kMaxDepth) + " deep");
    }
    ~Level() { --parser.depth_; }
    Parser &parser;
  };

  // --- the grammar, from loose to tight

  /// `or` and `and`: the right side does not count where the left one decides.
  template <class Read> Value readLogic(std::string_view word, bool decides, Read read) {
    Value left = read();
    while (!failed_ && isWord(word)) {
      next();
      const bool decided = left && (*left != 0) == decides;
      skipping_ += decided;
      const Value right = read();
      skipping_ -= decided;
      if (decided)
        left = decides;
      else if (left && right)
        left = *right != 0;
      else
        left = std::nullopt;
    }
    return left;
  }
  Value readOr() {
    return readLogic("or", true, [this] { return readLogic("and", false, [this] { return readNot(); }); });
  }

  Value readNot() {
    if (!isWord("not"))
      return readComparison();
    const Level level(*this);
    next();
    const Value value = readNot();
    return value ? Value(*value == 0) : value;
  }

  Value readComparison() {
    const Value left = readSum();
    if (failed_ || token_ != Token::symbol)
      return left;
    const std::string_view sign = spelling_;
    if (sign != "==" && sign != "!=" && sign != "<" && sign != "<=" && sign != ">" && sign != ">=")
      return left;
    next();
    const Value right = readSum();
    if (!left || !right)
      return std::nullopt;
    if (sign == "==" || sign == "!=")
      return (*left == *right) == (sign == "==");
    if (sign == "<" || sign == "<=")
      return *left < *right || (sign == "<=" && *left == *right);
    return *left > *right || (sign == ">=" && *left == *right);
  }

  Value readSum() {
    Value left = readProduct();
    while (!failed_ && (isSymbol("+") || isSymbol("-"))) {
      const bool plus = isSymbol("+");
      const size_t sign = begin_;
      next();
      const Value right = readProduct();
      left = combine(left, right, sign, plus ? '+' : '-');
    }
    return left;
  }

  Value readProduct() {
    Value left = readUnary();
    while (!failed_ && (isSymbol("*") || isSymbol("/"))) {
      const bool times = isSymbol("*");
      const size_t sign = begin_;
      next();
      const Value right = readUnary();
      left = combine(left, right, sign, times ? '*' : '/');
    }
    return left;
  }

  Value combine(const Value &left, const Value &right, size_t sign, char operation) {
    if (!left || !right)
      return std::nullopt;
    int64_t result = 0;
    bool overflow = false;
    if (operation == '/') {
      const std::string both = std::to_string(*left) + " / " + std::to_string(*right);
      if (*right == 0)
        return refuse(sign, "division by zero: " + both);
      if (*left % *right != 0)
        return refuse(sign, "division leaves a remainder: " + both);
      result = *left / *right;
    } else if (operation == '*') {
      overflow = __builtin_mul_overflow(*left, *right, &result);
    } else if (operation == '+') {
      overflow = __builtin_add_overflow(*left, *right, &result);
    } else {
      overflow = __builtin_sub_overflow(*left, *right, &result);
    }
    if (overflow || result == kUnknownValue)
      return refuse(sign, std::string("overflow past 2^63: ") + std::to_string(*left) + " " + operation + " " +
                              std::to_string(*right));
    return result;
  }

  Value readUnary() {
    if (!isSymbol("-"))
      return readPrimary();
    const Level level(*this);
    next();
    const Value value = readUnary();
    return value ? Value(-*value) : value; // never -2^63: no value is
  }

  Value readPrimary() {
    if (failed_)
      return std::nullopt;
    if (token_ == Token::number)
      return readNumber();
    if (isSymbol("(")) {
      const Level level(*this);
      next();
      const Value value = readOr();
      expect(")", "");
      return value;
    }
    if (isWord("ceil"))
      return readCeil();
    if (token_ != Token::name || isWord("and") || isWord("or") || isWord("not")) {
      fail(begin_, "expected a number, a name or '(', found " + found());
      return std::nullopt;
    }
    return readName();
  }

  Value readNumber() {
    const size_t begin = begin_;
    const std::string_view digits = spelling_;
    int64_t value = 0;
    bool overflow = false;
    for (char c : digits) {
      if (!isDigit(c)) {
        fail(begin, "expected a decimal integer, found " + quote(digits));
        return std::nullopt;
      }
      overflow =
          overflow || __builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, c - '0', &value);
    }
    if (digits.size() > 1 && digits[0] == '0')
      fail(begin, "expected a decimal integer without leading zeros, found " + quote(digits));
    else if (overflow)
      fail(begin, "number " + quote(digits) + " is 2^63 or more");
    next();
    return value;
  }

  Value readCeil() {
    const size_t begin = begin_;
    const Level level(*this);
    next();
    expect("(", " after 'ceil'");
    const Value x = readSum();
    expect(",", " and a multiple in 'ceil(x, multiple)'");
    const Value multiple = readSum();
    expect(")", " after 'ceil(x, multiple'");
    if (failed_ || !x || !multiple)
      return std::nullopt;
    const std::string call = "ceil(" + std::to_string(*x) + ", " + std::to_string(*multiple) + ")";
    if (*x < 0)
      return refuse(begin, call + ": expected a first number of at least 0");
    if (*multiple < 1)
      return refuse(begin, call + ": expected a multiple of at least 1");
    int64_t result = 0;
    if (__builtin_mul_overflow(*x / *multiple + (*x % *multiple != 0), *multiple, &result))
      return refuse(begin, "overflow past 2^63: " + call);
    return result;
  }

  Value readName() {
    const size_t begin = begin_;
    const std::string name(spelling_);
    next();
    if (isSymbol("(")) {
      fail(begin, "unknown function " + quote(name) + ", expected 'ceil'");
      return std::nullopt;
    }
    if (name == "true" || name == "false")
      return name == "true";
    if (mode_ == Mode::syntax)
      return std::nullopt;
    const auto known = names_.find(name);
    if (known == names_.end()) {
      std::vector<std::string> all;
      for (const auto &[each, value] : names_)
        all.push_back(each);
      diagnostics_.error(place(begin), "unknown name " + quote(name) + suggestion(name, all));
      unknown_ = true;
      return std::nullopt;
    }
    if (mode_ == Mode::names || known->second == kUnknownValue)
      return std::nullopt;
    return known->second;
  }

public:
  bool unknown() const { return unknown_; }

private:
  std::string_view text_;
  Location at_;
  const Environment &names_;
  Mode mode_;
  Diagnostics &diagnostics_;
  size_t position_ = 0, begin_ = 0; // behind the token; where it begins
  Token token_ = Token::end;
  std::string_view spelling_;
  int depth_ = 0, skipping_ = 0;
  bool failed_ = false;  // syntax or arithmetic
  bool unknown_ = false; // a name was not known
};

} // namespace

std::optional<int64_t> evaluate(const Expression &expression, const Environment &names, Diagnostics &diagnostics) {
  Parser parser(expression, Mode::value, names, diagnostics);
  const auto value = parser.parse();
  return parser.unknown() ? std::nullopt : value;
}

bool checkSyntax(const Expression &expression, Diagnostics &diagnostics) {
  const Environment none;
  Parser parser(expression, Mode::syntax, none, diagnostics);
  parser.parse();
  return !parser.failed();
}

bool checkNames(const Expression &expression, const Environment &names, Diagnostics &diagnostics) {
  Parser parser(expression, Mode::names, names, diagnostics);
  parser.parse();
  return !parser.failed() && !parser.unknown();
}

} // namespace reshard
