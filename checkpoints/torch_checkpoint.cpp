// SPDX-License-Identifier: Apache-2.0
// Finds the files of all ranks by their names, reads the archive of each, and joins the boxes of distributed tensors. A
// box that several ranks have saved must have the same bytes in all their files.
#include "base/input_file.h"
#include "checkpoints/stored_format.h"
#include "checkpoints/torch_archive.h"
#include "checkpoints/torch_file.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

namespace reshard::checkpoints {

namespace fs = std::filesystem;

namespace {

constexpr const char *kTorchFile = "model.pt"; // the file of a folder, if it has not one of each rank
constexpr uint64_t kMaxRankFiles = uint64_t{1} << 20;
/// The pickle of the number 0x1950a86a20f9469cfc6c, torch.serialization.MAGIC_NUMBER.
constexpr std::string_view kLegacyMagic = "\x80\x02\x8a\x0a"
                                          "l\xfc\x9c"
                                          "F\xf9 j\xa8P\x19";

/// Whether a file begins as one in the form before PyTorch 1.6, which is no zip and is not read.
bool isLegacy(std::string_view file) { return file.starts_with(kLegacyMagic); }
bool beginsAsTorchFile(std::string_view file) { return file.starts_with("PK\x03\x04") || isLegacy(file); }

/// Files by their beginning, such as `model_world_size_4_`, and rank.
using RankFiles = std::map<std::string, std::map<uint64_t, std::string>>;

std::optional<uint64_t> numberOf(std::string_view digits) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return error == std::errc() && end == digits.data() + digits.size() ? std::optional(number) : std::nullopt;
}

Result<RankFiles> rankFilesOf(const std::string &folder) {
  constexpr std::string_view kRank = "rank_", kEnd = ".pt";
  RankFiles found;
  uint64_t count = 0;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    const size_t rank = name.rfind(kRank);
    if (rank == std::string::npos || !name.ends_with(kEnd) || (rank > 0 && name[rank - 1] != '_'))
      continue;
    const size_t first = rank + kRank.size();
    if (const auto number = numberOf(std::string_view(name).substr(first, name.size() - kEnd.size() - first)))
      found[name.substr(0, rank)][*number] = name;
    if (++count > kMaxRankFiles)
      return failed("'" + folder + "' has more than " + std::to_string(kMaxRankFiles) + " files of ranks");
  }
  if (error)
    return failed("cannot list '" + folder + "': " + error.message());
  return found;
}

/// The files of all ranks, in order.
Result<std::vector<std::string>> chosenFiles(const std::string &folder) {
  constexpr std::string_view kModel = "model", kWorld = "world_size_";
  Result<RankFiles> all = rankFilesOf(folder);
  if (!all.ok())
    return all.status();
  if (all->size() > 1)
    std::erase_if(*all, [&](const auto &set) { return !set.first.starts_with(kModel); });
  if (all->size() != 1)
    return failed("'" + folder + "' has " + (all->empty() ? "no" : "several") +
                  " sets of files 'model…_rank_R.pt', expected one");
  const auto &[beginning, files] = *all->begin();
  uint64_t ranks = files.size();
  if (const size_t at = beginning.rfind(kWorld); at != std::string::npos)
    ranks = numberOf(std::string_view(beginning).substr(at + kWorld.size(), beginning.size() - at - kWorld.size() - 1))
                .value_or(ranks);
  std::vector<std::string> names;
  for (const auto &[rank, name] : files) {
    if (rank != names.size() || rank >= ranks)
      break;
    names.push_back(name);
  }
  if (names.size() < ranks)
    return failed("'" + folder + "' has no file '" + beginning + "rank_" + std::to_string(names.size()) +
                  ".pt', expected those of " + std::to_string(ranks) + " ranks");
  if (names.size() < files.size())
    return failed("'" + folder + "' has files of more than " + std::to_string(ranks) + " ranks, which '" + beginning +
                  "' states");
  return names;
}

