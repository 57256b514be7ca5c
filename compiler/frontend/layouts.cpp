// SPDX-License-Identifier: Apache-2.0
// Reads one layout of a model: axes, place, chunks, switches, params, rename, shard.

#include "compiler/frontend/reading.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace reshard {

namespace {

constexpr int kMaxPackDepth = 16;

class ParamReader {
public:
  ParamReader(const Model &model, Diagnostics &diagnostics) : model_(model), diagnostics_(diagnostics) {}

  ParamDeclaration read(const Node &written, const Node &node) {
    const Node name = withValues(written, model_);
    ParamDeclaration param;
    param.name = name.text;
    param.at = name.at;
    readText(name, "the name of a param", diagnostics_);
    const auto placeholders = readPlaceholders(name, model_.variables, true, diagnostics_);
    const std::string title = "param '" + name.text + "'";
    Fields fields(node, title, diagnostics_);
    if (!fields.isMap())
      return param;
    param.pack = readPack(node, fields, title, /*holds=*/true);
    if (param.pack.kind == Pack::Kind::pieces) {
      readPieces(*fields.find("pieces"), model_, param, diagnostics_);
      param.hasOwnSharding = true;
      for (const char *key : {"shard", "pad", "cut"})
        if (const Node *other = fields.find(key))
          diagnostics_.error(other->at, title + " has 'pieces' and '" + key +
                                            "', expected one of them: pieces state every position of every rank");
    }
    if (const Node *stack = fields.find("stack"))
      readStacks(*stack, param);
    if (const Node *pad = fields.find("pad"); pad && checkMap(*pad, "'pad'", diagnostics_))
      for (const auto &[key, multiple] : pad->entries) {
        const auto d = readDimensionKey(key, diagnostics_);
        auto expression = readExpression(multiple, "'pad'", diagnostics_);
        if (d && expression)
          param.pad.emplace(*d, std::move(*expression));
      }
    if (const Node *shard = fields.find("shard")) {
      param.shard = readShard(*shard, diagnostics_);
      param.hasOwnSharding = true;
    }
    if (const Node *cut = fields.find("cut")) {
      if (cut->kind != Node::Kind::scalar || cut->text != "joined")
        refuse(*cut, "'joined'", "'cut'", diagnostics_);
      param.joined = true;
    }
    if (const Node *at = fields.find("at"))
      param.presence = readAxisRules(*at, "'at'", diagnostics_);
    if (const Node *where = fields.find("where")) {
      std::vector<std::string> variables;
      if (placeholders)
        for (const Placeholder &placeholder : *placeholders)
          variables.push_back(placeholder.variable);
      for (const StackRule &stack : param.stacks)
        variables.push_back(stack.variable);
      param.where = readWhere(*where, variables, title, model_, diagnostics_);
    }
    if (const Node *refresh = fields.find("refresh"))
      param.refresh = readIdentifier(*refresh, "'refresh'", diagnostics_).value_or("");
    if (const Node *when = fields.find("when"))
      param.when = readExpression(*when, "'when'", diagnostics_);
    param.form = readStorageRule(fields, false, diagnostics_);
    if (const Node *transform = fields.find("transform"))
      readTransform(*transform, param.form);
    fields.finish();
    return param;
  }

private:
  void readTransform(const Node &node, StorageRule &form) {
    if (const auto name = readIdentifier(node, "'transform'", diagnostics_))
      form.transform.emplace(*name, node.at);
    auto exclude = [&](const std::string &key, Location at) {
      diagnostics_.error(at, key + " cannot be combined with 'transform', which converts from and to the dtype of the "
                                   "tensors; remove one of them");
    };
    if (form.dtype)
      exclude("'dtype'", form.dtype->second);
    if (form.quantize && form.quantize->format)
      exclude("'quantize'", form.quantize->at);
  }

