// SPDX-License-Identifier: Apache-2.0
// Parses headers and indexes item by item (object_reader.h), checks that the data of a file has neither gaps nor
// overlaps, and compares the index of a folder with its files.
#include "checkpoints/safetensors.h"

#include "base/atomic_file.h"
#include "base/input_file.h"
#include "checkpoints/object_reader.h"
#include "checkpoints/stored_format.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <deque>
#include <filesystem>
#include <optional>
#include <set>

namespace reshard::checkpoints {

namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000; // as in the safetensors package
constexpr uint64_t kMaxDataBytes = uint64_t{1} << 50;
constexpr uint64_t kMaxFiles = uint64_t{1} << 20; // the most files of a folder
constexpr size_t kMaxDimensions = 64;             // as in PyTorch

/// An index: {weight_map: {name: file}}.
class IndexReader : public ObjectReader {
public:
  bool found = false;
  std::deque<std::pair<std::string, std::string>>
      files; // (tensor, file); the file is empty if its value is not a string

private:
  void onText(const std::string &text) override { add(text); }
  void onNumber(uint64_t) override { add({}); }
  void onOther() override { add({}); }
  void onBegin(bool array) override {
    found = found || (depth() == 0 && !array && keyAt(0) == "weight_map");
    add({});
  }
  void add(const std::string &file) {
    if (depth() == 1 && found && keyAt(0) == "weight_map")
      files.emplace_back(keyAt(1), file);
  }
};

/// The data of a file, after its header.
struct FileData {
  const std::string &path;
  std::byte *begin;
  uint64_t bytes;
};

/// A header: {name: {dtype: text, shape: [numbers], data_offsets: [begin, end]}}. Adds each tensor when it has been
/// read.
class HeaderReader : public ObjectReader {
public:
  HeaderReader(const FileData &data, Checkpoint &checkpoint) : data_(data), checkpoint_(checkpoint) {}

  std::vector<std::pair<uint64_t, uint64_t>> ranges; // where the data of each tensor is

private:
  /// An item is empty if it is not an unsigned integer. A few more than a tensor can have are kept.
  using Numbers = std::optional<std::vector<std::optional<uint64_t>>>;

  void onText(const std::string &text) override {
    if (depth() == 1 && keyAt(0) == "__metadata__" && keyAt(1).starts_with("DCP_"))
      checkpoint_.metadata[keyAt(1)] = text;
    else if (depth() == 1 && keyAt(1) == "dtype")
      dtype_ = text;
    add({});
  }
  void onNumber(uint64_t number) override { add(number); }
  void onOther() override { add({}); }
  void onBegin(bool array) override {
    if (depth() == 0) {
      dtype_.reset();
      shape_.reset();
      offsets_.reset();
    } else {
      add({});
    }
    if (Numbers *numbers = depth() != 1 || !array       ? nullptr
                           : keyAt(1) == "shape"        ? &shape_
                           : keyAt(1) == "data_offsets" ? &offsets_
                                                        : nullptr)
      (array_ = numbers)->emplace();
  }
  void onEnd() override {
    if (depth() == 1)
      array_ = nullptr;
    else if (depth() == 0 && keyAt(0) != "__metadata__")
      addTensor();
  }
  void add(std::optional<uint64_t> item) {
    if (depth() == 0) // also of __metadata__
      refuseTensor("expected dtype, shape and data_offsets");
    else if (depth() == 2 && array_ && (*array_)->size() <= kMaxDimensions)
      (*array_)->push_back(item);
  }
  void refuseTensor(const std::string &why) { refuse("tensor '" + keyAt(0) + "': " + why); }

