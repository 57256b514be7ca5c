// SPDX-License-Identifier: Apache-2.0
#include "base/nearest.h"

#include <algorithm>

namespace reshard {

namespace {

constexpr size_t kMaxCompared = 200; // longer names are not compared, since time grows with the product of the lengths
constexpr size_t kMaxListed = 8;

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

} // namespace

Nearest::Nearest(std::string_view name) : name_(name), limit_(name.size() < 3 ? 1 : (name.size() + 2) / 3 + 1) {
  std::transform(name_.begin(), name_.end(), name_.begin(), lower);
}

void Nearest::offer(std::string_view known) {
  const size_t difference = std::max(known.size(), name_.size()) - std::min(known.size(), name_.size());
  if (difference >= limit_ || name_.size() > kMaxCompared || known.size() > kMaxCompared)
    return;
  row_.resize(known.size() + 1);
  for (size_t j = 0; j <= known.size(); ++j)
    row_[j] = j;
  for (size_t i = 1; i <= name_.size(); ++i) {
    size_t diagonal = row_[0];
    row_[0] = i;
    for (size_t j = 1; j <= known.size(); ++j) {
      const size_t above = row_[j];
      row_[j] = std::min({row_[j] + 1, row_[j - 1] + 1, diagonal + (name_[i - 1] != lower(known[j - 1]))});
      diagonal = above;
    }
  }
  if (row_.back() < limit_) {
    limit_ = row_.back();
    found_ = known;
  }
}

std::string suggestion(std::string_view name, const std::vector<std::string> &known) {
  Nearest nearest(name);
  for (const std::string &each : known)
    nearest.offer(each);
  if (std::string hint = nearest.hint(); !hint.empty() || known.empty() || known.size() > kMaxListed)
    return hint;
  std::string list;
  for (const std::string &each : known)
    list += (list.empty() ? "; known here: " : ", ") + each;
  return list;
}

} // namespace reshard
