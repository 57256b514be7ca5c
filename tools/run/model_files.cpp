// SPDX-License-Identifier: Apache-2.0
#include "tools/run/model_files.h"

#include "base/hash.h"
#include "base/input_file.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>

namespace reshard::tools {

namespace fs = std::filesystem;

namespace {

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
    const uint64_t bytes = text->size();
    digester.add(name.c_str(), name.size() + 1);
    digester.add(&bytes, sizeof bytes);
    digester.add(text->data(), bytes);
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