  void addTensor() {
    const std::string &name = keyAt(0);
    if (!dtype_ || !shape_ || !offsets_ || offsets_->size() != 2)
      return refuseTensor("expected dtype, shape and data_offsets");
    const auto dtype = schema::dtypeFromSafetensors(*dtype_);
    if (!dtype)
      return refuseTensor("unknown dtype '" + *dtype_ + "'");
    if (shape_->size() > kMaxDimensions)
      return refuseTensor("its shape has more than " + std::to_string(kMaxDimensions) + " dimensions");
    TensorView view;
    uint64_t bytes = static_cast<uint64_t>(schema::itemBytes(*dtype));
    for (const std::optional<uint64_t> &length : *shape_) {
      if (!length || *length > kMaxDataBytes)
        return refuseTensor("a length in its shape is not an unsigned integer, or is too large");
      view.shape.push_back(static_cast<int64_t>(*length));
      if (__builtin_mul_overflow(bytes, *length, &bytes))
        return refuseTensor("its shape is too large");
    }
    if (!(*offsets_)[0] || !(*offsets_)[1])
      return refuseTensor("its data_offsets are not unsigned integers");
    const uint64_t begin = *(*offsets_)[0], end = *(*offsets_)[1];
    if (begin > end || end > data_.bytes)
      return refuseTensor("its data_offsets lie outside the file");
    if (end - begin != bytes)
      return refuseTensor("its shape and dtype need " + std::to_string(bytes) + " bytes, but its data_offsets span " +
                          std::to_string(end - begin));
    view.file = data_.path;
    view.dtype = *dtype;
    view.bytes = static_cast<int64_t>(bytes);
    view.data = data_.begin + begin;
    ranges.emplace_back(begin, end);
    if (const auto [at, added] = checkpoint_.tensors.try_emplace(name, std::move(view)); !added)
      refuse(at->second.file == data_.path ? "damaged header: the key '" + name + "' is repeated"
                                           : "tensor '" + name + "' is also in '" + at->second.file + "'");
  }

  const FileData &data_;
  Checkpoint &checkpoint_;
  std::optional<std::string> dtype_; // the dtype of the current tensor
  Numbers shape_, offsets_;
  Numbers *array_ = nullptr; // receives the items of the current array
};

} // namespace

std::string rankFile(uint32_t rank) {
  char name[40];
  std::snprintf(name, sizeof name, "rank-%05u.safetensors", rank);
  return name;
}

Status readSafetensors(const std::string &path, Checkpoint &checkpoint, bool writable) {
  Result<MappedFile> file = MappedFile::open(path, writable ? MappedFile::Access::write : MappedFile::Access::read);
  if (!file.ok())
    return file.status();
  // What is checked must be what runs: the header is not read from the mapping, which others can write to.
  const Result<InputFile> read = InputFile::open(path);
  if (!read.ok())
    return read.status();
  if (Status status = writable ? Status() : checkSame(read->status(), *file); !status.ok()) // others may write a target
    return status;
  std::byte *data = file->data();
  const uint64_t bytes = file->bytes();
  checkpoint.files.push_back(std::move(*file));
  if (bytes < 8)
    return failed("'" + path + "': truncated: found " + std::to_string(bytes) +
                  " bytes, a safetensors file has at least 8");
  uint64_t headerBytes = 0;
  if (Status status = read->read(0, reinterpret_cast<char *>(&headerBytes), sizeof headerBytes); !status.ok())
    return status;
  if (headerBytes > kMaxHeaderBytes || headerBytes > bytes - 8 || read->bytes() != bytes)
    return failed("'" + path + "': truncated or damaged: the header should have " + std::to_string(headerBytes) +
                  " bytes, but the file has " + std::to_string(bytes));
  const Result<std::string> text = read->read(8, headerBytes);
  if (!text.ok())
    return text.status();
  const FileData contents{path, data + 8 + headerBytes, bytes - 8 - headerBytes};
  HeaderReader header(contents, checkpoint);
  if (Status status = header.read(path, *text); !status.ok())
    return status;
  std::vector<std::pair<uint64_t, uint64_t>> &ranges = header.ranges;
  std::sort(ranges.begin(), ranges.end());
  uint64_t next = 0;
  for (const auto &[begin, end] : ranges) {
    if (begin != next)
      return failed("'" + path + "': damaged header: the data has a gap or an overlap at byte " +
                    std::to_string(std::min(begin, next)));
    next = end;
  }
  if (next != contents.bytes)
    return failed("'" + path + "': damaged: the file has " + std::to_string(contents.bytes) +
                  " bytes of data, but its tensors have " + std::to_string(next));
  return {};
}

