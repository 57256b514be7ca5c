// SPDX-License-Identifier: Apache-2.0
// schedule: turns descriptors into the steps of each rank: fills with zeros, local copies, sends and receives. Remote
// descriptors with the same source, target and route form a flow. assignRounds (rounds.h) assigns the bytes of flows to
// rounds, and descriptors are cut where messages end. Epochs (--keep) are scheduled one after the other, so that the
// rounds of earlier epochs do not change.

#include "compiler/pass.h"
#include "compiler/resolve/interner.h"
#include "compiler/schedule/dependency_levels.h"
#include "compiler/schedule/descriptor_cuts.h"
#include "compiler/schedule/descriptor_cutter.h"
#include "compiler/schedule/file_shares.h"
#include "compiler/schedule/relays.h"
#include "compiler/schedule/round_limits.h"
#include "compiler/schedule/rounds.h"
#include "compiler/schedule/staged_ranges.h"
#include "compiler/transfer/free_memory.h"
#include "compiler/transfer/sorting.h"
#include "schema/arena.h"
#include "schema/levels.h"

#include "llvm/ADT/DenseMap.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// Bytes of a flow from `begin` on, in which no message begins or ends, and the number of their descriptor. A large job
/// has many millions of them.
struct FlowRange {
  int64_t begin;
  uint32_t descriptor;
};

class Scheduler {
public:
  explicit Scheduler(Module &module)
      : module_(module), layout_(module.layout), cutter_(shapes_), relays_(module.layout, shapes_, cutter_),
        stagedRanges_(module.layout), phaseSteps_(module, stagedRanges_, operandShapes_) {
    for (const Shape &shape : module.transfers.shapes)
      shapes_.intern(shape);
    module_.schedule.ranks.resize(layout_.world);
    firstBuffer_.resize(layout_.world);
    operandShapes_.resize(layout_.world);
    operandNumbers_.resize(layout_.world);
    std::vector<std::vector<BufferRange>> all = buffers(layout_);
    for (int32_t rank = 0; rank < layout_.world; ++rank) {
      RankSchedule &schedule = module_.schedule.ranks[rank];
      schedule.rank = rank;
      schedule.buffers = std::move(all[rank]);
      for (const BufferRange &range : schedule.buffers)
        firstBuffer_[rank].try_emplace({static_cast<int64_t>(range.endpoint), range.meshRank}, range.first);
    }
    for (const Endpoint &endpoint : layout_.endpoints)
      hasViews_.push_back(std::any_of(endpoint.params.begin(), endpoint.params.end(),
                                      [](const Param &param) { return param.view.has_value(); }));
    hasViews_[0] = false; // the views of the source are only read
    later_.resize(layout_.world);
    for (const RankSchedule &rank : module_.schedule.ranks)
      for (const BufferRange &range : rank.buffers)
        if (const auto &view = layout_.endpoints[range.endpoint].params[range.param].view; range.endpoint > 0 && view) {
          phaseSteps_.watch(rank.rank);
          if (view->kind == ViewKind::amax)
            later_[rank.rank][{layout_.endpoints[range.endpoint].epoch(range.meshRank), 0}];
        }
  }

