// The bytes of a message in order, as its operands name them, by ranges: to and from one contiguous piece of memory, or straight from the
// sender's memory to the receiver's where both are at hand.
#pragma once

#include "executor/operands.h"
#include "kernels/table.h"

#include <array>

namespace reshard {

/// The operands of one step, or one side of it, in order: bytes [0, bytes()).
class Packing {
public:
  /// Appends an operand, to be packed from or unpacked to. Its buffers must be bound. An error text, empty on success.
  std::string add(const LocalRank &rank, const schema::Operand &operand);
  /// Appends a pair of operands, to be copied from one to the other. `reached` tells whether all buffers of both are bound.
  std::string add(const Side &source, const Side &target, bool &reached);

  uint64_t bytes() const { return bytes_; }
  /// Whether elements change on their way.
  bool converts() const { return converts_; }
  /// Where the bytes of one side stand side by side, one after the other; null where they do not.
  std::byte *contiguous() const;

  /// Copies bytes [begin, end) to `to`, or from `from`, or from one side to the other. Allocates nothing. `stream`: as for kernels::copyRows.
  void pack(uint64_t begin, uint64_t end, std::byte *to) const { move(begin, end, nullptr, to, false); }
  /// Ranges in their order, where elements change.
  void unpack(uint64_t begin, uint64_t end, const std::byte *from, bool stream = false) const { move(begin, end, from, nullptr, stream); }
  void copy(uint64_t begin, uint64_t end, bool stream) const { move(begin, end, nullptr, nullptr, stream); }

  /// Appends to a table what pack and unpack copy.
  void pack(uint64_t begin, uint64_t end, std::byte *to, kernels::Table &table) const { tabulate(begin, end, false, to, table); }
  /// Ranges in their order, where elements change.
  void unpack(uint64_t begin, uint64_t end, std::byte *from, kernels::Table &table) const { tabulate(begin, end, true, from, table); }

private:
  /// A strided piece of each side's buffer, from byte `begin` of the message on.
  struct Piece {
    std::byte *source, *target;
    uint64_t begin;
    size_t shape;
  };
  void append(const Expansion &expansion);
  void tabulate(uint64_t begin, uint64_t end, bool unpacks, std::byte *packed, kernels::Table &table) const;
  void move(uint64_t begin, uint64_t end, const std::byte *packed, std::byte *packing, bool stream) const;

  std::vector<Piece> pieces_;
  std::vector<kernels::Strided> out_, in_; // memory -> packed, packed -> memory; of pairs the same
  std::vector<kernels::Change> changes_;   // by shape; of what is only packed or unpacked, both sides the same
  bool converts_ = false;
  mutable std::array<std::byte, kernels::kMxBlock * 4> kept_{}; // of a block that a later range ends
  uint64_t bytes_ = 0;
};

} // namespace reshard
