// `extend: FILE` of a model: what that file says, then what this one says.

#include "compiler/reading.h"

#include <algorithm>

namespace reshard {

namespace {

constexpr int kMostExtensions = 16;

/// The entries of `own` onto those of `base`: an entry of the same key replaces and keeps its place, `null` removes.
void join(std::vector<Node::Entry> &base, std::vector<Node::Entry> own, const std::string &what,
          Diagnostics &diagnostics) {
  for (Node::Entry &entry : own) {
    const auto known = std::find_if(base.begin(), base.end(),
                                    [&](const Node::Entry &each) { return each.key.text == entry.key.text; });
    if (entry.value.kind != Node::Kind::null) {
      if (known != base.end())
        *known = std::move(entry);
      else
        base.push_back(std::move(entry));
    } else if (known != base.end()) {
      base.erase(known);
    } else {
      diagnostics.error(entry.key.at, "'" + entry.key.text + "' is removed from " + what + ", which has none");
    }
  }
}

} // namespace

bool extendModel(Node &model, Diagnostics &diagnostics) {
  for (int depth = 0;; ++depth) {
    const auto at = std::find_if(model.entries.begin(), model.entries.end(),
                                 [](const Node::Entry &entry) { return entry.key.text == "extend"; });
    if (model.kind != Node::Kind::map || at == model.entries.end())
      return true;
    const Node extend = std::move(at->value);
    model.entries.erase(at);
    if (depth == kMostExtensions) {
      diagnostics.error(extend.at, "models extended more than " + std::to_string(kMostExtensions) + " deep");
      return false;
    }
    const auto path = readText(extend, "'extend'", diagnostics);
    const auto file = path ? readFile(joinPath(folderOf(diagnostics.path(extend.at.file)), *path), extend.at, diagnostics)
                           : std::nullopt;
    const auto base = file ? parseYaml(*file, diagnostics) : nullptr;
    if (!base || !checkMap(*base, "'" + *path + "'", diagnostics))
      return false;
    std::vector<Node::Entry> entries = std::move(base->entries);
    for (Node::Entry &own : model.entries) {
      const auto known = std::find_if(entries.begin(), entries.end(),
                                      [&](const Node::Entry &each) { return each.key.text == own.key.text; });
      if (known == entries.end())
        entries.push_back(std::move(own));
      else if (known->value.kind == Node::Kind::map && own.value.kind == Node::Kind::map) // let, index, tensors, …
        join(known->value.entries, std::move(own.value.entries), "'" + own.key.text + "'", diagnostics);
      else
        *known = std::move(own);
    }
    model.entries = std::move(entries);
  }
}

} // namespace reshard
