// SPDX-License-Identifier: Apache-2.0
// Checks the invariants between passes, exactly where that is cheap: references, bounds, sums, both ends of a message.
// It does not check that each byte comes from the right byte: verify/proof/plan_verifier.cpp proves that of the
// emitted plan, and shares no code with this file.

#include "ir/copies.h"
#include "ir/text.h"
#include "schema/step_rules.h"

#include "llvm/ADT/STLFunctionalExtras.h"
#include "llvm/Support/raw_ostream.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>

namespace reshard::ir {

namespace {

class Verifier {
public:
  explicit Verifier(const Module &module) : module_(module), layout_(module.layout) {}

  llvm::Error run() {
    layout();
    if (error_.empty()) {
      copies_.emplace(layout_);
      require(!layout_.foldsCopies || copies_->targets() > 1, "the layout folds copies, but it has only one");
    }
    if (error_.empty() && module_.level >= Level::transfer)
      transfers();
    if (error_.empty() && module_.level >= Level::schedule)
      schedule();
    return error_.empty() ? llvm::Error::success() : llvm::createStringError(error_);
  }

private:
  /// Names what is checked. It is called only for an error.
  using Where = llvm::function_ref<std::string()>;

  /// Keeps the first error, whose text is `parts`, one after the other; returns `holds`.
  template <class... Parts> bool require(bool holds, const Parts &...parts) {
    if (!holds && error_.empty()) {
      llvm::raw_string_ostream out(error_);
      (add(out, parts), ...);
    }
    return holds;
  }
  template <class Part> static void add(llvm::raw_ostream &out, const Part &part) {
    if constexpr (std::is_invocable_v<const Part &>)
      out << part();
    else
      out << part;
  }

  // ------------------------------------------------------------------------------------------------------------ layout

  void layout() {
    if (!require(layout_.endpoints.size() >= 2, "found ", layout_.endpoints.size(),
                 " endpoints, expected a source and at least one target") ||
        !require(layout_.world > 0, "the world has ", layout_.world, " ranks, expected at least 1"))
      return;
    const Topology &t = layout_.topology;
    require(t.ranksPerNode >= 0 && t.nicsPerNode >= 0 && t.linkRate > 0 && t.nicRate > 0 && t.copyRate > 0 &&
                t.linkLatency >= 0 && t.nicLatency >= 0,
            "the topology has a rate that is not positive, or a negative latency or count");
    for (const TensorPattern &pattern : layout_.tensorPatterns) {
      require(pattern.variables.size() == pattern.exists.size(), "tensor '", pattern.name, "' has ",
              pattern.exists.size(), " lists of existing values, expected one for each of its ",
              pattern.variables.size(), " index variables");
      for (size_t v = 0; error_.empty() && v < pattern.variables.size(); ++v)
        if (require(pattern.variables[v] < layout_.variables.size(), "tensor '", pattern.name,
                    "' refers to index variable ", pattern.variables[v], ", expected fewer than ",
                    layout_.variables.size()))
          indexMap(pattern.exists[v], layout_.variables[pattern.variables[v]].size,
                   [&] { return "tensor '" + pattern.name + "'"; });
      for (int64_t length : pattern.shape)
        require(length >= 0, "tensor '", pattern.name, "' has the negative length ", length);
    }
    for (const Endpoint &each : layout_.endpoints) {
      endpoint(each);
      if (error_.empty() && each.replicas != 0)
        pool(each);
    }
  }

  /// A pool is the only target; its ranks are consecutive, above those of the source, and the last of the world.
  void pool(const Endpoint &target) {
    const Endpoint &source = layout_.endpoints[0];
    require(target.replicas > 0 && layout_.endpoints.size() == 2 && &target != &source && !target.storage &&
                !source.storage && !target.ranks.empty() && target.epochs.empty() && target.relabeled == 0,
            target.role, " has ", target.replicas,
            " engine replicas, expected a positive number in the only target, with source and target on ranks");
    int32_t highest = -1;
    for (int32_t rank : source.ranks)
      highest = std::max(highest, rank);
    const int64_t first = layout_.world - target.meshRanks();
    for (int64_t meshRank = 0; error_.empty() && meshRank < target.meshRanks(); ++meshRank)
      require(target.ranks[meshRank] == first + meshRank && first > highest, target.role,
              " has engine replicas and rank ", target.ranks[meshRank],
              ", expected the last ranks of the world, in order, above those of the source");
  }

