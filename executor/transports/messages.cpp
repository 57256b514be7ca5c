// SPDX-License-Identifier: Apache-2.0
// The transport with one rank per process: it runs the messages of the plan. If a receiver can map the memory of a
// sender on its host, it copies the message out of it as soon as the sender has published it. If it can map the
// sender's slots only, it unpacks staged messages out of them. All other messages use a channel: chunks of staged
// messages are packed into the arena, sent, received and unpacked while others are in flight; messages in place are
// sent from and received into bound memory.
//
// Messages start in the order of the plan. A message starts after the earlier messages of its direction with which it
// shares slots have started all their chunks; a chunk starts when its slot is free and the bytes that it forwards have
// arrived. So the earliest unfinished message can always progress on both sides, and no live process waits forever for
// another live one.

#include "base/backoff.h"
#include "executor/interfaces/channel.h"
#include "executor/load/check_segment.h"
#include "executor/memory/chunked_copies.h"
#include "executor/memory/chunks.h"
#include "executor/memory/packing.h"
#include "executor/memory/view_jobs.h"
#include "executor/transports/bootstrap.h"
#include "executor/transports/local_peers.h"
#include "executor/transports/transport.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sys/mman.h>

namespace reshard {
namespace {

using namespace schema;

/// The maximum of chunks in flight in one direction, and of one message; and of messages to look at, from the first
/// unfinished one on.
constexpr size_t kInFlight = 16, kOfOne = 4, kAhead = 8;
/// In a round a rank starts at most two messages in each direction, one between nodes and one inside its node. The
/// first two unfinished messages have reserved places in flight, so that the earliest unfinished messages can always
/// progress on both sides.
constexpr size_t kReserved = 2 * kOfOne;
/// Bytes that a rank copies out of a peer's memory before it polls its other messages.
constexpr uint64_t kCopyBytes = 1 << 20;
/// If the processes of a host copy more than this in a run, nothing of it is in the caches in the next run, and
/// streaming stores are faster.
constexpr uint64_t kStreamBytes = 64 << 20;

/// A chunk that local peers exchange through a slot moves in parts of kPartBytes, and uses kRingBytes of its slot again
/// and again: the receiver finds the bytes in the caches.
constexpr uint64_t kPartBytes = 128 << 10, kRingBytes = 4 * kPartBytes;

/// How a step moves its bytes: receive or send, over the channel or through the slots of the sender; copy out of a
/// local peer's bound memory; publish to a local peer, which copies; copy within the rank.
enum Method { kReceive, kSend, kCopyFromPeer, kPublish, kLocal };

struct MessageState {
  const Step *step = nullptr;
  Packing packing;
  uint64_t chunks = 1;
  uint64_t begun = 0, done = 0;  // chunks, in this run
  std::vector<uint32_t> sharing; // of send and receive: earlier messages of that method that used its slots
  /// (step, how many chunks of it must be done before each chunk of this message)
  std::vector<std::pair<uint32_t, std::vector<uint64_t>>> dependencies;
  Progress *progress = nullptr;         // in the sender's block; null if the message uses the channel
  uint64_t copied = 0;                  // bytes, in this run: of kCopyFromPeer; through slots, those packed or unpacked
  const std::byte *peerSlots = nullptr; // of a receive through slots
  uint8_t peerSlot = 0;                 // the one of chunk 0

  uint64_t end(uint64_t chunk) const { return chunk * step->chunk() + chunkBytes(*step, chunk); }
};

/// A chunk that is being sent or received.
struct ChunkInFlight {
  MessageState *message = nullptr; // null: free
  uint64_t chunk = 0;
  std::byte *begin = nullptr, *end = nullptr; // its slot in the arena; null if in place
};

class MessageTransport : public Transport {
public:
  MessageTransport(std::unique_ptr<Channel> channel, bool shortcut)
      : channel_(std::move(channel)), shortcut_(shortcut), bootstrap_(*channel_, 2 * kInFlight) {
    channel_->reserve(2 * kInFlight + Bootstrap::kRequests);
  }
  ~MessageTransport() override {
    channel_.reset();
    if (owned_ && arena_)
      munmap(arena_, arenaBytes_);
  }

