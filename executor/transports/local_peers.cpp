// SPDX-License-Identifier: Apache-2.0
// Makes the block of a process, and maps those of its local peers and the files of their bound memory.
#include "executor/transports/local_peers.h"

#include "base/hash.h"
#include "base/random.h"
#include "executor/load/load.h"
#include "executor/memory/mappings.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

namespace reshard {

using namespace schema;

namespace {

uint32_t bufferCount(const Segment &segment) {
  const auto *runs = segment.buffers();
  return runs->size() > 0 ? runs->Get(runs->size() - 1)->first() + runs->Get(runs->size() - 1)->count() : 0;
}
uint32_t stepCount(const Segment &segment) { return segment.steps()->size(); }

constexpr uint64_t kPage = 4096;

/// Populates the pages of a range now, not in the first run; pages outside it, which may be holes, are not touched.
void touch(const std::byte *begin, uint64_t bytes) {
  const uint64_t before = reinterpret_cast<uint64_t>(begin) % kPage;
  if (bytes > 0) // older kernels: pages are mapped in the first run
    madvise(const_cast<std::byte *>(begin) - before, before + bytes, MADV_POPULATE_READ);
}

} // namespace

size_t LocalPeers::Block::size(uint32_t buffers, uint32_t steps) {
  const size_t bytes = sizeof(Header) + buffers * sizeof(FileLocation) + alignof(Progress) + steps * sizeof(Progress);
  return (bytes + kPage - 1) / kPage * kPage;
}

void LocalPeers::Block::layOut(void *memory, uint32_t bufferCount, uint32_t stepCount) {
  bytes = size(bufferCount, stepCount);
  header = static_cast<Header *>(memory);
  buffers = reinterpret_cast<FileLocation *>(header + 1);
  steps = reinterpret_cast<Progress *>(static_cast<std::byte *>(memory) + bytes - stepCount * sizeof(Progress));
}

LocalPeers::~LocalPeers() {
  closeFiles();
  if (mine_.header)
    munmap(mine_.header, mine_.bytes);
  for (auto &[number, peer] : peers_) {
    if (peer.block.header)
      munmap(peer.block.header, peer.block.bytes);
    if (peer.slots)
      munmap(const_cast<std::byte *>(peer.slots), peer.slotBytes);
  }
  for (auto &[key, mapping] : mappings_)
    if (mapping.memory)
      munmap(mapping.memory, mapping.bytes);
  for (auto &[rank, header] : watched_)
    munmap(header, kPage);
}

Status LocalPeers::publish(const LocalRank &rank, uint64_t slotBytes) {
  const uint32_t buffers = bufferCount(*rank.segment), steps = stepCount(*rank.segment);
  const size_t bytes = Block::size(buffers, steps);
  auto failure = [](const char *call) {
    return failed(std::string("cannot share memory with local peers: ") + call + ": " + std::strerror(errno));
  };
  blockFile_ = memfd_create("reshard", MFD_CLOEXEC);
  if (blockFile_ < 0)
    return failure("memfd_create");
  if (ftruncate(blockFile_, static_cast<off_t>(bytes + slotBytes)) != 0)
    return failure("ftruncate");
  void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, blockFile_, 0);
  if (memory == MAP_FAILED)
    return failure("mmap");
  mine_.layOut(memory, buffers, steps); // a new memfd is zeroed
  address_.token = randomNumber();
  *mine_.header = {address_.token, buffers, steps, slotBytes, 0};
  SharedMappings mappings;
  const auto *runs = rank.segment->buffers();
  for (uint32_t r = 0; r < runs->size(); ++r)
    for (uint32_t i = 0; i < runs->Get(r)->count(); ++i) {
      // Converted buffers are not published: a peer would copy them in their storage form.
      const std::byte *bound = rank.forms.empty() || !rank.forms[r] ? rank.memory[r][i] : nullptr;
      mine_.buffers[runs->Get(r)->first() + i - 1] =
          bound ? mappings.find(bound, runs->Get(r)->bytes(), opened_) : FileLocation{};
    }
  address_.host = hostId();
  address_.process = getpid();
  address_.file = blockFile_;
  return {};
}

std::byte *LocalPeers::mapSlots() const {
  void *const memory = mmap(nullptr, mine_.header->slotBytes, PROT_READ | PROT_WRITE, MAP_SHARED, blockFile_,
                            static_cast<off_t>(mine_.bytes));
  return memory == MAP_FAILED ? nullptr : static_cast<std::byte *>(memory);
}

void LocalPeers::closeFiles() {
  if (blockFile_ >= 0)
    close(blockFile_);
  blockFile_ = -1;
  for (const int file : opened_)
    close(file);
  opened_.clear();
}

void LocalPeers::watch(uint32_t rank, const PeerAddress &address) {
  if (address.host != address_.host || address.file < 0 || address_.file < 0)
    return;
  const std::string path = "/proc/" + std::to_string(address.process) + "/fd/" + std::to_string(address.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat status;
  void *page = MAP_FAILED;
  if (file >= 0 && fstat(file, &status) == 0 && static_cast<uint64_t>(status.st_size) >= kPage)
    page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0); // an atomic needs to be writable
  if (file >= 0)
    close(file);
  if (page == MAP_FAILED)
    return;
  auto *const header = static_cast<Header *>(page);
  if (header->token != address.token || !watched_.emplace(rank, header).second)
    munmap(page, kPage);
}

