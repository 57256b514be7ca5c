// `where: {variable: values}` of a tensor or a param: values, ranges, or the places of a kind in a pattern.

#include "compiler/config.h"

#include <algorithm>
#include <set>

namespace reshard {

namespace {

/// Ranges sorted and joined where they touch.
std::vector<Range> joined(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range &a, const Range &b) { return a.first < b.first; });
  std::vector<Range> result;
  for (const Range &range : ranges) {
    if (!result.empty() && range.first <= result.back().last + 1)
      result.back().last = std::max(result.back().last, range.last);
    else
      result.push_back(range);
  }
  return result;
}

/// `{pattern: P, is: K}`.
std::vector<Range> readKinds(const Node &node, const std::string &variable, int64_t size, const Model &model,
                             Diagnostics &diagnostics) {
  Fields fields(node, "'where' of '" + variable + "'", diagnostics);
  const Node *pattern = fields.require("pattern"), *is = fields.require("is");
  fields.finish();
  if (!pattern || !is)
    return {};
  const auto kinds = readPattern(*pattern, model, diagnostics);
  std::vector<std::pair<std::string, Location>> wanted;
  bool ok = kinds.has_value();
  for (const Node *item : valueOrItems(*is)) {
    const auto kind = readText(*item, "'is'", diagnostics);
    ok = ok && kind;
    if (ok && (kinds->array || is->kind == Node::Kind::sequence))
      wanted.emplace_back(*kind, item->at);
    for (size_t i = 0; ok && !kinds->array && is->kind != Node::Kind::sequence && i < kind->size();
         ++i) // every character is a kind
      wanted.emplace_back(std::string(1, (*kind)[i]), inside(*item, i));
  }
  if (!ok)
    return {};
  std::vector<std::string> places;
  for (const auto &stage : kinds->stages)
    places.insert(places.end(), stage.begin(), stage.end());
  if (size != kUnknownValue && static_cast<int64_t>(places.size()) != size) {
    diagnostics.error(pattern->at, "the pattern has " + std::to_string(places.size()) + " places, expected " +
                                       std::to_string(size) + ", one for each value of '" + variable + "'");
    return {};
  }
  const std::set<std::string> known(places.begin(), places.end());
  // Where one of several keys counts, kinds are listed in the words of each.
  const bool any =
      std::any_of(wanted.begin(), wanted.end(), [&](const auto &kind) { return known.contains(kind.first); });
  for (const auto &[kind, at] : wanted)
    if (!places.empty() && !known.contains(kind) && !(kinds->keys > 1 && any)) {
      const std::string message =
          "kind '" + kind + "' stands nowhere in the pattern" + suggestion(kind, {known.begin(), known.end()});
      if (kinds->keys > 0) // one model may be for several configs
        diagnostics.warning(at, message);
      else
        diagnostics.error(at, message);
    }
  std::vector<Range> ranges;
  for (size_t i = 0; i < places.size(); ++i)
    if (std::any_of(wanted.begin(), wanted.end(), [&](const auto &kind) { return kind.first == places[i]; }))
      ranges.push_back({static_cast<int64_t>(i), static_cast<int64_t>(i)});
  return ranges;
}

} // namespace

std::optional<LayerPattern> readPattern(const Node &node, const Model &model, Diagnostics &diagnostics) {
  const auto text = readText(node, "'pattern'", diagnostics);
  if (!text)
    return std::nullopt;
  LayerPattern pattern;
  std::string letters = *text;
  if (text->starts_with('$')) {
    const auto keys = readKeys(node, diagnostics);
    if (keys && keys->rest != std::string::npos)
      diagnostics.error(inside(node, keys->rest),
                        "expected a key of the config after 'or', found '" + text->substr(keys->rest) + "'");
    const auto found =
        keys && keys->rest == std::string::npos ? model.config->texts(keys->names, node.at) : std::nullopt;
    if (!found)
      return std::nullopt;
    pattern.keys = keys->names.size();
    if (found->array && found->items.size() > kMaxIndexValues) {
      diagnostics.error(node.at, "a pattern of " + std::to_string(found->items.size()) + " places, expected at most " +
                                     std::to_string(kMaxIndexValues));
      return std::nullopt;
    }
    if (found->array) {
      pattern.array = true;
      pattern.stages = {found->items};
      return pattern;
    }
    letters = found->items[0];
  }
  if (letters.size() > 2 * kMaxIndexValues) {
    diagnostics.error(node.at, "a pattern of " + std::to_string(letters.size()) + " characters, expected at most " +
                                   std::to_string(2 * kMaxIndexValues));
    return std::nullopt;
  }
  pattern.stages.emplace_back();
  for (char c : letters.substr(0, letters.find('/'))) {
    if (c == '|')
      pattern.stages.emplace_back();
    else if (c != ' ')
      pattern.stages.back().emplace_back(1, c);
  }
  return pattern;
}

std::map<std::string, std::vector<Range>> readWhere(const Node &where, const std::vector<std::string> &variables,
                                                    const std::string &title, const Model &model,
                                                    Diagnostics &diagnostics) {
  std::map<std::string, std::vector<Range>> result;
  if (!checkMap(where, "'where'", diagnostics))
    return result;
  for (const auto &[variable, values] : where.entries) {
    if (!checkVariable(variable.text, variable.at, model.variables, diagnostics))
      continue;
    if (std::find(variables.begin(), variables.end(), variable.text) == variables.end()) {
      diagnostics.error(variable.at, "'where' of '" + variable.text + "', which the name of " + title + " lacks");
      continue;
    }
    const auto known = std::find_if(model.variables.begin(), model.variables.end(),
                                    [&](const ir::IndexVariable &each) { return each.name == variable.text; });
    std::vector<Range> ranges;
    if (values.kind == Node::Kind::map)
      ranges = readKinds(values, variable.text, known->size, model, diagnostics);
    else
      for (const Node *item : valueOrItems(values))
        if (const auto range = readRange(*item, "'" + variable.text + "'", model.let, known->size, diagnostics))
          if (range->first <= range->last)
            ranges.push_back(*range);
    result[variable.text] = joined(std::move(ranges));
  }
  return result;
}

} // namespace reshard
