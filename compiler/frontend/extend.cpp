// `extend: FILE` of a model: what that file says, then what this one says.

#include "compiler/frontend/reading.h"

#include <algorithm>
#include <unordered_map>

namespace reshard {

namespace {

constexpr int kMostExtensions = 16;

void joinMaps(std::vector<Node::Entry> &base, std::vector<Node::Entry> own, bool removesMore, Diagnostics &diagnostics);

/// A layout that extends the inherited one of its own name.
bool extendsItself(const Node::Entry &layout) {
  const Node *extend = layout.value.find("extend");
  return extend && extend->kind == Node::Kind::scalar && extend->text == layout.key.text;
}

/// The entries of `own` onto those of `base`: an entry of the same key replaces and keeps its place, `null` removes.
/// Where `base` itself `removesMore`, being part of a layout that extends another, `null` stands for that one too.
void join(std::vector<Node::Entry> &base, std::vector<Node::Entry> own, const std::string &what, bool removesMore,
          Diagnostics &diagnostics) {
  std::unordered_map<std::string, size_t> indices;
  for (size_t i = 0; i < base.size(); ++i)
    indices.emplace(base[i].key.text, i);
  std::vector<bool> removed(base.size());
  for (Node::Entry &entry : own) {
    const auto known = indices.find(entry.key.text);
    if (known == indices.end()) {
      if (entry.value.kind != Node::Kind::null || removesMore)
        base.push_back(std::move(entry));
      else
        diagnostics.error(entry.key.at, "'" + entry.key.text + "' is removed from " + what + ", which has none");
      continue;
    }
    Node::Entry &inherited = base[known->second];
    if (entry.value.kind == Node::Kind::null) {
      removed[known->second] = true;
    } else if (what == "'layouts'" && inherited.value.kind == Node::Kind::map && extendsItself(entry)) {
      std::erase_if(entry.value.entries, [](const Node::Entry &each) { return each.key.text == "extend"; });
      inherited.key = std::move(entry.key);
      const bool more = inherited.value.find("extend") != nullptr;
      joinMaps(inherited.value.entries, std::move(entry.value.entries), more, diagnostics);
    } else {
      inherited = std::move(entry);
    }
  }
  size_t i = 0;
  std::erase_if(base, [&](const Node::Entry &) { return i < removed.size() ? removed[i++] : false; });
}

/// Maps of both entry by entry; what else `own` says replaces.
void joinMaps(std::vector<Node::Entry> &base, std::vector<Node::Entry> own, bool removesMore,
              Diagnostics &diagnostics) {
  for (Node::Entry &entry : own) {
    const auto known = std::find_if(base.begin(), base.end(),
                                    [&](const Node::Entry &each) { return each.key.text == entry.key.text; });
    if (known == base.end())
      base.push_back(std::move(entry));
    else if (known->value.kind == Node::Kind::map && entry.value.kind == Node::Kind::map)
      join(known->value.entries, std::move(entry.value.entries), "'" + entry.key.text + "'",
           removesMore || known->value.text == "same", diagnostics);
    else {
      const bool same = known->key.text == "params" && known->value.kind == Node::Kind::scalar &&
                        known->value.text == "same" && entry.value.kind == Node::Kind::map;
      *known = std::move(entry);
      if (same)
        known->value.text = "same"; // layouts.cpp, which knows the tensors, spells them out
    }
  }
}

/// The base is whole, with what it extends in turn, before this one's entries go onto it.
bool extend(Node &model, int depth, Diagnostics &diagnostics) {
  const auto at = std::find_if(model.entries.begin(), model.entries.end(),
                               [](const Node::Entry &entry) { return entry.key.text == "extend"; });
  if (at == model.entries.end())
    return true;
  const Node extended = std::move(at->value);
  model.entries.erase(at);
  if (depth == kMostExtensions) {
    diagnostics.error(extended.at, "models extended more than " + std::to_string(kMostExtensions) + " deep");
    return false;
  }
  const auto path = readText(extended, "'extend'", diagnostics);
  const std::string folder = folderOf(diagnostics.path(extended.at.file));
  const auto file = path ? readFile(joinPath(folder, *path), extended.at, diagnostics) : std::nullopt;
  const auto base = file ? parseYaml(*file, diagnostics) : nullptr;
  if (!base || !checkMap(*base, "'" + *path + "'", diagnostics) || !extend(*base, depth + 1, diagnostics))
    return false;
  joinMaps(base->entries, std::move(model.entries), false, diagnostics);
  model.entries = std::move(base->entries);
  return true;
}

} // namespace

bool extendModel(Node &model, Diagnostics &diagnostics) { return extend(model, 0, diagnostics); }

} // namespace reshard
