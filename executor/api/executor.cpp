// SPDX-License-Identifier: Apache-2.0
// The C API's life cycle: open → bind → prepare → run … → close.

#include "executor/api/executor_state.h"

#include "executor/api/struct_size.h"
#include "executor/interfaces/channel.h"
#include "executor/memory/copy_progress.h"
#include "executor/memory/operands.h"
#include "executor/rendezvous/launch.h"
#include "executor/transports/bootstrap.h"
#include "executor/transports/overflows.h"
#include "executor/transports/transport.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

using namespace reshard;
namespace fbs = reshard::schema;

namespace {

/// Lists the hooks that the params of the local ranks need. Fails if one is not set.
Status findRefreshes(reshard_executor &e) {
  e.refreshes.clear();
  for (const LocalRank &local : e.locals)
    for (const fbs::BufferRange *range : *local.segment->buffers()) {
      const fbs::Endpoint &endpoint = *e.plan->manifest().endpoints()->Get(range->endpoint());
      const fbs::Param &param = *endpoint.params()->Get(range->param());
      if (range->endpoint() == 0 || endpoint.storage() || !param.refresh() || param.refresh()->size() == 0)
        continue;
      const std::string name = param.refresh()->str();
      if (!e.hooks.contains(name))
        return badBinding("rank " + std::to_string(local.rank) + " param '" + param.name()->str() +
                          "' needs the hook '" + name + "' after each run, which is not set");
      const bool known = std::any_of(e.refreshes.begin(), e.refreshes.end(), [&](const Refresh &other) {
        return other.rank == local.rank && other.name == name;
      });
      if (!known)
        e.refreshes.push_back({name, local.rank});
    }
  return {};
}

/// The arguments of reshard_open, checked.
struct OpenRequest {
  const char *path;
  const uint32_t *ranks; // null: all of the plan, or the process's own
  size_t rankCount;
  reshard_options options = RESHARD_OPTIONS_INITIALIZER;
};

/// The connection of this process to the others.
struct OpenConnection {
  std::unique_ptr<Channel> channel;    // a transport with messages on the CPU has one
  std::unique_ptr<Transport> recorded; // the transport of a GPU
  std::optional<uint32_t> rank;        // this process's, if ranks are processes
  std::optional<pull::Fleet> fleet;    // in pull mode

