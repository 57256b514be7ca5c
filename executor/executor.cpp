// The C API's life cycle: open → bind → prepare → run … → close.

#include "executor/reshard.h"

#include "executor/bindings.h"
#include "executor/bootstrap.h"
#include "executor/channel.h"
#include "executor/launch.h"
#include "executor/operands.h"
#include "executor/recorded.h"
#include "executor/struct_size.h"
#include "executor/transforms.h"
#include "executor/transport.h"
#include "executor/view_jobs.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <unordered_map>

using namespace reshard;
namespace fbs = reshard::schema;

namespace {

struct Hook {
  reshard_hook call = nullptr;
  void *user = nullptr;
};

/// A hook to call after a run, with its rank.
struct Refresh {
  std::string name;
  uint32_t rank = 0;
};

} // namespace

struct reshard_executor {
  std::unique_ptr<Plan> plan;
  std::vector<uint32_t> ranks;
  std::map<std::pair<uint32_t, uint32_t>, Bindable> bindables; // by (endpoint, world rank or file number)
  std::vector<LocalRank> locals;
  std::vector<ViewJobs> viewJobs; // by local rank
  Transforms transforms;
  std::vector<BoundRange> ranges;
  std::map<std::string, Hook> hooks;
  std::vector<Refresh> refreshes; // in the order of ranks, then of params
  std::unique_ptr<Transport> transport;
  double joinSeconds = 0;
  bool recorded = false; // the transport records the hooks in prepare and replays them
  bool prepared = false;
  bool broken = false; // Transport::prepare failed part way
  reshard_state state = RESHARD_EMPTY;
  uint64_t version = 0;
  std::string error;

  reshard_status fail(reshard_status status, std::string text) {
    error = std::move(text);
    return status;
  }

  /// Calls the hooks that follow a run: `finalize` of transforms, then `refresh`.
  std::string refresh() {
    if (std::string error = transforms.finalize(); !error.empty())
      return error;
    for (const Refresh &refresh : refreshes)
      if (const Hook &hook = hooks[refresh.name]; hook.call(hook.user, refresh.name.c_str(), refresh.rank) != 0)
        return "the hook '" + refresh.name + "' failed on rank " + std::to_string(refresh.rank);
    return {};
  }

  Bindable &bindable(uint32_t endpoint, uint32_t meshRank, uint32_t key) {
    const auto [at, added] = bindables.try_emplace({endpoint, key});
    if (added)
      at->second = bindableOf(*plan, endpoint, meshRank);
    return at->second;
  }
};

namespace {

/// No exception crosses the C API.
template <class Body> reshard_status guarded(reshard_executor *executor, Body body) {
  try {
    executor->error.clear();
    return body();
  } catch (const std::bad_alloc &) {
    return executor->fail(RESHARD_FAILED, "out of memory");
  } catch (const std::exception &exception) {
    return executor->fail(RESHARD_FAILED, exception.what());
  }
}

/// The time `seconds` from now; no deadline if that is not positive.
Transport::Deadline deadlineIn(double seconds) {
  if (!(seconds > 0))
    return {};
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                std::chrono::duration<double>(std::min(seconds, 1e9)));
}

/// Lists the hooks that the params of the local ranks need. Returns an error text if one is not set; empty on success.
std::string findRefreshes(reshard_executor &e) {
  for (const LocalRank &local : e.locals)
    for (const fbs::BufferRange *range : *local.segment->buffers()) {
      const fbs::Endpoint &endpoint = *e.plan->manifest().endpoints()->Get(range->endpoint());
      const fbs::Param &param = *endpoint.params()->Get(range->param());
      if (range->endpoint() == 0 || endpoint.storage() || !param.refresh() || param.refresh()->size() == 0)
        continue;
      const std::string name = param.refresh()->str();
      if (!e.hooks.contains(name))
        return "rank " + std::to_string(local.rank) + " param '" + param.name()->str() + "' needs the hook '" + name +
               "' after each run, which is not set";
      const bool known = std::any_of(e.refreshes.begin(), e.refreshes.end(), [&](const Refresh &other) {
        return other.rank == local.rank && other.name == name;
      });
      if (!known)
        e.refreshes.push_back({name, local.rank});
    }
  return {};
}

