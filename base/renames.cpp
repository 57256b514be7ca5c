// SPDX-License-Identifier: Apache-2.0
#include "base/renames.h"

#include <algorithm>
#include <optional>

namespace reshard {

namespace {

/// The texts between the `*` of a glob.
std::vector<std::string_view> literals(std::string_view glob) {
  std::vector<std::string_view> found;
  for (size_t at = 0, end = 0; end != std::string_view::npos; at = end + 1) {
    end = glob.find('*', at);
    found.push_back(glob.substr(at, end == std::string_view::npos ? end : end - at));
  }
  return found;
}

/// The texts that the `*` of a glob stand for in a name. Each but the last is the shortest one with which the rest of
/// the glob still fits: the leftmost place of the text that follows it leaves most room.
std::optional<std::vector<std::string_view>> matched(std::string_view glob, std::string_view name) {
  const std::vector<std::string_view> texts = literals(glob);
  const std::string_view last = texts.back();
  if (!name.starts_with(texts[0]) || name.size() < texts[0].size() + last.size() || !name.ends_with(last))
    return std::nullopt;
  const size_t end = name.size() - last.size();
  std::vector<std::string_view> stars;
  size_t at = texts[0].size();
  for (size_t i = 1; i + 1 < texts.size(); ++i) {
    const size_t found = name.substr(0, end).find(texts[i], at);
    if (found == std::string_view::npos)
      return std::nullopt;
    stars.push_back(name.substr(at, found - at));
    at = found + texts[i].size();
  }
  stars.push_back(name.substr(at, end - at));
  return stars;
}

} // namespace

std::string Renames::add(const std::string &rule) {
  const size_t equals = rule.find('=');
  if (equals == std::string::npos)
    return "invalid value '" + rule + "', expected OLD=NEW";
  Rule added{rule.substr(0, equals), rule.substr(equals + 1)};
  const auto stars = std::count(added.from.begin(), added.from.end(), '*');
  added.glob = stars > 0;
  if (std::count(added.to.begin(), added.to.end(), '*') != stars)
    return "invalid value '" + rule + "', expected as many '*' in NEW as in OLD";
  if (!added.glob && std::any_of(rules_.begin(), rules_.end(),
                                 [&](const Rule &each) { return !each.glob && each.from == added.from; }))
    return "'" + added.from + "' is given twice, expected once";
  rules_.push_back(std::move(added));
  return {};
}

std::string Renames::text() const {
  std::string all;
  for (const Rule &rule : rules_)
    all += (all.empty() ? "" : "\n") + rule.text();
  return all;
}

std::string Renames::operator()(std::string name) const { return rename(std::move(name), nullptr); }

std::string Renames::rename(std::string name, std::vector<bool> *used) const {
  std::optional<size_t> longest;
  for (size_t r = 0; r < rules_.size(); ++r) {
    if (!rules_[r].glob)
      continue;
    const auto stars = matched(rules_[r].from, name);
    if (!stars)
      continue;
    if (used)
      (*used)[r] = true;
    const std::vector<std::string_view> texts = literals(rules_[r].to);
    std::string changed(texts[0]);
    for (size_t i = 0; i < stars->size(); ++i)
      changed.append((*stars)[i]).append(texts[i + 1]);
    name = std::move(changed);
  }
  for (size_t r = 0; r < rules_.size(); ++r)
    if (!rules_[r].glob && name.starts_with(rules_[r].from) &&
        (!longest || rules_[r].from.size() > rules_[*longest].from.size()))
      longest = r;
  if (!longest)
    return name;
  if (used)
    (*used)[*longest] = true;
  return rules_[*longest].to + name.substr(rules_[*longest].from.size());
}

} // namespace reshard