  Status prepare(const Plan &plan, const std::vector<LocalRank> &ranks, Deadline deadline) override {
    if (ranks.size() != 1 || ranks[0].rank != channel_->rank())
      return failed("this process is rank " + std::to_string(channel_->rank()) +
                    " of the channel, expected it to run exactly that rank");
    if (const uint32_t tags = channel_->maxTag() - Bootstrap::kTags + 1; plan.manifest().messages() > tags)
      return failed("the plan has " + std::to_string(plan.manifest().messages()) + " messages, expected at most " +
                    std::to_string(tags) + ", the number of tags of the channel");
    const LocalRank &rank = ranks[0];
    viewJobs_ = rank.viewJobs;
    headBytes_ = arenaHeadBytes(*rank.segment);
    arenaBytes_ =
        rank.segment->arena_bytes() - headBytes_ - (viewJobs_ ? viewJobs_->tailBytes() : 0) - rank.transformed;
    if (shortcut_)
      if (Status status = localPeers_.publish(rank, arenaBytes_); !status.ok())
        return status;
    const Result<std::map<uint32_t, PeerAddress>> localPeers =
        bootstrap_.exchangeAddresses(plan.digest(), localPeers_.address(), deadline);
    if (!localPeers.ok())
      return abandon(localPeers.status());
    for (const auto &[peer, address] : *localPeers)
      localPeers_.watch(peer, address);
    // Each receiver decides which messages it copies. After all-reduce min the senders know these decisions.
    where_.resize(rank.segment->steps()->size());
    if (Status status = failTogether(addSteps(plan, rank, *localPeers, false), deadline); !status.ok())
      return status;
    Status status = addSteps(plan, rank, *localPeers, true);
    stream_ = bytes() * (localPeers->size() + 1) >= kStreamBytes; // assumes that local peers copy as much
    if (status.ok())
      status = mapArena();
    localPeers_.closeFiles();
    if (status.ok())
      status = prepareChannel();
    if (status = failTogether(std::move(status), deadline); !status.ok())
      return status;
    for (const Method method : {kReceive, kSend, kCopyFromPeer, kPublish})
      for (MessageState &message : messages_[method])
        link(*rank.segment, method, message);
    for (MessageState &local : locals_)
      link(*rank.segment, kLocal, local);
    return {};
  }

  Status run(Deadline deadline) override {
    if (abandoned_)
      return abandonedEarlier();
    for (auto &method : messages_)
      for (MessageState &message : method)
        message.begun = message.done = message.copied = 0;
    first_ = {};
    copied_ = local_ = 0;
    reports_.beginRun();
    localPeers_.beginRun(runs_ + 1);
    for (const uint32_t peer : told_)
      channel_->tellRun(peer, runs_ + 1);
    if (!runViewJobs(ViewJobs::kBefore, deadline))
      return abandon(timedOut("timed out in the conversions before the first message"));
    Backoff backoff;
    for (uint64_t polls = 0;; ++polls) {
      bool any = false;
      if (Status status = exchange(any); !status.ok())
        return abandon(std::move(status));
      publish(any);
      copyFromPeers(any);
      if (Status status = copy(any); !status.ok())
        return abandon(std::move(status));
      if (finished())
        break;
      // MPI progresses only when it is polled, so do not sleep while messages of the channel are in flight.
      if (any || channelWaits_)
        backoff.reset();
      if (!any)
        backoff.wait();
      // On a loaded machine a poll lasts several milliseconds, since it yields or sleeps.
      if (!any && polls % 16 == 0)
        if (Status status = checkCopiedPeers(); !status.ok())
          return abandon(std::move(status));
      if (polls % 64 == 0 && passed(deadline))
        return abandon(timedOut(timeoutText() + notBegunText(runs_ + 1)));
    }
    ++runs_;
    reports_.report(copied_);
    if (!runViewJobs(ViewJobs::kAfter, deadline))
      return abandon(timedOut("timed out in the conversions after the last message"));
    // The run is complete when all ranks are done.
    Status status = bootstrap_.barrier(deadline);
    if (status.timedOut())
      status = std::move(status).withSuffix(notBegunText(runs_));
    return status.ok() ? status : abandon(std::move(status));
  }