  llvm::Error run() {
    const bool anyStaged =
        std::any_of(layout_.endpoints.begin(), layout_.endpoints.end(), [](const Endpoint &endpoint) {
          return std::any_of(endpoint.params.begin(), endpoint.params.end(),
                             [](const Param &param) { return param.view && param.view->staged; });
        });
    if (llvm::Error error = stagedRanges_.plan(anyStaged ? remoteBytes() : 0))
      return error;
    separate();
    relay();
    if (llvm::Error error = makeRounds())
      return error;
    localSteps();
    messageSteps();
    for (size_t rank = 0; rank < operandShapes_.size(); ++rank)
      module_.schedule.ranks[rank].shapes = std::move(operandShapes_[rank]).take();
    for (RankSchedule &rank : module_.schedule.ranks)
      rank.arenaBytes = stagedRanges_.bytes(rank.rank) + relays_.held(rank.rank);
    module_.schedule.messages = static_cast<uint32_t>(messages_.size());
    module_.schedule.rounds = rounds_;
    for (const RankSchedule &rank : module_.schedule.ranks)
      if (!rank.steps.empty())
        module_.schedule.rounds = std::max(module_.schedule.rounds, 1u);
    if (const uint64_t levels = assignDependencyLevels(module_.schedule); levels > schema::kMaxLevels)
      return llvm::createStringError("the steps have " + std::to_string(levels) +
                                     " dependency levels, expected at most " + std::to_string(schema::kMaxLevels) +
                                     "; raise options.staging, or choose another options.exchange");
    module_.level = Level::schedule;
    return llvm::Error::success();
  }

private:
  /// The world rank of a mesh rank; -1 for a file.
  int32_t rankOf(unsigned endpoint, int32_t meshRank) const {
    return layout_.endpoints[endpoint].storage ? -1 : layout_.endpoints[endpoint].ranks[meshRank];
  }

  /// The flow of a descriptor, from the rank that reads to the rank that writes. Files and zeros are read or written by
  /// the rank of the other side, unless one rank must write the instance (StagedRanges::writer). Copies from files to
  /// files have no flow: see separate().
  FlowKey flowKey(const Descriptor &d) const {
    const int32_t source = d.source < 0 ? -1 : rankOf(0, d.source),
                  target = stagedRanges_.writer(d.endpoint, d.target, d.targetInstance);
    const StagedRange *staged = stagedRanges_.find(d.endpoint, d.target, d.targetInstance, d.targetOffset);
    FlowKey result{{layout_.endpoints[d.endpoint].epoch(d.target), staged ? staged->phase
                                                                   : hasViews_[d.endpoint]
                                                                       ? stagedRanges_.phaseOf(paramOf(d))
                                                                       : 0},
                   source < 0 ? target : source,
                   target < 0 ? source : target,
                   d.route};
    return result;
  }

  const Param &paramOf(const Descriptor &d) const {
    return layout_.endpoints[d.endpoint].params[stagedRanges_.paramOf(d.endpoint, d.target, d.targetInstance)];
  }

  int64_t remoteBytes() const {
    int64_t bytes = 0;
    for (const Descriptor &d : module_.transfers.descriptors)
      if (const FlowKey at = flowKey(d); at.source != at.target || d.route >= 0)
        bytes += bytesOf(shapes_[d.shape]) *
                 (d.route < 0 ? 1 : static_cast<int64_t>(module_.transfers.routes[d.route].size()));
    return bytes;
  }

  /// A descriptor of the module, or one that was cut.
  const Descriptor &descriptorOf(uint32_t number) const {
    const std::vector<Descriptor> &whole = module_.transfers.descriptors;
    return number < whole.size() ? whole[number] : cut_[number - whole.size()];
  }

  /// Adds a descriptor that was cut; returns its number.
  uint32_t addCut(const Descriptor &d) {
    cut_.push_back(d);
    return static_cast<uint32_t>(module_.transfers.descriptors.size() + cut_.size() - 1);
  }

  /// Separates local descriptors from those of flows. Those from files to files are shared out.
  void separate() {
    const std::vector<Descriptor> &whole = module_.transfers.descriptors;
    std::vector<uint32_t> remote;
    std::vector<Descriptor> files;
    auto put = [&](uint32_t number) {
      const Descriptor &d = descriptorOf(number);
      const FlowKey at = flowKey(d);
      if (at.target < 0)
        files.push_back(d);
      else if (at.source == at.target && d.route < 0)
        local_.push_back({d, at.target});
      else
        remote.push_back(number);
    };
    remote.reserve(whole.size());
    std::vector<Descriptor> parts;
    for (uint32_t number = 0; number < whole.size(); ++number) {
      if (!stagedRanges_.needsCut(whole[number].endpoint, whole[number].target, whole[number].targetInstance)) {
        put(number);
        continue;
      }
      parts.clear();
      cutAtStagedRanges(whole[number], stagedRanges_, shapes_, parts);
      for (const Descriptor &d : parts)
        put(addCut(d));
    }
    shareFiles(files, layout_.world, shapes_, [&](const Descriptor &d) { return granule(d); }, local_);
    sortUnlessSorted(remote, [&](uint32_t a, uint32_t b) {
      return flowKey(descriptorOf(a)).fields() < flowKey(descriptorOf(b)).fields();
    });
    for (uint32_t number : remote)
      addToFlow(flowKey(descriptorOf(number)), number);
    firsts_.push_back(numbers_.size());
  }

