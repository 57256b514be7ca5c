// SPDX-License-Identifier: Apache-2.0
// Lays out the chunks in files, each as an archive of torch.save of its own, writes all objects to one more file, and
// builds the pickle of `.metadata` from the places of both.
#include "checkpoints/dcp_writer.h"

#include "base/atomic_file.h"
#include "checkpoints/pickle_text.h"
#include "checkpoints/torch_archive.h"
#include "checkpoints/torch_file.h"

#include <algorithm>
#include <cctype>

namespace reshard::checkpoints {

namespace {

constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";

/// A chunk of a tensor, which is an archive, or an object in a file.
struct WrittenPlace {
  std::string name, file;
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
void addTensorMetadata(const ChunkedTensor &tensor, PickleText &pickle) {
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
  for (const ChunkedTensor::Chunk &chunk : tensor.chunks) {
    pickle.object(kModule, "ChunkStorageMetadata");
    pickle.emptyDictionary();
    pickle.mark();
    pickle.text("offsets");
    addSize(chunk.offsets, pickle);
    pickle.text("sizes");
    addSize(chunk.lengths, pickle);
    pickle.setItems();
    pickle.build();
    pickle.append();
  }
  pickle.setItems();
  pickle.build();
}

/// MetadataIndex(fqn, offset, index) and _StorageInfo(relative_path, offset, length). `chunk`: null for an object.
void addPlace(const WrittenPlace &place, const ChunkedTensor::Chunk *chunk, PickleText &pickle) {
  pickle.object(kModule, "MetadataIndex");
  pickle.emptyDictionary();
  pickle.mark();
  pickle.text("fqn");
  pickle.text(place.name);
  pickle.text("offset");
  if (chunk)
    addSize(chunk->offsets, pickle);
  else
    pickle.none();
  pickle.text("index");
  pickle.none();
  pickle.setItems();
  pickle.build();
  pickle.object("torch.distributed.checkpoint.filesystem", "_StorageInfo");
  pickle.emptyDictionary();
  pickle.mark();
  pickle.text("relative_path");
  pickle.text(place.file);
  pickle.text("offset");
  pickle.integer(static_cast<int64_t>(place.begin));
  pickle.text("length");
  pickle.integer(static_cast<int64_t>(place.bytes));
  pickle.text("transform_descriptors");
  pickle.none();
  pickle.setItems();
  pickle.build();
}

/// {name: (name,)}: the keys that lead to each value.
void addKeys(const std::string &name, PickleText &pickle) {
  pickle.text(name);
  pickle.mark();
  pickle.text(name);
  pickle.tuple();
}

/// `chunks`: the places of the chunks of all tensors, in order.
std::string metadataOf(const std::vector<ChunkedTensor> &tensors, const std::vector<WrittenPlace> &chunks,
                       const std::vector<WrittenPlace> &objects) {
  PickleText pickle;
  pickle.object(kModule, "Metadata");
  pickle.emptyDictionary();
  pickle.mark();
  pickle.text("state_dict_metadata");
  pickle.emptyDictionary();
  pickle.mark();
  for (const ChunkedTensor &tensor : tensors) {
    pickle.text(tensor.name);
    addTensorMetadata(tensor, pickle);
  }
  for (const WrittenPlace &object : objects) {
    pickle.text(object.name);
    pickle.object(kModule, "BytesStorageMetadata");
  }
  pickle.setItems();
  pickle.text("planner_data");
  pickle.emptyDictionary();
  pickle.mark();
  for (const ChunkedTensor &tensor : tensors)
    addKeys(tensor.name, pickle);
  for (const WrittenPlace &object : objects)
    addKeys(object.name, pickle);
  pickle.setItems();
  pickle.text("storage_data");
  pickle.emptyDictionary();
  pickle.mark();
  size_t next = 0;
  for (const ChunkedTensor &tensor : tensors)
    for (const ChunkedTensor::Chunk &chunk : tensor.chunks)
      addPlace(chunks[next++], &chunk, pickle);
  for (const WrittenPlace &object : objects)
    addPlace(object, nullptr, pickle);
  pickle.setItems();
  pickle.text("storage_meta");
  pickle.none();
  pickle.text("version");
  pickle.text("1.0.0");
  pickle.setItems();
  pickle.build();
  return pickle.finish();
}

/// Writes all objects to one file.
Result<std::vector<WrittenPlace>> writeObjects(const std::string &folder, const std::string &name,
                                               const std::vector<ObjectSpec> &objects) {
  std::vector<WrittenPlace> written;
  uint64_t total = 0;
  for (const ObjectSpec &object : objects) {
    written.push_back({object.name, name, total, object.data.size()});
    total += object.data.size();
  }
  if (objects.empty())
    return written;
  if (total == 0) { // a file without bytes cannot be mapped
    if (Status status = writeFile(folder + "/" + name, ""); !status.ok())
      return status;
    return written;
  }
  std::vector<MappedFile::Part> parts;
  for (size_t i = 0; i < objects.size(); ++i)
    parts.push_back({written[i].begin, objects[i].data});
  const Result<MappedFile> file = MappedFile::create(folder + "/" + name, total, parts);
  if (!file.ok())
    return file.status();
  return written;
}

/// Whether a text is integers with dots between them.
bool isPosition(std::string_view text) {
  bool digit = false;
  for (const char c : text) {
    if (c == '.' ? !digit : !std::isdigit(static_cast<unsigned char>(c)))
      return false;
    digit = c != '.';
  }
  return digit;
}

/// Whether a name is that of a ShardedObject of Megatron-Core: `key/shard_OFFSET_SHAPE`.
bool isShardedObject(std::string_view name) {
  constexpr std::string_view kShard = "/shard_";
  const size_t at = name.find('/');
  if (at == 0 || at == std::string_view::npos || !name.substr(at).starts_with(kShard))
    return false;
  const std::string_view rest = name.substr(at + kShard.size());
  const size_t between = rest.find('_');
  return between != std::string_view::npos && isPosition(rest.substr(0, between)) &&
         isPosition(rest.substr(between + 1));
}

} // namespace

bool holdsObject(StorageFormat format, std::string_view name) {
  return format == StorageFormat::dcp ||
         (format == StorageFormat::megatron && (name == kMegatronCommon || isShardedObject(name)));
}

Status createDcp(const std::string &folder, const std::vector<ChunkedTensor> &tensors,
                 const std::vector<ObjectSpec> &objects, int64_t fileBytes) {
  constexpr uint64_t kAlignment = 64;
  std::vector<TensorSpec> all; // the chunks
  for (const ChunkedTensor &tensor : tensors)
    for (const ChunkedTensor::Chunk &chunk : tensor.chunks) {
      int64_t bytes = schema::itemBytes(tensor.dtype);
      for (const int64_t length : chunk.lengths)
        bytes *= length;
      all.push_back({tensor.name, tensor.dtype, chunk.lengths, bytes});
    }
  std::vector<WrittenPlace> chunks;
  const std::vector<std::vector<TensorSpec>> files = splitIntoFiles(all, fileBytes);
  for (size_t number = 0; number < files.size(); ++number) {
    const std::string name = "__0_" + std::to_string(number) + ".distcp";
    std::vector<std::pair<uint64_t, TorchArchive>> archives;
    uint64_t total = 0;
    for (const TensorSpec &chunk : files[number]) {
      total = (total + kAlignment - 1) / kAlignment * kAlignment;
      archives.emplace_back(total, TorchArchive({chunk}, TorchArchive::Content::tensor));
      chunks.push_back({chunk.name, name, total, archives.back().second.bytes()});
      total += archives.back().second.bytes();
    }
    std::vector<MappedFile::Part> parts;
    for (const auto &[begin, archive] : archives)
      archive.addTo(parts, begin);
    if (const Result<MappedFile> file = MappedFile::create(folder + "/" + name, total, parts); !file.ok())
      return file.status();
  }
  const auto written = writeObjects(folder, "__0_" + std::to_string(files.size()) + ".distcp", objects);
  if (!written.ok())
    return written.status();
  return writeFile(folder + "/.metadata", metadataOf(tensors, chunks, *written));
}

Status createMegatron(const std::string &folder, const std::vector<ChunkedTensor> &tensors,
                      const std::vector<ObjectSpec> &objects, int64_t fileBytes) {
  constexpr std::string_view kCommonObject = "common_state/shard_0_1"; // in place of `common.pt`, from 0.18 on
  std::vector<ObjectSpec> sharded = objects;
  std::erase_if(sharded, [](const ObjectSpec &object) { return object.name == kMegatronCommon; });
  if (Status status = createDcp(folder, tensors, sharded, fileBytes); !status.ok())
    return status;
  const std::string common = folder + "/" + kMegatronCommon;
  const auto named = [&](std::string_view name) {
    return std::find_if(objects.begin(), objects.end(), [&](const ObjectSpec &object) { return object.name == name; });
  };
  Status status;
  Checkpoint empty;
  if (const auto given = named(kMegatronCommon); given != objects.end())
    status = writeFile(common, std::string(given->data));
  else if (named(kCommonObject) == objects.end())
    status = createTorchFile(common, {}, empty);
  if (!status.ok())
    return status;
  return writeFile(folder + "/metadata.json", R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1, )"
                                              R"("common_backend": "torch", "common_backend_version": 1})");
}

} // namespace reshard::checkpoints
