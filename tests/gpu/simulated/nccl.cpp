// NCCL, what of it is used: communicators of one rank, which do not block. What is called is done when somebody has asked for its state often enough.

#include "tests/gpu/simulated/gpu.h"

#include <cstring>
#include <nccl.h>

using namespace simulated;

struct ncclComm {
  std::function<ncclResult_t()> pending;
  uint64_t polls = 0; // that find it in progress
  std::string last;
};

namespace {

struct Message {
  ncclComm_t communicator;
  bool send;
  std::byte *memory;
  size_t bytes;
  cudaStream_t stream;
};
thread_local int depth = 0;
thread_local std::vector<Message> messages;

ncclResult_t refuse(ncclComm_t communicator, const char *text) {
  communicator->last = text;
  return ncclInvalidUsage;
}

/// Begins what is done later.
ncclResult_t later(ncclComm_t communicator, std::function<ncclResult_t()> work) {
  if (communicator->pending)
    return refuse(communicator, "an operation is in progress");
  communicator->pending = std::move(work);
  communicator->polls = Gpu::get().random() % 4;
  return ncclInProgress;
}

ncclResult_t enqueued(cudaStream_t stream, Work work) { return Gpu::get().enqueue(stream, std::move(work)) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }

ncclResult_t add(Message message, int peer) {
  const std::lock_guard lock(Gpu::get().mutex);
  if (peer != 0 || Gpu::get().deviceOf(message.memory, message.bytes) < 0)
    return refuse(message.communicator, "a message to another rank, or of memory of the host");
  if (depth == 0)
    return refuse(message.communicator, "a message outside of a group waits for ever for its other end");
  messages.push_back(message);
  return ncclSuccess;
}

} // namespace

extern "C" {

const char *ncclGetErrorString(ncclResult_t result) { return result == ncclInvalidUsage ? "invalid usage" : result == ncclSuccess ? "no error" : "simulated error"; }
const char *ncclGetLastError(ncclComm_t communicator) { return communicator ? communicator->last.c_str() : ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  std::memset(id, 7, sizeof *id);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *communicator, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
  const std::lock_guard lock(Gpu::get().mutex);
  ncclUniqueId expected;
  ncclGetUniqueId(&expected);
  if (std::memcmp(&id, &expected, sizeof id) != 0 || size != 1 || rank != 0 || config->blocking != 0)
    return ncclInvalidArgument;
  ++Gpu::get().alive["communicators"];
  *communicator = new ncclComm;
  return later(*communicator, [] { return ncclSuccess; });
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t *state) {
  const std::lock_guard lock(Gpu::get().mutex);
  *state = ncclSuccess;
  if (!communicator->pending)
    return ncclSuccess;
  if (communicator->polls > 0) {
    --communicator->polls;
    *state = ncclInProgress;
    return ncclSuccess;
  }
  *state = communicator->pending();
  communicator->pending = {};
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t communicator, int *rank) {
  *rank = 0;
  return communicator->pending ? refuse(communicator, "an operation is in progress") : ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t communicator, int *count) {
  *count = 1;
  return communicator->pending ? refuse(communicator, "an operation is in progress") : ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t communicator) {
  const std::lock_guard lock(Gpu::get().mutex);
  return later(communicator, [] { return ncclSuccess; });
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
  std::vector<Message> out, in;
  for (const Message &message : group) {
    if (message.communicator != group[0].communicator || message.stream != group[0].stream)
      die("a group of several communicators or streams is not simulated");
    (message.send ? out : in).push_back(message);
  }
  bool alike = out.size() == in.size();
  for (size_t m = 0; alike && m < out.size(); ++m) // ends of one pair of ranks meet in their order
    alike = out[m].bytes == in[m].bytes;
  if (!alike)
    return refuse(group[0].communicator, "sends and receives of a group do not match");
  return later(group[0].communicator, [out, in] {
    return enqueued(out[0].stream, [out, in] {
      for (size_t m = 0; m < out.size(); ++m)
        std::memmove(in[m].memory, out[m].memory, out[m].bytes);
    });
  });
}
ncclResult_t ncclSend(const void *memory, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator, cudaStream_t stream) {
  return type == ncclChar ? add({communicator, true, static_cast<std::byte *>(const_cast<void *>(memory)), count, stream}, peer) : ncclInvalidArgument;
}
ncclResult_t ncclRecv(void *memory, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator, cudaStream_t stream) {
  return type == ncclChar ? add({communicator, false, static_cast<std::byte *>(memory), count, stream}, peer) : ncclInvalidArgument;
}
ncclResult_t ncclAllGather(const void *mine, void *all, size_t count, ncclDataType_t type, ncclComm_t communicator, cudaStream_t stream) {
  const std::lock_guard lock(Gpu::get().mutex);
  if (type != ncclChar || Gpu::get().deviceOf(mine, count) < 0 || Gpu::get().deviceOf(all, count) < 0)
    return ncclInvalidArgument;
  return later(communicator, [=] { return enqueued(stream, [=] { std::memmove(all, mine, count); }); });
}
ncclResult_t ncclAllReduce(const void *mine, void *all, size_t count, ncclDataType_t type, ncclRedOp_t, ncclComm_t communicator, cudaStream_t stream) {
  const std::lock_guard lock(Gpu::get().mutex);
  if (type != ncclInt || mine != all || Gpu::get().deviceOf(all, count * sizeof(int)) < 0)
    return ncclInvalidArgument;
  return later(communicator, [=] { return enqueued(stream, [] {}); });
}
}