  /// Appends a descriptor to the last flow, or to a new one if it has another key.
  void addToFlow(const FlowKey &at, uint32_t number) {
    const Descriptor &d = descriptorOf(number);
    if (keys_.empty() || keys_.back() != at) {
      keys_.push_back(at);
      firsts_.push_back(numbers_.size());
      Flow &flow = flows_.emplace_back();
      if (at.relay >= 0)
        flow.hops = {{at.source, at.relay, -1}, {at.relay, at.target, 0}};
      else if (at.source != at.target)
        flow.hops.push_back({at.source, at.target, -1});
      if (d.route >= 0)
        addRoute(module_.transfers.routes[d.route], d.endpoint, flow);
    }
    flows_.back().bytes += bytesOf(shapes_[d.shape]);
    numbers_.push_back(number);
  }

  /// Replaces flows of overloaded NICs by flows that are in part sent over relays (spread.h). The source ranks of a
  /// pool are no relays: they do not receive.
  void relay() {
    if (layout_.pool() || layout_.topology.ranksPerNode == 0)
      return;
    std::vector<Descriptor> descriptors;
    descriptors.reserve(numbers_.size());
    for (uint32_t number : numbers_)
      descriptors.push_back(descriptorOf(number));
    std::vector<std::pair<FlowKey, Descriptor>> all = relays_.cut(keys_, flows_, firsts_, descriptors);
    if (all.empty())
      return;
    keys_.clear();
    firsts_.clear();
    flows_.clear();
    numbers_.clear();
    cut_.clear();
    sortUnlessSorted(all, [](const auto &a, const auto &b) { return a.first.fields() < b.first.fields(); });
    cut_.reserve(all.size());
    for (const auto &[at, d] : all)
      addToFlow(at, addCut(d));
    firsts_.push_back(numbers_.size());
    relays_.layOut(keys_, flows_);
  }

  /// Appends the hops of a route to a flow.
  void addRoute(const Route &route, unsigned endpoint, Flow &flow) {
    for (const Hop &hop : route) {
      const int32_t from = rankOf(endpoint, hop.from), to = rankOf(endpoint, hop.to);
      auto after = static_cast<int32_t>(flow.hops.size()) - 1; // becomes -1 if `from` reads the bytes from files
      while (after >= 0 && flow.hops[after].to != from)
        --after;
      flow.hops.push_back({from, to, after});
    }
  }

  /// Assigns rounds and messages, for each epoch and phase after the one before it; then cuts flows where messages end.
  llvm::Error makeRounds() {
    int64_t staged = 0;
    for (const RankSchedule &rank : module_.schedule.ranks)
      staged = std::max(staged,
                        stagedBytes(layout_, rank.buffers) + stagedRanges_.bytes(rank.rank) + relays_.held(rank.rank));
    llvm::Expected<RoundLimits> limits = roundLimits(flows_, layout_, staged);
    if (!limits)
      return limits.takeError();
    for (size_t first = 0; first < flows_.size();) {
      size_t last = first;
      while (last < flows_.size() && keys_[last].when == keys_[first].when)
        ++last;
      std::vector<Message> messages = roundsOf(first, last, *limits);
      uint32_t rounds = 0;
      for (Message &message : messages) {
        rounds = std::max(rounds, message.round + message.rounds);
        message.round += rounds_;
        for (Grant &grant : message.grants)
          grant.flow += static_cast<uint32_t>(first);
      }
      if (first == 0)
        messages_ = std::move(messages);
      else
        messages_.insert(messages_.end(), std::make_move_iterator(messages.begin()),
                         std::make_move_iterator(messages.end()));
      rounds_ += rounds;
      lastRound_[keys_[first].when] = rounds_ - 1;
      first = last;
    }
    cut();
    noteArrivals();
    return llvm::Error::success();
  }

