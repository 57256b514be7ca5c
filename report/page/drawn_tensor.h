// SPDX-License-Identifier: Apache-2.0
// A tensor that the page draws: which of its rows and columns each rank class of an endpoint holds, as boxes of a
// matrix: rows are its first dimension, columns all others, joined.
#pragma once

#include "schema/manifest.h"

#include <nlohmann/json_fwd.hpp>

#include <array>
#include <optional>
#include <string>
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

/// What the ranks of one rank class hold of the tensor.
struct DrawnHolding {
  uint32_t param = 0;          // its number at the endpoint; the ranks bind it
  std::vector<uint32_t> ranks; // the first ones, or files
  uint32_t more = 0;           // the number of others
  Boxes boxes;
};

/// What an endpoint holds of the tensor.
struct DrawnHoldings {
  std::vector<DrawnHolding> list;
  size_t left = 0; // how many others there are
};

/// One tensor that the page draws.
class DrawnTensor {
public:
  /// `values`: of the index variables of the pattern.
  DrawnTensor(const schema::Manifest &manifest, uint32_t pattern, std::vector<int64_t> values);

  const schema::TensorPattern &pattern() const { return *manifest_.tensor_patterns()->Get(pattern_); }
  const std::string &name() const { return name_; }
  const DrawnMatrix &matrix() const { return matrix_; }
  DrawnHoldings holdings(const schema::Endpoint &endpoint) const;
  /// The instance of a param on a mesh rank that holds elements of the tensor, with its number and values; none if the
  /// param does not hold the tensor there, or presents it in another form than elements.
  std::optional<schema::ParamInstance> instance(const schema::Endpoint &endpoint, uint32_t param,
                                                uint32_t meshRank) const;

private:
  bool holds(const schema::Param &param) const;
  Boxes boxesOf(const schema::Endpoint &endpoint, uint32_t param, uint32_t meshRank) const;

  const schema::Manifest &manifest_;
  const uint32_t pattern_;
  const std::vector<int64_t> values_;
  const std::string name_;
  DrawnMatrix matrix_;
};

} // namespace reshard::report
