// SPDX-License-Identifier: Apache-2.0
// The functions of NCCL that reshard uses: non-blocking communicators, whose ranks are threads of one process. An
// operation completes after a random number of state queries. A group completes when all its messages are matched;
// messages of a pair of ranks match in order.

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
  bool matched = false;
};

/// The state that the ranks of a communicator share.
struct Shared {
  int size = 0, joined = 0;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<End>>> waiting; // sends, or receives, by (from, to)
  struct Collective {
    int arrived = 0;
    std::map<int, std::pair<const void *, void *>> of; // by rank: its input and its output
  };
  std::map<uint64_t, Collective> collectives; // by sequence number
};

/// A rank. Shared, because pending work may refer to a destroyed communicator.
struct Rank {
  std::shared_ptr<Shared> shared;
  int number = 0;
  uint64_t collectives = 0; // number of started ones
  bool aborted = false;
};

struct Message {
  ncclComm_t communicator;
  End end;
  cudaStream_t stream;
};
thread_local int depth = 0;
thread_local std::vector<Message> messages;

std::map<std::string, std::weak_ptr<Shared>> sharedById; // by unique id
uint64_t ids = 0;

} // namespace

struct ncclComm {
  std::shared_ptr<Rank> rank;
  std::function<std::optional<ncclResult_t>()> pending; // returns nothing while it waits for other ranks
  uint64_t polls = 0;                                   // remaining queries that return ncclInProgress in any case
  std::string last;
};

namespace {

ncclResult_t refuse(ncclComm_t communicator, const char *text) {
  communicator->last = text;
  return ncclInvalidUsage;
}

/// Starts an operation that completes later.
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

/// Matches one end of a message with the oldest waiting other end, or adds it to the waiting ends.
void match(const Rank &rank, const std::shared_ptr<End> &end) {
  auto &waiting =
      rank.shared->waiting[end->send ? std::pair(rank.number, end->peer) : std::pair(end->peer, rank.number)];
  if (waiting.empty() || waiting.front()->send == end->send) {
    waiting.push_back(end);
    return;
  }
  const std::shared_ptr<End> other = waiting.front();
  waiting.pop_front();
  if (other->bytes != end->bytes)
    die("a send and its receive have different sizes: " + std::to_string(end->bytes) + " and " +
        std::to_string(other->bytes) + " bytes");
  std::memmove(end->send ? other->memory : end->memory, end->send ? end->memory : other->memory, end->bytes);
  end->matched = other->matched = true;
}

/// Returns the work of a group of messages of one rank; all of them start together.
Work groupOf(const std::shared_ptr<Rank> &rank, const std::vector<End> &ends) {
  return [rank, ends] {
    auto own = std::make_shared<std::vector<std::shared_ptr<End>>>();
    return [rank, ends, own] {
      if (own->empty() && !rank->aborted)
        for (const End &end : ends) {
          own->push_back(std::make_shared<End>(end));
          match(*rank, own->back());
        }
      return rank->aborted || std::all_of(own->begin(), own->end(), [](const auto &end) { return end->matched; })
                 ? State::done
                 : State::stuck;
    };
  };
}

/// Returns the work of a collective operation: the last rank that arrives calls `act`.
Work collectiveOf(const std::shared_ptr<Rank> &rank, const void *mine, void *all,
                  std::function<void(const Shared::Collective &)> act) {
  return [=] {
    const uint64_t number = rank->collectives++;
    auto arrived = std::make_shared<bool>(false);
    return [=] {
      if (rank->aborted)
        return State::done;
      Shared::Collective &collective = rank->shared->collectives[number];
      if (!std::exchange(*arrived, true)) {
        collective.of[rank->number] = {mine, all};
        if (++collective.arrived == rank->shared->size)
          act(collective);
      }
      return collective.arrived == rank->shared->size ? State::done : State::stuck;
    };
  };
}

ncclResult_t add(Message message) {
  const std::lock_guard lock(Gpu::get().mutex);
  const Rank &rank = *message.communicator->rank;
  if (message.end.peer < 0 || message.end.peer >= rank.shared->size ||
      Gpu::get().deviceOf(message.end.memory, message.end.bytes) < 0)
    return refuse(message.communicator, "invalid message: its peer is not a rank, or its memory is host memory");
  if (depth == 0)
    return refuse(message.communicator, "a message was sent or received outside of a group");
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
  std::shared_ptr<Shared> shared = sharedById[id.internal].lock();
  if (!shared)
    sharedById[id.internal] = shared = std::make_shared<Shared>();
  shared->size = size;
  ++shared->joined;
  ++Gpu::get().alive["communicators"];
  *communicator = new ncclComm;
  (*communicator)->rank = std::make_shared<Rank>(Rank{shared, rank});
  return later(*communicator,
               [shared] { return shared->joined >= shared->size ? std::optional(ncclSuccess) : std::nullopt; });
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
  *count = communicator->rank->shared->size;
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
  for (auto &[pair, ends] : rank.shared->waiting) // the caller may release their memory now
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
      die("a group with several communicators or streams is not simulated");
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
  const auto size = static_cast<size_t>(communicator->rank->shared->size);
  if (type != ncclChar || Gpu::get().deviceOf(mine, count) < 0 || Gpu::get().deviceOf(all, count * size) < 0)
    return ncclInvalidArgument;
  const auto act = [count](const Shared::Collective &collective) {
    for (const auto &[rank, to] : collective.of)
      for (const auto &[other, from] : collective.of)
        std::memmove(static_cast<std::byte *>(to.second) + static_cast<size_t>(other) * count, from.first, count);
  };
  return later(communicator, [=, rank = communicator->rank] {
    return std::optional(enqueued(stream, collectiveOf(rank, mine, all, act)));
  });
}
ncclResult_t ncclAllReduce(const void *mine, void *all, size_t count, ncclDataType_t type, ncclRedOp_t,
                           ncclComm_t communicator, cudaStream_t stream) {
  const std::lock_guard lock(Gpu::get().mutex);
  if (type != ncclInt || mine != all || Gpu::get().deviceOf(all, count * sizeof(int)) < 0)
    return ncclInvalidArgument;
  // The values are not reduced: the caller ignores them.
  return later(communicator, [=, rank = communicator->rank] {
    return std::optional(enqueued(stream, collectiveOf(rank, mine, all, [](const Shared::Collective &) {})));
  });
}
}
