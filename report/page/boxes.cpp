// SPDX-License-Identifier: Apache-2.0
#include "report/page/boxes.h"

#include "base/work_deadline.h"

#include <nlohmann/json.hpp>

#include <algorithm>

namespace reshard::report {

namespace {

/// Makes all strides positive, sorts them, the largest first, and joins those that continue each other. Returns the new
/// first element.
int64_t normalize(int64_t first, std::vector<Stride> &strides) {
  std::erase_if(strides, [](const Stride &each) { return each.count == 1; });
  for (Stride &each : strides)
    if (each.stride < 0) {
      first += (each.count - 1) * each.stride;
      each.stride = -each.stride;
    }
  std::sort(strides.begin(), strides.end(), [](const Stride &a, const Stride &b) { return a.stride > b.stride; });
  std::vector<Stride> joined;
  for (const Stride &each : strides)
    if (!joined.empty() && joined.back().stride == each.count * each.stride)
      joined.back() = {joined.back().count * each.count, each.stride};
    else
      joined.push_back(each);
  strides = std::move(joined);
  return first;
}

} // namespace

void Boxes::add(const DrawnMatrix &matrix, int64_t first, std::vector<Stride> strides) {
  for (const Stride &each : strides)
    if (each.count == 0)
      return;
  first = normalize(first, strides);
  int64_t run = 1, rows = 1; // elements that follow each other, and in how many rows they repeat
  if (!strides.empty() && strides.back().stride == 1) {
    run = strides.back().count;
    strides.pop_back();
  }
  const auto down =
      std::find_if(strides.begin(), strides.end(), [&](const Stride &each) { return each.stride == matrix.columns; });
  if (down != strides.end() && run < matrix.columns) {
    rows = down->count;
    strides.erase(down);
  }
  std::vector<int64_t> at(strides.size());
  for (size_t s = at.size() + 1; s > 0 && !cut_;) {
    WorkDeadline::spend(16);
    addRun(matrix, first, run, rows);
    for (s = at.size(); s > 0; --s) {
      const Stride &stride = strides[s - 1];
      first += stride.stride;
      if (++at[s - 1] < stride.count)
        break;
      first -= stride.count * stride.stride;
      at[s - 1] = 0;
    }
  }
}

/// Adds elements that follow each other, and repeat in `rows` rows.
void Boxes::addRun(const DrawnMatrix &matrix, int64_t begin, int64_t length, int64_t rows) {
  const int64_t column = begin % matrix.columns;
  if (column + length <= matrix.columns)
    return addBox({begin / matrix.columns, begin / matrix.columns + rows, column, column + length});
  for (int64_t r = 0; r < rows && !cut_; ++r)
    for (int64_t from = begin + r * matrix.columns, left = length; left > 0 && !cut_;) {
      const int64_t at = from % matrix.columns, whole = at == 0 ? left / matrix.columns : 0;
      const int64_t width = whole > 0 ? matrix.columns : std::min(left, matrix.columns - at);
      const int64_t height = std::max<int64_t>(whole, 1);
      addBox({from / matrix.columns, from / matrix.columns + height, at, at + width});
      from += height * width;
      left -= height * width;
    }
}

/// Adds a box, or extends the one that ends above it.
void Boxes::addBox(const Box &box) {
  for (Box &above : list_)
    if (above[1] == box[0] && above[2] == box[2] && above[3] == box[3]) {
      above[1] = box[1];
      return;
    }
  cut_ = cut_ || list_.size() >= limit_;
  if (!cut_)
    list_.push_back(box);
}

void Boxes::keep(size_t limit) {
  cut_ = cut_ || list_.size() > limit;
  list_.resize(std::min(list_.size(), limit));
}

nlohmann::ordered_json Boxes::json() const { return list_; }

} // namespace reshard::report
