// SPDX-License-Identifier: Apache-2.0
// Packs and unpacks ranges of a message's bytes, which are the bytes of its operands in order: between strided and
// contiguous memory, or directly from the sender's memory to the receiver's if both are mapped.
#pragma once

#include "executor/memory/operands.h"

#include <array>
#include <map>

namespace reshard {

/// Device memory for split blocks: elements or quantization blocks that two ranges of packed bytes split. Each has at
/// most kBytes bytes, and memory of its own.
class SplitBlocks {
public:
  static constexpr uint64_t kBytes = kernels::kMxBlock * 4;
  SplitBlocks() = default;
  SplitBlocks(std::byte *memory, uint64_t count) : next_(memory), left_(count) {}
  /// The memory of the block that begins at a byte of a message; null if there is no more memory.
  std::byte *at(const void *message, uint64_t byte);

private:
  std::byte *next_ = nullptr;
  uint64_t left_ = 0;
  std::map<std::pair<const void *, uint64_t>, std::byte *> known_;
};

/// The operands of one step in order: bytes [0, bytes()).
class Packing {
public:
  /// Appends an operand, for pack and unpack. Fails if one of its buffers is not bound.
  Status add(const LocalRank &rank, const schema::Operand &operand);
  /// Appends a pair of operands, for copy. Returns whether all buffers of both are bound. Fails if their shapes differ.
  Result<bool> add(const Side &source, const Side &target);

  uint64_t bytes() const { return bytes_; }
  /// Whether a buffer is converted.
  bool converts() const { return converts_; }
  /// The memory of the bytes, if they are contiguous and not converted; else null.
  std::byte *contiguous() const;

  /// pack copies bytes [begin, end) to `to`, unpack copies them from `from`, copy from the source operands to the
  /// target operands. They allocate nothing. `stream`: as for kernels::copyRows.
  void pack(uint64_t begin, uint64_t end, std::byte *to) const { move(begin, end, nullptr, to, false); }
  /// If a buffer is converted, ranges must be unpacked in ascending order.
  void unpack(uint64_t begin, uint64_t end, const std::byte *from, bool stream = false) const {
    move(begin, end, from, nullptr, stream);
  }
  void copy(uint64_t begin, uint64_t end, bool stream) const { move(begin, end, nullptr, nullptr, stream); }

  /// Bytes [begin, end) in packed form.
  struct PackedRange {
    uint64_t begin, end;
    std::byte *memory;
  };
  /// The same for a device: appends the work to tables. The ranges of unpack must run in ascending order. Each range
  /// splits at most two blocks; fails if `splitBlocks` has no memory for them.
  Status pack(const PackedRange &range, SplitBlocks &splitBlocks, Tables &tables) const {
    return tabulate(range, false, splitBlocks, tables);
  }
  Status unpack(const PackedRange &range, SplitBlocks &splitBlocks, Tables &tables) const {
    return tabulate(range, true, splitBlocks, tables);
  }

private:
  /// A strided range of each side's buffer. It has the bytes of the message from `begin` on.
  struct Entry {
    std::byte *source, *target;
    uint64_t begin;
    size_t shape;
  };
  void append(const Expansion &expansion);
  Status tabulate(const PackedRange &range, bool unpacks, SplitBlocks &splitBlocks, Tables &tables) const;
  void move(uint64_t begin, uint64_t end, const std::byte *packed, std::byte *packing, bool stream) const;
  struct EntryMove;
  static void packSplitBlocks(const EntryMove &move, uint64_t &at, uint64_t &last);
  void unpackSplitBlocks(const EntryMove &move, uint64_t &at, uint64_t &last) const;

  std::vector<Entry> entries_;
  std::vector<kernels::Strided> out_, in_;       // memory -> packed, packed -> memory; equal for pairs
  std::vector<kernels::Conversion> conversions_; // by shape; for pack and unpack, both sides are equal
  bool converts_ = false;
  /// While unpacking: the bytes of a block whose last byte is in a later range.
  mutable std::array<std::byte, kernels::kMxBlock * 4> partialBlock_{};
  uint64_t bytes_ = 0;
};

} // namespace reshard
