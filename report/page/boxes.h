// SPDX-License-Identifier: Apache-2.0
// Sets of elements of one tensor as boxes of the matrix by which the page draws the tensor: rows are its first
// dimension, columns all others, joined.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace reshard::report {

/// A tensor that is drawn as a matrix.
struct DrawnMatrix {
  int64_t rows = 1, columns = 1;
};

/// `count` elements, or groups of them, `stride` elements apart in row-major order.
struct Stride {
  int64_t count, stride;
};

/// Boxes of a matrix, at most as many as a limit.
class Boxes {
public:
  /// Rows [0], up to and without row [1]; columns [2], up to and without column [3].
  using Box = std::array<int64_t, 4>;

  explicit Boxes(size_t limit) : limit_(limit) {}
  /// Adds the elements first + Σ d_i * stride_i for 0 <= d_i < count_i. The matrix must not be empty.
  void add(const DrawnMatrix &matrix, int64_t first, std::vector<Stride> strides);
  bool empty() const { return list_.empty(); }
  size_t size() const { return list_.size(); }
  /// Whether boxes were left out.
  bool cut() const { return cut_; }
  /// Leaves out all boxes but the first `limit`.
  void keep(size_t limit);
  /// [[row, row end, column, column end]].
  nlohmann::ordered_json json() const;

private:
  void addRun(const DrawnMatrix &matrix, int64_t begin, int64_t length, int64_t rows);
  void addBox(const Box &box);

  size_t limit_;
  std::vector<Box> list_;
  bool cut_ = false;
};

} // namespace reshard::report
