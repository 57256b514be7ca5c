// One layout of a model: axes, place, switches, params.

#include "compiler/reading.h"

#include <algorithm>

namespace reshard {

namespace {

constexpr int kMaxPackDepth = 16;

class ParamReader {
public:
  ParamReader(const Model &model, Diagnostics &diagnostics) : model_(model), diagnostics_(diagnostics) {}

  ParamDeclaration read(const Node &name, const Node &node) {
    ParamDeclaration param;
    param.name = name.text;
    param.at = name.at;
    readText(name, "the name of a param", diagnostics_);
    readPlaceholders(name, model_.variables, true, diagnostics_);
    const std::string title = "param '" + name.text + "'";
    Fields fields(node, title, diagnostics_);
    if (!fields.isMap())
      return param;
    fields.lacking({"flat"});
    param.pack = readPack(node, fields, title, /*holds=*/true);
    if (const Node *stack = fields.find("stack"))
      readStack(*stack, param);
    if (const Node *pad = fields.find("pad"); pad && checkMap(*pad, "'pad'", diagnostics_))
      for (const auto &[key, multiple] : pad->entries) {
        const auto d = readDimensionKey(key, diagnostics_);
        auto expression = readExpression(multiple, "'pad'", diagnostics_);
        if (d && expression)
          param.pad.emplace(*d, std::move(*expression));
      }
    if (const Node *shard = fields.find("shard"))
      param.shard = readShard(*shard, diagnostics_);
    if (const Node *cut = fields.find("cut")) {
      if (cut->kind != Node::Kind::scalar || cut->text != "joined")
        refuse(*cut, "'joined'", "'cut'", diagnostics_);
      param.joined = true;
    }
    if (const Node *at = fields.find("at"); at && checkMap(*at, "'at'", diagnostics_))
      for (const auto &[axis, value] : at->entries)
        readAt(axis, value, param);
    if (const Node *when = fields.find("when"))
      param.when = readExpression(*when, "'when'", diagnostics_);
    if (const Node *dtype = fields.find("dtype"))
      if (const auto type = readDType(*dtype, "'dtype'", diagnostics_))
        param.dtype.emplace(*type, dtype->at);
    fields.finish();
    return param;
  }

private:
  /// The one of `holds` (or `of`), `concat`, `interleave` that a map has; `holds` is false inside packs.
  Pack readPack(const Node &node, Fields &fields, const std::string &title, bool holds, int depth = 0) {
    Pack pack;
    pack.at = node.at;
    if (depth > kMaxPackDepth) {
      diagnostics_.error(node.at, "packs nested more than " + std::to_string(kMaxPackDepth) + " deep");
      return pack;
    }
    const Node *tensor = fields.find(holds ? "holds" : "of"), *concat = fields.find("concat"),
               *interleave = fields.find("interleave");
    const Node *permute = fields.find("permute");
    const char *name = holds ? "'holds'" : "'of'";
    const int count = (tensor != nullptr) + (concat != nullptr) + (interleave != nullptr);
    if (count != 1) {
      diagnostics_.error(count == 0 ? node.at : keyOf(node, tensor, concat, interleave),
                         title + " has " + (count == 0 ? "none" : std::to_string(count)) + " of " + name +
                             ", 'concat' and 'interleave', expected one");
      return pack;
    }
    if (permute && !tensor)
      diagnostics_.error(permute->at, std::string("'permute' beside a pack, expected it beside ") + name +
                                          " or with a tensor in the pack: {permute: […], of: NAME}");
    if (tensor) {
      pack.at = tensor->at;
      pack.tensor = readText(*tensor, name, diagnostics_).value_or("");
      if (permute)
        readPermute(*permute, pack);
    } else {
      const Node &value = concat ? *concat : *interleave;
      pack.kind = concat ? Pack::Kind::concat : Pack::Kind::interleave;
      pack.at = value.at;
      readEntries(value, pack, depth);
    }
    return pack;
  }

  /// The place of the second key that is there.
  static Location keyOf(const Node &node, const Node *a, const Node *b, const Node *c) {
    Location at = node.at;
    int seen = 0;
    for (const auto &[key, value] : node.entries)
      if ((&value == a || &value == b || &value == c) && ++seen == 2)
        at = key.at;
    return at;
  }

  /// `[a, b]` or `{of: [a, b], dim: d, groups: g}`.
  void readEntries(const Node &value, Pack &pack, int depth) {
    const bool concat = pack.kind == Pack::Kind::concat;
    const std::string what = concat ? "'concat'" : "'interleave'";
    const Node *entries = &value;
    if (!concat || value.kind == Node::Kind::map) {
      Fields fields(value, what, diagnostics_);
      if (!fields.isMap())
        return;
      if (const Node *dimension = fields.find("dim"))
        pack.dimension = readInteger(*dimension, "'dim'", 0, kMaxDimensions - 1, diagnostics_).value_or(0);
      if (const Node *groups = concat ? nullptr : fields.require("groups"))
        pack.groups = readExpression(*groups, "'groups'", diagnostics_);
      entries = fields.require("of");
      fields.finish();
    }
    if (!entries)
      return;
    if (entries->kind != Node::Kind::sequence)
      return refuse(*entries, "a list of tensors", what, diagnostics_);
    if (entries->items.empty())
      diagnostics_.error(entries->at, what + " of nothing, expected a list of tensors");
    for (const Node &entry : entries->items) {
      if (entry.kind == Node::Kind::map) {
        Fields fields(entry, "an entry of " + what, diagnostics_);
        pack.of.push_back(readPack(entry, fields, "an entry of " + what, /*holds=*/false, depth + 1));
        fields.finish();
      } else {
        Pack &tensor = pack.of.emplace_back();
        tensor.at = entry.at;
        tensor.tensor = readText(entry, "an entry of " + what, diagnostics_).value_or("");
      }
    }
  }

