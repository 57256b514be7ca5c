// SPDX-License-Identifier: Apache-2.0
// `--set a.b=c`: changes a value in the YAML tree of the job before the tree is read.

#include "compiler/frontend/reading.h"

namespace reshard {

namespace {

/// The first key of a path: the longest key of the map that is a prefix of the path, because keys such as tensor names
/// may contain dots; if there is none, the text before the first dot.
std::string firstKey(const Node &map, const std::string &path) {
  std::string best;
  for (const auto &[key, value] : map.entries)
    if (key.text.size() > best.size() && path.starts_with(key.text) &&
        (path.size() == key.text.size() || path[key.text.size()] == '.'))
      best = key.text;
  return best.empty() ? path.substr(0, path.find('.')) : best;
}

} // namespace

void setOverride(Node &job, const std::string &assignment, const Include &include, Diagnostics &diagnostics) {
  const uint32_t file = diagnostics.addFile("--set", assignment);
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0) {
    diagnostics.error({file, 1, 1}, "expected KEY=VALUE, found '" + assignment + "'");
    return;
  }
  const auto value = parseYaml(file, diagnostics, equals + 1);
  if (!value)
    return;
  const std::string path = assignment.substr(0, equals);
  Node *node = &job;
  for (size_t begin = 0; begin <= path.size();) {
    const Location at{file, 1, static_cast<uint32_t>(begin + 1)};
    const std::string before = path.substr(0, begin == 0 ? 0 : begin - 1);
    if (node->kind == Node::Kind::scalar && !include(*node, before))
      return;
    if (node->kind == Node::Kind::null && begin > 0)
      node->kind = Node::Kind::map;
    if (node->kind != Node::Kind::map) {
      diagnostics.error(at, "expected a map at " + (before.empty() ? "the top of the job" : "'" + before + "'") +
                                ", found " + describe(*node));
      return;
    }
    const std::string key = firstKey(*node, path.substr(begin));
    if (key.empty()) {
      diagnostics.error(at, "expected a key, found '" + path.substr(begin) + "'");
      return;
    }
    Node *next = node->find(key);
    if (!next) {
      Node name{Node::Kind::scalar, at, false, key, {}, {}};
      next = &node->entries.emplace_back(Node::Entry{std::move(name), {Node::Kind::null, at, false, {}, {}, {}}}).value;
    }
    node = next;
    begin += key.size() + 1;
  }
  *node = std::move(*value);
}

} // namespace reshard
