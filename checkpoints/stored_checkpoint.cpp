// SPDX-License-Identifier: Apache-2.0
// Recognizes the format of a folder by its files and calls its reader. Then it checks, for every format, that the
// chunks of each tensor cover the tensor once.
#include "checkpoints/stored_checkpoint.h"

#include "base/hash.h"
#include "base/input_file.h"
#include "base/random.h"
#include "checkpoints/dcp_writer.h"
#include "checkpoints/readers.h"
#include "checkpoints/safetensors.h"
#include "checkpoints/torch_archive.h"

#include <algorithm>
#include <filesystem>
#include <set>

namespace reshard::checkpoints {

namespace fs = std::filesystem;

namespace {

constexpr size_t kHeaderAt = 8;               // where the JSON of a safetensors file begins
constexpr const char *kShardsVersion = "1.0"; // the version in HuggingFaceStorageWriter's files

bool overlap(const StoredChunk &a, const StoredChunk &b) {
  for (size_t d = 0; d < a.offsets.size(); ++d)
    if (a.offsets[d] + a.lengths[d] <= b.offsets[d] || b.offsets[d] + b.lengths[d] <= a.offsets[d])
      return false;
  return true;
}

/// The product of lengths, or nothing if it does not fit.
std::optional<int64_t> elements(const std::vector<int64_t> &lengths) {
  int64_t product = 1;
  for (const int64_t length : lengths)
    if (__builtin_mul_overflow(product, length, &product))
      return std::nullopt;
  return product;
}

/// The dimension in which the chunks begin at the most positions: few chunks have a position of it in common.
size_t sweepDimension(const StoredTensor &tensor) {
  size_t best = 0, most = 0;
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    std::set<int64_t> positions;
    for (const StoredChunk &chunk : tensor.chunks)
      positions.insert(chunk.offsets[d]);
    if (positions.size() > most)
      std::tie(best, most) = std::pair(d, positions.size());
  }
  return best;
}

/// Whether each element of a tensor is in one chunk, in time that is linear in the numbers of the chunks. A chunk is
/// the alternating sum of its corners, and chunks tile a tensor exactly if their corners cancel out but for those of
/// the tensor. Each position of each dimension stands for a random number here, a corner for the product of its
/// positions, and a chunk for the product of the differences of its ends. So chunks that are no tiling have another sum
/// than the tensor, but for a chance of dimensions / 2^61 (Schwartz and Zippel), which a writer cannot know.
bool tile(const StoredTensor &tensor) {
  __extension__ using Wide = unsigned __int128;
  constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;
  static const uint64_t seed = randomNumber();
  const auto numberOf = [](size_t dimension, int64_t position) {
    const uint64_t key[] = {seed, dimension, static_cast<uint64_t>(position)};
    return hashOf({reinterpret_cast<const char *>(key), sizeof key}) % kPrime;
  };
  const auto productOf = [&](const std::vector<int64_t> &offsets, const std::vector<int64_t> &lengths) {
    uint64_t product = 1;
    for (size_t d = 0; d < lengths.size(); ++d) {
      const uint64_t difference = (numberOf(d, offsets[d] + lengths[d]) + kPrime - numberOf(d, offsets[d])) % kPrime;
      product = static_cast<uint64_t>(Wide{product} * difference % kPrime);
    }
    return product;
  };
  uint64_t sum = 0;
  for (const StoredChunk &chunk : tensor.chunks)
    sum = (sum + productOf(chunk.offsets, chunk.lengths)) % kPrime;
  return sum == productOf(std::vector<int64_t>(tensor.shape.size(), 0), tensor.shape);
}

/// Two chunks that overlap, to name them; nothing if many would have to be compared. Empty chunks overlap with none.
std::optional<std::pair<const StoredChunk *, const StoredChunk *>> findOverlap(const StoredTensor &tensor) {
  const size_t d = sweepDimension(tensor);
  std::vector<const StoredChunk *> order;
  for (const StoredChunk &chunk : tensor.chunks)
    if (elements(chunk.lengths) != 0)
      order.push_back(&chunk);
  if (tensor.shape.empty())
    return order.size() > 1 ? std::optional(std::pair(order[0], order[1])) : std::nullopt;
  std::sort(order.begin(), order.end(),
            [&](const StoredChunk *a, const StoredChunk *b) { return a->offsets[d] < b->offsets[d]; });
  std::vector<const StoredChunk *> open; // the chunks that reach the position of the next one
  size_t left = 1'000'000;
  for (const StoredChunk *chunk : order) {
    if (left < open.size())
      return std::nullopt;
    left -= open.size();
    std::erase_if(open,
                  [&](const StoredChunk *other) { return other->offsets[d] + other->lengths[d] <= chunk->offsets[d]; });
    for (const StoredChunk *other : open)
      if (overlap(*chunk, *other))
        return std::pair(other, chunk);
    open.push_back(chunk);
  }
  return std::nullopt;
}

/// Sorts chunks by their offsets and removes those without elements, or all but one of them.
void sortChunks(StoredTensor &tensor) {
  std::stable_sort(tensor.chunks.begin(), tensor.chunks.end(),
                   [](const StoredChunk &a, const StoredChunk &b) { return a.offsets < b.offsets; });
  const auto empty = [](const StoredChunk &chunk) { return chunk.bytes == 0; };
  if (!std::all_of(tensor.chunks.begin(), tensor.chunks.end(), empty)) {
    std::erase_if(tensor.chunks, empty);
  } else if (!tensor.chunks.empty()) {
    tensor.chunks.resize(1);
    tensor.chunks[0].offsets.assign(tensor.shape.size(), 0);
    tensor.chunks[0].lengths = tensor.shape;
  } else {
    tensor.chunks.push_back({std::vector<int64_t>(tensor.shape.size(), 0), tensor.shape, {}, 0, 0});
  }
}

/// Adds the tensors of safetensors files that are whole tensors.
void addWhole(const Checkpoint &files, const std::string &folder, StoredCheckpoint &checkpoint) {
  for (const MappedFile &file : files.files)
    checkpoint.files[folder.empty() ? std::string() : file.path().substr(folder.size() + 1)] = file.status();
  for (const auto &[name, view] : files.tensors) {
    StoredChunk chunk{std::vector<int64_t>(view.shape.size(), 0), view.shape, {}, 0, static_cast<uint64_t>(view.bytes)};
    for (const MappedFile &file : files.files)
      if (view.data >= file.data() && view.data <= file.data() + file.bytes())
        chunk.begin = static_cast<uint64_t>(view.data - file.data());
    if (!folder.empty())
      chunk.file = view.file.substr(folder.size() + 1);
    checkpoint.tensors[name] = {view.dtype, view.shape, {chunk}};
  }
}

/// Adds the chunks of one file of HuggingFaceStorageWriter(save_distributed=True).
Status addShards(const std::string &folder, const std::string &file, StoredCheckpoint &checkpoint) {
  const std::string path = folder + "/" + file;
  Checkpoint shards;
  if (Status status = readSafetensors(path, shards); !status.ok())
    return status;
  const auto info = shards.metadata.find("DCP_SHARDING_INFO");
  if (info == shards.metadata.end())
    return failed("'" + path + "': its header has no 'DCP_SHARDING_INFO', but other files of the folder have");
  const auto offsets = readShardingInfo(info->second, path);
  if (!offsets.ok())
    return offsets.status();
  if (const auto version = shards.metadata.find("DCP_VERSION"); version != shards.metadata.end()) {
    if (version->second != kShardsVersion)
      return failed("'" + path + "': unknown DCP_VERSION '" + version->second + "', expected '" + kShardsVersion + "'");
    checkpoint.version = version->second;
  }
  StoredCheckpoint whole;
  addWhole(shards, folder, whole);
  checkpoint.files.merge(whole.files);
  for (auto &[name, shard] : whole.tensors) {
    const auto at = offsets->find(name);
    if (at == offsets->end() || at->second.size() != shard.shape.size())
      return failed("'" + path + "': tensor '" + name + "': 'DCP_SHARDING_INFO' has no offset for each of its " +
                    std::to_string(shard.shape.size()) + " dimensions");
    StoredChunk &chunk = shard.chunks[0];
    chunk.offsets = at->second;
    StoredTensor &tensor = checkpoint.tensors.try_emplace(name, StoredTensor{shard.dtype, {}, {}}).first->second;
    if (tensor.chunks.empty())
      tensor.shape.resize(shard.shape.size());
    if (tensor.dtype != shard.dtype || tensor.shape.size() != shard.shape.size())
      return failed("'" + path + "': tensor '" + name + "' has another dtype or rank than in '" +
                    tensor.chunks[0].file + "'");
    for (size_t d = 0; d < tensor.shape.size(); ++d) {
      int64_t end = 0;
      if (__builtin_add_overflow(chunk.offsets[d], chunk.lengths[d], &end))
        return failed("'" + path + "': tensor '" + name + "': its offset is too large");
      tensor.shape[d] = std::max(tensor.shape[d], end); // the format does not state the whole shape
    }
    tensor.chunks.push_back(std::move(chunk));
  }
  return {};
}

/// Files of HuggingFaceStorageWriter(save_distributed=True).
Status readShards(const std::string &folder, StoredCheckpoint &checkpoint) {
  const Result<std::vector<std::string>> files = safetensorsFiles(folder);
  if (!files.ok())
    return files.status();
  for (const std::string &file : *files)
    if (Status status = addShards(folder, file, checkpoint); !status.ok())
      return status;
  for (const auto &[name, tensor] : checkpoint.tensors)
    if (Status status = checkChunks(name, tensor, "'" + folder + "'"); !status.ok())
      return status;
  return {};
}

Status addFolder(const std::string &folder, StoredCheckpoint &checkpoint) {
  Checkpoint whole;
  if (Status status = readCheckpoint(folder, whole); !status.ok())
    return status;
  addWhole(whole, folder, checkpoint);
  checkpoint.notes = std::move(whole.notes);
  return {};
}

Status readSingle(const std::string &path, StoredCheckpoint &checkpoint) {
  Checkpoint single;
  if (Status status = readSafetensors(path, single); !status.ok())
    return status;
  addWhole(single, {}, checkpoint);
  return {};
}

/// Megatron-Core's common state is beside the tensors.
Status readMegatron(const std::string &folder, StoredCheckpoint &checkpoint) {
  if (Status status = checkMegatronFormat(folder); !status.ok())
    return status;
  if (Status status = readDcp(folder, checkpoint); !status.ok())
    return status;
  const std::string path = folder + "/" + kMegatronCommon;
  if (!hasEntry(path))
    return {};
  const Result<InputFile> common = InputFile::open(path);
  if (!common.ok())
    return common.status();
  checkpoint.objects[kMegatronCommon] = {kMegatronCommon, 0, common->bytes()};
  return {};
}

/// Whether the first safetensors file of a folder, if it has one, is one of
/// HuggingFaceStorageWriter(save_distributed=True).
Result<bool> hasShards(const std::string &folder) {
  const Result<std::vector<std::string>> files = safetensorsFiles(folder);
  if (!files.ok() || files->empty())
    return files.ok() ? Result(false) : files.status();
  Checkpoint first;
  if (Status status = readSafetensors(folder + "/" + files->front(), first); !status.ok())
    return status;
  return first.metadata.contains("DCP_SHARDING_INFO");
}

/// Whether a folder has the files by which a format is recognized. Several formats may fit. A torch_dist
/// checkpoint is no `dcp`, because that would lose `common.pt`.
bool hasFilesOf(const std::string &folder, StorageFormat format) {
  const auto has = [&](const std::string &file) { return hasEntry(folder + "/" + file); };
  switch (format) {
  case StorageFormat::safetensors:
    return has("model.safetensors.index.json") || has("model.safetensors");
  case StorageFormat::dcp:
    return has(".metadata") && !(has("metadata.json") && (!InputFile::open(folder + "/metadata.json").ok() ||
                                                          checkMegatronFormat(folder).ok()));
  case StorageFormat::megatron:
    return has(".metadata") && has("metadata.json");
  case StorageFormat::torch_save:
    return has(kTorchFile) || hasTorchRanks(folder);
  case StorageFormat::dcp_safetensors: {
    const Result<std::vector<std::string>> files = safetensorsFiles(folder);
    return files.ok() && std::any_of(files->begin(), files->end(),
                                     [](const std::string &file) { return file.starts_with("shard-"); });
  }
  }
  return false;
}

std::string prefixed(const std::string &prefix, const std::string &text) {
  return text.empty() ? std::string() : prefix + text;
}

} // namespace