  /// The messages of flows [first, last), counted from round 0 and flow 0.
  std::vector<Message> roundsOf(size_t first, size_t last, const RoundLimits &limits) {
    DescriptorCuts cuts(firsts_[last] - firsts_[first]);
    for (size_t s = first; s < last; ++s, cuts.endFlow())
      for (size_t i = firsts_[s]; i < firsts_[s + 1]; ++i) {
        const Descriptor &d = descriptorOf(numbers_[i]);
        cuts.add(bytesOf(shapes_[d.shape]), shapes_[d.shape].rowBytes, hasViews_[d.endpoint] ? blockBytes(d) : 0);
      }
    return assignRounds(llvm::ArrayRef(flows_).slice(first, last - first), layout_.topology, limits, cuts);
  }

  /// The bytes of a quantization block if the descriptor's elements are quantized on arrival, else 0.
  int64_t blockBytes(const Descriptor &d) const {
    const int32_t rank = rankOf(d.endpoint, d.target);
    const Param &param =
        layout_.endpoints[d.endpoint].params[bufferRangeOf(rank < 0 ? std::max(flowKey(d).target, 0) : rank, d).param];
    return param.view && param.view->kind == ViewKind::elements && !param.view->staged
               ? formatOf(param.view->format).blockColumns * itemBytes(param.dtype)
               : 0;
  }

  /// Bytes of a copy from files to files that must stay together: the size of a page, and whole blocks.
  int64_t granule(const Descriptor &d) const {
    constexpr int64_t kPage = 4096;
    const int64_t block = hasViews_[d.endpoint] ? blockBytes(d) : 0;
    return block > 0 ? std::lcm(kPage, block) : kPage;
  }

  /// Cuts the descriptors of flows where grants end.
  void cut() {
    std::vector<llvm::SmallVector<int64_t, 1>> ends(flows_.size());
    for (const Message &message : messages_)
      for (const Grant &grant : message.grants)
        ends[grant.flow].push_back(grant.end);
    ranges_.reserve(numbers_.size());
    for (size_t s = 0; s < flows_.size(); ++s) {
      firstRange_.push_back(ranges_.size());
      std::sort(ends[s].begin(), ends[s].end());
      ends[s].erase(std::unique(ends[s].begin(), ends[s].end()), ends[s].end());
      if (!addWhole(s, ends[s])) {
        ranges_.resize(firstRange_.back());
        addParts(s, ends[s]);
      }
    }
    firstRange_.push_back(ranges_.size());
    freeMemory(numbers_);
  }

  /// Appends the ranges of a flow, one for each descriptor. Stops and returns false if one must be cut at one of
  /// `ends`.
  bool addWhole(size_t flow, llvm::ArrayRef<int64_t> ends) {
    int64_t at = 0;
    for (size_t i = firsts_[flow]; i < firsts_[flow + 1]; ++i) {
      ranges_.push_back({at, numbers_[i]});
      at += bytesOf(shapes_[descriptorOf(numbers_[i]).shape]);
      while (!ends.empty() && ends.front() <= at) {
        if (ends.front() < at)
          return false;
        ends = ends.drop_front();
      }
    }
    return true;
  }

