// The bytes of a message, as its operands name them, to and from one contiguous piece of memory.
#pragma once

#include "executor/transport.h"
#include "kernels/kernels.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace reshard {

/// The operands of one step, or one side of it, in order: bytes [0, bytes()).
class Packing {
public:
  /// Appends an operand; its buffers must be bound. An error text, empty on success.
  std::string add(const LocalRank &rank, const schema::Operand &operand);

  uint64_t bytes() const { return bytes_; }
  /// Where the bytes stand side by side, one after the other; null where they do not.
  std::byte *contiguous() const;

  /// Copies bytes [begin, end) to `to`, or from `from`. Allocates nothing.
  void pack(uint64_t begin, uint64_t end, std::byte *to) const;
  void unpack(uint64_t begin, uint64_t end, const std::byte *from) const;

private:
  /// A strided piece of one buffer, from byte `begin` of the message on.
  struct Piece {
    std::byte *memory;
    uint64_t begin;
    size_t shape; // into out_ and in_
  };
  template <class Row, class Rows> void walk(uint64_t begin, uint64_t end, Row row, Rows rows) const;

  std::vector<Piece> pieces_;
  std::vector<kernels::Strided> out_, in_; // memory -> packed, packed -> memory
  uint64_t bytes_ = 0;
};

} // namespace reshard
