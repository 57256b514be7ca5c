// SPDX-License-Identifier: Apache-2.0
// The tensors in the files of a source, as far as the compiler needs them: their dtypes, for `dtype: stored`, and the
// chunks in which other formats than Hugging Face's store them.
#pragma once

#include "base/formats/storage_formats.h"
#include "base/yaml/diagnostics.h"
#include "ir/ir.h"

#include "llvm/Support/Error.h"

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace reshard {

/// A box of a tensor that lies in one piece, in row-major order.
struct FileChunk {
  std::vector<int64_t> offsets, lengths; // by dimension
  bool operator==(const FileChunk &) const = default;
};

/// A tensor. Its chunks are sorted by their offsets, do not overlap, and together are the whole tensor.
struct FileTensor {
  std::string name; // without placeholders
  ir::DType dtype = ir::DType::bf16;
  std::vector<int64_t> shape;
  std::vector<FileChunk> chunks;
};

struct StoredFiles {
  StorageFormat format = StorageFormat::safetensors;
  std::vector<FileTensor> tensors;
};

/// Names the files to read, and why they are read.
struct StoredRequest {
  std::string path;                    // a folder, or a file of torch.save
  bool checkpoint = false;             // false: a safetensors file for each mesh rank
  int64_t meshRanks = 1;               // number of those files
  std::optional<StorageFormat> format; // the only format that is accepted
  /// Whether the tensors are needed in each case. If not, a path that does not exist, or has one of Hugging Face's
  /// checkpoints, is of format `safetensors` without tensors.
  bool required = false;
};

/// Recognizes the format of files, and reads what they contain, but no data.
using ReadStoredFiles = std::function<llvm::Expected<StoredFiles>(const StoredRequest &request)>;

/// The dtypes of stored tensors, looked up by declared param name.
class StoredTypes {
public:
  /// `at`: location of the endpoint's `dtype`, for errors.
  StoredTypes(const StoredFiles &files, Location at);

  /// The dtype of all stored tensors that match a param's declared name. nullopt if none is stored, or with an error if
  /// their dtypes differ.
  std::optional<ir::DType> of(const std::string &declared, const std::vector<ir::IndexVariable> &variables,
                              Diagnostics &diagnostics) const;

private:
  using Names = std::vector<std::pair<std::string, ir::DType>>;
  std::unordered_map<std::string, Names> byKey_; // key: the name with each number replaced by `#`
  Location at_;
};

} // namespace reshard