  /// If open fails before a transport owns the channel, closing it must not wait for the others.
  ~OpenConnection() {
    if (channel)
      channel->abandon(failed("it could not open the plan"));
  }
};

/// Checks all fields of a request. Returns the row of its transport.
Result<const TransportTraits *> checkRequest(const OpenRequest &request) {
  if (!request.path)
    return invalid("the plan path is NULL");
  if (request.ranks && request.rankCount == 0)
    return invalid("found an empty list of ranks, expected 1 or more; pass NULL for all ranks of the plan (or this "
                   "process's own with transport " +
                   oneOf(transportNames(&TransportTraits::processes)) + ")");
  return checkOptions(request.options);
}

/// The one rank that the caller gave, if it gave exactly one.
std::optional<uint32_t> rankOf(const OpenRequest &request) {
  return request.rankCount == 1 ? std::optional(*request.ranks) : std::nullopt;
}

/// Opens the rendezvous of the caller's options, or `url` if they name none.
Status openJob(reshard_executor &e, const OpenRequest &request, const char *url, const Deadline &deadline) {
  const reshard_options &options = request.options;
  Result<JobConnection> job =
      connectJob(options, options.rendezvous ? options.rendezvous : url,
                 {e.plan->digest(), rankOf(request), e.plan->world(), options.pull != 0}, deadline);
  if (!job.ok())
    return job.status();
  e.job = std::move(*job);
  return {};
}

/// How ranks with a GPU each and without the caller's communicator find rank 0: by a rendezvous, or by NCCL's own.
Status findRankZero(reshard_executor &e, const OpenRequest &request, const Launch &launch,
                    CommunicatorOptions &options) {
  const bool given = request.options.rendezvous || request.options.store;
  if (!rankOf(request) && !launch.rank)
    return invalid("the rank of this process is unknown: pass one rank to open, or start it with a launcher that sets "
                   "RANK (torchrun, mpirun, srun)");
  if (!given && launch.size && *launch.size != options.size)
    return invalid("the launch has " + std::to_string(*launch.size) + " processes, expected " +
                   std::to_string(options.size) + ", one for each rank of the plan");
  if (!given && std::getenv("NCCL_COMM_ID"))
    return {};
  if (Status status = openJob(e, request, request.options.store ? "" : "env://", options.deadline); !status.ok())
    return status;
  options.rank = e.job.rendezvous->rank();
  options.rendezvous = e.job.rendezvous.get();
  return {};
}

/// Opens the transport of a GPU.
Status connectDevices(reshard_executor &e, const OpenRequest &request, OpenConnection &connection) {
  const Launch launch = e.traits->processes && !request.options.communicator ? findLaunch() : Launch();
  Result<std::unique_ptr<Device>> device =
      openDevice(e.traits->device, launch.localRank ? static_cast<int>(*launch.localRank) : -1);
  if (!device.ok())
    return device.status();
  std::unique_ptr<Communicator> communicator;
  if (e.traits->processes) {
    CommunicatorOptions options{.rank = rankOf(request).value_or(launch.rank.value_or(0)),
                                .size = e.plan->world(),
                                .device = (*device)->number(),
                                .communicator = request.options.communicator,
                                .rendezvous = nullptr,
                                .deadline = e.deadlineIn(e.joinSeconds)};
    if (!options.communicator && options.size > 1)
      if (Status status = findRankZero(e, request, launch, options); !status.ok())
        return status;
    Result<std::unique_ptr<Communicator>> opened = openCommunicator(e.traits->name, options);
    if (!opened.ok())
      return opened.status();
    communicator = std::move(*opened);
    connection.rank = communicator->rank();
  }
  RecordedOptions options{request.options.no_local_shortcut != 0, [&e] { return e.transforms.prepare(); },
                          [&e] { return e.refresh(); }};
  connection.recorded = makeRecordedTransport(std::move(*device), std::move(communicator), std::move(options));
  return {};
}

/// In pull mode: finds this process's rank in the fleet. Connections are made when they are needed.
Status joinFleet(reshard_executor &e, OpenConnection &connection) {
  Result<pull::Fleet> fleet = pull::Fleet::of(*e.plan);
  if (!fleet.ok())
    return fleet.status();
  connection.rank = e.job.job.rank;
  if (!fleet->isTarget(*connection.rank) && !fleet->sourceMeshRank(*connection.rank))
    return invalid("rank " + std::to_string(*connection.rank) + " is neither a rank of the source nor of a replica");
  connection.fleet = std::move(*fleet);
  return {};
}

/// Connects this process to the others, if the transport has several.
Status connect(reshard_executor &e, const OpenRequest &request, OpenConnection &connection) {
  if (e.traits->recorded())
    return connectDevices(e, request, connection);
  if (!e.traits->processes)
    return {};
  const Deadline deadline = e.deadlineIn(e.joinSeconds);
  if (request.options.rendezvous || request.options.store)
    if (Status status = openJob(e, request, "", deadline); !status.ok())
      return status;
  if (request.options.pull)
    return joinFleet(e, connection);
  Result<std::unique_ptr<Channel>> channel = openChannel(
      e.traits->name, {.seconds = e.joinSeconds, .deadline = deadline, .rendezvous = e.job.rendezvous.get()});
  if (!channel.ok())
    return channel.status();
  connection.channel = std::move(*channel);
  connection.rank = connection.channel->rank();
  return {};
}

/// Tells the processes that wait for this one in open why it will not join, if it has not begun to. Returns the reason.
Status failBeforeJoin(reshard_executor &e, const OpenRequest &request, Status reason) {
  const Deadline deadline = e.deadlineIn(e.joinSeconds);
  // Its result changes nothing: the caller gets the reason. A store that could not be opened tells nobody.
  if (e.job.rendezvous && !e.job.rendezvous->begun())
    reportFailure(*e.job.store, e.job.job, reason, deadline);
  else if (!e.job.rendezvous && !e.plan) [[maybe_unused]]
    const Status informed = reportFailureToJob(request.options, rankOf(request), reason, deadline);
  return reason;
}

/// Loads the segments of distinct ranks. In pull mode, those of a replica have the segments of its ranks in the plan.
Result<std::vector<LocalRank>> loadRanks(const Plan &plan, std::vector<uint32_t> ranks,
                                         const std::optional<pull::Fleet> &fleet = {}) {
  std::vector<LocalRank> locals;
  for (uint32_t rank : ranks) {
    LocalRank &local = locals.emplace_back();
    local.rank = rank;
    if (Status status = plan.segment(fleet ? fleet->planRank(rank) : rank, local.segment); !status.ok())
      return status;
  }
  std::sort(ranks.begin(), ranks.end());
  if (const auto twice = std::adjacent_find(ranks.begin(), ranks.end()); twice != ranks.end())
    return invalid("rank " + std::to_string(*twice) + " is given twice, expected distinct ranks");
  return locals;
}

/// Loads the segments of the ranks of this process: those of the request; else the connection's; else all.
Status openRanks(reshard_executor &e, const OpenRequest &request, const OpenConnection &connection) {
  if (const Channel *channel = connection.channel.get(); channel && channel->size() != e.plan->world())
    return invalid("the channel has " + std::to_string(channel->size()) + " processes, expected " +
                   std::to_string(e.plan->world()) + ", one for each rank of the plan");
  if (request.ranks)
    e.ranks.assign(request.ranks, request.ranks + request.rankCount);
  else if (connection.rank)
    e.ranks = {*connection.rank};
  else
    for (uint32_t rank = 0; rank < e.plan->world(); ++rank)
      e.ranks.push_back(rank);
  Result<std::vector<LocalRank>> locals = loadRanks(*e.plan, e.ranks, connection.fleet);
  if (locals.ok())
    e.locals = std::move(*locals);
  return locals.status();
}

/// All processes open or none does: otherwise some would wait until their deadline for messages of a process whose open
/// failed. `mine`: the result of this process's open. If one fails, all return its kind, or the first of several kinds.
Status openTogether(reshard_executor &e, Channel &channel, const Status &mine) {
  channel.reserve(Bootstrap::kRequests);
  auto bootstrap = std::make_unique<Bootstrap>(channel, 0);
  const int64_t vote = mine.ok() ? INT64_MAX : static_cast<int64_t>(mine.kind()) << 32 | channel.rank();
  const Result<int64_t> first = bootstrap->allReduceMin(vote, e.deadlineIn(e.joinSeconds));
  if (!first.ok()) {
    [[maybe_unused]] Bootstrap *const leaked = bootstrap.release(); // MPI may still write to its members
    return mine.ok() ? first.status() : mine;
  }
  if (*first == INT64_MAX)
    return {};
  return {static_cast<ErrorKind>(*first >> 32),
          mine.ok() ? "rank " + std::to_string(*first & UINT32_MAX) + " could not open the plan; see that rank's error"
                    : mine.message()};
}

/// The transport of pull mode.
std::unique_ptr<Transport> openPull(reshard_executor &e, const pull::Fleet &fleet) {
  e.fleet = fleet;
  pull::PullOptions options{
      .fleet = fleet, .worldRank = e.job.job.rank, .store = e.job.store.get(), .job = e.job.job, .open = [&e] {
        return openMessenger(e.traits->name);
      }};
  auto transport = std::make_unique<pull::PullTransport>(std::move(options));
  e.pull = transport.get();
  return transport;
}

/// Gives each buffer of the local ranks its bound memory. Fails if an instance of a target is not bound.
Status bindBuffers(reshard_executor &e) {
  for (LocalRank &local : e.locals) {
    LocalRank opened; // discards the state of an earlier prepare that failed
    opened.rank = local.rank;
    opened.segment = local.segment;
    local = std::move(opened);
    for (const fbs::BufferRange *range : *local.segment->buffers()) {
      const fbs::Endpoint &endpoint = *e.plan->manifest().endpoints()->Get(range->endpoint());
      Bindable &bound = e.bindable(range->endpoint(), range->mesh_rank(), endpoint.ranks()->Get(range->mesh_rank()));
      local.memory.push_back(bound.pointers.data() + bound.firstInstance[range->param()]);
      const fbs::Param &param = *endpoint.params()->Get(range->param());
      std::byte *const *first = local.memory.back(), *const *end = first + range->count();
      if (range->endpoint() > 0 && fbs::bindable(param) && range->bytes() > 0 && std::find(first, end, nullptr) != end)
        return badBinding(bound.role + " " + fbs::meshRankText(endpoint, endpoint.ranks()->Get(range->mesh_rank())) +
                          " param '" + param.name()->str() + "': not all instances are bound" +
                          unboundText(*e.plan, *range, first));
    }
  }
  return {};
}

/// Allocates the memory of transforms and quantized views.
Status bindConversions(reshard_executor &e) {
  if (Status status = e.transforms.bind(*e.plan, e.locals, *e.transport); !status.ok())
    return status;
  e.viewJobs.clear();
  e.viewJobs.resize(e.locals.size());
  for (size_t l = 0; l < e.locals.size(); ++l)
    if (Status status = e.viewJobs[l].bind(*e.plan, e.locals[l], *e.transport); !status.ok())
      return status;
  return watchOverflows(e.locals, *e.transport);
}

/// Checks that all memory that the local ranks use is bound, and that the transport can access it.
Status checkMemory(const reshard_executor &e) {
  for (const LocalRank &local : e.locals) {
    if (Status status = checkBound(*e.plan, local); !status.ok())
      return status;
    if (Status status = e.transport->reach(*e.plan, local); !status.ok())
      return status;
  }
  return {};
}

/// All that prepare does before it takes part in that of the other processes.
Status prepareHere(reshard_executor &e) {
  if (Status status = checkOverlaps(e.ranges); !status.ok())
    return status;
  if (Status status = bindBuffers(e); !status.ok())
    return status;
  if (Status status = bindConversions(e); !status.ok())
    return status;
  if (Status status = findRefreshes(e); !status.ok())
    return status;
  return checkMemory(e);
}

/// A mesh rank of an endpoint, for texts: "source rank 3".
std::string placeOf(const fbs::Endpoint &endpoint, uint32_t key) {
  return endpoint.role()->str() + " " + fbs::meshRankText(endpoint, key);
}

/// The arguments of reshard_bind.
struct Binding {
  uint32_t endpoint, rank;
  const char *param;
  void *pointer;
  uint64_t bytes;
};

Status bind(reshard_executor &e, const Binding &binding) {
  const auto [endpoint, rank, param, pointer, bytes] = binding;
  if (!e.transport || !param)
    return invalid(e.transport ? "the param name is NULL" : "the plan is not open");
  if (e.prepared)
    return invalid("bind after prepare: bindings are fixed");
  const auto *endpoints = e.plan->manifest().endpoints();
  if (endpoint >= endpoints->size())
    return badBinding("there is no endpoint " + std::to_string(endpoint) + ", the plan has " +
                      std::to_string(endpoints->size()));
  const fbs::Endpoint &at = *endpoints->Get(endpoint);
  const uint32_t planRank = e.fleet && e.fleet->isTarget(rank) ? e.fleet->planRank(rank) : rank;
  const std::optional<uint32_t> number = e.plan->meshRanks().find(endpoint, planRank);
  const std::string where = placeOf(at, rank);
  if (!number)
    return badBinding(where + " is not in the plan");
  Bindable &here = e.bindable(endpoint, *number, planRank);
  const auto found = here.names.find(param);
  if (found == here.names.end())
    if (const std::string transform = transformOf(e.plan->manifest(), at, here.meshRank, param); !transform.empty())
      return badBinding(where + " param '" + param +
                        "' must not be bound: its memory belongs to the "
                        "transform '" +
                        transform + "'");
  if (found == here.names.end())
    return badBinding(where + " has no param '" + param + "'" + nearest(param, here));
  const auto [instance, expected] = found->second;
  if (bytes != expected)
    return badBinding(where + " param '" + param + "': found " + std::to_string(bytes) + " bytes, expected " +
                      std::to_string(expected));
  if (!pointer && bytes > 0)
    return badBinding(where + " param '" + param + "': the pointer is NULL");
  if (here.pointers[instance])
    return badBinding(where + " param '" + param + "' is already bound");
  static std::byte nothing;
  here.pointers[instance] = pointer ? static_cast<std::byte *>(pointer) : &nothing;
  const std::byte *begin = here.pointers[instance];
  e.ranges.push_back({begin, begin + bytes, endpoint > 0, where + " param '" + param + "'"});
  return {};
}

/// The new values of the executor's members of the same names.
struct Replacement {
  std::unique_ptr<Plan> plan;
  std::vector<uint32_t> ranks;
  std::vector<LocalRank> locals;
  Bindables bindables;
  std::vector<BoundRange> ranges;
  std::unique_ptr<Transport> transport;
};

/// Keeps the bound memory of params that both plans have. The i-th rank of this process in the new plan gets the memory
/// of the i-th one in the old plan.
void keepBindings(const reshard_executor &e, Replacement &next) {
  const auto &endpoints = *next.plan->manifest().endpoints();
  for (const auto &[place, before] : e.bindables) {
    const bool files = e.plan->manifest().endpoints()->Get(place.first)->storage();
    uint32_t key = place.second;
    if (!files) {
      const auto rank = std::find(e.ranks.begin(), e.ranks.end(), key) - e.ranks.begin();
      if (static_cast<size_t>(rank) >= std::min(e.ranks.size(), next.ranks.size()))
        continue;
      key = next.ranks[static_cast<size_t>(rank)];
    }
    for (uint32_t endpoint = 0; endpoint < endpoints.size(); ++endpoint)
      if (const fbs::Endpoint &now = *endpoints.Get(endpoint);
          now.role()->str() == before.role && now.storage() == files)
        if (const std::optional<uint32_t> meshRank = next.plan->meshRanks().find(endpoint, key))
          next.bindables.emplace(std::pair(endpoint, key),
                                 keepBound(before, bindableOf(*next.plan, endpoint, *meshRank),
                                           {endpoint > 0, placeOf(now, key)}, next.ranges));
  }
}

/// The ranks of this process in the new plan: those given; else all, or the present one if ranks are processes.
Status replaceRanks(const reshard_executor &e, const uint32_t *ranks, size_t count, Replacement &next) {
  const bool processes = e.traits->processes;
  if (ranks && (count == 0 || (processes && count != 1)))
    return invalid("found " + std::to_string(count) + " ranks, expected " +
                   (processes ? "the rank of this process" : "1 or more; pass NULL for all ranks of the plan"));
  if (ranks)
    next.ranks.assign(ranks, ranks + count);
  else if (processes)
    next.ranks = e.ranks;
  for (uint32_t rank = 0; !ranks && !processes && rank < next.plan->world(); ++rank)
    next.ranks.push_back(rank);
  Result<std::vector<LocalRank>> locals = loadRanks(*next.plan, next.ranks);
  if (locals.ok())
    next.locals = std::move(*locals);
  return locals.status();
}

/// Joins the processes of the new plan with the channel of the old one. If it fails, the channel is as before.
/// `rendezvous`: a URL; null: the store that is open.
Status rejoin(reshard_executor &e, const char *rendezvous, Replacement &next) {
  const Deadline deadline = e.deadlineIn(e.joinSeconds);
  Result<JobConnection> job = connectJob(e.options.get(), rendezvous ? rendezvous : "",
                                         {next.plan->digest(), next.ranks.front(), next.plan->world()}, deadline,
                                         rendezvous ? nullptr : e.job.store);
  if (!job.ok())
    return job.status();
  if (Status status = e.transport->channel()->rejoin(*job->rendezvous, deadline); !status.ok())
    return status;
  std::unique_ptr<Channel> channel = e.transport->takeChannel();
  channel->keepMemory(joined(next.ranges)); // the arena and other memory can be freed now
  e.job = std::move(*job);
  next.transport = makeMessageTransport(std::move(channel), !e.options.get().no_local_shortcut);
  return {};
}

/// Installs a replacement. Cannot fail.
void install(reshard_executor &e, Replacement &next) {
  e.transforms.release();
  e.viewJobs.clear();
  e.refreshes.clear();
  e.transport = std::move(next.transport);
  e.locals = std::move(next.locals);
  e.bindables = std::move(next.bindables);
  e.ranges = std::move(next.ranges);
  e.ranks = std::move(next.ranks);
  e.plan = std::move(next.plan);
  e.digests.reset();
  e.answer = {};
  e.prepared = e.broken = false;
}

} // namespace