  /// Index blocks are sorted, and disjoint and within [0, limit) on the `from` side.
  void indexMap(const IndexMap &list, int64_t limit, Where where) {
    for (const IndexBlock &s : list)
      require(s.length > 0 && s.count > 0 && s.from >= 0 && s.to >= 0 &&
                  (s.count == 1 ? s.fromStep == 0 && s.toStep == 0
                                : s.fromStep >= s.length && std::abs(s.toStep) >= s.length) &&
                  s.count <= limit && s.length <= limit && s.from + (s.count - 1) * s.fromStep + s.length <= limit &&
                  s.to + (s.count - 1) * s.toStep >= 0, // toStep is negative in an explicit map that reverses an order
              where, " has an empty or overlapping index block, or one outside 0:", limit);
    if (error_.empty() && list.size() > 1)
      require(std::is_sorted(list.begin(), list.end(),
                             [](const IndexBlock &a, const IndexBlock &b) { return a.from < b.from; }),
              where, " has index blocks that are not sorted by position");
  }

  int64_t coordinates(const Endpoint &endpoint, const std::vector<unsigned> &axes) {
    int64_t count = 1;
    for (unsigned axis : axes)
      if (!require(axis < endpoint.axes.size() && endpoint.axes[axis].size > 0 &&
                       !__builtin_mul_overflow(count, endpoint.axes[axis].size, &count),
                   endpoint.role, " refers to axis ", axis, ", expected fewer than ", endpoint.axes.size(),
                   ", all of positive size"))
        return 0;
    return count;
  }

  void endpoint(const Endpoint &endpoint) {
    const auto where = [&] { return endpoint.role; };
    for (const Axis &axis : endpoint.axes)
      require(axis.size > 0 && axis.stride > 0, endpoint.role, " axis '", axis.name, "' has size ", axis.size,
              " and stride ", axis.stride, ", expected at least 1 of both");
    const bool source = &endpoint == layout_.endpoints.data(),
               chunks = source ? storesChunks(endpoint.format) : writesChunks(endpoint.format);
    require(!storesChunks(endpoint.format) || endpoint.checkpoint, endpoint.role, " has the storage format '",
            name(endpoint.format), "', expected it in a checkpoint");
    require(!endpoint.checkpoint || (endpoint.storage && (endpoint.meshRanks() == 1 || chunks)), endpoint.role,
            " is a checkpoint with ", endpoint.meshRanks(), " mesh ranks", (endpoint.storage ? "" : ", not in storage"),
            ", expected one, in storage");
    for (int32_t rank : endpoint.ranks)
      require(rank >= 0 && (endpoint.storage || rank < layout_.world), endpoint.role, " has rank ", rank,
              ", which is outside the world of ", layout_.world, " ranks");
    for (const Sharding &sharding : endpoint.shardings) {
      require(sharding.unit > 0, endpoint.role, " has a sharding in units of ", sharding.unit,
              " positions, expected at least 1");
      const int64_t expected = coordinates(endpoint, sharding.axes);
      require(expected == static_cast<int64_t>(sharding.at.size()), endpoint.role, " has a sharding with ",
              sharding.at.size(), " index maps, expected one for each of ", expected, " coordinates");
      for (const IndexMap &at : sharding.at)
        indexMap(at, INT64_MAX / 4, where);
    }
    require(endpoint.placement.size() == layout_.variables.size(), endpoint.role, " has the placement of ",
            endpoint.placement.size(), " index variables, expected ", layout_.variables.size());
    for (unsigned sharding : endpoint.placement)
      hasSharding(endpoint, sharding, where);
    require(endpoint.epochs.empty() || endpoint.epochs.size() == endpoint.ranks.size(), endpoint.role,
            " has epochs of ", endpoint.epochs.size(), " mesh ranks, expected ", endpoint.ranks.size());
    for (const Presence &rule : endpoint.authority)
      hasAxis(endpoint, rule.axis, where);
    for (const Param &each : endpoint.params)
      if (error_.empty())
        param(endpoint, each);
  }

