// SPDX-License-Identifier: Apache-2.0
// Reads a rule that shards a dimension or places an index variable: `axis`, `[axis, axis]` or `{axis: …, scheme…}`; in
// `place` also with pipeline keys: interleave, first, last, embedding, loss, stages, count, pattern.

#include "compiler/frontend/config.h"
#include "compiler/frontend/reading.h"
#include "compiler/frontend/scheme_table.h"

#include <cctype>

namespace reshard {

namespace {

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

/// Expands the repetitions `x*3` and `(…)*3` in the text of `stages`. Reports the first error.
class StageString {
public:
  StageString(const Node &node, char letter, Diagnostics &diagnostics)
      : node_(node), text_(node.text), diagnostics_(diagnostics), known_(kLetters) {
    if (known_.find(letter) == std::string::npos)
      known_ += letter;
  }

  std::optional<std::string> run() {
    std::string result = sequence(0);
    if (!failed_ && at_ < text_.size())
      fail(at_, "')' without a '('");
    return failed_ ? std::nullopt : std::optional(std::move(result));
  }

private:
  static constexpr const char *kLetters = "tELm";         // the letters of Megatron-Core; `count` may add one
  static constexpr size_t kMaxExpanded = size_t{1} << 22; // letters after expansion
  static constexpr int kMaxNesting = 16;

  void fail(size_t at, const std::string &message) {
    if (!failed_)
      diagnostics_.error(locationIn(node_, at), "'stages': " + message);
    failed_ = true;
  }

  std::string sequence(int depth) {
    std::string result;
    while (!failed_ && at_ < text_.size() && text_[at_] != ')') {
      const size_t begin = at_;
      const char c = text_[at_++];
      if (c == ',' || c == ' ')
        continue;
      std::string unit(1, c);
      if (c == '(')
        unit = group(begin, depth);
      else if (c == '*')
        fail(begin, "'*' without a letter or a group before it");
      else if (c == '|' && at_ < text_.size() && text_[at_] == '*')
        fail(at_, "'*' after '|', expected a letter or a group before it");
      else if (c != '|' && known_.find(c) == std::string::npos)
        fail(begin, unknown(c));
      const int64_t times = failed_ ? 0 : repeats();
      if (!failed_ && unit.size() * static_cast<size_t>(times) > kMaxExpanded - std::min(kMaxExpanded, result.size()))
        fail(begin, "more than 2^22 letters after the repetitions are expanded");
      for (int64_t i = 0; !failed_ && i < times && !unit.empty(); ++i)
        result += unit;
    }
    return result;
  }

  std::string group(size_t begin, int depth) {
    if (depth == kMaxNesting) {
      fail(begin, "parentheses nested more than " + std::to_string(kMaxNesting) + " deep");
      return {};
    }
    std::string unit = sequence(depth + 1);
    if (at_ == text_.size() || text_[at_] != ')')
      fail(begin, "'(' without a ')'"); // nothing after another error
    else
      ++at_;
    return unit;
  }

  std::string unknown(char c) const {
    std::string list;
    for (char each : known_)
      list += std::string(list.empty() ? "" : ", ") + each;
    return (static_cast<unsigned char>(c) < 0x80 ? "unknown letter '" + std::string(1, c) + "'"
                                                 : std::string("unknown letter")) +
           ", expected one of " + list;
  }

  int64_t repeats() {
    if (at_ == text_.size() || text_[at_] != '*')
      return 1;
    int64_t times = 0;
    const size_t begin = ++at_;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9' && times <= static_cast<int64_t>(kMaxExpanded);
         ++at_)
      times = times * 10 + (text_[at_] - '0');
    if (at_ == begin || times == 0 || times > static_cast<int64_t>(kMaxExpanded))
      fail(begin, "expected a number from 1 to 2^22 after '*'");
    return times;
  }

