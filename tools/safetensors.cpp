#include "tools/safetensors.h"

#include "tools/common.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace reshard::tools {

using Json = nlohmann::ordered_json;

namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000; // as in the safetensors package
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 50;

std::string systemError(const char *what, const std::string &path) {
  return "cannot " + std::string(what) + " '" + path + "': " + std::strerror(errno);
}

/// Maps a whole file for reading. Empty files map to nothing.
std::string mapFile(const std::string &path, std::byte *&data, uint64_t &bytes, bool writable = false) {
  const int file = ::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK); // a pipe shall not make us wait
  if (file < 0)
    return systemError("open", path);
  struct stat status {};
  std::string error;
  if (::fstat(file, &status) != 0) {
    error = systemError("read", path);
  } else if (!S_ISREG(status.st_mode)) {
    error = "'" + path + "' is no regular file";
  } else {
    bytes = static_cast<uint64_t>(status.st_size);
    data = nullptr;
    if (bytes > 0) {
      void *map = ::mmap(nullptr, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, file, 0);
      if (map == MAP_FAILED)
        error = systemError("map", path);
      else
        data = static_cast<std::byte *>(map);
    }
  }
  ::close(file);
  return error;
}

/// A pass over JSON that finds what the tree would hide: nlohmann keeps the last of two equal keys, and nests without a bound.
struct KeyCounter : nlohmann::json_sax<Json> {
  std::vector<std::map<std::string, int>> open;
  std::string repeated;
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t &) override { return true; }
  bool string(string_t &) override { return true; }
  bool binary(binary_t &) override { return true; }
  bool start_object(std::size_t) override { return open.size() < 16 && (open.emplace_back(), true); }
  bool key(string_t &name) override {
    if (open.back()[name]++ > 0 && repeated.empty())
      repeated = name;
    return true;
  }
  bool end_object() override { return open.pop_back(), true; }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t, const std::string &, const nlohmann::detail::exception &) override { return false; }
};

std::string readObject(const std::string &path, std::string_view text, Json &json) {
  auto refuse = [&](const std::string &why) { return "'" + path + "': damaged header: " + why; };
  KeyCounter counter;
  if (!Json::sax_parse(text, &counter))
    return refuse("it is no JSON object");
  if (!counter.repeated.empty())
    return refuse("'" + counter.repeated + "' is there twice");
  json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  return json.is_object() ? std::string() : refuse("it is no JSON object");
}

std::string readEntry(const std::string &path, const std::string &name, const Json &entry, std::byte *data, uint64_t dataBytes,
                      TensorView &view, uint64_t &begin) {
  auto refuse = [&](const std::string &why) { return "'" + path + "': tensor '" + name + "': " + why; };
  if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() || !entry.contains("shape") ||
      !entry["shape"].is_array() || !entry.contains("data_offsets") || !entry["data_offsets"].is_array() ||
      entry["data_offsets"].size() != 2)
    return refuse("expected dtype, shape and data_offsets");
  const std::string type = entry["dtype"];
  const auto dtype = schema::dtypeFromSafetensors(type);
  if (!dtype)
    return refuse("unknown dtype '" + type + "'");
  uint64_t bytes = static_cast<uint64_t>(schema::itemBytes(*dtype));
  for (const Json &length : entry["shape"]) {
    if (!length.is_number_unsigned() || length.get<uint64_t>() > kMaxFileBytes)
      return refuse("a length of its shape is no number or too large");
    view.shape.push_back(length.get<int64_t>());
    if (__builtin_mul_overflow(bytes, length.get<uint64_t>(), &bytes))
      return refuse("its shape is too large");
  }
  if (!entry["data_offsets"][0].is_number_unsigned() || !entry["data_offsets"][1].is_number_unsigned())
    return refuse("its data_offsets are no numbers");
  begin = entry["data_offsets"][0].get<uint64_t>();
  const uint64_t end = entry["data_offsets"][1].get<uint64_t>();
  if (begin > end || end > dataBytes)
    return refuse("its data_offsets lie outside the file");
  if (end - begin != bytes)
    return refuse("its shape and dtype are " + std::to_string(bytes) + " bytes, its data_offsets " + std::to_string(end - begin));
  view.file = path;
  view.dtype = *dtype;
  view.bytes = static_cast<int64_t>(bytes);
  view.data = data + begin;
  return {};
}

} // namespace

