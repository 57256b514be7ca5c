// SPDX-License-Identifier: Apache-2.0
// Files of torch.save: a zip archive with a pickle, data.pkl, and the storages that its tensors refer to, data/0 and so
// on. The pickle is read, not run (pickle.h).
#pragma once

#include "base/input_file.h"
#include "base/status.h"
#include "checkpoints/distributed_tensor.h"
#include "checkpoints/read_budget.h"
#include "schema/manifest.h"

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace reshard::checkpoints {

class StoredZip {
public:
  struct Member {
    std::string_view name;
    uint64_t header = 0, bytes = 0; // where its local header begins; of its data
  };

  /// Reads the directory. Refuses archives with compression or encryption, members that lie outside the archive, and
  /// repeated names. `where` begins the errors.
  static Result<StoredZip> read(FilePart &archive, const std::string &where);

  /// By name.
  const std::vector<Member> &members() const { return members_; }
  /// Null if there is none.
  const Member *find(std::string_view name) const;
  /// Where the data of a member begins in the archive, from its local header.
  static Result<uint64_t> dataAt(FilePart &archive, const Member &member, const std::string &where);

private:
  std::vector<char> directory_; // the names are parts of it
  std::vector<Member> members_;
};

/// A tensor of a file. `begin` and `bytes`: from its first to its last element in the archive.
struct TorchTensor {
  schema::DType dtype = schema::DType::u8;
  std::vector<int64_t> shape, strides; // in elements
  uint64_t begin = 0, bytes = 0;
  std::optional<LocalPart> part; // set if this is the local tensor of a distributed one
  /// Whether the elements are in row-major order without gaps.
  bool contiguous() const;
};

/// The tensors of a file by name, and the names of all other values.
struct TorchFile {
  std::map<std::string, TorchTensor> tensors;
  std::vector<std::string> others;
};

/// The dtype of the global "torch float32", "torch bfloat16" and so on; empty if the schema has no such dtype.
std::optional<schema::DType> dtypeFromTorch(std::string_view global);

/// The names in module torch of a dtype and of its typed storage, which is empty if it has none.
std::pair<std::string_view, std::string_view> torchGlobals(schema::DType dtype);

/// All globals that a pickle may have (Pickle::read): these, and the globals of all dtypes and of their storages.
std::vector<std::string_view> withDtypes(std::span<const std::string_view> globals);

/// Reads an archive, to which `budget` belongs. Names are the keys of nested dictionaries and the positions of nested
/// lists, joined by dots; a file of one tensor has the empty name. `where` begins the errors.
Result<TorchFile> readTorchFile(FilePart &archive, const std::string &where, ReadBudget &budget);

} // namespace reshard::checkpoints
