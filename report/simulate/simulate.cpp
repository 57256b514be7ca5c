// SPDX-License-Identifier: Apache-2.0
// Simulates the steps of a plan: chunks of messages are flows that divide the bandwidth of links. Also the lower bound
// of the time.
#include "report/simulate/simulate.h"

#include "base/work_deadline.h"
#include "executor/memory/chunks.h"
#include "report/simulate/fair_flows.h"
#include "schema/flatbuffer_vectors.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

namespace reshard::report {

namespace {

using namespace schema;

bool isMessage(const Step &step) { return step.kind() == StepKind::send || step.kind() == StepKind::recv; }
bool staged(const Step &step) { return step.staging() != UINT64_MAX; }

/// How many chunks of an earlier message must have left their slots before a chunk of `step` may enter its own. Slots
/// are compared by address: where chunks differ in size, slots of one number are different bytes.
uint64_t chunksBeforeSlot(const Step &earlier, const Step &step, uint64_t chunk) {
  if (!staged(earlier) || !staged(step))
    return 0;
  const uint64_t begin = chunkStaging(step, chunk), end = begin + chunkBytes(step, chunk), chunks = chunkCount(earlier);
  for (uint64_t n = chunks; n > 0 && n + 3 > chunks; --n) { // the last chunk may be shorter than the one two before it
    const uint64_t used = chunkStaging(earlier, n - 1);
    if (used < end && begin < used + chunkBytes(earlier, n - 1))
      return n;
  }
  return 0;
}

/// Keeps counters, not tasks: a plan has millions of chunks, but those of a port follow each other, so that each port
/// has one chunk at a time that is transmitted, and one that is packed or unpacked.
class Simulator {
public:
  Simulator(const Plan &plan, const Topology &topology, const std::function<void(double)> &progress,
            const std::function<void(const Activity &)> &visit)
      : plan_(plan), topology_(topology), progress_(progress), visit_(visit) {}

  Result<Simulation> run() {
    const uint32_t world = plan_.world();
    segments_.resize(world);
    for (uint32_t rank = 0; rank < world; ++rank) {
      WorkDeadline::spend(1024);
      if (Status status = plan_.segment(rank, segments_[rank]); !status.ok())
        return status;
      steps_.push_back(&orEmpty(segments_[rank]->steps()));
    }
    if (Status status = checkMessages(plan_, segments_, 1); !status.ok())
      return status;
    addResources();
    addSteps();
    addWaiters();
    begin();
    uint64_t id = 0;
    bool timer = false;
    while (flows_.next(id, timer)) {
      WorkDeadline::spend(16);
      if (timer)
        arrived(static_cast<uint32_t>(id));
      else
        ended(static_cast<Activity::Kind>(id % 4), static_cast<uint32_t>(id / 4));
      if (finished_ % 1024 == 0)
        progress_(static_cast<double>(finished_) / static_cast<double>(count_));
    }
    if (finished_ != count_)
      return failed("deadlock: only " + std::to_string(finished_) + " of " + std::to_string(count_) +
                    " activities can finish, the others wait for each other");
    report();
    return std::move(result_);
  }

private:
  /// How far the chunks of a message are.
  struct Message {
    uint32_t sender = 0, receiver = 0;
    uint32_t chunks = 0;
    uint32_t packed = 0, sent = 0, arrived = 0, done = 0; // done: unpacked, or arrived in place
    bool packs = false, unpacks = false, local = false;   // local: inside a node
  };
  /// The chunks of a port's messages in their order: all, which are transmitted; or the staged ones, which are packed
  /// or unpacked.
  struct Sequence {
    uint32_t step = 0;   // the step that has the next chunk
    uint32_t waited = 0; // steps of its `after`, from the first one on, that are done as far as the chunk needs
    bool busy = false;   // the chunk has begun, at `begin`
    double begin = 0;
    std::vector<std::vector<uint64_t>> before; // chunksBefore() of a send that forwards messages, else empty
  };
  struct Port {
    Sequence transmits, copies;
  };
  /// A step that is no message.
  struct LocalStep {
    uint32_t rank = 0, step = 0;
    uint32_t waits = 0; // for how many steps
    bool done = false;
    double begin = 0;
  };
  /// A local step that waits for another step of its rank.
  struct Waiter {
    uint64_t before = 0; // key() of that step
    uint32_t local = 0;
    bool operator<(const Waiter &other) const { return before < other.before; }
  };

