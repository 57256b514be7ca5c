// SPDX-License-Identifier: Apache-2.0
// Reads the pipeline keys of a rule of `place`: interleave, first, last, embedding, loss, stages, count, pattern.

#include "compiler/frontend/config.h"
#include "compiler/frontend/reading.h"

#include <cctype>

namespace reshard {

namespace {

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

} // namespace reshard
