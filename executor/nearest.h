// Finds the known name that is nearest to a misspelled one.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace reshard {

/// The offered name with the least edit distance, if that is at most a third of the name's length, plus one.
class Nearest {
public:
  explicit Nearest(const std::string &name) : name_(name), best_(name.size() / 3 + 2) {}
  void offer(const std::string &known);
  /// ", did you mean 'x'?", or nothing.
  std::string hint() const { return found_.empty() ? "" : ", did you mean '" + found_ + "'?"; }

private:
  const std::string &name_;
  size_t best_; // only names with fewer edits are accepted
  std::string found_;
  std::vector<size_t> row_;
};

} // namespace reshard