  Result<uint64_t> watch(CopyWatch watch) override { return reports_.set(std::move(watch)); }
  void copyThroughFiles(std::unique_ptr<const FileCopies> files) override { files_ = std::move(files); }

  Result<int64_t> allReduceMin(int64_t value, Deadline deadline) override {
    if (abandoned_)
      return abandonedEarlier();
    Result<int64_t> result = bootstrap_.allReduceMin(value, deadline);
    return result.ok() ? result : abandon(result.status());
  }

  Result<std::vector<uint64_t>> allReduceSum(std::vector<uint64_t> values, Deadline deadline) override {
    if (abandoned_)
      return abandonedEarlier();
    Result<std::vector<uint64_t>> result = bootstrap_.allReduceSum(std::move(values), deadline);
    return result.ok() ? result : abandon(result.status());
  }

  Channel *channel() override { return channel_.get(); }
  std::unique_ptr<Channel> takeChannel() override { return std::move(channel_); }

  uint64_t bytes() const override { return by_.local + by_.sharedMemory + by_.messages; }
  BytesBy bytesBy() const override { return by_; }

private:
  /// Messages in flight cannot be told from those of a later run, so no later run is possible.
  Status abandon(Status status) {
    abandoned_ = true;
    owned_ = channel_->abandon(status);
    return status;
  }

  Status abandonedEarlier() const {
    return failed(std::string("an earlier run failed with messages in flight; ") +
                  (owned_ ? "open the plan again in all processes" : "launch the processes again"));
  }

  /// All-reduces whether a rank has an error: then all of them fail.
  Status failTogether(Status status, const Deadline &deadline) {
    const Result<int64_t> first = bootstrap_.allReduceMin(status.ok() ? channel_->size() : channel_->rank(), deadline);
    if (!status.ok())
      return abandon(std::move(status));
    if (!first.ok())
      return abandon(first.status());
    if (*first < channel_->size())
      return abandon(failed("prepare failed on rank " + std::to_string(*first) + "; see that rank's error"));
    return {};
  }

  /// Allocates the arena, if messages use it: in the block of local peers, or without one in anonymous memory.
  Status mapArena() {
    if (arenaBytes_ == 0 || (messages_[kSend].empty() && messages_[kReceive].empty()))
      return {};
    void *const memory = shortcut_
                             ? localPeers_.mapSlots()
                             : mmap(nullptr, arenaBytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!memory || memory == MAP_FAILED)
      return failed("out of memory for an arena of " + std::to_string(arenaBytes_) + " bytes");
    arena_ = static_cast<std::byte *>(memory);
    std::memset(arena_, 0, arenaBytes_); // page faults now, not in the first run
    return {};
  }

  /// Connects to the peers of all messages: a lost connection reveals that a peer has ended, also to a rank that copies
  /// out of its memory. Registers the memory of messages over the channel: the arena, and bound memory that is sent or
  /// received in place.
  Status prepareChannel() {
    Status status;
    std::vector<std::pair<std::byte *, std::byte *>> ranges; // begin and end
    if (arena_)
      ranges.emplace_back(arena_, arena_ + arenaBytes_);
    for (const auto &method : messages_)
      for (const MessageState &message : method)
        if (status = channel_->connect(message.step->peer()); !status.ok())
          return status;
        else if (!localPeers_.watches(message.step->peer()))
          told_.insert(message.step->peer());
    for (const Method method : {kReceive, kSend})
      for (const MessageState &message : messages_[method])
        if (std::byte *const begin = message.packing.contiguous();
            message.step->staging() == UINT64_MAX && message.step->bytes() > 0)
          ranges.emplace_back(begin, begin + message.step->bytes());
    std::sort(ranges.begin(), ranges.end());
    for (size_t first = 0, next = 0; first < ranges.size() && status.ok(); first = next) {
      std::byte *end = ranges[first].second;
      for (next = first + 1; next < ranges.size() && ranges[next].first <= end; ++next) // they overlap or touch
        end = std::max(end, ranges[next].second);
      status = channel_->registerMemory(ranges[first].first, static_cast<uint64_t>(end - ranges[first].first));
    }
    return status;
  }