  bool hasSharding(const Endpoint &endpoint, unsigned sharding, Where where) {
    return require(sharding < endpoint.shardings.size(), where, " refers to sharding ", sharding,
                   ", expected fewer than ", endpoint.shardings.size());
  }

  bool hasAxis(const Endpoint &endpoint, unsigned axis, Where where) {
    return require(axis < endpoint.axes.size(), where, " refers to axis ", axis, ", expected fewer than ",
                   endpoint.axes.size());
  }

  void param(const Endpoint &endpoint, const Param &param) {
    const auto where = [&] { return endpoint.role + " param '" + param.name + "'"; };
    require(param.variables.size() == param.instances.size(), where, " numbers its instances by ",
            param.instances.size(), " shardings, expected one for each of its ", param.variables.size(),
            " name variables");
    for (size_t v = 0; v < param.variables.size() && error_.empty(); ++v)
      if (require(param.variables[v] < layout_.variables.size(), where, " refers to index variable ",
                  param.variables[v], ", expected fewer than ", layout_.variables.size()))
        hasSharding(endpoint, param.instances[v], where);
    for (const Presence &rule : param.presence)
      hasAxis(endpoint, rule.axis, where);
    for (const Extent &extent : param.shape) {
      const int64_t expected = coordinates(endpoint, extent.axes);
      require(expected == static_cast<int64_t>(extent.at.size()), where, " has a dimension with ", extent.at.size(),
              " lengths, expected one for each of ", expected, " coordinates");
    }
    if (param.view) {
      require(param.view->staged || param.view->kind <= ViewKind::codes, where, " is a view of kind ",
              name(param.view->kind), " that is not staged; only elements and codes ", "need no memory in the arena");
      for (unsigned number : {param.view->codes, param.view->scales, param.view->tensorScale})
        require(number < endpoint.params.size(), where, " is a view of param ", number, ", expected fewer than ",
                endpoint.params.size());
    }
    require(param.overflow == OverflowRule::error || param.storageDtype, where,
            " has an overflow rule, but no storage dtype");
    require(!param.derived || param.parts.empty(), where,
            " is derived (written through a quantized view only), but has parts");
    require(param.transform.empty() || !(endpoint.storage || param.storageDtype || param.view || param.derived), where,
            " has a transform, which a param in storage, with a storage dtype, with a view, or derived cannot "
            "have");
    for (const Part &part : param.parts) {
      if (!require(part.pattern < static_cast<int>(layout_.tensorPatterns.size()), where, " holds tensor ",
                   part.pattern, ", expected fewer than ", layout_.tensorPatterns.size()))
        return;
      const size_t rank =
          part.pattern < 0 ? param.variables.size() + param.shape.size() : layout_.tensorPatterns[part.pattern].rank();
      if (!require(part.dimensions.size() == rank, where, " has a part with ", part.dimensions.size(),
                   " dimensions, expected ", rank))
        return;
      if (part.pattern >= 0)
        require(layout_.tensorPatterns[part.pattern].dtype == param.dtype, where, " has dtype ", name(param.dtype),
                ", its tensor ", name(layout_.tensorPatterns[part.pattern].dtype));
      for (size_t d = 0; d < rank && error_.empty(); ++d) {
        const PartDimension &dimension = part.dimensions[d];
        if (!hasSharding(endpoint, dimension.sharding, where) ||
            !require(dimension.param < static_cast<int>(param.shape.size()), where, " refers to dimension ",
                     dimension.param, ", expected fewer than ", param.shape.size()))
          return;
        if (dimension.param >= 0)
          within(endpoint.shardings[dimension.sharding], param.shape[dimension.param], where);
      }
    }
  }

  /// A sharding's local positions lie within the param's extent. Not checked if the two depend on different axes.
  void within(const Sharding &sharding, const Extent &extent, Where where) {
    if (sharding.axes != extent.axes && !extent.axes.empty() && !sharding.axes.empty())
      return;
    for (size_t c = 0; c < sharding.at.size(); ++c)
      for (const IndexBlock &s : sharding.at[c]) {
        const int64_t reach = s.to + std::max<int64_t>(0, (s.count - 1) * s.toStep) + s.length;
        const int64_t limit = extent.axes.empty()     ? extent.at[0]
                              : sharding.axes.empty() ? *std::max_element(extent.at.begin(), extent.at.end())
                                                      : extent.at[c];
        require(reach <= limit, where, " holds position ", reach - 1, " of a dimension of length ", limit);
      }
  }

