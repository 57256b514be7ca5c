// SPDX-License-Identifier: Apache-2.0
// Expressions of the YAML, and the keys whose values are computed from them: `let` and `where`.

#include "base/expression.h"
#include "compiler/frontend/config.h"
#include "compiler/frontend/frontend.h"

#include <algorithm>
#include <set>

namespace reshard {

namespace {

Location locationIn(const Expression &expression, size_t offset) {
  Location at = expression.at;
  at.column += static_cast<uint32_t>(offset);
  return at;
}

std::optional<ParsedExpression> parse(const Expression &expression, Diagnostics &diagnostics) {
  size_t errorAt = 0;
  Result<ParsedExpression> parsed =
      ParsedExpression::parse(expression.text, ParsedExpression::Numbers::integers, errorAt);
  if (parsed.ok())
    return std::move(*parsed);
  diagnostics.error(locationIn(expression, errorAt), parsed.status().message());
  return std::nullopt;
}

bool checkNames(const ParsedExpression &parsed, const Expression &expression, const Environment &names,
                Diagnostics &diagnostics) {
  bool known = true;
  for (const auto &[name, offset] : parsed.names()) {
    if (names.contains(std::string(name)))
      continue;
    std::vector<std::string> all;
    for (const auto &[each, value] : names)
      all.push_back(each);
    diagnostics.error(locationIn(expression, offset),
                      "unknown name '" + std::string(name) + "'" + suggestion(name, all));
    known = false;
  }
  return known;
}

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
         ++i) // each character of a text is a kind
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
  const auto parsed = parse(expression, diagnostics);
  if (!parsed)
    return std::nullopt;
  const bool known = checkNames(*parsed, expression, names, diagnostics);
  size_t errorAt = 0;
  const auto value = parsed->evaluate<int64_t>(
      [&](std::string_view name) {
        const auto found = names.find(std::string(name));
        return found == names.end() || found->second == kUnknownValue ? std::nullopt : std::optional(found->second);
      },
      errorAt);
  if (!value.ok())
    diagnostics.error(locationIn(expression, errorAt), value.status().message());
  return known && value.ok() ? *value : std::nullopt;
}

bool checkSyntax(const Expression &expression, Diagnostics &diagnostics) {
  return parse(expression, diagnostics).has_value();
}

bool checkNames(const Expression &expression, const Environment &names, Diagnostics &diagnostics) {
  const auto parsed = parse(expression, diagnostics);
  return parsed && checkNames(*parsed, expression, names, diagnostics);
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