  /// Runs jobs of the rank's quantized views; false if the deadline passed.
  bool runViewJobs(ViewJobs::JobSet set, const Deadline &deadline) const {
    for (size_t job = 0; viewJobs_ && job < viewJobs_->size(set); ++job) {
      if (passed(deadline))
        return false;
      viewJobs_->run(set, job);
    }
    return true;
  }

  Status addSteps(const Plan &plan, const LocalRank &rank, const std::map<uint32_t, PeerAddress> &localPeers,
                  bool sends) {
    Status status;
    for (uint32_t s = 0; s < where_.size() && status.ok(); ++s)
      status = addStep(plan, rank, s, localPeers, sends);
    return status;
  }

  Status addStep(const Plan &plan, const LocalRank &rank, uint32_t number,
                 const std::map<uint32_t, PeerAddress> &localPeers, bool sends) {
    const Step &step = *rank.segment->steps()->Get(number);
    if ((step.kind() == StepKind::send) != sends)
      return {};
    if (step.kind() != StepKind::send && step.kind() != StepKind::recv) {
      by_.local += step.bytes();
      if (Status status = copies_.addStep(rank, step); !status.ok())
        return status;
      where_[number] = {kLocal, copies_.size()}; // the end of its copies
      locals_.emplace_back().step = &step;
      localEnds_.push_back(copies_.size());
      return {};
    }
    MessageState message;
    message.step = &step;
    message.chunks = chunkCount(step);
    Method method = sends ? kSend : kReceive;
    if (sends) {
      const CopiedFrom from = shortcut_ ? localPeers_.progress(number).copiedFrom.load() : CopiedFrom::channel;
      if (from != CopiedFrom::channel)
        message.progress = &localPeers_.progress(number);
      if (from == CopiedFrom::boundMemory)
        method = kPublish;
    } else {
      const auto peer = localPeers.find(step.peer());
      bool relayed = false;
      if (peer != localPeers.end())
        if (const LocalRank *other = localPeers_.attach(plan, step.peer(), peer->second)) {
          const Result<SenderMemory> memory = pairWithSender(rank, *other, message);
          if (!memory.ok())
            return memory.status();
          method = memory->mapped ? kCopyFromPeer : kReceive;
          relayed = memory->relayed;
        }
      (method == kCopyFromPeer ? by_.sharedMemory : by_.messages) += step.bytes();
      if (method == kReceive && shortcut_ && peer != localPeers.end() && !relayed)
        by_.messagesInsideHost += step.bytes();
    }
    if (method == kSend || method == kReceive) {
      const uint32_t first = sends ? step.first_input() : step.first_output(),
                     count = sends ? step.input_count() : step.output_count();
      for (uint32_t i = 0; i < count; ++i)
        if (Status status = message.packing.add(rank, *rank.segment->operands()->Get(first + i)); !status.ok())
          return status;
      if (chunkBytes(step, 0) > kMaxChannelBytes)
        return failed("step " + std::to_string(number) + " has chunks of " + std::to_string(chunkBytes(step, 0)) +
                      " bytes, expected at most " + std::to_string(kMaxChannelBytes));
      if (step.staging() == UINT64_MAX && !message.packing.contiguous())
        return failed("step " + std::to_string(number) +
                      " sends or receives in place, but its bytes are not contiguous");
    }
    where_[number] = {method, messages_[method].size()};
    messages_[method].push_back(std::move(message));
    return {};
  }

  /// The memory of a send of a local peer.
  struct SenderMemory {
    bool mapped = true;   // all of it is mapped here, and the receiver copies it
    bool relayed = false; // the sender relays bytes from the head of its arena, which is never mapped
  };

