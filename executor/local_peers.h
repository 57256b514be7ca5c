// What the processes of one host show one another: where the bound memory of each can be mapped, and how far each
// message is. A receiver whose sender shows the memory copies the message out of it, in one strided copy, and no
// message is sent.
//
// Memory can be shown where it is a shared mapping of a file whose descriptor the process still has, or which has a
// name: memfd_create, POSIX and System V-like shared memory, mapped files, PyTorch's share_memory_(). Peers open it as
// /proc/PID/fd/N, so they must belong to one user.
#pragma once

#include "executor/mappings.h"
#include "executor/transport.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace reshard {

/// How a peer finds what a process shows.
struct PeerAddress {
  uint64_t host = 0;  // equal for processes that see the same memory and process numbers
  uint64_t token = 0; // in the block as well: another process may have got the number
  int32_t process = 0;
  int32_t file = -1; // of the block; -1: shows nothing
};

/// A message that is copied by its receiver: how many of its chunks can be, in all runs together.
struct alignas(64) Progress {
  std::atomic<uint64_t> posted{0};
  std::atomic<uint32_t> pulled{0}; // the receiver's decision, in prepare
};

class LocalPeers {
public:
  LocalPeers() = default;
  LocalPeers(const LocalPeers &) = delete;
  LocalPeers &operator=(const LocalPeers &) = delete;
  ~LocalPeers();

  /// Makes this rank's block: its buffers, and a Progress for each step. An error text; nothing is shown then.
  std::string publish(const LocalRank &rank);
  const PeerAddress &address() const { return address_; }

  /// The rank of a peer of this host with its memory as mapped here, unbound where it cannot be; null where nothing
  /// can.
  const LocalRank *attach(const Plan &plan, uint32_t rank, const PeerAddress &address);
  /// By step: of this rank, and of a peer that was met.
  Progress &progress(uint32_t step) { return mine_.steps[step]; }
  Progress &progress(uint32_t rank, uint32_t step) { return peers_.at(rank).block.steps[step]; }

  /// Everybody has met: descriptors that were opened to be shown are closed.
  void closeFiles();

private:
  /// A block as mapped by anyone. Behind the header the buffers, from number 1 on, then the steps.
  struct Header {
    uint64_t token;
    uint32_t buffers, steps;
  };
  struct Block {
    Header *header = nullptr;
    FileLocation *buffers = nullptr; // file -1: not shown
    Progress *steps = nullptr;
    size_t bytes = 0;
    void layOut(void *memory, uint32_t buffers, uint32_t steps);
    static size_t size(uint32_t buffers, uint32_t steps);
  };
  struct Peer {
    Block block;
    LocalRank rank;
    std::vector<std::vector<std::byte *>> tables; // by run of its segment
    bool reached = false;
  };
  struct Mapping {
    std::byte *memory = nullptr;
    size_t bytes = 0;
    bool memoryAlone = false; // no disk behind it
  };
  bool mapPeer(const Plan &plan, uint32_t rank, const PeerAddress &address, Peer &peer);
  const Mapping &mapFile(int32_t process, const FileLocation &location);

  PeerAddress address_;
  Block mine_;
  int blockFile_ = -1;
  std::vector<int> opened_;
  std::map<uint32_t, Peer> peers_;
  std::map<std::pair<uint64_t, uint64_t>, Mapping> mappings_; // (device, inode)
};

} // namespace reshard