/// Opens the transport of a GPU. `given`: the rank that the caller gave; `own`: set to the rank of this process if
/// ranks are processes. Returns an error text; empty on success.
std::string openRecorded(reshard_executor &e, const std::string &transport, std::optional<uint32_t> given,
                         const reshard_options &options, std::optional<uint32_t> &own, bool &timedOut,
                         std::unique_ptr<Transport> &opened) {
  Launch launch;
  if (transport == "nccl" && !options.communicator)
    launch = findLaunch();
  std::unique_ptr<Device> device;
  if (std::string error = openDevice("cuda", launch.localRank ? static_cast<int>(*launch.localRank) : -1, device);
      !error.empty())
    return error;
  std::unique_ptr<Communicator> communicator;
  if (transport == "nccl") {
    CommunicatorOptions how{given.value_or(launch.rank.value_or(0)),
                            e.plan->world(),
                            device->number(),
                            options.communicator,
                            {},
                            deadlineIn(e.joinSeconds)};
    if (!how.communicator && how.size > 1) {
      if (!given && !launch.rank)
        return "the rank of this process is unknown: pass one rank to open, or start it with a launcher that sets RANK "
               "(torchrun, mpirun, srun)";
      if (launch.size && *launch.size != how.size)
        return "the launch has " + std::to_string(*launch.size) + " processes, expected " + std::to_string(how.size) +
               ", one for each rank of the plan";
      const char *named = options.unique_id_file ? options.unique_id_file : std::getenv("RESHARD_NCCL_ID_FILE");
      if (!named && !std::getenv("NCCL_COMM_ID") && !launch.mpi)
        return "transport 'nccl' cannot find rank 0: give a communicator, unique_id_file, RESHARD_NCCL_ID_FILE or "
               "NCCL_COMM_ID, or start the processes with mpirun";
      if (!named && !std::getenv("NCCL_COMM_ID"))
        how.share = [seconds = e.joinSeconds](std::byte *id, size_t bytes, const Deadline &deadline, bool &late) {
          std::unique_ptr<Channel> channel;
          std::string error = openChannel("mpi", seconds, channel, late);
          return error.empty() ? shareByChannel(*channel, id, bytes, deadline, late) : error;
        };
      if (named)
        how.share = [path = std::string(named), rank = how.rank](std::byte *id, size_t bytes, const Deadline &deadline,
                                                                 bool &late) {
          return shareByFile(path, rank, id, bytes, deadline, late);
        };
    }
    if (std::string error = openCommunicator("nccl", how, communicator, timedOut); !error.empty())
      return error;
    own = communicator->rank();
  }
  e.recorded = true;
  RecordedOptions how{options.no_local_shortcut != 0, [&e] { return e.transforms.prepare(); },
                      [&e] { return e.refresh(); }};
  opened = makeRecordedTransport(std::move(device), std::move(communicator), std::move(how));
  return {};
}

/// Loads the segments of the ranks of this process: those in `ranks`; else `own`; else all.
reshard_status openRanks(reshard_executor &e, const uint32_t *ranks, size_t count, std::optional<uint32_t> own,
                         const Channel *channel) {
  if (channel && channel->size() != e.plan->world())
    return e.fail(RESHARD_INVALID, "the channel has " + std::to_string(channel->size()) + " processes, expected " +
                                       std::to_string(e.plan->world()) + ", one for each rank of the plan");
  if (ranks)
    e.ranks.assign(ranks, ranks + count);
  else if (own)
    e.ranks = {*own};
  else
    for (uint32_t rank = 0; rank < e.plan->world(); ++rank)
      e.ranks.push_back(rank);
  for (uint32_t rank : e.ranks) {
    LocalRank &local = e.locals.emplace_back();
    local.rank = rank;
    if (std::string error = e.plan->segment(rank, local.segment); !error.empty())
      return e.fail(rank < e.plan->world() ? RESHARD_BAD_PLAN : RESHARD_INVALID, std::move(error));
  }
  std::vector<uint32_t> sorted = e.ranks;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    return e.fail(RESHARD_INVALID, "rank " + std::to_string(*std::adjacent_find(sorted.begin(), sorted.end())) +
                                       " is given twice, expected distinct ranks");
  return RESHARD_OK;
}

