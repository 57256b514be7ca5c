// SPDX-License-Identifier: Apache-2.0
// Reads a rule that shards a dimension or places an index variable: `axis`, `[axis, axis]` or `{axis: …, scheme…}`.

#include "compiler/frontend/reading.h"
#include "compiler/frontend/scheme_table.h"

namespace reshard {

namespace {

/// Whether a scheme allows `replicate`, with which ranks hold the same unit if there are more ranks than units.
bool canReplicate(const std::string &name) {
  const SchemeRow *scheme = findScheme(name);
  return scheme && scheme->argument == SchemeArgument::none;
}

bool readAxes(const Node &node, ShardRule &rule, Diagnostics &diagnostics) {
  if (node.kind == Node::Kind::sequence && node.items.empty()) {
    diagnostics.error(node.at, "the list of axes of a rule is empty, expected at least one axis");
    return false;
  }
  bool ok = true;
  for (const Node *item : valueOrItems(node)) {
    const auto name = readIdentifier(*item, "an axis", diagnostics);
    ok = ok && name;
    if (!name)
      continue;
    for (const auto &[known, at] : rule.axes)
      if (known == *name) {
        diagnostics.error(item->at, "the rule lists axis '" + *name + "' twice");
        ok = false;
      }
    rule.axes.emplace_back(*name, item->at);
  }
  return ok;
}

bool readNumbers(const Node &node, const std::string &what, std::vector<Expression> &numbers,
                 Diagnostics &diagnostics) {
  if (node.kind != Node::Kind::sequence) {
    refuse(node, "a list of numbers", what, diagnostics);
    return false;
  }
  bool ok = true;
  for (const Node &item : node.items) {
    auto number = readExpression(item, what, diagnostics);
    ok = ok && number;
    if (number)
      numbers.push_back(std::move(*number));
  }
  return ok;
}

bool readArgument(const Node &node, const SchemeRow &scheme, ShardRule &rule, Diagnostics &diagnostics) {
  const std::string what = "'" + std::string(scheme.name) + "'";
  if (scheme.argument == SchemeArgument::numbers)
    return readNumbers(node, what, rule.numbers, diagnostics);
  if (scheme.argument == SchemeArgument::number) {
    auto number = readExpression(node, what, diagnostics);
    if (number)
      rule.numbers.push_back(std::move(*number));
    return number.has_value();
  }
  if (node.kind != Node::Kind::sequence) {
    refuse(node, "a list of lists", what, diagnostics);
    return false;
  }
  bool ok = true;
  for (const Node &item : node.items)
    ok = readNumbers(item, what, rule.lists.emplace_back(), diagnostics) && ok;
  return ok;
}

/// Reads `scheme: NAME`, which is for schemes without an argument.
bool readSchemeName(const Node &node, ShardRule &rule, Diagnostics &diagnostics) {
  const auto name = readText(node, "'scheme'", diagnostics);
  if (!name)
    return false;
  std::vector<std::string> known;
  for (const SchemeRow &scheme : kSchemes) {
    if (scheme.argument == SchemeArgument::none)
      known.push_back(scheme.name);
    if (*name != scheme.name)
      continue;
    rule.scheme = *name;
    rule.schemeAt = node.at;
    if (scheme.argument == SchemeArgument::none)
      return true;
    diagnostics.error(node.at, "scheme '" + *name + "' needs an argument; write '" + *name +
                                   ": …' instead of 'scheme: " + *name + "'");
    return false;
  }
  if (*name == "flat")
    diagnostics.error(node.at, "'flat' is not a scheme but a pack; write 'flat: [TENSOR, …]' in the param");
  else
    diagnostics.error(node.at, "unknown scheme '" + *name + "'" + suggestion(*name, known));
  return false;
}

bool readScheme(const Node &node, Fields &fields, ShardRule &rule, Diagnostics &diagnostics) {
  bool ok = true;
  const Node *stated = fields.find("scheme");
  if (stated)
    ok = readSchemeName(*stated, rule, diagnostics);
  for (const SchemeRow &scheme : kSchemes) {
    const Node *argument = fields.find(scheme.name);
    if (!argument)
      continue;
    if (scheme.argument == SchemeArgument::none) {
      diagnostics.error(argument->at,
                        "'" + std::string(scheme.name) + "' takes no argument; write 'scheme: " + scheme.name + "'");
      ok = false;
      continue;
    }
    if (stated || rule.schemeAt.line != 0) {
      diagnostics.error(argument->at, "'" + std::string(scheme.name) + "' cannot be combined with " +
                                          (stated ? "'scheme'" : "'" + rule.scheme + "'") +
                                          ": a rule has only one scheme");
      ok = false;
      continue;
    }
    rule.scheme = scheme.name;
    for (const auto &[key, value] : node.entries)
      if (&value == argument)
        rule.schemeAt = key.at;
    ok = readArgument(*argument, scheme, rule, diagnostics) && ok;
  }
  return ok;
}

} // namespace

std::optional<ShardRule> readShardRule(const Node &node, const Model *model, Diagnostics &diagnostics) {
  ShardRule rule;
  rule.at = node.at;
  if (node.kind != Node::Kind::map) {
    if (node.kind == Node::Kind::null) {
      refuse(node, "an axis, a list of axes or a map", "a rule", diagnostics);
      return std::nullopt;
    }
    return readAxes(node, rule, diagnostics) ? std::optional(std::move(rule)) : std::nullopt;
  }
  const size_t errorsBefore = diagnostics.errors();
  Fields fields(node, "a rule", diagnostics);
  bool ok = true;
  if (const Node *axis = fields.require("axis"))
    ok = readAxes(*axis, rule, diagnostics);
  ok = readScheme(node, fields, rule, diagnostics) && ok;
  if (model)
    ok = readPipeline(fields, node, *model, rule, diagnostics) && ok;
  if (const Node *unit = fields.find("unit")) {
    rule.unit = readExpression(*unit, "'unit'", diagnostics);
    ok = ok && rule.unit;
  }
  if (const Node *when = fields.find("when")) {
    rule.when = readExpression(*when, "'when'", diagnostics);
    ok = ok && rule.when;
  }
  if (const Node *replicate = fields.find("replicate")) {
    const auto value = readBoolean(*replicate, "'replicate'", diagnostics);
    ok = ok && value;
    rule.replicate = value.value_or(false);
    if (rule.replicate && !canReplicate(rule.scheme)) {
      diagnostics.error(replicate->at, "'replicate' is not allowed with '" + rule.scheme +
                                           "', expected even, chunk, balanced, vllm, sglang or round_robin");
      ok = false;
    }
  }
  fields.finish();
  if (!ok || diagnostics.errors() > errorsBefore)
    return std::nullopt;
  return rule;
}

std::map<std::string, ShardRule> readPlacement(const Node &node, const Model &model, Diagnostics &diagnostics) {
  std::map<std::string, ShardRule> result;
  if (!checkMap(node, "'place'", diagnostics))
    return result;
  for (const auto &[key, value] : node.entries) {
    const bool known = checkVariable(key.text, key.at, model.variables, diagnostics);
    auto rule = readShardRule(value, &model, diagnostics);
    if (known && rule)
      result.emplace(key.text, std::move(*rule));
  }
  return result;
}

std::map<int64_t, ShardRule> readShard(const Node &node, Diagnostics &diagnostics) {
  std::map<int64_t, ShardRule> result;
  if (!checkMap(node, "'shard'", diagnostics))
    return result;
  for (const auto &[key, value] : node.entries) {
    const auto d = readDimensionKey(key, diagnostics);
    auto rule = readShardRule(value, nullptr, diagnostics);
    if (d && rule)
      result.emplace(*d, std::move(*rule));
  }
  return result;
}

} // namespace reshard