  Port &port(uint32_t rank, bool sends, bool local) { return ports_[size_t{4} * rank + 2 * sends + local]; }
  const Step &step(uint32_t rank, uint32_t number) const { return *steps_[rank]->Get(number); }
  /// The number of the i-th step in a step's `after`.
  uint32_t earlier(uint32_t rank, const Step &step, uint32_t i) const {
    return segments_[rank]->after()->Get(step.first_after() + i);
  }
  /// The step of a sequence; null if none is left.
  const Step *stepOf(uint32_t rank, const Sequence &sequence) const {
    return sequence.step < steps_[rank]->size() ? &step(rank, sequence.step) : nullptr;
  }
  /// The index in locals_ of a local step.
  uint32_t localIndex(uint32_t rank, uint32_t number) const {
    const auto begin = locals_.begin();
    const auto at = std::lower_bound(begin + firstLocal_[rank], begin + firstLocal_[rank + 1], number,
                                     [](const LocalStep &each, uint32_t step) { return each.step < step; });
    return static_cast<uint32_t>(at - begin);
  }
  /// A number of a step that no other step of its rank has.
  uint64_t key(uint32_t rank, uint32_t number) const {
    const Step &each = step(rank, number);
    return isMessage(each) ? each.message() : localKey(localIndex(rank, number));
  }
  static uint64_t localKey(uint32_t local) { return (uint64_t{1} << 32) + local; }

  void addResources() {
    for (const int64_t latency : {topology_.nicLatency, topology_.linkLatency})
      latencies_.push_back(flows_.delay(static_cast<double>(latency) * 1e-9));
    for (uint32_t rank = 0; rank < plan_.world(); ++rank) {
      copies_.push_back(flows_.resource(static_cast<double>(topology_.copyRate)));
      for (auto &side : links_)
        side.push_back(flows_.resource(static_cast<double>(topology_.linkRate)));
      nicOf_.push_back(static_cast<uint32_t>(topology_.nic(rank)));
      while (nics_[0].size() <= nicOf_[rank])
        for (auto &side : nics_)
          side.push_back(flows_.resource(static_cast<double>(topology_.nicRate)));
    }
  }

  void addSteps() {
    messages_.resize(plan_.manifest().messages());
    forwards_.resize(plan_.world());
    for (uint32_t rank = 0; rank < plan_.world(); ++rank) {
      WorkDeadline::spend(1 + steps_[rank]->size());
      firstLocal_.push_back(static_cast<uint32_t>(locals_.size()));
      for (uint32_t number = 0; number < steps_[rank]->size(); ++number) {
        const Step &each = step(rank, number);
        if (!isMessage(each)) {
          locals_.push_back({rank, number, each.after_count()});
          ++count_;
          continue;
        }
        Message &message = messages_[each.message()];
        message.chunks = static_cast<uint32_t>(chunkCount(each));
        count_ += message.chunks * uint64_t{staged(each)};
        if (each.kind() == StepKind::recv) {
          message.receiver = rank;
          message.unpacks = staged(each);
          continue;
        }
        count_ += message.chunks;
        message.sender = rank;
        message.packs = staged(each);
        message.local = inNode(rank, each);
        forwards_[rank] = forwards_[rank] || forwards(rank, each);
      }
    }
    firstLocal_.push_back(static_cast<uint32_t>(locals_.size()));
  }

  void addWaiters() {
    for (uint32_t rank = 0; rank < plan_.world(); ++rank) {
      const size_t first = waiters_.size();
      firstWaiter_.push_back(first);
      for (uint32_t l = firstLocal_[rank]; l < firstLocal_[rank + 1]; ++l) {
        const Step &each = step(rank, locals_[l].step);
        WorkDeadline::spend(1 + each.after_count());
        for (uint32_t i = 0; i < each.after_count(); ++i)
          waiters_.push_back({key(rank, earlier(rank, each, i)), l});
      }
      std::stable_sort(waiters_.begin() + static_cast<std::ptrdiff_t>(first), waiters_.end());
    }
    firstWaiter_.push_back(waiters_.size());
  }

  bool inNode(uint32_t rank, const Step &message) const {
    return topology_.node(rank) == topology_.node(message.peer());
  }

