// SPDX-License-Identifier: Apache-2.0
// Cuts descriptors at a number of bytes, lists those of each flow before and after flows are cut where messages end,
// and numbers the routes that they share.
#include "compiler/schedule/flow_descriptors.h"

#include "compiler/resolve/interner.h"
#include "compiler/transfer/lists.h"

#include <algorithm>

namespace reshard {

using namespace ir;

int64_t bytesOf(const Shape &shape) {
  int64_t bytes = shape.rowBytes;
  for (const Loop &loop : shape.loops)
    bytes *= loop.count;
  return bytes;
}

Descriptor stepped(Descriptor descriptor, int64_t at, const Loop &step, uint32_t shape) {
  descriptor.sourceOffset += at * step.sourceStride;
  descriptor.targetOffset += at * step.targetStride;
  descriptor.sourceInstance += static_cast<uint32_t>(at * step.sourceStep);
  descriptor.targetInstance += static_cast<uint32_t>(at * step.targetStep);
  descriptor.shape = shape;
  return descriptor;
}

void DescriptorCutter::take(std::vector<Descriptor> &stack, int64_t bytes, std::vector<Descriptor> &taken) {
  while (bytes > 0) {
    const Descriptor next = stack.back();
    const int64_t size = bytesOf(shapes_[next.shape]);
    stack.pop_back();
    if (size <= bytes) {
      taken.push_back(next);
      bytes -= size;
      continue;
    }
    std::vector<Descriptor> rest;
    split(next, Shape(shapes_[next.shape]), bytes, taken, rest);
    stack.insert(stack.end(), rest.rbegin(), rest.rend());
    return;
  }
}

void DescriptorCutter::split(const Descriptor &descriptor, const Shape &shape, int64_t bytes,
                             std::vector<Descriptor> &head, std::vector<Descriptor> &rest) {
  auto put = [&](int64_t at, const Loop &step, Shape part, std::vector<Descriptor> &list) {
    list.push_back(stepped(descriptor, at, step, shapes_.intern(std::move(part))));
  };
  if (shape.loops.empty()) {
    const Loop byte{shape.rowBytes, 1, 1, 0, 0};
    put(0, byte, {bytes, {}}, head);
    put(bytes, byte, {shape.rowBytes - bytes, {}}, rest);
    return;
  }
  const Loop outer = shape.loops.front();
  const int64_t inner = bytesOf(shape) / outer.count, whole = bytes / inner;
  auto steps = [&](int64_t count) {
    Shape part = shape;
    if (count == 1)
      part.loops.erase(part.loops.begin());
    else
      part.loops.front().count = count;
    return part;
  };
  if (whole > 0)
    put(0, outer, steps(whole), head);
  int64_t next = whole;
  if (bytes > whole * inner) {
    std::vector<Descriptor> one;
    put(whole, outer, steps(1), one);
    split(one[0], steps(1), bytes - whole * inner, head, rest);
    ++next;
  }
  if (next < outer.count)
    put(next, outer, steps(outer.count - next), rest);
}

std::vector<Descriptor> FlowDescriptors::all() const {
  std::vector<Descriptor> descriptors;
  descriptors.reserve(numbers_.size());
  for (const uint32_t number : numbers_)
    descriptors.push_back((*this)[number]);
  return descriptors;
}

void FlowDescriptors::clear() {
  cut_.clear();
  numbers_.clear();
  firsts_ = {0};
  listOf_.clear();
}

DescriptorCuts FlowDescriptors::cuts(size_t first, size_t last,
                                     llvm::function_ref<int64_t(const Descriptor &)> blockBytes) const {
  const llvm::ArrayRef<uint32_t> listOf = llvm::ArrayRef(listOf_).slice(first, last - first);
  const uint32_t firstList = *std::min_element(listOf.begin(), listOf.end()),
                 lists = *std::max_element(listOf.begin(), listOf.end()) + 1;
  DescriptorCuts cuts(firsts_[lists] - firsts_[firstList], listOf, firstList);
  for (size_t list = firstList; list < lists; ++list, cuts.endList())
    for (size_t i = firsts_[list]; i < firsts_[list + 1]; ++i) {
      const Descriptor &d = (*this)[numbers_[i]];
      cuts.add(bytesOf(shapes_[d.shape]), shapes_[d.shape].rowBytes, blockBytes(d));
    }
  return cuts;
}

void FlowDescriptors::cut(llvm::ArrayRef<Message> messages) {
  constexpr uint32_t kNone = UINT32_MAX;
  std::vector<llvm::SmallVector<int64_t, 1>> ends(listOf_.size());
  for (const Message &message : messages)
    for (const Grant &grant : message.grants)
      ends[grant.flow].push_back(grant.end);
  std::vector<uint32_t> whole(firsts_.size(), kNone); // by list of descriptors: its ranges, if none is cut
  ranges_.reserve(numbers_.size());
  rangesOf_.reserve(listOf_.size());
  for (size_t flow = 0; flow < listOf_.size(); ++flow) {
    const uint32_t list = listOf_[flow];
    std::sort(ends[flow].begin(), ends[flow].end());
    ends[flow].erase(std::unique(ends[flow].begin(), ends[flow].end()), ends[flow].end());
    const bool none = cutsNone(list, ends[flow]);
    if (none && whole[list] != kNone) {
      rangesOf_.push_back(whole[list]);
      continue;
    }
    rangesOf_.push_back(static_cast<uint32_t>(firstRange_.size()));
    firstRange_.push_back(ranges_.size());
    if (none) {
      whole[list] = rangesOf_.back();
      addWhole(list);
    } else {
      addParts(list, ends[flow]);
    }
  }
  firstRange_.push_back(ranges_.size());
  freeMemory(numbers_);
}

/// Whether none of `ends` is inside a descriptor of a list.
bool FlowDescriptors::cutsNone(uint32_t list, llvm::ArrayRef<int64_t> ends) const {
  int64_t at = 0;
  for (size_t i = firsts_[list]; i < firsts_[list + 1] && !ends.empty(); ++i) {
    at += bytesAt(i);
    while (!ends.empty() && ends.front() <= at) {
      if (ends.front() < at)
        return false;
      ends = ends.drop_front();
    }
  }
  return true;
}

/// Appends the ranges of a list, one for each descriptor.
void FlowDescriptors::addWhole(uint32_t list) {
  int64_t at = 0;
  for (size_t i = firsts_[list]; i < firsts_[list + 1]; ++i) {
    ranges_.push_back({at, numbers_[i]});
    at += bytesAt(i);
  }
}

/// Appends the ranges of a list, whose descriptors are cut at `ends`.
void FlowDescriptors::addParts(uint32_t list, llvm::ArrayRef<int64_t> ends) {
  std::vector<Descriptor> stack, taken;
  for (size_t i = firsts_[list + 1]; i-- > firsts_[list];)
    stack.push_back((*this)[numbers_[i]]);
  int64_t at = 0;
  for (int64_t end : ends) {
    taken.clear();
    cutter_.take(stack, end - at, taken);
    for (const Descriptor &d : taken) {
      ranges_.push_back({at, addCut(d)});
      at += bytesOf(shapes_[d.shape]);
    }
  }
}

RouteNumbers::RouteNumbers(const Layout &layout, const std::vector<Route> &routes) : numbers_(layout.endpoints.size()) {
  Interner<Route> byRanks;
  for (const Route &route : routes)
    for (size_t e = 1; e < layout.endpoints.size(); ++e) {
      const std::vector<int32_t> &ranks = layout.endpoints[e].ranks;
      const bool has = std::all_of(route.begin(), route.end(),
                                   [&](const Hop &hop) { return std::max(hop.from, hop.to) < std::ssize(ranks); });
      Route world;
      for (size_t hop = 0; has && hop < route.size(); ++hop)
        world.push_back({ranks[route[hop].from], ranks[route[hop].to]});
      numbers_[e].push_back(has ? static_cast<int32_t>(byRanks.intern(std::move(world))) : -1);
    }
}

} // namespace reshard
