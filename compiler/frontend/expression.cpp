// Expressions of the YAML, and the keys whose values are computed from them: `let` and `where`.
// The parser is a recursive descent that computes the value while it reads; it builds no syntax tree.

#include "compiler/frontend/config.h"
#include "compiler/frontend/frontend.h"

#include <algorithm>
#include <set>
#include <string_view>

namespace reshard {

namespace {

// -------------------------------------------------------------------------------------------------------------- parser

constexpr size_t kMaxExpressionBytes = 4096;
constexpr int kMaxNesting = 64; // of parentheses, `not` and unary minus

bool isDigit(char c) { return c >= '0' && c <= '9'; }
bool isNameStart(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool isName(char c) { return isNameStart(c) || isDigit(c); }

std::string quote(std::string_view text) { return "'" + std::string(text) + "'"; }

/// What the parser does: check the syntax, also look up names, or also compute the value.
enum class Mode { syntax, names, value };

class Parser {
public:
  Parser(const Expression &expression, Mode mode, const Environment &names, Diagnostics &diagnostics)
      : text_(expression.text), at_(expression.at), names_(names), mode_(mode), diagnostics_(diagnostics) {}

  /// Parses the whole text. nullopt after an error, or if a name has kUnknownValue.
  std::optional<int64_t> parse() {
    if (text_.size() > kMaxExpressionBytes) {
      diagnostics_.error(at_, "the expression has " + std::to_string(text_.size()) + " characters, expected at most " +
                                  std::to_string(kMaxExpressionBytes));
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
  /// After parse(): whether there was an error of syntax or arithmetic.
  bool failed() const { return failed_; }
  /// After parse(): whether a name was not known.
  bool unknown() const { return unknown_; }

private:
  using Value = std::optional<int64_t>;
  enum class Token { end, number, name, symbol };

  // --- errors: a syntax error ends the parsing; after an arithmetic error parsing continues without a value

  Location location(size_t offset) const {
    Location at = at_;
    at.column += static_cast<uint32_t>(offset);
    return at;
  }
  /// Reports a syntax error, unless there was one before, and skips the rest of the text.
  void fail(size_t offset, const std::string &message) {
    if (!failed_)
      diagnostics_.error(location(offset), message);
    failed_ = true;
    token_ = Token::end;
    position_ = text_.size();
  }
  /// Reports an arithmetic error, unless `and` or `or` already decided without this operand.
  Value failArithmetic(size_t offset, const std::string &message) {
    if (!failed_ && mode_ == Mode::value && skipping_ == 0) {
      diagnostics_.error(location(offset), message);
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
    explicit Level(Parser &parser) : parser(parser) {
      if (++parser.depth_ > kMaxNesting)
        parser.fail(parser.begin_, "the expression is nested more than " + std::to_string(kMaxNesting) + " deep");
    }
    ~Level() { --parser.depth_; }
    Parser &parser;
  };

  // --- the grammar, from the weakest to the strongest operator

  /// `or` and `and`. The right operand is parsed but not evaluated if the left one decides (equals `decides`).
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
        return failArithmetic(sign, "division by zero: " + both);
      if (*left % *right != 0)
        return failArithmetic(sign, "division leaves a remainder: " + both);
      result = *left / *right;
    } else if (operation == '*') {
      overflow = __builtin_mul_overflow(*left, *right, &result);
    } else if (operation == '+') {
      overflow = __builtin_add_overflow(*left, *right, &result);
    } else {
      overflow = __builtin_sub_overflow(*left, *right, &result);
    }
    if (overflow || result == kUnknownValue)
      return failArithmetic(sign, std::string("overflow past 2^63: ") + std::to_string(*left) + " " + operation + " " +
                                      std::to_string(*right));
    return result;
  }

  Value readUnary() {
    if (!isSymbol("-"))
      return readPrimary();
    const Level level(*this);
    next();
    const Value value = readUnary();
    return value ? Value(-*value) : value; // no overflow: no value is -2^63
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
      return failArithmetic(begin, call + ": expected a first number of at least 0");
    if (*multiple < 1)
      return failArithmetic(begin, call + ": expected a multiple of at least 1");
    int64_t result = 0;
    if (__builtin_mul_overflow(*x / *multiple + (*x % *multiple != 0), *multiple, &result))
      return failArithmetic(begin, "overflow past 2^63: " + call);
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
      diagnostics_.error(location(begin), "unknown name " + quote(name) + suggestion(name, all));
      unknown_ = true;
      return std::nullopt;
    }
    if (mode_ == Mode::names || known->second == kUnknownValue)
      return std::nullopt;
    return known->second;
  }

  std::string_view text_;
  Location at_;
  const Environment &names_;
  Mode mode_;
  Diagnostics &diagnostics_;
  size_t position_ = 0, begin_ = 0; // end and begin of the current token
  Token token_ = Token::end;
  std::string_view spelling_; // of the current token
  int depth_ = 0;             // of parentheses, `not` and unary minus
  int skipping_ = 0;          // number of open operands that `and` and `or` do not evaluate
  bool failed_ = false;
  bool unknown_ = false;
};

// ----------------------------------------------------------------------------------------------------------------- let

/// The value of `$key` or `$key or $key`, each optionally followed by `or EXPRESSION`.
int64_t readKey(const Node &node, const Config &config, const Environment &names, Diagnostics &diagnostics) {
  const auto keys = readConfigKeys(node, diagnostics);
  if (!keys)
    return kUnknownValue;
  if (keys->rest == std::string::npos)
    return config.number(keys->names, node.at, false).value_or(kUnknownValue);
  const Expression fallback{node.text.substr(keys->rest), locationIn(node, keys->rest)};
  const auto value = config.number(keys->names, node.at, true);
  if (!value)
    return evaluate(fallback, names, diagnostics).value_or(kUnknownValue);
  return checkNames(fallback, names, diagnostics) ? *value : kUnknownValue;
}

/// The value of an expression of `let`. `above`: the names defined above it; `all`: all names of `let`.
int64_t evaluateLet(const Expression &expression, const Environment &above, const Environment &all,
                    Diagnostics &diagnostics) {
  Diagnostics unknown, unknownAnywhere;
  if (!checkNames(expression, above, unknown) && checkNames(expression, all, unknownAnywhere)) {
    diagnostics.error(expression.at,
                      "'" + expression.text + "' uses a name that 'let' defines below, expected the definition above");
    return kUnknownValue;
  }
  return evaluate(expression, above, diagnostics).value_or(kUnknownValue);
}

// --------------------------------------------------------------------------------------------------------------- where

/// Sorts ranges and merges those that overlap or are adjacent.
std::vector<IntegerRange> normalized(std::vector<IntegerRange> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const IntegerRange &a, const IntegerRange &b) { return a.first < b.first; });
  std::vector<IntegerRange> result;
  for (const IntegerRange &range : ranges) {
    if (!result.empty() && range.first <= result.back().last + 1)
      result.back().last = std::max(result.back().last, range.last);
    else
      result.push_back(range);
  }
  return result;
}

/// Reads `{pattern: P, is: K}`: the positions of the pattern whose kind is in K. `size`: number of values of
/// `variable`.
std::vector<IntegerRange> readKinds(const Node &node, const std::string &variable, int64_t size, const Model &model,
                                    Diagnostics &diagnostics) {
  Fields fields(node, "'where' of '" + variable + "'", diagnostics);
  const Node *pattern = fields.require("pattern"), *is = fields.require("is");
  fields.finish();
  if (!pattern || !is)
    return {};
  const auto kinds = readLayerPattern(*pattern, model, diagnostics);
  std::vector<std::pair<std::string, Location>> wanted;
  bool ok = kinds.has_value();
  for (const Node *item : valueOrItems(*is)) {
    const auto kind = readText(*item, "'is'", diagnostics);
    ok = ok && kind;
    if (ok && (kinds->array || is->kind == Node::Kind::sequence))
      wanted.emplace_back(*kind, item->at);
    for (size_t i = 0; ok && !kinds->array && is->kind != Node::Kind::sequence && i < kind->size();
         ++i) // of text, each character is a kind
      wanted.emplace_back(std::string(1, (*kind)[i]), locationIn(*item, i));
  }
  if (!ok)
    return {};
  std::vector<std::string> positions;
  for (const auto &stage : kinds->stages)
    positions.insert(positions.end(), stage.begin(), stage.end());
  if (size != kUnknownValue && static_cast<int64_t>(positions.size()) != size) {
    diagnostics.error(pattern->at, "the pattern has " + std::to_string(positions.size()) + " entries, expected " +
                                       std::to_string(size) + ", one for each value of '" + variable + "'");
    return {};
  }
  const std::set<std::string> known(positions.begin(), positions.end());
  // With several alternative keys, `is` may list kinds that only one of the configs uses.
  const bool any =
      std::any_of(wanted.begin(), wanted.end(), [&](const auto &kind) { return known.contains(kind.first); });
  for (const auto &[kind, at] : wanted)
    if (!positions.empty() && !known.contains(kind) && !(kinds->keys > 1 && any)) {
      const std::string message =
          "kind '" + kind + "' does not occur in the pattern" + suggestion(kind, {known.begin(), known.end()});
      if (kinds->keys > 0) // a model may be used with several configs
        diagnostics.warning(at, message);
      else
        diagnostics.error(at, message);
    }
  std::vector<IntegerRange> ranges;
  for (size_t i = 0; i < positions.size(); ++i)
    if (std::any_of(wanted.begin(), wanted.end(), [&](const auto &kind) { return kind.first == positions[i]; }))
      ranges.push_back({static_cast<int64_t>(i), static_cast<int64_t>(i)});
  return ranges;
}

} // namespace

