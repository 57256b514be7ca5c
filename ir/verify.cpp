// What must hold between passes. Exact where it is cheap (references, bounds, sums, both sides of a message); that each
// byte comes from the right byte is proved on the emitted plan by tools/plan_verifier.cpp, which shares no code with
// this.

#include "ir/text.h"
#include "schema/arena.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <tuple>

namespace reshard::ir {

namespace {

class Verifier {
public:
  explicit Verifier(const Module &module) : module_(module), layout_(module.layout) {}

  std::string run() {
    layout();
    if (error_.empty() && module_.level >= Level::transfer)
      transfers();
    if (error_.empty() && module_.level >= Level::schedule)
      schedule();
    return error_;
  }

private:
  bool require(bool holds, const std::string &what) {
    if (!holds && error_.empty())
      error_ = what;
    return holds;
  }

  // ------------------------------------------------------------------------------------------------------------ layout

  void layout() {
    if (!require(layout_.endpoints.size() >= 2, "fewer than two endpoints") ||
        !require(layout_.world > 0, "an empty world"))
      return;
    const Topology &t = layout_.topology;
    require(t.ranksPerNode >= 0 && t.nicsPerNode >= 0 && t.linkRate > 0 && t.nicRate > 0 && t.copyRate > 0 &&
                t.linkLatency >= 0 && t.nicLatency >= 0,
            "a topology with a rate that is not positive");
    for (const TensorPattern &pattern : layout_.tensorPatterns) {
      require(pattern.variables.size() == pattern.exists.size(),
              "tensor '" + pattern.name + "' does not say where it exists");
      for (size_t v = 0; error_.empty() && v < pattern.variables.size(); ++v)
        if (require(pattern.variables[v] < layout_.variables.size(),
                    "tensor '" + pattern.name + "' has an unknown index variable"))
          indexMap(pattern.exists[v], layout_.variables[pattern.variables[v]].size, "tensor '" + pattern.name + "'");
      for (int64_t length : pattern.shape)
        require(length >= 0, "tensor '" + pattern.name + "' has a negative length");
    }
    for (const Endpoint &each : layout_.endpoints)
      endpoint(each);
  }

  /// Sorted, disjoint on the `from` side, within [0, limit).
  void indexMap(const IndexMap &list, int64_t limit, const std::string &where) {
    for (const IndexBlock &s : list)
      require(s.length > 0 && s.count > 0 && s.from >= 0 && s.to >= 0 &&
                  (s.count == 1 ? s.fromStep == 0 && s.toStep == 0
                                : s.fromStep >= s.length && std::abs(s.toStep) >= s.length) &&
                  s.count <= limit && s.length <= limit && s.from + (s.count - 1) * s.fromStep + s.length <= limit &&
                  s.to + (s.count - 1) * s.toStep >= 0, // an explicit map may run backwards locally
              where + " has a segment outside 0:" + std::to_string(limit));
    if (error_.empty() && list.size() > 1)
      require(std::is_sorted(list.begin(), list.end(),
                             [](const IndexBlock &a, const IndexBlock &b) { return a.from < b.from; }),
              where + " has segments out of order");
  }

  int64_t coordinates(const Endpoint &endpoint, const std::vector<unsigned> &axes) {
    int64_t count = 1;
    for (unsigned axis : axes)
      if (!require(axis < endpoint.axes.size() && endpoint.axes[axis].size > 0 &&
                       !__builtin_mul_overflow(count, endpoint.axes[axis].size, &count),
                   endpoint.role + " refers to an axis that is not there"))
        return 0;
    return count;
  }

  void endpoint(const Endpoint &endpoint) {
    for (const Axis &axis : endpoint.axes)
      require(axis.size > 0 && axis.stride > 0, endpoint.role + " axis '" + axis.name + "' has no size or stride");
    for (int32_t rank : endpoint.ranks)
      require(rank >= 0 && (endpoint.storage || rank < layout_.world),
              endpoint.role + " has rank " + std::to_string(rank) + " outside the world");
    for (const Sharding &sharding : endpoint.shardings) {
      require(sharding.unit > 0, endpoint.role + " has a share in units of no positions");
      require(coordinates(endpoint, sharding.axes) == static_cast<int64_t>(sharding.at.size()),
              endpoint.role + " has a share with a list too many or missing");
      for (const IndexMap &at : sharding.at)
        indexMap(at, INT64_MAX / 4, endpoint.role);
    }
    require(endpoint.placement.size() == layout_.variables.size(),
            endpoint.role + " does not place every index variable");
    for (unsigned sharding : endpoint.placement)
      require(sharding < endpoint.shardings.size(), endpoint.role + " refers to a share that is not there");
    require(endpoint.epochs.empty() || endpoint.epochs.size() == endpoint.ranks.size(),
            endpoint.role + " does not say for every place when it joined");
    for (const Presence &rule : endpoint.authority)
      require(rule.axis < endpoint.axes.size(), endpoint.role + " refers to an axis that is not there");
    for (const Param &each : endpoint.params)
      if (error_.empty())
        param(endpoint, each);
  }