/// All processes open or none does: otherwise some would wait until their deadline for messages of a process whose open
/// failed. `mine`: the result of this process's open. Returns the common status: the least that is not RESHARD_OK.
reshard_status openTogether(reshard_executor &e, Channel &channel, reshard_status mine) {
  channel.reserve(Bootstrap::kRequests);
  auto bootstrap = std::make_unique<Bootstrap>(channel, 0);
  bool late = false;
  int64_t minimum = 0;
  const int64_t said = mine == RESHARD_OK ? INT64_MAX : static_cast<int64_t>(mine) << 32 | channel.rank();
  if (std::string error = bootstrap->allReduceMin(said, minimum, deadlineIn(e.joinSeconds), late); !error.empty()) {
    [[maybe_unused]] Bootstrap *const leaked = bootstrap.release(); // MPI may still write to its members
    return mine == RESHARD_OK ? e.fail(late ? RESHARD_TIMEOUT : RESHARD_FAILED, std::move(error)) : mine;
  }
  if (minimum == INT64_MAX)
    return RESHARD_OK;
  const auto all = static_cast<reshard_status>(minimum >> 32);
  return mine == RESHARD_OK ? e.fail(all, "rank " + std::to_string(minimum & UINT32_MAX) +
                                              " could not open the plan; see that rank's error")
                            : all;
}

} // namespace

reshard_status reshard_open(const char *path, const uint32_t *ranks, size_t rank_count, const reshard_options *options,
                            reshard_executor **executor) {
  if (!executor)
    return RESHARD_INVALID;
  *executor = new (std::nothrow) reshard_executor;
  if (!*executor)
    return RESHARD_FAILED;
  reshard_executor &e = **executor;
  return guarded(&e, [&] {
    if (!path)
      return e.fail(RESHARD_INVALID, "the plan path is NULL");
    if (ranks && rank_count == 0)
      return e.fail(RESHARD_INVALID, "found an empty list of ranks, expected 1 or more; pass NULL for all ranks of the "
                                     "plan (or this process's own with transport 'mpi' or 'nccl')");
    reshard_options own = RESHARD_OPTIONS_INITIALIZER;
    if (std::string error = options ? readStruct(options, own) : std::string(); !error.empty())
      return e.fail(RESHARD_INVALID, std::move(error));
    const std::string transport = own.transport ? own.transport : "threads";
    const std::string device = own.device ? own.device : "cpu";
    if (transport != "threads" && transport != "mpi" && transport != "nccl")
      return e.fail(RESHARD_INVALID, "unknown transport '" + transport + "', expected 'threads', 'mpi' or 'nccl'");
    if (device != "cpu" && device != "cuda")
      return e.fail(RESHARD_INVALID, "unknown device '" + device + "', expected 'cpu' or 'cuda'");
    if (transport != "threads" && (transport == "nccl") != (device == "cuda"))
      return e.fail(RESHARD_INVALID, "transport '" + transport + "' does not run on device '" + device +
                                         "', expected '" + (device == "cpu" ? "cuda" : "cpu") + "'");
    const std::string unopened = Plan::open(path, e.plan);
    if (!unopened.empty() && transport != "mpi")
      return e.fail(RESHARD_BAD_PLAN, unopened);
    e.joinSeconds = own.join_seconds;
    std::unique_ptr<Channel> channel;
    std::unique_ptr<Transport> recorded; // the transport of a GPU
    bool late = false;
    std::optional<uint32_t> ownRank; // of this process, if ranks are processes
    if (device == "cuda") {
      if (std::string error =
              openRecorded(e, transport, ranks && rank_count == 1 ? std::optional(*ranks) : std::nullopt, own, ownRank,
                           late, recorded);
          !error.empty())
        return e.fail(late ? RESHARD_TIMEOUT : RESHARD_FAILED, std::move(error));
    } else if (transport != "threads") {
      if (std::string error = openChannel(transport, e.joinSeconds, channel, late); !error.empty())
        return unopened.empty() ? e.fail(late ? RESHARD_TIMEOUT : RESHARD_FAILED, std::move(error))
                                : e.fail(RESHARD_BAD_PLAN, unopened);
      ownRank = channel->rank();
    }
    struct Abandon { // if this open fails before a transport owns the channel, closing it must not wait for the others
      std::unique_ptr<Channel> &channel;
      ~Abandon() {
        if (channel)
          channel->abandon();
      }
    } abandon{channel};
    const reshard_status mine =
        unopened.empty() ? openRanks(e, ranks, rank_count, ownRank, channel.get()) : e.fail(RESHARD_BAD_PLAN, unopened);
    if (const reshard_status all = channel ? openTogether(e, *channel, mine) : mine; all != RESHARD_OK)
      return all;
    if (recorded)
      e.transport = std::move(recorded);
    else
      e.transport = channel ? makeMessageTransport(std::move(channel), !own.no_local_shortcut)
                            : makeThreadsTransport(own.threads);
    return RESHARD_OK;
  });
}

