// SPDX-License-Identifier: Apache-2.0
// Chooses the objects and the model's files that targets receive, refuses those that they cannot hold, and copies
// files.
#include "tools/run/carried.h"

#include "base/hash.h"
#include "base/input_file.h"
#include "base/text.h"
#include "tools/run/memory.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

namespace reshard::tools {

using namespace checkpoints;

namespace fs = std::filesystem;

namespace {

constexpr size_t kShown = 8; // names in an error

/// Why the plan's targets cannot all hold an object of this name; empty if they can.
std::string refusalOf(const Plan &plan, const std::string &name, const StoredObject &object) {
  if (object.file.empty())
    return "it is a part of a larger pickle and has no bytes of its own";
  const auto &endpoints = *plan.manifest().endpoints();
  for (uint32_t e = 1; e < endpoints.size(); ++e)
    if (const schema::Endpoint &target = *endpoints.Get(e); !target.checkpoint())
      return "the files of ranks hold tensors only";
    else if (const auto refusal = storedFormat(schema::formatOf(target)).refusal; !refusal)
      return std::string("format '") + reshard::name(schema::formatOf(target)) + "' holds tensors only";
    else if (const char *why = refusal(name))
      return why;
  return {};
}

/// The names of the tensors of all targets.
std::set<std::string> tensorNames(const Plan &plan) {
  std::set<std::string> names;
  for (uint32_t e = 1; e < plan.manifest().endpoints()->size(); ++e)
    for (TensorSpec &tensor : specs(plan, e, 0)) // rank 0 has all tensors of a checkpoint, or a chunk of each
      names.insert(std::move(tensor.name));
  return names;
}

/// What `--leave` may have meant instead of objects: the params of a target.
std::string tensorsLike(const std::string &glob, const std::set<std::string> &tensors) {
  const auto first =
      std::find_if(tensors.begin(), tensors.end(), [&](const std::string &name) { return matchesGlob(glob, name); });
  return first == tensors.end() ? ""
                                : ", but the tensor '" + *first +
                                      "': --leave leaves out objects; 'ignore' in the target of the job leaves out "
                                      "tensors";
}

/// Adds a name and its bytes.
void addNamed(Digester &digester, const std::string &name, std::string_view data) {
  const uint64_t bytes = data.size();
  digester.add(name.c_str(), name.size() + 1);
  digester.add(&bytes, sizeof bytes);
  digester.add(data.data(), bytes);
}

constexpr uint64_t kMaxFileBytes = uint64_t{256} << 20; // a tokenizer has about 30 MiB
constexpr const char *kWeights[] = {".safetensors", ".index.json", ".bin",  ".pt",  ".pth", ".ckpt",   ".gguf",
                                    ".h5",          ".msgpack",    ".onnx", ".npz", ".npy", ".distcp", ".pkl"};
/// The files of Megatron-Core beside `.metadata` that describe its weights.
constexpr const char *kMegatronFiles[] = {"metadata.json", "integrity.json"};

bool isWeights(const std::string &name, bool megatron) {
  return std::any_of(std::begin(kWeights), std::end(kWeights), [&](const char *end) { return name.ends_with(end); }) ||
         (megatron &&
          std::find(std::begin(kMegatronFiles), std::end(kMegatronFiles), name) != std::end(kMegatronFiles));
}

bool isPlain(const std::string &name) {
  return std::all_of(name.begin(), name.end(), [](char c) { return c >= ' ' && c < 127; });
}

} // namespace

Status CarriedObjects::map(const std::string &path, const std::string &name, const StoredObject &object,
                           std::string renamed) {
  auto file = files_.find(object.file);
  if (file == files_.end()) {
    Result<MappedFile> opened = MappedFile::open(path + "/" + object.file);
    if (!opened.ok())
      return opened.status();
    file = files_.emplace(object.file, std::move(*opened)).first;
  }
  if (object.begin > file->second.bytes() || object.bytes > file->second.bytes() - object.begin)
    return failed("'" + path + "/" + object.file + "': object '" + name + "': the file became shorter");
  objects_.push_back(
      {std::move(renamed), {reinterpret_cast<const char *>(file->second.data()) + object.begin, object.bytes}});
  return {};
}

Status CarriedObjects::choose(const Plan &plan, const std::string &path,
                              const std::map<std::string, StoredObject> &objects, const ObjectRules &rules,
                              std::set<std::string> &left) {
  std::vector<std::pair<std::string, std::string>> refused; // name and reason
  std::set<std::string> names;
  const std::set<std::string> tensors =
      objects.empty() && rules.leave.empty() ? std::set<std::string>() : tensorNames(plan);
  for (const auto &[name, object] : objects) {
    if (std::any_of(rules.leave.begin(), rules.leave.end(),
                    [&name = name](const std::string &glob) { return matchesGlob(glob, name); })) {
      left.insert(name);
      continue;
    }
    const std::string target = rules.renames(name);
    if (const std::string refusal = refusalOf(plan, target, object); !refusal.empty()) {
      refused.emplace_back(name, refusal);
      continue;
    }
    if (!names.insert(target).second)
      return failed("checkpoint '" + path + "': two objects get the name '" + target + "'");
    if (tensors.contains(target))
      return failed("checkpoint '" + path + "': object '" + name + "' gets the name '" + target +
                    "', which a tensor of the target has; --rename-objects=OLD=NEW (of reshard-convert: --rename) "
                    "renames it, --leave=GLOB leaves it out");
    if (Status status = map(path, name, object, target); !status.ok())
      return status;
  }
  for (const std::string &glob : rules.leave)
    if (std::none_of(objects.begin(), objects.end(),
                     [&](const auto &object) { return matchesGlob(glob, object.first); }))
      return failed("'" + glob + "' in --leave matches no object of '" + path + "'" + tensorsLike(glob, tensors));
  if (rules.allowExtra)
    for (const auto &[name, refusal] : refused)
      left.insert(name);
  if (refused.empty() || rules.allowExtra)
    return {};
  std::string shown;
  for (size_t i = 0; i < std::min(refused.size(), kShown); ++i)
    shown += (i ? ", '" : "'") + refused[i].first + "'";
  if (refused.size() > kShown)
    shown += " and " + std::to_string(refused.size() - kShown) + " more";
  return failed("checkpoint '" + path + "' has objects that the target cannot hold: " + shown + " (" +
                refused[0].second + "); --allow=extra leaves them out, --leave=GLOB those with such names");
}

std::string CarriedObjects::digest() const {
  Digester digester;
  for (const ObjectSpec &object : objects_)
    addNamed(digester, object.name, object.data);
  return hexadecimal(digester.digest());
}

Result<ModelFiles> findModelFiles(const std::string &folder) {
  ModelFiles found{folder, {}, 0};
  std::error_code error;
  const bool megatron = fs::exists(folder + "/.metadata", error);
  fs::directory_iterator at(folder, error);
  for (; !error && at != fs::directory_iterator(); at.increment(error)) {
    const std::string name = at->path().filename();
    std::error_code lost;
    const fs::file_status status = at->status(lost); // follows links
    if (name.starts_with('.') || isWeights(name, megatron) || fs::is_directory(status)) {
      ++found.skipped;
      continue;
    }
    if (!isPlain(name))
      return invalid("'" + at->path().string() +
                     "' has a name with characters other than printable ASCII, expected files such as config.json");
    const uint64_t bytes = fs::is_regular_file(status) ? fs::file_size(at->path(), lost) : 0;
    if (lost || !fs::is_regular_file(status))
      return invalid("'" + at->path().string() + "' " +
                     (status.type() == fs::file_type::not_found ? "is a broken link" : "is not a regular file") +
                     ", expected files to copy");
    if (bytes > kMaxFileBytes)
      return invalid("'" + at->path().string() + "' has " + std::to_string(bytes) +
                     " bytes, expected small files other than weights, of at most " + std::to_string(kMaxFileBytes) +
                     " bytes");
    found.names.push_back(name);
  }
  if (error)
    return invalid("cannot read '" + folder + "': " + error.message());
  std::sort(found.names.begin(), found.names.end());
  if (!std::binary_search(found.names.begin(), found.names.end(), "config.json"))
    return invalid("'" + folder + "' has no 'config.json', expected the folder of a model");
  return found;
}

Result<std::string> digestOf(const ModelFiles &files) {
  Digester digester;
  for (const std::string &name : files.names) {
    const Result<std::string> text = readWhole(files.folder + "/" + name, kMaxFileBytes);
    if (!text.ok())
      return invalid(text.status().message());
    addNamed(digester, name, *text);
  }
  return hexadecimal(digester.digest());
}

Status copyModelFiles(const ModelFiles &files, const std::string &folder) {
  for (const std::string &name : files.names) {
    const std::string target = folder + "/" + name;
    std::error_code error(EINTR, std::generic_category()), ignored;
    while (error == std::errc::interrupted) { // then copy_file has found no file there; it may have made one
      error.clear();
      fs::copy_file(files.folder + "/" + name, target, fs::copy_options::none, error);
      if (error == std::errc::interrupted)
        fs::remove(target, ignored);
    }
    if (error)
      return failed("cannot copy '" + files.folder + "/" + name + "' to '" + folder + "': " + error.message());
  }
  return {};
}

} // namespace reshard::tools
