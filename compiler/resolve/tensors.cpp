// SPDX-License-Identifier: Apache-2.0
// Makes a tensor pattern of each tensor that exists and is not tied to another, and finds tensors by name or by the end
// of a name.
#include "compiler/resolve/tensors.h"

#include <algorithm>

namespace reshard {

std::string shapeText(const std::vector<int64_t> &shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i)
    text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

namespace {

/// The values of an index variable for which a tensor exists, numbered densely.
ir::IndexMap existing(const TensorDeclaration &tensor, const ir::IndexVariable &variable) {
  const auto where = tensor.where.find(variable.name);
  if (where == tensor.where.end())
    return ir::identity(variable.size);
  return valuesOf(where->second);
}

std::vector<std::string> sorted(std::vector<std::string> list) {
  std::sort(list.begin(), list.end());
  return list;
}

std::string braces(const std::vector<std::string> &variables) {
  std::string text;
  for (const std::string &variable : variables)
    text += (text.empty() ? "{" : ", {") + variable + "}";
  return text.empty() ? "none" : text;
}

} // namespace

ir::IndexMap valuesOf(const std::vector<IntegerRange> &ranges) {
  ir::IndexMap values;
  int64_t next = 0;
  for (const IntegerRange &range : ranges) {
    const int64_t length = range.last - range.first + 1;
    values.push_back({range.first, next, length, 1, 0, 0});
    next += length;
  }
  return normalize(std::move(values));
}

Tensors::Tensors(const Model &model, Diagnostics &diagnostics) {
  for (const TensorDeclaration &declaration : model.tensors) {
    const unsigned number = static_cast<unsigned>(tensors_.size());
    tensors_.push_back({&declaration, 0, number, declaration.absent});
    byName_.emplace(declaration.name, number);
    reversed_.emplace_back(std::string(declaration.name.rbegin(), declaration.name.rend()), number);
  }
  std::sort(reversed_.begin(), reversed_.end());
  for (unsigned i = 0; i < tensors_.size(); ++i)
    if (const auto &tied = tensors_[i].declaration->tied)
      if (const auto other = find(tied->first, tied->second, diagnostics)) {
        if (tensors_[*other].declaration->tied)
          diagnostics.error(tied->second,
                            "tensor '" + name(i) + "' is tied to '" + name(*other) + "', which is itself tied to '" +
                                tensors_[*other].declaration->tied->first + "', expected a tensor that is not tied");
        else if (tensors_[*other].absent != tensors_[i].absent && !tensors_[i].absent)
          diagnostics.error(tied->second, "tensor '" + name(i) + "' is tied to '" + name(*other) +
                                              "', which does not exist: its 'when' is 0");
        else
          tensors_[i].canonical = *other;
      }
  for (unsigned i = 0; i < tensors_.size(); ++i)
    if (tensors_[i].canonical == i && !tensors_[i].absent) {
      tensors_[i].pattern = static_cast<unsigned>(tensorPatterns_.size());
      tensorPatterns_.push_back(readTensorPattern(model, i, diagnostics));
      canonical_.push_back(i);
    }
  for (unsigned i = 0; i < tensors_.size(); ++i)
    if (tensors_[i].canonical != i && !tensors_[i].absent) {
      tensors_[i].pattern = tensors_[tensors_[i].canonical].pattern;
      checkTie(i, diagnostics);
    }
}

ir::TensorPattern Tensors::readTensorPattern(const Model &model, unsigned tensor, Diagnostics &diagnostics) const {
  const TensorDeclaration &declaration = *tensors_[tensor].declaration;
  ir::TensorPattern pattern;
  pattern.name = declaration.name;
  pattern.shape = declaration.shape;
  pattern.dtype = declaration.dtype;
  int64_t bytes = itemBytes(declaration.dtype);
  bool fits = true;
  auto multiply = [&](int64_t length) {
    fits = fits && !__builtin_mul_overflow(bytes, length, &bytes) && bytes <= kMaxBytes;
  };
  for (const std::string &name : declaration.variables) {
    const auto variable = std::find_if(model.variables.begin(), model.variables.end(),
                                       [&](const ir::IndexVariable &known) { return known.name == name; });
    if (variable == model.variables.end()) {
      std::vector<std::string> known;
      known.reserve(model.variables.size());
      for (const ir::IndexVariable &each : model.variables)
        known.push_back(each.name);
      diagnostics.error(declaration.at, "unknown index variable '" + name + "'" + suggestion(name, known));
      continue;
    }
    pattern.variables.push_back(static_cast<unsigned>(variable - model.variables.begin()));
    pattern.exists.push_back(existing(declaration, *variable));
    multiply(positionCount(pattern.exists.back()));
  }
  for (int64_t length : declaration.shape) {
    multiply(length);
    fits = fits && length <= kMaxRows;
  }
  if (!fits)
    diagnostics.error(declaration.shapeAt, "tensor '" + declaration.name + "' of shape " +
                                               shapeText(declaration.shape) +
                                               " has more than 2^60 bytes over all its index values");
  return pattern;
}

/// A tied tensor has the shape, dtype and index values of the other. If it states a shape, that must be the same.
void Tensors::checkTie(unsigned tensor, Diagnostics &diagnostics) const {
  const TensorDeclaration &one = *tensors_[tensor].declaration,
                          &other = *tensors_[tensors_[tensor].canonical].declaration;
  const std::string pair = "tensor '" + one.name + "' cannot be tied to '" + other.name + "': ";
  if (sorted(one.variables) != sorted(other.variables))
    diagnostics.error(one.tied->second, pair + "its index variables are " + braces(one.variables) + ", expected " +
                                            braces(other.variables));
  else if (one.shapeAt.line != 0 && (one.shape != other.shape || one.dtype != other.dtype))
    diagnostics.error(one.shapeAt, pair + "it is " + ir::name(one.dtype) + " " + shapeText(one.shape) + ", expected " +
                                       ir::name(other.dtype) + " " + shapeText(other.shape));
}

/// A suggestion among the names and their suffixes. Nothing after many errors: it is slow, and few errors are printed.
std::string Tensors::nearest(const std::string &name, const Diagnostics &diagnostics) const {
  constexpr size_t kManyErrors = 100, kParts = 4;
  if (diagnostics.errors() >= kManyErrors)
    return {};
  std::vector<std::string> known;
  for (const auto &[each, number] : byName_) {
    known.push_back(each);
    size_t dot = each.rfind('.');
    for (size_t i = 0; i < kParts && dot != std::string::npos && dot > 0; ++i, dot = each.rfind('.', dot - 1))
      known.push_back(each.substr(dot + 1));
  }
  std::sort(known.begin(), known.end());
  known.erase(std::unique(known.begin(), known.end()), known.end());
  return suggestion(name, known);
}

/// The tensor of that name, or all whose names end in `.name`.
std::vector<unsigned> Tensors::matching(const std::string &name) const {
  if (const auto exact = byName_.find(name); exact != byName_.end())
    return {exact->second};
  std::string prefix(name.rbegin(), name.rend());
  prefix += '.';
  std::vector<unsigned> result;
  for (auto at = std::lower_bound(reversed_.begin(), reversed_.end(), std::pair(prefix, 0u));
       at != reversed_.end() && at->first.starts_with(prefix); ++at)
    result.push_back(at->second);
  return result;
}

bool Tensors::opaque(const ir::Param &param) const {
  return std::any_of(param.parts.begin(), param.parts.end(), [&](const ir::Part &part) {
    return part.pattern >= 0 && opaque(canonical(static_cast<unsigned>(part.pattern)));
  });
}

std::optional<unsigned> Tensors::find(const std::string &name) const {
  const std::vector<unsigned> found = matching(name);
  return found.size() == 1 ? std::optional(found[0]) : std::nullopt;
}

std::optional<unsigned> Tensors::find(const std::string &name, Location at, Diagnostics &diagnostics) const {
  std::vector<unsigned> found = matching(name);
  if (found.size() == 1)
    return found[0];
  if (found.empty()) {
    diagnostics.error(at, "unknown tensor '" + name + "'" + nearest(name, diagnostics));
    return std::nullopt;
  }
  std::sort(found.begin(), found.end());
  std::string candidates;
  constexpr size_t kShown = 8;
  for (size_t i = 0; i < found.size() && i < kShown; ++i)
    candidates += (i ? ", '" : "'") + this->name(found[i]) + "'";
  if (found.size() > kShown)
    candidates += " and " + std::to_string(found.size() - kShown) + " more";
  diagnostics.error(at, "'" + name + "' matches several tensors: " + candidates + "; expected a name that matches one");
  return std::nullopt;
}

} // namespace reshard
