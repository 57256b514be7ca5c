// SPDX-License-Identifier: Apache-2.0
// Shared memory between the processes of one host. Each process publishes a block (a memfd) with the file positions of
// its bound memory, the progress of its messages, and the slots of its arena. If a receiver can map the sender's
// memory, it copies the message out of it, in one strided copy, and no message is sent. Otherwise it unpacks a staged
// message out of the sender's slots.
//
// Memory can be published if it is a shared mapping of a file that the process has open or that has a name:
// memfd_create, POSIX shared memory, mapped files, PyTorch's share_memory_(). Local peers open it as /proc/PID/fd/N, so
// they must belong to the same user.
#pragma once

#include "executor/memory/mappings.h"
#include "executor/transports/transport.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace reshard {

/// How a local peer finds a process's block.
struct PeerAddress {
  uint64_t host = 0;   // hostId()
  uint64_t token = 0;  // also in the block: detects that another process has the same process id
  int32_t process = 0; // process id
  int32_t file = -1;   // descriptor of the block; -1: nothing is published
};

/// The memory out of which a receiver copies a message of a local peer; `channel`: it does not.
enum class CopiedFrom : uint32_t { channel, boundMemory, slots };

/// The state of a message that its receiver copies. Its numbers are summed over all runs.
struct alignas(64) Progress {
  /// By the sender. Of bound memory: the chunks that the receiver may copy. Of slots: the bytes that are packed.
  std::atomic<uint64_t> published{0};
  std::atomic<uint64_t> taken{0};       // by the receiver: of slots, the bytes that are unpacked
  std::atomic<CopiedFrom> copiedFrom{}; // by the receiver, in prepare
};

class LocalPeers {
public:
  LocalPeers() = default;
  LocalPeers(const LocalPeers &) = delete;
  LocalPeers &operator=(const LocalPeers &) = delete;
  ~LocalPeers();

  /// Creates this rank's block: the file positions of its buffers, a Progress for each step, and `slotBytes` for the
  /// slots of its messages. If it fails, nothing is published.
  Status publish(const LocalRank &rank, uint64_t slotBytes);
  const PeerAddress &address() const { return address_; }
  /// Maps the slots, zeroed, before closeFiles(). The caller unmaps them. Null: out of memory.
  std::byte *mapSlots() const;

  /// A local peer's rank with its memory as mapped here; buffers that cannot be mapped are null. Returns null if its
  /// block cannot be mapped.
  const LocalRank *attach(const Plan &plan, uint32_t rank, const PeerAddress &address);
  /// The progress of a step of this rank, or of a peer that was attached.
  Progress &progress(uint32_t step) { return mine_.steps[step]; }
  Progress &progress(uint32_t rank, uint32_t step) { return peers_.at(rank).block.steps[step]; }
  /// The slots of a staged message of a peer that was attached; null if they are not inside what the peer published.
  const std::byte *slots(uint32_t rank, const schema::Step &send) const;

  /// Maps where a local peer counts the runs that it has begun. No effect if that is not possible.
  void watch(uint32_t rank, const PeerAddress &address);
  bool watches(uint32_t rank) const { return watched_.contains(rank); }
  /// This rank begins its run of a number, from 1 on.
  void beginRun(uint64_t run);
  /// The watched peers that have not begun it.
  std::vector<uint32_t> notBegun(uint64_t run) const;

  /// Closes the descriptors that were opened to be published. Call it when all peers have attached.
  void closeFiles();

private:
  /// A block: the header, then the buffers from number 1 on, then the steps; and from the next page on the slots, which
  /// are mapped separately.
  struct Header {
    uint64_t token;
    uint32_t buffers, steps;
    uint64_t slotBytes;
    uint64_t begun; // runs; read and written as an atomic
  };
  struct Block {
    Header *header = nullptr;
    FileLocation *buffers = nullptr; // file -1: not published
    Progress *steps = nullptr;
    size_t bytes = 0;
    void layOut(void *memory, uint32_t buffers, uint32_t steps);
    static size_t size(uint32_t buffers, uint32_t steps);
  };
  struct Peer {
    Block block;
    const std::byte *slots = nullptr;
    uint64_t slotBytes = 0, headBytes = 0; // the slots follow the head of the arena
    LocalRank rank;
    std::vector<std::vector<std::byte *>> tables; // by BufferRange of its segment
    bool reached = false;
  };
  struct Mapping {
    std::byte *memory = nullptr;
    size_t bytes = 0;
    bool memoryAlone = false; // tmpfs or hugetlbfs: not backed by a disk
  };
  /// Maps the block of a peer and its slots. Those whose header differs from `expected`, the number of slots apart, are
  /// not mapped.
  static bool mapBlock(int file, const Header &expected, Peer &peer);
  bool mapPeer(const Plan &plan, uint32_t rank, const PeerAddress &address, Peer &peer);
  const Mapping &mapFile(int32_t process, const FileLocation &location);

  PeerAddress address_;
  Block mine_;
  int blockFile_ = -1;
  std::vector<int> opened_;
  std::map<uint32_t, Peer> peers_;
  std::map<uint32_t, Header *> watched_;                      // the first page of the block of each
  std::map<std::pair<uint64_t, uint64_t>, Mapping> mappings_; // (device, inode)
};

} // namespace reshard
