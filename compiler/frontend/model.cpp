// SPDX-License-Identifier: Apache-2.0
// Reads the model: config, let, index, tensors, place, layouts. Each layout is read by layouts.cpp.

#include "compiler/frontend/config.h"

#include <algorithm>

namespace reshard {

namespace {

class ModelReader {
public:
  ModelReader(const Node &node, const std::string &folder, Diagnostics &diagnostics)
      : node_(node), folder_(folder), diagnostics_(diagnostics) {}

  Model read() {
    model_.at = node_.at;
    Fields fields(node_, "the model", diagnostics_);
    if (!fields.isMap())
      return std::move(model_);
    if (const Node *name = fields.find("name"))
      model_.name = readText(*name, "'name'", diagnostics_).value_or("");
    const Node *config = fields.find("config");
    model_.config = std::make_shared<Config>(config, configFolder(config), diagnostics_);
    model_.let = readLet(fields.find("let"), *model_.config, diagnostics_);
    if (const Node *dtype = fields.find("dtype")) {
      dtype_ = readDType(*dtype, "'dtype'", diagnostics_);
      dtypeWrong_ = !dtype_;
    }
    if (const Node *index = fields.find("index"))
      readIndex(*index);
    if (const Node *tensors = fields.require("tensors"))
      readTensors(*tensors);
    if (const Node *optimizer = fields.find("optimizer"); optimizer && optimizer->kind != Node::Kind::null)
      readOptimizer(*optimizer);
    if (const Node *placement = fields.find("place"))
      model_.placement = readPlacement(*placement, model_, diagnostics_);
    if (const Node *layouts = fields.find("layouts"); layouts && checkMap(*layouts, "'layouts'", diagnostics_))
      readLayouts(*layouts);
    fields.finish();
    return std::move(model_);
  }

private:
  /// The base of the config's path: the folder of the file that names it, or for --set the current folder.
  std::string configFolder(const Node *config) const {
    if (!config || config->at.file == node_.at.file)
      return folder_;
    return folderOf(diagnostics_.path(config->at.file));
  }

  bool atMost(size_t most, const Node &map, const std::string &what) {
    if (map.entries.size() <= most)
      return true;
    diagnostics_.error(map.at, what + " has " + std::to_string(map.entries.size()) + " entries, expected at most " +
                                   std::to_string(most));
    return false;
  }

  void readLayouts(const Node &layouts) {
    if (!atMost(kMaxLayouts, layouts, "'layouts'"))
      return;
    for (const auto &[name, layout] : layouts.entries)
      if (readText(name, "the name of a layout", diagnostics_)) {
        model_.layouts.push_back(readLayout(name, layout, model_, diagnostics_));
        model_.layoutParams += model_.layouts.back().params.size();
      }
  }

  void readIndex(const Node &index) {
    if (!checkMap(index, "'index'", diagnostics_) || !atMost(kMaxVariables, index, "'index'"))
      return;
    for (const auto &[key, value] : index.entries) {
      const auto name = readIdentifier(key, "an index variable", diagnostics_);
      const auto size = readValue(value, "the size of index variable '" + key.text + "'", model_.let,
                                  {0, kMaxIndexValues}, diagnostics_);
      if (!name)
        continue;
      model_.variables.push_back({*name, size.value_or(kUnknownValue)});
      model_.variablesAt.emplace(*name, key.at);
    }
  }

  void readTensors(const Node &tensors) {
    if (!checkMap(tensors, "'tensors'", diagnostics_))
      return;
    if (tensors.entries.empty())
      diagnostics_.error(tensors.at, "'tensors' is empty, expected at least one tensor");
    model_.tensors.reserve(tensors.entries.size());
    for (const auto &[written, value] : tensors.entries) {
      if (!readText(written, "the name of a tensor", diagnostics_))
        continue;
      const Node name = withValues(written, model_);
      TensorDeclaration &tensor = model_.tensors.emplace_back();
      tensor.name = name.text;
      tensor.at = name.at;
      tensor.dtype = dtype_.value_or(ir::DType::bf16);
      if (const auto placeholders = readPlaceholders(name, model_.variables, false, diagnostics_))
        for (const Placeholder &placeholder : *placeholders)
          tensor.variables.push_back(placeholder.variable);
      readTensor(value, tensor);
    }
  }