  // ---------------------------------------------------------------------------------------------------------- transfer

  /// Bytes of the parts of a param. A view of kind `amax` has also positions without a part: a matrix has no amax of a
  /// tensor that it does not contain.
  static int64_t partBytes(const Endpoint &endpoint, const Param &param, int64_t meshRank) {
    int64_t bytes = 0;
    for (const Part &part : param.parts) {
      int64_t positions = itemBytes(param.dtype);
      for (const PartDimension &dimension : part.dimensions) {
        const Sharding &sharding = endpoint.shardings[dimension.sharding];
        positions *= positionCount(sharding.at[coordinate(endpoint, sharding.axes, meshRank)]);
      }
      bytes += positions;
    }
    return bytes;
  }

  int64_t meshRankBytes(unsigned e, int64_t meshRank) {
    const Endpoint &endpoint = layout_.endpoints[e];
    int64_t bytes = 0;
    for (const Param &param : endpoint.params)
      if (const int64_t count = param.derived ? 0 : instances(endpoint, param, meshRank))
        bytes += param.view && param.view->kind == ViewKind::amax ? partBytes(endpoint, param, meshRank)
                                                                  : count * localBytes(endpoint, param, meshRank);
    return bytes;
  }

  /// Bytes by target endpoint and mesh rank.
  using Received = std::map<std::pair<unsigned, int32_t>, int64_t>;

  void transfers() {
    const Transfers &t = module_.transfers;
    Received overlapped, chosen, moved;
    for (size_t n = 0; n < t.overlaps.size() && error_.empty(); ++n)
      overlap(n, overlapped);
    if (!error_.empty())
      return;
    bool unassigned = false;
    for (const Transfer &transfer : t.transfers) {
      if (!this->transfer(transfer, chosen))
        return;
      unassigned = unassigned || transfer.source == Transfer::kUnassigned;
    }
    require(!unassigned || t.descriptors.empty(), "descriptors exist although some transfers have no source yet");
    for (const Descriptor &descriptor : t.descriptors)
      if (!this->descriptor(descriptor, moved))
        return;
    // The bytes that a target mesh rank receives must be as many as it holds: fewer leave a gap, more write twice.
    complete(overlapped, "overlaps");
    if (!t.transfers.empty())
      complete(chosen, "transfers");
    if (!t.descriptors.empty())
      complete(moved, "descriptors");
  }

  void overlap(size_t number, Received &received) {
    const Overlap &overlap = module_.transfers.overlaps[number];
    const auto where = [&] { return "overlap " + std::to_string(number); };
    require(overlap.endpoint > 0 && !overlap.replicaGroups.empty() && !overlap.targets.empty(), where,
            " has no replica group, no target mesh rank, or the source as its target");
    require(std::is_sorted(overlap.targets.begin(), overlap.targets.end()), where,
            " has target mesh ranks that are not in ascending order");
    if (!error_.empty())
      return;
    hasMeshRanks(overlap.targets, overlap.endpoint, where);
    for (const ReplicaGroup &group : overlap.replicaGroups)
      replicaGroup(overlap, group, where);
    for (int32_t target : overlap.targets)
      received[{overlap.endpoint, target}] += overlap.tensors * overlap.bytes;
  }

  /// `meshRanks`: not empty, ascending.
  void hasMeshRanks(const MeshRanks &meshRanks, unsigned endpoint, Where where) {
    const Endpoint &of = layout_.endpoints[endpoint];
    require(meshRanks.front() >= 0 && meshRanks.back() < of.meshRanks(), where, " refers to mesh ranks ",
            meshRanks.front(), " to ", meshRanks.back(), " of ", of.role, ", which has ", of.meshRanks());
    for (int32_t meshRank : meshRanks)
      if (copies_->of(endpoint).first(meshRank) != meshRank)
        require(false, where, " refers to mesh rank ", meshRank, " of ", of.role, ", which is not in the first copy");
  }