Result<uint64_t> reshard::watchCopies(reshard_executor &executor, CopyWatch watch) {
  if (!executor.prepared)
    return invalid("the copies of a run can be watched only after prepare");
  return executor.transport->watch(std::move(watch));
}

Status reshard::copyThroughFiles(reshard_executor &executor, const std::vector<const MappedFile *> &files,
                                 bool synced) {
  if (!executor.prepared)
    return invalid("files can be given only after prepare");
  executor.transport->copyThroughFiles(std::make_unique<const FileCopies>(files, synced));
  return {};
}

Status reshard::runOnce(reshard_executor &e, const Deadline &deadline, const std::function<Status()> &check) {
  e.state = RESHARD_TORN; // until the run is complete
  if (!e.traits->recorded())
    if (Status status = e.transforms.prepare(); !status.ok())
      return status;
  if (Status status = clearOverflows(e.locals, *e.transport); !status.ok())
    return status;
  if (Status status = e.transport->run(deadline); !status.ok())
    return status;
  Status inRange = checkOverflows(*e.plan, e.locals, *e.transport);
  if (check) // all processes take part, also one that has found a value beyond the range
    if (Status status = check(); inRange.ok() && !status.ok())
      return status;
  if (!inRange.ok())
    return inRange;
  if (!e.traits->recorded())
    if (Status status = e.refresh(); !status.ok())
      return status;
  e.state = RESHARD_COMPLETE;
  ++e.version;
  return {};
}

