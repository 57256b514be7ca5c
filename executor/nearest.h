// The known name that a misspelt one may have meant.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace reshard {

/// Of known names, offered one by one, the one that is the fewest edits away, if these are few for the name's length.
class Nearest {
public:
  explicit Nearest(const std::string &name) : name_(name), best_(name.size() / 3 + 2) {}
  void offer(const std::string &known);
  /// ", did you mean 'x'?", or nothing.
  std::string hint() const { return found_.empty() ? "" : ", did you mean '" + found_ + "'?"; }

private:
  const std::string &name_;
  size_t best_; // edits, of which fewer are looked for
  std::string found_;
  std::vector<size_t> row_;
};

} // namespace reshard