/// The boxes of a rank's part of a tensor, whose data begins at byte `begin` of a file. An empty optional: the elements
/// of a box are not contiguous.
std::optional<std::vector<StoredChunk>> chunksOf(const LocalPart &part, int64_t itemBytes, const std::string &file,
                                                 uint64_t begin) {
  StoredChunk chunk{{}, part.localShape(), file, begin, 0};
  if (std::find(chunk.lengths.begin(), chunk.lengths.end(), 0) != chunk.lengths.end())
    return std::vector<StoredChunk>();
  size_t cut = part.positions.size(); // the dimension with several intervals
  for (size_t d = 0; d < part.positions.size(); ++d) {
    chunk.offsets.push_back(part.positions[d][0].begin);
    if (part.positions[d].size() == 1)
      continue;
    const bool rows = std::all_of(chunk.lengths.begin(), chunk.lengths.begin() + static_cast<ptrdiff_t>(d),
                                  [](int64_t length) { return length == 1; });
    if (!rows)
      return std::nullopt;
    cut = d;
  }
  std::vector<StoredChunk> chunks;
  for (size_t i = 0; i < (cut < part.positions.size() ? part.positions[cut].size() : 1); ++i) {
    if (cut < part.positions.size()) {
      chunk.offsets[cut] = part.positions[cut][i].begin;
      chunk.lengths[cut] = part.positions[cut][i].length;
    }
    chunk.bytes = static_cast<uint64_t>(itemBytes); // at most the bytes of the local tensor
    for (const int64_t length : chunk.lengths)
      chunk.bytes *= static_cast<uint64_t>(length);
    chunks.push_back(chunk);
    chunk.begin += chunk.bytes;
  }
  return chunks;
}

class TorchReader {
public:
  /// `folder`: the folder of the files; empty if the checkpoint is one file.
  TorchReader(std::string folder, StoredCheckpoint &checkpoint) : folder_(std::move(folder)), checkpoint_(checkpoint) {}

  /// `name`: the file's name in its folder; empty if it is the checkpoint.
  Status add(const std::string &path, const std::string &name) {
    Result<InputFile> file = InputFile::open(path);
    if (!file.ok())
      return file.status();
    checkpoint_.files[name] = file->status();
    compared_.clear();
    budget_.add(file->bytes());
    FilePart archive(*file, 0, file->bytes());
    const Result<std::string_view> begin = archive.read(0, kLegacyMagic.size());
    if (!begin.ok())
      return begin.status();
    if (isLegacy(*begin))
      return failed("'" + path +
                    "' is a file of torch.save in the form before PyTorch 1.6 (_use_new_zipfile_serialization=False), "
                    "expected a zip: load it and save it again without that option");
    const Result<TorchFile> read = readTorchFile(archive, "'" + path + "'", budget_);
    if (!read.ok())
      return read.status();
    for (const auto &[key, tensor] : read->tensors)
      if (Status status = addTensor(key, tensor, "'" + path + "': tensor '" + key + "': ", name, *file); !status.ok())
        return status;
    for (const std::string &key : read->others)
      checkpoint_.objects[key] = {};
    return {};
  }

  /// Whether the parts of each tensor are the whole one.
  Status finish(const std::string &path) const {
    const bool alone = checkpoint_.files.size() == 1;
    for (const auto &[name, tensor] : checkpoint_.tensors)
      if (Status status = checkChunks(name, tensor, "'" + path + "'"); !status.ok())
        return failed(status.message() + (alone ? "; the folder with the files of all ranks has all parts" : ""));
    return {};
  }

private:
  Status addTensor(const std::string &key, const TorchTensor &tensor, const std::string &where, const std::string &name,
                   const InputFile &file) {
    if (!tensor.contiguous())
      return failed(where + "its elements are not contiguous; save tensor.contiguous()");
    const uint64_t begin = tensor.bytes == 0 ? 0 : tensor.begin;
    StoredTensor found{tensor.dtype, tensor.part ? tensor.part->shape : tensor.shape, {}};
    const auto [at, added] = checkpoint_.tensors.try_emplace(key, found);
    if (!added && (at->second.dtype != found.dtype || at->second.shape != found.shape))
      return failed(where + "its dtype or shape differs from that of a lower rank");
    if (!tensor.part) {
      if (added) {
        at->second.chunks = {{std::vector<int64_t>(tensor.shape.size(), 0), tensor.shape, name, begin, tensor.bytes}};
        plain_.insert(key);
        return {};
      }
      const Result<bool> same = plain_.contains(key) ? equals(at->second.chunks[0], file, begin) : Result(false);
      if (!same.ok())
        return failed(where + same.status().message());
      return *same ? Status()
                   : failed(where +
                            "it is not a distributed tensor and differs from that of a lower rank: how it is sharded "
                            "is not stated");
    }
    if (plain_.contains(key))
      return failed(where + "it is a distributed tensor, but not in the file of a lower rank");
    const auto chunks = chunksOf(*tensor.part, schema::itemBytes(tensor.dtype), name, begin);
    if (!chunks)
      return failed(where + "a _StridedShard cuts its elements into pieces that are not contiguous; save it with "
                            "torch.distributed.checkpoint");
    constexpr uint64_t kChunkBytes = 500, kDimensionBytes = 64; // the memory that one takes, also as a replica
    if (!budget_.take(chunks->size() * (kChunkBytes + 2 * key.size() + kDimensionBytes * tensor.shape.size())))
      return failed(where + ReadBudget::problem());
    for (const StoredChunk &chunk : *chunks) {
      std::vector<StoredChunk> &known = at->second.chunks;
      const auto [box, fresh] = boxes_.insert({{key, {chunk.offsets, chunk.lengths}}, known.size()});
      if (fresh)
        known.push_back(chunk);
      else // the replica of the lowest rank is the chunk
        checkpoint_.replicas.push_back({key, known[box->second], chunk});
    }
    return {};
  }

