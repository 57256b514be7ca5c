// NCCL, what of it is used: communicators that do not block, whose ranks are threads of one process. What is called is
// done when somebody has asked for its state often enough; a group is done when all its messages have met their other
// ends, which those of one pair of ranks do in their order.

#include "tests/gpu/simulated/gpu.h"

#include <algorithm>
#include <cstring>
#include <nccl.h>
#include <optional>
#include <utility>

using namespace simulated;

namespace {

struct End {
  bool send;
  std::byte *memory;
  size_t bytes;
  int peer;
  bool met = false;
};

/// What the ranks of a communicator share.
struct Room {
  int size = 0, joined = 0;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<End>>> waiting; // sends, or receives: from, to
  struct Gathering {
    int arrived = 0;
    std::map<int, std::pair<const void *, void *>> of; // by rank: what it gives, and gets
  };
  std::map<uint64_t, Gathering> gatherings; // by number
};

/// A rank, which outlives its communicator while work refers to it.
struct Rank {
  std::shared_ptr<Room> room;
  int number = 0;
  uint64_t gatherings = 0; // begun
  bool aborted = false;
};

struct Message {
  ncclComm_t communicator;
  End end;
  cudaStream_t stream;
};
thread_local int depth = 0;
thread_local std::vector<Message> messages;

std::map<std::string, std::weak_ptr<Room>> rooms; // by unique id
uint64_t ids = 0;

} // namespace

struct ncclComm {
  std::shared_ptr<Rank> rank;
  std::function<std::optional<ncclResult_t>()> pending; // nothing yet where others are waited for
  uint64_t polls = 0;                                   // that find it in progress in any case
  std::string last;
};

