// Cutting descriptors at a number of bytes.
#pragma once

#include "compiler/resolve/interner.h"
#include "ir/ir.h"

#include <vector>

namespace reshard {

/// Bytes that a shape moves.
int64_t bytesOf(const ir::Shape &shape);

/// A descriptor `at` steps of a loop on, with another shape (its number).
ir::Descriptor stepped(ir::Descriptor descriptor, int64_t at, const ir::Loop &step, uint32_t shape);

/// Takes descriptors one after the other, in the order of their bytes.
class DescriptorCutter {
public:
  /// New shapes are interned in `shapes`, which outlives this.
  explicit DescriptorCutter(Interner<ir::Shape> &shapes) : shapes_(shapes) {}

  /// Moves the first `bytes` bytes of `stack`, whose first descriptor is its last element and which has as many, to the
  /// end of `pieces`. A descriptor across the end is cut: between steps of its outermost loop, then within a step, at
  /// last in a row.
  void take(std::vector<ir::Descriptor> &stack, int64_t bytes, std::vector<ir::Descriptor> &taken);

private:
  /// Head and rest of a descriptor of more than `bytes` bytes; each at most two pieces for every loop.
  void split(const ir::Descriptor &descriptor, const ir::Shape &shape, int64_t bytes, std::vector<ir::Descriptor> &head,
             std::vector<ir::Descriptor> &rest);

  Interner<ir::Shape> &shapes_;
};

} // namespace reshard