  /// Whether a send waits for receives.
  bool forwards(uint32_t rank, const Step &send) const {
    for (uint32_t i = 0; i < send.after_count(); ++i)
      if (step(rank, earlier(rank, send, i)).kind() == StepKind::recv)
        return true;
    return false;
  }

  /// Starts all that waits for nothing.
  void begin() {
    ports_.resize(size_t{4} * plan_.world());
    spent_.resize(plan_.world());
    for (uint32_t rank = 0; rank < plan_.world(); ++rank)
      for (const bool sends : {false, true})
        for (const bool local : {false, true}) {
          seek(rank, sends, local, port(rank, sends, local).transmits, false);
          seek(rank, sends, local, port(rank, sends, local).copies, true);
        }
    for (uint32_t rank = 0; rank < plan_.world(); ++rank)
      wakeSends(rank);
    for (uint32_t l = 0; l < locals_.size(); ++l)
      if (locals_[l].waits == 0)
        startLocal(l);
  }

  /// Moves a sequence to the first step of its port from `sequence.step` on.
  void seek(uint32_t rank, bool sends, bool local, Sequence &sequence, bool copies) {
    sequence.before.clear();
    for (; const Step *each = stepOf(rank, sequence); ++sequence.step) {
      WorkDeadline::spend(1);
      if (each->kind() != (sends ? StepKind::send : StepKind::recv) || (copies && !staged(*each)) ||
          inNode(rank, *each) != local)
        continue;
      if (sends && staged(*each) == copies && forwards(rank, *each))
        sequence.before = chunksBefore(*segments_[rank], *each);
      return;
    }
  }

  /// Whether the next chunk of a sequence may be packed or sent, or received: what it waits for on its rank is done.
  bool ready(uint32_t rank, Sequence &sequence, const Step &each, uint32_t chunk) {
    const Message &message = messages_[each.message()];
    if (chunk > 1 && staged(each) && (each.kind() == StepKind::send ? message.sent : message.done) + 1 < chunk)
      return false; // the chunk two before it is in the slot
    if (chunk > 1 && sequence.before.empty())
      return true; // its first chunks waited for all other steps
    for (; sequence.waited < each.after_count(); ++sequence.waited)
      if (waits(rank, sequence, each, chunk))
        return false;
    return true;
  }

  /// Whether the next chunk of a sequence must wait for the step at `sequence.waited` of its `after`.
  bool waits(uint32_t rank, const Sequence &sequence, const Step &each, uint32_t chunk) const {
    WorkDeadline::spend(1);
    const uint32_t number = earlier(rank, each, sequence.waited);
    const Step &before = step(rank, number);
    if (!isMessage(before))
      return chunk == 0 && !locals_[localIndex(rank, number)].done;
    const Message &message = messages_[before.message()];
    const bool sent = before.kind() == StepKind::send;
    if (sent && each.kind() == StepKind::recv) // it replaces bytes that the send relays
      return message.sent < message.chunks;
    uint64_t needed = chunk < 2 ? chunksBeforeSlot(before, each, chunk) : 0;
    if (!sequence.before.empty())
      needed = std::max(needed, sequence.before[sequence.waited][chunk]);
    return (sent ? message.sent : message.done) < needed;
  }

  /// Starts to transmit the next chunk of a port, if both of its ranks are ready.
  void transmitNext(uint32_t rank, bool sends, bool local) {
    const Step *const each = stepOf(rank, port(rank, sends, local).transmits);
    if (!each)
      return;
    const Message &message = messages_[each->message()];
    Sequence &from = port(message.sender, true, local).transmits, &to = port(message.receiver, false, local).transmits;
    const Step *const sent = stepOf(message.sender, from), *const received = stepOf(message.receiver, to);
    if (from.busy || !sent || !received || sent->message() != received->message())
      return;
    const uint32_t chunk = message.sent;
    if (message.packs ? message.packed == chunk : !ready(message.sender, from, *sent, chunk))
      return;
    if (!ready(message.receiver, to, *received, chunk))
      return;
    to.waited = 0;
    if (local)
      start(from, Activity::Kind::transmit, *sent, chunk, links_[0][message.sender], links_[1][message.receiver]);
    else
      start(from, Activity::Kind::transmit, *sent, chunk, nics_[0][nicOf_[message.sender]],
            nics_[1][nicOf_[message.receiver]]);
  }

