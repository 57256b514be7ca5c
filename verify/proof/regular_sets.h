// SPDX-License-Identifier: Apache-2.0
// Regular sets of positions (strided rows, columns and blocks) with a value at each position, and the one operation
// that the plan verifier needs: to split a strided access into fragments that lie in one set each. The cost depends on
// the number of fragments, not of positions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace reshard::verify {

/// The positions begin + Σ d_i * step_i for 0 <= d_i < count_i; the value of each is value + Σ d_i *
/// dimensions[i].value.
struct RegularSet {
  struct Dimension {
    int64_t count, step, value;
  };
  int64_t begin = 0, value = 0;
  uint32_t tag = 0; // names what the values refer to, such as a tensor
  std::vector<Dimension> dimensions;
  int64_t end = 0; // after the last position; set by RegularSets::add
};

/// Digits of a position in a set: the d_i above.
inline constexpr size_t kMaxSetDimensions = 16;
using Digits = std::array<int64_t, kMaxSetDimensions>;

class RegularSets {
public:
  /// Adds a set; splits it if its dimensions do not nest. Returns false if there would be more than kMaxSets.
  bool add(RegularSet set);
  /// Builds the search index. Call it after the last `add` and before the first `find`.
  void finish();
  /// A set that contains a position, and the position's digits; null if there is none. `hint`: index of the set found
  /// last, which speeds up nearby accesses.
  const RegularSet *find(int64_t position, Digits &digits, size_t &hint, uint64_t &work) const;
  /// Whether each of the positions [0, count) is in exactly one set.
  bool partition(int64_t count, uint64_t &work) const;

  /// The number of positions, counted once for each set that contains them.
  int64_t positions() const { return positions_; }
  const std::vector<RegularSet> &list() const { return list_; }
  static constexpr size_t kMaxSets = size_t{1} << 22;

private:
  const RegularSet *search(size_t first, size_t last, int64_t position, Digits &digits, uint64_t &work) const;

  std::vector<RegularSet> list_; // by begin
  std::vector<int64_t> maxEnds_; // at the middle of each half, quarter, …: the largest end in that range
  int64_t positions_ = 0;
};

/// A strided access that begins at `position`: loops outermost first; the elements of a row are the innermost loop.
/// `counterpart` and `origin` advance with it: the value that the caller compares with, and the position that it
/// reports.
struct LoopNest {
  struct Loop {
    int64_t count, position, counterpart, origin;
  };
  int64_t position = 0, counterpart = 0, origin = 0;
  std::vector<Loop> loops;
};

/// A part of a nest that lies in one set: its values have constant strides.
struct Fragment {
  struct Loop {
    int64_t count, counterpart, origin, value; // count > 1
  };
  const RegularSet *set = nullptr;
  int64_t position = 0, counterpart = 0, origin = 0, value = 0; // at the first element
  std::vector<Loop> loops;
  Digits low{}, high{}; // over all elements
};

enum class SplitStatus { done, missing, stopped, fragmented };

/// Splits loop nests into fragments at the borders of sets.
class NestSplitter {
public:
  NestSplitter(const RegularSets &sets, uint64_t &work) : sets_(sets), work_(work) {}
  /// Calls visit(fragment) for all fragments of a nest, until it returns false (stopped). missing: no set contains
  /// position(); fragmented: `work` exceeds kMaxWork.
  SplitStatus run(const LoopNest &nest, const std::function<bool(const Fragment &)> &visit);
  int64_t position() const { return position_; }
  int64_t origin() const { return origin_; }

  /// Limit of visited sets for all splitters that share `work`: a few minutes. Plans of the compiler need about one
  /// visit for each fragment.
  static constexpr uint64_t kMaxWork = uint64_t{1} << 33;

private:
  static constexpr size_t kMaxFragments = size_t{1} << 18; // in memory at a time
  struct Start {                                           // where a nest begins
    int64_t position, counterpart, origin;
  };
  SplitStatus split(std::span<const LoopNest::Loop> loops, const Start &start);
  SplitStatus split(const LoopNest::Loop &first, std::span<const LoopNest::Loop> inner, const Start &start);
  SplitStatus addElement(const Start &start);
  int64_t iterationsOfStep(const LoopNest::Loop &loop, int64_t position, int64_t left);
  void repeatFragments(size_t begin, const LoopNest::Loop &step, int64_t times);
  int64_t repeat(const Fragment &fragment, int64_t step, int64_t most, Digits &change);

  const RegularSets &sets_;
  uint64_t &work_;
  std::vector<Fragment> fragments_;
  bool full_ = false;
  size_t hint_ = 0;
  int64_t position_ = 0, origin_ = 0;
};

} // namespace reshard::verify
