// SPDX-License-Identifier: Apache-2.0
#include "compiler/schedule/descriptor_cutter.h"

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

} // namespace reshard
