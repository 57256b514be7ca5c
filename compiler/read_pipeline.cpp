// The pipeline keys of a rule of `place`: interleave, first, last, embedding, loss, stages, pattern.

#include "compiler/config.h"
#include "compiler/pipelines.h"

#include <cctype>

namespace reshard {

namespace {

/// `stages: "Et|(tt|)*2L"`, with `count: m` for another letter than `t`.
bool readStageText(const Node &node, const Node *count, ShardRule &rule, Diagnostics &diagnostics) {
  const auto stages = readText(node, "'stages'", diagnostics);
  const auto letter = count ? readText(*count, "'count'", diagnostics) : std::optional<std::string>("t");
  if (letter && (letter->size() != 1 || !std::isalpha(static_cast<unsigned char>((*letter)[0])))) {
    refuse(*count, "one letter", "'count'", diagnostics);
    return false;
  }
  if (!stages || !letter)
    return false;
  std::string error;
  size_t at = 0;
  rule.stages = readStages(*stages, (*letter)[0], error, at);
  if (!rule.stages)
    diagnostics.error(inside(node, at), "'stages': " + error);
  return rule.stages.has_value();
}

} // namespace

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
    refuse("'first', 'last', 'embedding' and 'loss' with '" + rule.scheme + "', expected them with even");
  if ((first || last) && (embedding || loss))
    refuse("'first' or 'last' beside 'embedding' or 'loss', expected one pair");
  if (ends && (node.find("unit") || node.find("replicate")))
    refuse("'unit' or 'replicate' beside numbers of values");
  if (stages && pattern)
    refuse("'stages' beside 'pattern', expected one");
  if ((stages || pattern) && (interleave || ends || scheme))
    refuse(std::string(stages ? "'stages'" : "'pattern'") +
           " beside another way to share out values, expected it alone");
  if (count && !stages)
    refuse("'count' without 'stages'");
  if (stages)
    ok = readStageText(*stages, count, rule, diagnostics) && ok;
  if (pattern) {
    const auto kinds = readPattern(*pattern, model, diagnostics);
    ok = ok && kinds;
    if (kinds && kinds->array) {
      diagnostics.error(pattern->at, "'pattern' in 'place' is an array, which has no stages, expected a text");
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

} // namespace reshard
