// SPDX-License-Identifier: Apache-2.0
// Megatron-Core's torch_dist: a checkpoint of torch.distributed.checkpoint with the format and its version in
// `metadata.json`, the common state in `common.pt`, and with `verify_integrity` the hashes of all files in
// `integrity.json`.
#include "base/atomic_file.h"
#include "base/hash.h"
#include "base/input_file.h"
#include "base/libraries.h"
#include "base/parallel.h"
#include "base/work_deadline.h"
#include "checkpoints/object_reader.h"
#include "checkpoints/stored_format.h"
#include "checkpoints/torch_archive.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace reshard::checkpoints {

namespace fs = std::filesystem;

namespace {

constexpr uint64_t kMaxText = 100'000'000;
constexpr const char *kManifest = "integrity.json";
constexpr const char *kFormat = "metadata.json";
/// The file of the common state: what is neither a tensor nor an object of one rank. It is an object of this name.
constexpr const char *kCommon = "common.pt";

/// Reads a JSON object of a file.
Status readObject(const std::string &path, ObjectReader &reader) {
  const Result<std::string> text = readWhole(path, kMaxText);
  return text.ok() ? reader.read(path, *text, "damaged") : text.status();
}

/// What metadata.json states, and what is expected.
constexpr std::pair<const char *, const char *> kBackends[] = {{"sharded_backend", "torch_dist"},
                                                               {"sharded_backend_version", "1"},
                                                               {"common_backend", "torch"},
                                                               {"common_backend_version", "1"}};

/// metadata.json: {sharded_backend: text, sharded_backend_version: number, common_backend: …}. An empty optional: a
/// value that is neither a text nor an unsigned integer.
class FormatReader : public ObjectReader {
public:
  std::map<std::string, std::optional<std::string>> values;

private:
  void onText(const std::string &text) override { add(text); }
  void onNumber(uint64_t number) override { add(std::to_string(number)); }
  void onOther() override { add({}); }
  void onBegin(bool) override { add({}); }
  void add(std::optional<std::string> value) {
    const auto is = [&](const auto &backend) { return keyAt(0) == backend.first; };
    if (depth() == 0 && std::any_of(std::begin(kBackends), std::end(kBackends), is))
      values[keyAt(0)] = std::move(value);
  }
};

bool isHash(const std::string &text) {
  return text.size() == 2 * kSha256Bytes && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

/// integrity.json: {algorithm: "sha256", files: {name: hexadecimal digits}}.
class ManifestReader : public ObjectReader {
public:
  std::string algorithm = "sha256"; // if it is not stated, as in Megatron-Core
  bool found = false;               // "files"
  std::map<std::string, std::string> files;

private:
  void onText(const std::string &text) override { add(text); }
  void onNumber(uint64_t) override { add({}); }
  void onOther() override { add({}); }
  void onBegin(bool array) override {
    found = found || (depth() == 0 && !array && keyAt(0) == "files");
    add({});
  }
  void add(const std::string &text) {
    if (depth() == 0 && keyAt(0) == "algorithm")
      algorithm = text;
    else if (depth() == 1 && keyAt(0) == "files")
      addFile(keyAt(1), text);
  }
  void addFile(const std::string &name, const std::string &hash) {
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos)
      refuse("invalid file name '" + name + "', expected a file in the same folder");
    else if (!isHash(hash))
      refuse("file '" + name + "': expected 64 lower-case hexadecimal digits");
    else
      files[name] = hash;
  }
};

/// The hashes by file name; an empty optional if the folder has no integrity.json.
Result<std::optional<std::map<std::string, std::string>>> readManifest(const std::string &folder) {
  const std::string path = folder + "/" + kManifest;
  if (!hasEntry(path))
    return std::optional<std::map<std::string, std::string>>();
  ManifestReader manifest;
  if (Status status = readObject(path, manifest); !status.ok())
    return status;
  if (manifest.algorithm != "sha256")
    return failed("'" + path + "': the algorithm is '" + manifest.algorithm + "', expected 'sha256'");
  if (!manifest.found)
    return failed("'" + path + "': 'files' is missing");
  return std::optional(std::move(manifest.files));
}

/// The SHA-256 hash of a regular file, in hexadecimal digits. The file is not mapped, so that it does not count as
/// resident memory.
Result<std::string> hashOfFile(const std::string &path) {
  constexpr uint64_t kPiece = 1 << 20;
  const Result<InputFile> file = InputFile::open(path);
  if (!file.ok())
    return file.status();
  std::vector<char> piece(kPiece);
  Sha256 sha;
  for (uint64_t at = 0; at < file->bytes(); at += kPiece) {
    const uint64_t bytes = std::min(kPiece, file->bytes() - at);
    if (Status status = file->read(at, piece.data(), bytes); !status.ok())
      return status;
    sha.add(piece.data(), bytes);
    WorkDeadline::spend(static_cast<int64_t>(bytes));
  }
  const auto hash = sha.finish();
  return hash.ok() ? Result<std::string>(hexadecimal(*hash)) : Result<std::string>(hash.status());
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

Result<bool> hasFormat(const std::string &folder, bool) {
  return hasEntry(folder + "/.metadata") && hasEntry(folder + "/" + kFormat);
}

Status readMegatron(const std::string &folder, StoredCheckpoint &checkpoint) {
  if (Status status = checkMegatronFormat(folder); !status.ok())
    return status;
  if (Status status = readDcp(folder, checkpoint); !status.ok())
    return status;
  if (const std::string path = folder + "/" + kCommon; hasEntry(path)) {
    const Result<InputFile> common = InputFile::open(path);
    if (!common.ok())
      return common.status();
    checkpoint.objects[kCommon] = {kCommon, 0, common->bytes()};
  }
  return checkIntegrity(folder, checkpoint);
}

/// The common state is empty if it is not among the objects.
Status createMegatron(const std::string &folder, const NewCheckpoint &checkpoint) {
  constexpr std::string_view kCommonObject = "common_state/shard_0_1"; // in place of `common.pt`, from 0.18 on
  const std::vector<ObjectSpec> &objects = checkpoint.objects;
  std::vector<ObjectSpec> sharded = objects;
  std::erase_if(sharded, [](const ObjectSpec &object) { return object.name == kCommon; });
  if (Status status = createDcp(folder, {checkpoint.tensors, sharded, checkpoint.fileBytes}); !status.ok())
    return status;
  const std::string common = folder + "/" + kCommon;
  const auto named = [&](std::string_view name) {
    return std::find_if(objects.begin(), objects.end(), [&](const ObjectSpec &object) { return object.name == name; });
  };
  Status status;
  if (const auto given = named(kCommon); given != objects.end())
    status = writeFile(common, std::string(given->data));
  else if (named(kCommonObject) == objects.end())
    status = createTorchFile(common, {});
  if (!status.ok())
    return status;
  return writeFile(folder + "/" + kFormat, R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1, )"
                                           R"("common_backend": "torch", "common_backend_version": 1})");
}

const char *refusalOfObject(std::string_view name) {
  return name == kCommon || isShardedObject(name) ? nullptr
                                                  : "Megatron-Core's objects have names such as 'key/shard_0_1'";
}

} // namespace