  void replicaGroup(const Overlap &overlap, const ReplicaGroup &group, Where where) {
    const Transfers &t = module_.transfers;
    const Param &param = layout_.endpoints[overlap.endpoint].params[overlap.param];
    require(!group.meshRanks.empty() && std::is_sorted(group.meshRanks.begin(), group.meshRanks.end()), where,
            " has a replica group that is empty or not in ascending order");
    if (overlap.pattern >= 0 && error_.empty())
      hasMeshRanks(group.meshRanks, 0, where);
    require(group.relations.size() == param.parts[overlap.part].dimensions.size(), where, " has ",
            group.relations.size(), " relations, expected one for each of the ",
            param.parts[overlap.part].dimensions.size(), " dimensions of its target part");
    const size_t variables =
        overlap.pattern < 0 ? param.variables.size() : layout_.tensorPatterns[overlap.pattern].variables.size();
    int64_t tensors = 1, bytes = itemBytes(param.dtype);
    for (size_t d = 0; d < group.relations.size() && error_.empty(); ++d)
      if (require(group.relations[d] < t.relations.size(), where, " refers to relation ", group.relations[d],
                  ", expected fewer than ", t.relations.size()))
        (d < variables ? tensors : bytes) *= positionCount(t.relations[group.relations[d]]);
    require(tensors == overlap.tensors && bytes == overlap.bytes, where, " has ", overlap.tensors, " x ", overlap.bytes,
            " bytes, but its relations give ", tensors, " x ", bytes, " bytes");
  }

  /// Returns false if an index of the transfer is out of range.
  bool transfer(const Transfer &transfer, Received &received) {
    const Transfers &t = module_.transfers;
    const Overlap &overlap = t.overlaps[transfer.overlap];
    const auto where = [&] {
      return "transfer of overlap " + std::to_string(transfer.overlap) + " to mesh rank " +
             std::to_string(transfer.target);
    };
    if (!require(transfer.replicaGroup < overlap.replicaGroups.size(), where, " refers to replica group ",
                 transfer.replicaGroup, ", expected fewer than ", overlap.replicaGroups.size()) ||
        !require(transfer.first + transfer.count <= overlap.tensors, where, " ends at tensor ",
                 transfer.first + transfer.count, ", but the overlap has ", overlap.tensors) ||
        !require(transfer.route < static_cast<int32_t>(t.routes.size()), where, " refers to route ", transfer.route,
                 ", expected fewer than ", t.routes.size()) ||
        !cut(transfer, where))
      return false;
    const MeshRanks &meshRanks = overlap.replicaGroups[transfer.replicaGroup].meshRanks;
    if (!require(transfer.source == Transfer::kUnassigned ||
                     std::binary_search(meshRanks.begin(), meshRanks.end(), transfer.source),
                 where, " comes from mesh rank ", transfer.source, ", which does not hold it") ||
        !require(std::binary_search(overlap.targets.begin(), overlap.targets.end(), transfer.target), where,
                 " arrives at mesh rank ", transfer.target, ", which does not need it"))
      return false;
    for (int32_t meshRank : receivers(transfer, where)) {
      require(std::binary_search(overlap.targets.begin(), overlap.targets.end(), meshRank), where,
              " arrives at mesh rank ", meshRank, ", which does not need it");
      received[{overlap.endpoint, meshRank}] += bytes(t, transfer);
    }
    return true;
  }

  /// The target mesh ranks at which a transfer arrives, in the order of its route.
  std::vector<int32_t> receivers(const Transfer &transfer, Where where) {
    std::vector<int32_t> receivers = {transfer.target};
    if (transfer.route < 0)
      return receivers;
    const Overlap &overlap = module_.transfers.overlaps[transfer.overlap];
    const Endpoint &source = layout_.endpoints[0], &target = layout_.endpoints[overlap.endpoint];
    require(
        overlap.pattern >= 0 && !target.storage &&
            (source.storage || transfer.source < 0 || source.ranks[transfer.source] != target.ranks[transfer.target]),
        where, " has a route, which padding, a local copy and a transfer to files cannot have");
    for (const Hop &hop : module_.transfers.routes[transfer.route]) {
      require(std::find(receivers.begin(), receivers.end(), hop.from) != receivers.end(), where,
              " is forwarded by mesh rank ", hop.from, " before it arrives there");
      require(std::find(receivers.begin(), receivers.end(), hop.to) == receivers.end(), where, " arrives at mesh rank ",
              hop.to, " twice");
      receivers.push_back(hop.to);
    }
    return receivers;
  }