  void param(const Endpoint &endpoint, const Param &param) {
    const std::string where = endpoint.role + " param '" + param.name + "'";
    require(param.variables.size() == param.instances.size(), where + " does not number its instances");
    for (size_t v = 0; v < param.variables.size() && error_.empty(); ++v)
      require(param.variables[v] < layout_.variables.size() && param.instances[v] < endpoint.shardings.size(),
              where + " refers to a share that is not there");
    for (const Presence &rule : param.presence)
      require(rule.axis < endpoint.axes.size(), where + " refers to an axis that is not there");
    for (const Extent &extent : param.shape)
      require(coordinates(endpoint, extent.axes) == static_cast<int64_t>(extent.at.size()),
              where + " has an extent too many or missing");
    if (param.view) {
      require(param.view->staged || param.view->kind <= ViewKind::codes, where + " needs memory of its own");
      for (unsigned number : {param.view->codes, param.view->scales, param.view->tensorScale})
        require(number < endpoint.params.size(), where + " shows a param that is not there");
    }
    require(!param.derived || param.parts.empty(), where + " is made by way of a face, but has parts");
    require(param.transform.empty() || !(endpoint.storage || param.storageDtype || param.view || param.derived),
            where + " has a transform where none may be");
    for (const Part &part : param.parts) {
      if (!require(part.pattern < static_cast<int>(layout_.tensorPatterns.size()),
                   where + " holds a tensor that is not there"))
        return;
      const size_t rank =
          part.pattern < 0 ? param.variables.size() + param.shape.size() : layout_.tensorPatterns[part.pattern].rank();
      if (!require(part.dimensions.size() == rank, where + " does not say where each dimension lies"))
        return;
      if (part.pattern >= 0)
        require(layout_.tensorPatterns[part.pattern].dtype == param.dtype,
                where + " has another dtype than its tensor");
      for (size_t d = 0; d < rank && error_.empty(); ++d) {
        const PartDimension &dimension = part.dimensions[d];
        if (!require(dimension.sharding < endpoint.shardings.size() &&
                         dimension.param < static_cast<int>(param.shape.size()),
                     where + " refers to a share or dimension that is not there"))
          return;
        if (dimension.param >= 0)
          within(endpoint, endpoint.shardings[dimension.sharding], param.shape[dimension.param], where);
      }
    }
  }

  /// A share's local positions lie within the param's extent, wherever both depend on the same axes.
  void within(const Endpoint &endpoint, const Sharding &sharding, const Extent &extent, const std::string &where) {
    if (sharding.axes != extent.axes && !extent.axes.empty() && !sharding.axes.empty())
      return;
    for (size_t c = 0; c < sharding.at.size(); ++c)
      for (const IndexBlock &s : sharding.at[c]) {
        const int64_t reach = s.to + std::max<int64_t>(0, (s.count - 1) * s.toStep) + s.length;
        const int64_t limit = extent.axes.empty()     ? extent.at[0]
                              : sharding.axes.empty() ? *std::max_element(extent.at.begin(), extent.at.end())
                                                      : extent.at[c];
        require(reach <= limit,
                where + " holds position " + std::to_string(reach - 1) + " of a dimension of " + std::to_string(limit));
      }
    (void)endpoint;
  }

  // ---------------------------------------------------------------------------------------------------------- transfer