  /// Reads `optimizer: adam`, or `{state: dtype}`, `{state: {dtype, shape: []}}` or `{state: {dtype, tied: true}}`, and
  /// adds the states of all tensors. Tied tensors share their states; buffers, and bytes that are no numbers, have
  /// none.
  void readOptimizer(const Node &node) {
    if (node.kind == Node::Kind::scalar && node.text == "adam") {
      model_.states = {{"exp_avg"}, {"exp_avg_sq"}};
    } else if (node.kind == Node::Kind::map && atMost(kMaxOptimizerStates, node, "'optimizer'")) {
      for (const auto &[name, value] : node.entries)
        if (readIdentifier(name, "a state of the optimizer", diagnostics_))
          readState(value, model_.states.emplace_back(OptimizerState{name.text}));
    } else if (node.kind != Node::Kind::map) {
      return refuse(node, "'adam' or a map of states", "'optimizer'", diagnostics_);
    }
    const size_t weights = model_.tensors.size();
    for (const OptimizerState &state : model_.states)
      for (size_t i = 0; i < weights; ++i) {
        TensorDeclaration tensor = model_.tensors[i];
        if (tensor.tied || tensor.opaque || tensor.buffer)
          continue;
        tensor.name += "." + state.name;
        tensor.state = state.name;
        tensor.dtype = state.dtype;
        if (state.scalar) {
          tensor.shape.clear();
          tensor.shard.clear();
        }
        if (state.tied)
          tieToWeight(tensor, model_.tensors[i], *state.tied);
        model_.tensors.push_back(std::move(tensor));
      }
  }

  /// A state that has the elements of its weight, as master weights do. Shape and index values are the weight's.
  static void tieToWeight(TensorDeclaration &state, const TensorDeclaration &weight, const Location &at) {
    state.tied.emplace(weight.name, at);
    state.shape.clear();
    state.shapeAt = {};
    state.where.clear();
  }

  void readState(const Node &value, OptimizerState &state) {
    const std::string title = "state '" + state.name + "' of 'optimizer'";
    if (value.kind != Node::Kind::map) {
      state.dtype = readDType(value, title, diagnostics_).value_or(state.dtype);
      return;
    }
    Fields fields(value, title, diagnostics_);
    if (const Node *dtype = fields.require("dtype"))
      state.dtype = readDType(*dtype, "'dtype'", diagnostics_).value_or(state.dtype);
    if (const Node *shape = fields.find("shape")) {
      state.scalar = shape->kind == Node::Kind::sequence && shape->items.empty();
      if (!state.scalar)
        refuse(*shape, "[], a scalar; without 'shape' a state has that of its weight", "'shape' of " + title,
               diagnostics_);
    }
    if (const Node *tied = fields.find("tied")) {
      if (state.scalar || tied->kind != Node::Kind::scalar || tied->text != "true")
        refuse(*tied, state.scalar ? "no 'tied' beside 'shape: []'" : "true, the state is its weight",
               "'tied' of " + title, diagnostics_);
      state.tied.emplace(tied->at);
    }
    fields.finish();
  }

