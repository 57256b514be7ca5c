// SPDX-License-Identifier: Apache-2.0
// Each reader reports what it found and what it expected, at the position in the YAML text. Fields also reports keys
// that no reader has asked for.
#include "base/yaml/fields.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <sys/stat.h>
#include <unistd.h>

namespace reshard {

namespace {

bool isControl(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }
bool isDigit(char c) { return c >= '0' && c <= '9'; }

} // namespace

// ------------------------------------------------------------------------------------------------------ errors

Location locationIn(const Node &node, size_t offset) {
  Location at = node.at;
  at.column += static_cast<uint32_t>(offset + node.quoted);
  return at;
}

std::string describe(const Node &node) {
  constexpr size_t kShown = 60;
  switch (node.kind) {
  case Node::Kind::null:
    return "nothing";
  case Node::Kind::sequence:
    return "a list";
  case Node::Kind::map:
    return "a map";
  case Node::Kind::scalar:
    break;
  }
  const std::string shown = node.text.size() > kShown ? node.text.substr(0, kShown) + "…" : node.text;
  return (node.quoted ? "quoted '" : "'") + shown + "'";
}

void refuse(const Node &node, const std::string &wanted, const std::string &what, Diagnostics &diagnostics) {
  // YAML parses an unquoted `{layer}` as a map with one key and no value.
  const bool braces =
      node.kind == Node::Kind::map && node.entries.size() == 1 && node.entries[0].value.kind == Node::Kind::null;
  diagnostics.error(node.at, "expected " + wanted + " for " + what + ", found " + describe(node) +
                                 (braces ? "; a name with braces must be quoted in flow style" : ""));
}

void refuseUnsupported(Location at, std::string_view what, Diagnostics &diagnostics) {
  diagnostics.error(at, "'" + std::string(what) + "' is not supported in this version");
}

// ------------------------------------------------------------------------------------------------- maps, lists

Fields::Fields(const Node &map, std::string what, Diagnostics &diagnostics)
    : map_(map), what_(std::move(what)), diagnostics_(diagnostics) {
  checkMap(map, what_, diagnostics);
}

const Node *Fields::find(std::string_view key) {
  known_.emplace_back(key);
  return map_.find(key);
}

const Node *Fields::require(std::string_view key) {
  const Node *value = find(key);
  if (!value && isMap())
    diagnostics_.error(map_.at, "missing key '" + std::string(key) + "' in " + what_);
  return value;
}

void Fields::unsupported(std::initializer_list<std::string_view> keys) {
  unsupported_.insert(unsupported_.end(), keys.begin(), keys.end());
}

void Fields::finish() {
  for (const auto &[key, value] : map_.entries) {
    if (std::find(known_.begin(), known_.end(), key.text) != known_.end())
      continue;
    if (std::find(unsupported_.begin(), unsupported_.end(), key.text) != unsupported_.end())
      refuseUnsupported(key.at, key.text, diagnostics_);
    else
      diagnostics_.error(key.at, "unknown key " + describe(key) + " in " + what_ +
                                     (diagnostics_.hasRoom() ? suggestion(key.text, known_) : ""));
  }
}

bool checkMap(const Node &node, const std::string &what, Diagnostics &diagnostics) {
  if (node.kind != Node::Kind::map)
    refuse(node, "a map", what, diagnostics);
  return node.kind == Node::Kind::map;
}

std::vector<const Node *> valueOrItems(const Node &node) {
  std::vector<const Node *> result;
  result.reserve(node.items.size() + 1);
  for (const Node &item : node.items)
    result.push_back(&item);
  if (node.kind != Node::Kind::sequence)
    result.push_back(&node);
  return result;
}

// ----------------------------------------------------------------------------------------------------- scalars

std::optional<std::string> readText(const Node &node, const std::string &what, Diagnostics &diagnostics) {
  if (node.kind != Node::Kind::scalar || node.text.empty()) {
    refuse(node, "text", what, diagnostics);
    return std::nullopt;
  }
  if (std::any_of(node.text.begin(), node.text.end(), isControl)) {
    diagnostics.error(node.at, "control character in " + what);
    return std::nullopt;
  }
  return node.text;
}

std::string interval(int64_t least, int64_t most) {
  if (most == INT64_MAX)
    return "at least " + std::to_string(least);
  return least == most ? std::to_string(least) : std::to_string(least) + " to " + std::to_string(most);
}

std::optional<int64_t> readInteger(const Node &node, const std::string &what, int64_t least, int64_t most,
                                   Diagnostics &diagnostics) {
  std::string_view digits = node.text;
  const bool negative = digits.starts_with('-');
  digits.remove_prefix(negative);
  if (node.kind != Node::Kind::scalar || node.quoted || digits.empty() ||
      !std::all_of(digits.begin(), digits.end(), isDigit)) {
    refuse(node, "an integer", what, diagnostics);
    return std::nullopt;
  }
  if (digits.size() > 1 && digits[0] == '0') {
    refuse(node, "an integer without leading zeros", what, diagnostics);
    return std::nullopt;
  }
  int64_t value = 0;
  bool overflow = false;
  for (char c : digits)
    overflow = overflow || __builtin_mul_overflow(value, 10, &value) || __builtin_sub_overflow(value, c - '0', &value);
  overflow = overflow || (!negative && __builtin_sub_overflow(0, value, &value));
  if (overflow || value < least || value > most) {
    refuse(node, interval(least, most), what, diagnostics);
    return std::nullopt;
  }
  return value;
}

// ------------------------------------------------------------------------------------------------------- files

Result<int> openInput(const std::string &path) {
  const bool passedByCaller = path.starts_with("/dev/") || path.starts_with("/proc/");
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | (passedByCaller ? 0 : O_NONBLOCK));
  if (file < 0)
    return failed(std::strerror(errno));
  struct stat status{};
  const int error = ::fstat(file, &status) != 0 ? errno : 0;
  if (error == 0 && (passedByCaller || S_ISREG(status.st_mode) ||
                     S_ISDIR(status.st_mode))) // reading a folder fails with a clear error
    return file;
  ::close(file);
  return failed(error != 0 ? std::strerror(error) : "it is not a regular file");
}

