// Regular sets of places (rows, columns, blocks of them) with the value at each place, and the one operation that the
// proof needs: to cut a strided access into pieces that stand in one such set each. Its cost grows with the pieces, not
// with the places.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace reshard::tools {

/// The places begin + Σ d_i * step_i for 0 <= d_i < count_i; the value there is value + Σ d_i * value step_i.
struct RegularSet {
  struct Dimension {
    int64_t count, step, value;
  };
  int64_t begin = 0, value = 0;
  uint32_t tag = 0; // what the values are of
  std::vector<Dimension> dimensions;
  int64_t end = 0; // behind the last place; set by Boxes::add
};

/// Digits of a place in a box: the d_i above.
inline constexpr size_t kMaxSetDimensions = 16;
using Digits = std::array<int64_t, kMaxSetDimensions>;

class RegularSets {
public:
  /// Takes a box in, as several where its dimensions do not nest. False when there are more than kMost.
  bool add(RegularSet set);
  /// To be called between the last `add` and the first `find`.
  void finish();
  /// A box that has a place, with the place's digits; null where there is none. `hint`: an index, for accesses that go
  /// on from one another.
  const RegularSet *find(int64_t position, Digits &digits, size_t &hint, uint64_t &work) const;
  /// Whether each of the places [0, count) is in exactly one box.
  bool partition(int64_t count, uint64_t &work) const;

  /// Places, each as often as it is in a box.
  int64_t positions() const { return positions_; }
  const std::vector<RegularSet> &list() const { return list_; }
  static constexpr size_t kMaxSets = size_t{1} << 22;

private:
  const RegularSet *search(size_t first, size_t last, int64_t position, Digits &digits, uint64_t &work) const;

  std::vector<RegularSet> list_; // by begin
  std::vector<int64_t> maxEnds_; // of the middle of each half, quarter, …: the largest end in it
  int64_t positions_ = 0;
};

/// A strided access: from `place` on, loops outermost first, the elements of a row being the last. `with` and `also`
/// count along: what the caller compares with, and where it stands.
struct LoopNest {
  struct Loop {
    int64_t count, position, counterpart, origin;
  };
  int64_t position = 0, counterpart = 0, origin = 0;
  std::vector<Loop> loops;
};

/// A part of a nest in one box: the values there go in even steps.
struct Fragment {
  struct Loop {
    int64_t count, counterpart, origin, value; // count > 1
  };
  const RegularSet *set = nullptr;
  int64_t position = 0, counterpart = 0, origin = 0, value = 0; // of the first element
  std::vector<Loop> loops;
  Digits low{}, high{}; // of all elements
};

enum class SplitStatus { done, missing, stopped, fragmented };

/// Cuts nests into pieces along a set of boxes.
class NestSplitter {
public:
  NestSplitter(const RegularSets &sets, uint64_t &work) : sets_(sets), work_(work) {}
  /// Calls visit(piece) for all of a nest, until it returns false. missing: at `place()` and `also()` there is no box;
  /// fragmented: `work` is beyond kMaxWork.
  SplitStatus run(const LoopNest &nest, const std::function<bool(const Fragment &)> &visit);
  int64_t position() const { return position_; }
  int64_t origin() const { return origin_; }

  /// Looked-at boxes, of everything that shares `work`: a few minutes. Plans of the compiler take about one for each
  /// piece.
  static constexpr uint64_t kMaxWork = uint64_t{1} << 33;

private:
  static constexpr size_t kMaxFragments = size_t{1} << 18; // in memory at a time
  SplitStatus split(const LoopNest::Loop *loops, size_t count, const LoopNest::Loop &first, int64_t position,
                    int64_t counterpart, int64_t origin);
  SplitStatus split(const LoopNest::Loop *loops, size_t count, int64_t position, int64_t counterpart, int64_t origin);
  int64_t repeat(const Fragment &fragment, int64_t step, int64_t most, Digits &change);

  const RegularSets &sets_;
  uint64_t &work_;
  std::vector<Fragment> fragments_;
  bool full_ = false;
  size_t hint_ = 0;
  int64_t position_ = 0, origin_ = 0;
};

} // namespace reshard::tools
