// SPDX-License-Identifier: Apache-2.0
// A name is divided into text and *digit groups*, of literal digits or placeholders. Two names are equal exactly if
// their texts are equal and each pair of groups is. Each variable occurs once in a pattern, so its groups vary
// independently: two patterns have a common name on a mesh rank if their texts are equal and each pair of groups has a
// common number there. Few patterns have the same texts. The exception is `{x.chunk}` beside `{x.local}`, one variable
// in two groups: for such patterns all names are listed.

#include "compiler/frontend/reading.h"
#include "compiler/resolve/mesh_ranks.h"
#include "compiler/resolve/steps.h"

#include <algorithm>
#include <optional>
#include <unordered_map>

namespace reshard {

using ir::IndexMap;

namespace {

/// A part of a group: literal digits, or a placeholder.
struct NameToken {
  std::string digits;
  int variable = -1; // into Param::variables
  Placeholder::Kind kind = Placeholder::Kind::value;
};
using DigitGroup = std::vector<NameToken>;

constexpr char kDigits = '\1'; // YAML text has no such character unescaped

struct NamePattern {
  std::string skeleton; // the name with kDigits for each group
  std::vector<DigitGroup> groups;
  bool literal = true; // no placeholder
  bool chunks = false; // has {x.chunk}: a variable in two groups
};

NamePattern readNamePattern(const ir::Layout &layout, const ir::Param &param) {
  NamePattern pattern;
  bool inDigits = false;
  auto group = [&]() -> DigitGroup & {
    if (!inDigits) {
      pattern.skeleton += kDigits;
      pattern.groups.emplace_back();
    }
    inDigits = true;
    return pattern.groups.back();
  };
  for (size_t i = 0; i < param.name.size(); ++i) {
    const char c = param.name[i];
    if (c >= '0' && c <= '9') {
      DigitGroup &tokens = group();
      if (tokens.empty() || tokens.back().variable >= 0)
        tokens.emplace_back();
      tokens.back().digits += c;
    } else if (c == '{') {
      const size_t end = std::min(param.name.find('}', i), param.name.size());
      const std::string placeholder = param.name.substr(i + 1, end - i - 1);
      for (size_t v = 0; v < param.variables.size(); ++v) {
        const std::string &variable = layout.variables[param.variables[v]].name;
        using Kind = Placeholder::Kind;
        for (const auto &[suffix, kind] :
             {std::pair("", Kind::value), std::pair(".local", Kind::local), std::pair(".chunk", Kind::chunk)})
          if (placeholder == variable + suffix)
            group().push_back({{}, static_cast<int>(v), kind});
        pattern.chunks = pattern.chunks || placeholder == variable + ".chunk";
      }
      pattern.literal = false;
      i = end;
    } else {
      inDigits = false;
      pattern.skeleton += c;
    }
  }
  return pattern;
}

/// The params whose names are compared.
struct NamedParams {
  const ir::Layout &layout;
  const ir::Endpoint &endpoint;
  const std::vector<Location> &declaredAt; // by param
  const std::vector<std::string> &titles;  // by param, for messages; if missing or empty: the noun and the name
  const char *noun;
};

class DuplicateNameCheck {
public:
  DuplicateNameCheck(const NamedParams &params, Diagnostics &diagnostics)
      : layout_(params.layout), endpoint_(params.endpoint), declaredAt_(params.declaredAt), titles_(params.titles),
        noun_(params.noun), diagnostics_(diagnostics) {}

  void run() {
    // By skeleton: literal patterns and others. Two literal patterns are compared only if their texts are equal.
    std::unordered_map<std::string, std::vector<unsigned>> literals, others, byName;
    for (unsigned p = 0; p < endpoint_.params.size(); ++p)
      patterns_.push_back(readNamePattern(layout_, endpoint_.params[p]));
    for (unsigned p = 0; p < patterns_.size(); ++p) {
      auto &namesakes = byName[endpoint_.params[p].name];
      for (unsigned q : others[patterns_[p].skeleton])
        compare(q, p);
      for (unsigned q : patterns_[p].literal ? namesakes : literals[patterns_[p].skeleton])
        compare(q, p);
      if (!patterns_[p].literal)
        compareWithItself(p);
      (patterns_[p].literal ? literals : others)[patterns_[p].skeleton].push_back(p);
      namesakes.push_back(p);
    }
  }

private:
  /// The numbers that a placeholder has on a mesh rank.
  std::vector<int64_t> numbers(const ir::Param &param, const NameToken &token, int64_t meshRank) const {
    const ir::Sharding &values = endpoint_.shardings[param.instances[token.variable]];
    const IndexMap &here = values.at[coordinate(endpoint_, values.axes, meshRank)];
    const ir::Sharding &positions = endpoint_.shardings[endpoint_.placement[param.variables[token.variable]]];
    const IndexMap &local = positions.at[coordinate(endpoint_, positions.axes, meshRank)];
    std::vector<int64_t> result;
    if (token.kind == Placeholder::Kind::value)
      for (const auto &[value, instance] : expand(here))
        result.push_back(value);
    else
      for (const auto &[value, position] : expand(restrict(local, here)))
        result.push_back(token.kind == Placeholder::Kind::local ? position % ir::kModelChunkStride
                                                                : position / ir::kModelChunkStride);
    return result;
  }

