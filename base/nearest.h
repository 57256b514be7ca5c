// SPDX-License-Identifier: Apache-2.0
// Hints for misspelled names.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

/// Finds the offered name with the least edit distance (insertions, deletions and replacements; case is ignored), if
/// that is at most a third of the name's length, rounded up. A name of one or two characters has no near names but
/// those of other case, so that "ep" does not suggest "tp".
class Nearest {
public:
  explicit Nearest(std::string_view name);
  void offer(std::string_view known);
  /// ", did you mean 'x'?", or nothing.
  std::string hint() const { return found_.empty() ? "" : ", did you mean '" + found_ + "'?"; }

private:
  std::string name_; // in lower case
  size_t limit_;     // only names with fewer edits are accepted
  std::string found_;
  std::vector<size_t> row_;
};

/// A hint to append to an error about an unknown name: ", did you mean 'x'?" with the nearest known name; if none is
/// near, "; known here: a, b, c" for a short list, else "".
std::string suggestion(std::string_view name, const std::vector<std::string> &known);

} // namespace reshard
