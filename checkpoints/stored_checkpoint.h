// SPDX-License-Identifier: Apache-2.0
// What a checkpoint contains, in any of the formats that frameworks write: its tensors, where each part of a tensor
// lies in which file, and its other objects. No code of a checkpoint is run, and no data is read, except of
// tensors that several files of ranks repeat.
#pragma once

#include "base/formats/storage_formats.h"
#include "base/renames.h"
#include "base/status.h"
#include "schema/manifest.h"

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <vector>

namespace reshard::checkpoints {

/// A box of a tensor, whose elements lie in row-major order in a file.
struct StoredChunk {
  std::vector<int64_t> offsets, lengths; // the box in the tensor, by dimension
  std::string file;                      // in the checkpoint's folder; empty if the checkpoint is one file
  uint64_t begin = 0, bytes = 0;         // in the file
};

/// A tensor. Its chunks do not overlap, and together they are the whole tensor. They are sorted by their offsets. A
/// chunk without elements occurs only if the tensor has none; it is then the only one.
struct StoredTensor {
  schema::DType dtype = schema::DType::u8;
  std::vector<int64_t> shape;
  std::vector<StoredChunk> chunks;
};

/// A value that is not a tensor, for example the state of a random number generator. It is not interpreted.
struct StoredObject {
  std::string file;
  uint64_t begin = 0, bytes = 0; // in the file; 0 bytes if it is part of a larger pickle
};

/// A part of a tensor that lies in another file too: a replica of a chunk.
struct StoredReplica {
  std::string tensor;
  StoredChunk of, copy; // the chunk that is read, and its duplicate
};

struct StoredCheckpoint {
  reshard::StorageFormat format = reshard::StorageFormat::safetensors;
  std::string version; // the format's version, if the checkpoint states it
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, StoredObject> objects;
  std::map<std::string, struct stat> files; // by name; as they were when the places of the data were read
  std::vector<StoredReplica> replicas;      // in files of ranks (HSDP); whether they are equal is not known
  std::vector<std::string> notes;           // what of the folder is not read; the user should know
};

/// "[0..3, 8..15]": the box of a chunk.
std::string boxOf(const StoredChunk &chunk);

/// The format of a checkpoint in one file, from its first bytes. Nothing if it is of no known format.
std::optional<reshard::StorageFormat> formatOfBytes(std::string_view file);

/// The format of a file or a folder, from the names of its files and the first header. An error if it has none.
Result<reshard::StorageFormat> recognizeCheckpoint(const std::string &path);

/// Reads what a file or a folder contains, in the format that is recognized, or in `preferred` if the folder has the
/// files of several formats. Errors name the file, the tensor, what was found and what was expected.
Result<StoredCheckpoint> readStoredCheckpoint(const std::string &path,
                                              std::optional<reshard::StorageFormat> preferred = std::nullopt);

/// Gives the tensors of the checkpoint at `path` other names.
Status renameTensors(StoredCheckpoint &checkpoint, const Renames &renames, const std::string &path);

/// Refuses a tensor whose chunks lie outside it, overlap, or leave out an element.
Status checkChunks(const std::string &name, const StoredTensor &tensor, const std::string &where);

/// A text that begins with "found", about a folder that is no checkpoint; empty if nothing in it is known.
std::string unreadWeights(const std::string &folder);

/// The same about a file, from its name and its first bytes: what it is, without "found".
std::string unreadFile(const std::string &path);

struct StoredReplicaResult {
  uint64_t comparedBytes = 0;
  std::vector<std::string> differences; // in the order of the replicas
};

/// Reads the replicas of a checkpoint and what they replicate, on `threads` threads, in pieces of 256 KiB. `progress`
/// is called on this thread, with the fraction that is done. An error: a file that cannot be read.
Result<StoredReplicaResult> compareStoredReplicas(const std::string &path, const std::vector<StoredReplica> &replicas,
                                                  unsigned threads, const std::function<void(double)> &progress);

} // namespace reshard::checkpoints