  /// Pairs a receive with its send, to copy out of the sender's memory, or else out of its slots.
  Result<SenderMemory> pairWithSender(const LocalRank &rank, const LocalRank &other, MessageState &message) {
    const Step &step = *message.step;
    const auto *steps = other.segment->steps();
    const auto send = std::find_if(steps->begin(), steps->end(), [&](const Step *s) {
      return s->kind() == StepKind::send && s->message() == step.message();
    });
    if (send == steps->end() || send->peer() != rank.rank || send->input_count() != step.output_count() ||
        send->bytes() != step.bytes() || send->chunk() != step.chunk())
      return failed("message " + std::to_string(step.message()) + " differs between rank " +
                    std::to_string(other.rank) + " and rank " + std::to_string(rank.rank) +
                    ": expected equal peers, bytes, chunks and operand counts");
    SenderMemory memory;
    for (uint32_t i = 0; i < send->input_count(); ++i)
      memory.relayed = memory.relayed || other.segment->operands()->Get(send->first_input() + i)->buffer() == 0;
    for (uint32_t i = 0; i < step.output_count() && memory.mapped; ++i) {
      const Result<bool> mapped = message.packing.add({&other, other.segment->operands()->Get(send->first_input() + i)},
                                                      {&rank, rank.segment->operands()->Get(step.first_output() + i)});
      if (!mapped.ok())
        return mapped.status();
      memory.mapped = *mapped;
    }
    if (!memory.mapped) {
      message.packing = {};
      message.peerSlots = localPeers_.slots(other.rank, **send);
      message.peerSlot = send->slot();
    }
    if (memory.mapped || message.peerSlots) {
      message.progress = &localPeers_.progress(other.rank, static_cast<uint32_t>(send - steps->begin()));
      message.progress->copiedFrom = memory.mapped ? CopiedFrom::boundMemory : CopiedFrom::slots;
    }
    return memory;
  }

  void link(const Segment &segment, Method method, MessageState &message) {
    const bool send = method == kSend || method == kPublish;
    const std::vector<std::vector<uint64_t>> before =
        send ? chunksBefore(segment, *message.step) : std::vector<std::vector<uint64_t>>();
    for (uint32_t i = 0; i < message.step->after_count(); ++i) {
      const uint32_t earlier = segment.after()->Get(message.step->first_after() + i);
      const StepKind kind = segment.steps()->Get(earlier)->kind();
      if (kind == message.step->kind())
        share(segment, method, earlier, message);
      else if (send)
        message.dependencies.emplace_back(earlier, before[i]);
      else
        message.dependencies.emplace_back(
            earlier, std::vector<uint64_t>(message.chunks, chunkCount(*segment.steps()->Get(earlier))));
    }
  }

  /// Adds the earlier messages over the channel whose slots `message` uses. Steps that receivers copy do not use
  /// theirs: their own predecessors count instead. Each step is visited once, since their paths may join again.
  void share(const Segment &segment, Method method, uint32_t earlier, MessageState &message) const {
    if (method != kSend && method != kReceive)
      return;
    std::set<uint32_t> seen = {earlier};
    std::vector<uint32_t> left = {earlier};
    while (!left.empty()) {
      const uint32_t number = left.back();
      left.pop_back();
      if (where_[number].first == method) {
        message.sharing.push_back(static_cast<uint32_t>(where_[number].second));
        continue;
      }
      const Step &step = *segment.steps()->Get(number);
      for (uint32_t i = 0; i < step.after_count(); ++i) {
        const uint32_t before = segment.after()->Get(step.first_after() + i);
        if (segment.steps()->Get(before)->kind() == step.kind() && seen.insert(before).second)
          left.push_back(before);
      }
    }
  }

  bool finished() const {
    for (const Method method : {kReceive, kSend, kCopyFromPeer, kPublish})
      if (first_[method] < messages_[method].size())
        return false;
    return copied_ == copies_.size();
  }

  /// The number of chunks of a step that are done.
  uint64_t done(uint32_t step) const {
    const auto [method, at] = where_[step];
    return method == kLocal ? copied_ >= at : messages_[method][at].done;
  }

  /// Whether the next chunk of a message has all the bytes that it depends on.
  bool dependenciesDone(const MessageState &message) const {
    for (const auto &[step, chunks] : message.dependencies)
      if (done(step) < chunks[message.begun])
        return false;
    return true;
  }

  /// Whether the next chunk of a message over the channel or through slots may start.
  bool ready(Method method, const MessageState &message) const {
    if (message.begun == message.chunks || message.begun - message.done == kOfOne)
      return false;
    for (uint32_t earlier : message.sharing)
      if (messages_[method][earlier].begun < messages_[method][earlier].chunks)
        return false;
    return dependenciesDone(message);
  }

