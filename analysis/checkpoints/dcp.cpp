// SPDX-License-Identifier: Apache-2.0
#include "analysis/checkpoints/dcp.h"

#include "analysis/checkpoints/pickle.h"
#include "analysis/checkpoints/torch_file.h"
#include "support/mapped_file.h"

#include <utility>

namespace reshard::analysis {

namespace {

using Kind = Pickle::Kind;
using Value = Pickle::Value;

constexpr std::string_view kVersion = "1.0.0";
constexpr size_t kMaxTensorDimensions = 64;
constexpr std::string_view kMetadata = "torch.distributed.checkpoint.metadata Metadata";
constexpr std::string_view kTensor = "torch.distributed.checkpoint.metadata TensorStorageMetadata";
constexpr std::string_view kBytes = "torch.distributed.checkpoint.metadata BytesStorageMetadata";

/// The classes and functions of `.metadata`, besides dtypes.
constexpr std::string_view kMetadataGlobals[] = {
    kMetadata,
    kTensor,
    kBytes,
    "torch.distributed.checkpoint.metadata TensorProperties",
    "torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.metadata ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata MetadataIndex",
    "torch.distributed.checkpoint.metadata StorageMeta",
    "torch.distributed.checkpoint.filesystem _StorageInfo",
    "torch.distributed.checkpoint.planner SavePlan", // Megatron-Core stores the plans of all ranks
    "torch.distributed.checkpoint.planner WriteItem",
    "torch.distributed.checkpoint.planner WriteItemType",
    "torch.distributed.checkpoint.planner TensorWriteData",
    "torch.distributed.checkpoint.planner BytesIOWriteData",
    "torch.serialization _get_layout",
    "torch Size",
    "collections OrderedDict",
    "pathlib PosixPath",
    "pathlib WindowsPath",
};

/// Where an item is stored.
struct Place {
  std::string file;
  uint64_t begin = 0, bytes = 0;
};

class DcpReader {
public:
  DcpReader(std::string folder, StoredCheckpoint &checkpoint)
      : folder_(std::move(folder)), where_("'" + folder_ + "/.metadata'"), checkpoint_(checkpoint) {}

  Status read() {
    Result<MappedFile> file = MappedFile::open(folder_ + "/.metadata");
    if (!file.ok())
      return file.status();
    const std::string_view bytes(reinterpret_cast<const char *>(file->data()), file->bytes());
    Result<Pickle> pickle = Pickle::read(bytes, withDtypes(kMetadataGlobals), where_);
    if (!pickle.ok())
      return pickle.status();
    pickle_ = std::move(*pickle);
    const Value *items = member(pickle_.root(), kMetadata, "state_dict_metadata");
    const Value *places = member(pickle_.root(), kMetadata, "storage_data");
    if (!items || !places || !pickle_.is(*items, Kind::dictionary) || !pickle_.is(*places, Kind::dictionary))
      return refuse("expected a Metadata with state_dict_metadata and storage_data");
    if (const Value *version = member(pickle_.root(), kMetadata, "version");
        version && !pickle_.is(*version, Kind::none)) { // the default of PyTorch's class
      if (!pickle_.is(*version, Kind::text) || pickle_.text(*version) != kVersion)
        return refuse("unknown version" +
                      (pickle_.is(*version, Kind::text) ? " '" + std::string(pickle_.text(*version)) + "'"
                                                        : std::string(", which is not a text")) +
                      ", expected '" + std::string(kVersion) + "'");
      checkpoint_.version = pickle_.text(*version);
    }
    if (Status status = readPlaces(*places); !status.ok())
      return status;
    const Pickle::Items entries = pickle_.items(*items);
    for (size_t i = 0; i + 1 < entries.size(); i += 2)
      if (Status status = readItem(entries[i], entries[i + 1]); !status.ok())
        return status;
    return {};
  }

private:
  Status refuse(const std::string &why) const { return failed(where_ + ": " + why); }

  /// The attribute of an instance of `type`, or nullptr.
  const Value *member(Value object, std::string_view type, std::string_view name) const {
    const Value *state = pickle_.isObject(object, type) ? pickle_.state(object) : nullptr;
    return state ? pickle_.find(*state, name) : nullptr;
  }

