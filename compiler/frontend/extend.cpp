// SPDX-License-Identifier: Apache-2.0
// `extend: FILE` of a model: loads that file and merges the model's own entries onto it.

#include "compiler/frontend/reading.h"

#include <algorithm>
#include <unordered_map>

namespace reshard {

namespace {

constexpr int kMaxExtensions = 16;

void mergeMaps(std::vector<Node::Entry> &base, std::vector<Node::Entry> own, bool keepNull, Diagnostics &diagnostics);

/// Whether a layout extends the inherited layout of the same name.
bool extendsItself(const Node::Entry &layout) {
  const Node *extend = layout.value.find("extend");
  return extend && extend->kind == Node::Kind::scalar && extend->text == layout.key.text;
}

/// Merges the entries of `own` into `base`. An entry with the key of a base entry replaces it in its position;
/// `null` removes it. `keepNull`: `base` belongs to a layout that extends another one, so a `null` without a base entry
/// is kept, because it may remove an entry of that other layout. One with a base entry replaces it: that other layout
/// may have the entry too, but need not.
void mergeEntries(std::vector<Node::Entry> &base, std::vector<Node::Entry> own, const std::string &what, bool keepNull,
                  Diagnostics &diagnostics) {
  std::unordered_map<std::string, size_t> indices;
  for (size_t i = 0; i < base.size(); ++i)
    indices.emplace(base[i].key.text, i);
  std::vector<bool> removed(base.size());
  for (Node::Entry &entry : own) {
    const auto known = indices.find(entry.key.text);
    if (known == indices.end()) {
      if (entry.value.kind != Node::Kind::null || keepNull)
        base.push_back(std::move(entry));
      else
        diagnostics.error(entry.key.at, "'" + entry.key.text + "' is null, which removes it from " + what + ", but " +
                                            what + " has no '" + entry.key.text + "'");
      continue;
    }
    Node::Entry &inherited = base[known->second];
    const bool optional = keepNull && (what == "'params'" || what == "'place'" || what == "'rename'");
    if (entry.value.kind == Node::Kind::null && optional) {
      inherited = std::move(entry);
      inherited.value.text = "optional";
    } else if (entry.value.kind == Node::Kind::null) {
      removed[known->second] = true;
    } else if (what == "'layouts'" && inherited.value.kind == Node::Kind::map && extendsItself(entry)) {
      std::erase_if(entry.value.entries, [](const Node::Entry &each) { return each.key.text == "extend"; });
      inherited.key = std::move(entry.key);
      const bool more = inherited.value.find("extend") != nullptr;
      mergeMaps(inherited.value.entries, std::move(entry.value.entries), more, diagnostics);
    } else {
      inherited = std::move(entry);
    }
  }
  size_t i = 0;
  std::erase_if(base, [&](const Node::Entry &) { return i < removed.size() ? removed[i++] : false; });
}

/// Merges two maps: values that are maps in both entry by entry; any other value of `own` replaces that of `base`.
void mergeMaps(std::vector<Node::Entry> &base, std::vector<Node::Entry> own, bool keepNull, Diagnostics &diagnostics) {
  for (Node::Entry &entry : own) {
    const auto known = std::find_if(base.begin(), base.end(),
                                    [&](const Node::Entry &each) { return each.key.text == entry.key.text; });
    if (known == base.end())
      base.push_back(std::move(entry));
    else if (known->value.kind == Node::Kind::map && entry.value.kind == Node::Kind::map)
      mergeEntries(known->value.entries, std::move(entry.value.entries), "'" + entry.key.text + "'",
                   keepNull || known->value.text == "same", diagnostics);
    else {
      const bool same = known->key.text == "params" && known->value.kind == Node::Kind::scalar &&
                        known->value.text == "same" && entry.value.kind == Node::Kind::map;
      *known = std::move(entry);
      if (same)
        known->value.text = "same"; // layouts.cpp expands it, because it needs the tensors
    }
  }
}

/// Loads the base file with the files it extends, then merges this model's entries onto it. `depth` counts nested
/// files.
bool extend(Node &model, int depth, Diagnostics &diagnostics) {
  const auto at = std::find_if(model.entries.begin(), model.entries.end(),
                               [](const Node::Entry &entry) { return entry.key.text == "extend"; });
  if (at == model.entries.end())
    return true;
  const Node extended = std::move(at->value);
  model.entries.erase(at);
  if (depth == kMaxExtensions) {
    diagnostics.error(extended.at, "'extend' is nested more than " + std::to_string(kMaxExtensions) + " files deep");
    return false;
  }
  const auto path = readText(extended, "'extend'", diagnostics);
  const std::string folder = folderOf(diagnostics.path(extended.at.file));
  const auto file = path ? readFile(joinPath(folder, *path), extended.at, diagnostics) : std::nullopt;
  const auto base = file ? parseYaml(*file, diagnostics) : nullptr;
  if (!base || !checkMap(*base, "'" + *path + "'", diagnostics) || !extend(*base, depth + 1, diagnostics))
    return false;
  mergeMaps(base->entries, std::move(model.entries), false, diagnostics);
  model.entries = std::move(base->entries);
  return true;
}

} // namespace

bool extendModel(Node &model, Diagnostics &diagnostics) { return extend(model, 0, diagnostics); }

} // namespace reshard
