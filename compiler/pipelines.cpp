#include "compiler/pipelines.h"
#include "compiler/config.h"
#include "ir/ir.h"

#include <algorithm>
#include <numeric>

namespace reshard {

using ir::Segment;
using ir::Segments;

namespace {

std::string text(int64_t number) { return std::to_string(number); }
std::string counted(int64_t n, const char *noun) { return text(n) + " " + noun + (n == 1 ? "" : "s"); }

/// Expands `x*3` and `(…)*3`. An error leaves `at_` at the character that is wrong.
class StageString {
public:
  StageString(const std::string &text, char letter, std::string &error, size_t &at) : text_(text), known_(kLetters), error_(error), at_(at) {
    if (known_.find(letter) == std::string::npos)
      known_ += letter;
  }

  std::optional<std::string> run() {
    at_ = 0;
    std::string result = sequence(0);
    if (error_.empty() && at_ < text_.size())
      fail(at_, "')' without a '('");
    return error_.empty() ? std::optional(std::move(result)) : std::nullopt;
  }

private:
  static constexpr const char *kLetters = "tELm";  // beside the one that is counted
  static constexpr size_t kMost = size_t{1} << 22; // letters after expansion
  static constexpr int kMostNested = 16;

  void fail(size_t at, std::string message) {
    if (!error_.empty())
      return;
    error_ = std::move(message);
    at_ = at;
  }

  std::string sequence(int depth) {
    std::string result;
    while (error_.empty() && at_ < text_.size() && text_[at_] != ')') {
      const size_t begin = at_;
      const char c = text_[at_++];
      if (c == ',' || c == ' ')
        continue;
      std::string unit(1, c);
      if (c == '(')
        unit = group(begin, depth);
      else if (c == '*')
        fail(begin, "'*' after nothing, expected a letter or a group before it");
      else if (c == '|' && at_ < text_.size() && text_[at_] == '*')
        fail(at_, "'*' after '|', expected a letter or a group before it");
      else if (c != '|' && known_.find(c) == std::string::npos)
        fail(begin, unknown(c));
      const int64_t times = error_.empty() ? repeats() : 0;
      if (error_.empty() && unit.size() * static_cast<size_t>(times) > kMost - std::min(kMost, result.size()))
        fail(begin, "more than 2^22 letters");
      for (int64_t i = 0; error_.empty() && i < times && !unit.empty(); ++i)
        result += unit;
    }
    return result;
  }

  std::string group(size_t begin, int depth) {
    if (depth == kMostNested) {
      fail(begin, "parentheses nested more than " + std::to_string(kMostNested) + " deep");
      return {};
    }
    std::string unit = sequence(depth + 1);
    if (error_.empty() && (at_ == text_.size() || text_[at_++] != ')'))
      fail(begin, "'(' without a ')'");
    return unit;
  }

  std::string unknown(char c) const {
    std::string list;
    for (char each : known_)
      list += std::string(list.empty() ? "" : ", ") + each;
    return (static_cast<unsigned char>(c) < 0x80 ? "unknown letter '" + std::string(1, c) + "'" : std::string("unknown letter")) + ", expected one of " + list;
  }

  int64_t repeats() {
    if (at_ == text_.size() || text_[at_] != '*')
      return 1;
    int64_t times = 0;
    const size_t begin = ++at_;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9' && times <= static_cast<int64_t>(kMost); ++at_)
      times = times * 10 + (text_[at_] - '0');
    if (at_ == begin || times == 0 || times > static_cast<int64_t>(kMost))
      fail(begin, "expected a number from 1 to 2^22 after '*'");
    return times;
  }

