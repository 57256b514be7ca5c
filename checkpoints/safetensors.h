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

/// Creates a file of its final size with its header; the data is zero. Tensors are sorted by element size, largest
/// first, so that each is aligned to its elements. `metadata`: the first "key":value of the header, or empty.
Status createSafetensors(const std::string &path, const std::vector<TensorSpec> &tensors,
                         const std::string &metadata = {});

/// "rank-00007.safetensors"
std::string rankFile(uint32_t rank);

} // namespace reshard::checkpoints
