// SPDX-License-Identifier: Apache-2.0
// safetensors files: 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, the data. Reads and
// creates single files, folders with one file for each rank, and Hugging Face checkpoints (model.safetensors, or an
// index and its files).
#pragma once

#include "base/mapped_file.h"
#include "schema/manifest.h"

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace reshard::checkpoints {

/// A tensor in a mapped file. `data` is read-only if the file was opened for reading.
struct TensorView {
  std::string file; // for error messages
  schema::DType dtype = schema::DType::u8;
  std::vector<int64_t> shape;
  std::byte *data = nullptr;
  int64_t bytes = 0;
};

using TensorViews = std::map<std::string, TensorView>;

/// A tensor to be written.
struct TensorSpec {
  std::string name;
  schema::DType dtype = schema::DType::u8;
  std::vector<int64_t> shape;
  int64_t bytes = 0;
};

/// One or more mapped files and all their tensors by name.
struct Checkpoint {
  TensorViews tensors;
  std::vector<MappedFile> files;
  std::map<std::string, std::string>
      metadata;                   // the texts DCP_… of `__metadata__`; the last file's, if there are several
  std::vector<std::string> notes; // what of the folder is not read; the user should know
};

/// Adds the tensors of a file. Refuses invalid files: wrong lengths, JSON or dtypes, offsets with gaps or overlaps, a
/// shape that does not match its bytes, a repeated name. `writable`: maps the file for writing too. Errors name
/// the file and the tensor.
Status readSafetensors(const std::string &path, Checkpoint &checkpoint, bool writable = false);

/// Reads the text of `DCP_SHARDING_INFO`, {tensor: {saved_offsets: [numbers]}}, in the metadata of files that
/// torch.distributed.checkpoint writes: by tensor, where the part in this file begins in the tensor. `path` begins the
/// errors.
Result<std::map<std::string, std::vector<int64_t>>> readShardingInfo(std::string_view text, const std::string &path);

/// Adds the tensors of a Hugging Face checkpoint folder: model.safetensors.index.json and its files, or
/// model.safetensors. Every file must have the tensors that the index assigns to it, and no tensor that the index
/// lacks; a tensor that the index assigns to another file is left out, with a note. If there is a model.safetensors
/// beside an index that does not list it, which other programs read instead, both must have the same tensors with the
/// same bytes, which are compared. Files that the index does not list get a note;
/// one that is numbered like those that it lists is an error if the index lacks its tensors. Of a folder with neither,
/// the error names the safetensors files that it has.
Status readCheckpoint(const std::string &folder, Checkpoint &checkpoint, bool writable = false);

/// The names of the files of a folder that end with `.safetensors`, sorted.
Result<std::vector<std::string>> safetensorsFiles(const std::string &folder);

/// Creates a file of its final size with its header and maps it for writing; the data is zero. Tensors are sorted by
/// element size, largest first, so that each is aligned to its elements.
Status createSafetensors(const std::string &path, const std::vector<TensorSpec> &tensors, Checkpoint &checkpoint);

/// Creates a checkpoint: one model.safetensors, or files of at most `fileBytes` and an index.
Status createCheckpoint(const std::string &folder, const std::vector<TensorSpec> &tensors, int64_t fileBytes,
                        Checkpoint &checkpoint);

/// Creates a checkpoint as torch.distributed.checkpoint's HuggingFaceStorageWriter(save_distributed=True) writes it,
/// with one chunk for each tensor, in files of at most `fileBytes`.
Status createDcpSafetensors(const std::string &folder, const std::vector<TensorSpec> &tensors, int64_t fileBytes,
                            Checkpoint &checkpoint);

/// The tensors by file, in order: each file has at most `fileBytes`, or one tensor.
std::vector<std::vector<TensorSpec>> splitIntoFiles(const std::vector<TensorSpec> &tensors, int64_t fileBytes);

/// "rank-00007.safetensors"
std::string rankFile(uint32_t rank);

} // namespace reshard::checkpoints