  /// A matrix has no largest magnitudes of tensors that are not in it.
  static int64_t partBytes(const Endpoint &endpoint, const Param &param, int64_t meshRank) {
    int64_t bytes = 0;
    for (const Part &part : param.parts) {
      int64_t positions = itemBytes(param.dtype);
      for (const PartDimension &dimension : part.dimensions) {
        const Sharding &sharding = endpoint.shardings[dimension.sharding];
        positions *= size(sharding.at[coordinate(endpoint, sharding.axes, meshRank)]);
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

  void transfers() {
    const Transfers &t = module_.transfers;
    // What every target place gets must add up to what it holds: less is a gap, more an overlap.
    std::map<std::pair<unsigned, int32_t>, int64_t> overlapped, chosen, moved;
    for (size_t n = 0; n < t.overlaps.size() && error_.empty(); ++n) {
      const Overlap &overlap = t.overlaps[n];
      const std::string where = "tile " + std::to_string(n);
      require(overlap.endpoint > 0 && !overlap.replicaGroups.empty() && !overlap.targets.empty(),
              where + " has no source or no target");
      require(std::is_sorted(overlap.targets.begin(), overlap.targets.end()), where + " has targets out of order");
      const Param &param = layout_.endpoints[overlap.endpoint].params[overlap.param];
      for (const ReplicaGroup &replicaGroup : overlap.replicaGroups) {
        require(!replicaGroup.meshRanks.empty() &&
                    std::is_sorted(replicaGroup.meshRanks.begin(), replicaGroup.meshRanks.end()),
                where + " has holders out of order");
        require(replicaGroup.relations.size() == param.parts[overlap.part].dimensions.size(),
                where + " does not relate every dimension");
        const size_t variables =
            overlap.pattern < 0 ? param.variables.size() : layout_.tensorPatterns[overlap.pattern].variables.size();
        int64_t tensors = 1, bytes = itemBytes(param.dtype);
        for (size_t d = 0; d < replicaGroup.relations.size() && error_.empty(); ++d)
          if (require(replicaGroup.relations[d] < t.relations.size(),
                      where + " refers to a relation that is not there"))
            (d < variables ? tensors : bytes) *= size(t.relations[replicaGroup.relations[d]]);
        require(tensors == overlap.tensors && bytes == overlap.bytes,
                where + " says " + std::to_string(overlap.tensors) + " x " + std::to_string(overlap.bytes) +
                    " bytes, its relations " + std::to_string(tensors) + " x " + std::to_string(bytes) + " bytes");
      }
      for (int32_t target : overlap.targets)
        overlapped[{overlap.endpoint, target}] += overlap.tensors * overlap.bytes;
    }
    if (!error_.empty())
      return;
    bool open = false;
    for (const Transfer &transfer : t.transfers) {
      const Overlap &overlap = t.overlaps[transfer.overlap];
      const std::string where =
          "transfer of tile " + std::to_string(transfer.overlap) + " to " + std::to_string(transfer.target);
      if (!require(transfer.replicaGroup < overlap.replicaGroups.size(), where + " has a holder that is not there") ||
          !require(transfer.first + transfer.count <= overlap.tensors, where + " has more tensors than the tile") ||
          !require(transfer.route < static_cast<int32_t>(t.routes.size()), where + " has a route that is not there") ||
          !cut(transfer, where))
        return;
      open = open || transfer.source == Transfer::kUnassigned;
      const std::vector<int32_t> &meshRanks = overlap.replicaGroups[transfer.replicaGroup].meshRanks;
      require(transfer.source == Transfer::kUnassigned ||
                  std::binary_search(meshRanks.begin(), meshRanks.end(), transfer.source),
              where + " comes from place " + std::to_string(transfer.source) + ", which does not hold it");
      std::vector<int32_t> there = {transfer.target};
      if (transfer.route >= 0) {
        const Endpoint &source = layout_.endpoints[0], &target = layout_.endpoints[overlap.endpoint];
        require(overlap.pattern >= 0 && !target.storage &&
                    (source.storage || transfer.source < 0 ||
                     source.ranks[transfer.source] != target.ranks[transfer.target]),
                where + " is the target's own, or goes to files, but goes on");
        for (const Hop &hop : t.routes[transfer.route]) {
          require(std::find(there.begin(), there.end(), hop.from) != there.end(),
                  where + " goes on from " + std::to_string(hop.from) + " before it is there");
          require(std::find(there.begin(), there.end(), hop.to) == there.end(),
                  where + " comes to " + std::to_string(hop.to) + " twice");
          there.push_back(hop.to);
        }
      }
      for (int32_t meshRank : there) {
        require(std::binary_search(overlap.targets.begin(), overlap.targets.end(), meshRank),
                where + (meshRank == transfer.target ? "" : " goes on to " + std::to_string(meshRank) + ", which") +
                    " is not wanted there");
        chosen[{overlap.endpoint, meshRank}] += bytes(t, transfer);
      }
    }
    require(!open || t.descriptors.empty(), "there are descriptors, but transfers without a source");
    for (const Descriptor &d : t.descriptors) {
      if (!require(d.shape < t.shapes.size(), "a descriptor has a shape that is not there"))
        return;
      int64_t bytes = t.shapes[d.shape].rowBytes;
      for (const Loop &loop : t.shapes[d.shape].loops)
        bytes *= loop.count;
      moved[{d.endpoint, d.target}] += bytes;
      if (d.route >= 0)
        for (const Hop &hop : t.routes[d.route])
          moved[{d.endpoint, hop.to}] += bytes;
    }
    for (unsigned e = 1; e < layout_.endpoints.size(); ++e)
      for (int64_t meshRank = 0; meshRank < layout_.endpoints[e].meshRanks() && error_.empty(); ++meshRank) {
        const std::pair<unsigned, int32_t> key{e, static_cast<int32_t>(meshRank)};
        const int64_t wanted = meshRankBytes(e, meshRank);
        const auto check = [&](const auto &found, bool done, const char *what) {
          const auto at = found.find(key);
          const int64_t bytes = at == found.end() ? 0 : at->second;
          require(!done || bytes == wanted, layout_.endpoints[e].role + " place " + std::to_string(meshRank) +
                                                " holds " + std::to_string(wanted) + " bytes, " + what + " give it " +
                                                std::to_string(bytes));
        };
        check(overlapped, true, "tiles");
        check(chosen, !t.transfers.empty(), "transfers");
        check(moved, !t.descriptors.empty(), "descriptors");
      }
  }

  /// A cut transfer is of one tensor and lies in the tile's target positions, which are one run.
  bool cut(const Transfer &transfer, const std::string &where) {
    if (!transfer.cut())
      return true;
    const Overlap &overlap = module_.transfers.overlaps[transfer.overlap];
    const size_t variables = overlap.pattern < 0 ? 0 : layout_.tensorPatterns[overlap.pattern].variables.size();
    if (!require(transfer.count == 1 && transfer.dimension >= variables &&
                     transfer.dimension < overlap.replicaGroups[0].relations.size(),
                 where + " is cut along no dimension of one tensor"))
      return false;
    const IndexMap local = inverse(module_.transfers.relations[overlap.replicaGroups[0].relations[transfer.dimension]]);
    const IndexMap within = {{transfer.begin, transfer.begin, transfer.end - transfer.begin, 1, 0, 0}};
    return require(size(restrict(local, within)) == transfer.end - transfer.begin, where + " is cut outside the tile");
  }

  // ---------------------------------------------------------------------------------------------------------- schedule

  struct End {
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
    if (!require(static_cast<int64_t>(s.ranks.size()) == layout_.world,
                 "the schedule has " + std::to_string(s.ranks.size()) + " ranks, the world " +
                     std::to_string(layout_.world)))
      return;
    std::map<uint32_t, End> sends, receives;
    const std::vector<std::vector<BufferRange>> all = buffers(layout_);
    for (const RankSchedule &rank : s.ranks) {
      const std::string who = "rank " + std::to_string(rank.rank);
      require(rank.rank >= 0 && rank.rank < layout_.world && rank.buffers == all[rank.rank],
              who + " has other buffers than its layouts give it");
      require(layout_.stagingLimit == 0 || rank.arenaBytes <= layout_.stagingLimit,
              who + " has an arena past the staging limit");
      uint32_t round = 0;
      schema::ArenaUse arena;
      for (size_t n = 0; n < rank.steps.size() && error_.empty(); ++n) {
        const Step &step = rank.steps[n];
        const std::string where = who + " step " + std::to_string(n);
        require(step.round >= round && step.round < s.rounds, where + " is out of its round");
        round = step.round;
        require(step.kind <= StepKind::fill || step.kind == StepKind::reduce, where + " is of a reserved kind");
        for (uint32_t before : step.after)
          require(before < n, where + " waits for a later step");
        int64_t in = 0, out = 0;
        for (const Operand &operand : step.inputs)
          in += operandBytes(rank, operand, false, step.kind, where);
        for (const Operand &operand : step.outputs)
          out += operandBytes(rank, operand, true, step.kind, where);
        if (!error_.empty())
          return;
        const bool message = step.kind == StepKind::send || step.kind == StepKind::recv;
        require(message == (step.peer >= 0) && step.peer < layout_.world && step.peer != rank.rank,
                where + " has a wrong peer");
        require((step.kind == StepKind::fill || step.kind == StepKind::recv || in == step.bytes) &&
                    (step.kind == StepKind::send || step.kind == StepKind::reduce || out == step.bytes),
                where + " says " + std::to_string(step.bytes) + " bytes, its operands have " +
                    std::to_string(std::max(in, out)));
        require(step.chunk >= 0 && step.chunk % 256 == 0 && (step.chunk == 0 || (message && step.chunk < step.bytes)) &&
                    step.slot <= (step.chunk > 0 && step.staging >= 0),
                where + " has chunks that cannot be");
        require(step.staging < 0 || step.stagingBytes() <= rank.arenaBytes - step.staging,
                where + " is staged outside the arena");
        if (step.staging >= 0)
          for (uint32_t before : arena.take(step.staging, step.staging + step.stagingBytes(), static_cast<uint32_t>(n)))
            require(std::find(step.after.begin(), step.after.end(), before) != step.after.end(),
                    where + " takes over bytes of the arena from step " + std::to_string(before) +
                        ", and does not wait for it");
        if (step.kind == StepKind::copy &&
            require(step.inputs.size() == step.outputs.size(), where + " copies unlike lists"))
          for (size_t i = 0; i < step.inputs.size(); ++i)
            require(sameShape(rank, step.inputs[i], rank, step.outputs[i]), where + " copies between unlike shapes");
        if (message &&
            !(step.kind == StepKind::send ? sends : receives).try_emplace(step.message, End{&rank, &step}).second)
          require(false, where + " is a second end of message " + std::to_string(step.message));
      }
    }
    require(sends.size() == s.messages && receives.size() == s.messages,
            "there are " + std::to_string(s.messages) + " messages, but " + std::to_string(sends.size()) +
                " sends and " + std::to_string(receives.size()) + " receives");
    for (const auto &[message, send] : sends) {
      const auto at = receives.find(message);
      const std::string where = "message " + std::to_string(message);
      if (!require(at != receives.end(), where + " has no receive"))
        return;
      const End &receive = at->second;
      require(send.step->peer == receive.rank->rank && receive.step->peer == send.rank->rank &&
                  send.step->round == receive.step->round && send.step->bytes == receive.step->bytes &&
                  send.step->chunk == receive.step->chunk && send.step->inputs.size() == receive.step->outputs.size(),
              where + " differs between its two ends");
      for (size_t i = 0; i < send.step->inputs.size() && error_.empty(); ++i)
        require(sameShape(*send.rank, send.step->inputs[i], *receive.rank, receive.step->outputs[i]),
                where + " has unlike operands");
    }
  }

  /// Bytes of an operand; it must stay in one run of buffers and in each buffer's bytes.
  int64_t operandBytes(const RankSchedule &rank, const Operand &operand, bool output, StepKind kind,
                       const std::string &where) {
    if (!require(operand.shape < rank.shapes.size(), where + " has a shape that is not there"))
      return 0;
    const BufferRange arena{0, 0, 0, 0, 1, rank.arenaBytes};
    const BufferRange *run = &arena;
    if (operand.buffer > 0) {
      const auto found = std::find_if(rank.buffers.begin(), rank.buffers.end(), [&](const BufferRange &r) {
        return operand.buffer >= r.first && operand.buffer - r.first < r.count;
      });
      if (!require(found != rank.buffers.end(), where + " has a buffer that is not there"))
        return 0;
      run = &*found;
    }
    require(!output || run->endpoint > 0 || operand.buffer == 0, where + " writes to a source");
    require(output || kind == StepKind::send || kind == StepKind::reduce || run->endpoint == 0,
            where + " reads a target");
    const OperandShape &shape = rank.shapes[operand.shape];
    int64_t bytes = shape.rowBytes, low = operand.offset, high = operand.offset + shape.rowBytes,
            first = operand.buffer, last = operand.buffer;
    for (const OperandLoop &loop : shape.loops) {
      bytes *= loop.count;
      (loop.stride < 0 ? low : high) += (loop.count - 1) * loop.stride;
      (loop.bufferStep < 0 ? first : last) += (loop.count - 1) * loop.bufferStep;
    }
    require(low >= 0 && high <= run->bytes && first >= run->first &&
                last < static_cast<int64_t>(run->first) + run->count,
            where + " reaches outside its buffer");
    return bytes;
  }

  const Module &module_;
  const Layout &layout_;
  std::string error_;
};

} // namespace

std::string verify(const Module &module) { return Verifier(module).run(); }

} // namespace reshard::ir
