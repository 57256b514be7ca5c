// SPDX-License-Identifier: Apache-2.0
// What the file of each format gives to the rest of reshard: a recognizer, a reader and a writer. A format is a row of
// base/formats/storage_formats.def and a file of this folder, which defines the StoredFormat of that name.
#pragma once

#include "checkpoints/safetensors.h"
#include "checkpoints/stored_checkpoint.h"

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace reshard::checkpoints {

/// A tensor to be written in chunks: boxes, each row-major, that together are the tensor.
struct ChunkedTensor {
  struct Chunk {
    std::vector<int64_t> offsets, lengths; // by dimension
  };
  std::string name;
  schema::DType dtype = schema::DType::u8;
  std::vector<int64_t> shape;
  std::vector<Chunk> chunks; // one, if the format is not written in chunks
};

/// An object to be written: bytes that are not interpreted.
struct ObjectSpec {
  std::string name;
  std::string_view data;
};

/// A checkpoint to be written. The data of its tensors is zero, until it is written in place.
struct NewCheckpoint {
  const std::vector<ChunkedTensor> &tensors;
  const std::vector<ObjectSpec> &objects; // none that the format refuses
  int64_t fileBytes;                      // a file has at most so many, or one chunk

  /// The chunks of all tensors.
  std::vector<TensorSpec> chunks() const;
  /// The same by file, in order; at least one file.
  std::vector<std::vector<TensorSpec>> files() const;
};

/// What the file of a format gives. Each defines one below, `formats::NAME`.
struct StoredFormat {
  /// What a folder of the format has, as errors about other folders say it; null: another row says it.
  const char *folderTexts[2] = {};
  /// What a file of the format is, as errors about other files say it, and whether a file begins as one; null if a
  /// checkpoint is always a folder.
  const char *fileText = nullptr;
  bool (*begins)(std::string_view file) = nullptr;
  /// Whether a folder has the files of the format. Files of several formats may be there: `preferred` asks whether it
  /// can be read as this one, else whether it is to be, if it is of no earlier row.
  Result<bool> (*fits)(const std::string &folder, bool preferred);
  /// Reads a folder, or a file that begins so. Errors as of readStoredCheckpoint().
  Status (*read)(const std::string &path, StoredCheckpoint &checkpoint);
  /// Creates the files in an empty folder.
  Status (*create)(const std::string &folder, const NewCheckpoint &checkpoint);
  /// Why a checkpoint cannot hold an object of this name, which has bytes of its own; null if it can. Without this
  /// function it holds tensors only.
  const char *(*refusal)(std::string_view object) = nullptr;
};

namespace formats {
#define STORAGE_FORMAT(format, ...) extern const StoredFormat format;
#include "base/formats/storage_formats.def"
} // namespace formats

const StoredFormat &storedFormat(reshard::StorageFormat format);
/// Whether a folder can be read as some format.
bool isCheckpoint(const std::string &folder);

/// Adds the tensors of safetensors files, each as one chunk. `folder`: that of the files; empty if the checkpoint is
/// one file.
void addTensors(const Checkpoint &files, const std::string &folder, StoredCheckpoint &checkpoint);

/// Reads a folder with `.metadata` into `checkpoint`: version, tensors and objects.
Status readDcp(const std::string &folder, StoredCheckpoint &checkpoint);
/// Creates `.metadata`, files `__0_N.distcp` and a further file with the objects.
Status createDcp(const std::string &folder, const NewCheckpoint &checkpoint);

/// Refuses a `metadata.json` of a format or version of Megatron-Core that this reader does not know.
Status checkMegatronFormat(const std::string &folder);
/// Refuses an `integrity.json` of another form, that names a file which is not in the folder, or that lacks a file of
/// the checkpoint. Reads no other file. Success if there is none.
Status checkIntegrity(const std::string &folder, const StoredCheckpoint &checkpoint);
/// Compares the files of the folder with their hashes in `integrity.json`, on several threads. An error names a file
/// that differs. The number of files: 0 if there is no `integrity.json`.
Result<size_t> verifyIntegrity(const std::string &folder, unsigned threads,
                               const std::function<void(double)> &progress);

} // namespace reshard::checkpoints
