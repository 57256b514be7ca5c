// SPDX-License-Identifier: Apache-2.0
// torch.distributed.checkpoint: `.metadata`, a pickle that lists tensors, chunks and where they are, and files
// `__RANK_N.distcp`, in which each chunk is a file of torch.save. The reader takes `.metadata` in two steps: the
// entries of storage_data, sorted by name and offset, and then the tensors and chunks, each of which finds its entry
// there. Last it finds the data of all chunks in the files, in order. The writer lays out the chunks in files, each as
// an archive of its own, and all objects in one more file, and builds the pickle from the places of both.
#include "base/atomic_file.h"
#include "base/input_file.h"
#include "checkpoints/pickle.h"
#include "checkpoints/pickle_text.h"
#include "checkpoints/stored_format.h"
#include "checkpoints/torch_archive.h"
#include "checkpoints/torch_file.h"

#include <algorithm>
#include <climits>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace reshard::checkpoints {

namespace {

using Kind = Pickle::Kind;
using Value = Pickle::Value;

constexpr std::string_view kVersion = "1.0.0";
constexpr uint64_t kMaxMetadata = uint64_t{1} << 32;
/// About the bytes of memory that a tensor, a chunk and each dimension of either take, besides names.
constexpr uint64_t kTensorBytes = 200, kChunkBytes = 250, kDimensionBytes = 16;
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

/// An entry of storage_data. Names and offsets are often shared values, which are not copied. Names and files have
/// numbers.
struct StorageEntry {
  uint32_t name = 0, file = 0;
  Value offset = 0; // kNoOffset: an object
  uint64_t begin = 0, bytes = 0;
};

/// An item of the checkpoint, and its entry of storage_data.
struct Use {
  const StorageEntry *place;
  StoredTensor *tensor; // null: an object
  size_t chunk = 0;
};

constexpr Value kNoOffset = ~Value{0};

/// A name in quotes, for an error: its beginning if it is long.
std::string quoted(std::string_view name) {
  constexpr size_t kMaxBytes = 200;
  return "'" + std::string(name.substr(0, kMaxBytes)) + (name.size() > kMaxBytes ? "…'" : "'");
}

/// The numbers of texts of a pickle, so that long ones are compared once.
class TextNumbers {
public:
  uint32_t of(const Pickle &pickle, Value value) {
    const auto [known, added] = byValue_.try_emplace(value, 0);
    if (added) {
      known->second = byText_.try_emplace(pickle.text(value), static_cast<uint32_t>(texts_.size())).first->second;
      if (known->second == texts_.size())
        texts_.push_back(pickle.text(value));
    }
    return known->second;
  }
  size_t size() const { return texts_.size(); }
  std::string_view text(uint32_t number) const { return texts_[number]; }

private:
  std::unordered_map<Value, uint32_t> byValue_;
  std::unordered_map<std::string_view, uint32_t> byText_;
  std::vector<std::string_view> texts_;
};

class DcpReader {
public:
  DcpReader(std::string folder, StoredCheckpoint &checkpoint)
      : folder_(std::move(folder)), where_("'" + folder_ + "/.metadata'"), checkpoint_(checkpoint) {}

