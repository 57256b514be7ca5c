// SPDX-License-Identifier: Apache-2.0
#include "analysis/checkpoints/dcp_writer.h"

#include "analysis/checkpoints/pickle_text.h"
#include "analysis/checkpoints/torch_archive.h"
#include "analysis/checkpoints/torch_file.h"
#include "support/atomic_file.h"

namespace reshard::analysis {

namespace {

constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";

/// The only chunk of a tensor, an archive in a file.
struct WrittenChunk {
  TensorSpec tensor;
  std::string file;
  uint64_t begin = 0, bytes = 0;
};

void addSize(const std::vector<int64_t> &lengths, PickleText &pickle) {
  pickle.global("torch", "Size");
  pickle.mark();
  pickle.integers(lengths);
  pickle.tuple();
  pickle.call();
}

/// TensorStorageMetadata(properties, size, chunks).
void addTensorMetadata(const TensorSpec &tensor, PickleText &pickle) {
  pickle.object(kModule, "TensorStorageMetadata");
  pickle.emptyDictionary();
  pickle.mark();
  pickle.text("properties");
  pickle.object(kModule, "TensorProperties");
  pickle.mark(); // (dtype, layout, requires_grad, memory format, pin_memory)
  pickle.global("torch", torchGlobals(tensor.dtype).first);
  pickle.global("torch.serialization", "_get_layout");
  pickle.mark();
  pickle.text("torch.strided");
  pickle.tuple();
  pickle.call();
  pickle.boolean(false);
  pickle.global(kModule, "_MEM_FORMAT_ENCODING");
  pickle.integers({0});
  pickle.call();
  pickle.boolean(false);
  pickle.tuple();
  pickle.build();
  pickle.text("size");
  addSize(tensor.shape, pickle);
  pickle.text("chunks");
  pickle.emptyList();
  pickle.object(kModule, "ChunkStorageMetadata");
  pickle.emptyDictionary();
  pickle.mark();
  pickle.text("offsets");
  addSize(std::vector<int64_t>(tensor.shape.size(), 0), pickle);
  pickle.text("sizes");
  addSize(tensor.shape, pickle);
  pickle.setItems();
  pickle.build();
  pickle.append();
  pickle.setItems();
  pickle.build();
}

/// MetadataIndex(fqn, offset, index) and _StorageInfo(relative_path, offset, length).
void addPlace(const WrittenChunk &chunk, PickleText &pickle) {
  pickle.object(kModule, "MetadataIndex");
  pickle.emptyDictionary();
  pickle.mark();
  pickle.text("fqn");
  pickle.text(chunk.tensor.name);
  pickle.text("offset");
  addSize(std::vector<int64_t>(chunk.tensor.shape.size(), 0), pickle);
  pickle.text("index");
  pickle.none();
  pickle.setItems();
  pickle.build();
  pickle.object("torch.distributed.checkpoint.filesystem", "_StorageInfo");
  pickle.emptyDictionary();
  pickle.mark();
  pickle.text("relative_path");
  pickle.text(chunk.file);
  pickle.text("offset");
  pickle.integer(static_cast<int64_t>(chunk.begin));
  pickle.text("length");
  pickle.integer(static_cast<int64_t>(chunk.bytes));
  pickle.text("transform_descriptors");
  pickle.none();
  pickle.setItems();
  pickle.build();
}

std::string metadataOf(const std::vector<WrittenChunk> &chunks) {
  PickleText pickle;
  pickle.object(kModule, "Metadata");
  pickle.emptyDictionary();
  pickle.mark();
  pickle.text("state_dict_metadata");
  pickle.emptyDictionary();
  pickle.mark();
  for (const WrittenChunk &chunk : chunks) {
    pickle.text(chunk.tensor.name);
    addTensorMetadata(chunk.tensor, pickle);
  }
  pickle.setItems();
  pickle.text("planner_data"); // the keys that lead to each value
  pickle.emptyDictionary();
  pickle.mark();
  for (const WrittenChunk &chunk : chunks) {
    pickle.text(chunk.tensor.name);
    pickle.mark();
    pickle.text(chunk.tensor.name);
    pickle.tuple();
  }
  pickle.setItems();
  pickle.text("storage_data");
  pickle.emptyDictionary();
  pickle.mark();
  for (const WrittenChunk &chunk : chunks)
    addPlace(chunk, pickle);
  pickle.setItems();
  pickle.text("storage_meta");
  pickle.none();
  pickle.text("version");
  pickle.text("1.0.0");
  pickle.setItems();
  pickle.build();
  return pickle.finish();
}

} // namespace

Status createDcp(const std::string &folder, const std::vector<TensorSpec> &tensors, int64_t fileBytes,
                 Checkpoint &checkpoint) {
  constexpr uint64_t kAlignment = 64;
  std::vector<WrittenChunk> chunks;
  const std::vector<std::vector<TensorSpec>> files = splitIntoFiles(tensors, fileBytes);
  for (size_t number = 0; number < files.size(); ++number) {
    const std::string name = "__0_" + std::to_string(number) + ".distcp", path = folder + "/" + name;
    std::vector<std::pair<uint64_t, TorchArchive>> archives;
    uint64_t total = 0;
    for (const TensorSpec &tensor : files[number]) {
      total = (total + kAlignment - 1) / kAlignment * kAlignment;
      archives.emplace_back(total, TorchArchive({tensor}, TorchArchive::Content::tensor));
      chunks.push_back({tensor, name, total, archives.back().second.bytes()});
      total += archives.back().second.bytes();
    }
    Result<MappedFile> file = MappedFile::create(path, total);
    if (!file.ok())
      return file.status();
    std::byte *data = file->data();
    checkpoint.files.push_back(std::move(*file));
    for (size_t i = 0; i < archives.size(); ++i) {
      const auto &[begin, archive] = archives[i];
      const TensorSpec &tensor = files[number][i];
      archive.write(data + begin);
      checkpoint.tensors[tensor.name] = {path, tensor.dtype, tensor.shape, data + begin + archive.dataAt(0),
                                         tensor.bytes};
    }
  }
  return writeFile(folder + "/.metadata", metadataOf(chunks));
}

Status createMegatron(const std::string &folder, const std::vector<TensorSpec> &tensors, int64_t fileBytes,
                      Checkpoint &checkpoint) {
  if (Status status = createDcp(folder, tensors, fileBytes, checkpoint); !status.ok())
    return status;
  if (Status status = createTorchFile(folder + "/" + kMegatronCommon, {}, checkpoint); !status.ok())
    return status;
  return writeFile(folder + "/metadata.json", R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1, )"
                                              R"("common_backend": "torch", "common_backend_version": 1})");
}

} // namespace reshard::analysis
