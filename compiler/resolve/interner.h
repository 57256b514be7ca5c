// SPDX-License-Identifier: Apache-2.0
// Numbers for values, equal for equal values, so that a result computed for a value can be looked up by its number.
#pragma once

#include "ir/ir.h"

#include <array>
#include <climits>
#include <cstddef>
#include <optional>
#include <unordered_map>
#include <vector>

namespace reshard {

inline size_t combineHash(size_t seed, int64_t value) {
  return (seed ^ (static_cast<size_t>(value) + 0x9e3779b97f4a7c15u + (seed << 6) + (seed >> 2))) * 0xff51afd7ed558ccdu;
}

struct ValueHash {
  size_t operator()(const ir::IndexMap &indexMap) const {
    size_t hash = indexMap.size();
    for (const ir::IndexBlock &s : indexMap)
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
  template <class Integer, unsigned N> size_t operator()(const llvm::SmallVector<Integer, N> &values) const {
    return of(values);
  }
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
    if (2 * values_.size() >= slots_.size())
      grow();
    const size_t hash = ValueHash()(value);
    unsigned &slot = slots_[find(hash, [&](unsigned number) { return values_[number] == value; })];
    if (slot == kEmpty) {
      slot = static_cast<unsigned>(values_.size());
      hashes_.push_back(hash);
      values_.push_back(std::move(value));
    }
    return slot;
  }
  /// The number of a value that was interned, else nothing.
  std::optional<unsigned> find(const Value &value) const {
    if (slots_.empty())
      return std::nullopt;
    const unsigned slot = slots_[find(ValueHash()(value), [&](unsigned number) { return values_[number] == value; })];
    return slot == kEmpty ? std::nullopt : std::optional(slot);
  }
  const Value &operator[](unsigned number) const { return values_[number]; }
  size_t size() const { return values_.size(); }
  std::vector<Value> take() && { return std::move(values_); }

private:
  static constexpr unsigned kEmpty = UINT_MAX;

  /// The slot of the number with this hash for which `same` is true, or the empty slot for it.
  template <class Same> size_t find(size_t hash, Same same) const {
    for (size_t at = hash ^ hash >> 32;; ++at) {
      const unsigned number = slots_[at & (slots_.size() - 1)];
      if (number == kEmpty || (hashes_[number] == hash && same(number)))
        return at & (slots_.size() - 1);
    }
  }

  void grow() {
    slots_.assign(slots_.empty() ? 8 : 2 * slots_.size(), kEmpty);
    for (unsigned number = 0; number < values_.size(); ++number)
      slots_[find(hashes_[number], [](unsigned) { return false; })] = number;
  }

  std::vector<unsigned> slots_; // numbers by hash; a power of two of slots, at least half of them empty
  std::vector<size_t> hashes_;  // by number
  std::vector<Value> values_;   // stored once: they are large and many
};

} // namespace reshard
