// `let` names: expressions, and values of the config that `$key` reads.

#include "compiler/config.h"

#include <algorithm>

namespace reshard {

namespace {

/// `$key` or `$key or EXPRESSION`.
int64_t readKey(const Node &node, const Config &config, const Environment &names, Diagnostics &diagnostics) {
  const std::string &text = node.text;
  auto place = [&](size_t offset) {
    Location at = node.at;
    at.column += static_cast<uint32_t>(offset + node.quoted);
    return at;
  };
  size_t end = 1;
  auto inKey = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
           c == '-';
  };
  while (end < text.size() && inKey(text[end]))
    ++end;
  const std::string key = text.substr(1, end - 1);
  if (key.empty()) {
    diagnostics.error(node.at, "expected a key of the config after '$'");
    return kUnknownValue;
  }
  const size_t next = text.find_first_not_of(' ', end);
  constexpr std::string_view kOr = "or ";
  if (next == std::string::npos)
    return config.number(key, node.at, false).value_or(kUnknownValue);
  if (next == end || text.compare(next, kOr.size(), kOr) != 0) {
    diagnostics.error(place(next), "expected 'or' and a default after '$" + key + "', found '" + text.substr(next) +
                                       "'; a 'let' name of its own can be used in expressions");
    return kUnknownValue;
  }
  const size_t begin = text.find_first_not_of(' ', next + kOr.size());
  const Expression otherwise{begin == std::string::npos ? "" : text.substr(begin), place(std::min(begin, text.size()))};
  const auto value = config.number(key, node.at, true);
  if (!value)
    return evaluate(otherwise, names, diagnostics).value_or(kUnknownValue);
  return checkNames(otherwise, names, diagnostics) ? *value : kUnknownValue;
}

int64_t readExpressionOf(const Expression &expression, const Environment &above, const Environment &all,
                         Diagnostics &diagnostics) {
  Diagnostics unknown, unknownAnywhere;
  if (!checkNames(expression, above, unknown) && checkNames(expression, all, unknownAnywhere)) {
    diagnostics.error(expression.at,
                      "'" + expression.text + "' uses a name that 'let' defines further down, expected it above");
    return kUnknownValue;
  }
  return evaluate(expression, above, diagnostics).value_or(kUnknownValue);
}

} // namespace

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
      result = readExpressionOf(*expression, names, all, diagnostics);
    names[*name] = result;
  }
  return names;
}

} // namespace reshard
