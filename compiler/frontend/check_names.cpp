// SPDX-License-Identifier: Apache-2.0
// Checks that the axes and the names in expressions exist, in layouts, endpoints and tensors. Params that `when` omits
// are checked too. Values of expressions are computed later, in compiler/resolve.

#include "compiler/frontend/reading.h"

#include <algorithm>

namespace reshard {

namespace {

/// The names that are visible in an endpoint or a layout.
struct Scope {
  std::vector<std::string> axes;
  Environment names;                          // only the names are used, not the values
  const LayoutDeclaration *listing = nullptr; // the layout, if it lists its axes in `axes`

  void addAxis(const std::string &axis) {
    if (std::find(axes.begin(), axes.end(), axis) == axes.end())
      axes.push_back(axis);
    names.try_emplace(axis, 1);
  }
};

class ReferenceChecker {
public:
  ReferenceChecker(const Job &job, const Allowed &allowed, Diagnostics &diagnostics)
      : job_(job), allowed_(allowed), diagnostics_(diagnostics) {}

  void check() {
    bool bare = false; // whether an endpoint has no layout
    for (const EndpointDeclaration &endpoint : job_.endpoints) {
      Scope scope = scopeOf(endpoint.layoutDeclaration);
      for (const ir::Axis &axis : endpoint.axes)
        scope.addAxis(axis.name);
      for (const auto &[variable, rule] : endpoint.placement)
        checkRule(rule, scope);
      checkAxisRules(endpoint.authority, scope);
      bare = bare || !endpoint.layoutDeclaration;
    }
    for (const LayoutDeclaration &layout : job_.model.layouts) {
      const bool used =
          std::any_of(job_.endpoints.begin(), job_.endpoints.end(),
                      [&](const EndpointDeclaration &endpoint) { return endpoint.layoutDeclaration == &layout; });
      if (used || layout.axes) // an unused layout without `axes` may use axes of another job's meshes
        checkLayout(layout);
    }
    if (!bare)
      return;
    const Scope scope = scopeOf(nullptr);
    for (const auto &[variable, rule] : job_.model.placement)
      checkRule(rule, scope);
    for (const TensorDeclaration &tensor : job_.model.tensors)
      for (const auto &[d, rule] : tensor.shard)
        checkRule(rule, scope);
  }

private:
  Scope scopeOf(const LayoutDeclaration *layout) const {
    Scope scope;
    scope.names = job_.model.let;
    if (layout && layout->axes) {
      scope.listing = layout;
      for (const auto &[axis, at] : *layout->axes)
        scope.addAxis(axis);
    } else {
      for (const EndpointDeclaration &endpoint : job_.endpoints)
        for (const ir::Axis &axis : endpoint.axes)
          scope.addAxis(axis.name);
    }
    if (layout)
      for (const auto &[name, value] : layout->switches)
        scope.names.try_emplace(name, 0);
    return scope;
  }

  void checkAxis(const std::string &axis, Location at, const Scope &scope) {
    if (std::find(scope.axes.begin(), scope.axes.end(), axis) != scope.axes.end())
      return;
    const std::string message =
        (scope.listing ? "axis '" + axis + "' is not one of the axes of layout '" + scope.listing->name + "'"
                       : "unknown axis '" + axis + "'") +
        suggestion(axis, scope.axes);
    if (allowed_.axis)
      diagnostics_.warning(at, message);
    else
      diagnostics_.error(at, message);
  }

  void checkExpression(const Expression &expression, const Scope &scope) {
    checkNames(expression, scope.names, diagnostics_);
  }

  void checkRule(const ShardRule &rule, const Scope &scope) {
    for (const auto &[axis, at] : rule.axes)
      checkAxis(axis, at, scope);
    for (const Expression &number : rule.numbers)
      checkExpression(number, scope);
    for (const auto &list : rule.lists)
      for (const Expression &number : list)
        checkExpression(number, scope);
    for (const auto *each :
         {&rule.unit, &rule.when, &rule.interleave, &rule.first, &rule.last, &rule.embedding, &rule.loss})
      if (*each)
        checkExpression(**each, scope);
  }

  void checkAxisRules(const AxisRules &rules, const Scope &scope) {
    Scope coordinates = scope;
    coordinates.names["first"] = coordinates.names["last"] = 0;
    for (const auto &[axis, rule] : rules) {
      checkAxis(axis, rule.at, scope);
      for (const Expression &coordinate : rule.coordinates)
        checkExpression(coordinate, coordinates);
    }
  }

  void checkPack(const Pack &pack, const Scope &scope) {
    for (const auto *each : {&pack.groups, &pack.align, &pack.when})
      if (*each)
        checkExpression(**each, scope);
    for (const Pack &entry : pack.of)
      checkPack(entry, scope);
  }

  void checkLayout(const LayoutDeclaration &layout) {
    const Scope scope = scopeOf(&layout);
    for (const auto &[name, value] : layout.switches)
      if (std::find(scope.axes.begin(), scope.axes.end(), name) != scope.axes.end() && !layout.axes)
        diagnostics_.error(value.at, "switch '" + name + "' has the same name as an axis, expected another name");
    for (const auto &[variable, rule] : layout.placement)
      checkRule(rule, scope);
    for (const auto &[glob, rules] : layout.shard)
      for (const auto &[d, rule] : rules)
        checkRule(rule, scope);
    for (const ParamDeclaration &param : layout.params) {
      checkPack(param.pack, scope);
      for (const auto &[d, multiple] : param.pad)
        checkExpression(multiple, scope);
      for (const auto &[d, rule] : param.shard)
        checkRule(rule, scope);
      checkAxisRules(param.presence, scope);
      if (param.when)
        checkExpression(*param.when, scope);
    }
  }

  const Job &job_;
  const Allowed &allowed_;
  Diagnostics &diagnostics_;
};

} // namespace

void checkReferences(const Job &job, const Allowed &allowed, Diagnostics &diagnostics) {
  ReferenceChecker(job, allowed, diagnostics).check();
}

} // namespace reshard
