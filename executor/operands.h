// What two operands of a plan mean in memory: strided pieces, once loops over buffers are run.
#pragma once

#include "executor/device.h"
#include "executor/transport.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace reshard {

/// The memory of an operand of a rank; without one, bytes side by side in the order of the other side's loops.
struct Side {
  const LocalRank *rank = nullptr;
  const schema::Operand *operand = nullptr;
};

/// Pieces of one shape and one pair of forms, in the order of the operand's loops: piece after piece, row after row,
/// they are its bytes in packed order.
struct Expansion {
  struct At {
    std::byte *source, *target;         // null where there is no operand, or its buffer is not bound
    const kernels::ViewBase *from, *to; // behind faces
  };
  kernels::Strided shape;              // rowBytes of what goes; strides of each side's memory
  kernels::StorageForm source, target; // of the memory of each side that there is
  std::vector<At> at;
};

/// Zeros are zeros in every format: what is to be cast is zeroed as what it becomes.
void castZeros(Expansion &expansion);

/// Expands a pair of operands, one of which may be absent. An error text, empty on success: the sides are unlike.
std::string expand(const Side &source, const Side &target, Expansion &expansion);

/// Whether all that the steps of a rank read and write is bound; an error text that names what is not, empty on
/// success.
std::string checkBound(const Plan &plan, const LocalRank &rank);

/// Appends the copies from one operand to another to tables; without a source operand zeros. An error text, empty on
/// success: the sides are unlike, or a buffer is not bound.
std::string addCopy(const Side &source, const Side &target, Tables &tables);

} // namespace reshard
