// SPDX-License-Identifier: Apache-2.0
// The values of one tensor, which several instances hold.
#pragma once

#include "schema/element_ranges.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace reshard::verify {

/// Zero-initialized bytes whose pages take memory only when written: a plan may declare a tensor that is much larger
/// than all shards of it.
class LazyBuffer {
public:
  LazyBuffer() = default;
  LazyBuffer(LazyBuffer &&other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  LazyBuffer &operator=(LazyBuffer &&) = delete;
  ~LazyBuffer();

  std::byte &operator[](int64_t at) { return data_[at]; }
  const std::byte &operator[](int64_t at) const { return data_[at]; }
  /// Throws std::runtime_error if the address space is exhausted, std::bad_alloc if memory is.
  void grow(size_t bytes);

private:
  std::byte *data_ = nullptr;
  size_t bytes_ = 0;
};

/// Elements of a tensor that follow each other: all known and contiguous in memory, or all unknown.
struct ValueSpan {
  int64_t count;
  const std::byte *data; // the first one's; null: unknown
};

/// The values of a tensor: long contiguous ranges stay where they are, others are copied. All elements have the same
/// size, `item` bytes.
class TensorValues {
public:
  static constexpr int64_t kMinReferred = 512; // bytes of a range that stays where it is, many times those of its entry

  /// Adds elements whose memory outlives this object. finish() must follow the last call.
  void refer(const schema::ElementRange &range, const std::byte *memory, int64_t item);
  /// Orders the ranges. Of an element that was added twice, one value remains. Returns whether there is one.
  bool finish();

  /// Adds copies of elements. `agree`: those that were copied already must be equal (see conflict()).
  void put(const schema::ElementRange &range, const std::byte *memory, int64_t item, bool agree);

  /// The longest span that begins at an element, of at most `most` elements, at least one. After finish().
  ValueSpan span(int64_t element, int64_t most, int64_t item) const;

  /// An element for which two instances have different values; -1: none.
  int64_t conflict() const { return conflict_; }
  /// The number of bytes that were copied.
  size_t copiedBytes() const { return copiedBytes_; }

private:
  struct Run {
    int64_t first, count, item;
    const std::byte *data;
    int64_t end() const { return first + count; }
  };
  bool copied(int64_t element) const {
    return element < room_ && (std::to_integer<int>(copied_[element / 8]) >> (element % 8) & 1) != 0;
  }
  void addLast();
  void putRun(int64_t first, int64_t count, const std::byte *from, int64_t item, bool agree);
  void copy(int64_t first, int64_t count, const std::byte *from, int64_t item);
  void grow(int64_t end, int64_t item);
  ValueSpan copiedSpan(int64_t element, int64_t most, int64_t item) const;

  Run last_{0, 0, 0, nullptr}; // later ranges may continue it
  std::vector<Run> runs_;      // after finish(): by element, without overlaps
  LazyBuffer bytes_, copied_;  // the copies, and a bit for each element
  int64_t room_ = 0, conflict_ = -1;
  size_t copiedBytes_ = 0;
  bool twice_ = false;
};

} // namespace reshard::verify
