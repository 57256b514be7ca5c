// SPDX-License-Identifier: Apache-2.0
// The model's tensors by name: which tensor a name in a layout means, and which tensors are tied to one.
#pragma once

#include "compiler/frontend/frontend.h"
#include "ir/ir.h"

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace reshard {

/// The longest dimension: sums of lengths and lengths rounded up cannot overflow.
constexpr int64_t kMaxRows = int64_t(1) << 60;

/// Tensors as declared, each with its tensor pattern: its own, or that of the tensor that it is tied to.
class Tensors {
public:
  /// Reports errors: an unknown, ambiguous or tied tensor in `tied`; tied tensors that differ; too many elements.
  Tensors(const Model &model, Diagnostics &diagnostics);

  struct Tensor {
    const TensorDeclaration *declaration = nullptr;
    unsigned pattern = 0;
    unsigned canonical = 0; // the declared tensor that defines the pattern
    bool absent = false;    // its `when` is 0: it has no pattern
  };
  const std::vector<Tensor> &all() const { return tensors_; }
  const std::vector<ir::TensorPattern> &tensorPatterns() const { return tensorPatterns_; }
  const ir::TensorPattern &patternOf(unsigned tensor) const { return tensorPatterns_[tensors_[tensor].pattern]; }
  const std::string &name(unsigned tensor) const { return tensors_[tensor].declaration->name; }
  /// Whether its bytes cannot be split.
  bool opaque(unsigned tensor) const { return tensors_[tensors_[tensor].canonical].declaration->opaque; }
  /// Whether a param holds elements of such a tensor.
  bool opaque(const ir::Param &param) const;
  /// The declared tensor that defines a pattern.
  unsigned canonical(unsigned pattern) const { return canonical_[pattern]; }

  /// The tensor of that name or, if there is none, the only one whose name ends in `.name`. Reports at `at` that there
  /// is none (with the nearest name) or that there are several (with the candidates).
  std::optional<unsigned> find(const std::string &name, Location at, Diagnostics &diagnostics) const;
  /// The same without errors.
  std::optional<unsigned> find(const std::string &name) const;

private:
  ir::TensorPattern readTensorPattern(const Model &model, unsigned tensor, Diagnostics &diagnostics) const;
  std::vector<unsigned> matching(const std::string &name) const;
  std::string nearest(const std::string &name, const Diagnostics &diagnostics) const;
  void checkTie(unsigned tensor, Diagnostics &diagnostics) const;

  std::vector<Tensor> tensors_;
  std::vector<ir::TensorPattern> tensorPatterns_;
  std::vector<unsigned> canonical_;
  std::unordered_map<std::string, unsigned> byName_;
  // Reversed names, sorted: names with a common suffix are adjacent.
  std::vector<std::pair<std::string, unsigned>> reversed_;
};

/// The values of sorted, disjoint ranges, numbered densely.
ir::IndexMap valuesOf(const std::vector<IntegerRange> &ranges);

/// "[3, 4]".
std::string shapeText(const std::vector<int64_t> &shape);

} // namespace reshard
