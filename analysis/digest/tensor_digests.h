// SPDX-License-Identifier: Apache-2.0
// The digests of all tensors of a checkpoint, or of the files of one side of a plan.
#pragma once

#include "executor/digests/element_sums.h"
#include "schema/manifest.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace reshard {
class Plan;
}

namespace reshard::analysis {

using kernels::TensorDigest;

struct DigestedTensor {
  schema::DType dtype = schema::DType::u8;
  std::vector<int64_t> shape;
  TensorDigest digest;
};
using TensorDigests = std::map<std::string, DigestedTensor>; // by name

/// Reads a checkpoint of any format. The names are those in its files. Throws Failure.
TensorDigests digestsOfCheckpoint(const std::string &path);

/// Reads the files of an endpoint of a plan. The names are those of the model's tensors: elements are found by the
/// endpoint's layout, replicas count once, padding does not. Throws Failure, also for quantized params.
TensorDigests digestsOfSide(const Plan &plan, uint32_t endpoint, const std::string &path);

/// One line for each difference: a tensor that one side lacks, another dtype, shape or digest. `one` and `other` name
/// the sides.
std::vector<std::string> differences(const TensorDigests &a, const std::string &one, const TensorDigests &b,
                                     const std::string &other);

} // namespace reshard::analysis
