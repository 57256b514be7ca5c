// SPDX-License-Identifier: Apache-2.0
// Readers of YAML files: typed values of Nodes, maps with a fixed set of keys, and files.
// Each function reports its own errors and returns nullopt (or false, or an empty result) after one. `what` names the
// value in error messages: "'world'".
#pragma once

#include "base/status.h"
#include "base/yaml/node.h"

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

/// A map with a fixed set of keys. find() and require() add a key to the set; finish() reports all other keys.
class Fields {
public:
  /// `what`: the map in error messages: "the job", "tensor 'x'". A node that is not a map is an error.
  Fields(const Node &map, std::string what, Diagnostics &diagnostics);
  /// False if the node is not a map.
  bool isMap() const { return map_.kind == Node::Kind::map; }
  /// The value of a key, or nullptr.
  const Node *find(std::string_view key);
  /// The same; a missing key is an error.
  const Node *require(std::string_view key);
  /// Keys that are reserved for later versions; finish() reports them as unsupported.
  void unsupported(std::initializer_list<std::string_view> keys);
  /// Reports unknown keys with the nearest known one. Call it after all keys were read.
  void finish();

private:
  const Node &map_;
  std::string what_;
  Diagnostics &diagnostics_;
  std::vector<std::string> known_;
  std::vector<std::string_view> unsupported_;
};

/// The location of the character at `offset` of a scalar.
Location locationIn(const Node &node, size_t offset);
/// The node in error messages: "a map", "a list", "nothing", "'text'".
std::string describe(const Node &node);
/// Reports "expected WANTED for WHAT, found …", with a hint if an unquoted name with braces was parsed as a map.
void refuse(const Node &node, const std::string &wanted, const std::string &what, Diagnostics &diagnostics);
/// Reports "'x' is not supported in this version".
void refuseUnsupported(Location at, std::string_view what, Diagnostics &diagnostics);

/// Reports an error and returns false if the node is not a map.
bool checkMap(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// The items of a list, or the node itself.
std::vector<const Node *> valueOrItems(const Node &node);

/// Text that is not empty and has no control characters.
std::optional<std::string> readText(const Node &node, const std::string &what, Diagnostics &diagnostics);
/// A decimal integer in [least, most].
std::optional<int64_t> readInteger(const Node &node, const std::string &what, int64_t least, int64_t most,
                                   Diagnostics &diagnostics);
/// "at least 3", "3", "3 to 5" in error messages. `most`: INT64_MAX if there is no limit.
std::string interval(int64_t least, int64_t most);

/// Opens a file for reading and returns its descriptor. A named pipe is refused, because opening it blocks until it has
/// a writer; a pipe passed by the caller (/dev/stdin, or /dev/fd/63 of a shell's <(…)) is read.
Result<int> openInput(const std::string &path);

/// Reads a file and adds its text to `diagnostics`; returns its number there. An error is reported at `at`.
std::optional<uint32_t> readFile(const std::string &path, Location at, Diagnostics &diagnostics);
/// "a/b" of "a/b/c.yaml"; empty if the path has no folder.
std::string folderOf(const std::string &path);
/// Resolves a path that is written in a file in `folder`.
std::string joinPath(const std::string &folder, const std::string &path);

} // namespace reshard