  /// Returns false if the descriptor's shape does not exist.
  bool descriptor(const Descriptor &descriptor, Received &received) {
    const Transfers &t = module_.transfers;
    if (!require(descriptor.shape < t.shapes.size(), "a descriptor refers to shape ", descriptor.shape,
                 ", expected fewer than ", t.shapes.size()))
      return false;
    int64_t bytes = t.shapes[descriptor.shape].rowBytes;
    for (const Loop &loop : t.shapes[descriptor.shape].loops)
      bytes *= loop.count;
    received[{descriptor.endpoint, descriptor.target}] += bytes;
    if (descriptor.route >= 0)
      for (const Hop &hop : t.routes[descriptor.route])
        received[{descriptor.endpoint, hop.to}] += bytes;
    return true;
  }

  /// Each target mesh rank receives as many bytes as it holds.
  void complete(const Received &received, const char *from) {
    for (unsigned e = 1; e < layout_.endpoints.size(); ++e)
      for (int64_t meshRank = 0; meshRank < layout_.endpoints[e].meshRanks() && error_.empty(); ++meshRank) {
        const int64_t wanted = meshRankBytes(e, meshRank);
        const auto at = received.find({e, copies_->of(e).first(static_cast<int32_t>(meshRank))});
        const int64_t bytes = at == received.end() ? 0 : at->second;
        require(bytes == wanted, layout_.endpoints[e].role, " mesh rank ", meshRank, " holds ", wanted,
                " bytes, but the ", from, " give it ", bytes);
      }
  }

  /// A cut transfer moves one tensor, and its positions are target positions of the overlap.
  bool cut(const Transfer &transfer, Where where) {
    if (!transfer.cut())
      return true;
    const Overlap &overlap = module_.transfers.overlaps[transfer.overlap];
    const size_t variables = overlap.pattern < 0 ? 0 : layout_.tensorPatterns[overlap.pattern].variables.size();
    if (!require(transfer.count == 1 && transfer.dimension >= variables &&
                     transfer.dimension < overlap.replicaGroups[0].relations.size(),
                 where, " is cut, expected one tensor and one of its dimensions, found ", transfer.count,
                 " tensors and dimension ", transfer.dimension))
      return false;
    const IndexMap local = inverse(module_.transfers.relations[overlap.replicaGroups[0].relations[transfer.dimension]]);
    const IndexMap within = {{transfer.begin, transfer.begin, transfer.end - transfer.begin, 1, 0, 0}};
    return require(positionCount(restrict(local, within)) == transfer.end - transfer.begin, where,
                   " covers local positions ", transfer.begin, ":", transfer.end, ", which are not all in the overlap");
  }

  // ---------------------------------------------------------------------------------------------------------- schedule

  struct MessageStep {
    const RankSchedule *rank = nullptr;
    const Step *step = nullptr;
  };

  bool sameShape(const RankSchedule &a, const Operand &x, const RankSchedule &b, const Operand &y) {
    const OperandShape &s = a.shapes[x.shape], &t = b.shapes[y.shape];
    return s.rowBytes == t.rowBytes &&
           std::equal(s.loops.begin(), s.loops.end(), t.loops.begin(), t.loops.end(),
                      [](const OperandLoop &p, const OperandLoop &q) { return p.count == q.count; });
  }

  void schedule() {
    const Schedule &s = module_.schedule;
    if (!require(static_cast<int64_t>(s.ranks.size()) == layout_.world, "the schedule has ", s.ranks.size(),
                 " ranks, but the world has ", layout_.world))
      return;
    const std::vector<std::vector<BufferRange>> all = buffers(layout_);
    for (const RankSchedule &rank : s.ranks) {
      const auto rankName = [&] { return "rank " + std::to_string(rank.rank); };
      require(rank.rank >= 0 && rank.rank < layout_.world && rank.buffers == all[rank.rank], rankName,
              " has buffers that differ from those of its layouts");
      require(layout_.stagingLimit == 0 || rank.arenaBytes <= layout_.stagingLimit, rankName, " has an arena of ",
              rank.arenaBytes, " bytes, the staging limit is ", layout_.stagingLimit);
      if (!steps(rank, rankName))
        return;
    }
    messages();
  }