// ---------------------------------------------------------------------------------------------------- public functions

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

Environment readLet(const Node *let, const Config &values, Diagnostics &diagnostics) {
  Environment names;
  if (!let || !checkMap(*let, "'let'", diagnostics))
    return names;
  Environment all;
  for (const auto &[key, value] : let->entries)
    all[key.text] = kUnknownValue;
  for (const auto &[key, value] : let->entries) {
    const auto name = readIdentifier(key, "a 'let' name", diagnostics);
    if (!name)
      continue;
    const std::string what = "'" + *name + "'";
    int64_t result = kUnknownValue;
    if (value.kind == Node::Kind::scalar && value.text.starts_with('$'))
      result = readKey(value, values, names, diagnostics);
    else if (const auto expression = readExpression(value, what, diagnostics))
      result = evaluateLet(*expression, names, all, diagnostics);
    names[*name] = result;
  }
  return names;
}

std::optional<LayerPattern> readLayerPattern(const Node &node, const Model &model, Diagnostics &diagnostics) {
  const auto text = readText(node, "'pattern'", diagnostics);
  if (!text)
    return std::nullopt;
  LayerPattern pattern;
  std::string letters = *text;
  if (text->starts_with('$')) {
    const auto keys = readConfigKeys(node, diagnostics);
    if (keys && keys->rest != std::string::npos)
      diagnostics.error(locationIn(node, keys->rest),
                        "expected a config key after 'or', found '" + text->substr(keys->rest) + "'");
    const auto found =
        keys && keys->rest == std::string::npos ? model.config->texts(keys->names, node.at) : std::nullopt;
    if (!found)
      return std::nullopt;
    pattern.keys = keys->names.size();
    if (found->array && found->items.size() > kMaxIndexValues) {
      diagnostics.error(node.at, "the pattern has " + std::to_string(found->items.size()) +
                                     " entries, expected at most " + std::to_string(kMaxIndexValues));
      return std::nullopt;
    }
    if (found->array) {
      pattern.array = true;
      pattern.stages = {found->items};
      return pattern;
    }
    letters = found->items[0];
  }
  if (letters.size() > 2 * kMaxIndexValues) {
    diagnostics.error(node.at, "the pattern has " + std::to_string(letters.size()) + " characters, expected at most " +
                                   std::to_string(2 * kMaxIndexValues));
    return std::nullopt;
  }
  pattern.stages.emplace_back();
  for (char c : letters.substr(0, letters.find('/'))) {
    if (c == '|')
      pattern.stages.emplace_back();
    else if (c != ' ')
      pattern.stages.back().emplace_back(1, c);
  }
  return pattern;
}

