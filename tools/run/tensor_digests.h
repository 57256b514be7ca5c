// SPDX-License-Identifier: Apache-2.0
// The digests of all tensors of a checkpoint, or of the files of one side of a plan.
#pragma once

#include "base/renames.h"
#include "base/status.h"
#include "executor/digests/element_sums.h"
#include "schema/manifest.h"

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace reshard {
class Plan;
}

namespace reshard::tools {

using kernels::TensorDigest;

struct DigestedTensor {
  schema::DType dtype = schema::DType::u8;
  std::vector<int64_t> shape;
  TensorDigest digest;
};
using TensorDigests = std::map<std::string, DigestedTensor>; // by name

/// Reads a checkpoint of any format. The names are those in its files, renamed. An error is
/// `failed` if a file was changed meanwhile, else `invalid`.
Result<TensorDigests> digestsOfCheckpoint(const std::string &path, const Renames &renames = {});

/// Leaves the tensors below `model`, as torch.distributed.checkpoint saves {"model": …, "optimizer": …}, and removes
/// this prefix. Returns the names of the others.
std::set<std::string> keepModel(TensorDigests &digests);
/// Does so on those of two sides that have an optimizer's state, and, of the others, where it makes most names equal.
/// Returns the names of the others, on either side.
std::set<std::string> keepModels(TensorDigests &a, TensorDigests &b);
/// A rule of --rename for the names of `a` with which more of them are names of `b`: a beginning that is missing or too
/// much. Empty if there is none.
std::string renameHint(const TensorDigests &a, const TensorDigests &b);

/// Reads the files of an endpoint of a plan. The names are those of the model's tensors: elements are found by the
/// endpoint's layout, replicas count once, padding does not. An error, also for quantized params, is
/// `invalid`.
Result<TensorDigests> digestsOfSide(const Plan &plan, uint32_t endpoint, const std::string &path);

/// One line for each difference: a tensor that one side lacks, another dtype, shape or digest. `one` and `other` name
/// the sides.
std::vector<std::string> differences(const TensorDigests &a, const std::string &one, const TensorDigests &b,
                                     const std::string &other);

} // namespace reshard::tools