std::string boxOf(const StoredChunk &chunk) {
  std::string text = "[";
  for (size_t d = 0; d < chunk.offsets.size(); ++d)
    text += (d ? ", " : "") + std::to_string(chunk.offsets[d]) + ".." +
            std::to_string(chunk.offsets[d] + chunk.lengths[d] - 1);
  return text + "]";
}

Status checkChunks(const std::string &name, const StoredTensor &tensor, const std::string &where) {
  const auto refuse = [&](const std::string &why) { return failed(where + ": tensor '" + name + "': " + why); };
  const std::optional<int64_t> wanted = elements(tensor.shape);
  if (!wanted || std::any_of(tensor.shape.begin(), tensor.shape.end(), [](int64_t length) { return length < 0; }))
    return refuse("its shape is negative or too large");
  int64_t found = 0;
  for (const StoredChunk &chunk : tensor.chunks) {
    bool inside = chunk.offsets.size() == tensor.shape.size() && chunk.lengths.size() == tensor.shape.size();
    for (size_t d = 0; inside && d < tensor.shape.size(); ++d)
      inside = chunk.offsets[d] >= 0 && chunk.lengths[d] >= 0 && chunk.lengths[d] <= tensor.shape[d] &&
               chunk.offsets[d] <= tensor.shape[d] - chunk.lengths[d];
    if (!inside)
      return refuse("a chunk in '" + chunk.file + "' lies outside the tensor");
    const int64_t chunkElements = *elements(chunk.lengths); // no more than the tensor has
    if (chunk.bytes != static_cast<uint64_t>(chunkElements) * static_cast<uint64_t>(schema::itemBytes(tensor.dtype)))
      return refuse("a chunk in '" + chunk.file + "' has " + std::to_string(chunk.bytes) + " bytes for " +
                    std::to_string(chunkElements) + " elements");
    if (__builtin_add_overflow(found, chunkElements, &found))
      return refuse("its chunks overlap");
  }
  if (tile(tensor))
    return {};
  if (const auto pair = findOverlap(tensor))
    return refuse("the chunks " + boxOf(*pair->first) + " in '" + pair->first->file + "' and " + boxOf(*pair->second) +
                  " in '" + pair->second->file + "' overlap");
  if (found != *wanted)
    return refuse("its chunks have " + std::to_string(found) + " of " + std::to_string(*wanted) + " elements");
  return refuse("its chunks overlap");
}