  Status read() {
    const Result<std::string> bytes = readWhole(folder_ + "/.metadata", kMaxMetadata);
    if (!bytes.ok())
      return bytes.status();
    budget_.add(bytes->size());
    Result<Pickle> pickle = Pickle::read(*bytes, withDtypes(kMetadataGlobals), where_);
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
    if (Status status = readFiles(); !status.ok())
      return status;
    for (const auto &[name, tensor] : checkpoint_.tensors)
      if (Status status = checkChunks(name, tensor, where_); !status.ok())
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
    if (!budget_.take(entries.size() / 2 * sizeof(StorageEntry)))
      return refuse(ReadBudget::problem());
    places_.reserve(entries.size() / 2);
    for (size_t i = 0; i + 1 < entries.size(); i += 2) {
      const Value *name = member(entries[i], kIndex, "fqn"), *offset = member(entries[i], kIndex, "offset");
      const Value *file = member(entries[i + 1], kInfo, "relative_path");
      const Value *begin = member(entries[i + 1], kInfo, "offset"), *bytes = member(entries[i + 1], kInfo, "length");
      if (!name || !pickle_.is(*name, Kind::text) || !file || !pickle_.is(*file, Kind::text) || !begin ||
          !pickle_.is(*begin, Kind::integer) || !bytes || !pickle_.is(*bytes, Kind::integer))
        return refuse("an entry of storage_data is not a MetadataIndex and a _StorageInfo");
      const size_t files = files_.size();
      const uint32_t fileNumber = files_.of(pickle_, *file);
      const std::string_view path = files_.text(fileNumber);
      const auto refuseEntry = [&](const std::string &why) { return refuse(nameOf(*name) + why); };
      if (files_.size() > files && (path.empty() || path.size() > NAME_MAX || path[0] == '.' ||
                                    path.find_first_of(std::string_view("/\0", 2)) != std::string::npos))
        return refuseEntry(": invalid file name " + quoted(path) + ", expected a file in the same folder");
      if (pickle_.integer(*begin) < 0 || pickle_.integer(*bytes) < 0)
        return refuseEntry(": a negative offset or length in '" + std::string(path) + "'");
      if (const Value *transforms = member(entries[i + 1], kInfo, "transform_descriptors");
          transforms && !pickle_.is(*transforms, Kind::none) && !isEmpty(*transforms))
        return refuseEntry(" is stored with stream transforms (transform_descriptors), which are not supported");
      if (offset && !pickle_.is(*offset, Kind::none) && !pickle_.integers(*offset))
        return refuseEntry(": its offset in storage_data is no list of at most " +
                           std::to_string(Pickle::kMaxIntegers) + " integers");
      places_.push_back({names_.of(pickle_, *name), fileNumber, offset ? *offset : kNoOffset,
                         static_cast<uint64_t>(pickle_.integer(*begin)),
                         static_cast<uint64_t>(pickle_.integer(*bytes))});
    }
    const auto before = [&](const StorageEntry &a, const StorageEntry &b) { return compare(a, b.name, b.offset) < 0; };
    std::sort(places_.begin(), places_.end(), before);
    for (size_t i = 1; i < places_.size(); ++i)
      if (!before(places_[i - 1], places_[i]))
        return refuse(quoted(names_.text(places_[i].name)) + " has two entries with one offset in storage_data");
    return {};
  }

  /// The numbers of an offset, which is a list or a torch.Size of integers; without an offset none.
  Pickle::Items numbers(Value offset) const {
    if (offset == kNoOffset)
      return {};
    if (pickle_.isObject(offset, "torch Size"))
      offset = pickle_.items(pickle_.items(offset)[1])[0];
    return pickle_.items(offset);
  }

  /// Less than 0 if a place is before that of a name and an offset, 0 if it is that.
  int compare(const StorageEntry &place, uint32_t name, Value offset) const {
    if (place.name != name)
      return place.name < name ? -1 : 1;
    if (place.offset == offset)
      return 0;
    const Pickle::Items a = numbers(place.offset), b = numbers(offset);
    for (size_t i = 0; i < a.size() && i < b.size(); ++i)
      if (const int64_t one = pickle_.integer(a[i]), other = pickle_.integer(b[i]); one != other)
        return one < other ? -1 : 1;
    return a.size() == b.size() ? 0 : a.size() < b.size() ? -1 : 1;
  }

  const StorageEntry *find(Value name, Value offset) {
    const uint32_t number = names_.of(pickle_, name);
    const auto at = std::partition_point(places_.begin(), places_.end(),
                                         [&](const StorageEntry &place) { return compare(place, number, offset) < 0; });
    return at != places_.end() && compare(*at, number, offset) == 0 ? &*at : nullptr;
  }

  std::string nameOf(Value name) const { return quoted(pickle_.text(name)); }

  Status readItem(Value key, Value item) {
    if (!pickle_.is(key, Kind::text))
      return refuse("a name is not a text");
    const std::string_view text = pickle_.text(key);
    if (!budget_.take(kTensorBytes + text.size()))
      return refuse(ReadBudget::problem());
    const std::string name(text);
    if (checkpoint_.tensors.contains(name) || checkpoint_.objects.contains(name))
      return refuse("the name " + nameOf(key) + " is repeated");
    if (!pickle_.isObject(item, kBytes))
      return readTensor(key, item, checkpoint_.tensors[name]);
    const StorageEntry *place = find(key, kNoOffset);
    if (!place)
      return refuse(nameOf(key) + " has no entry in storage_data");
    uses_.push_back({place, nullptr});
    checkpoint_.objects[name] = {std::string(files_.text(place->file)), place->begin, place->bytes};
    return {};
  }