reshard_status reshard_bind(reshard_executor *executor, uint32_t endpoint, uint32_t rank, const char *param,
                            void *pointer, uint64_t bytes) {
  if (!executor)
    return RESHARD_INVALID;
  reshard_executor &e = *executor;
  return guarded(&e, [&] {
    if (!e.transport || !param)
      return e.fail(RESHARD_INVALID, e.transport ? "the param name is NULL" : "the plan is not open");
    if (e.prepared)
      return e.fail(RESHARD_INVALID, "bind after prepare: bindings are fixed");
    const auto *endpoints = e.plan->manifest().endpoints();
    if (endpoint >= endpoints->size())
      return e.fail(RESHARD_BAD_BINDING, "there is no endpoint " + std::to_string(endpoint) + ", the plan has " +
                                             std::to_string(endpoints->size()));
    const fbs::Endpoint &at = *endpoints->Get(endpoint);
    const std::optional<uint32_t> number = e.plan->meshRanks().find(endpoint, rank);
    const std::string where = at.role()->str() + (at.storage() ? " file " : " rank ") + std::to_string(rank);
    if (!number)
      return e.fail(RESHARD_BAD_BINDING, where + " is not in the plan");
    Bindable &here = e.bindable(endpoint, *number, rank);
    const auto found = here.names.find(param);
    if (found == here.names.end())
      if (const std::string transform = transformOf(e.plan->manifest(), at, here.meshRank, param); !transform.empty())
        return e.fail(RESHARD_BAD_BINDING, where + " param '" + param +
                                               "' must not be bound: its memory belongs to the "
                                               "transform '" +
                                               transform + "'");
    if (found == here.names.end())
      return e.fail(RESHARD_BAD_BINDING, where + " has no param '" + param + "'" + nearest(param, here));
    const auto [instance, expected] = found->second;
    if (bytes != expected)
      return e.fail(RESHARD_BAD_BINDING, where + " param '" + param + "': found " + std::to_string(bytes) +
                                             " bytes, expected " + std::to_string(expected));
    if (!pointer && bytes > 0)
      return e.fail(RESHARD_BAD_BINDING, where + " param '" + param + "': the pointer is NULL");
    if (here.pointers[instance])
      return e.fail(RESHARD_BAD_BINDING, where + " param '" + param + "' is already bound");
    static std::byte nothing;
    here.pointers[instance] = pointer ? static_cast<std::byte *>(pointer) : &nothing;
    const std::byte *begin = here.pointers[instance];
    e.ranges.push_back({begin, begin + bytes, endpoint > 0, where + " param '" + param + "'"});
    return RESHARD_OK;
  });
}