  /// Reads the content of a param: exactly one of `holds`, `concat`, `interleave`, `flat` and `pieces`. For an entry of
  /// a pack
  /// (`holds` is false), `of` replaces `holds`, and `flat` is not allowed. `depth`: nesting of packs.
  Pack readPack(const Node &node, Fields &fields, const std::string &title, bool holds, int depth = 0) {
    Pack pack;
    pack.at = node.at;
    if (depth > kMaxPackDepth) {
      diagnostics_.error(node.at, "packs nested more than " + std::to_string(kMaxPackDepth) + " deep");
      return pack;
    }
    const Node *tensor = fields.find(holds ? "holds" : "of"), *concat = fields.find("concat"),
               *interleave = fields.find("interleave"), *flat = holds ? fields.find("flat") : nullptr,
               *pieces = holds ? fields.find("pieces") : nullptr;
    const Node *permute = fields.find("permute");
    const char *name = holds ? "'holds'" : "'of'";
    const int count =
        (tensor != nullptr) + (concat != nullptr) + (interleave != nullptr) + (flat != nullptr) + (pieces != nullptr);
    if (count != 1) {
      diagnostics_.error(count == 0 ? node.at : keyOf(node, {tensor, concat, interleave, flat, pieces}),
                         title + " has " + (count == 0 ? "none" : std::to_string(count)) + " of " + name +
                             (holds ? ", 'concat', 'interleave', 'flat' and 'pieces', expected exactly one"
                                    : ", 'concat' and 'interleave', expected exactly one"));
      return pack;
    }
    if (permute && !tensor)
      diagnostics_.error(permute->at, std::string("'permute' does not apply to a pack; write it next to ") + name +
                                          ", or on a tensor in the pack: {permute: […], of: NAME}");
    if (tensor) {
      pack.at = tensor->at;
      pack.tensor = readText(withValues(*tensor, model_), name, diagnostics_).value_or("");
      if (permute)
        readPermute(*permute, pack, diagnostics_);
    } else if (pieces) {
      pack.kind = Pack::Kind::pieces; // readPieces() reads its entries
      pack.at = pieces->at;
    } else {
      const Node &value = concat ? *concat : interleave ? *interleave : *flat;
      pack.kind = concat ? Pack::Kind::concat : interleave ? Pack::Kind::interleave : Pack::Kind::flat;
      pack.at = value.at;
      readEntries(value, pack, depth);
    }
    return pack;
  }

  /// The location of the second key of `node` whose value is in `some`.
  static Location keyOf(const Node &node, std::initializer_list<const Node *> some) {
    Location at = node.at;
    int seen = 0;
    for (const auto &[key, value] : node.entries)
      if (std::find(some.begin(), some.end(), &value) != some.end() && ++seen == 2)
        at = key.at;
    return at;
  }

  /// Reads the entries of a pack: `[a, b]` or `{of: [a, b], dim: d, groups: g, align: m}`.
  void readEntries(const Node &value, Pack &pack, int depth) {
    const bool interleave = pack.kind == Pack::Kind::interleave, flat = pack.kind == Pack::Kind::flat;
    const std::string what = interleave ? "'interleave'" : flat ? "'flat'" : "'concat'";
    const Node *entries = &value;
    if (interleave || value.kind == Node::Kind::map) {
      Fields fields(value, what, diagnostics_);
      if (!fields.isMap())
        return;
      if (const Node *dimension = flat ? nullptr : fields.find("dim"))
        pack.dimension = readInteger(*dimension, "'dim'", 0, kMaxDimensions - 1, diagnostics_).value_or(0);
      if (const Node *groups = interleave ? fields.require("groups") : nullptr)
        pack.groups = readExpression(*groups, "'groups'", diagnostics_);
      if (const Node *align = flat ? fields.find("align") : nullptr)
        pack.align = readExpression(*align, "'align'", diagnostics_);
      entries = fields.require("of");
      fields.finish();
    }
    if (!entries)
      return;
    if (entries->kind != Node::Kind::sequence)
      return refuse(*entries, "a list of tensors", what, diagnostics_);
    if (entries->items.empty())
      diagnostics_.error(entries->at, what + " is an empty list, expected at least one tensor");
    for (const Node &entry : entries->items) {
      if (entry.kind == Node::Kind::map) {
        Fields fields(entry, "an entry of " + what, diagnostics_);
        pack.of.push_back(readPack(entry, fields, "an entry of " + what, /*holds=*/false, depth + 1));
        if (const Node *when = flat ? fields.find("when") : nullptr)
          pack.of.back().when = readExpression(*when, "'when'", diagnostics_);
        fields.finish();
      } else {
        Pack &tensor = pack.of.emplace_back();
        tensor.at = entry.at;
        tensor.tensor = readText(withValues(entry, model_), "an entry of " + what, diagnostics_).value_or("");
      }
    }
  }

