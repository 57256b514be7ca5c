// SPDX-License-Identifier: Apache-2.0
// Reads the memory of another process of this host. The kernel allows it for processes of the same user, unless a
// security module or a sandbox forbids it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace reshard {

class PeerMemory {
public:
  /// What others need in order to read a process's memory. As bytes, it is part of a hello.
  struct Address {
    uint64_t host = 0;    // hostId()
    uint64_t process = 0; // process id
    uint64_t token = 0;   // a random number in the process's memory, since process ids are used again
    uint64_t at = 0;      // the address of that number
  };
  static Address own();

  /// Whether this process can read the memory of that one.
  bool open(const Address &address);
  bool isOpen() const { return process_ > 0; }
  /// Whether the process still exists. A process that is stopped does.
  bool isAlive() const;
  /// Copies bytes from an address of the other process; false if it has ended or does not have that memory.
  bool read(std::byte *to, uint64_t from, uint64_t bytes) const;
  /// Copies the next part of `bytes`, so that the caller can do other work between parts. `copied`: so far.
  bool readPart(std::byte *to, uint64_t from, uint64_t bytes, uint64_t &copied) const;

private:
  int32_t process_ = 0;
  Address address_;
};

} // namespace reshard
