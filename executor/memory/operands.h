// SPDX-License-Identifier: Apache-2.0
// Expands operands of a plan to strided ranges of memory.
#pragma once

#include "executor/interfaces/device.h"
#include "executor/memory/local_rank.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace reshard {

/// One side of a copy: an operand of a rank. Without an operand: contiguous bytes, in the order of the other side's
/// loops.
struct Side {
  const LocalRank *rank = nullptr;
  const schema::Operand *operand = nullptr;
};

/// The strided ranges of a pair of operands, all of one shape and one pair of storage forms, in the order of the
/// operands' loops: range by range, row by row, they are the bytes in packed order.
struct Expansion {
  struct Addresses {
    std::byte *source, *target;         // null if there is no operand, or its buffer is not bound
    const kernels::ViewBase *from, *to; // the bases of quantized views; null if the buffer is none
  };
  kernels::Strided shape;              // rowBytes as sent; strides of each side's memory
  kernels::StorageForm source, target; // how each side's memory differs; default if the side has no operand
  std::vector<Addresses> at;           // by range
};

/// For fills: if the target is cast, changes the expansion to bytes of its storage dtype, since zero bytes are zeros in
/// every format.
void castZeros(Expansion &expansion);

/// Expands a pair of operands, one of which may be absent. Fails if their shapes differ.
Status expand(const Side &source, const Side &target, Expansion &expansion);

/// Checks that all buffers that the steps of a rank read or write are bound. The error names one that is not, and is of
/// kind badBinding.
Status checkBound(const Plan &plan, const LocalRank &rank);

/// Appends the copies from one operand to another to tables; without a source operand, zeros. Fails if the shapes
/// differ or a buffer is not bound.
Status addCopy(const Side &source, const Side &target, Tables &tables);

} // namespace reshard