  /// Reads `stack`: an index variable, or a list of them.
  void readStacks(const Node &node, ParamDeclaration &param) {
    if (node.kind != Node::Kind::sequence)
      return readStack(node, 0, param);
    if (node.items.empty() || node.items.size() > kMaxDimensions)
      return refuse(node, "1 to " + std::to_string(kMaxDimensions) + " index variables", "'stack'", diagnostics_);
    for (size_t i = 0; i < node.items.size(); ++i)
      readStack(node.items[i], static_cast<int64_t>(i), param);
  }

  /// Reads an entry of `stack`. `dimension`: the dimension that it means if it has no `dim`.
  void readStack(const Node &node, int64_t dimension, ParamDeclaration &param) {
    const Node *index = &node;
    if (node.kind == Node::Kind::map) {
      Fields fields(node, "'stack'", diagnostics_);
      index = fields.require("index");
      if (const Node *stated = fields.find("dim"))
        dimension = readInteger(*stated, "'dim'", 0, kMaxDimensions - 1, diagnostics_).value_or(dimension);
      fields.finish();
    }
    const auto name = index ? readText(*index, "'stack'", diagnostics_) : std::nullopt;
    if (!name || !checkVariable(*name, index->at, model_.variables, diagnostics_))
      return;
    for (const StackRule &other : param.stacks) {
      if (other.variable == *name)
        return diagnostics_.error(index->at, "'stack' lists '" + *name + "' twice");
      if (other.dimension == dimension)
        return diagnostics_.error(index->at, "'stack' makes dimension " + std::to_string(dimension) + " of '" +
                                                 other.variable + "' and of '" + *name +
                                                 "', expected a dimension for each");
    }
    param.stacks.push_back({*name, index->at, dimension});
  }