  /// All names of a param on a mesh rank, sorted. Nothing if they are too many.
  std::optional<std::vector<std::string>> names(unsigned p, int64_t meshRank) const {
    constexpr int64_t kMaxNames = 1 << 20;
    const int64_t count = instances(endpoint_, endpoint_.params[p], meshRank);
    if (count > kMaxNames)
      return std::nullopt;
    std::vector<std::string> result;
    result.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i)
      result.push_back(instanceName(layout_, endpoint_, endpoint_.params[p], meshRank, i));
    std::sort(result.begin(), result.end());
    return result;
  }

  /// All texts of a group on a mesh rank, sorted, with repeats. Nothing if they are too many.
  std::optional<std::vector<std::string>> texts(unsigned p, const DigitGroup &group, int64_t meshRank) const {
    constexpr size_t kMaxNames = 1 << 22;
    std::vector<std::string> result = {""};
    for (const NameToken &token : group) {
      std::vector<std::string> longer;
      if (token.variable < 0) {
        for (std::string &text : result)
          longer.push_back(std::move(text) + token.digits);
      } else {
        const auto values = numbers(endpoint_.params[p], token, meshRank);
        if (values.size() * result.size() > kMaxNames)
          return std::nullopt;
        for (const std::string &text : result)
          for (int64_t value : values)
            longer.push_back(text + std::to_string(value));
      }
      result = std::move(longer);
    }
    std::sort(result.begin(), result.end());
    return result;
  }

  void addAxes(unsigned p, std::vector<unsigned> &axes) const {
    const ir::Param &param = endpoint_.params[p];
    for (const ir::Presence &rule : param.presence)
      axes.push_back(rule.axis);
    for (size_t i = 0; i < param.variables.size(); ++i)
      for (unsigned sharding : {param.instances[i], endpoint_.placement[param.variables[i]]})
        axes.insert(axes.end(), endpoint_.shardings[sharding].axes.begin(), endpoint_.shardings[sharding].axes.end());
  }

  void compare(unsigned q, unsigned p) {
    const auto &groups = patterns_[p].groups, &others = patterns_[q].groups;
    if (std::count(patterns_[p].skeleton.begin(), patterns_[p].skeleton.end(), kDigits) != std::ssize(groups) ||
        groups.size() != others.size())
      return;                                  // the name itself contains kDigits
    for (size_t i = 0; i < groups.size(); ++i) // a common difference that is cheap to find: layers.1 and layers.2
      if (groups[i].size() == 1 && others[i].size() == 1 && groups[i][0].variable < 0 && others[i][0].variable < 0 &&
          groups[i][0].digits != others[i][0].digits)
        return;
    std::vector<unsigned> axes;
    addAxes(p, axes);
    addAxes(q, axes);
    for (int64_t meshRank : distinctMeshRanks(endpoint_, std::move(axes))) {
      if (instances(endpoint_, endpoint_.params[p], meshRank) == 0 ||
          instances(endpoint_, endpoint_.params[q], meshRank) == 0)
        continue;
      std::string name;
      size_t group = 0;
      if (patterns_[p].chunks || patterns_[q].chunks) {
        const auto one = names(p, meshRank), other = names(q, meshRank);
        if (!one || !other)
          return reportTooMany(p);
        std::vector<std::string> common;
        std::set_intersection(one->begin(), one->end(), other->begin(), other->end(), std::back_inserter(common));
        if (common.empty())
          continue;
        name = common[0];
        group = groups.size();
      }
      for (char c : group == 0 ? std::string_view(patterns_[p].skeleton) : std::string_view()) {
        if (c != kDigits) {
          name += c;
          continue;
        }
        const auto one = texts(p, groups[group], meshRank), other = texts(q, others[group], meshRank);
        if (!one || !other)
          return reportTooMany(p);
        std::vector<std::string> common;
        std::set_intersection(one->begin(), one->end(), other->begin(), other->end(), std::back_inserter(common));
        if (common.empty())
          break;
        name += common[0];
        ++group;
      }
      if (group < groups.size())
        continue;
      report(p, title(p) + " and " + title(q) + " both have the name '" + name + "'" + onRank(meshRank));
      const Location one = declaredAt_[p], other = declaredAt_[q];
      if (one.file != other.file || one.line != other.line || one.column != other.column)
        diagnostics_.note(other, "the other one is here");
      return;
    }
  }