  /// Starts to pack or unpack the next chunk of a port, if it is ready.
  void copyNext(uint32_t rank, bool sends, bool local) {
    Sequence &copies = port(rank, sends, local).copies;
    const Step *const each = stepOf(rank, copies);
    if (!each || copies.busy)
      return;
    const Message &message = messages_[each->message()];
    const uint32_t chunk = sends ? message.packed : message.done;
    if (sends ? ready(rank, copies, *each, chunk) : message.arrived > chunk)
      start(copies, sends ? Activity::Kind::pack : Activity::Kind::unpack, *each, chunk, copies_[rank], copies_[rank]);
  }

  void start(Sequence &sequence, Activity::Kind kind, const Step &each, uint32_t chunk, uint32_t first,
             uint32_t second) {
    sequence.busy = true;
    sequence.begin = flows_.now();
    sequence.waited = 0;
    flows_.start(id(kind, each.message()), static_cast<double>(chunkBytes(each, chunk)), first, second);
  }

  void startLocal(uint32_t number) {
    LocalStep &each = locals_[number];
    each.begin = flows_.now();
    flows_.start(id(Activity::Kind::copy, number), static_cast<double>(step(each.rank, each.step).bytes()),
                 copies_[each.rank], copies_[each.rank]);
  }

  /// The number of a flow: what it is, and its message or local step.
  static uint64_t id(Activity::Kind kind, uint32_t number) {
    return uint64_t{4} * number + static_cast<uint64_t>(kind);
  }

  void ended(Activity::Kind kind, uint32_t number) {
    switch (kind) {
    case Activity::Kind::pack:
      return packed(messages_[number]);
    case Activity::Kind::transmit:
      return sent(number);
    case Activity::Kind::unpack:
      return unpacked(messages_[number]);
    case Activity::Kind::copy:
      return copied(number);
    }
  }

  void packed(Message &message) {
    finish(message.sender, true, message.local, Activity::Kind::pack, message.packed++, message.chunks);
    copyNext(message.sender, true, message.local);
    transmitNext(message.sender, true, message.local);
  }

  /// A chunk has left its sender. It arrives one latency later.
  void sent(uint32_t number) {
    Message &message = messages_[number];
    finish(message.sender, true, message.local, Activity::Kind::transmit, message.sent++, message.chunks);
    if (message.sent == message.chunks) {
      Sequence &to = port(message.receiver, false, message.local).transmits;
      ++to.step;
      seek(message.receiver, false, message.local, to, false);
      completed(message.sender, number);
      wakeReceives(message.sender);
    }
    wakeSends(message.sender);
    transmitNext(message.receiver, false, message.local);
    flows_.startTimer(latencies_[message.local], number);
  }

  void arrived(uint32_t number) {
    Message &message = messages_[number];
    ++message.arrived;
    counted();
    if (message.unpacks)
      copyNext(message.receiver, false, message.local);
    else
      inPlace(message);
  }

  void unpacked(Message &message) {
    finish(message.receiver, false, message.local, Activity::Kind::unpack, message.done, message.chunks);
    inPlace(message);
    copyNext(message.receiver, false, message.local);
    wakeReceives(message.receiver);
  }

  /// The bytes of a message's next chunk are at their target.
  void inPlace(Message &message) {
    ++message.done;
    if (message.done == message.chunks) {
      completed(message.receiver, static_cast<uint64_t>(&message - messages_.data()));
    }
    if (forwards_[message.receiver])
      wakeSends(message.receiver);
  }

  void copied(uint32_t number) {
    LocalStep &each = locals_[number];
    each.done = true;
    counted();
    show(Activity::Kind::copy, each.rank, each.step, step(each.rank, each.step).bytes(), each.begin);
    completed(each.rank, localKey(number));
    wakeSends(each.rank);
    wakeReceives(each.rank);
  }

  /// Starts the local steps of a rank that waited only for one that is complete now.
  void completed(uint32_t rank, uint64_t key) {
    const auto begin = waiters_.begin();
    const auto end = begin + static_cast<std::ptrdiff_t>(firstWaiter_[rank + 1]);
    for (auto at = std::lower_bound(begin + static_cast<std::ptrdiff_t>(firstWaiter_[rank]), end, Waiter{key, 0});
         at != end && at->before == key; ++at)
      if (--locals_[at->local].waits == 0)
        startLocal(at->local);
  }

