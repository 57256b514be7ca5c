// SPDX-License-Identifier: Apache-2.0
// The descriptors of flows, before and after they are cut where messages end.
#pragma once

#include "compiler/resolve/interner.h"
#include "compiler/schedule/rounds.h"
#include "compiler/transfer/staging.h"
#include "ir/ir.h"

#include "llvm/ADT/STLFunctionalExtras.h"

#include <algorithm>
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

/// Cuts flows between rows if rows are small, else at multiples of the staging alignment, else between elements.
class DescriptorCuts : public Cuts {
public:
  /// `count`: how many descriptors will be added. `listOf`: by flow, the number of its list of descriptors, from
  /// `firstList` on; empty: each flow has its own.
  explicit DescriptorCuts(size_t count, llvm::ArrayRef<uint32_t> listOf = {}, uint32_t firstList = 0)
      : listOf_(listOf), firstList_(firstList) {
    ranges_.reserve(count);
  }

  /// Appends a descriptor to the current list. `row`: bytes of a row; `block`: bytes of a quantization block, inside
  /// which it is not cut, or 0.
  void add(int64_t bytes, int64_t row, int64_t block) {
    const int64_t begin = ranges_.size() == firsts_.back() ? 0 : ranges_.back().end;
    ranges_.push_back(
        {begin, begin + bytes, row,
         block > 0 ? block : std::min<int64_t>(row & -row, 16)}); // an element has a power of two bytes, 16 at most
  }
  /// The next descriptor belongs to the next list.
  void endList() { firsts_.push_back(ranges_.size()); }

  bool possible(uint32_t flow, int64_t at) const override {
    const Range &range = rangeOf(flow, at);
    return (at - range.begin) % range.granule == 0;
  }

  int64_t best(uint32_t flow, int64_t from, int64_t to) const override {
    const Range &range = rangeOf(flow, to);
    for (int64_t step : {range.row <= (to - from) / 8 ? range.row : kStagingAlignment, range.granule})
      if (const int64_t position = range.begin + (to - range.begin) / step * step; position > from)
        return position;
    return from;
  }

private:
  /// Bytes [begin, end) of a flow: one descriptor. It is cut only at multiples of `granule` bytes after `begin`.
  struct Range {
    int64_t begin, end, row, granule;
  };
  const Range &rangeOf(uint32_t flow, int64_t at) const {
    const uint32_t list = listOf_.empty() ? flow : listOf_[flow] - firstList_;
    return *std::lower_bound(ranges_.begin() + static_cast<ptrdiff_t>(firsts_[list]),
                             ranges_.begin() + static_cast<ptrdiff_t>(firsts_[list + 1]), at,
                             [](const Range &range, int64_t to) { return range.end < to; });
  }

  llvm::ArrayRef<uint32_t> listOf_;
  uint32_t firstList_;
  std::vector<Range> ranges_; // list after list
  std::vector<size_t> firsts_ = {0};
};

/// Bytes of a flow from `begin` on, in which no message begins or ends, and the number of their descriptor. A large job
/// has many millions of them.
struct FlowRange {
  int64_t begin;
  uint32_t descriptor;
};

/// Descriptors are numbered: the module's, then the cut ones. Flows to copies of a target share lists.
class FlowDescriptors {
public:
  /// `whole`: the module's.
  FlowDescriptors(const std::vector<ir::Descriptor> &whole, const Interner<ir::Shape> &shapes, DescriptorCutter &cutter)
      : whole_(whole), shapes_(shapes), cutter_(cutter) {}

  const ir::Descriptor &operator[](uint32_t number) const {
    return number < whole_.size() ? whole_[number] : cut_[number - whole_.size()];
  }
  /// Adds a descriptor that was cut; returns its number.
  uint32_t addCut(const ir::Descriptor &d) {
    cut_.push_back(d);
    return static_cast<uint32_t>(whole_.size() + cut_.size() - 1);
  }

