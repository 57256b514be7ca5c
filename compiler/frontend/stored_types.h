// `dtype: stored`: the dtypes that the headers of a source's files say.
#pragma once

#include "compiler/frontend/diagnostics.h"
#include "ir/ir.h"

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace reshard {

/// Full names of stored tensors with their dtypes.
using StoredTensors = std::vector<std::pair<std::string, ir::DType>>;

/// Reads the headers in a folder: of a checkpoint, or of the files of `places` ranks. An error text, empty on success.
using ReadStoredTensors =
    std::function<std::string(const std::string &folder, bool checkpoint, int64_t meshRanks, StoredTensors &names)>;

class StoredTypes {
public:
  /// `at`: the endpoint's `dtype`, where errors are reported.
  StoredTypes(StoredTensors names, Location at);

  /// The dtype of all stored tensors that a param's declared name stands for; nothing where none is stored, or after an
  /// error: they have several.
  std::optional<ir::DType> of(const std::string &declared, const std::vector<ir::IndexVariable> &variables,
                              Diagnostics &diagnostics) const;

private:
  std::unordered_map<std::string, StoredTensors> byShape_; // under names in which each number is `#`
  Location at_;
};

} // namespace reshard
