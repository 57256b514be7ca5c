// SPDX-License-Identifier: Apache-2.0
// `dtype: stored`: the dtypes in the headers of the source's files.
#pragma once

#include "ir/ir.h"
#include "yaml/diagnostics.h"

#include "llvm/Support/Error.h"

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace reshard {

/// Names (without placeholders) and dtypes of stored tensors.
using StoredTensors = std::vector<std::pair<std::string, ir::DType>>;

/// Reads the headers of the files in a folder: of a checkpoint, or else of one file per mesh rank.
using ReadStoredTensors =
    std::function<llvm::Expected<StoredTensors>(const std::string &folder, bool checkpoint, int64_t meshRanks)>;

/// The dtypes of stored tensors, looked up by declared param name.
class StoredTypes {
public:
  /// `at`: location of the endpoint's `dtype`, for errors.
  StoredTypes(StoredTensors names, Location at);

  /// The dtype of all stored tensors that match a param's declared name. nullopt if none is stored, or with an error if
  /// their dtypes differ.
  std::optional<ir::DType> of(const std::string &declared, const std::vector<ir::IndexVariable> &variables,
                              Diagnostics &diagnostics) const;

private:
  std::unordered_map<std::string, StoredTensors> byKey_; // key: the name with each number replaced by `#`
  Location at_;
};

} // namespace reshard