std::map<std::string, std::vector<IntegerRange>> readWhere(const Node &where, const std::vector<std::string> &variables,
                                                           const std::string &title, const Model &model,
                                                           Diagnostics &diagnostics) {
  std::map<std::string, std::vector<IntegerRange>> result;
  if (!checkMap(where, "'where'", diagnostics))
    return result;
  for (const auto &[variable, values] : where.entries) {
    if (!checkVariable(variable.text, variable.at, model.variables, diagnostics))
      continue;
    if (std::find(variables.begin(), variables.end(), variable.text) == variables.end()) {
      diagnostics.error(variable.at,
                        "'where' restricts index variable '" + variable.text + "', which " + title + " does not have");
      continue;
    }
    const auto known = std::find_if(model.variables.begin(), model.variables.end(),
                                    [&](const ir::IndexVariable &each) { return each.name == variable.text; });
    std::vector<IntegerRange> ranges;
    if (values.kind == Node::Kind::map)
      ranges = readKinds(values, variable.text, known->size, model, diagnostics);
    else
      for (const Node *item : valueOrItems(values))
        if (const auto range = readIntegerRange(*item, "'" + variable.text + "'", model.let, known->size, diagnostics))
          if (range->first <= range->last)
            ranges.push_back(*range);
    result[variable.text] = normalized(std::move(ranges));
  }
  return result;
}

} // namespace reshard