reshard_status reshard_open(const char *path, const uint32_t *ranks, size_t rank_count, const reshard_options *options,
                            reshard_executor **executor) {
  if (!executor)
    return RESHARD_INVALID;
  *executor = new (std::nothrow) reshard_executor;
  if (!*executor)
    return RESHARD_FAILED;
  return guarded(*executor, [&](reshard_executor &e) -> Status {
    OpenRequest request{.path = path, .ranks = ranks, .rankCount = ranks ? rank_count : 0};
    if (options)
      if (Status status = readStruct(options, request.options); !status.ok())
        return status;
    e.joinSeconds = request.options.join_seconds;
    e.interrupt.set(request.options.interrupted, request.options.interrupt_user);
    e.options.keep(request.options);
    const Result<const TransportTraits *> traits = checkRequest(request);
    if (!traits.ok())
      return failBeforeJoin(e, request, traits.status());
    e.traits = *traits;
    Status mine = Plan::open(path, e.plan);
    if (!mine.ok() && !e.traits->launched())
      return failBeforeJoin(e, request, std::move(mine));
    OpenConnection connection;
    if (Status status = connect(e, request, connection); !status.ok())
      return mine.ok() ? failBeforeJoin(e, request, std::move(status)) : mine;
    if (mine.ok())
      mine = openRanks(e, request, connection);
    if (connection.channel)
      mine = openTogether(e, *connection.channel, mine);
    if (!mine.ok())
      return mine;
    if (connection.recorded)
      e.transport = std::move(connection.recorded);
    else if (connection.fleet)
      e.transport = openPull(e, *connection.fleet);
    else
      e.transport = connection.channel
                        ? makeMessageTransport(std::move(connection.channel), !request.options.no_local_shortcut)
                        : makeThreadsTransport(request.options.threads);
    return {};
  });
}