  const std::string &text_;
  std::string known_; // letters
  std::string &error_;
  size_t &at_;
};

/// The values of each virtual rank where some are stated or things count as layers; `even` otherwise.
std::optional<std::vector<int64_t>> sizesOf(const Pipeline &p, int64_t n, int64_t ranks, std::string &error) {
  const int64_t v = p.interleave, stages = ranks * v;
  auto fail = [&](std::string why) {
    error = std::move(why);
    return std::nullopt;
  };
  if (p.embedding || p.loss) {
    const int64_t e = p.embedding.value_or(0), l = p.loss.value_or(0);
    if (e < 0 || e > 1 || l < 0 || l > 1)
      return fail("'embedding' and 'loss' are " + text(e) + " and " + text(l) + ", expected 0 or 1");
    if ((n + e + l) % stages != 0)
      return fail(counted(n, "value") + " and " + text(e + l) + " for embedding and loss cannot be shared over " +
                  counted(stages, "stage") + ": " + text(stages) + " does not divide " + text(n + e + l));
    std::vector<int64_t> sizes(stages, (n + e + l) / stages);
    sizes.front() -= e;
    sizes.back() -= l;
    if (sizes.front() < 0 || sizes.back() < 0)
      return fail("no values are left for the stages of embedding and loss");
    return sizes;
  }
  if (ranks == 1)
    return fail("'first' and 'last' with one rank, expected more");
  const int64_t others = ranks - p.first.has_value() - p.last.has_value();
  const int64_t rest = n - p.first.value_or(0) - p.last.value_or(0);
  if (p.first.value_or(0) < 0 || p.last.value_or(0) < 0 || rest < 0)
    return fail("'first' and 'last' take " + text(n - rest) + " of " + text(n) + " values");
  if (others == 0 ? rest != 0 : rest % others != 0)
    return fail("'first' and 'last' leave " + counted(rest, "value") + ", which cannot be shared over " +
                (others == 1 ? "the other rank" : text(others) + " other ranks"));
  std::vector<int64_t> each(ranks, others ? rest / others : 0);
  if (p.first)
    each.front() = *p.first;
  if (p.last)
    each.back() = *p.last;
  std::vector<int64_t> sizes;
  for (int64_t chunk = 0; chunk < v; ++chunk)
    for (int64_t rank : each) {
      if (rank % v != 0)
        return fail("a rank has " + counted(rank, "value") + ", expected a multiple of " + text(v) + " ('interleave')");
      sizes.push_back(rank / v);
    }
  return sizes;
}

} // namespace

std::optional<std::vector<int64_t>> readStages(const std::string &text, char letter, std::string &error, size_t &at) {
  const auto expanded = StageString(text, letter, error, at).run();
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

std::optional<StagedShares> shareStages(Scheme scheme, Pipeline pipeline, int64_t n, int64_t ranks,
                                        std::string &error) {
  if (pipeline.stages) {
    const int64_t stages = static_cast<int64_t>(pipeline.stages->size());
    if (stages % ranks != 0) {
      error = counted(stages, "stage") + " over " + text(ranks) + " ranks, expected a multiple of " + text(ranks);
      return std::nullopt;
    }
    const int64_t values = std::accumulate(pipeline.stages->begin(), pipeline.stages->end(), int64_t{0});
    if (values != n) {
      error = "'" + pipeline.key + "' has " + counted(values, "value") + " in all its stages, expected " + text(n);
      return std::nullopt;
    }
    pipeline.interleave = stages / ranks;
    scheme.numbers = *pipeline.stages;
    scheme.name = "sizes";
  } else if (pipeline.first || pipeline.last || pipeline.embedding || pipeline.loss) {
    auto sizes = sizesOf(pipeline, n, ranks, error);
    if (!sizes)
      return std::nullopt;
    scheme.numbers = std::move(*sizes);
    scheme.name = "sizes";
  }
  const int64_t chunks = pipeline.interleave;
  auto stages = share(scheme, n, ranks * chunks, 1, error);
  if (!stages)
    return std::nullopt;
  StagedShares result;
  result.chunks = chunks;
  result.local.resize(ranks);
  for (int64_t stage = 0; stage < ranks * chunks; ++stage)
    for (Segment s : dense(stages->at[stage])) {
      s.to += stage / ranks * ir::kChunk;
      result.local[stage % ranks].push_back(s);
    }
  if (chunks == 1) {
    result.shares = std::move(*stages);
    return result;
  }
  result.shares.at.resize(ranks);
  result.shares.lengths.resize(ranks);
  result.shares.repeats.assign(stages->repeats.size(), std::vector<Segments>(ranks));
  for (int64_t stage = 0; stage < ranks * chunks; ++stage) {
    const int64_t rank = stage % ranks;
    for (size_t layer = 0; layer < stages->layers(); ++layer)
      for (Segment s : stages->layer(layer)[stage]) {
        s.to += result.shares.lengths[rank];
        (layer == 0 ? result.shares.at : result.shares.repeats[layer - 1])[rank].push_back(s);
      }
    result.shares.lengths[rank] += stages->lengths[stage];
  }
  for (Segments &local : result.local)
    local = normalize(std::move(local));
  for (size_t layer = 0; layer < result.shares.layers(); ++layer)
    for (Segments &segments : layer == 0 ? result.shares.at : result.shares.repeats[layer - 1])
      segments = normalize(std::move(segments));
  return result;
}

} // namespace reshard