  /// Whether a value is a list or tuple without members.
  bool isEmpty(Value value) const {
    return (pickle_.is(value, Kind::list) || pickle_.is(value, Kind::tuple)) && pickle_.items(value).empty();
  }

  /// storage_data: {MetadataIndex(fqn, offset): _StorageInfo(relative_path, offset, length)}.
  Status readPlaces(Value places) {
    constexpr std::string_view kIndex = "torch.distributed.checkpoint.metadata MetadataIndex";
    constexpr std::string_view kInfo = "torch.distributed.checkpoint.filesystem _StorageInfo";
    const Pickle::Items entries = pickle_.items(places);
    for (size_t i = 0; i + 1 < entries.size(); i += 2) {
      const Value *name = member(entries[i], kIndex, "fqn"), *offset = member(entries[i], kIndex, "offset");
      const Value *file = member(entries[i + 1], kInfo, "relative_path");
      const Value *begin = member(entries[i + 1], kInfo, "offset"), *bytes = member(entries[i + 1], kInfo, "length");
      if (!name || !pickle_.is(*name, Kind::text) || !file || !pickle_.is(*file, Kind::text) || !begin ||
          !pickle_.is(*begin, Kind::integer) || !bytes || !pickle_.is(*bytes, Kind::integer))
        return refuse("an entry of storage_data is not a MetadataIndex and a _StorageInfo");
      const std::string of(pickle_.text(*name)), path(pickle_.text(*file));
      if (path.empty() || path.find_first_of(std::string_view("/\0", 2)) != std::string::npos || path[0] == '.')
        return refuse("'" + of + "': invalid file name '" + path + "', expected a file in the same folder");
      if (pickle_.integer(*begin) < 0 || pickle_.integer(*bytes) < 0)
        return refuse("'" + of + "': a negative offset or length in '" + path + "'");
      if (const Value *transforms = member(entries[i + 1], kInfo, "transform_descriptors");
          transforms && !pickle_.is(*transforms, Kind::none) && !isEmpty(*transforms))
        return refuse("'" + of + "' is stored with stream transforms (transform_descriptors), which are not supported");
      const auto at = offset ? pickle_.integers(*offset) : std::nullopt;
      const Place place{path, static_cast<uint64_t>(pickle_.integer(*begin)),
                        static_cast<uint64_t>(pickle_.integer(*bytes))};
      if (!places_.emplace(std::pair(of, at.value_or(std::vector<int64_t>())), place).second)
        return refuse("'" + of + "' has two entries with one offset in storage_data");
    }
    return {};
  }

  Status readItem(Value key, Value item) {
    if (!pickle_.is(key, Kind::text))
      return refuse("a name is not a text");
    const std::string name(pickle_.text(key));
    if (pickle_.isObject(item, kBytes)) {
      const auto place = places_.find({name, {}});
      if (place == places_.end())
        return refuse("'" + name + "' has no entry in storage_data");
      const Result<std::string_view> bytes = bytesAt(name, place->second);
      if (!bytes.ok())
        return bytes.status();
      checkpoint_.objects[name] = {place->second.file, place->second.begin, place->second.bytes};
      return {};
    }
    StoredTensor tensor;
    if (Status status = readTensor(name, item, tensor); !status.ok())
      return status;
    if (Status status = checkChunks(name, tensor, where_); !status.ok())
      return status;
    if (!checkpoint_.tensors.emplace(name, std::move(tensor)).second)
      return refuse("the name '" + name + "' is repeated");
    return {};
  }