  /// Appends the ranges of a flow, whose descriptors are cut at `ends`.
  void addParts(size_t flow, llvm::ArrayRef<int64_t> ends) {
    std::vector<Descriptor> stack, taken;
    for (size_t i = firsts_[flow + 1]; i-- > firsts_[flow];)
      stack.push_back(descriptorOf(numbers_[i]));
    int64_t at = 0;
    for (int64_t end : ends) {
      taken.clear();
      cutter_.take(stack, end - at, taken);
      for (const Descriptor &d : taken) {
        ranges_.push_back({at, addCut(d)});
        at += bytesOf(shapes_[d.shape]);
      }
    }
  }

  llvm::ArrayRef<FlowRange> rangesOf(size_t flow) const {
    return llvm::ArrayRef(ranges_).slice(firstRange_[flow], firstRange_[flow + 1] - firstRange_[flow]);
  }

  /// Records which message brings the bytes that later hops forward.
  void noteArrivals() {
    if (std::none_of(flows_.begin(), flows_.end(), [](const Flow &flow) { return flow.hops.size() > 1; }))
      return;
    arrivals_.resize(flows_.size());
    for (uint32_t m = 0; m < messages_.size(); ++m)
      for (const Grant &grant : messages_[m].grants)
        if (const size_t hops = flows_[grant.flow].hops.size(); hops > 1) {
          arrivals_[grant.flow].resize(hops);
          arrivals_[grant.flow][grant.hop].emplace_back(grant.end, m);
        }
  }

  /// Makes one fill and one copy step for each rank and phase, and one copy step for each flow that a rank reads from
  /// files to forward it. All run in the first round of their phase.
  void localSteps() {
    std::vector<std::map<EpochPhase, Step>> fills(layout_.world), copies(layout_.world);
    for (const auto &[d, rank] : local_) {
      const FlowKey at = flowKey(d);
      const EpochPhase when = at.when.phase > 0 || hasViews_[d.endpoint] ? at.when : EpochPhase{0, 0};
      Step &step = (d.source < 0 ? fills : copies)[rank][when];
      step.kind = d.source < 0 ? StepKind::fill : StepKind::copy;
      if (d.source >= 0)
        step.inputs.push_back(input(rank, d));
      step.outputs.push_back(output(rank, d));
      step.bytes += bytesOf(shapes_[d.shape]);
    }
    for (int32_t rank = 0; rank < layout_.world; ++rank) {
      for (const StagedRange &staged : stagedRanges_.of(rank)) // also phases without local steps must be finished
        later_[rank][{layout_.endpoints[staged.endpoint].epoch(staged.meshRank), staged.phase}];
      for (auto *kind : {&fills, &copies})
        for (auto &[when, step] : (*kind)[rank])
          if (when == EpochPhase{0, 0})
            phaseSteps_.append(rank, std::move(step), {});
          else
            later_[rank][when].push_back(std::move(step));
    }
    readStep_.resize(flows_.size());
    for (size_t s = 0; s < flows_.size(); ++s) {
      if (!read(s))
        continue;
      readStep_[s] = static_cast<uint32_t>(module_.schedule.ranks[keys_[s].source].steps.size());
      Step step;
      step.bytes = flows_[s].bytes;
      for (const FlowRange &range : rangesOf(s)) {
        step.inputs.push_back(input(keys_[s].source, descriptorOf(range.descriptor)));
        step.outputs.push_back(output(keys_[s].source, descriptorOf(range.descriptor)));
      }
      phaseSteps_.append(keys_[s].source, std::move(step), {});
    }
  }

  /// Whether the first rank of a flow reads it from files.
  bool read(size_t flow) const { return keys_[flow].reads(); }

  /// One end of a message.
  struct Side {
    uint32_t round;
    bool receive;
    int64_t distance;
    uint32_t message;
  };

