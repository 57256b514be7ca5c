// SPDX-License-Identifier: Apache-2.0
// Reads a mesh: its axes, further views of the same mesh ranks, and the key `megatron`, a shorthand for two views.

#include "compiler/frontend/reading.h"

#include <algorithm>

namespace reshard {

namespace {

/// One factorization of the mesh ranks; the first axis varies fastest.
struct MeshView {
  Location at;
  std::vector<ir::Axis> axes;
  std::vector<Location> axesAt;
  int64_t size = 1;
};

class MeshReader {
public:
  MeshReader(const Environment &let, EndpointDeclaration &endpoint, Diagnostics &diagnostics)
      : let_(let), endpoint_(endpoint), diagnostics_(diagnostics) {}

  void read(const Node &node) {
    if (!checkMap(node, "'mesh'", diagnostics_))
      return;
    if (const Node *megatron = node.find("megatron")) {
      if (node.entries.size() > 1)
        diagnostics_.error(node.at, "'megatron' must be the only key of a mesh, found other keys");
      return readMegatron(*megatron);
    }
    const Node *views = node.find("views");
    const bool ok = addView(readView(node, views != nullptr));
    if (!views)
      return;
    if (views->kind != Node::Kind::sequence)
      return refuse(*views, "a list of maps", "'views'", diagnostics_);
    for (const Node &item : views->items)
      if (checkMap(item, "a view", diagnostics_)) {
        auto view = readView(item, false);
        if (ok)
          addView(std::move(view));
      }
  }

private:
  std::optional<MeshView> readView(const Node &node, bool hasViews) {
    MeshView view{node.at, {}, {}, 1};
    bool ok = true;
    if (!countAxes(node, hasViews))
      return std::nullopt;
    for (const auto &[key, value] : node.entries) {
      if (hasViews && key.text == "views")
        continue;
      const auto name = readIdentifier(key, "an axis", diagnostics_);
      const auto size = readSize(value, key.text);
      if (name && (*name == "views" || *name == "megatron")) {
        diagnostics_.error(key.at, "'" + *name + "' is a reserved name, expected another name for an axis");
        ok = false;
      } else if (name && let_.contains(*name)) {
        diagnostics_.error(key.at, "axis '" + *name + "' has the same name as a 'let' value, expected another name");
        ok = false;
      }
      ok = ok && name && size;
      if (name)
        append(view, *name, size.value_or(1), key.at);
    }
    return ok && checkSize(view) ? std::optional(std::move(view)) : std::nullopt;
  }

  bool countAxes(const Node &view, bool hasViews) {
    const bool fitted = axes_ <= kMaxAxes;
    axes_ += view.entries.size() - hasViews;
    if (fitted && axes_ > kMaxAxes)
      diagnostics_.error(view.at, "the mesh and its views up to here have " + std::to_string(axes_) +
                                      " axes together, expected at most " + std::to_string(kMaxAxes));
    return axes_ <= kMaxAxes;
  }

  std::optional<int64_t> readSize(const Node &value, const std::string &axis) {
    return readValue(value, "the size of axis '" + axis + "'", let_, {1, kMaxWorld}, diagnostics_);
  }

  static void append(MeshView &view, const std::string &name, int64_t size, Location at) {
    view.axes.push_back({name, size, view.size});
    view.axesAt.push_back(at);
    view.size = view.size > kMaxWorld ? view.size : view.size * size; // no overflow: both factors are at most kMaxWorld
  }

  bool checkSize(const MeshView &view) {
    if (view.size <= kMaxWorld)
      return true;
    diagnostics_.error(view.at,
                       "the mesh has more than " + std::to_string(kMaxWorld) + " ranks, the largest supported number");
    return false;
  }

  /// Adds a view to the endpoint. The first view defines the mesh; the others must agree with it.
  bool addView(std::optional<MeshView> view) {
    if (!view)
      return false;
    if (first_) {
      first_ = false;
      endpoint_.meshSize = view->size;
    } else if (view->size != endpoint_.meshSize) {
      diagnostics_.error(view->at, "the view has " + std::to_string(view->size) + " ranks, expected " +
                                       std::to_string(endpoint_.meshSize) + ", the size of the mesh");
      diagnostics_.note(endpoint_.meshAt, "mesh defined here");
      return false;
    }
    for (size_t i = 0; i < view->axes.size(); ++i) {
      const ir::Axis &axis = view->axes[i];
      const auto known = std::find_if(endpoint_.axes.begin(), endpoint_.axes.end(),
                                      [&](const ir::Axis &each) { return each.name == axis.name; });
      if (known == endpoint_.axes.end()) {
        endpoint_.axes.push_back(axis);
        axesAt_.push_back(view->axesAt[i]);
        continue;
      }
      std::string why;
      if (known->size != axis.size)
        why = "its size is " + std::to_string(axis.size) + " here and " + std::to_string(known->size) +
              " in an earlier view";
      else if (axis.size > 1 && known->stride != axis.stride)
        why = "its coordinate changes every " + std::to_string(axis.stride) + (axis.stride == 1 ? " rank" : " ranks") +
              " here and every " + std::to_string(known->stride) + " in an earlier view";
      if (why.empty())
        continue;
      diagnostics_.error(view->axesAt[i], "axis '" + axis.name + "' must be the same in all views: " + why);
      diagnostics_.note(axesAt_[static_cast<size_t>(known - endpoint_.axes.begin())], "first defined here");
    }
    return true;
  }