reshard_status reshard_replace(reshard_executor *executor, const char *path, const uint32_t *ranks, size_t rank_count,
                               const char *rendezvous) {
  return guarded(executor, [&](reshard_executor &e) -> Status {
    if (!e.transport || !path)
      return invalid(path ? "the plan is not open" : "the plan path is NULL");
    const TransportTraits &transport = *e.traits;
    if (!transport.replace)
      return invalid("replace is not possible with transport '" + std::string(transport.name) + "' on device '" +
                     transport.device + "', expected " + oneOf(transportNames(&TransportTraits::replace)) + " on " +
                     oneOf(transportDevices(&TransportTraits::replace)) + "; close the executor and open the new plan");
    if (e.options.get().pull)
      return invalid("replace is not possible in pull mode; close the executor and open the new plan");
    if (rendezvous && !transport.rendezvous)
      return invalid(
          "transport '" + std::string(transport.name) + "' has no rendezvous, expected transport " +
          oneOf(transportNames([](const TransportTraits &each) { return each.replace && each.rendezvous; })) +
          " with it");
    Replacement next;
    if (Status status = Plan::open(path, next.plan); !status.ok())
      return status;
    if (Status status = replaceRanks(e, ranks, rank_count, next); !status.ok())
      return status;
    keepBindings(e, next);
    if (!transport.processes)
      next.transport = makeThreadsTransport(e.options.get().threads);
    else if (Status status = rejoin(e, rendezvous, next); !status.ok())
      return status;
    install(e, next);
    return {};
  });
}