Result<std::vector<std::string>> safetensorsFiles(const std::string &folder) {
  std::vector<std::string> found;
  std::error_code error;
  for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    if (at->path().extension() == ".safetensors")
      found.push_back(at->path().filename().string());
    if (found.size() > kMaxFiles)
      return failed("'" + folder + "' has more than " + std::to_string(kMaxFiles) + " safetensors files");
  }
  if (error)
    return failed("cannot list '" + folder + "': " + error.message());
  std::sort(found.begin(), found.end());
  return found;
}

namespace {

/// "'a', 'b' and 3 more"
std::string someOf(const std::vector<std::string> &names) {
  constexpr size_t kNamed = 5;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kNamed); ++i)
    text += (i > 0 ? ", '" : "'") + names[i] + "'";
  return text + (names.size() > kNamed ? " and " + std::to_string(names.size() - kNamed) + " more" : "");
}

/// The file of each tensor, as the index of a folder states it.
Result<std::map<std::string, std::string>> readIndex(const std::string &index) {
  const Result<std::string> text = readWhole(index, kMaxHeaderBytes);
  if (!text.ok())
    return text.status();
  IndexReader json;
  if (Status status = json.read(index, *text); !status.ok())
    return status;
  if (!json.found)
    return failed("'" + index + "': 'weight_map' is missing");
  std::map<std::string, std::string> fileOf;
  for (auto &[name, file] : json.files) {
    if (file.empty() || file.find_first_of(std::string_view("/\0", 2)) != std::string::npos || file[0] == '.')
      return failed("'" + index + "': tensor '" + name +
                    "' has an invalid file name, expected a file in the same folder");
    if (const auto [at, added] = fileOf.try_emplace(name, file); !added && at->second != file)
      return failed("'" + index + "': tensor '" + name + "' is in '" + at->second + "' and in '" + file +
                    "', expected one file");
  }
  return fileOf;
}

/// Adds the tensors that the index assigns to one of its files.
Status readIndexed(const std::string &folder, const std::string &file, const std::vector<std::string> &listed,
                   const std::map<std::string, std::string> &fileOf, bool writable, Checkpoint &checkpoint) {
  const std::string path = folder + "/" + file;
  Checkpoint found;
  if (Status status = readSafetensors(path, found, writable); !status.ok())
    return status;
  std::vector<std::string> missing, surplus, elsewhere;
  for (const std::string &name : listed)
    if (!found.tensors.contains(name))
      missing.push_back(name);
  for (auto &[name, view] : found.tensors) {
    const auto at = fileOf.find(name);
    if (at == fileOf.end())
      surplus.push_back(name);
    else if (at->second != file)
      elsewhere.push_back(name);
    else
      checkpoint.tensors.emplace_hint(checkpoint.tensors.end(), name, std::move(view));
  }
  if (!missing.empty() || !surplus.empty())
    return failed("'" + path + "' has " + std::to_string(found.tensors.size()) + " tensors, but the index lists " +
                  std::to_string(listed.size()) + " there" +
                  (missing.empty() ? "" : "; the file lacks " + someOf(missing)) +
                  (surplus.empty() ? "" : "; the index lacks " + someOf(surplus)) +
                  ": expected an index and files of one checkpoint");
  if (!elsewhere.empty())
    checkpoint.notes.push_back("'" + path + "': left out " + someOf(elsewhere) +
                               ", which the index has in another file");
  for (auto &[key, text] : found.metadata)
    checkpoint.metadata[key] = text;
  for (MappedFile &each : found.files)
    checkpoint.files.push_back(std::move(each));
  return {};
}

/// The name of a file of a set, such as model-00002-of-00003.safetensors, with the digits of its number replaced; empty
/// if it has no such name.
std::string setOf(std::string name) {
  const size_t of = name.rfind("-of-");
  size_t at = of;
  while (at != std::string::npos && at > 0 && name[at - 1] >= '0' && name[at - 1] <= '9')
    name[--at] = '#';
  return at == of ? std::string() : name;
}

