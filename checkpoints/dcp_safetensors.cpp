// SPDX-License-Identifier: Apache-2.0
// Safetensors files of HuggingFaceStorageWriter(save_distributed=True) of torch.distributed.checkpoint: each has chunks
// of tensors, and its metadata states where they begin in the tensors.
#include "checkpoints/object_reader.h"
#include "checkpoints/stored_format.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <utility>

namespace reshard::checkpoints {

namespace {

constexpr const char *kShardsVersion = "1.0"; // in DCP_VERSION

/// DCP_SHARDING_INFO: {tensor: {saved_offsets: [numbers]}}: where the part in a file begins in each tensor.
class ShardingReader : public ObjectReader {
public:
  std::map<std::string, std::vector<int64_t>> offsets;
  bool valid = true; // whether all offsets are numbers that fit

private:
  static constexpr uint64_t kMaxOffset = uint64_t{1} << 50;
  static constexpr size_t kMaxDimensions = 64; // as in PyTorch

  bool inOffsets() const { return depth() == 2 && keyAt(1) == "saved_offsets"; }
  void onText(const std::string &) override { onOther(); }
  void onNumber(uint64_t number) override {
    if (std::vector<int64_t> *found = inOffsets() && number <= kMaxOffset ? &offsets[keyAt(0)] : nullptr;
        found && found->size() <= kMaxDimensions) // one more is an error later
      found->push_back(static_cast<int64_t>(number));
    else
      onOther();
  }
  void onOther() override { valid = valid && !inOffsets(); }
  void onBegin(bool array) override {
    if (depth() == 1 && array && keyAt(1) == "saved_offsets")
      offsets[keyAt(0)]; // a scalar has no numbers, but an entry
  }
};

Status addShards(const std::string &folder, const std::string &file, StoredCheckpoint &checkpoint) {
  const std::string path = folder + "/" + file;
  Checkpoint shards;
  if (Status status = readSafetensors(path, shards); !status.ok())
    return status;
  const auto info = shards.metadata.find("DCP_SHARDING_INFO");
  if (info == shards.metadata.end())
    return failed("'" + path + "': its header has no 'DCP_SHARDING_INFO', but other files of the folder have");
  ShardingReader sharding;
  if (Status status = sharding.read(path, info->second); !status.ok())
    return status;
  if (!sharding.valid)
    return failed("'" + path + "': DCP_SHARDING_INFO: 'saved_offsets' are not unsigned integers");
  if (const auto version = shards.metadata.find("DCP_VERSION"); version != shards.metadata.end()) {
    if (version->second != kShardsVersion)
      return failed("'" + path + "': unknown DCP_VERSION '" + version->second + "', expected '" + kShardsVersion + "'");
    checkpoint.version = version->second;
  }
  StoredCheckpoint whole;
  addTensors(shards, folder, whole);
  checkpoint.files.merge(whole.files);
  for (auto &[name, shard] : whole.tensors) {
    const auto at = sharding.offsets.find(name);
    if (at == sharding.offsets.end() || at->second.size() != shard.shape.size())
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

/// Whether the first safetensors file of a folder, if it has one, has sharding information.
Result<bool> hasShards(const std::string &folder, bool preferred) {
  if (!preferred && *formats::safetensors.fits(folder, true))
    return false;
  const Result<std::vector<std::string>> files = safetensorsFiles(folder);
  if (!files.ok())
    return files.status();
  if (preferred)
    return std::any_of(files->begin(), files->end(),
                       [](const std::string &file) { return file.starts_with("shard-"); });
  if (files->empty())
    return false;
  Checkpoint first;
  if (Status status = readSafetensors(folder + "/" + files->front(), first); !status.ok())
    return status;
  return first.metadata.contains("DCP_SHARDING_INFO");
}

Status createShards(const std::string &folder, const NewCheckpoint &checkpoint) {
  const std::vector<std::vector<TensorSpec>> files = checkpoint.files();
  for (size_t i = 0; i < files.size(); ++i) {
    nlohmann::json info = nlohmann::json::object();
    for (const TensorSpec &tensor : files[i])
      info[tensor.name]["saved_offsets"] = std::vector<int64_t>(tensor.shape.size(), 0);
    const nlohmann::json metadata = {
        {"DCP_SHARDING_INFO", info.dump()}, {"DCP_VERSION", kShardsVersion}, {"format", "pt"}};
    char name[96];
    std::snprintf(name, sizeof name, "shard-00001-model-%05zu-of-%05zu.safetensors", i + 1, files.size());
    if (Status status = createSafetensors(folder + "/" + name, files[i], "\"__metadata__\":" + metadata.dump());
        !status.ok())
      return status;
  }
  return {};
}

} // namespace

const StoredFormat formats::dcp_safetensors = {.fits = hasShards, .read = readShards, .create = createShards};

} // namespace reshard::checkpoints