void MappedFile::release() const { ::madvise(data_, bytes_, MADV_DONTNEED); }

MappedFile::~MappedFile() {
  if (data_)
    ::munmap(data_, bytes_);
}

std::string rankFile(uint32_t rank) {
  char name[40];
  std::snprintf(name, sizeof name, "rank-%05u.safetensors", rank);
  return name;
}

std::string readSafetensors(const std::string &path, Checkpoint &checkpoint, bool writable) {
  std::byte *data = nullptr;
  uint64_t bytes = 0;
  if (std::string error = mapFile(path, data, bytes, writable); !error.empty())
    return error;
  checkpoint.files.push_back(std::make_unique<MappedFile>(data, bytes));
  if (bytes < 8)
    return "'" + path + "': truncated: " + std::to_string(bytes) + " bytes are no safetensors file";
  uint64_t headerBytes = 0;
  std::memcpy(&headerBytes, data, 8);
  if (headerBytes > kMaxHeaderBytes || headerBytes > bytes - 8)
    return "'" + path + "': a header of " + std::to_string(headerBytes) + " bytes, but the file has " + std::to_string(bytes);
  Json json;
  if (std::string error = readObject(path, {reinterpret_cast<const char *>(data) + 8, headerBytes}, json); !error.empty())
    return error;
  const uint64_t dataBytes = bytes - 8 - headerBytes;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (const auto &[name, entry] : json.items()) {
    if (name == "__metadata__")
      continue;
    TensorView view;
    uint64_t begin = 0;
    if (std::string error = readEntry(path, name, entry, data + 8 + headerBytes, dataBytes, view, begin); !error.empty())
      return error;
    ranges.emplace_back(begin, begin + static_cast<uint64_t>(view.bytes));
    if (const auto [at, added] = checkpoint.tensors.try_emplace(name, std::move(view)); !added)
      return "'" + path + "': tensor '" + name + "' is in '" + at->second.file + "' as well";
  }
  std::sort(ranges.begin(), ranges.end());
  uint64_t next = 0;
  for (const auto &[begin, end] : ranges) {
    if (begin != next)
      return "'" + path + "': damaged header: the data has a gap or an overlap at byte " + std::to_string(std::min(begin, next));
    next = end;
  }
  if (next != dataBytes)
    return "'" + path + "': damaged: the file has " + std::to_string(dataBytes) + " bytes of data, its tensors " + std::to_string(next);
  return {};
}

std::string readCheckpoint(const std::string &folder, Checkpoint &checkpoint, bool writable) {
  const std::string index = folder + "/model.safetensors.index.json";
  if (::access(index.c_str(), F_OK) != 0)
    return readSafetensors(folder + "/model.safetensors", checkpoint, writable);
  std::byte *data = nullptr;
  uint64_t bytes = 0;
  if (std::string error = mapFile(index, data, bytes); !error.empty())
    return error;
  const MappedFile unmap(data, bytes);
  Json json;
  if (bytes > kMaxHeaderBytes)
    return "'" + index + "': " + std::to_string(bytes) + " bytes are too many";
  if (std::string error = readObject(index, {reinterpret_cast<const char *>(data), bytes}, json); !error.empty())
    return error;
  if (!json.contains("weight_map") || !json["weight_map"].is_object())
    return "'" + index + "': no weight_map";
  std::map<std::string, size_t> files; // and how many tensors each should have
  for (const auto &[name, file] : json["weight_map"].items()) {
    if (!file.is_string() || file.get<std::string>().empty() || file.get<std::string>().find('/') != std::string::npos || file.get<std::string>()[0] == '.')
      return "'" + index + "': tensor '" + name + "' is in no file of this folder";
    ++files[file.get<std::string>()];
  }
  for (const auto &[file, count] : files) {
    const size_t before = checkpoint.tensors.size();
    if (std::string error = readSafetensors(folder + "/" + file, checkpoint, writable); !error.empty())
      return error;
    if (checkpoint.tensors.size() - before != count)
      return "'" + folder + "/" + file + "' has " + std::to_string(checkpoint.tensors.size() - before) + " tensors, the index says " + std::to_string(count);
  }
  for (const auto &[name, file] : json["weight_map"].items())
    if (const auto at = checkpoint.tensors.find(name); at == checkpoint.tensors.end() || at->second.file != folder + "/" + file.get<std::string>())
      return "'" + index + "': tensor '" + name + "' is not in '" + file.get<std::string>() + "'";
  return {};
}