  /// Loads what the sides after the first will need. Messages are ordered by round and flows by sender, so that those
  /// of a rank lie far apart; waiting for memory would be a fifth of the compiler's time in a job of a million
  /// messages.
  void prefetch(llvm::ArrayRef<Side> sides) const {
    constexpr size_t kMessage = 16, kFlow = 12, kRange = 8, kDescriptor = 4; // sides ahead
    constexpr size_t kMaxDescriptors = 8;
    if (sides.size() <= kMessage)
      return;
    const Message &message = messages_[sides[kMessage].message];
    __builtin_prefetch(&message);
    __builtin_prefetch(reinterpret_cast<const char *>(&message + 1) - 1); // it lies in two cache lines
    auto flow = [&](size_t ahead) { return messages_[sides[ahead].message].grants[0].flow; };
    const uint32_t next = flow(kFlow);
    __builtin_prefetch(&firstRange_[next]);
    __builtin_prefetch(&flows_[next]);
    __builtin_prefetch(&keys_[next]);
    __builtin_prefetch(&ranges_[firstRange_[flow(kRange)]]);
    const llvm::ArrayRef<FlowRange> ranges = rangesOf(flow(kDescriptor));
    for (const FlowRange &range : ranges.take_front(kMaxDescriptors))
      __builtin_prefetch(&descriptorOf(range.descriptor));
  }

  /// Makes a send and a receive for each message. In a round, sends precede receives; sends are ordered by distance
  /// to the next higher ranks, receives by distance to the next lower ranks. A send of forwarded bytes waits for the
  /// receives that brought them. The steps of a phase follow those of earlier phases.
  void messageSteps() {
    std::vector<std::vector<Side>> sides(layout_.world);
    for (uint32_t m = 0; m < messages_.size(); ++m) {
      const Message &message = messages_[m];
      const int64_t distance = (message.to - message.from + layout_.world) % layout_.world;
      sides[message.from].push_back({message.round, false, distance, m});
      sides[message.to].push_back({message.round, true, distance, m});
    }
    receiveStep_.assign(messages_.size(), UINT32_MAX);
    for (int32_t rank = 0; rank < layout_.world; ++rank) {
      std::vector<Step> &steps = module_.schedule.ranks[rank].steps;
      std::sort(sides[rank].begin(), sides[rank].end(), [](const Side &a, const Side &b) {
        return std::tie(a.round, a.receive, a.distance, a.message) <
               std::tie(b.round, b.receive, b.distance, b.message);
      });
      steps.reserve(steps.size() + sides[rank].size());
      auto side = sides[rank].begin();
      schema::ArenaUse held;            // the steps that use the arena for relayed bytes
      auto until = [&](int64_t round) { // appends the messages of rounds up to this one
        for (; side != sides[rank].end() && side->round <= round; ++side) {
          prefetch(llvm::ArrayRef(sides[rank]).drop_front(static_cast<size_t>(side - sides[rank].begin())));
          const Message &message = messages_[side->message];
          Step step;
          step.kind = side->receive ? StepKind::recv : StepKind::send;
          step.round = message.round;
          step.peer = side->receive ? message.from : message.to;
          step.message = side->message;
          step.bytes = message.bytes;
          step.chunk = message.chunk;
          for (const Grant &grant : message.grants)
            addOperands(rank, grant, held, step);
          phaseSteps_.append(rank, std::move(step), keys_[message.grants[0].flow].when);
          if (side->receive)
            receiveStep_[side->message] = static_cast<uint32_t>(steps.size() - 1);
        }
      };
      int64_t before = -1;
      auto known = lastRound_.begin();
      for (auto &[when, locals] : later_[rank]) {
        for (; known != lastRound_.end() && known->first < when; ++known)
          before = std::max<int64_t>(before, known->second);
        const bool rounds = known != lastRound_.end() && known->first == when;
        until(before);
        for (Step &step : locals) {
          step.round = static_cast<uint32_t>(std::max<int64_t>(rounds ? before + 1 : before, 0));
          phaseSteps_.append(rank, std::move(step), when);
        }
        if (rounds)
          until(known->second);
        phaseSteps_.finish(rank, when, static_cast<uint32_t>(std::max<int64_t>(rounds ? known->second : before, 0)));
      }
      until(INT64_MAX);
      freeMemory(sides[rank]); // the steps of the next ranks take its place
    }
  }