reshard_status reshard_bind(reshard_executor *executor, uint32_t endpoint, uint32_t rank, const char *param,
                            void *pointer, uint64_t bytes) {
  return guarded(executor, [&](reshard_executor &e) -> Status {
    Status status = bind(e, {endpoint, rank, param, pointer, bytes});
    if (!e.prepared && !status.ok())
      e.unready = status;
    return status;
  });
}

reshard_status reshard_set_hook(reshard_executor *executor, const char *name, reshard_hook hook, void *user) {
  return guarded(executor, [&](reshard_executor &e) -> Status {
    if (!name || !hook)
      return invalid(name ? "the hook is NULL" : "the name of the hook is NULL");
    if (e.prepared)
      return invalid("set_hook after prepare: hooks are fixed");
    e.hooks[name] = {hook, user};
    return {};
  });
}

reshard_status reshard_set_transform(reshard_executor *executor, const char *name, const reshard_transform *transform) {
  return guarded(executor, [&](reshard_executor &e) -> Status {
    if (!name || !transform)
      return invalid(name ? "the transform is NULL" : "the name of the transform is NULL");
    if (e.prepared)
      return invalid("set_transform after prepare: transforms are fixed");
    reshard_transform own = RESHARD_TRANSFORM_INITIALIZER;
    if (Status status = readStruct(transform, own); !status.ok())
      return status;
    e.transforms.set(name, own);
    return {};
  });
}