  /// `megatron: {tp, cp, pp, dp, ep, etp, order}` defines a view for dense layers and one for experts. In the latter,
  /// etp replaces tp, and edp replaces dp.
  void readMegatron(const Node &node) {
    Fields fields(node, "'megatron'", diagnostics_);
    if (!fields.isMap())
      return;
    const size_t errorsBefore = diagnostics_.errors();
    std::map<std::string, int64_t> sizes;
    std::map<std::string, Location> at;
    for (const char *axis : {"tp", "cp", "ep", "dp", "pp", "etp"}) {
      const Node *size = fields.find(axis);
      sizes[axis] = size ? readSize(*size, axis).value_or(1) : 1;
      at[axis] = size ? size->at : node.at;
    }
    for (const char *axis : {"tp", "cp", "ep", "dp", "pp", "etp", "edp"})
      if (let_.contains(axis))
        diagnostics_.error(node.at, "axis '" + std::string(axis) +
                                        "' has the same name as a 'let' value, expected another name");
    const Node *stated = fields.find("order");
    const std::vector<std::string> order = readOrder(stated, sizes);
    fields.finish();
    if (diagnostics_.errors() > errorsBefore)
      return;

    MeshView dense{node.at, {}, {}, 1}, experts{node.at, {}, {}, 1};
    for (const std::string &axis : order)
      if (axis != "ep")
        append(dense, axis, sizes[axis], at[axis]);
    if (!checkSize(dense))
      return;
    const int64_t outside = sizes["etp"] * sizes["pp"]; // no overflow, also times ep: each factor is at most 2^20
    if (dense.size % (outside * sizes["ep"]) != 0) {
      diagnostics_.error(at[sizes["ep"] > 1 ? "ep" : "etp"],
                         "etp * ep * pp = " + std::to_string(outside * sizes["ep"]) +
                             " does not divide tp * cp * dp * pp = " + std::to_string(dense.size));
      return;
    }
    sizes["edp"] = dense.size / (outside * sizes["ep"]);
    at["edp"] = node.at;
    for (const std::string &axis : order)
      if (axis != "cp") {
        const std::string name = axis == "tp" ? "etp" : axis == "dp" ? "edp" : axis;
        append(experts, name, sizes[name], at[name]);
      }
    addView(std::move(dense));
    addView(std::move(experts));
  }

  std::vector<std::string> readOrder(const Node *node, const std::map<std::string, int64_t> &sizes) {
    static const std::vector<std::string> kDefault = {"tp", "cp", "ep", "dp", "pp"};
    if (!node)
      return kDefault;
    std::vector<std::string> order;
    const auto text = readText(*node, "'order'", diagnostics_);
    if (!text)
      return kDefault;
    for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
      end = text->find('-', begin);
      const std::string axis = text->substr(begin, end - begin);
      Location at = node->at;
      at.column += static_cast<uint32_t>(begin + node->quoted);
      if (std::find(kDefault.begin(), kDefault.end(), axis) == kDefault.end())
        diagnostics_.error(at, "unknown axis '" + axis + "' in 'order'" + suggestion(axis, kDefault));
      else if (std::find(order.begin(), order.end(), axis) != order.end())
        diagnostics_.error(at, "'order' lists axis '" + axis + "' twice");
      order.push_back(axis);
    }
    for (const std::string &axis : kDefault)
      if (std::find(order.begin(), order.end(), axis) == order.end()) {
        if (sizes.at(axis) > 1)
          diagnostics_.error(node->at, "'order' omits axis '" + axis + "', whose size is " +
                                           std::to_string(sizes.at(axis)) + ", expected every axis larger than 1");
        order.push_back(axis);
      }
    return order;
  }

  const Environment &let_;
  EndpointDeclaration &endpoint_;
  Diagnostics &diagnostics_;
  bool first_ = true;            // no view was added yet
  size_t axes_ = 0;              // number of axes in the views read so far
  std::vector<Location> axesAt_; // locations of endpoint_.axes
};

} // namespace

bool readMesh(const Node &node, const Environment &let, EndpointDeclaration &endpoint, Diagnostics &diagnostics) {
  const size_t errorsBefore = diagnostics.errors();
  endpoint.meshAt = node.at;
  MeshReader(let, endpoint, diagnostics).read(node);
  return diagnostics.errors() == errorsBefore;
}

} // namespace reshard