  Status readTensor(Value name, Value item, StoredTensor &tensor) {
    const Value *properties = member(item, kTensor, "properties"), *size = member(item, kTensor, "size");
    const Value *chunks = member(item, kTensor, "chunks");
    const auto shape = size ? pickle_.integers(*size) : std::nullopt;
    const Value *state = properties ? pickle_.state(*properties) : nullptr; // (dtype, layout, …)
    if (!shape || !state || !pickle_.is(*state, Kind::tuple) || pickle_.items(*state).empty() || !chunks ||
        !pickle_.is(*chunks, Kind::list))
      return refuse(nameOf(name) + ": expected TensorStorageMetadata with properties, a size of at most " +
                    std::to_string(Pickle::kMaxIntegers) + " dimensions, and chunks");
    const Value type = pickle_.items(*state)[0];
    const std::string_view global = pickle_.is(type, Kind::global) ? pickle_.text(type) : std::string_view();
    const auto dtype = dtypeFromTorch(global);
    if (!dtype)
      return refuse(nameOf(name) + ": its dtype is '" + std::string(global) + "', which is not supported");
    tensor.dtype = *dtype;
    tensor.shape = *shape;
    // Tensors that share one list of chunks without elements would need time for each of them.
    if (chunks_ += pickle_.items(*chunks).size(); chunks_ > pickle_.size())
      return refuse(nameOf(name) +
                    ": found more chunks in all tensors than values, expected a list of chunks of its own");
    if (!budget_.take(kDimensionBytes * shape->size()))
      return refuse(ReadBudget::problem());
    for (const Value chunk : pickle_.items(*chunks))
      if (Status status = readChunk(name, chunk, tensor); !status.ok())
        return status;
    return {};
  }

  Status readChunk(Value name, Value chunk, StoredTensor &tensor) {
    constexpr std::string_view kChunk = "torch.distributed.checkpoint.metadata ChunkStorageMetadata";
    const Value *at = member(chunk, kChunk, "offsets"), *of = member(chunk, kChunk, "sizes");
    auto offsets = at ? pickle_.integers(*at) : std::nullopt, lengths = of ? pickle_.integers(*of) : std::nullopt;
    if (!offsets || !lengths)
      return refuse(nameOf(name) + ": expected ChunkStorageMetadata with offsets and sizes of at most " +
                    std::to_string(Pickle::kMaxIntegers) + " integers");
    const StorageEntry *place = find(name, *at);
    if (!place)
      return refuse(nameOf(name) + ": a chunk has no entry in storage_data");
    if (!budget_.take(kChunkBytes + files_.text(place->file).size() +
                      kDimensionBytes * (offsets->size() + lengths->size())))
      return refuse(ReadBudget::problem());
    uses_.push_back({place, &tensor, tensor.chunks.size()});
    tensor.chunks.push_back({std::move(*offsets), std::move(*lengths), {}, 0, 0});
    return {};
  }

  /// Finds the data of all chunks, file by file. Entries do not overlap, so each byte is read once.
  Status readFiles() {
    const auto placeOf = [](const Use &use) { return std::tuple(use.place->file, use.place->begin, use.place->bytes); };
    std::sort(uses_.begin(), uses_.end(), [&](const Use &a, const Use &b) { return placeOf(a) < placeOf(b); });
    std::optional<InputFile> file;
    std::optional<TorchTensor> stored; // in the entry of the last use
    const StorageEntry *last = nullptr;
    for (const Use &use : uses_) {
      const StorageEntry &place = *use.place;
      const std::string path = folder_ + "/" + std::string(files_.text(place.file));
      const std::string name = quoted(names_.text(place.name));
      if (!file || last->file != place.file) {
        Result<InputFile> opened = InputFile::open(path);
        if (!opened.ok())
          return opened.status();
        file = std::move(*opened);
        checkpoint_.files[std::string(files_.text(place.file))] = file->status();
        last = nullptr;
      }
      if (place.begin > file->bytes() || place.bytes > file->bytes() - place.begin)
        return failed("'" + path + "': truncated: " + name + " has bytes " + std::to_string(place.begin) + " to " +
                      std::to_string(place.begin + place.bytes) + ", but the file has " +
                      std::to_string(file->bytes()));
      const bool same = last && last->begin == place.begin && last->bytes == place.bytes;
      if (!same && last && place.bytes > 0 && place.begin < last->begin + last->bytes)
        return failed("'" + path + "': the entries " + quoted(names_.text(last->name)) + " at byte " +
                      std::to_string(last->begin) + " and " + name + " at byte " + std::to_string(place.begin) +
                      " overlap");
      if (!same)
        stored.reset();
      last = &place;
      if (use.tensor)
        if (Status status = locate(*file, use, name, stored); !status.ok())
          return status;
    }
    return {};
  }