const StoredFormat formats::megatron = {
    .fits = hasFormat, .read = readMegatron, .create = createMegatron, .refusal = refusalOfObject};

Status checkMegatronFormat(const std::string &folder) {
  const std::string path = folder + "/" + kFormat;
  FormatReader reader;
  if (Status status = readObject(path, reader); !status.ok())
    return status;
  if (!reader.values.contains("sharded_backend"))
    return failed("'" + path + "': 'sharded_backend' is missing, expected a file of Megatron-Core with 'torch_dist'");
  for (const auto &[key, expected] : kBackends)
    if (const auto found = reader.values.find(key); found != reader.values.end() && found->second != expected)
      return failed("'" + path + "': unknown " + key +
                    (found->second ? " '" + *found->second + "'" : std::string(", neither a text nor a number")) +
                    ", expected '" + expected + "'");
  return {};
}

Status checkIntegrity(const std::string &folder, const StoredCheckpoint &checkpoint) {
  const auto manifest = readManifest(folder);
  if (!manifest.ok())
    return manifest.status();
  if (!*manifest)
    return {};
  const std::string path = folder + "/" + kManifest;
  for (const auto &[name, hash] : **manifest)
    if (std::error_code error; !fs::is_regular_file(folder + "/" + name, error))
      return failed("'" + path + "' names the file '" + name + "', which is missing or no regular file");
  std::set<std::string> used{".metadata"};
  if (checkpoint.format == StorageFormat::megatron)
    used.insert(kFormat);
  for (const auto &[name, tensor] : checkpoint.tensors)
    for (const StoredChunk &chunk : tensor.chunks)
      used.insert(chunk.file);
  for (const auto &[name, object] : checkpoint.objects)
    used.insert(object.file);
  for (const std::string &file : used)
    if (!file.empty() && !(*manifest)->contains(file))
      return failed("'" + path + "' has no hash of '" + file + "', a file of the checkpoint");
  return {};
}

Result<size_t> verifyIntegrity(const std::string &folder, unsigned threads,
                               const std::function<void(double)> &progress) {
  const auto manifest = readManifest(folder);
  if (!manifest.ok())
    return manifest.status();
  if (!*manifest)
    return size_t{0};
  const std::vector<std::pair<std::string, std::string>> files((*manifest)->begin(), (*manifest)->end());
  std::vector<Status> results(files.size());
  parallelFor(
      files.size(), threads,
      [&](size_t i) {
        const std::string path = folder + "/" + files[i].first;
        const Result<std::string> hash = hashOfFile(path);
        if (!hash.ok())
          results[i] = hash.status();
        else if (*hash != files[i].second)
          results[i] = failed("'" + path + "': its SHA-256 hash is " + *hash + ", but '" + kManifest + "' states " +
                              files[i].second + ": one of the two files has changed since they were saved");
      },
      progress);
  for (const Status &status : results)
    if (!status.ok())
      return status;
  return files.size();
}

} // namespace reshard::checkpoints