  Status readTensor(const std::string &name, Value item, StoredTensor &tensor) {
    const Value *properties = member(item, kTensor, "properties"), *size = member(item, kTensor, "size");
    const Value *chunks = member(item, kTensor, "chunks");
    const auto shape = size ? pickle_.integers(*size) : std::nullopt;
    const Value *state = properties ? pickle_.state(*properties) : nullptr; // (dtype, layout, …)
    if (!shape || !state || !pickle_.is(*state, Kind::tuple) || pickle_.items(*state).empty() || !chunks ||
        !pickle_.is(*chunks, Kind::list))
      return refuse("'" + name + "': expected TensorStorageMetadata with properties, size and chunks");
    const Value type = pickle_.items(*state)[0];
    const std::string_view global = pickle_.is(type, Kind::global) ? pickle_.text(type) : std::string_view();
    const auto dtype = dtypeFromTorch(global);
    if (!dtype)
      return refuse("'" + name + "': its dtype is '" + std::string(global) + "', which is not supported");
    tensor.dtype = *dtype;
    tensor.shape = *shape;
    // Tensors that share one list of chunks without elements would need time for each of them.
    if (chunks_ += pickle_.items(*chunks).size(); chunks_ > pickle_.size() || shape->size() > kMaxTensorDimensions)
      return refuse("'" + name + "': found " +
                    (chunks_ > pickle_.size() ? "more chunks in all tensors than values"
                                              : std::to_string(shape->size()) + " dimensions") +
                    ", expected a list of chunks of its own and at most " + std::to_string(kMaxTensorDimensions) +
                    " dimensions");
    for (const Value chunk : pickle_.items(*chunks))
      if (Status status = readChunk(name, chunk, tensor); !status.ok())
        return status;
    return {};
  }

  Status readChunk(const std::string &name, Value chunk, StoredTensor &tensor) {
    constexpr std::string_view kChunk = "torch.distributed.checkpoint.metadata ChunkStorageMetadata";
    const Value *at = member(chunk, kChunk, "offsets"), *of = member(chunk, kChunk, "sizes");
    const auto offsets = at ? pickle_.integers(*at) : std::nullopt, lengths = of ? pickle_.integers(*of) : std::nullopt;
    if (!offsets || !lengths)
      return refuse("'" + name + "': expected ChunkStorageMetadata with offsets and sizes");
    const auto place = places_.find({name, *offsets});
    if (place == places_.end())
      return refuse("'" + name + "': a chunk has no entry in storage_data");
    const Result<std::string_view> entry = bytesAt(name, place->second);
    if (!entry.ok())
      return entry.status();
    const std::string where = "'" + folder_ + "/" + place->second.file + "', entry '" + name + "' at byte " +
                              std::to_string(place->second.begin);
    const Result<TorchFile> file = readTorchFile(*entry, where);
    if (!file.ok())
      return file.status();
    const auto stored = file->tensors.find("");
    if (stored == file->tensors.end() || stored->second.dtype != tensor.dtype || stored->second.shape != *lengths)
      return failed(where + ": its dtype and shape are not those of the chunk in '.metadata'");
    if (!stored->second.contiguous())
      return failed(where + ": its elements are not contiguous");
    const uint64_t begin = place->second.begin + static_cast<uint64_t>(stored->second.data.data() - entry->data());
    tensor.chunks.push_back(
        {*offsets, *lengths, place->second.file, stored->second.data.empty() ? 0 : begin, stored->second.data.size()});
    return {};
  }

  /// The bytes of an entry; its file stays mapped.
  Result<std::string_view> bytesAt(const std::string &name, const Place &place) {
    auto file = files_.find(place.file);
    if (file == files_.end()) {
      Result<MappedFile> opened = MappedFile::open(folder_ + "/" + place.file);
      if (!opened.ok())
        return opened.status();
      opened->readOnDemand();
      file = files_.emplace(place.file, std::move(*opened)).first;
    }
    const uint64_t bytes = file->second.bytes();
    if (place.begin > bytes || place.bytes > bytes - place.begin)
      return failed("'" + folder_ + "/" + place.file + "': truncated: '" + name + "' has bytes " +
                    std::to_string(place.begin) + " to " + std::to_string(place.begin + place.bytes) +
                    ", but the file has " + std::to_string(bytes));
    return std::string_view(reinterpret_cast<const char *>(file->second.data()) + place.begin, place.bytes);
  }

  std::string folder_, where_;
  StoredCheckpoint &checkpoint_;
  Pickle pickle_;
  std::map<std::pair<std::string, std::vector<int64_t>>, Place> places_; // by name and offset; objects: no offset
  std::map<std::string, MappedFile> files_;
  size_t chunks_ = 0; // of all tensors
};

} // namespace

Status readDcp(const std::string &folder, StoredCheckpoint &checkpoint) { return DcpReader(folder, checkpoint).read(); }

} // namespace reshard::analysis
