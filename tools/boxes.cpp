#include "tools/boxes.h"

#include <algorithm>
#include <cstdlib>

namespace reshard::tools {

namespace {

bool digitsOf(const Box &box, int64_t place, Digits &digits) {
  int64_t rest = place - box.begin;
  if (rest < 0 || place >= box.end)
    return false;
  for (size_t i = 0; i < box.dimensions.size(); ++i) {
    const Box::Dimension &dimension = box.dimensions[i];
    digits[i] = rest / dimension.step;
    if (digits[i] >= dimension.count)
      return false;
    rest -= digits[i] * dimension.step;
  }
  return rest == 0;
}

} // namespace

bool Boxes::add(Box box) {
  std::vector<Box::Dimension> &dimensions = box.dimensions;
  std::erase_if(dimensions, [](const Box::Dimension &d) { return d.count == 1; });
  for (Box::Dimension &d : dimensions)
    if (d.step < 0) {
      box.begin += (d.count - 1) * d.step;
      box.value += (d.count - 1) * d.value;
      d.step = -d.step;
      d.value = -d.value;
    }
  std::stable_sort(dimensions.begin(), dimensions.end(), [](const auto &a, const auto &b) { return a.step > b.step; });
  for (size_t i = dimensions.size(); i-- > 1;) {
    Box::Dimension &outer = dimensions[i - 1];
    const Box::Dimension &inner = dimensions[i];
    if (outer.step != inner.count * inner.step || outer.value != inner.count * inner.value)
      continue;
    outer = {outer.count * inner.count, inner.step, inner.value};
    dimensions.erase(dimensions.begin() + static_cast<std::ptrdiff_t>(i));
  }
  // Where one step of a dimension is shorter than what lies within, places have no digits: one box for each value of
  // it.
  int64_t reach = 1;
  size_t crossing = dimensions.size() > kMaxBoxDimensions ? 0 : dimensions.size();
  for (size_t i = dimensions.size(); i-- > 0; reach += (dimensions[i].count - 1) * dimensions[i].step)
    if (dimensions[i].step < reach)
      crossing = i;
  if (crossing < dimensions.size()) {
    const Box::Dimension crossed = dimensions[crossing];
    if (list_.size() >= kMost || crossed.count > static_cast<int64_t>(kMost - list_.size()))
      return false;
    dimensions.erase(dimensions.begin() + static_cast<std::ptrdiff_t>(crossing));
    for (int64_t i = 0; i < crossed.count; ++i) {
      Box one = box;
      one.begin += i * crossed.step;
      one.value += i * crossed.value;
      if (!add(std::move(one)))
        return false;
    }
    return true;
  }
  if (list_.size() >= kMost)
    return false;
  box.end = box.begin + reach;
  int64_t places = 1;
  for (const Box::Dimension &d : dimensions)
    places *= d.count;
  if (__builtin_add_overflow(places_, places, &places_))
    places_ = INT64_MAX;
  list_.push_back(std::move(box));
  return true;
}

void Boxes::finish() {
  std::sort(list_.begin(), list_.end(), [](const Box &a, const Box &b) { return a.begin < b.begin; });
  most_.resize(list_.size());
  const auto fill = [&](auto &self, size_t first, size_t last) -> int64_t {
    if (first == last)
      return INT64_MIN;
    const size_t middle = first + (last - first) / 2;
    return most_[middle] = std::max({list_[middle].end, self(self, first, middle), self(self, middle + 1, last)});
  };
  fill(fill, 0, list_.size());
}

const Box *Boxes::search(size_t first, size_t last, int64_t place, Digits &digits, uint64_t &work) const {
  if (first == last)
    return nullptr;
  ++work;
  const size_t middle = first + (last - first) / 2;
  if (most_[middle] <= place)
    return nullptr;
  if (list_[middle].begin <= place) {
    if (const Box *later = search(middle + 1, last, place, digits, work))
      return later;
    if (digitsOf(list_[middle], place, digits))
      return &list_[middle];
  }
  return search(first, middle, place, digits, work);
}

const Box *Boxes::find(int64_t place, Digits &digits, size_t &hint, uint64_t &work) const {
  for (size_t i = hint; i < std::min(hint + 2, list_.size()); ++i, ++work)
    if (digitsOf(list_[i], place, digits)) {
      hint = i;
      return &list_[i];
    }
  const Box *found = search(0, list_.size(), place, digits, work);
  if (found)
    hint = static_cast<size_t>(found - list_.data());
  return found;
}

bool Boxes::partition(int64_t count, uint64_t &work) const {
  return places_ == count && (count == 0 || Cutter(*this, work).run({0, 0, 0, {{count, 1, 0, 0}}}, [](const Piece &) {
           return true;
         }) == Cut::done);
}

Cut Cutter::run(const Nest &nest, const std::function<bool(const Piece &)> &visit) {
  pieces_.clear();
  full_ = false;
  const Cut result = cut(nest.loops.data(), nest.loops.size(), nest.place, nest.with, nest.also);
  if (!full_) {
    for (const Piece &piece : pieces_)
      if (!visit(piece))
        return Cut::stopped;
    return result;
  }
  // Too many to keep: half of it first. Each half is cut again, which at most doubles the work.
  const auto longest = std::max_element(nest.loops.begin(), nest.loops.end(),
                                        [](const auto &a, const auto &b) { return a.count < b.count; });
  Nest half = nest;
  Nest::Loop &loop = half.loops[static_cast<size_t>(longest - nest.loops.begin())];
  loop.count = longest->count / 2;
  if (const Cut first = run(half, visit); first != Cut::done)
    return first;
  half.place += loop.count * loop.place;
  half.with += loop.count * loop.with;
  half.also += loop.count * loop.also;
  loop.count = longest->count - loop.count;
  return run(half, visit);
}

/// How often, up to `most`, a piece stands in its box again, each time `step` places further; `change`: of its digits.
int64_t Cutter::repeat(const Piece &piece, int64_t step, int64_t most, Digits &change) {
  ++work_;
  if (!digitsOf(*piece.box, piece.place + step, change))
    return 1;
  Digits first;
  digitsOf(*piece.box, piece.place, first);
  for (size_t i = 0; i < piece.box->dimensions.size(); ++i) {
    change[i] -= first[i];
    if (change[i] > 0)
      most = std::min(most, 1 + (piece.box->dimensions[i].count - 1 - piece.high[i]) / change[i]);
    else if (change[i] < 0)
      most = std::min(most, 1 + piece.low[i] / -change[i]);
  }
  return most;
}

Cut Cutter::cut(const Nest::Loop *loops, size_t count, int64_t place, int64_t with, int64_t also) {
  if (count > 0)
    return cut(loops + 1, count - 1, loops[0], place, with, also);
  if (work_ > kMaxWork)
    return Cut::fragmented;
  if (pieces_.size() >= kMaxPieces) {
    full_ = true;
    return Cut::stopped;
  }
  Piece piece;
  piece.box = boxes_.find(place, piece.low, hint_, work_);
  if (!piece.box) {
    place_ = place;
    also_ = also;
    return Cut::missing;
  }
  piece.high = piece.low;
  piece.place = place;
  piece.with = with;
  piece.also = also;
  piece.value = piece.box->value;
  for (size_t i = 0; i < piece.box->dimensions.size(); ++i)
    piece.value += piece.low[i] * piece.box->dimensions[i].value;
  pieces_.push_back(std::move(piece));
  return Cut::done;
}

/// `first` around `loops`. What stands within one iteration, or within as many as make one step of a box, is cut once
/// and then repeated as often as it stays in its boxes.
Cut Cutter::cut(const Nest::Loop *loops, size_t count, const Nest::Loop &first, int64_t place, int64_t with,
                int64_t also) {
  for (int64_t i = 0; i < first.count;) {
    const int64_t at = place + i * first.place, left = first.count - i;
    int64_t together = 1; // iterations that make a step of the box
    if (left > 1 && first.place != 0) {
      Digits digits;
      const Box *box = boxes_.find(at, digits, hint_, work_);
      const int64_t length = std::abs(first.place);
      for (size_t d = 0; box && d < box->dimensions.size(); ++d) {
        const Box::Dimension &dimension = box->dimensions[d];
        const bool goesOn = first.place > 0 ? digits[d] + 1 < dimension.count : digits[d] > 0;
        if (goesOn && dimension.step > length && dimension.step % length == 0 && dimension.step / length < left) {
          together = dimension.step / length;
          break;
        }
      }
    }
    const size_t begin = pieces_.size();
    const int64_t w = with + i * first.with, a = also + i * first.also;
    const Cut inner = together > 1 ? cut(loops, count, {together, first.place, first.with, first.also}, at, w, a)
                                   : cut(loops, count, at, w, a);
    if (inner != Cut::done)
      return inner;
    const int64_t most = left / together, step = together * first.place;
    int64_t times = most;
    Digits change;
    for (size_t p = begin; p < pieces_.size() && times > 1; ++p)
      times = std::min(times, repeat(pieces_[p], step, times, change));
    for (size_t p = begin; p < pieces_.size() && times > 1; ++p) {
      Piece &piece = pieces_[p];
      repeat(piece, step, times, change);
      int64_t value = 0;
      for (size_t d = 0; d < piece.box->dimensions.size(); ++d) {
        value += change[d] * piece.box->dimensions[d].value;
        (change[d] > 0 ? piece.high : piece.low)[d] += (times - 1) * change[d];
      }
      piece.loops.push_back({times, together * first.with, together * first.also, value});
    }
    i += times * together;
  }
  return Cut::done;
}

} // namespace reshard::tools
