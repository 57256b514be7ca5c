// SPDX-License-Identifier: Apache-2.0
// The rules OLD=NEW of the options --rename: other names for what a checkpoint contains (docs/checkpoints.md).
#pragma once

#include "base/status.h"

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace reshard {

/// Rules that change names. Without `*`, OLD is a beginning of names. With `*`, it is a glob of whole names, and each
/// `*` of NEW, as many as OLD has, stands for the text of the one in its place; a `*` is as short as it can be, from
/// the left. To each name all globs apply, in their order, and then the longest beginning that fits.
class Renames {
public:
  /// Adds a rule `OLD=NEW`. Returns an error text, empty if the rule is valid.
  std::string add(const std::string &rule);
  bool empty() const { return rules_.empty(); }
  /// All rules, for messages and journals.
  std::string text() const;
  std::string operator()(std::string name) const;
  /// Renames the keys of a map. An error names two that would get one name, and a rule that applies to none. `what`:
  /// what the keys name, such as "tensors of 'step-10'".
  template <class T> Status apply(std::map<std::string, T> &named, const std::string &what) const {
    if (empty())
      return {};
    std::map<std::string, std::string> origins; // by new name
    std::vector<bool> used(rules_.size());
    for (const auto &[name, value] : named) {
      const std::string to = rename(name, &used);
      if (to.empty())
        return failed("--rename leaves nothing of '" + name + "' of the " + what);
      const auto [origin, added] = origins.try_emplace(to, name);
      if (!added)
        return failed("--rename gives '" + origin->second + "' and '" + name + "' of the " + what + " the name '" + to +
                      "'");
    }
    for (size_t r = 0; r < rules_.size(); ++r)
      if (!used[r])
        return failed("--rename=" + rules_[r].text() + ": '" + rules_[r].from + "' " +
                      (rules_[r].glob ? "matches" : "begins") + " no name of the " + what);
    std::map<std::string, T> changed;
    for (const auto &[to, name] : origins)
      changed.emplace_hint(changed.end(), to, std::move(named.at(name)));
    named = std::move(changed);
    return {};
  }

private:
  struct Rule {
    std::string from, to;
    bool glob = false;
    std::string text() const { return from + "=" + to; }
  };

  std::string rename(std::string name, std::vector<bool> *used) const;

  std::vector<Rule> rules_;
};

} // namespace reshard