  /// The descriptors that are added next belong to a new flow.
  void beginFlow() {
    listOf_.push_back(static_cast<uint32_t>(firsts_.size() - 1));
    firsts_.push_back(numbers_.size());
  }
  /// Adds a descriptor to the last flow.
  void add(uint32_t number) {
    numbers_.push_back(number);
    ++firsts_.back();
  }
  /// The descriptors of all flows, flow after flow, and the first of each flow.
  std::vector<ir::Descriptor> all() const;
  const std::vector<size_t> &firsts() const { return firsts_; }
  /// Removes all flows and cut descriptors.
  void clear();
  /// Replaces the flows: flow i has the list of flow lists[i] of those before.
  void repeat(std::vector<uint32_t> lists) { listOf_ = std::move(lists); }

  /// The positions at which flows [first, last), counted from 0, may be cut. `blockBytes`: the length of a
  /// quantization block, inside which a descriptor is not cut, or 0.
  DescriptorCuts cuts(size_t first, size_t last, llvm::function_ref<int64_t(const ir::Descriptor &)> blockBytes) const;

  /// Makes the ranges of all flows, cut where messages end. The lists are not needed any more.
  void cut(llvm::ArrayRef<Message> messages);
  llvm::ArrayRef<FlowRange> ranges(size_t flow) const {
    const size_t first = firstRange_[rangesOf_[flow]];
    return llvm::ArrayRef(ranges_).slice(first, firstRange_[rangesOf_[flow] + 1] - first);
  }

  // Each loads what the next one reads. Inlined, because GCC removes a call of a function that does nothing else.
  LLVM_ATTRIBUTE_ALWAYS_INLINE void prefetchFlow(size_t flow) const { __builtin_prefetch(&rangesOf_[flow]); }
  LLVM_ATTRIBUTE_ALWAYS_INLINE void prefetchRanges(size_t flow) const {
    __builtin_prefetch(&ranges_[firstRange_[rangesOf_[flow]]]);
  }
  LLVM_ATTRIBUTE_ALWAYS_INLINE void prefetchDescriptors(size_t flow, size_t most) const {
    for (const FlowRange &range : ranges(flow).take_front(most))
      __builtin_prefetch(&(*this)[range.descriptor]);
  }

private:
  int64_t bytesAt(size_t i) const { return bytesOf(shapes_[(*this)[numbers_[i]].shape]); }
  bool cutsNone(uint32_t list, llvm::ArrayRef<int64_t> ends) const;
  void addWhole(uint32_t list);
  void addParts(uint32_t list, llvm::ArrayRef<int64_t> ends);

  const std::vector<ir::Descriptor> &whole_;
  const Interner<ir::Shape> &shapes_;
  DescriptorCutter &cutter_;
  std::vector<ir::Descriptor> cut_;
  std::vector<uint32_t> numbers_;    // the descriptors of list after list
  std::vector<size_t> firsts_ = {0}; // by list: its first in numbers_
  std::vector<uint32_t> listOf_;     // by flow
  std::vector<FlowRange> ranges_;    // list after list
  std::vector<size_t> firstRange_;   // by list of ranges: its first in ranges_
  std::vector<uint32_t> rangesOf_;   // by flow: its list of ranges
};

/// A route of the IR names mesh ranks, which are other world ranks for each target. Its number here is equal for equal
/// world ranks: bytes that pass the same ranks are one flow, to whichever target.
class RouteNumbers {
public:
  RouteNumbers(const ir::Layout &layout, const std::vector<ir::Route> &routes);

  /// The number of a route, which may be -1 for none, of a target.
  int32_t operator()(unsigned endpoint, int32_t route) const { return route < 0 ? -1 : numbers_[endpoint][route]; }

private:
  std::vector<std::vector<int32_t>> numbers_; // by endpoint and route; -1: the endpoint lacks a mesh rank of it
};

} // namespace reshard