  /// Runs one chunk of the local steps, which run in order.
  Status copy(bool &any) {
    while (local_ < locals_.size() && copied_ == localEnds_[local_])
      ++local_;
    if (local_ == locals_.size() || !dependenciesDone(locals_[local_]))
      return {};
    if (!reports_.skips(copied_)) {
      if (!files_)
        copies_.run(copied_, stream_);
      else if (Status status = copies_.run(copied_, stream_, *files_); !status.ok())
        return status;
      reports_.copied();
    }
    ++copied_;
    if (reports_.due())
      reports_.report(copied_);
    any = true;
    return {};
  }

  /// Publishes which chunks local peers may copy. The barrier at the end of the run confirms that they have copied
  /// them.
  void publish(bool &any) {
    auto &all = messages_[kPublish];
    for (size_t m = first_[kPublish]; m < std::min(all.size(), first_[kPublish] + kAhead); ++m)
      for (MessageState &message = all[m]; message.begun < message.chunks && dependenciesDone(message); any = true)
        message.progress->published.store(runs_ * message.chunks + (message.done = ++message.begun),
                                          std::memory_order_release);
    while (first_[kPublish] < all.size() && all[first_[kPublish]].done == all[first_[kPublish]].chunks)
      ++first_[kPublish];
  }

  /// Copies at most kCopyBytes of the first message whose next chunk a local peer has published.
  void copyFromPeers(bool &any) {
    auto &all = messages_[kCopyFromPeer];
    for (size_t m = first_[kCopyFromPeer]; m < std::min(all.size(), first_[kCopyFromPeer] + kAhead); ++m) {
      MessageState &message = all[m];
      if (message.done == message.chunks || !dependenciesDone(message) ||
          message.progress->published.load(std::memory_order_acquire) <= runs_ * message.chunks + message.done)
        continue;
      const uint64_t end = message.end(message.done), last = std::min(end, message.copied + kCopyBytes);
      message.packing.copy(message.copied, last, stream_);
      message.copied = last;
      any = true;
      message.done += last == end;
      break;
    }
    while (first_[kCopyFromPeer] < all.size() && all[first_[kCopyFromPeer]].done == all[first_[kCopyFromPeer]].chunks)
      ++first_[kCopyFromPeer];
  }

  /// Fails if a local peer is lost that has not published the messages that this rank copies next, or not taken those
  /// that it copies.
  Status checkCopiedPeers() {
    for (const Method send : {kReceive, kSend})
      for (const ChunkInFlight &flight : inFlight_[send])
        if (flight.message && flight.message->progress)
          if (Status status = channel_->check(flight.message->step->peer()); !status.ok())
            return std::move(status).withSuffix(named(send, *flight.message, flight.chunk));
    const auto &all = messages_[kCopyFromPeer];
    for (size_t m = first_[kCopyFromPeer]; m < std::min(all.size(), first_[kCopyFromPeer] + kAhead); ++m)
      if (all[m].done < all[m].chunks)
        if (Status status = channel_->check(all[m].step->peer()); !status.ok())
          return std::move(status).withSuffix(named(false, all[m], all[m].done));
    return {};
  }

  /// The memory of the next chunk: its slot of the arena, and then `end` is set; or bound memory.
  std::byte *nextChunk(const MessageState &message, std::byte *&end) const {
    const Step &step = *message.step;
    if (step.staging() == UINT64_MAX) {
      end = nullptr;
      return message.packing.contiguous() + message.begun * step.chunk();
    }
    std::byte *begin = arena_ + (step.staging() - headBytes_) + (step.slot() + message.begun) % 2 * step.chunk();
    end = begin + chunkBytes(step, message.begun);
    return begin;
  }

  /// Packs the next part of a chunk into its slot, if its place there is free. Returns whether the chunk is complete:
  /// the receiver has taken it.
  bool packPart(const ChunkInFlight &flight, bool &any) const {
    MessageState &message = *flight.message;
    const uint64_t before = runs_ * message.step->bytes(), begin = flight.chunk * message.step->chunk(),
                   end = message.end(flight.chunk),
                   taken = message.progress->taken.load(std::memory_order_acquire) - before;
    const uint64_t last = std::min(end, message.copied + kPartBytes);
    if (message.copied >= begin && message.copied < end && last <= std::max(begin, taken) + kRingBytes) {
      message.packing.pack(message.copied, last, flight.begin + (message.copied - begin) % kRingBytes);
      message.copied = last;
      message.progress->published.store(before + last, std::memory_order_release);
      any = true;
    }
    return taken >= end;
  }

