// SPDX-License-Identifier: Apache-2.0
// Cuts descriptors at a number of bytes.
#pragma once

#include "compiler/resolve/interner.h"
#include "ir/ir.h"

#include <vector>

namespace reshard {

/// The bytes that a descriptor of this shape moves.
int64_t bytesOf(const ir::Shape &shape);

/// The descriptor `at` iterations of loop `step` later, with the shape of number `shape`.
ir::Descriptor stepped(ir::Descriptor descriptor, int64_t at, const ir::Loop &step, uint32_t shape);

/// Takes bytes from the front of a list of descriptors, in the order in which the descriptors move them.
class DescriptorCutter {
public:
  /// New shapes are interned in `shapes`, which must outlive this object.
  explicit DescriptorCutter(Interner<ir::Shape> &shapes) : shapes_(shapes) {}

  /// Moves the first `bytes` bytes of `stack` to the end of `taken`. `stack` lists descriptors in reverse order and
  /// must have that many bytes. A descriptor that crosses the end is cut between iterations of its outermost loop, then
  /// inside one iteration, finally inside a row.
  void take(std::vector<ir::Descriptor> &stack, int64_t bytes, std::vector<ir::Descriptor> &taken);

private:
  /// Cuts a descriptor of more than `bytes` bytes into `head` and `rest`, each of at most two descriptors for every
  /// loop.
  void split(const ir::Descriptor &descriptor, const ir::Shape &shape, int64_t bytes, std::vector<ir::Descriptor> &head,
             std::vector<ir::Descriptor> &rest);

  Interner<ir::Shape> &shapes_;
};

} // namespace reshard