  /// The steps of a rank; collects its sends and receives. Returns false if an operand is wrong.
  bool steps(const RankSchedule &rank, Where rankName) {
    uint32_t round = 0;
    schema::ArenaUse arena;
    for (uint32_t n = 0; n < rank.steps.size() && error_.empty(); ++n) {
      const Step &step = rank.steps[n];
      const auto where = [&] { return rankName() + " step " + std::to_string(n); };
      require(step.round >= round && step.round < module_.schedule.rounds, where, " is in round ", step.round,
              ", expected ", round, " to ", int64_t{module_.schedule.rounds} - 1);
      round = step.round;
      for (uint32_t before : step.after)
        if (require(before < n, where, " waits for step ", before, ", which is not an earlier one") &&
            schema::raisesLevel(rank.steps[before].kind, step.kind))
          require(step.level > rank.steps[before].level, where, " has dependency level ", step.level,
                  ", expected more than the ", rank.steps[before].level, " of step ", before, ", for which it waits");
      if (!operands(rank, step, where))
        return false;
      const bool message = step.kind == StepKind::send || step.kind == StepKind::recv;
      require(message == (step.peer >= 0) && step.peer < layout_.world && step.peer != rank.rank, where, " has peer ",
              step.peer, ", expected another rank of the world for a send or recv, and -1 for other kinds");
      require(step.kind != StepKind::recv || !layout_.pool() || rank.rank >= layout_.endpoints.back().ranks.front(),
              where, " receives, expected none on a rank below those of the engine replicas, which pull");
      staging(rank, step, where);
      if (step.staging >= 0)
        arena.take(step.staging, step.staging + step.stagingBytes(), n, [&](uint32_t before) {
          require(std::find(step.after.begin(), step.after.end(), before) != step.after.end(), where,
                  " reuses bytes of the arena after step ", before, ", but does not wait for it");
        });
      if (step.kind == StepKind::copy)
        copy(rank, step, where);
      if (message && !(step.kind == StepKind::send ? sends_ : receives_)
                          .try_emplace(step.message, MessageStep{&rank, &step})
                          .second)
        require(false, where, " is a second ", name(step.kind), " of message ", step.message);
    }
    return true;
  }

  /// The operands of a step are in their buffers and have as many bytes as the step. Returns false if they are not in
  /// their buffers.
  bool operands(const RankSchedule &rank, const Step &step, Where where) {
    int64_t in = 0, out = 0;
    for (const Operand &operand : step.inputs)
      in += operandBytes(rank, operand, false, step.kind, where);
    for (const Operand &operand : step.outputs)
      out += operandBytes(rank, operand, true, step.kind, where);
    if (!error_.empty())
      return false;
    require((step.kind == StepKind::fill || step.kind == StepKind::recv || in == step.bytes) &&
                (step.kind == StepKind::send || step.kind == StepKind::reduce || out == step.bytes),
            where, " has ", step.bytes, " bytes, but its operands have ", std::max(in, out));
    return true;
  }

  /// The chunks of a message, and the bytes of the arena that a step uses.
  void staging(const RankSchedule &rank, const Step &step, Where where) {
    const bool message = step.kind == StepKind::send || step.kind == StepKind::recv;
    require(step.chunk >= 0 && step.chunk % 256 == 0 && (step.chunk == 0 || (message && step.chunk < step.bytes)) &&
                step.slot <= (step.chunk > 0 && step.staging >= 0),
            where, " has chunks of ", step.chunk, " bytes in slot ", int{step.slot},
            "; expected 0 (one chunk), or for a message a multiple of 256 smaller than the message; slot 1 ",
            "only with staging and several chunks");
    require(step.staging < 0 || step.stagingBytes() <= rank.arenaBytes - step.staging, where, " uses staging ",
            step.staging, " + ", step.stagingBytes(), " bytes, outside the arena of ", rank.arenaBytes);
  }