reshard_status reshard_prepare(reshard_executor *executor) {
  return guarded(executor, [&](reshard_executor &e) -> Status {
    if (!e.transport || e.prepared || e.broken)
      return invalid(e.prepared ? "the executor is already prepared"
                     : e.broken ? "an earlier prepare failed part way; open a new executor"
                                : "the plan is not open");
    e.unready = prepareHere(e); // the caller may mend it, and call again
    if (!e.unready.ok())
      return e.unready;
    e.broken = true;
    if (Status status = e.transport->prepare(*e.plan, e.locals, e.deadlineIn(e.joinSeconds)); !status.ok())
      return status;
    e.broken = false;
    e.prepared = true;
    return {};
  });
}

reshard_status reshard_run(reshard_executor *executor, double timeout_seconds, const reshard_check *check) {
  return guarded(executor, [&](reshard_executor &e) -> Status {
    if (check)
      return checkedRun(e, *check, e.deadlineIn(timeout_seconds));
    if (!e.prepared)
      return invalid("run before prepare");
    if (e.pull)
      return e.pull->run({});
    return runOnce(e, e.deadlineIn(timeout_seconds));
  });
}

reshard_status reshard_enqueue(reshard_executor *executor, void *stream) {
  return guarded(executor, [&](reshard_executor &e) -> Status {
    return e.prepared ? e.transport->enqueue(stream) : invalid("enqueue before prepare");
  });
}

reshard_status reshard_all_reduce_min(reshard_executor *executor, int64_t value, int64_t *result) {
  return guarded(executor, [&](reshard_executor &e) -> Status {
    if (!e.transport || !result)
      return invalid(e.transport ? "`result` is NULL" : "the plan is not open");
    const Result<int64_t> minimum = e.transport->allReduceMin(value, e.deadlineIn(e.joinSeconds));
    if (minimum.ok())
      *result = *minimum;
    return minimum.status();
  });
}