  void readTensor(const Node &value, TensorDeclaration &tensor) {
    const std::string title = "tensor '" + tensor.name + "'";
    if (value.kind == Node::Kind::sequence) {
      readShape(value, title, tensor);
      return checkDType(dtype_.has_value(), title, tensor);
    }
    if (value.kind != Node::Kind::map)
      return refuse(value, "a shape or a map", title, diagnostics_);
    Fields fields(value, title, diagnostics_);
    const Node *opaque = fields.find("opaque"), *tied = fields.find("tied"), *shape = fields.find("shape"),
               *dtype = fields.find("dtype"), *where = fields.find("where"), *when = fields.find("when");
    if (when)
      tensor.absent = readValue(*when, "'when'", model_.let, {INT64_MIN + 1, INT64_MAX}, diagnostics_) == 0;
    if (const Node *shard = fields.find("shard"))
      tensor.shard = readShard(*shard, diagnostics_);
    if (const Node *buffer = fields.find("buffer")) {
      tensor.buffer = buffer->kind == Node::Kind::scalar && buffer->text == "true";
      if (!tensor.buffer)
        refuse(*buffer, "true or no such key", "'buffer' of " + title, diagnostics_);
    }
    if (tied) {
      if (const auto other = readText(withValues(*tied, model_), "'tied'", diagnostics_))
        tensor.tied.emplace(*other, tied->at);
      for (const auto &[key, each] : value.entries)
        if (&each == opaque || &each == shape || &each == dtype || &each == where || key.text == "buffer")
          diagnostics_.error(
              key.at, "'" + key.text + "' cannot be combined with 'tied': " + title +
                          " takes its shape, dtype, index values and states from the tensor to which it is tied");
      return fields.finish();
    }
    if (opaque) {
      readOpaque(*opaque, tensor);
      for (const auto &[key, each] : value.entries)
        if (&each == shape || &each == dtype || key.text == "shard")
          diagnostics_.error(key.at, "'" + key.text + "' cannot be combined with 'opaque': " + title +
                                         " is a block of bytes that is never split");
      if (where)
        tensor.where = readWhere(*where, tensor.variables, title, model_, diagnostics_);
      return fields.finish();
    }
    if (dtype)
      tensor.dtype = readDType(*dtype, "'dtype'", diagnostics_).value_or(tensor.dtype);
    else
      checkDType(dtype_.has_value(), title, tensor);
    if (shape)
      readShape(*shape, title, tensor);
    else
      fields.require("shape");
    if (where)
      tensor.where = readWhere(*where, tensor.variables, title, model_, diagnostics_);
    fields.finish();
    if (shape)
      for (const auto &[d, rule] : tensor.shard)
        if (d >= static_cast<int64_t>(shape->items.size()))
          diagnostics_.error(rule.at, "'shard' of dimension " + std::to_string(d) + ", but " + title + " has " +
                                          std::to_string(shape->items.size()) +
                                          (shape->items.size() == 1 ? " dimension" : " dimensions"));
  }

  /// Reads `opaque: BYTES`: an object such as a pickled state, which is never split.
  void readOpaque(const Node &bytes, TensorDeclaration &tensor) {
    tensor.opaque = true;
    tensor.shapeAt = bytes.at;
    tensor.dtype = ir::DType::u8;
    tensor.shape = {readValue(bytes, "'opaque'", model_.let, {0, INT64_MAX}, diagnostics_).value_or(0)};
  }

  void checkDType(bool known, const std::string &title, const TensorDeclaration &tensor) {
    if (!known && !dtypeWrong_)
      diagnostics_.error(tensor.at, title + " has no dtype, expected 'dtype' here or in the model");
  }

  void readShape(const Node &shape, const std::string &title, TensorDeclaration &tensor) {
    tensor.shapeAt = shape.at;
    if (shape.kind != Node::Kind::sequence)
      return refuse(shape, "a list", "the shape of " + title, diagnostics_);
    if (static_cast<int64_t>(shape.items.size()) > kMaxDimensions) {
      diagnostics_.error(shape.at, title + " has " + std::to_string(shape.items.size()) +
                                       " dimensions, expected at most " + std::to_string(kMaxDimensions));
      return;
    }
    int64_t bytes = itemBytes(tensor.dtype);
    bool fits = true;
    for (const Node &item : shape.items) {
      const auto length = readValue(item, "a dimension of " + title, model_.let, {0, INT64_MAX}, diagnostics_);
      tensor.shape.push_back(length.value_or(0));
      fits = fits && !__builtin_mul_overflow(bytes, tensor.shape.back(), &bytes) && bytes <= kMaxBytes;
    }
    if (!fits && std::find(tensor.shape.begin(), tensor.shape.end(), 0) == tensor.shape.end())
      diagnostics_.error(shape.at, title + " has more than 2^60 bytes");
  }

  const Node &node_;
  const std::string &folder_;
  Diagnostics &diagnostics_;
  Model model_;
  std::optional<ir::DType> dtype_;
  bool dtypeWrong_ = false;
};

} // namespace

Model readModel(const Node &node, const std::string &folder, Diagnostics &diagnostics) {
  return ModelReader(node, folder, diagnostics).read();
}

} // namespace reshard