std::optional<StorageFormat> formatOfBytes(std::string_view file) {
  if (file.starts_with("PK\x03\x04") || isLegacyTorchFile(file))
    return StorageFormat::torch_save;
  if (file.size() > kHeaderAt && file[kHeaderAt] == '{')
    return StorageFormat::safetensors;
  return std::nullopt;
}

Result<StorageFormat> recognizeCheckpoint(const std::string &path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    constexpr uint64_t kBeginning = 16; // bytes that formatOfBytes() looks at
    const Result<InputFile> file = InputFile::open(path);
    if (!file.ok())
      return file.status();
    const Result<std::string> begin = file->read(0, std::min(file->bytes(), kBeginning));
    if (!begin.ok())
      return begin.status();
    const std::optional<StorageFormat> format = formatOfBytes(*begin);
    return format ? Result<StorageFormat>(*format)
                  : failed("'" + path + "' is neither a file of safetensors nor one of torch.save (a zip)" +
                           prefixed(": found ", unreadFile(path)));
  }
  for (const StorageFormat format : {StorageFormat::megatron, StorageFormat::dcp, StorageFormat::safetensors})
    if (hasFilesOf(path, format))
      return format;
  const Result<std::vector<std::string>> files = safetensorsFiles(path);
  if (!files.ok())
    return files.status();
  if (files->empty() && hasFilesOf(path, StorageFormat::torch_save))
    return StorageFormat::torch_save;
  if (files->empty())
    return failed("'" + path +
                  "': not a checkpoint: expected '.metadata', 'model.safetensors.index.json', files "
                  "'*.safetensors', '" +
                  kTorchFile + "' or files 'NAME_rank_R.pt'" + prefixed("; ", unreadWeights(path)));
  const Result<bool> shards = hasShards(path);
  if (!shards.ok())
    return shards.status();
  return *shards ? StorageFormat::dcp_safetensors : StorageFormat::safetensors;
}