  void readPermute(const Node &node, Pack &pack) {
    if (node.kind != Node::Kind::sequence)
      return refuse(node, "a list of dimensions", "'permute'", diagnostics_);
    std::vector<int64_t> sorted;
    for (const Node &item : node.items)
      pack.permute.push_back(readInteger(item, "'permute'", 0, kMaxDimensions - 1, diagnostics_).value_or(0));
    sorted = pack.permute;
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
      diagnostics_.error(node.at, "'permute' has a dimension twice");
  }

  void readStack(const Node &node, ParamDeclaration &param) {
    const Node *index = &node;
    if (node.kind == Node::Kind::map) {
      Fields fields(node, "'stack'", diagnostics_);
      index = fields.require("index");
      if (const Node *dimension = fields.find("dim"))
        param.stackDimension = readInteger(*dimension, "'dim'", 0, kMaxDimensions - 1, diagnostics_).value_or(0);
      fields.finish();
    }
    const auto name = index ? readText(*index, "'stack'", diagnostics_) : std::nullopt;
    if (name && checkVariable(*name, index->at, model_.variables, diagnostics_))
      param.stack.emplace(*name, index->at);
  }

  void readAt(const Node &axis, const Node &value, ParamDeclaration &param) {
    const auto name = readIdentifier(axis, "an axis", diagnostics_);
    ParamDeclaration::At at;
    at.at = axis.at;
    at.valueAt = value.at;
    if (value.kind == Node::Kind::sequence && value.items.empty())
      diagnostics_.error(value.at, "'at' without a coordinate; 'when: false' leaves a param out");
    for (const Node *item : valueOrItems(value)) {
      if (item->kind == Node::Kind::scalar && item->text == "first")
        at.first = true;
      else if (item->kind == Node::Kind::scalar && item->text == "last")
        at.last = true;
      else if (auto coordinate = readExpression(*item, "a coordinate", diagnostics_))
        at.coordinates.push_back(std::move(*coordinate));
    }
    if (name)
      param.places.emplace_back(*name, std::move(at));
  }

  const Model &model_;
  Diagnostics &diagnostics_;
};

/// A name must mean one thing in an expression.
void checkOnce(const Node &name, const std::string &what, const LayoutDeclaration &layout, const Model &model,
               Diagnostics &diagnostics) {
  const char *other = model.let.contains(name.text) ? "a 'let' name" : nullptr;
  if (layout.axes)
    for (const auto &[axis, at] : *layout.axes)
      if (axis == name.text && !other)
        other = "an axis";
  if (other)
    diagnostics.error(name.at, what + " '" + name.text + "' is " + other + " already");
}

void readAxes(const Node &node, const Model &model, LayoutDeclaration &layout, Diagnostics &diagnostics) {
  layout.axes.emplace();
  if (node.kind != Node::Kind::sequence)
    return refuse(node, "a list of axes", "'axes'", diagnostics);
  for (const Node &item : node.items) {
    const auto name = readIdentifier(item, "an axis", diagnostics);
    if (!name)
      continue;
    checkOnce(item, "axis", layout, model, diagnostics);
    layout.axes->emplace_back(*name, item.at);
  }
}

} // namespace

LayoutDeclaration readLayout(const Node &name, const Node &node, const Model &model, Diagnostics &diagnostics) {
  LayoutDeclaration layout;
  layout.name = name.text;
  layout.at = name.at;
  Fields fields(node, "layout '" + name.text + "'", diagnostics);
  if (!fields.isMap())
    return layout;
  fields.lacking({"dtype"});
  if (const Node *axes = fields.find("axes"))
    readAxes(*axes, model, layout, diagnostics);
  if (const Node *place = fields.find("place"))
    layout.place = readPlace(*place, model.variables, diagnostics);
  if (const Node *switches = fields.find("switches"); switches && checkMap(*switches, "'switches'", diagnostics))
    for (const auto &[key, value] : switches->entries) {
      const auto known = readIdentifier(key, "a switch", diagnostics);
      auto expression = readExpression(value, "switch '" + key.text + "'", diagnostics);
      if (!known || !expression)
        continue;
      checkOnce(key, "switch", layout, model, diagnostics);
      layout.switches.emplace(key.text, std::move(*expression));
    }
  if (const Node *params = fields.require("params")) {
    if (params->kind == Node::Kind::scalar && params->text == "same")
      refuseLacking(params->at, "params: same", diagnostics);
    else if (checkMap(*params, "'params'", diagnostics))
      for (const auto &[param, value] : params->entries)
        layout.params.push_back(ParamReader(model, diagnostics).read(param, value));
  }
  fields.finish();
  return layout;
}

} // namespace reshard