namespace {

/// Whether the caller has an executor that this process can use.
bool usable(const reshard_executor *executor) { return executor && executor->here(); }

} // namespace

const uint32_t *reshard_ranks(const reshard_executor *executor, size_t *count) {
  if (count)
    *count = usable(executor) ? executor->ranks.size() : 0;
  return usable(executor) ? executor->ranks.data() : nullptr;
}

const char *reshard_opened_digest(const reshard_executor *executor) {
  return usable(executor) && executor->plan ? executor->plan->digest().c_str() : "";
}

reshard_state reshard_target_state(const reshard_executor *executor) {
  return usable(executor) ? executor->state : RESHARD_EMPTY;
}
uint64_t reshard_version(const reshard_executor *executor) { return usable(executor) ? executor->version : 0; }
uint64_t reshard_pulls(const reshard_executor *executor) { return usable(executor) ? executor->pulls : 0; }
void *reshard_stream(const reshard_executor *executor) {
  return usable(executor) && executor->transport ? executor->transport->stream() : nullptr;
}
const char *reshard_error(const reshard_executor *executor) {
  return executor ? executor->error.c_str() : "no executor";
}
uint64_t reshard_bytes(const reshard_executor *executor) {
  return usable(executor) && executor->transport ? executor->transport->bytes() : 0;
}
uint64_t reshard_bytes_by(const reshard_executor *executor, reshard_method method) {
  const reshard::BytesBy by =
      usable(executor) && executor->transport ? executor->transport->bytesBy() : reshard::BytesBy();
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
void reshard_close(reshard_executor *executor) {
  // A forked process leaves its copy alone: it has no threads to join, and the connections are the other process's.
  if (!usable(executor))
    return;
  if (executor->busy) {
    executor->closedInside = true; // the call in progress fails
    return;
  }
  if (executor && !executor->unready.ok()) [[maybe_unused]]
    const reshard_status status = reshard_fail(executor, executor->unready.message().c_str());
  executor->interrupt.begin();
  delete executor;
}

reshard_status reshard_check_options(const reshard_options *options, char *error, size_t capacity) {
  try {
    reshard_options own = RESHARD_OPTIONS_INITIALIZER;
    Status status = options ? readStruct(options, own) : Status();
    if (status.ok())
      status = checkOptions(own).status();
    if (status.ok())
      status = checkRendezvous(own, deadlineIn(own.join_seconds));
    if (error && capacity > 0)
      error[status.message().copy(error, capacity - 1)] = '\0';
    return statusOf(status);
  } catch (const std::exception &) {
    return RESHARD_FAILED; // out of memory
  }
}

const char *reshard_transport(const char *device, size_t index) {
  for (const TransportTraits &each : transports())
    if (each.processes && each.device == std::string_view(device ? device : transports().front().device) &&
        index-- == 0)
      return each.name;
  return nullptr;
}

reshard_status reshard_fail_open(const uint32_t *rank, const reshard_options *options, const char *reason) {
  reshard_options own = RESHARD_OPTIONS_INITIALIZER;
  if (!options || !reason || !*reason || !readStruct(options, own).ok())
    return RESHARD_INVALID;
  try {
    Interrupt interrupt(own.interrupted, own.interrupt_user);
    interrupt.begin();
    return statusOf(reportFailureToJob(own, rank ? std::optional(*rank) : std::nullopt, failed(reason),
                                       deadlineIn(own.join_seconds, &interrupt)));
  } catch (const std::exception &) {
    return RESHARD_FAILED; // out of memory
  }
}

reshard_status reshard_fail(reshard_executor *executor, const char *reason) {
  return guarded(executor, [&](reshard_executor &e) -> Status {
    if (!reason || !*reason)
      return invalid(reason ? "the reason is empty" : "the reason is NULL");
    const Status failure = failed(reason); // it may be that of `unready`
    e.unready = {};
    if (e.prepared || e.broken || !e.transport || !e.transport->channel())
      return {}; // no process waits for this one in prepare
    e.broken = true;
    e.transport->channel()->abandon(failure);
    return {};
  });
}