Result<StoredCheckpoint> readStoredCheckpoint(const std::string &path, std::optional<StorageFormat> preferred) {
  const Result<StorageFormat> format =
      preferred && hasFilesOf(path, *preferred) ? *preferred : recognizeCheckpoint(path);
  if (!format.ok())
    return format.status();
  StoredCheckpoint checkpoint;
  checkpoint.format = *format;
  Status status;
  switch (*format) {
  case StorageFormat::safetensors:
    status = fs::is_directory(path) ? addFolder(path, checkpoint) : readSingle(path, checkpoint);
    break;
  case StorageFormat::dcp_safetensors:
    status = readShards(path, checkpoint);
    break;
  case StorageFormat::dcp:
    status = readDcp(path, checkpoint);
    break;
  case StorageFormat::megatron:
    status = readMegatron(path, checkpoint);
    break;
  case StorageFormat::torch_save:
    status = readTorchCheckpoint(path, checkpoint);
    break;
  }
  if (status.ok() && (*format == StorageFormat::dcp || *format == StorageFormat::megatron))
    status = checkIntegrity(path, checkpoint); // also without `metadata.json`, which it names
  if (!status.ok())
    return status;
  for (auto &[name, tensor] : checkpoint.tensors)
    sortChunks(tensor);
  return checkpoint;
}

Status renameTensors(StoredCheckpoint &checkpoint, const Renames &renames, const std::string &path) {
  for (StoredReplica &replica : checkpoint.replicas)
    replica.tensor = renames(replica.tensor);
  return renames.apply(checkpoint.tensors, "tensors of '" + path + "'");
}

} // namespace reshard::checkpoints
