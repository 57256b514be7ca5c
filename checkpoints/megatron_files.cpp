// SPDX-License-Identifier: Apache-2.0
// Reads the two JSON files, and compares the hash of each file of the folder with that of `integrity.json`.
#include "checkpoints/readers.h"

#include "base/hash.h"
#include "base/input_file.h"
#include "base/libraries.h"
#include "base/parallel.h"
#include "base/system_error.h"
#include "base/work_deadline.h"
#include "checkpoints/object_reader.h"

#include <algorithm>
#include <fcntl.h>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace reshard::checkpoints {

namespace fs = std::filesystem;

namespace {

constexpr uint64_t kMaxText = 100'000'000;
constexpr const char *kManifest = "integrity.json";
constexpr const char *kFormat = "metadata.json";

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
  constexpr size_t kPiece = 1 << 20;
  const int file = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); });
  struct stat status{};
  if (file < 0)
    return systemError("open", path);
  const auto close = [&](Status result) {
    ::close(file);
    return result;
  };
  if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode))
    return close(failed("'" + path + "' is not a regular file"));
  std::vector<char> piece(kPiece);
  Sha256 sha;
  for (;;) {
    const ssize_t bytes = uninterrupted([&] { return ::read(file, piece.data(), piece.size()); });
    if (bytes < 0)
      return close(systemError("read", path));
    if (bytes == 0)
      break;
    sha.add(piece.data(), static_cast<size_t>(bytes));
    WorkDeadline::spend(bytes);
  }
  ::close(file);
  const auto hash = sha.finish();
  return hash.ok() ? Result<std::string>(hexadecimal(*hash)) : Result<std::string>(hash.status());
}

} // namespace

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