  void wakeSends(uint32_t rank) {
    for (const bool local : {false, true}) {
      copyNext(rank, true, local);
      transmitNext(rank, true, local);
    }
  }
  void wakeReceives(uint32_t rank) {
    for (const bool local : {false, true})
      transmitNext(rank, false, local);
  }

  /// Ends the chunk that a port is busy with, and moves on.
  void finish(uint32_t rank, bool sends, bool local, Activity::Kind kind, uint32_t chunk, uint32_t chunks) {
    const bool copies = kind != Activity::Kind::transmit;
    Sequence &sequence = copies ? port(rank, sends, local).copies : port(rank, sends, local).transmits;
    show(kind, rank, sequence.step, chunkBytes(step(rank, sequence.step), chunk), sequence.begin);
    if (copies)
      counted();
    sequence.busy = false;
    if (chunk + 1 == chunks) {
      ++sequence.step;
      seek(rank, sends, local, sequence, copies);
    }
  }

  void counted() {
    ++finished_;
    result_.seconds = flows_.now();
  }

  void show(Activity::Kind kind, uint32_t rank, uint32_t number, uint64_t bytes, double begin) {
    const Step &each = step(rank, number);
    spent_[rank][static_cast<size_t>(kind)] += flows_.now() - begin;
    if (visit_)
      visit_({kind, static_cast<int32_t>(rank), kind == Activity::Kind::copy ? -1 : static_cast<int32_t>(each.peer()),
              number, each.message(), each.round(), bytes, begin, flows_.now()});
  }

  void report() {
    auto most = [&](const std::vector<uint32_t> *sides, int64_t &which, double &seconds) {
      for (size_t i = 0; i < sides[0].size(); ++i)
        for (int side = 0; side < 2; ++side)
          if (flows_.busy(sides[side][i]) > seconds) {
            seconds = flows_.busy(sides[side][i]);
            which = static_cast<int64_t>(i);
          }
    };
    result_.busiestNic = -1;
    most(links_, result_.busiestRank, result_.rankBusy);
    most(nics_, result_.busiestNic, result_.nicBusy);
    if (result_.nicBusy > result_.rankBusy && topology_.nic(result_.busiestNic) == result_.busiestNic) {
      result_.busiestRank = result_.busiestNic; // each rank has its own NIC
      result_.rankBusy = result_.nicBusy;
    }
    for (const auto &ofRank : spent_)
      for (size_t kind = 0; kind < ofRank.size(); ++kind)
        result_.secondsByKind[kind] = std::max(result_.secondsByKind[kind], ofRank[kind]);
    result_.lowerBound = lowerBound(plan_.manifest(), topology_, [](CutKind kind) {
      return kind != CutKind::replica_node_ingress; // the plan's ranks run, and no other engine replicas
    });
  }

  const Plan &plan_;
  const Topology &topology_;
  const std::function<void(double)> &progress_;
  const std::function<void(const Activity &)> &visit_;
  Simulation result_;
  FairFlows flows_;
  std::vector<uint32_t> copies_, links_[2], nics_[2]; // resources, by rank or NIC; [0] egress, [1] ingress
  std::vector<uint32_t> latencies_;                   // delays: between nodes, inside a node
  std::vector<uint32_t> nicOf_;                       // by rank
  std::vector<std::shared_ptr<const Segment>> segments_;
  std::vector<const flatbuffers::Vector<const Step *> *> steps_; // by rank
  std::vector<Message> messages_;
  std::vector<bool> forwards_; // by rank: whether it forwards messages
  std::vector<Port> ports_;
  std::vector<LocalStep> locals_;            // by rank, in the order of its steps
  std::vector<uint32_t> firstLocal_;         // by rank, and the end
  std::vector<Waiter> waiters_;              // by rank and key
  std::vector<size_t> firstWaiter_;          // by rank, and the end
  std::vector<std::array<double, 4>> spent_; // by rank and Activity::Kind
  uint64_t count_ = 0, finished_ = 0;        // activities
};

} // namespace

Result<Simulation> simulate(const Plan &plan, const Topology &topology, const std::function<void(double)> &progress,
                            const std::function<void(const Activity &)> &visit) {
  return Simulator(plan, topology, progress, visit).run();
}

} // namespace reshard::report
