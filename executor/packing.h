// The bytes of a message in order, as its operands name them, by ranges: to and from one contiguous piece of memory, or
// straight from the sender's memory to the receiver's where both are at hand.
#pragma once

#include "executor/operands.h"

#include <array>
#include <map>

namespace reshard {

/// Where a device keeps units (elements, blocks) that two ranges of packed bytes part. Each is of kUnit bytes at most
/// and has a place of its own.
class SplitUnits {
public:
  static constexpr uint64_t kUnit = kernels::kMxBlock * 4;
  SplitUnits() = default;
  SplitUnits(std::byte *memory, uint64_t units) : next_(memory), left_(units) {}
  /// The place of the unit that begins at a byte of a message; null where there is no more room.
  std::byte *at(const void *message, uint64_t byte);

private:
  std::byte *next_ = nullptr;
  uint64_t left_ = 0;
  std::map<std::pair<const void *, uint64_t>, std::byte *> known_;
};

/// The operands of one step, or one side of it, in order: bytes [0, bytes()).
class Packing {
public:
  /// Appends an operand, to be packed from or unpacked to. Its buffers must be bound. An error text, empty on success.
  std::string add(const LocalRank &rank, const schema::Operand &operand);
  /// Appends a pair of operands, to be copied from one to the other. `reached` tells whether all buffers of both are
  /// bound.
  std::string add(const Side &source, const Side &target, bool &reached);

  uint64_t bytes() const { return bytes_; }
  /// Whether elements change on their way.
  bool converts() const { return converts_; }
  /// Where the bytes of one side stand side by side, one after the other; null where they do not.
  std::byte *contiguous() const;

  /// Copies bytes [begin, end) to `to`, or from `from`, or from one side to the other. Allocates nothing. `stream`: as
  /// for kernels::copyRows.
  void pack(uint64_t begin, uint64_t end, std::byte *to) const { move(begin, end, nullptr, to, false); }
  /// Ranges in their order, where elements change.
  void unpack(uint64_t begin, uint64_t end, const std::byte *from, bool stream = false) const {
    move(begin, end, from, nullptr, stream);
  }
  void copy(uint64_t begin, uint64_t end, bool stream) const { move(begin, end, nullptr, nullptr, stream); }

  /// Appends to tables what pack and unpack do; ranges of unpack are run in their order. Each range parts two units at
  /// most; an error text, empty on success: there is no room for them.
  std::string pack(uint64_t begin, uint64_t end, std::byte *to, SplitUnits &splitUnits, Tables &tables) const {
    return tabulate(begin, end, false, to, splitUnits, tables);
  }
  std::string unpack(uint64_t begin, uint64_t end, std::byte *from, SplitUnits &splitUnits, Tables &tables) const {
    return tabulate(begin, end, true, from, splitUnits, tables);
  }

private:
  /// A strided piece of each side's buffer, from byte `begin` of the message on.
  struct Entry {
    std::byte *source, *target;
    uint64_t begin;
    size_t shape;
  };
  void append(const Expansion &expansion);
  std::string tabulate(uint64_t begin, uint64_t end, bool unpacks, std::byte *packed, SplitUnits &splitUnits,
                       Tables &tables) const;
  void move(uint64_t begin, uint64_t end, const std::byte *packed, std::byte *packing, bool stream) const;

  std::vector<Entry> entries_;
  std::vector<kernels::Strided> out_, in_;       // memory -> packed, packed -> memory; of pairs the same
  std::vector<kernels::Conversion> conversions_; // by shape; of what is only packed or unpacked, both sides the same
  bool converts_ = false;
  mutable std::array<std::byte, kernels::kMxBlock * 4> partialBlock_{}; // of a block that a later range ends
  uint64_t bytes_ = 0;
};

} // namespace reshard
