// SPDX-License-Identifier: Apache-2.0
// A tensor that the page draws: which of its rows and columns each rank class of an endpoint holds.
#pragma once

#include "report/page/boxes.h"
#include "schema/manifest.h"

#include <optional>
#include <string>
#include <vector>

namespace reshard::report {

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