std::optional<uint32_t> readFile(const std::string &path, Location at, Diagnostics &diagnostics) {
  auto fail = [&](const std::string &why) {
    diagnostics.error(at, "cannot read '" + path + "': " + why);
    return std::nullopt;
  };
  if (const std::string *provided = diagnostics.provided(path))
    return diagnostics.addFile(path, *provided, at.file);
  const Result<int> descriptor = openInput(path);
  if (!descriptor.ok())
    return fail(descriptor.status().message());
  const std::unique_ptr<FILE, int (*)(FILE *)> file(::fdopen(*descriptor, "rb"), std::fclose);
  std::string text;
  char buffer[1 << 16];
  for (size_t bytes = sizeof(buffer); bytes == sizeof(buffer);) { // fewer at the end or after an error
    bytes = std::fread(buffer, 1, sizeof(buffer), file.get());
    text.append(buffer, bytes);
    if (text.size() > static_cast<size_t>(kMaxFileBytes))
      return fail("it has more than " + std::to_string(kMaxFileBytes) + " bytes");
  }
  if (std::ferror(file.get()))
    return fail(std::strerror(errno));
  return diagnostics.addFile(path, std::move(text), at.file);
}

std::string folderOf(const std::string &path) {
  const size_t slash = path.find_last_of('/');
  return slash == std::string::npos ? "" : path.substr(0, std::max<size_t>(slash, 1));
}

std::string joinPath(const std::string &folder, const std::string &path) {
  if (folder.empty() || path.starts_with('/'))
    return path;
  return folder.ends_with('/') ? folder + path : folder + "/" + path;
}

} // namespace reshard
