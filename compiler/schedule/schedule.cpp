// SPDX-License-Identifier: Apache-2.0
// schedule: turns descriptors into the steps of each rank: fills with zeros, local copies, sends and receives. Remote
// descriptors with the same source, target and route form a flow. assignRounds (rounds.h) assigns the bytes of flows to
// rounds, and descriptors are cut where messages end. Epochs (--keep) are scheduled one after the other, so that the
// rounds of earlier epochs do not change.

#include "compiler/pass.h"
#include "compiler/resolve/interner.h"
#include "compiler/schedule/dependency_levels.h"
#include "compiler/schedule/descriptor_cutter.h"
#include "compiler/schedule/divide_files.h"
#include "compiler/schedule/flow_descriptors.h"
#include "compiler/schedule/periods.h"
#include "compiler/schedule/rank_copies.h"
#include "compiler/schedule/rank_schedules.h"
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
#include <array>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

class Scheduler : public RankSchedules {
public:
  explicit Scheduler(Module &module)
      : module_(module), layout_(module.layout), copies_(module.layout), cutter_(shapes_),
        descriptors_(module.transfers.descriptors, shapes_, cutter_), relays_(module.layout, shapes_, cutter_),
        stagedRanges_(module.layout), phaseSteps_(module.layout, ranks_, stagedRanges_, operandShapes_),
        routeNumbers_(module.layout, module.transfers.routes) {
    for (const Shape &shape : module.transfers.shapes)
      shapes_.intern(shape);
    ranks_.resize(layout_.world);
    firstBuffer_.resize(layout_.world);
    operandShapes_.resize(layout_.world);
    operandNumbers_.resize(layout_.world);
    std::vector<std::vector<BufferRange>> all = buffers(layout_);
    for (int32_t rank = 0; rank < layout_.world; ++rank) {
      RankSchedule &schedule = ranks_[rank];
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
    for (const RankSchedule &rank : ranks_)
      for (const BufferRange &range : rank.buffers)
        if (const auto &view = layout_.endpoints[range.endpoint].params[range.param].view; range.endpoint > 0 && view) {
          phaseSteps_.watch(rank.rank);
          if (view->kind == ViewKind::amax)
            later_[rank.rank][{layout_.endpoints[range.endpoint].epoch(range.meshRank), 0}];
        }
  }

  /// Assigns all bytes to messages, and these to rounds.
  llvm::Error plan() {
    const bool anyStaged =
        std::any_of(layout_.endpoints.begin(), layout_.endpoints.end(), [](const Endpoint &endpoint) {
          return std::any_of(endpoint.params.begin(), endpoint.params.end(),
                             [](const Param &param) { return param.view && param.view->staged; });
        });
    if (llvm::Error error = stagedRanges_.plan(anyStaged ? remoteBytes() : 0))
      return error;
    separate();
    relay();
    repeatLocal();
    if (llvm::Error error = makeRounds())
      return error;
    const uint64_t messages = messageCount() * static_cast<uint64_t>(copies_.copies().sources());
    if (messages > UINT32_MAX)
      return llvm::createStringError("the ranks exchange " + std::to_string(messages) +
                                     " messages, expected at most 4294967295; use fewer ranks");
    sortLocal();
    sides_ = messageSides(messages_, periods_ ? &*periods_ : nullptr, periodRounds_, layout_.world);
    module_.schedule.messages = static_cast<uint32_t>(messages);
    module_.schedule.rounds = local_.empty() ? rounds_ : std::max(rounds_, 1u);
    return llvm::Error::success();
  }

  /// After plan(): whether no step of a rank depends on steps of other ranks, and no limit of the staging can be
  /// exceeded, so that get() can make each rank on its own. The steps then have dependency level 0.
  bool oneByOne() const {
    return layout_.stagingLimit == 0 &&
           std::all_of(later_.begin(), later_.end(), [](const auto &steps) { return steps.empty(); }) &&
           std::none_of(hasViews_.begin(), hasViews_.end(), [](bool has) { return has; }) &&
           std::all_of(keys_.begin(), keys_.end(),
                       [](const FlowKey &at) { return at.when == EpochPhase{} && !at.reads(); }) &&
           std::all_of(flows_.begin(), flows_.end(), [](const Flow &flow) { return flow.hops.size() == 1; });
  }

  /// Prepares for get().
  void prepare() {
    if (periods_)
      collectRepeated();
    if (repeated_.empty())
      receiveStep_.assign(messageCount(), UINT32_MAX);
  }

  /// In place of prepare(): the steps of all ranks. Nothing else may be called afterwards.
  llvm::Expected<std::unique_ptr<RankSchedules>> makeAll() {
    for (int32_t rank = 0; rank < layout_.world; ++rank)
      localSteps(rank);
    readSteps();
    receiveStep_.assign(messageCount(), UINT32_MAX);
    for (int32_t rank = 0; rank < layout_.world; ++rank) {
      messageSteps(rank);
      freeMemory(sides_[rank]); // the steps of the next ranks take its place
    }
    for (RankSchedule &rank : ranks_) {
      rank.shapes = takeShapes(rank.rank);
      rank.arenaBytes = stagedRanges_.bytes(rank.rank) + relays_.held(rank.rank);
      if (!rank.steps.empty())
        module_.schedule.rounds = std::max(module_.schedule.rounds, 1u);
    }
    Schedule all{module_.schedule.rounds, module_.schedule.messages, std::move(ranks_)};
    const uint64_t levels = assignDependencyLevels(all);
    ranks_ = std::move(all.ranks);
    if (levels > schema::kMaxLevels)
      return llvm::createStringError("the steps have " + std::to_string(levels) +
                                     " dependency levels, expected at most " + std::to_string(schema::kMaxLevels) +
                                     "; raise options.staging, or choose another options.exchange");
    repeatSources();
    return std::make_unique<StoredRanks>(std::move(ranks_));
  }

  size_t size() const override { return ranks_.size(); }

  const RankSchedule &get(size_t number, RankSchedule &schedule) override {
    const auto rank = static_cast<int32_t>(number);
    const auto [first, copy] = copies_.first(rank);
    std::vector<Step> used = std::move(schedule.steps);
    {
      const std::lock_guard lock(mutexes_[static_cast<size_t>(first) % mutexes_.size()]);
      localSteps(first);
      if (repeated_.empty())
        messageSteps(first);
      else
        repeatedSteps(first, used);
      schedule.steps = std::exchange(ranks_[first].steps, {});
      schedule.shapes = takeShapes(first);
    }
    schedule.rank = rank;
    schedule.buffers = ranks_[rank].buffers;
    schedule.arenaBytes = 0;
    repeat(copy, schedule.steps);
    if (staged_)
      assignRankStaging(schedule, layout_);
    return schedule;
  }

  size_t operands(size_t rank) const override {
    constexpr size_t kOfMessage = 4;
    return sides_[copies_.first(static_cast<int32_t>(rank)).rank].size() * kOfMessage;
  }

  llvm::Error assignStaging(const Layout &) override {
    staged_ = true; // by get(); there is no limit
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
                   routeNumbers_(d.endpoint, d.route)};
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

  /// Separates local descriptors from the descriptors of flows. Copies from files to files are divided among the ranks.
  void separate() {
    const std::vector<Descriptor> &whole = module_.transfers.descriptors;
    std::vector<uint32_t> remote;
    std::vector<Descriptor> files;
    auto put = [&](uint32_t number) {
      const Descriptor &d = descriptors_[number];
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
        put(descriptors_.addCut(d));
    }
    divideFiles(files, layout_.world, shapes_, [&](const Descriptor &d) { return granule(d); }, local_);
    sortUnlessSorted(remote, [&](uint32_t a, uint32_t b) {
      return flowKey(descriptors_[a]).fields() < flowKey(descriptors_[b]).fields();
    });
    for (uint32_t number : remote)
      addToFlow(flowKey(descriptors_[number]), number);
  }

  /// Appends a descriptor to the last flow, or to a new one if it has another key.
  void addToFlow(const FlowKey &at, uint32_t number) {
    const Descriptor &d = descriptors_[number];
    if (keys_.empty() || keys_.back() != at) {
      keys_.push_back(at);
      descriptors_.beginFlow();
      Flow &flow = flows_.emplace_back();
      if (at.relay >= 0)
        flow.hops = {{at.source, at.relay, -1}, {at.relay, at.target, 0}};
      else if (at.source != at.target)
        flow.hops.push_back({at.source, at.target, -1});
      if (d.route >= 0)
        addRoute(module_.transfers.routes[d.route], d.endpoint, flow);
    }
    flows_.back().bytes += bytesOf(shapes_[d.shape]);
    descriptors_.add(number);
  }

  /// Replaces flows of overloaded NICs by flows that are in part sent over relays (spread.h). The source ranks of a
  /// pool are no relays: they do not receive.
  void relay() {
    if (layout_.pool() || layout_.topology.ranksPerNode == 0)
      return;
    std::vector<std::pair<FlowKey, Descriptor>> all =
        relays_.cut(keys_, flows_, descriptors_.firsts(), descriptors_.all());
    if (all.empty())
      return;
    keys_.clear();
    flows_.clear();
    descriptors_.clear();
    sortUnlessSorted(all, [](const auto &a, const auto &b) { return a.first.fields() < b.first.fields(); });
    for (const auto &[at, d] : all)
      addToFlow(at, descriptors_.addCut(d));
    relays_.layOut(keys_, flows_);
  }

  /// Repeats the local descriptors of the first copy of the target for the other copies that the first copy of the
  /// source serves.
  void repeatLocal() {
    if (copies_.copies().each() == 1)
      return;
    std::vector<LocalDescriptor> local;
    for (const auto &[d, rank] : local_)
      for (int64_t copy = 0; copy < copies_.copies().each(); ++copy)
        local.push_back({d, copies_.target(rank, copy)});
    local_ = std::move(local);
  }

  /// Repeats the flows to the first copy of the target for the other copies that the first copy of the source serves.
  /// They share their lists of descriptors.
  void repeatFlows() {
    const auto each = static_cast<size_t>(copies_.copies().each());
    std::vector<FlowKey> keys;
    std::vector<Flow> flows;
    std::vector<uint32_t> lists;
    keys.reserve(keys_.size() * each);
    flows.reserve(keys_.size() * each);
    lists.reserve(keys_.size() * each);
    for (size_t first = 0, last = 0; first < keys_.size(); first = last) { // the flows of one source
      while (last < keys_.size() && keys_[last].source == keys_[first].source)
        ++last;
      for (uint32_t copy = 0; copy < each; ++copy)
        for (size_t flow = first; flow < last; ++flow) {
          keys.push_back(keys_[flow]);
          keys.back().target = copies_.target(keys_[flow].target, copy);
          flows.push_back(flows_[flow]);
          flows.back().hops[0].to = keys.back().target;
          lists.push_back(static_cast<uint32_t>(flow));
        }
    }
    keys_ = std::move(keys);
    flows_ = std::move(flows);
    descriptors_.repeat(std::move(lists));
  }

  /// Makes rounds that repeat for each copy of the target; returns false if they would take too long.
  bool makePeriods(const RoundLimits &limits) {
    periods_.emplace(flows_, static_cast<uint32_t>(copies_.copies().each()),
                     [&](int32_t rank, uint32_t copy) { return copies_.target(rank, copy); });
    std::optional<std::vector<Message>> first = periods_->first(layout_.topology, limits, cutsOf(0, flows_.size()));
    if (!first) {
      periods_.reset();
      return false;
    }
    messages_ = std::move(*first);
    for (const Message &message : messages_)
      periodRounds_ = std::max(periodRounds_, message.round + message.rounds);
    descriptors_.cut(messages_);
    rounds_ = periodRounds_ * periods_->count();
    lastRound_[EpochPhase{}] = rounds_ - 1;
    return true;
  }

  /// Repeats the steps of first ranks for the other copies of the source.
  void repeatSources() {
    for (int32_t rank = 0; rank < layout_.world; ++rank)
      if (const auto [first, copy] = copies_.first(rank); copy > 0) {
        ranks_[rank].shapes = ranks_[first].shapes;
        ranks_[rank].steps = ranks_[first].steps;
        ranks_[rank].arenaBytes = ranks_[first].arenaBytes;
        repeat(copy, ranks_[rank].steps);
      }
  }

  /// Turns steps of a first rank into steps of the rank that repeats them in a copy of the source.
  void repeat(int64_t copy, std::vector<Step> &steps) const {
    if (copy == 0)
      return;
    for (Step &step : steps)
      if (step.peer >= 0) {
        step.peer = copies_.repeating(step.peer, copy);
        step.message += static_cast<uint32_t>(copy * static_cast<int64_t>(messageCount()));
      }
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
    for (const RankSchedule &rank : ranks_)
      staged = std::max(staged,
                        stagedBytes(layout_, rank.buffers) + stagedRanges_.bytes(rank.rank) + relays_.held(rank.rank));
    llvm::Expected<RoundLimits> limits = roundLimits(flows_, layout_, staged, copies_.copies().each());
    if (!limits)
      return limits.takeError();
    if (copies_.copies().each() > 1 && !flows_.empty()) {
      if (makePeriods(*limits))
        return llvm::Error::success();
      repeatFlows();
    }
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
    descriptors_.cut(messages_);
    noteArrivals();
    return llvm::Error::success();
  }

  /// The messages of flows [first, last), counted from round 0 and flow 0.
  std::vector<Message> roundsOf(size_t first, size_t last, const RoundLimits &limits) {
    return assignRounds(llvm::ArrayRef(flows_).slice(first, last - first), layout_.topology, limits,
                        cutsOf(first, last));
  }

  /// The positions at which flows [first, last), counted from 0, may be cut.
  DescriptorCuts cutsOf(size_t first, size_t last) const {
    return descriptors_.cuts(first, last,
                             [&](const Descriptor &d) { return hasViews_[d.endpoint] ? blockBytes(d) : 0; });
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

  /// Orders local descriptors by rank.
  void sortLocal() {
    sortUnlessSorted(local_, [](const LocalDescriptor &a, const LocalDescriptor &b) { return a.rank < b.rank; });
    firstLocal_.assign(static_cast<size_t>(layout_.world) + 1, 0);
    for (const LocalDescriptor &local : local_)
      ++firstLocal_[static_cast<size_t>(local.rank) + 1];
    std::partial_sum(firstLocal_.begin(), firstLocal_.end(), firstLocal_.begin());
  }

  /// Makes one fill and one copy step of a rank for each phase. They run in the first round of their phase.
  void localSteps(int32_t rank) {
    std::map<EpochPhase, Step> fills, copies;
    for (size_t i = firstLocal_[rank]; i < firstLocal_[rank + 1]; ++i) {
      const Descriptor &d = local_[i].descriptor;
      const FlowKey at = flowKey(d);
      const EpochPhase when = at.when.phase > 0 || hasViews_[d.endpoint] ? at.when : EpochPhase{0, 0};
      Step &step = (d.source < 0 ? fills : copies)[when];
      step.kind = d.source < 0 ? StepKind::fill : StepKind::copy;
      if (d.source >= 0)
        step.inputs.push_back(numbered(rank, input(rank, d)));
      step.outputs.push_back(numbered(rank, output(rank, d)));
      step.bytes += bytesOf(shapes_[d.shape]);
    }
    for (const StagedRange &staged : stagedRanges_.of(rank)) // also phases without local steps must be finished
      later_[rank][{layout_.endpoints[staged.endpoint].epoch(staged.meshRank), staged.phase}];
    for (auto *kind : {&fills, &copies})
      for (auto &[when, step] : *kind)
        if (when == EpochPhase{0, 0})
          phaseSteps_.append(rank, std::move(step), {});
        else
          later_[rank][when].push_back(std::move(step));
  }

  /// Makes one copy step for each flow that a rank reads from files to forward it, in the first round.
  void readSteps() {
    readStep_.resize(flows_.size());
    for (size_t s = 0; s < flows_.size(); ++s) {
      if (!read(s))
        continue;
      readStep_[s] = static_cast<uint32_t>(ranks_[keys_[s].source].steps.size());
      Step step;
      step.bytes = flows_[s].bytes;
      for (const FlowRange &range : descriptors_.ranges(s)) {
        const int32_t rank = keys_[s].source;
        step.inputs.push_back(numbered(rank, input(rank, descriptors_[range.descriptor])));
        step.outputs.push_back(numbered(rank, output(rank, descriptors_[range.descriptor])));
      }
      phaseSteps_.append(keys_[s].source, std::move(step), {});
    }
  }

  /// Whether the first rank of a flow reads it from files.
  bool read(size_t flow) const { return keys_[flow].reads(); }

  /// The number of messages of all periods.
  size_t messageCount() const { return messages_.size() * (periods_ ? periods_->count() : 1); }
  /// The message of the first period that a message repeats.
  const Message &messageOf(uint32_t number) const { return messages_[number % messages_.size()]; }

  /// Loads what the sides after number `i` of a rank will need, and the first ones of the next rank. Messages are
  /// ordered by round and flows by sender, so that those of a rank lie far apart; waiting for memory would be a fifth
  /// of the compiler's time in a job of a million messages. Inlined, because GCC removes a call of a function that does
  /// nothing else.
  LLVM_ATTRIBUTE_ALWAYS_INLINE void prefetch(size_t rank, size_t i) const {
    constexpr size_t kMessage = 16, kFlow = 12, kRange = 8, kDescriptor = 4; // sides ahead
    constexpr size_t kMaxDescriptors = 8;
    auto messageAhead = [&](size_t ahead) -> const Message * { // null if neither this rank nor the next one has it
      const size_t own = sides_[rank].size();
      if (i + ahead < own)
        return &messageOf(sides_[rank][i + ahead].message);
      const size_t next = i + ahead - own;
      return rank + 1 < sides_.size() && next < sides_[rank + 1].size() ? &messageOf(sides_[rank + 1][next].message)
                                                                        : nullptr;
    };
    if (const Message *const message = messageAhead(kMessage)) {
      __builtin_prefetch(message);
      __builtin_prefetch(reinterpret_cast<const char *>(message + 1) - 1); // it lies in two cache lines
    }
    if (const Message *const message = messageAhead(kFlow)) {
      const uint32_t flow = message->grants[0].flow;
      descriptors_.prefetchFlow(flow);
      __builtin_prefetch(&flows_[flow]);
      __builtin_prefetch(&keys_[flow]);
    }
    if (const Message *const message = messageAhead(kRange))
      descriptors_.prefetchRanges(message->grants[0].flow);
    if (const Message *const message = messageAhead(kDescriptor))
      descriptors_.prefetchDescriptors(message->grants[0].flow, kMaxDescriptors);
  }

  /// Makes a send for each message from a rank, and a receive for each message to it. A send of forwarded bytes waits
  /// for the receives that brought them. The steps of a phase follow the steps of earlier phases.
  void messageSteps(int32_t rank) {
    const std::vector<MessageSide> &sides = sides_[rank];
    std::vector<Step> &steps = ranks_[rank].steps;
    steps.reserve(steps.size() + sides.size());
    auto side = sides.begin();
    schema::ArenaUse held;            // the steps that use the arena for relayed bytes
    auto until = [&](int64_t round) { // appends the messages of rounds up to this one
      for (; side != sides.end() && side->round <= round; ++side) {
        prefetch(rank, static_cast<size_t>(side - sides.begin()));
        const Message &message = messageOf(side->message);
        Step step = side->step(rank, message, layout_.world);
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
  }

  /// The ranges of a flow that a grant sends.
  llvm::ArrayRef<FlowRange> rangesOf(const Grant &grant) const {
    const llvm::ArrayRef<FlowRange> ranges = descriptors_.ranges(grant.flow);
    const auto first = std::partition_point(ranges.begin(), ranges.end(),
                                            [&](const FlowRange &range) { return range.begin < grant.begin; });
    const auto last =
        std::partition_point(first, ranges.end(), [&](const FlowRange &range) { return range.begin < grant.end; });
    return {first, last};
  }

  /// Collects the operands of the messages of the first period. Those of all periods are equal: a sender repeats its
  /// messages, and the copies of a target have equal buffers. The shapes are numbered for each sender, and for each
  /// rank of the first copy of the target. If there were very many, the copies would be few: then it collects nothing.
  void collectRepeated() {
    constexpr size_t kMaxOperands = 2 << 20; // an operand has 16 bytes
    size_t count = 0;
    for (const Message &message : messages_)
      for (const Grant &grant : message.grants)
        count += 2 * rangesOf(grant).size();
    if (count > kMaxOperands)
      return;
    repeated_.reserve(count);
    for (const Message &message : messages_)
      for (const bool receive : {false, true}) {
        firstRepeated_.push_back(static_cast<uint32_t>(repeated_.size()));
        for (const Grant &grant : message.grants)
          for (const FlowRange &range : rangesOf(grant)) {
            const Descriptor &d = descriptors_[range.descriptor];
            repeated_.push_back(receive ? numbered(keys_[grant.flow].target, output(message.to, d))
                                        : numbered(message.from, input(message.from, d)));
          }
      }
    firstRepeated_.push_back(static_cast<uint32_t>(repeated_.size()));
    for (int32_t rank = 0; rank < layout_.world; ++rank)
      repeatedShapes_.push_back(takeShapes(rank));
  }

  /// Makes what messageSteps() makes, from what collectRepeated() collected: no step waits for another. `used`: steps
  /// whose memory of operands is reused.
  void repeatedSteps(int32_t rank, std::vector<Step> &used) {
    const std::vector<OperandShape> &shapes = repeatedShapes_[copies_.inFirstTarget(rank)];
    std::vector<uint32_t> numbers(shapes.size(), UINT32_MAX); // by shape: its number on this rank
    std::vector<Step> &steps = ranks_[rank].steps;
    steps.reserve(steps.size() + sides_[rank].size());
    for (const MessageSide &side : sides_[rank]) {
      const size_t number = steps.size(), repeated = 2 * (side.message % messages_.size()) + side.receive;
      Step &step = steps.emplace_back(side.step(rank, messageOf(side.message), layout_.world));
      Operands &operands = side.receive ? step.outputs : step.inputs;
      if (number < used.size())
        operands = std::move(side.receive ? used[number].outputs : used[number].inputs);
      operands.assign(repeated_.begin() + firstRepeated_[repeated], repeated_.begin() + firstRepeated_[repeated + 1]);
      for (Operand &operand : operands) {
        uint32_t &shape = numbers[operand.shape];
        if (shape == UINT32_MAX)
          shape = operandShapes_[rank].intern(shapes[operand.shape]);
        operand.shape = shape;
      }
    }
  }

  /// The operand shapes of a rank, which has none afterwards.
  std::vector<OperandShape> takeShapes(int32_t rank) {
    operandNumbers_[rank].clear();
    return std::move(std::exchange(operandShapes_[rank], {})).take();
  }

  /// Adds the operands of a grant to a send or receive, and the steps that it waits for. `held`: the steps of the rank
  /// that use the arena for relayed bytes.
  void addOperands(int32_t rank, const Grant &grant, schema::ArenaUse &held, Step &step) {
    const bool receive = step.kind == StepKind::recv;
    const llvm::ArrayRef<FlowRange> ranges = rangesOf(grant);
    Operands &operands = receive ? step.outputs : step.inputs;
    operands.reserve(operands.size() + ranges.size());
    const int32_t after = flows_[grant.flow].hops[grant.hop].after;
    const int64_t routed = static_cast<int64_t>(grant.hop) - hopsBefore(grant.flow);
    const bool onRoute = routed >= 0, relayed = keys_[grant.flow].relay >= 0 && grant.hop == (receive ? 0 : 1);
    for (const FlowRange &range : ranges) {
      const Descriptor &d = descriptors_[range.descriptor];
      if (relayed) {
        const int64_t begin = relays_.base(grant.flow) + range.begin, end = begin + bytesOf(shapes_[d.shape]);
        operands.push_back({0, packed(rank, d.shape), begin});
        // A send waits for its bytes, a receive for its memory.
        held.take(begin, end, static_cast<uint32_t>(ranks_[rank].steps.size()),
                  [&](uint32_t earlier) { step.after.push_back(earlier); });
      } else if (receive)
        operands.push_back(numbered(rank, onRoute ? forwarded(rank, d) : output(rank, d)));
      else
        operands.push_back(numbered(rank, onRoute ? forwarded(rank, d) : input(rank, d)));
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

  /// The number of one side of a descriptor's shape. input(), output() and forwarded() return it as the shape of an
  /// operand; numbered() replaces it.
  static uint32_t sideShape(uint32_t shape, bool target) { return shape * 2 + target; }
  Operand input(int32_t rank, const Descriptor &d) const {
    return {firstBuffer_[rank].at({0, d.source}) + d.sourceInstance, sideShape(d.shape, false), d.sourceOffset};
  }
  Operand output(int32_t rank, const Descriptor &d) const {
    if (const StagedRange *staged = stagedRanges_.find(d.endpoint, d.target, d.targetInstance, d.targetOffset))
      return {0, sideShape(d.shape, true), staged->offset + d.targetOffset - staged->begin};
    const int32_t meshRank = copies_.targetOn(rank) < 0 ? d.target : copies_.targetOn(rank); // in its own copy
    return {firstBuffer_[rank].at({d.endpoint, meshRank}) + d.targetInstance, sideShape(d.shape, true), d.targetOffset};
  }
  /// The number of hops of a flow before its route.
  uint32_t hopsBefore(size_t flow) const { return read(flow) ? 0 : keys_[flow].relay >= 0 ? 2 : 1; }
  /// The target's operand on another rank of the route, which has one mesh rank of the target: the same positions of
  /// the same param.
  Operand forwarded(int32_t rank, const Descriptor &d) const {
    if (rank == rankOf(d.endpoint, d.target))
      return output(rank, d);
    const BufferRange &range = bufferRangeOf(rankOf(d.endpoint, d.target), d);
    const auto &ranges = ranks_[rank].buffers;
    const auto same = std::find_if(ranges.begin(), ranges.end(), [&](const BufferRange &r) {
      return r.endpoint == d.endpoint && r.param == range.param;
    });
    const uint32_t instance =
        firstBuffer_[rankOf(d.endpoint, d.target)].at({d.endpoint, d.target}) + d.targetInstance - range.first;
    return {same->first + instance, sideShape(d.shape, true), d.targetOffset};
  }
  const BufferRange &bufferRangeOf(int32_t rank, const Descriptor &d) const {
    const uint32_t buffer = firstBuffer_[rank].at({d.endpoint, d.target}) + d.targetInstance;
    const auto &ranges = ranks_[rank].buffers;
    return *std::prev(std::upper_bound(ranges.begin(), ranges.end(), buffer,
                                       [](uint32_t b, const BufferRange &r) { return b < r.first; }));
  }

  /// Replaces the sideShape() of an operand by the number of its shape on a rank.
  Operand numbered(int32_t rank, Operand operand) {
    auto [at, added] = operandNumbers_[rank].try_emplace(operand.shape);
    if (added) {
      const Shape &shape = shapes_[operand.shape / 2];
      OperandShape result{shape.rowBytes, {}};
      for (const Loop &loop : shape.loops)
        result.loops.push_back(operand.shape % 2 == 1 ? OperandLoop{loop.count, loop.targetStride, loop.targetStep}
                                                      : OperandLoop{loop.count, loop.sourceStride, loop.sourceStep});
      at->second = operandShapes_[rank].intern(std::move(result));
    }
    operand.shape = at->second;
    return operand;
  }

  /// The number, on a rank, of the shape of an operand in a relay's arena: the same loops, with contiguous rows.
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
  const RankCopies copies_;
  std::vector<RankSchedule> ranks_; // their buffers; while a rank is made, also its steps
  bool staged_ = false;             // whether get() assigns staging
  Interner<Shape> shapes_;
  DescriptorCutter cutter_;
  FlowDescriptors descriptors_;
  Relays relays_;
  StagedRanges stagedRanges_;
  PhaseSteps phaseSteps_;
  const RouteNumbers routeNumbers_;
  std::vector<bool> hasViews_; // by endpoint: whether params have quantized views
  std::vector<std::map<EpochPhase, std::vector<Step>>>
      later_; // by rank: phases after the first, with their local steps
  std::map<EpochPhase, uint32_t> lastRound_;
  std::vector<LocalDescriptor> local_;
  std::vector<FlowKey> keys_;      // by flow
  std::vector<uint32_t> readStep_; // by flow: the step that reads it from files
  std::vector<Flow> flows_;
  std::vector<std::vector<std::vector<std::pair<int64_t, uint32_t>>>> arrivals_; // by flow and hop: (end, message)
  std::vector<Message> messages_;  // the messages of the first period, if there are periods
  std::optional<Periods> periods_; // messages are numbered period after period
  uint32_t periodRounds_ = 0;
  std::vector<uint32_t> receiveStep_;           // by message: the number of its receive among the steps of its rank
  std::vector<std::vector<MessageSide>> sides_; // by rank
  std::vector<size_t> firstLocal_;              // by rank: its first in local_
  std::array<std::mutex, 64> mutexes_;          // protect the ranks whose steps make() makes
  uint32_t rounds_ = 0;
  std::vector<std::map<std::pair<int64_t, int64_t>, uint32_t>> firstBuffer_; // by rank: (endpoint, mesh rank) -> buffer
  std::vector<Interner<OperandShape>> operandShapes_;
  std::vector<llvm::SmallDenseMap<uint32_t, uint32_t, 4>> operandNumbers_; // by rank: sideShape() -> operand shape
  // For make(), if there are periods: the operands of the send and of the receive of each message of the first period,
  // the first of each, and their shapes by rank.
  std::vector<Operand> repeated_;
  std::vector<uint32_t> firstRepeated_;
  std::vector<std::vector<OperandShape>> repeatedShapes_;
};

} // namespace

llvm::Error schedule(Module &module, std::unique_ptr<RankSchedules> &ranks) {
  auto scheduler = std::make_unique<Scheduler>(module);
  if (llvm::Error error = scheduler->plan())
    return error;
  if (scheduler->oneByOne()) {
    scheduler->prepare();
    ranks = std::move(scheduler);
  } else {
    llvm::Expected<std::unique_ptr<RankSchedules>> all = scheduler->makeAll();
    if (!all)
      return all.takeError();
    ranks = std::move(*all);
  }
  module.level = Level::schedule;
  return llvm::Error::success();
}

} // namespace reshard
