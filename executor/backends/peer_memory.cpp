// SPDX-License-Identifier: Apache-2.0
#include "executor/backends/peer_memory.h"

#include "base/hash.h"
#include "base/random.h"

#include <algorithm>
#include <cerrno>
#include <sys/uio.h>
#include <unistd.h>

namespace reshard {

PeerMemory::Address PeerMemory::own() {
  static const uint64_t token = randomNumber();
  return {hostId(), static_cast<uint64_t>(getpid()), token, reinterpret_cast<uint64_t>(&token)};
}

bool PeerMemory::open(const Address &address) {
  if (address.host != hostId() || address.process == 0 || address.process > INT32_MAX)
    return false;
  process_ = static_cast<int32_t>(address.process);
  address_ = address;
  if (!isAlive())
    process_ = 0;
  return isOpen();
}

bool PeerMemory::isAlive() const {
  uint64_t found = 0;
  return read(reinterpret_cast<std::byte *>(&found), address_.at, sizeof found) && found == address_.token;
}

bool PeerMemory::read(std::byte *to, uint64_t from, uint64_t bytes) const {
  while (bytes > 0) {
    const iovec local{to, bytes};
    const iovec remote{reinterpret_cast<void *>(from), bytes}; // NOLINT(performance-no-int-to-ptr): of another process
    const ssize_t copied = process_vm_readv(process_, &local, 1, &remote, 1, 0);
    if (copied <= 0) {
      if (copied < 0 && errno == EINTR)
        continue;
      return false;
    }
    to += copied;
    from += static_cast<uint64_t>(copied);
    bytes -= static_cast<uint64_t>(copied);
  }
  return true;
}

bool PeerMemory::readPart(std::byte *to, uint64_t from, uint64_t bytes, uint64_t &copied) const {
  constexpr uint64_t kPartBytes = 1 << 20;
  const uint64_t begin = copied, part = std::min(kPartBytes, bytes - begin);
  copied += part;
  return read(to + begin, from + begin, part);
}

} // namespace reshard