namespace {

ncclResult_t refuse(ncclComm_t communicator, const char *text) {
  communicator->last = text;
  return ncclInvalidUsage;
}

/// Begins what is done later.
ncclResult_t later(ncclComm_t communicator, std::function<std::optional<ncclResult_t>()> work) {
  if (communicator->pending)
    return refuse(communicator, "an operation is in progress");
  communicator->pending = std::move(work);
  communicator->polls = Gpu::get().random() % 4;
  return ncclInProgress;
}

ncclResult_t enqueued(cudaStream_t stream, Work work) {
  return Gpu::get().enqueue(stream, std::move(work)) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

/// An end comes to the room: it meets the first that waits for it, or waits itself.
void meet(const Rank &rank, const std::shared_ptr<End> &end) {
  auto &waiting = rank.room->waiting[end->send ? std::pair(rank.number, end->peer) : std::pair(end->peer, rank.number)];
  if (waiting.empty() || waiting.front()->send == end->send) {
    waiting.push_back(end);
    return;
  }
  const std::shared_ptr<End> other = waiting.front();
  waiting.pop_front();
  if (other->bytes != end->bytes)
    die("a message of " + std::to_string(end->bytes) + " bytes meets one of " + std::to_string(other->bytes));
  std::memmove(end->send ? other->memory : end->memory, end->send ? end->memory : other->memory, end->bytes);
  end->met = other->met = true;
}

/// A group of messages of one rank: begins with all of them at once.
Work groupOf(const std::shared_ptr<Rank> &rank, const std::vector<End> &ends) {
  return [rank, ends] {
    auto own = std::make_shared<std::vector<std::shared_ptr<End>>>();
    return [rank, ends, own] {
      if (own->empty() && !rank->aborted)
        for (const End &end : ends) {
          own->push_back(std::make_shared<End>(end));
          meet(*rank, own->back());
        }
      return rank->aborted || std::all_of(own->begin(), own->end(), [](const auto &end) { return end->met; })
                 ? State::done
                 : State::stuck;
    };
  };
}

/// All ranks come to it with something; the last one calls `act`.
Work gatheringOf(const std::shared_ptr<Rank> &rank, const void *mine, void *all,
                 std::function<void(const Room::Gathering &)> act) {
  return [=] {
    const uint64_t number = rank->gatherings++;
    auto arrived = std::make_shared<bool>(false);
    return [=] {
      if (rank->aborted)
        return State::done;
      Room::Gathering &gathering = rank->room->gatherings[number];
      if (!std::exchange(*arrived, true)) {
        gathering.of[rank->number] = {mine, all};
        if (++gathering.arrived == rank->room->size)
          act(gathering);
      }
      return gathering.arrived == rank->room->size ? State::done : State::stuck;
    };
  };
}

ncclResult_t add(Message message) {
  const std::lock_guard lock(Gpu::get().mutex);
  const Rank &rank = *message.communicator->rank;
  if (message.end.peer < 0 || message.end.peer >= rank.room->size ||
      Gpu::get().deviceOf(message.end.memory, message.end.bytes) < 0)
    return refuse(message.communicator, "a message to no rank, or of memory of the host");
  if (depth == 0)
    return refuse(message.communicator, "a message outside of a group");
  messages.push_back(std::move(message));
  return ncclSuccess;
}

} // namespace

extern "C" {

const char *ncclGetErrorString(ncclResult_t result) {
  return result == ncclInvalidUsage ? "invalid usage" : result == ncclSuccess ? "no error" : "simulated error";
}
const char *ncclGetLastError(ncclComm_t communicator) { return communicator ? communicator->last.c_str() : ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  const std::lock_guard lock(Gpu::get().mutex);
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->internal, sizeof id->internal, "simulated %llu", static_cast<unsigned long long>(++ids));
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *communicator, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
  const std::lock_guard lock(Gpu::get().mutex);
  if (std::strncmp(id.internal, "simulated ", 10) != 0 || rank < 0 || rank >= size || config->blocking != 0)
    return ncclInvalidArgument;
  std::shared_ptr<Room> room = rooms[id.internal].lock();
  if (!room)
    rooms[id.internal] = room = std::make_shared<Room>();
  room->size = size;
  ++room->joined;
  ++Gpu::get().alive["communicators"];
  *communicator = new ncclComm;
  (*communicator)->rank = std::make_shared<Rank>(Rank{room, rank});
  return later(*communicator,
               [room] { return room->joined >= room->size ? std::optional(ncclSuccess) : std::nullopt; });
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t *state) {
  const std::lock_guard lock(Gpu::get().mutex);
  *state = ncclSuccess;
  if (!communicator->pending)
    return ncclSuccess;
  *state = ncclInProgress;
  if (communicator->polls > 0) {
    --communicator->polls;
  } else if (const auto result = communicator->pending()) {
    *state = *result;
    communicator->pending = {};
  }
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t communicator, int *rank) {
  *rank = communicator->rank->number;
  return communicator->pending ? refuse(communicator, "an operation is in progress") : ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t communicator, int *count) {
  *count = communicator->rank->room->size;
  return communicator->pending ? refuse(communicator, "an operation is in progress") : ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t communicator) {
  const std::lock_guard lock(Gpu::get().mutex);
  return later(communicator, [] { return std::optional(ncclSuccess); });
}
ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  const std::lock_guard lock(Gpu::get().mutex);
  if (communicator->pending)
    return refuse(communicator, "an operation is in progress");
  --Gpu::get().alive["communicators"];
  delete communicator;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  const std::lock_guard lock(Gpu::get().mutex);
  Rank &rank = *communicator->rank;
  rank.aborted = true;
  for (auto &[pair, ends] : rank.room->waiting) // whose memory may go now
    std::erase_if(ends, [&, of = pair](const auto &end) { return (end->send ? of.first : of.second) == rank.number; });
  --Gpu::get().alive["communicators"];
  delete communicator;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  const std::lock_guard lock(Gpu::get().mutex);
  if (--depth > 0 || messages.empty())
    return ncclSuccess;
  const std::vector<Message> group = std::move(messages);
  messages.clear();
  std::vector<End> ends;
  for (const Message &message : group) {
    if (message.communicator != group[0].communicator || message.stream != group[0].stream)
      die("a group of several communicators or streams is not simulated");
    ends.push_back(message.end);
  }
  return later(group[0].communicator, [stream = group[0].stream, rank = group[0].communicator->rank, ends] {
    return std::optional(enqueued(stream, groupOf(rank, ends)));
  });
}
ncclResult_t ncclSend(const void *memory, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return type == ncclChar
             ? add({communicator, {true, static_cast<std::byte *>(const_cast<void *>(memory)), count, peer}, stream})
             : ncclInvalidArgument;
}
ncclResult_t ncclRecv(void *memory, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return type == ncclChar ? add({communicator, {false, static_cast<std::byte *>(memory), count, peer}, stream})
                          : ncclInvalidArgument;
}
ncclResult_t ncclAllGather(const void *mine, void *all, size_t count, ncclDataType_t type, ncclComm_t communicator,
                           cudaStream_t stream) {
  const std::lock_guard lock(Gpu::get().mutex);
  const auto size = static_cast<size_t>(communicator->rank->room->size);
  if (type != ncclChar || Gpu::get().deviceOf(mine, count) < 0 || Gpu::get().deviceOf(all, count * size) < 0)
    return ncclInvalidArgument;
  const auto act = [count](const Room::Gathering &gathering) {
    for (const auto &[rank, to] : gathering.of)
      for (const auto &[other, from] : gathering.of)
        std::memmove(static_cast<std::byte *>(to.second) + static_cast<size_t>(other) * count, from.first, count);
  };
  return later(communicator, [=, rank = communicator->rank] {
    return std::optional(enqueued(stream, gatheringOf(rank, mine, all, act)));
  });
}
ncclResult_t ncclAllReduce(const void *mine, void *all, size_t count, ncclDataType_t type, ncclRedOp_t,
                           ncclComm_t communicator, cudaStream_t stream) {
  const std::lock_guard lock(Gpu::get().mutex);
  if (type != ncclInt || mine != all || Gpu::get().deviceOf(all, count * sizeof(int)) < 0)
    return ncclInvalidArgument;
  // Of its values nothing is looked at.
  return later(communicator, [=, rank = communicator->rank] {
    return std::optional(enqueued(stream, gatheringOf(rank, mine, all, [](const Room::Gathering &) {})));
  });
}
}