reshard_status reshard_set_hook(reshard_executor *executor, const char *name, reshard_hook hook, void *user) {
  if (!executor)
    return RESHARD_INVALID;
  reshard_executor &e = *executor;
  return guarded(&e, [&] {
    if (!name || !hook)
      return e.fail(RESHARD_INVALID, name ? "the hook is NULL" : "the name of the hook is NULL");
    if (e.prepared)
      return e.fail(RESHARD_INVALID, "set_hook after prepare: hooks are fixed");
    e.hooks[name] = {hook, user};
    return RESHARD_OK;
  });
}

reshard_status reshard_set_transform(reshard_executor *executor, const char *name, const reshard_transform *transform) {
  if (!executor)
    return RESHARD_INVALID;
  reshard_executor &e = *executor;
  return guarded(&e, [&] {
    if (!name || !transform)
      return e.fail(RESHARD_INVALID, name ? "the transform is NULL" : "the name of the transform is NULL");
    if (e.prepared)
      return e.fail(RESHARD_INVALID, "set_transform after prepare: transforms are fixed");
    reshard_transform own = RESHARD_TRANSFORM_INITIALIZER;
    if (std::string error = readStruct(transform, own); !error.empty())
      return e.fail(RESHARD_INVALID, std::move(error));
    e.transforms.set(name, own);
    return RESHARD_OK;
  });
}

reshard_status reshard_prepare(reshard_executor *executor) {
  if (!executor)
    return RESHARD_INVALID;
  reshard_executor &e = *executor;
  return guarded(&e, [&] {
    if (!e.transport || e.prepared || e.broken)
      return e.fail(RESHARD_INVALID, e.prepared ? "the executor is already prepared"
                                     : e.broken ? "an earlier prepare failed part way; open a new executor"
                                                : "the plan is not open");
    if (std::string error = checkOverlaps(e.ranges); !error.empty())
      return e.fail(RESHARD_BAD_BINDING, std::move(error));
    for (LocalRank &local : e.locals) {
      const LocalRank opened{local.rank, local.segment, {}, {}, {}, nullptr, nullptr, 0};
      local = opened; // discards the state of an earlier prepare that failed
      for (const fbs::BufferRange *range : *local.segment->buffers()) {
        const fbs::Endpoint &endpoint = *e.plan->manifest().endpoints()->Get(range->endpoint());
        Bindable &bound = e.bindable(range->endpoint(), range->mesh_rank(), endpoint.ranks()->Get(range->mesh_rank()));
        local.memory.push_back(bound.pointers.data() + bound.firstInstance[range->param()]);
        const fbs::Param &param = *endpoint.params()->Get(range->param());
        std::byte *const *first = local.memory.back(), *const *end = first + range->count();
        if (range->endpoint() > 0 && fbs::bindable(param) && range->bytes() > 0 &&
            std::find(first, end, nullptr) != end)
          return e.fail(RESHARD_BAD_BINDING, bound.role + (endpoint.storage() ? " file " : " rank ") +
                                                 std::to_string(endpoint.ranks()->Get(range->mesh_rank())) +
                                                 " param '" + param.name()->str() + "': not all instances are bound");
      }
    }
    bool missing = false;
    if (std::string error = e.transforms.bind(*e.plan, e.locals, *e.transport, missing); !error.empty())
      return e.fail(missing ? RESHARD_BAD_BINDING : RESHARD_FAILED, std::move(error));
    e.viewJobs.clear();
    e.viewJobs.resize(e.locals.size());
    for (size_t l = 0; l < e.locals.size(); ++l)
      if (std::string error = e.viewJobs[l].bind(*e.plan, e.locals[l], *e.transport); !error.empty())
        return e.fail(RESHARD_FAILED, std::move(error));
    e.refreshes.clear();
    if (std::string error = findRefreshes(e); !error.empty())
      return e.fail(RESHARD_BAD_BINDING, std::move(error));
    for (const LocalRank &local : e.locals) {
      std::string error = checkBound(*e.plan, local);
      if (error.empty())
        error = e.transport->reach(*e.plan, local);
      if (!error.empty())
        return e.fail(RESHARD_BAD_BINDING, std::move(error));
    }
    bool timedOut = false;
    e.broken = true;
    if (std::string error = e.transport->prepare(*e.plan, e.locals, deadlineIn(e.joinSeconds), timedOut);
        !error.empty())
      return e.fail(timedOut ? RESHARD_TIMEOUT : RESHARD_FAILED, std::move(error));
    e.broken = false;
    e.prepared = true;
    return RESHARD_OK;
  });
}