/// Notes the safetensors files of a folder that its index does not list. One of a set that it lists is refused if it
/// has tensors that the index lacks.
Status findUnlisted(const std::string &folder, const std::map<std::string, std::vector<std::string>> &listed,
                    const std::map<std::string, std::string> &fileOf, Checkpoint &checkpoint) {
  const Result<std::vector<std::string>> files = safetensorsFiles(folder);
  if (!files.ok())
    return files.status();
  std::set<std::string> sets;
  for (const auto &[file, names] : listed)
    sets.insert(setOf(file));
  std::vector<std::string> others;
  for (const std::string &file : *files) {
    if (listed.contains(file) || file == "model.safetensors")
      continue;
    others.push_back(file);
    if (const std::string set = setOf(file); set.empty() || !sets.contains(set))
      continue;
    Checkpoint found;
    if (Status status = readSafetensors(folder + "/" + file, found); !status.ok())
      return status;
    std::vector<std::string> surplus;
    for (const auto &[name, view] : found.tensors)
      if (!fileOf.contains(name))
        surplus.push_back(name);
    if (!surplus.empty())
      return failed("'" + folder + "/" + file + "' is not in the index 'model.safetensors.index.json', which lists '" +
                    listed.begin()->first + "' and lacks " + someOf(surplus) +
                    ": add its tensors to the index, or remove the file");
  }
  if (!others.empty())
    checkpoint.notes.push_back(
        "'" + folder + "': not read, because 'model.safetensors.index.json' does not list them: " + someOf(others));
  return {};
}

/// Whether model.safetensors beside an index has the same tensors as the files of the index.
Status compareSingle(const std::string &folder, Checkpoint &checkpoint) {
  const std::string path = folder + "/model.safetensors";
  Checkpoint single;
  if (Status status = readSafetensors(path, single); !status.ok())
    return status;
  const auto differ = [&](const std::string &name, const std::string &how) {
    return failed("'" + path + "' is not in the index beside it, and tensor '" + name + "' " + how +
                  ": transformers reads 'model.safetensors', others the files of the index; expected the same tensors "
                  "in both; remove one of them, or name the file");
  };
  for (const auto &[name, view] : single.tensors)
    if (!checkpoint.tensors.contains(name))
      return differ(name, "is in it alone");
  for (const auto &[name, view] : checkpoint.tensors) {
    const auto at = single.tensors.find(name);
    if (at == single.tensors.end())
      return differ(name, "is in the files of the index alone");
    if (at->second.dtype != view.dtype || at->second.shape != view.shape)
      return differ(name, "has another dtype or shape there");
    if (view.bytes > 0 && std::memcmp(at->second.data, view.data, static_cast<size_t>(view.bytes)) != 0)
      return differ(name, "has other values there");
  }
  for (const std::vector<MappedFile> *files : {&single.files, &checkpoint.files})
    for (const MappedFile &file : *files)
      file.release();
  checkpoint.notes.push_back("'" + folder +
                             "': 'model.safetensors' has the same tensors as the files of the index, "
                             "which are read");
  return {};
}

} // namespace

Status readCheckpoint(const std::string &folder, Checkpoint &checkpoint, bool writable) {
  const std::string index = folder + "/model.safetensors.index.json", single = folder + "/model.safetensors";
  if (!hasEntry(index)) {
    const Result<std::vector<std::string>> files = safetensorsFiles(folder);
    if (hasEntry(single) || !files.ok() || files->empty())
      return readSafetensors(single, checkpoint, writable);
    return failed("'" + folder + "': found " + std::to_string(files->size()) + " safetensors file(s), such as '" +
                  files->front() +
                  "', expected 'model.safetensors' or 'model.safetensors.index.json'; one file is read if its name is "
                  "given, and files of ranks (rank-00000.safetensors) by a job with a mesh");
  }
  const Result<std::map<std::string, std::string>> fileOf = readIndex(index);
  if (!fileOf.ok())
    return fileOf.status();
  std::map<std::string, std::vector<std::string>> listed; // by file
  for (const auto &[name, file] : *fileOf)
    listed[file].push_back(name);
  for (const auto &[file, names] : listed)
    if (Status status = readIndexed(folder, file, names, *fileOf, writable, checkpoint); !status.ok())
      return status;
  if (Status status = findUnlisted(folder, listed, *fileOf, checkpoint); !status.ok())
    return status;
  const bool both = hasEntry(single) && !listed.contains("model.safetensors");
  return both ? compareSingle(folder, checkpoint) : Status();
}