  /// Adds the operands of a grant to a send or receive, and the steps that it waits for. `held`: the steps of the rank
  /// that use the arena for relayed bytes.
  void addOperands(int32_t rank, const Grant &grant, schema::ArenaUse &held, Step &step) {
    const bool receive = step.kind == StepKind::recv;
    const llvm::ArrayRef<FlowRange> ranges = rangesOf(grant.flow);
    const auto first = std::partition_point(ranges.begin(), ranges.end(),
                                            [&](const FlowRange &range) { return range.begin < grant.begin; });
    const auto last =
        std::partition_point(first, ranges.end(), [&](const FlowRange &range) { return range.begin < grant.end; });
    Operands &operands = receive ? step.outputs : step.inputs;
    operands.reserve(operands.size() + static_cast<size_t>(last - first));
    const int32_t after = flows_[grant.flow].hops[grant.hop].after;
    const int64_t routed = static_cast<int64_t>(grant.hop) - hopsBefore(grant.flow);
    const bool onRoute = routed >= 0, relayed = keys_[grant.flow].relay >= 0 && grant.hop == (receive ? 0 : 1);
    for (auto range = first; range != last; ++range) {
      const Descriptor &d = descriptorOf(range->descriptor);
      if (relayed) {
        const int64_t begin = relays_.base(grant.flow) + range->begin, end = begin + bytesOf(shapes_[d.shape]);
        operands.push_back({0, packed(rank, d.shape), begin});
        for (uint32_t earlier : held.take(begin, end, static_cast<uint32_t>(module_.schedule.ranks[rank].steps.size())))
          step.after.push_back(earlier); // a send waits for its bytes, a receive for its memory
      } else if (receive)
        operands.push_back(onRoute ? forwarded(rank, d, routeHop(grant).to) : output(rank, d));
      else
        operands.push_back(onRoute ? forwarded(rank, d, routeHop(grant).from) : input(rank, d));
    }
    if (receive || !onRoute)
      return;
    if (after < 0) {
      step.after.push_back(readStep_[grant.flow]);
      return;
    }
    const auto &list = arrivals_[grant.flow][after]; // ascending ends
    auto bringing = std::upper_bound(list.begin(), list.end(), grant.begin,
                                     [](int64_t begin, const auto &each) { return begin < each.first; });
    for (; bringing != list.end(); ++bringing) {
      step.after.push_back(receiveStep_[bringing->second]);
      if (bringing->first >= grant.end)
        break;
    }
  }

  Operand input(int32_t rank, const Descriptor &d) {
    return {firstBuffer_[rank].at({0, d.source}) + d.sourceInstance, shape(rank, d.shape, false), d.sourceOffset};
  }
  Operand output(int32_t rank, const Descriptor &d) {
    if (const StagedRange *staged = stagedRanges_.find(d.endpoint, d.target, d.targetInstance, d.targetOffset))
      return {0, shape(rank, d.shape, true), staged->offset + d.targetOffset - staged->begin};
    return {firstBuffer_[rank].at({d.endpoint, d.target}) + d.targetInstance, shape(rank, d.shape, true),
            d.targetOffset};
  }
  /// The hop of the flow's route that a grant is sent on.
  const Hop &routeHop(const Grant &grant) const {
    return module_.transfers.routes[keys_[grant.flow].route][grant.hop - hopsBefore(grant.flow)];
  }
  /// The number of hops of a flow before its route.
  uint32_t hopsBefore(size_t flow) const { return read(flow) ? 0 : keys_[flow].relay >= 0 ? 2 : 1; }
  /// The target's operand on another mesh rank of the route: the same positions of the same param.
  Operand forwarded(int32_t rank, const Descriptor &d, int32_t meshRank) {
    if (meshRank == d.target)
      return output(rank, d);
    const BufferRange &range = bufferRangeOf(rankOf(d.endpoint, d.target), d);
    const auto &ranges = module_.schedule.ranks[rank].buffers;
    const auto same = std::find_if(ranges.begin(), ranges.end(), [&](const BufferRange &r) {
      return r.endpoint == d.endpoint && r.meshRank == meshRank && r.param == range.param;
    });
    const uint32_t instance =
        firstBuffer_[rankOf(d.endpoint, d.target)].at({d.endpoint, d.target}) + d.targetInstance - range.first;
    return {same->first + instance, shape(rank, d.shape, true), d.targetOffset};
  }
  const BufferRange &bufferRangeOf(int32_t rank, const Descriptor &d) const {
    const uint32_t buffer = firstBuffer_[rank].at({d.endpoint, d.target}) + d.targetInstance;
    const auto &ranges = module_.schedule.ranks[rank].buffers;
    return *std::prev(std::upper_bound(ranges.begin(), ranges.end(), buffer,
                                       [](uint32_t b, const BufferRange &r) { return b < r.first; }));
  }