reshard_status reshard_run(reshard_executor *executor, double timeout_seconds) {
  if (!executor)
    return RESHARD_INVALID;
  reshard_executor &e = *executor;
  return guarded(&e, [&] {
    if (!e.prepared)
      return e.fail(RESHARD_INVALID, "run before prepare");
    e.state = RESHARD_TORN; // until the run is complete
    bool timedOut = false;
    const Transport::Deadline deadline = deadlineIn(timeout_seconds);
    if (!e.recorded)
      if (std::string error = e.transforms.prepare(); !error.empty())
        return e.fail(RESHARD_FAILED, std::move(error));
    if (std::string error = e.transport->run(deadline, timedOut); !error.empty())
      return e.fail(timedOut ? RESHARD_TIMEOUT : RESHARD_FAILED, std::move(error));
    if (!e.recorded)
      if (std::string error = e.refresh(); !error.empty())
        return e.fail(RESHARD_FAILED, std::move(error));
    e.state = RESHARD_COMPLETE;
    ++e.version;
    return RESHARD_OK;
  });
}

reshard_status reshard_enqueue(reshard_executor *executor, void *stream) {
  if (!executor)
    return RESHARD_INVALID;
  reshard_executor &e = *executor;
  return guarded(&e, [&] {
    if (!e.prepared)
      return e.fail(RESHARD_INVALID, "enqueue before prepare");
    if (std::string error = e.transport->enqueue(stream); !error.empty())
      return e.fail(e.recorded ? RESHARD_FAILED : RESHARD_INVALID, std::move(error));
    return RESHARD_OK;
  });
}

reshard_status reshard_all_reduce_min(reshard_executor *executor, int64_t value, int64_t *result) {
  if (!executor)
    return RESHARD_INVALID;
  reshard_executor &e = *executor;
  return guarded(&e, [&] {
    if (!e.transport || !result)
      return e.fail(RESHARD_INVALID, e.transport ? "`result` is NULL" : "the plan is not open");
    bool timedOut = false;
    if (std::string error = e.transport->allReduceMin(value, *result, deadlineIn(e.joinSeconds), timedOut);
        !error.empty())
      return e.fail(timedOut ? RESHARD_TIMEOUT : RESHARD_FAILED, std::move(error));
    return RESHARD_OK;
  });
}

const uint32_t *reshard_ranks(const reshard_executor *executor, size_t *count) {
  if (count)
    *count = executor ? executor->ranks.size() : 0;
  return executor ? executor->ranks.data() : nullptr;
}

reshard_state reshard_target_state(const reshard_executor *executor) {
  return executor ? executor->state : RESHARD_EMPTY;
}
uint64_t reshard_version(const reshard_executor *executor) { return executor ? executor->version : 0; }
void *reshard_stream(const reshard_executor *executor) {
  return executor && executor->transport ? executor->transport->stream() : nullptr;
}
const char *reshard_error(const reshard_executor *executor) {
  return executor ? executor->error.c_str() : "no executor";
}
uint64_t reshard_bytes(const reshard_executor *executor) {
  return executor && executor->transport ? executor->transport->bytes() : 0;
}
uint64_t reshard_bytes_by(const reshard_executor *executor, reshard_method method) {
  const reshard::BytesBy by = executor && executor->transport ? executor->transport->bytesBy() : reshard::BytesBy();
  switch (method) {
  case RESHARD_LOCAL:
    return by.local;
  case RESHARD_SHARED_MEMORY:
    return by.sharedMemory;
  case RESHARD_MESSAGES:
    return by.messages;
  case RESHARD_MESSAGES_INSIDE_HOST:
    return by.messagesInsideHost;
  }
  return 0;
}
void reshard_close(reshard_executor *executor) { delete executor; }
