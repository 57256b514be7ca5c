// What must hold between passes. Exact where it is cheap (references, bounds, sums, both sides of a message); that each
// byte comes from the right byte is proved on the emitted plan by tools/coverage.cpp, which shares no code with this.

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
    for (const Family &family : layout_.families) {
      require(family.variables.size() == family.exists.size(),
              "tensor '" + family.name + "' does not say where it exists");
      for (size_t v = 0; error_.empty() && v < family.variables.size(); ++v)
        if (require(family.variables[v] < layout_.variables.size(),
                    "tensor '" + family.name + "' has an unknown index variable"))
          segments(family.exists[v], layout_.variables[family.variables[v]].size, "tensor '" + family.name + "'");
      for (int64_t length : family.shape)
        require(length >= 0, "tensor '" + family.name + "' has a negative length");
    }
    for (const Endpoint &each : layout_.endpoints)
      endpoint(each);
  }

  /// Sorted, disjoint on the `from` side, within [0, limit).
  void segments(const Segments &list, int64_t limit, const std::string &where) {
    for (const Segment &s : list)
      require(s.length > 0 && s.count > 0 && s.from >= 0 && s.to >= 0 &&
                  (s.count == 1 ? s.fromStep == 0 && s.toStep == 0
                                : s.fromStep >= s.length && std::abs(s.toStep) >= s.length) &&
                  s.count <= limit && s.length <= limit && s.from + (s.count - 1) * s.fromStep + s.length <= limit &&
                  s.to + (s.count - 1) * s.toStep >= 0, // an explicit map may run backwards locally
              where + " has a segment outside 0:" + std::to_string(limit));
    if (error_.empty() && list.size() > 1)
      require(
          std::is_sorted(list.begin(), list.end(), [](const Segment &a, const Segment &b) { return a.from < b.from; }),
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
    for (const Share &share : endpoint.shares) {
      require(share.unit > 0, endpoint.role + " has a share in units of no positions");
      require(coordinates(endpoint, share.axes) == static_cast<int64_t>(share.at.size()),
              endpoint.role + " has a share with a list too many or missing");
      for (const Segments &at : share.at)
        segments(at, INT64_MAX / 4, endpoint.role);
    }
    require(endpoint.placement.size() == layout_.variables.size(),
            endpoint.role + " does not place every index variable");
    for (unsigned share : endpoint.placement)
      require(share < endpoint.shares.size(), endpoint.role + " refers to a share that is not there");
    require(endpoint.generations.empty() || endpoint.generations.size() == endpoint.ranks.size(),
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
      require(param.variables[v] < layout_.variables.size() && param.instances[v] < endpoint.shares.size(),
              where + " refers to a share that is not there");
    for (const Presence &rule : param.presence)
      require(rule.axis < endpoint.axes.size(), where + " refers to an axis that is not there");
    for (const Extent &extent : param.shape)
      require(coordinates(endpoint, extent.axes) == static_cast<int64_t>(extent.at.size()),
              where + " has an extent too many or missing");
    if (param.face) {
      require(param.face->gathered || param.face->kind <= FaceKind::codes, where + " needs memory of its own");
      for (unsigned number : {param.face->codes, param.face->scales, param.face->tensorScale})
        require(number < endpoint.params.size(), where + " shows a param that is not there");
    }
    require(!param.made || param.parts.empty(), where + " is made by way of a face, but has parts");
    require(param.transform.empty() || !(endpoint.storage || param.stored || param.face || param.made),
            where + " has a transform where none may be");
    for (const Part &part : param.parts) {
      if (!require(part.family < static_cast<int>(layout_.families.size()),
                   where + " holds a tensor that is not there"))
        return;
      const size_t rank =
          part.family < 0 ? param.variables.size() + param.shape.size() : layout_.families[part.family].rank();
      if (!require(part.dimensions.size() == rank, where + " does not say where each dimension lies"))
        return;
      if (part.family >= 0)
        require(layout_.families[part.family].dtype == param.dtype, where + " has another dtype than its tensor");
      for (size_t d = 0; d < rank && error_.empty(); ++d) {
        const PartDimension &dimension = part.dimensions[d];
        if (!require(dimension.share < endpoint.shares.size() && dimension.param < static_cast<int>(param.shape.size()),
                     where + " refers to a share or dimension that is not there"))
          return;
        if (dimension.param >= 0)
          within(endpoint, endpoint.shares[dimension.share], param.shape[dimension.param], where);
      }
    }
  }

  /// A share's local positions lie within the param's extent, wherever both depend on the same axes.
  void within(const Endpoint &endpoint, const Share &share, const Extent &extent, const std::string &where) {
    if (share.axes != extent.axes && !extent.axes.empty() && !share.axes.empty())
      return;
    for (size_t c = 0; c < share.at.size(); ++c)
      for (const Segment &s : share.at[c]) {
        const int64_t reach = s.to + std::max<int64_t>(0, (s.count - 1) * s.toStep) + s.length;
        const int64_t limit = extent.axes.empty()  ? extent.at[0]
                              : share.axes.empty() ? *std::max_element(extent.at.begin(), extent.at.end())
                                                   : extent.at[c];
        require(reach <= limit,
                where + " holds position " + std::to_string(reach - 1) + " of a dimension of " + std::to_string(limit));
      }
    (void)endpoint;
  }

  // ---------------------------------------------------------------------------------------------------------- transfer

  /// A matrix has no largest magnitudes of tensors that are not in it.
  static int64_t bytesOfParts(const Endpoint &endpoint, const Param &param, int64_t place) {
    int64_t bytes = 0;
    for (const Part &part : param.parts) {
      int64_t positions = itemBytes(param.dtype);
      for (const PartDimension &dimension : part.dimensions) {
        const Share &share = endpoint.shares[dimension.share];
        positions *= size(share.at[coordinate(endpoint, share.axes, place)]);
      }
      bytes += positions;
    }
    return bytes;
  }

  int64_t bytesOfPlace(unsigned e, int64_t place) {
    const Endpoint &endpoint = layout_.endpoints[e];
    int64_t bytes = 0;
    for (const Param &param : endpoint.params)
      if (const int64_t count = param.made ? 0 : instances(endpoint, param, place))
        bytes += param.face && param.face->kind == FaceKind::amax ? bytesOfParts(endpoint, param, place)
                                                                  : count * localBytes(endpoint, param, place);
    return bytes;
  }

  void transfers() {
    const Transfers &t = module_.transfers;
    // What every target place gets must add up to what it holds: less is a gap, more an overlap.
    std::map<std::pair<unsigned, int32_t>, int64_t> tiled, chosen, moved;
    for (size_t n = 0; n < t.tiles.size() && error_.empty(); ++n) {
      const Tile &tile = t.tiles[n];
      const std::string where = "tile " + std::to_string(n);
      require(tile.endpoint > 0 && !tile.holders.empty() && !tile.targets.empty(),
              where + " has no source or no target");
      require(std::is_sorted(tile.targets.begin(), tile.targets.end()), where + " has targets out of order");
      const Param &param = layout_.endpoints[tile.endpoint].params[tile.param];
      for (const Holder &holder : tile.holders) {
        require(!holder.places.empty() && std::is_sorted(holder.places.begin(), holder.places.end()),
                where + " has holders out of order");
        require(holder.relations.size() == param.parts[tile.part].dimensions.size(),
                where + " does not relate every dimension");
        const size_t variables =
            tile.family < 0 ? param.variables.size() : layout_.families[tile.family].variables.size();
        int64_t tensors = 1, bytes = itemBytes(param.dtype);
        for (size_t d = 0; d < holder.relations.size() && error_.empty(); ++d)
          if (require(holder.relations[d] < t.relations.size(), where + " refers to a relation that is not there"))
            (d < variables ? tensors : bytes) *= size(t.relations[holder.relations[d]]);
        require(tensors == tile.tensors && bytes == tile.bytes,
                where + " says " + std::to_string(tile.tensors) + " x " + std::to_string(tile.bytes) +
                    " bytes, its relations " + std::to_string(tensors) + " x " + std::to_string(bytes) + " bytes");
      }
      for (int32_t target : tile.targets)
        tiled[{tile.endpoint, target}] += tile.tensors * tile.bytes;
    }
    if (!error_.empty())
      return;
    bool open = false;
    for (const Transfer &transfer : t.transfers) {
      const Tile &tile = t.tiles[transfer.tile];
      const std::string where =
          "transfer of tile " + std::to_string(transfer.tile) + " to " + std::to_string(transfer.target);
      if (!require(transfer.holder < tile.holders.size(), where + " has a holder that is not there") ||
          !require(transfer.first + transfer.count <= tile.tensors, where + " has more tensors than the tile") ||
          !require(transfer.route < static_cast<int32_t>(t.routes.size()), where + " has a route that is not there") ||
          !cut(transfer, where))
        return;
      open = open || transfer.source == Transfer::kOpen;
      const std::vector<int32_t> &places = tile.holders[transfer.holder].places;
      require(transfer.source == Transfer::kOpen || std::binary_search(places.begin(), places.end(), transfer.source),
              where + " comes from place " + std::to_string(transfer.source) + ", which does not hold it");
      std::vector<int32_t> there = {transfer.target};
      if (transfer.route >= 0) {
        const Endpoint &source = layout_.endpoints[0], &target = layout_.endpoints[tile.endpoint];
        require(tile.family >= 0 && !target.storage &&
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
      for (int32_t place : there) {
        require(std::binary_search(tile.targets.begin(), tile.targets.end(), place),
                where + (place == transfer.target ? "" : " goes on to " + std::to_string(place) + ", which") +
                    " is not wanted there");
        chosen[{tile.endpoint, place}] += bytes(t, transfer);
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
      for (int64_t place = 0; place < layout_.endpoints[e].places() && error_.empty(); ++place) {
        const std::pair<unsigned, int32_t> key{e, static_cast<int32_t>(place)};
        const int64_t wanted = bytesOfPlace(e, place);
        const auto check = [&](const auto &found, bool done, const char *what) {
          const auto at = found.find(key);
          const int64_t bytes = at == found.end() ? 0 : at->second;
          require(!done || bytes == wanted, layout_.endpoints[e].role + " place " + std::to_string(place) + " holds " +
                                                std::to_string(wanted) + " bytes, " + what + " give it " +
                                                std::to_string(bytes));
        };
        check(tiled, true, "tiles");
        check(chosen, !t.transfers.empty(), "transfers");
        check(moved, !t.descriptors.empty(), "descriptors");
      }
  }

  /// A cut transfer is of one tensor and lies in the tile's target positions, which are one run.
  bool cut(const Transfer &transfer, const std::string &where) {
    if (!transfer.cut())
      return true;
    const Tile &tile = module_.transfers.tiles[transfer.tile];
    const size_t variables = tile.family < 0 ? 0 : layout_.families[tile.family].variables.size();
    if (!require(transfer.count == 1 && transfer.dimension >= variables &&
                     transfer.dimension < tile.holders[0].relations.size(),
                 where + " is cut along no dimension of one tensor"))
      return false;
    const Segments local = inverse(module_.transfers.relations[tile.holders[0].relations[transfer.dimension]]);
    const Segments within = {{transfer.begin, transfer.begin, transfer.end - transfer.begin, 1, 0, 0}};
    return require(size(restrict(local, within)) == transfer.end - transfer.begin, where + " is cut outside the tile");
  }

  // ---------------------------------------------------------------------------------------------------------- schedule

  struct End {
    const RankSchedule *rank = nullptr;
    const Step *step = nullptr;
  };

  bool alike(const RankSchedule &a, const Operand &x, const RankSchedule &b, const Operand &y) {
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
    const std::vector<std::vector<BufferRun>> all = buffers(layout_);
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
        require(step.staging < 0 || step.staged() <= rank.arenaBytes - step.staging,
                where + " is staged outside the arena");
        if (step.staging >= 0)
          for (uint32_t before : arena.take(step.staging, step.staging + step.staged(), static_cast<uint32_t>(n)))
            require(std::find(step.after.begin(), step.after.end(), before) != step.after.end(),
                    where + " takes over bytes of the arena from step " + std::to_string(before) +
                        ", and does not wait for it");
        if (step.kind == StepKind::copy &&
            require(step.inputs.size() == step.outputs.size(), where + " copies unlike lists"))
          for (size_t i = 0; i < step.inputs.size(); ++i)
            require(alike(rank, step.inputs[i], rank, step.outputs[i]), where + " copies between unlike shapes");
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
        require(alike(*send.rank, send.step->inputs[i], *receive.rank, receive.step->outputs[i]),
                where + " has unlike operands");
    }
  }

  /// Bytes of an operand; it must stay in one run of buffers and in each buffer's bytes.
  int64_t operandBytes(const RankSchedule &rank, const Operand &operand, bool output, StepKind kind,
                       const std::string &where) {
    if (!require(operand.shape < rank.shapes.size(), where + " has a shape that is not there"))
      return 0;
    const BufferRun arena{0, 0, 0, 0, 1, rank.arenaBytes};
    const BufferRun *run = &arena;
    if (operand.buffer > 0) {
      const auto found = std::find_if(rank.buffers.begin(), rank.buffers.end(), [&](const BufferRun &r) {
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