  const Model &model_;
  Diagnostics &diagnostics_;
};

/// Checks that an axis or a switch does not have the name of a `let` value or an axis, which would make expressions
/// ambiguous.
void checkUnique(const Node &name, const std::string &what, const LayoutDeclaration &layout, const Model &model,
                 Diagnostics &diagnostics) {
  const char *other = model.let.contains(name.text) ? "a 'let' value" : nullptr;
  if (layout.axes)
    for (const auto &[axis, at] : *layout.axes)
      if (axis == name.text && !other)
        other = what == "axis" ? "another axis" : "an axis";
  if (other)
    diagnostics.error(name.at, what + " '" + name.text + "' has the same name as " + other + ", expected another name");
}

void readAxes(const Node &node, const Model &model, LayoutDeclaration &layout, Diagnostics &diagnostics) {
  layout.axes.emplace();
  if (node.kind != Node::Kind::sequence)
    return refuse(node, "a list of axes", "'axes'", diagnostics);
  if (node.items.size() > kMaxAxes) {
    diagnostics.error(node.at, "'axes' lists " + std::to_string(node.items.size()) + " axes, expected at most " +
                                   std::to_string(kMaxAxes));
    return;
  }
  for (const Node &item : node.items) {
    const auto name = readIdentifier(item, "an axis", diagnostics);
    if (!name)
      continue;
    checkUnique(item, "axis", layout, model, diagnostics);
    layout.axes->emplace_back(*name, item.at);
  }
}

/// Reads `chunks: "{x.chunk}."`.
void readChunks(const Node &node, const Model &model, LayoutDeclaration &layout, Diagnostics &diagnostics) {
  const auto text = readText(node, "'chunks'", diagnostics);
  if (!text)
    return;
  constexpr std::string_view kSuffix = ".chunk}";
  const size_t open = text->find('{'), end = text->find(kSuffix);
  if (open > end || end == std::string::npos || text->find_first_of("{}", open + 1) != end + kSuffix.size() - 1 ||
      text->find_first_of("{}", end + kSuffix.size()) != std::string::npos)
    return refuse(node, "text with one placeholder {x.chunk}", "'chunks'", diagnostics);
  const std::string variable = text->substr(open + 1, end - open - 1);
  if (checkVariable(variable, locationIn(node, open + 1), model.variables, diagnostics))
    layout.chunks = ModelChunkNames{variable, *text, node.at};
}

/// Reports an error and returns false if `params` more params exceed the limit for all layouts.
bool roomFor(size_t params, Location at, const Model &model, Diagnostics &diagnostics) {
  if (params <= kMaxLayoutParams - std::min(kMaxLayoutParams, model.layoutParams))
    return true;
  diagnostics.error(at, "the layouts have more than " + std::to_string(kMaxLayoutParams) +
                            " params together, including inherited ones");
  return false;
}

/// Reads `extend: NAME`: copies the layout of that name, which must be defined above, into `layout`.
void inherit(const Node &extend, const Model &model, LayoutDeclaration &layout, Diagnostics &diagnostics) {
  const auto name = readText(extend, "'extend'", diagnostics);
  std::vector<std::string> known;
  for (const LayoutDeclaration &other : model.layouts) {
    known.push_back(other.name);
    if (name == other.name) {
      if (!roomFor(other.params.size(), extend.at, model, diagnostics))
        return;
      const LayoutDeclaration own = layout;
      layout = other;
      layout.name = own.name;
      layout.at = own.at;
      return;
    }
  }
  if (name)
    diagnostics.error(extend.at, known.empty()
                                     ? "unknown layout '" + *name + "'; no layout is defined above this one"
                                     : "unknown layout '" + *name + "' above this one" + suggestion(*name, known));
}

/// The map without its null entries, which remove inherited entries.
Node withoutNull(Node map) {
  std::erase_if(map.entries, [](const Node::Entry &entry) { return entry.value.kind == Node::Kind::null; });
  return map;
}

/// Reads params and merges them into the params that the layout inherited. `params: same` is already expanded.
void readParams(const Node &params, const Model &model, LayoutDeclaration &layout, Diagnostics &diagnostics) {
  ParamReader reader(model, diagnostics);
  std::unordered_map<std::string, size_t> inherited;
  for (size_t i = 0; i < layout.params.size(); ++i)
    inherited.emplace(layout.params[i].name, i);
  std::unordered_set<size_t> removed;
  for (const auto &[name, value] : params.entries) {
    const auto known = inherited.find(withValues(name, model).text);
    if (value.kind != Node::Kind::null) {
      ParamDeclaration param = reader.read(name, value);
      if (known != inherited.end())
        layout.params[known->second] = std::move(param);
      else
        layout.params.push_back(std::move(param));
    } else if (known != inherited.end()) {
      removed.insert(known->second);
    } else if (value.text == "optional") {
      // The extended layout has no such param; a file between it and this one had.
    } else if (layout.params.empty()) {
      reader.read(name, value); // nothing is inherited: reports an empty param
    } else {
      diagnostics.error(name.at, "param '" + name.text +
                                     "' is null, which removes it, but the extended layout has no param '" + name.text +
                                     "'");
    }
  }
  std::vector<ParamDeclaration> remaining;
  for (size_t i = 0; i < layout.params.size(); ++i)
    if (!removed.contains(i))
      remaining.push_back(std::move(layout.params[i]));
  layout.params = std::move(remaining);
}

/// Reads `place`: rules that replace or, if null, remove inherited ones.
void readLayoutPlacement(const Node &node, const Model &model, LayoutDeclaration &layout, Diagnostics &diagnostics) {
  for (const auto &[key, value] : node.entries)
    if (value.kind == Node::Kind::null && layout.placement.erase(key.text) == 0 && value.text != "optional")
      diagnostics.error(key.at, "'" + key.text + "' is null, which removes it from 'place', but 'place' has no '" +
                                    key.text + "'");
  for (auto &[variable, rule] : readPlacement(withoutNull(node), model, diagnostics))
    layout.placement.insert_or_assign(variable, std::move(rule));
}

void readSwitches(const Node &node, const Model &model, LayoutDeclaration &layout, Diagnostics &diagnostics) {
  for (const auto &[key, value] : node.entries) {
    const auto known = readIdentifier(key, "a switch", diagnostics);
    auto expression = readExpression(value, "switch '" + key.text + "'", diagnostics);
    if (!known || !expression)
      continue;
    checkUnique(key, "switch", layout, model, diagnostics);
    layout.switches.insert_or_assign(key.text, std::move(*expression));
  }
}

/// Reads `rename`: beginnings of names, which replace or, if null, remove inherited ones.
void readRename(const Node &node, LayoutDeclaration &layout, Diagnostics &diagnostics) {
  if (node.entries.size() > kMaxGlobs)
    return diagnostics.error(node.at, "'rename' has " + std::to_string(node.entries.size()) +
                                          " entries, expected at most " + std::to_string(kMaxGlobs));
  auto readBeginning = [&](const Node &text, const std::string &what) {
    const bool braces = text.text.find_first_of("{}") != std::string::npos;
    if (text.kind != Node::Kind::scalar || braces) {
      refuse(text, "text without braces", what, diagnostics);
      return false;
    }
    return text.text.empty() || readText(text, what, diagnostics).has_value(); // empty: the beginning of every name
  };
  for (const auto &[from, to] : node.entries) {
    const auto known = std::find_if(layout.rename.begin(), layout.rename.end(),
                                    [&](const NameBeginning &each) { return each.from == from.text; });
    if (to.kind == Node::Kind::null) {
      if (known != layout.rename.end())
        layout.rename.erase(known);
      else if (to.text != "optional")
        diagnostics.error(from.at, "'" + from.text +
                                       "' is null, which removes it from 'rename', but 'rename' has no '" + from.text +
                                       "'");
    } else if (readBeginning(from, "a key of 'rename'") && readBeginning(to, "'rename' of '" + from.text + "'")) {
      if (known == layout.rename.end())
        layout.rename.push_back({from.text, to.text, from.at});
      else
        *known = {from.text, to.text, from.at};
    }
  }
}

/// Reads one text of `optimizer`, which contains each placeholder once and no other braces.
std::string readNames(const Node &node, const std::string &what, const std::vector<std::string> &placeholders,
                      Diagnostics &diagnostics) {
  const std::string text = readText(node, what, diagnostics).value_or("");
  std::string rest = text, wanted;
  bool good = true;
  for (const std::string &placeholder : placeholders) {
    const size_t at = rest.find(placeholder);
    good = good && at != std::string::npos;
    if (at != std::string::npos)
      rest.erase(at, placeholder.size());
    wanted += (wanted.empty() ? "" : " and ") + placeholder;
  }
  if (!text.empty() && (!good || rest.find_first_of("{}") != std::string::npos))
    refuse(node, "text with " + wanted + ", each once, and no other braces", what, diagnostics);
  return text;
}

/// Reads `optimizer`: the names of states, {weights, states, of}, or null, which removes inherited ones.
void readOptimizerNames(const Node &node, LayoutDeclaration &layout, Diagnostics &diagnostics) {
  const std::vector<std::string> both = {"{param}", "{state}"};
  if (node.kind == Node::Kind::null) {
    layout.optimizer.reset();
    return;
  }
  OptimizerNames &names = layout.optimizer.emplace();
  names.at = node.at;
  if (node.kind != Node::Kind::map) {
    names.states = readNames(node, "'optimizer'", both, diagnostics);
    return;
  }
  Fields fields(node, "'optimizer'", diagnostics);
  if (const Node *states = fields.require("states"))
    names.states = readNames(*states, "'states'", both, diagnostics);
  if (const Node *weights = fields.find("weights"))
    names.weights = readNames(*weights, "'weights'", {"{param}"}, diagnostics);
  if (const Node *of = fields.find("of")) {
    names.of.emplace();
    if (of->kind != Node::Kind::sequence)
      refuse(*of, "a list of states", "'of'", diagnostics);
    for (const Node &item : of->items)
      names.of->push_back(readText(item, "a state in 'of'", diagnostics).value_or(""));
  }
  fields.finish();
}

/// Reads `shard`: rules of params by glob.
void readGlobRules(const Node &node, LayoutDeclaration &layout, Diagnostics &diagnostics) {
  layout.shard.clear();
  if (node.entries.size() > kMaxGlobs)
    return diagnostics.error(node.at, "'shard' has " + std::to_string(node.entries.size()) +
                                          " globs, expected at most " + std::to_string(kMaxGlobs));
  for (const auto &[glob, rules] : node.entries)
    layout.shard.push_back({{glob.text, glob.at}, readShard(rules, diagnostics)});
}

} // namespace

