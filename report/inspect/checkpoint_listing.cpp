// SPDX-License-Identifier: Apache-2.0
// Lists the tensors and objects of a checkpoint as text or JSON, and tells a plan from a checkpoint.
#include "report/inspect/inspection.h"

#include "base/text.h"
#include "checkpoints/stored_checkpoint.h"
#include "command/common.h"
#include "command/terminal.h"

#include <nlohmann/json.hpp>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <utility>

namespace reshard::report {

using namespace checkpoints;
using namespace command;

using Json = nlohmann::ordered_json;

namespace {

std::string listOf(const std::vector<int64_t> &numbers) {
  std::string text;
  for (const int64_t number : numbers)
    text += (text.empty() ? "" : ", ") + std::to_string(number);
  return "[" + text + "]";
}

std::string jsonText(const Json &value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

/// Prints an object or array whose members are texts, one on each line.
class JsonLines {
public:
  /// `indent`: of the members. `open`, `close`: the brackets.
  JsonLines(int indent, char open, char close) : indent_(indent), close_(close) { std::putchar(open); }
  /// Begins a member.
  void begin() { std::printf("%s\n%*s", std::exchange(any_, true) ? "," : "", indent_, ""); }
  ~JsonLines() { std::printf("%s%*s%c", any_ ? "\n" : "", any_ ? indent_ - 2 : 0, "", close_); }
  JsonLines(const JsonLines &) = delete;
  JsonLines &operator=(const JsonLines &) = delete;

private:
  int indent_;
  char close_;
  bool any_ = false;
};

/// Prints one chunk at a time: a JSON value of all takes many times the memory of their description.
void printJson(const StoredCheckpoint &checkpoint) {
  std::printf("{\n  \"format\": %s,\n  \"version\": %s,\n  \"tensors\": ", jsonText(titleOf(checkpoint.format)).c_str(),
              jsonText(checkpoint.version).c_str());
  {
    JsonLines tensors(4, '{', '}');
    for (const auto &[name, tensor] : checkpoint.tensors) {
      tensors.begin();
      std::printf("%s: {\"dtype\": %s, \"shape\": %s, \"chunks\": ", jsonText(name).c_str(),
                  jsonText(schema::dtypeName(tensor.dtype)).c_str(), jsonText(tensor.shape).c_str());
      {
        JsonLines chunks(6, '[', ']');
        for (const StoredChunk &chunk : tensor.chunks) {
          chunks.begin();
          std::fputs(jsonText({{"offsets", chunk.offsets},
                               {"lengths", chunk.lengths},
                               {"file", chunk.file},
                               {"begin", chunk.begin},
                               {"bytes", chunk.bytes}})
                         .c_str(),
                     stdout);
        }
      }
      std::putchar('}');
    }
  }
  std::printf(",\n  \"objects\": ");
  {
    JsonLines objects(4, '{', '}');
    for (const auto &[name, object] : checkpoint.objects) {
      objects.begin();
      std::printf("%s: %s", jsonText(name).c_str(),
                  jsonText({{"file", object.file}, {"begin", object.begin}, {"bytes", object.bytes}}).c_str());
    }
  }
  std::printf("\n}\n");
}

void printListing(const std::string &path, const StoredCheckpoint &checkpoint, bool chunks) {
  size_t parts = 0;
  uint64_t bytes = 0;
  std::set<std::string> files;
  for (const auto &[name, tensor] : checkpoint.tensors)
    for (const StoredChunk &chunk : tensor.chunks) {
      ++parts;
      bytes += chunk.bytes;
      files.insert(chunk.file);
    }
  std::printf("%s: %s%s%s: %s in %s, %s, %s; %s\n", printable(path).c_str(), titleOf(checkpoint.format),
              checkpoint.version.empty() ? "" : " ", printable(checkpoint.version).c_str(),
              counted(checkpoint.tensors.size(), "tensor").c_str(), counted(parts, "chunk").c_str(),
              counted(files.size(), "file").c_str(), humanBytes(static_cast<double>(bytes)).c_str(),
              counted(checkpoint.objects.size(), "object").c_str());
  for (const auto &[name, tensor] : checkpoint.tensors) {
    std::printf("  %s  %s %s  %s\n", printable(name).c_str(), schema::dtypeName(tensor.dtype),
                listOf(tensor.shape).c_str(), counted(tensor.chunks.size(), "chunk").c_str());
    for (const StoredChunk &chunk : tensor.chunks)
      if (chunks)
        std::printf("    %s + %s  %s at byte %llu, %llu bytes\n", listOf(chunk.offsets).c_str(),
                    listOf(chunk.lengths).c_str(), printable(chunk.file.empty() ? path : chunk.file).c_str(),
                    static_cast<unsigned long long>(chunk.begin), static_cast<unsigned long long>(chunk.bytes));
  }
  for (const auto &[name, object] : checkpoint.objects)
    if (object.file.empty())
      std::printf("  object %s\n", printable(name).c_str());
    else
      std::printf("  object %s  %s at byte %llu, %llu bytes\n", printable(name).c_str(), printable(object.file).c_str(),
                  static_cast<unsigned long long>(object.begin), static_cast<unsigned long long>(object.bytes));
}

} // namespace

FileKind fileKindOf(const std::string &path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error))
    return FileKind::checkpoint;
  if (!std::filesystem::is_regular_file(path, error)) // opening a FIFO would block
    return FileKind::plan;
  constexpr size_t kBytes = 16; // enough for every format
  std::string begin(kBytes, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(begin.data(), kBytes);
  if (!file || begin.starts_with("RESHARD\n"))
    return FileKind::plan;
  return formatOfBytes(begin) ? FileKind::checkpoint : FileKind::unknown;
}

void listFormats() {
  Json list = Json::array();
  for (const std::string &name : storageFormatTexts(&StorageFormatRow::name)) {
    const StorageFormatRow &row = rowOf(*storageFormatNamed(name));
    list.push_back({{"name", name}, {"title", row.title}, {"chunks", row.chunks}, {"split", row.split}});
  }
  std::printf("%s\n", list.dump().c_str());
}

Status inspectCheckpoint(const std::string &path, const std::string &glob, bool json) {
  Result<StoredCheckpoint> checkpoint = readStoredCheckpoint(path);
  if (!checkpoint.ok())
    return checkpoint.status();
  printNotes(checkpoint->notes);
  if (!glob.empty()) {
    const auto other = [&](const auto &entry) { return !matchesGlob(glob, entry.first); };
    std::erase_if(checkpoint->tensors, other);
    std::erase_if(checkpoint->objects, other);
    if (checkpoint->tensors.empty() && checkpoint->objects.empty())
      return negative("no tensor and no object matches '" + glob + "'");
  }
  if (json)
    printJson(*checkpoint);
  else
    printListing(path, *checkpoint, !glob.empty());
  return {};
}

} // namespace reshard::report