  /// Whether a file has the bytes of a chunk at `begin`.
  Result<bool> equals(const StoredChunk &chunk, const InputFile &file, uint64_t begin) {
    if (!compared_.insert({chunk.begin, begin, chunk.bytes, chunk.file}).second)
      return true; // the same storages have been compared
    if (!budget_.take(0, chunk.bytes))
      return failed(ReadBudget::problem());
    if (!other_ || otherName_ != chunk.file) {
      Result<InputFile> opened = InputFile::open(folder_ + "/" + chunk.file);
      if (!opened.ok())
        return opened.status();
      other_ = std::move(*opened);
      otherName_ = chunk.file;
    }
    constexpr uint64_t kAtOnce = 256 << 10;
    for (uint64_t at = 0; at < chunk.bytes; at += kAtOnce) {
      const uint64_t bytes = std::min(kAtOnce, chunk.bytes - at);
      const Result<std::string> one = other_->read(chunk.begin + at, bytes), here = file.read(begin + at, bytes);
      if (!one.ok() || !here.ok())
        return one.ok() ? here.status() : one.status();
      if (*one != *here)
        return false;
    }
    return true;
  }

  const std::string folder_;
  StoredCheckpoint &checkpoint_;
  ReadBudget budget_;
  std::set<std::string> plain_; // tensors that are not distributed
  std::optional<InputFile> other_;
  std::string otherName_;
  /// Equal bytes of a lower rank's file and of the present one: where each begins, and their number.
  std::set<std::tuple<uint64_t, uint64_t, uint64_t, std::string>> compared_;
  /// The tensor and the box of each chunk, and its number.
  std::map<std::pair<std::string, std::pair<std::vector<int64_t>, std::vector<int64_t>>>, size_t> boxes_;
};

Result<bool> hasTorchFiles(const std::string &folder, bool) {
  if (hasEntry(folder + "/" + kTorchFile))
    return true;
  const Result<RankFiles> files = rankFilesOf(folder);
  return files.ok() && !files->empty();
}

/// Takes, of several sets of files of ranks, that whose names begin with `model`. Errors: a rank without a file; parts
/// of a tensor that are missing or overlap; a tensor that is not distributed and differs between ranks, whose data is
/// compared. Replicas of a distributed tensor are not compared: the part of the lowest rank is taken.
Status readTorchCheckpoint(const std::string &path, StoredCheckpoint &checkpoint) {
  std::error_code error;
  const bool folder = fs::is_directory(path, error);
  TorchReader reader(folder ? path : std::string(), checkpoint);
  std::vector<std::string> names{std::string()};
  if (folder && hasEntry(path + "/" + kTorchFile)) {
    names = {kTorchFile};
  } else if (folder) {
    Result<std::vector<std::string>> files = chosenFiles(path);
    if (!files.ok())
      return files.status();
    names = std::move(*files);
  }
  for (const std::string &name : names)
    if (Status status = reader.add(name.empty() ? path : path + "/" + name, name); !status.ok())
      return status;
  return reader.finish(path);
}

} // namespace

const StoredFormat formats::torch_save = {.folderTexts = {"'model.pt'", "files 'NAME_rank_R.pt'"},
                                          .fileText = "torch.save (a zip)",
                                          .begins = beginsAsTorchFile,
                                          .fits = hasTorchFiles,
                                          .read = readTorchCheckpoint,
                                          .create = [](const std::string &folder, const NewCheckpoint &checkpoint) {
                                            return createTorchFile(folder + "/" + kTorchFile, checkpoint.chunks());
                                          }};

} // namespace reshard::checkpoints
