// SPDX-License-Identifier: Apache-2.0
// One rank of this process: its segment and the memory of its buffers.
#pragma once

#include "base/status.h"
#include "executor/load/load.h"
#include "kernels/cpu/convert_strided.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace reshard {

/// The memory of all buffers of one mesh rank of an endpoint, by instance; null if not bound.
using PointerTable = std::vector<std::byte *>;

class ViewJobs;

/// One rank of this process: its segment and the memory of its buffers.
struct LocalRank {
  uint32_t rank = 0;
  std::shared_ptr<const schema::Segment> segment;
  /// By BufferRange of the segment: the pointer to the memory of its first instance; the pointers of the others follow
  /// it.
  std::vector<std::byte *const *> memory;
  /// By BufferRange: the storage form of its memory, if it differs from the bytes that are sent. Empty: no buffer's
  /// does.
  std::vector<kernels::StorageForm> forms;
  /// By BufferRange, if it is a quantized view: the base of each instance.
  std::vector<std::vector<kernels::ViewBase>> viewBases;
  /// The jobs before and after all copies and messages; null: none.
  const ViewJobs *viewJobs = nullptr;
  /// The head of the arena, where elements are staged until whole rows of blocks can be quantized; null if there is
  /// none.
  std::byte *arena = nullptr;
  /// By BufferRange: not 0 if a cast found a value beyond the range (overflows.h); null if no cast is watched. With a
  /// device, casts write the numbers to its memory.
  std::shared_ptr<std::vector<uint32_t>> overflowed;
  std::byte *overflowedOnDevice = nullptr;
  /// Bytes of the rank's arena of params with a transform. Transforms allocates them, not the transport.
  uint64_t transformed = 0;

  /// The memory of a buffer; null if it is not bound.
  std::byte *pointer(uint32_t buffer) const;
  kernels::StorageForm form(uint32_t buffer) const;
  /// Null if the buffer is not a quantized view.
  const kernels::ViewBase *viewBase(uint32_t buffer) const;
};

/// The index of the BufferRange with a buffer; the number of ranges if there is none.
size_t bufferRangeOf(const schema::Segment &segment, uint32_t buffer);

/// The storage form of a param whose memory has another dtype than the one that is sent; plain if it has the same.
kernels::StorageForm castOf(const schema::Param &param);

/// The storage forms of a segment's buffers, by BufferRange; empty if all are as sent.
std::vector<kernels::StorageForm> formsOf(const Plan &plan, const schema::Segment &segment);

} // namespace reshard