std::string createSafetensors(const std::string &path, const std::vector<TensorSpec> &unordered,
                              Checkpoint &checkpoint) {
  // Large elements first, as the safetensors package writes them: then every tensor is aligned to its elements.
  std::vector<TensorSpec> tensors = unordered;
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorSpec &a, const TensorSpec &b) {
    return schema::itemBytes(a.dtype) > schema::itemBytes(b.dtype);
  });
  Json json = Json::object();
  uint64_t next = 0;
  for (const TensorSpec &tensor : tensors) {
    json[tensor.name] = {{"dtype", schema::safetensorsName(tensor.dtype)},
                         {"shape", tensor.shape},
                         {"data_offsets", {next, next + static_cast<uint64_t>(tensor.bytes)}}};
    next += static_cast<uint64_t>(tensor.bytes);
  }
  std::string header = json.dump();
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t headerBytes = header.size(), total = 8 + headerBytes + next;
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0)
    return systemError("create", path);
  std::string error;
  void *map = MAP_FAILED;
  if (const int code = ::posix_fallocate(file, 0, static_cast<off_t>(total)); code != 0) // a full disk is an error now, not a signal later
    error = "cannot reserve " + std::to_string(total) + " bytes for '" + path + "': " + std::strerror(code);
  else if ((map = ::mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)) == MAP_FAILED)
    error = systemError("map", path);
  ::close(file);
  if (!error.empty())
    return error;
  auto *data = static_cast<std::byte *>(map);
  checkpoint.files.push_back(std::make_unique<MappedFile>(data, total));
  std::memcpy(data, &headerBytes, 8);
  std::memcpy(data + 8, header.data(), header.size());
  std::byte *at = data + 8 + headerBytes;
  for (const TensorSpec &tensor : tensors) {
    checkpoint.tensors[tensor.name] = {path, tensor.dtype, tensor.shape, at, tensor.bytes};
    at += tensor.bytes;
  }
  return {};
}

std::string createCheckpoint(const std::string &folder, const std::vector<TensorSpec> &tensors, int64_t fileBytes, Checkpoint &checkpoint) {
  std::vector<std::vector<TensorSpec>> files(1);
  int64_t filled = 0, total = 0;
  for (const TensorSpec &tensor : tensors) {
    if (filled > 0 && filled + tensor.bytes > fileBytes) {
      files.emplace_back();
      filled = 0;
    }
    files.back().push_back(tensor);
    filled += tensor.bytes;
    total += tensor.bytes;
  }
  if (files.size() == 1)
    return createSafetensors(folder + "/model.safetensors", files[0], checkpoint);
  Json map = Json::object();
  for (size_t i = 0; i < files.size(); ++i) {
    char name[64];
    std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, files.size());
    for (const TensorSpec &tensor : files[i])
      map[tensor.name] = name;
    if (std::string error = createSafetensors(folder + "/" + name, files[i], checkpoint); !error.empty())
      return error;
  }
  const Json json = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  return writeFile(folder + "/model.safetensors.index.json", json.dump(2) + "\n");
}

} // namespace reshard::tools