Status createSafetensors(const std::string &path, const std::vector<TensorSpec> &unordered,
                         const std::string &metadata) {
  // Largest elements first, as in the safetensors package: then every tensor is aligned to its elements.
  std::vector<TensorSpec> tensors = unordered;
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorSpec &a, const TensorSpec &b) {
    return schema::itemBytes(a.dtype) > schema::itemBytes(b.dtype);
  });
  std::string header = "{" + metadata;
  uint64_t next = 0;
  for (const TensorSpec &tensor : tensors) {
    const uint64_t end = next + static_cast<uint64_t>(tensor.bytes);
    header += (header.size() == 1 ? "" : ",") + nlohmann::json(tensor.name).dump() + R"(:{"dtype":")" +
              schema::safetensorsName(tensor.dtype) + R"(","shape":)" + nlohmann::json(tensor.shape).dump() +
              R"(,"data_offsets":[)" + std::to_string(next) + "," + std::to_string(end) + "]}";
    next = end;
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t headerBytes = header.size(), total = 8 + headerBytes + next;
  const std::string_view length(reinterpret_cast<const char *>(&headerBytes), 8);
  return MappedFile::create(path, total, {{0, length}, {8, header}}).status();
}

void addTensors(const Checkpoint &files, const std::string &folder, StoredCheckpoint &checkpoint) {
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

namespace {

bool beginsWithHeader(std::string_view file) { return file.size() > 8 && file[8] == '{'; }

Result<bool> hasSafetensors(const std::string &folder, bool preferred) {
  if (hasEntry(folder + "/model.safetensors.index.json") || hasEntry(folder + "/model.safetensors"))
    return true;
  const Result<std::vector<std::string>> files = preferred ? std::vector<std::string>() : safetensorsFiles(folder);
  return files.ok() ? Result(!files->empty()) : files.status();
}

Status readFiles(const std::string &path, StoredCheckpoint &checkpoint) {
  const bool folder = std::filesystem::is_directory(path);
  Checkpoint files;
  if (Status status = folder ? readCheckpoint(path, files) : readSafetensors(path, files); !status.ok())
    return status;
  addTensors(files, folder ? path : std::string(), checkpoint);
  checkpoint.notes = std::move(files.notes);
  return {};
}

/// Creates one model.safetensors, or several files and an index.
Status createFiles(const std::string &folder, const NewCheckpoint &checkpoint) {
  constexpr const char *kMetadata =
      R"("__metadata__":{"format":"pt"})"; // as save_pretrained writes it; some versions of transformers require it
  const std::vector<std::vector<TensorSpec>> files = checkpoint.files();
  if (files.size() == 1)
    return createSafetensors(folder + "/model.safetensors", files[0], kMetadata);
  int64_t total = 0;
  std::string map;
  for (size_t i = 0; i < files.size(); ++i) {
    char name[64];
    std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, files.size());
    for (const TensorSpec &tensor : files[i]) {
      total += tensor.bytes;
      map += (map.empty() ? "" : ",\n") + ("    " + nlohmann::json(tensor.name).dump() + ": \"" + name + "\"");
    }
    if (Status status = createSafetensors(folder + "/" + name, files[i], kMetadata); !status.ok())
      return status;
  }
  const std::string text = "{\n  \"metadata\": {\n    \"total_size\": " + std::to_string(total) +
                           "\n  },\n  \"weight_map\": {\n" + map + "\n  }\n}\n";
  return writeFile(folder + "/model.safetensors.index.json", text);
}

} // namespace

const StoredFormat formats::safetensors = {.folderTexts = {"'model.safetensors.index.json'", "files '*.safetensors'"},
                                           .fileText = "safetensors",
                                           .begins = beginsWithHeader,
                                           .fits = hasSafetensors,
                                           .read = readFiles,
                                           .create = createFiles};

} // namespace reshard::checkpoints