  /// Sets where the data of a chunk is. `stored`: the tensor in its entry, if that was read.
  Status locate(const InputFile &file, const Use &use, const std::string &name, std::optional<TorchTensor> &stored) {
    const StorageEntry &place = *use.place;
    const std::string where = "'" + file.path() + "', entry " + name + " at byte " + std::to_string(place.begin);
    StoredChunk &chunk = use.tensor->chunks[use.chunk];
    if (!stored) {
      FilePart archive(file, place.begin, place.bytes);
      ReadBudget budget;
      budget.add(place.bytes);
      Result<TorchFile> read = readTorchFile(archive, where, budget);
      if (!read.ok())
        return read.status();
      const auto found = read->tensors.find("");
      if (found == read->tensors.end() || found->second.part)
        return failed(where + ": expected one plain tensor");
      stored = std::move(found->second);
    }
    if (stored->dtype != use.tensor->dtype || stored->shape != chunk.lengths)
      return failed(where + ": its dtype and shape are not those of the chunk in '.metadata'");
    if (!stored->contiguous())
      return failed(where + ": its elements are not contiguous");
    chunk.file = files_.text(place.file);
    chunk.begin = stored->bytes == 0 ? 0 : place.begin + stored->begin;
    chunk.bytes = stored->bytes;
    return {};
  }

  std::string folder_, where_;
  StoredCheckpoint &checkpoint_;
  Pickle pickle_;
  ReadBudget budget_;
  TextNumbers names_, files_;
  std::vector<StorageEntry> places_; // by name and offset
  std::vector<Use> uses_;
  size_t chunks_ = 0; // the chunks of all tensors so far
};

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

/// Whether a folder has `.metadata`. One that Megatron-Core wrote is not read as this format, which would lose
/// `common.pt`.
Result<bool> hasMetadata(const std::string &folder, bool) {
  const std::string megatron = folder + "/metadata.json";
  return hasEntry(folder + "/.metadata") &&
         !(hasEntry(megatron) && (!InputFile::open(megatron).ok() || checkMegatronFormat(folder).ok()));
}

/// `integrity.json` may be there without `metadata.json`, which it names.
Status readWithHashes(const std::string &folder, StoredCheckpoint &checkpoint) {
  Status status = readDcp(folder, checkpoint);
  return status.ok() ? checkIntegrity(folder, checkpoint) : status;
}

} // namespace

Status readDcp(const std::string &folder, StoredCheckpoint &checkpoint) { return DcpReader(folder, checkpoint).read(); }

Status createDcp(const std::string &folder, const NewCheckpoint &checkpoint) {
  constexpr uint64_t kAlignment = 64;
  std::vector<WrittenPlace> chunks;
  const std::vector<std::vector<TensorSpec>> files = checkpoint.files();
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
  const auto written = writeObjects(folder, "__0_" + std::to_string(files.size()) + ".distcp", checkpoint.objects);
  if (!written.ok())
    return written.status();
  return writeFile(folder + "/.metadata", metadataOf(checkpoint.tensors, chunks, *written));
}

const StoredFormat formats::dcp = {.folderTexts = {"'.metadata'"},
                                   .fits = hasMetadata,
                                   .read = readWithHashes,
                                   .create = createDcp,
                                   .refusal = [](std::string_view) -> const char * { return nullptr; }};

} // namespace reshard::checkpoints
