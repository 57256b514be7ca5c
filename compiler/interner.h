// Equal values get equal numbers, so that what is solved once for a value can be found again by number.
#pragma once

#include "ir/ir.h"

#include <array>
#include <cstddef>
#include <unordered_map>
#include <vector>

namespace reshard {

inline size_t combineHash(size_t seed, int64_t value) {
  return (seed ^ (static_cast<size_t>(value) + 0x9e3779b97f4a7c15u + (seed << 6) + (seed >> 2))) * 0xff51afd7ed558ccdu;
}

struct ValueHash {
  size_t operator()(const ir::Segments &segments) const {
    size_t hash = segments.size();
    for (const ir::Segment &s : segments)
      for (int64_t field : {s.from, s.to, s.length, s.count, s.fromStep, s.toStep})
        hash = combineHash(hash, field);
    return hash;
  }
  size_t operator()(const ir::Route &route) const {
    size_t hash = route.size();
    for (const ir::Hop &hop : route)
      hash = combineHash(combineHash(hash, hop.from), hop.to);
    return hash;
  }
  size_t operator()(const ir::Shape &shape) const {
    size_t hash = combineHash(shape.loops.size(), shape.rowBytes);
    for (const ir::Loop &loop : shape.loops)
      for (int64_t field : {loop.count, loop.sourceStride, loop.targetStride, loop.sourceStep, loop.targetStep})
        hash = combineHash(hash, field);
    return hash;
  }
  size_t operator()(const ir::OperandShape &shape) const {
    size_t hash = combineHash(shape.loops.size(), shape.rowBytes);
    for (const ir::OperandLoop &loop : shape.loops)
      for (int64_t field : {loop.count, loop.stride, loop.bufferStep})
        hash = combineHash(hash, field);
    return hash;
  }
  template <class Integer> size_t operator()(const std::vector<Integer> &values) const { return of(values); }
  template <size_t N> size_t operator()(const std::array<int64_t, N> &values) const { return of(values); }

private:
  template <class Values> static size_t of(const Values &values) {
    size_t hash = values.size();
    for (auto value : values)
      hash = combineHash(hash, static_cast<int64_t>(value));
    return hash;
  }
};

/// Numbers 0, 1, 2 … in the order of first appearance; `values()[n]` is the value.
template <class Value> class Interner {
public:
  unsigned intern(Value value) {
    auto [at, added] = numbers_.try_emplace(value, static_cast<unsigned>(values_.size()));
    if (added)
      values_.push_back(std::move(value));
    return at->second;
  }
  const Value &operator[](unsigned number) const { return values_[number]; }
  size_t size() const { return values_.size(); }
  std::vector<Value> take() && { return std::move(values_); }

private:
  std::unordered_map<Value, unsigned, ValueHash> numbers_;
  std::vector<Value> values_;
};

} // namespace reshard
