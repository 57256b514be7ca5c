// safetensors files: 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, the data. Files,
// folders with one file per rank, and Hugging Face checkpoints (model.safetensors, or an index and its files).
#pragma once

#include "schema/manifest.h"

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <sys/stat.h>
#include <vector>

namespace reshard::tools {

/// A tensor in a mapped file. `data` is read-only where the file was opened for reading.
struct TensorView {
  std::string file; // for messages
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

/// A mapped file; unmapped with it.
class MappedFile {
public:
  /// `path`, `status`: of a file that others should leave as it is.
  MappedFile(std::byte *data, size_t bytes, std::string path = {}, const struct stat &status = {})
      : data_(data), bytes_(bytes), path_(std::move(path)), status_(status) {}
  ~MappedFile();
  MappedFile(const MappedFile &) = delete;
  MappedFile &operator=(const MappedFile &) = delete;
  /// Gives its pages back; what was written stays in the file, and comes back when it is touched. Any thread may, any
  /// time.
  void release() const;
  /// Whether the file is another than when it was mapped: an error text, empty where it is not.
  std::string changed() const;

private:
  std::byte *data_;
  size_t bytes_;
  std::string path_;
  struct stat status_;
};

/// One or more mapped files and all their tensors by name.
struct Checkpoint {
  TensorViews tensors;
  std::vector<std::unique_ptr<MappedFile>> files;
};

/// Adds a file's tensors. Refuses what the format forbids: lengths, JSON, dtypes, offsets with gaps or overlaps, a
/// shape that does not fit its bytes, a name twice. `writable`: to be written as well. An error text that names file
/// and tensor; empty on success.
std::string readSafetensors(const std::string &path, Checkpoint &checkpoint, bool writable = false);

/// A Hugging Face checkpoint folder: model.safetensors.index.json and its files, or model.safetensors. Every file must
/// hold just the tensors that the index puts there.
std::string readCheckpoint(const std::string &folder, Checkpoint &checkpoint, bool writable = false);

/// Creates a file of the final size with its header, mapped for writing; the data is zero. Tensors of large elements
/// come first, so that each is aligned to its elements.
std::string createSafetensors(const std::string &path, const std::vector<TensorSpec> &tensors, Checkpoint &checkpoint);

/// Creates a checkpoint: one model.safetensors, or files of at most `fileBytes` and an index.
std::string createCheckpoint(const std::string &folder, const std::vector<TensorSpec> &tensors, int64_t fileBytes,
                             Checkpoint &checkpoint);

/// "rank-00007.safetensors"
std::string rankFile(uint32_t rank);

} // namespace reshard::tools