  /// Unpacks the next part of a chunk out of the sender's slot, if it has been packed. Returns whether the chunk is
  /// complete.
  bool unpackPart(const ChunkInFlight &flight, bool &any) const {
    MessageState &message = *flight.message;
    const uint64_t before = runs_ * message.step->bytes(), begin = flight.chunk * message.step->chunk(),
                   end = message.end(flight.chunk),
                   published = message.progress->published.load(std::memory_order_acquire) - before;
    if (published > message.copied) {
      const uint64_t last = std::min({end, published, message.copied + kPartBytes});
      message.packing.unpack(message.copied, last,
                             message.peerSlots + (message.peerSlot + flight.chunk) % 2 * message.step->chunk() +
                                 (message.copied - begin) % kRingBytes,
                             stream_);
      message.copied = last;
      message.progress->taken.store(before + last, std::memory_order_release);
      any = true;
    }
    return message.copied == end;
  }

  /// Progresses a chunk in flight. Returns whether it is complete.
  Result<bool> advance(Method send, size_t number, bool &any) {
    const ChunkInFlight &flight = inFlight_[send][number];
    if (flight.message->progress)
      return send ? packPart(flight, any) : unpackPart(flight, any);
    const Result<bool> arrived = channel_->test(send * kInFlight + number);
    if (!arrived.ok())
      return Status(arrived.status()).withSuffix(named(send, *flight.message, flight.chunk));
    const MessageState &message = *flight.message;
    if (*arrived && !send && flight.begin)
      message.packing.unpack(flight.chunk * message.step->chunk(), message.end(flight.chunk), flight.begin, stream_);
    channelWaits_ = channelWaits_ || !*arrived;
    return arrived;
  }

  /// Progresses the messages over the channel and through slots.
  Status exchange(bool &any) {
    channelWaits_ = false;
    for (const Method send : {kReceive, kSend})
      for (size_t f = 0; f < kInFlight; ++f) {
        ChunkInFlight &flight = inFlight_[send][f];
        if (!flight.message || (flight.chunk != flight.message->done && !(send && flight.message->progress)))
          continue;
        const Result<bool> complete = advance(send, f, any);
        if (!complete.ok())
          return complete.status();
        // Chunks of one message are completed in order, since messages that forward them count them.
        if (!*complete || flight.chunk != flight.message->done)
          continue;
        any = true;
        ++flight.message->done;
        flight.message = nullptr;
      }
    for (const Method send : {kReceive, kSend}) {
      auto &all = messages_[send];
      while (first_[send] < all.size() && all[first_[send]].done == all[first_[send]].chunks)
        ++first_[send];
      for (size_t m = first_[send]; m < std::min(all.size(), first_[send] + kAhead); ++m)
        while (ready(send, all[m])) {
          const Result<bool> begun = begin(send, all[m], m - first_[send] < 2 ? 0 : kReserved);
          if (!begun.ok())
            return begun.status();
          if (!*begun)
            break;
          any = true;
        }
    }
    return {};
  }

