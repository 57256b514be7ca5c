// `let` names: expressions, and values of the config that `$key` reads.

#include "compiler/config.h"

#include <algorithm>

namespace reshard {

namespace {

/// `$key`, `$key or $key`, each also with `or EXPRESSION` behind.
int64_t readKey(const Node &node, const Config &config, const Environment &names, Diagnostics &diagnostics) {
  const auto keys = readKeys(node, diagnostics);
  if (!keys)
    return kUnknownValue;
  if (keys->rest == std::string::npos)
    return config.number(keys->names, node.at, false).value_or(kUnknownValue);
  const Expression otherwise{node.text.substr(keys->rest), inside(node, keys->rest)};
  const auto value = config.number(keys->names, node.at, true);
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