void readPermute(const Node &node, Pack &tensor, Diagnostics &diagnostics) {
  if (node.kind != Node::Kind::sequence)
    return refuse(node, "a list of dimensions", "'permute'", diagnostics);
  std::vector<int64_t> sorted;
  for (const Node &item : node.items)
    tensor.permute.push_back(readInteger(item, "'permute'", 0, kMaxDimensions - 1, diagnostics).value_or(0));
  sorted = tensor.permute;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    diagnostics.error(node.at, "'permute' lists a dimension twice, expected each dimension once");
}

ParamDeclaration paramOf(const TensorDeclaration &tensor) {
  ParamDeclaration param;
  param.name = tensor.name;
  param.at = tensor.at;
  param.pack.at = tensor.at;
  param.pack.tensor = tensor.name;
  return param;
}

LayoutDeclaration readLayout(const Node &name, const Node &node, const Model &model, Diagnostics &diagnostics) {
  LayoutDeclaration layout;
  layout.name = name.text;
  layout.at = name.at;
  Fields fields(node, "layout '" + name.text + "'", diagnostics);
  if (!fields.isMap())
    return layout;
  fields.unsupported({"dtype", "quantize"});
  const Node *extend = fields.find("extend");
  if (extend)
    inherit(*extend, model, layout, diagnostics);
  if (const Node *axes = fields.find("axes"))
    readAxes(*axes, model, layout, diagnostics);
  if (const Node *placement = fields.find("place"); placement && checkMap(*placement, "'place'", diagnostics))
    readLayoutPlacement(*placement, model, layout, diagnostics);
  if (const Node *chunks = fields.find("chunks"))
    readChunks(*chunks, model, layout, diagnostics);
  if (const Node *switches = fields.find("switches"); switches && checkMap(*switches, "'switches'", diagnostics))
    readSwitches(*switches, model, layout, diagnostics);
  const Node *params = extend ? fields.find("params") : fields.require("params");
  if (params && params->kind == Node::Kind::scalar && params->text == "same") {
    layout.same = true;
    layout.params.clear();
  } else if (params && checkMap(*params, "'params'", diagnostics)) {
    const bool same = layout.same || params->text == "same"; // extend.cpp marks params that extend `same`
    const size_t inherited = same ? model.tensors.size() : layout.params.size();
    if (roomFor(inherited + params->entries.size(), params->at, model, diagnostics)) {
      if (same) {
        layout.same = false;
        layout.params.clear();
        for (const TensorDeclaration &tensor : model.tensors)
          if (tensor.state.empty())
            layout.params.push_back(paramOf(tensor));
      }
      readParams(*params, model, layout, diagnostics);
    }
  }
  if (const Node *rename = fields.find("rename"); rename && checkMap(*rename, "'rename'", diagnostics))
    readRename(*rename, layout, diagnostics);
  if (const Node *optimizer = fields.find("optimizer"))
    readOptimizerNames(*optimizer, layout, diagnostics);
  if (const Node *shard = fields.find("shard"); shard && checkMap(*shard, "'shard'", diagnostics))
    readGlobRules(*shard, layout, diagnostics);
  fields.finish();
  return layout;
}

} // namespace reshard