  /// Reports patterns that have the same name for different values: because of adjacent placeholders ({a}{b} with 1, 11
  /// and 11, 1), or of positions in several chunks of virtual stages in a name without {x.chunk}.
  void compareWithItself(unsigned p) {
    const ir::Param &param = endpoint_.params[p];
    const bool local =
        std::any_of(patterns_[p].groups.begin(), patterns_[p].groups.end(), [&](const DigitGroup &group) {
          return std::any_of(group.begin(), group.end(), [&](const NameToken &token) {
            return token.kind == Placeholder::Kind::local &&
                   chunked(endpoint_.placement[param.variables[token.variable]]);
          });
        });
    std::vector<unsigned> localAxes;
    addAxes(p, localAxes);
    for (int64_t meshRank : local ? distinctMeshRanks(endpoint_, std::move(localAxes)) : std::vector<int64_t>()) {
      const auto all = names(p, meshRank);
      if (!all)
        return reportTooMany(p);
      if (const auto twice = std::adjacent_find(all->begin(), all->end()); twice != all->end())
        return report(p, title(p) + " has the same name for different values" + onRank(meshRank) + ": '" + *twice +
                             "' in several chunks, expected {x.chunk} in the name or 'chunks' in the layout");
    }
    for (const DigitGroup &group : patterns_[p].groups) {
      if (std::count_if(group.begin(), group.end(), [](const NameToken &token) { return token.variable >= 0; }) < 2)
        continue;
      std::vector<unsigned> axes;
      addAxes(p, axes);
      for (int64_t meshRank : distinctMeshRanks(endpoint_, std::move(axes))) {
        if (instances(endpoint_, endpoint_.params[p], meshRank) == 0)
          continue;
        const auto all = texts(p, group, meshRank);
        if (!all)
          return reportTooMany(p);
        const auto twice = std::adjacent_find(all->begin(), all->end());
        if (twice == all->end())
          continue;
        return report(p, title(p) + " has the same name for different values" + onRank(meshRank) +
                             ": its adjacent placeholders give '" + *twice + "' twice, expected text between them");
      }
    }
  }

  /// Whether a placement has several chunks on any mesh rank.
  bool chunked(unsigned sharding) {
    const auto [at, added] = chunked_.try_emplace(sharding, false);
    if (added)
      for (const IndexMap &here : endpoint_.shardings[sharding].at)
        for (const ir::IndexBlock &s : here)
          at->second = at->second || s.to + (s.count - 1) * s.toStep >= ir::kModelChunkStride;
    return at->second;
  }

  std::string title(unsigned p) const {
    return p < titles_.size() && !titles_[p].empty() ? titles_[p]
                                                     : std::string(noun_) + " '" + endpoint_.params[p].name + "'";
  }
  std::string onRank(int64_t meshRank) const {
    return endpoint_.role.empty() ? "" : " on " + meshRankText(endpoint_, meshRank);
  }
  void report(unsigned p, const std::string &message) { diagnostics_.error(declaredAt_[p], message); }
  void reportTooMany(unsigned p) {
    report(p, title(p) + " has too many names to compare, expected text between its placeholders");
  }

  const ir::Layout &layout_;
  const ir::Endpoint &endpoint_;
  const std::vector<Location> &declaredAt_;
  const std::vector<std::string> &titles_;
  const char *noun_;
  Diagnostics &diagnostics_;
  std::vector<NamePattern> patterns_;
  std::unordered_map<unsigned, bool> chunked_; // by sharding
};

} // namespace

void checkParamNames(const ir::Layout &layout, const ir::Endpoint &endpoint, const std::vector<Location> &declaredAt,
                     const std::vector<std::string> &titles, Diagnostics &diagnostics) {
  DuplicateNameCheck(
      {.layout = layout, .endpoint = endpoint, .declaredAt = declaredAt, .titles = titles, .noun = "param"},
      diagnostics)
      .run();
}

void checkTensorNames(const ir::Layout &layout, const std::vector<ir::TensorPattern> &tensors,
                      const std::vector<Location> &declaredAt, Diagnostics &diagnostics) {
  ir::Endpoint everything; // one mesh rank with all tensors as params
  everything.ranks = {0};
  for (const ir::IndexVariable &variable : layout.variables) {
    everything.placement.push_back(static_cast<unsigned>(everything.shardings.size()));
    everything.shardings.push_back({{}, {ir::identity(variable.size)}});
  }
  for (const ir::TensorPattern &tensor : tensors) {
    ir::Param &param = everything.params.emplace_back();
    param.name = tensor.name;
    param.variables = tensor.variables;
    for (const IndexMap &values : tensor.exists) {
      param.instances.push_back(static_cast<unsigned>(everything.shardings.size()));
      everything.shardings.push_back({{}, {values}});
    }
  }
  DuplicateNameCheck(
      {.layout = layout, .endpoint = everything, .declaredAt = declaredAt, .titles = {}, .noun = "tensor"}, diagnostics)
      .run();
}

} // namespace reshard
