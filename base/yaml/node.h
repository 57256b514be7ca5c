// SPDX-License-Identifier: Apache-2.0
// The tree of a YAML file, with source locations.
#pragma once

#include "base/yaml/diagnostics.h"

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

constexpr int64_t kMaxFileBytes = 256 << 20; // the longest YAML file, and the longest file that one names

/// One YAML node with its source location. A scalar keeps its text: the reader of a key decides whether it must be a
/// number.
struct Node {
  enum class Kind { null, scalar, sequence, map };
  Kind kind = Kind::null;
  Location at;
  bool quoted = false;     // a quoted scalar is text, never a number, bool or null
  std::string text;        // the text of a scalar; marks of compiler/frontend/extend.cpp: "same" for a map that is a
                           // `params` that extends `params: same`, "optional" for a null that may remove nothing
  std::vector<Node> items; // sequence
  struct Entry;
  std::vector<Entry> entries; // map, in file order; keys are scalars, unique
  /// The value of a key, or nullptr.
  const Node *find(std::string_view key) const;
  Node *find(std::string_view key);
};
struct Node::Entry {
  Node key, value;
};

/// Parses a YAML file, starting at byte `begin` of its first line, into a tree. The language is the YAML 1.2 core
/// schema with restrictions: duplicate keys, anchors, aliases, tags, several documents, invalid UTF-8, non-scalar keys,
/// nesting deeper than 64 and files larger than kMaxFileBytes are errors. Returns nullptr after an error, except after
/// errors that leave the tree complete (a duplicate key, an anchor, a tag): then the caller can find further errors in
/// it.
std::unique_ptr<Node> parseYaml(uint32_t file, Diagnostics &diagnostics, size_t begin = 0);

} // namespace reshard