void LocalPeers::beginRun(uint64_t run) {
  if (mine_.header)
    std::atomic_ref(mine_.header->begun).store(run, std::memory_order_relaxed);
}

std::vector<uint32_t> LocalPeers::notBegun(uint64_t run) const {
  std::vector<uint32_t> ranks;
  for (const auto &[rank, header] : watched_)
    if (std::atomic_ref(header->begun).load(std::memory_order_relaxed) < run)
      ranks.push_back(rank);
  return ranks;
}

const LocalRank *LocalPeers::attach(const Plan &plan, uint32_t rank, const PeerAddress &address) {
  if (address.host != address_.host || address.file < 0 || address_.file < 0)
    return nullptr;
  auto [at, added] = peers_.try_emplace(rank);
  Peer &peer = at->second;
  if (added)
    peer.reached = mapPeer(plan, rank, address, peer);
  return peer.reached ? &peer.rank : nullptr;
}

bool LocalPeers::mapPeer(const Plan &plan, uint32_t rank, const PeerAddress &address, Peer &peer) {
  peer.rank.rank = rank;
  if (!plan.segment(rank, peer.rank.segment).ok())
    return false;
  const uint32_t buffers = bufferCount(*peer.rank.segment), steps = stepCount(*peer.rank.segment);
  const std::string path = "/proc/" + std::to_string(address.process) + "/fd/";
  const int file = open((path + std::to_string(address.file)).c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0)
    return false;
  const bool mapped = mapBlock(file, {address.token, buffers, steps, 0, 0}, peer);
  close(file);
  if (!mapped)
    return false;
  peer.headBytes = arenaHeadBytes(*peer.rank.segment);
  for (const BufferRange *range : *peer.rank.segment->buffers()) {
    std::vector<std::byte *> &table = peer.tables.emplace_back();
    for (uint32_t i = 0; i < range->count(); ++i) {
      const FileLocation &location = peer.block.buffers[range->first() + i - 1];
      const Mapping mapping = location.file >= 0 ? mapFile(address.process, location) : Mapping{};
      const bool reached =
          mapping.memory && location.offset <= mapping.bytes && range->bytes() <= mapping.bytes - location.offset;
      table.push_back(reached ? mapping.memory + location.offset : nullptr);
      if (reached && mapping.memoryAlone)
        touch(table.back(), range->bytes());
    }
  }
  for (const auto &table : peer.tables)
    peer.rank.memory.push_back(table.data());
  peer.rank.forms = formsOf(plan, *peer.rank.segment);
  return true;
}

bool LocalPeers::mapBlock(int file, const Header &expected, Peer &peer) {
  struct stat status;
  const size_t bytes = Block::size(expected.buffers, expected.steps);
  if (fstat(file, &status) != 0 || static_cast<size_t>(status.st_size) < bytes)
    return false;
  void *const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  if (memory == MAP_FAILED)
    return false;
  peer.block.layOut(memory, expected.buffers, expected.steps);
  const Header header = *peer.block.header;
  if (header.token != expected.token || header.buffers != expected.buffers || header.steps != expected.steps ||
      header.slotBytes != static_cast<size_t>(status.st_size) - bytes)
    return false;
  if (header.slotBytes == 0)
    return true;
  void *const slots = mmap(nullptr, header.slotBytes, PROT_READ, MAP_SHARED, file, static_cast<off_t>(bytes));
  if (slots != MAP_FAILED) {
    peer.slots = static_cast<const std::byte *>(slots);
    peer.slotBytes = header.slotBytes;
  }
  return true;
}

const std::byte *LocalPeers::slots(uint32_t rank, const Step &send) const {
  const Peer &peer = peers_.at(rank);
  const uint64_t bytes = send.chunk() > 0 ? 2 * send.chunk() : send.bytes(), at = send.staging() - peer.headBytes;
  if (!peer.slots || send.staging() == UINT64_MAX || at > peer.slotBytes || bytes > peer.slotBytes - at)
    return nullptr;
  const std::byte *const slots = peer.slots + at;
  touch(slots, bytes);
  return slots;
}

const LocalPeers::Mapping &LocalPeers::mapFile(int32_t process, const FileLocation &location) {
  Mapping &mapping = mappings_[{location.device, location.inode}];
  if (mapping.memory)
    return mapping;
  const int file = open(("/proc/" + std::to_string(process) + "/fd/" + std::to_string(location.file)).c_str(),
                        O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat status;
  if (file >= 0 && fstat(file, &status) == 0 && status.st_dev == location.device && status.st_ino == location.inode &&
      status.st_size > 0) {
    struct statfs system;
    const bool memoryAlone =
        fstatfs(file, &system) == 0 && (system.f_type == TMPFS_MAGIC || system.f_type == HUGETLBFS_MAGIC);
    void *memory = mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED)
      mapping = {static_cast<std::byte *>(memory), static_cast<size_t>(status.st_size), memoryAlone};
  }
  if (file >= 0)
    close(file);
  return mapping;
}

} // namespace reshard