  void copy(const RankSchedule &rank, const Step &step, Where where) {
    if (require(step.inputs.size() == step.outputs.size(), where, " copies ", step.inputs.size(), " inputs to ",
                step.outputs.size(), " outputs"))
      for (size_t i = 0; i < step.inputs.size(); ++i)
        require(sameShape(rank, step.inputs[i], rank, step.outputs[i]), where, " copies operand ", i,
                " between different shapes");
  }

  /// Each message has one send and one receive, which agree.
  void messages() {
    const Schedule &s = module_.schedule;
    require(sends_.size() == s.messages && receives_.size() == s.messages, "the schedule has ", s.messages,
            " messages, but ", sends_.size(), " sends and ", receives_.size(), " receives");
    for (const auto &[message, send] : sends_) {
      const auto at = receives_.find(message);
      const auto where = [message = message] { return "message " + std::to_string(message); };
      if (!require(at != receives_.end(), where, " has no receive"))
        return;
      const MessageStep &receive = at->second;
      require(send.step->peer == receive.rank->rank && receive.step->peer == send.rank->rank &&
                  send.step->round == receive.step->round && send.step->bytes == receive.step->bytes &&
                  send.step->chunk == receive.step->chunk && send.step->level == receive.step->level &&
                  send.step->inputs.size() == receive.step->outputs.size(),
              where,
              " has a send and a receive that disagree in peer, round, level, bytes, chunk or number of operands");
      for (size_t i = 0; i < send.step->inputs.size() && error_.empty(); ++i)
        require(sameShape(*send.rank, send.step->inputs[i], *receive.rank, receive.step->outputs[i]), where,
                " has a send and a receive with different shapes of operand ", i);
    }
  }

  /// Bytes of an operand. It must stay within one range of buffers and within the bytes of each buffer.
  int64_t operandBytes(const RankSchedule &rank, const Operand &operand, bool output, StepKind kind, Where where) {
    if (!require(operand.shape < rank.shapes.size(), where, " refers to shape ", operand.shape,
                 ", expected fewer than ", rank.shapes.size()))
      return 0;
    const BufferRange arena{0, 0, 0, 0, 1, rank.arenaBytes};
    const BufferRange *range = &arena;
    if (operand.buffer > 0) {
      const auto found = std::find_if(rank.buffers.begin(), rank.buffers.end(), [&](const BufferRange &r) {
        return operand.buffer >= r.first && operand.buffer - r.first < r.count;
      });
      if (!require(found != rank.buffers.end(), where, " refers to buffer ", operand.buffer,
                   ", which the rank does not have"))
        return 0;
      range = &*found;
    }
    require(!output || range->endpoint > 0 || operand.buffer == 0, where, " writes to a source param");
    require(output || kind == StepKind::send || kind == StepKind::reduce || range->endpoint == 0, where,
            " reads a target param, expected that of a send or reduce only");
    const OperandShape &shape = rank.shapes[operand.shape];
    int64_t bytes = shape.rowBytes, low = operand.offset, high = operand.offset + shape.rowBytes,
            first = operand.buffer, last = operand.buffer;
    for (const OperandLoop &loop : shape.loops) {
      bytes *= loop.count;
      (loop.stride < 0 ? low : high) += (loop.count - 1) * loop.stride;
      (loop.bufferStep < 0 ? first : last) += (loop.count - 1) * loop.bufferStep;
    }
    require(low >= 0 && high <= range->bytes && first >= range->first &&
                last < static_cast<int64_t>(range->first) + range->count,
            where, " has an operand outside its buffers: bytes ", low, ":", high, " of ", range->bytes, ", buffers ",
            first, " to ", last, " of ", range->first, " to ", int64_t{range->first} + range->count - 1);
    return bytes;
  }

  const Module &module_;
  const Layout &layout_;
  std::optional<Copies> copies_;                     // set once the layout is valid
  std::map<uint32_t, MessageStep> sends_, receives_; // by message
  std::string error_;
};

} // namespace

llvm::Error verify(const Module &module) { return Verifier(module).run(); }

} // namespace reshard::ir