  const Node &node_;
  const std::string &text_;
  Diagnostics &diagnostics_;
  std::string known_; // the allowed letters
  size_t at_ = 0;
  bool failed_ = false;
};

/// Counts the occurrences of `letter` in each stage of a pipeline layout such as "Et|(tt|)*2L". nullopt after an error.
std::optional<std::vector<int64_t>> countStages(const Node &node, char letter, Diagnostics &diagnostics) {
  const auto expanded = StageString(node, letter, diagnostics).run();
  if (!expanded)
    return std::nullopt;
  std::vector<int64_t> counts(1);
  for (char c : *expanded) {
    if (c == '|')
      counts.push_back(0);
    else
      counts.back() += c == letter;
  }
  return counts;
}

/// Reads `stages: "Et|(tt|)*2L"`. `count: m` counts the letter m instead of t.
bool readStageText(const Node &node, const Node *count, ShardRule &rule, Diagnostics &diagnostics) {
  const auto stages = readText(node, "'stages'", diagnostics);
  const auto letter = count ? readText(*count, "'count'", diagnostics) : std::optional<std::string>("t");
  if (letter && (letter->size() != 1 || !std::isalpha(static_cast<unsigned char>((*letter)[0])))) {
    refuse(*count, "one letter", "'count'", diagnostics);
    return false;
  }
  if (!stages || !letter)
    return false;
  rule.stages = countStages(node, (*letter)[0], diagnostics);
  return rule.stages.has_value();
}

/// Reads the pipeline keys of a rule of `place` into `rule`. False after an error.
bool readPipeline(Fields &fields, const Node &node, const Model &model, ShardRule &rule, Diagnostics &diagnostics) {
  bool ok = true;
  auto number = [&](const char *key, std::optional<Expression> &into) {
    const Node *value = fields.find(key);
    if (!value)
      return false;
    into = readExpression(*value, "'" + std::string(key) + "'", diagnostics);
    ok = ok && into;
    return true;
  };
  const bool interleave = number("interleave", rule.interleave);
  const bool first = number("first", rule.first), last = number("last", rule.last);
  const bool embedding = number("embedding", rule.embedding), loss = number("loss", rule.loss);
  const Node *stages = fields.find("stages"), *count = fields.find("count"), *pattern = fields.find("pattern");
  auto refuse = [&](const std::string &message) {
    diagnostics.error(node.at, message);
    ok = false;
  };
  const bool ends = first || last || embedding || loss;
  const bool scheme = rule.schemeAt.line != 0 || node.find("unit") || node.find("replicate");
  if (ends && rule.scheme != "even")
    refuse("'first', 'last', 'embedding' and 'loss' require the scheme 'even', found '" + rule.scheme + "'");
  if ((first || last) && (embedding || loss))
    refuse("'first' and 'last' cannot be combined with 'embedding' and 'loss'; remove one pair");
  if (ends && (node.find("unit") || node.find("replicate")))
    refuse("'unit' and 'replicate' cannot be combined with 'first', 'last', 'embedding' and 'loss'");
  if (stages && pattern)
    refuse("'stages' and 'pattern' cannot be combined; remove one of them");
  if ((stages || pattern) && (interleave || ends || scheme))
    refuse(std::string(stages ? "'stages'" : "'pattern'") +
           " cannot be combined with a scheme, 'interleave', 'first', 'last', 'embedding', 'loss', 'unit' or "
           "'replicate'");
  if (count && !stages)
    refuse("'count' requires 'stages'");
  if (stages)
    ok = readStageText(*stages, count, rule, diagnostics) && ok;
  if (pattern) {
    const auto kinds = readLayerPattern(*pattern, model, diagnostics);
    ok = ok && kinds;
    if (kinds && kinds->array) {
      diagnostics.error(pattern->at, "'pattern' in 'place' is an array, expected text with '|' between the stages");
      ok = false;
    } else if (kinds) {
      rule.stages.emplace();
      rule.stagesKey = "pattern";
      for (const auto &stage : kinds->stages)
        rule.stages->push_back(static_cast<int64_t>(stage.size()));
    }
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
    if (rule.replicate && !findScheme(rule.scheme)->replicates) {
      diagnostics.error(replicate->at, "'replicate' is not allowed with '" + rule.scheme + "', expected " +
                                           schemesWith(&SchemeRow::replicates));
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
