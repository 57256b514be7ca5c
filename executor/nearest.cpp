#include "executor/nearest.h"

#include <algorithm>

namespace reshard {

void Nearest::offer(const std::string &known) {
  if (known.size() > name_.size() + best_ || name_.size() > known.size() + best_)
    return;
  row_.resize(known.size() + 1);
  for (size_t j = 0; j <= known.size(); ++j)
    row_[j] = j;
  for (size_t i = 1; i <= name_.size(); ++i) {
    size_t diagonal = row_[0];
    row_[0] = i;
    for (size_t j = 1; j <= known.size(); ++j) {
      const size_t above = row_[j];
      row_[j] = std::min({row_[j] + 1, row_[j - 1] + 1, diagonal + (name_[i - 1] != known[j - 1])});
      diagonal = above;
    }
  }
  if (row_.back() < best_) {
    best_ = row_.back();
    found_ = known;
  }
}

} // namespace reshard