  /// Starts the next chunk, unless its slot is in use or at most `reserved` places in flight are free. Returns whether
  /// it was started.
  Result<bool> begin(Method send, MessageState &message, size_t reserved) {
    std::byte *end = nullptr, *data = message.peerSlots ? nullptr : nextChunk(message, end);
    for (const auto &direction : inFlight_)
      for (const ChunkInFlight &flight : direction)
        if (flight.message && end && flight.begin && flight.begin < end && data < flight.end)
          return false; // the slot is in use
    const auto free = static_cast<size_t>(std::find_if(inFlight_[send].begin(), inFlight_[send].end(),
                                                       [](const ChunkInFlight &f) { return !f.message; }) -
                                          inFlight_[send].begin());
    const auto left = static_cast<size_t>(std::count_if(inFlight_[send].begin(), inFlight_[send].end(),
                                                        [](const ChunkInFlight &f) { return !f.message; }));
    if (left <= reserved)
      return false;
    const Step &step = *message.step;
    const uint64_t at = message.begun * step.chunk(), bytes = chunkBytes(step, message.begun);
    inFlight_[send][free] = {&message, message.begun, end ? data : nullptr, end};
    const uint64_t chunk = message.begun++;
    if (message.progress)
      return true;
    if (send && end)
      message.packing.pack(at, at + bytes, data);
    const size_t request = send * kInFlight + free;
    const uint32_t tag = Bootstrap::kTags + step.message();
    Status status = send ? channel_->send(request, step.peer(), tag, data, bytes)
                         : channel_->receive(request, step.peer(), tag, data, bytes);
    if (!status.ok())
      return std::move(status).withSuffix(named(send, message, chunk));
    return true;
  }

  static std::string named(bool send, const MessageState &message, uint64_t chunk) {
    return std::string(": message ") + std::to_string(message.step->message()) + " of round " +
           std::to_string(message.step->round()) + (send ? " to rank " : " from rank ") +
           std::to_string(message.step->peer()) + ", chunk " + std::to_string(chunk) + " of " +
           std::to_string(message.chunks);
  }

  /// The error text of a timeout, with the message that this rank waits for.
  std::string timeoutText() const {
    for (const Method method : {kReceive, kCopyFromPeer, kSend})
      for (size_t m = first_[method]; m < messages_[method].size(); ++m)
        if (const MessageState &message = messages_[method][m];
            method == kCopyFromPeer ? message.done < message.chunks : message.begun > message.done)
          return "timed out" + named(method == kSend, message, message.done);
    return "timed out: no message is in flight, and the remaining steps could not start";
  }

  /// The peers that have not begun a run, as far as this rank knows, for error texts.
  std::string notBegunText(uint64_t run) const {
    constexpr size_t kShown = 8;
    std::vector<uint32_t> ranks = localPeers_.notBegun(run);
    for (const uint32_t peer : told_)
      if (const std::optional<uint64_t> last = channel_->lastRunOf(peer); last && *last < run)
        ranks.push_back(peer);
    std::sort(ranks.begin(), ranks.end());
    std::string text;
    for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i)
      text += "; rank " + std::to_string(ranks[i]) + " has not begun the run";
    return ranks.size() <= kShown ? text : text + "; nor have " + std::to_string(ranks.size() - kShown) + " more";
  }

  std::unique_ptr<Channel> channel_;
  const bool shortcut_;
  Bootstrap bootstrap_;
  LocalPeers localPeers_;
  std::byte *arena_ = nullptr; // without its head, which LocalRank has
  uint64_t headBytes_ = 0, arenaBytes_ = 0;
  std::array<std::vector<MessageState>, 4> messages_; // by method, in the order of the plan
  const ViewJobs *viewJobs_ = nullptr;
  ChunkedCopies copies_; // of local steps, in order
  CopyReports reports_{copies_};
  std::unique_ptr<const FileCopies> files_;
  std::vector<std::pair<Method, size_t>> where_; // by step: index in messages_, or end in copies_
  std::array<size_t, 4> first_{};                // by method: the first unfinished message
  uint64_t runs_ = 0;                            // completed runs
  std::set<uint32_t> told_;                      // peers of messages that cannot see in memory that a run begins
  bool stream_ = false;
  std::array<std::array<ChunkInFlight, kInFlight>, 2> inFlight_;
  bool channelWaits_ = false;        // a chunk over the channel is in flight
  size_t copied_ = 0;                // chunks of copies_ that are done
  std::vector<MessageState> locals_; // local steps, for their dependencies
  std::vector<size_t> localEnds_;    // by local step: the end of its copies
  size_t local_ = 0;                 // the first unfinished local step
  bool abandoned_ = false;
  bool owned_ = true; // no pending receive can write to the arena
  BytesBy by_;
};

} // namespace

std::unique_ptr<Transport> makeMessageTransport(std::unique_ptr<Channel> channel, bool shortcut) {
  return std::make_unique<MessageTransport>(std::move(channel), shortcut);
}

} // namespace reshard