  /// The number, on a rank, of the operand shape of one side of a descriptor's shape.
  uint32_t shape(int32_t rank, uint32_t number, bool target) {
    auto [at, added] = operandNumbers_[rank].try_emplace(number * 2 + target);
    if (added) {
      const Shape &shape = shapes_[number];
      OperandShape operand{shape.rowBytes, {}};
      for (const Loop &loop : shape.loops)
        operand.loops.push_back(target ? OperandLoop{loop.count, loop.targetStride, loop.targetStep}
                                       : OperandLoop{loop.count, loop.sourceStride, loop.sourceStep});
      at->second = operandShapes_[rank].intern(std::move(operand));
    }
    return at->second;
  }

  /// The same for bytes in a relay's arena: the same loops, with contiguous rows.
  uint32_t packed(int32_t rank, uint32_t number) {
    const Shape &shape = shapes_[number];
    OperandShape operand{shape.rowBytes, {}};
    int64_t stride = bytesOf(shape);
    for (const Loop &loop : shape.loops)
      operand.loops.push_back({loop.count, stride /= loop.count, 0});
    return operandShapes_[rank].intern(std::move(operand));
  }

  Module &module_;
  const Layout &layout_;
  Interner<Shape> shapes_;
  DescriptorCutter cutter_;
  Relays relays_;
  StagedRanges stagedRanges_;
  PhaseSteps phaseSteps_;
  std::vector<bool> hasViews_; // by endpoint: whether params have quantized views
  std::vector<std::map<EpochPhase, std::vector<Step>>>
      later_; // by rank: phases after the first, with their local steps
  std::map<EpochPhase, uint32_t> lastRound_;
  std::vector<LocalDescriptor> local_;
  std::vector<FlowKey> keys_;      // by flow
  std::vector<uint32_t> readStep_; // by flow: the step that reads it from files
  std::vector<Flow> flows_;
  std::vector<Descriptor> cut_;                                                  // numbered after those of the module
  std::vector<uint32_t> numbers_;                                                // of descriptors, flow after flow
  std::vector<size_t> firsts_;                                                   // by flow: its first in numbers_
  std::vector<FlowRange> ranges_;                                                // flow after flow
  std::vector<size_t> firstRange_;                                               // by flow: its first range
  std::vector<std::vector<std::vector<std::pair<int64_t, uint32_t>>>> arrivals_; // by flow and hop: (end, message)
  std::vector<Message> messages_;
  std::vector<uint32_t> receiveStep_; // by message: the number of its receive among the steps of its rank
  uint32_t rounds_ = 0;
  std::vector<std::map<std::pair<int64_t, int64_t>, uint32_t>> firstBuffer_; // by rank: (endpoint, mesh rank) -> buffer
  std::vector<Interner<OperandShape>> operandShapes_;
  std::vector<llvm::SmallDenseMap<uint32_t, uint32_t, 4>>
      operandNumbers_; // by rank: (descriptor shape, side) -> operand shape
};

} // namespace

llvm::Error schedule(Module &module) { return Scheduler(module).run(); }

} // namespace reshard
