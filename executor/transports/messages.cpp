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
#include "executor/load/load.h"
#include "executor/memory/view_jobs.h"
#include "executor/transports/bootstrap.h"
#include "executor/transports/chunk_exchange.h"
#include "executor/transports/local_peers.h"
#include "executor/transports/run_steps.h"
#include "executor/transports/transport.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <sys/mman.h>

namespace reshard {
namespace {

using namespace schema;

/// Bytes that a rank copies out of a peer's memory before it polls its other messages.
constexpr uint64_t kCopyBytes = 1 << 20;

/// Runs the steps of a rank, a little of each in each poll.
class StepRunner {
public:
  StepRunner(RunSteps &steps, Channel &channel, const SlotMemory &slots)
      : steps_(steps), channel_(channel), exchange_(steps, channel, slots), reports_(steps.copies) {}

  CopyReports &reports() { return reports_; }
  void copyThroughFiles(std::unique_ptr<const FileCopies> files) { files_ = std::move(files); }

  /// Runs all steps until they are done. At the deadline, the error names the message that this rank waits for.
  Status run(const Deadline &deadline) {
    Backoff backoff;
    for (uint64_t polls = 0;; ++polls) {
      bool any = false;
      if (Status status = exchange_.exchange(any); !status.ok())
        return status;
      publish(any);
      copyFromPeers(any);
      if (Status status = copy(any); !status.ok())
        return status;
      if (steps_.finished())
        return {};
      // MPI progresses only when it is polled, so do not sleep while messages of the channel are in flight.
      if (any || exchange_.channelWaits())
        backoff.reset();
      if (!any)
        backoff.wait();
      // On a loaded machine a poll lasts several milliseconds, since it yields or sleeps.
      if (!any && polls % 16 == 0)
        if (Status status = checkCopiedPeers(); !status.ok())
          return status;
      if (polls % 64 == 0 && passed(deadline))
        return timedOut(timeoutText());
    }
  }

private:
  /// Runs one chunk of the local steps, which run in order.
  Status copy(bool &any) {
    while (steps_.local < steps_.locals.size() && steps_.copied == steps_.localEnds[steps_.local])
      ++steps_.local;
    if (steps_.local == steps_.locals.size() || !steps_.dependenciesDone(steps_.locals[steps_.local]))
      return {};
    if (!reports_.skips(steps_.copied)) {
      if (!files_)
        steps_.copies.run(steps_.copied, steps_.stream);
      else if (Status status = steps_.copies.run(steps_.copied, steps_.stream, *files_); !status.ok())
        return status;
      reports_.copied();
    }
    ++steps_.copied;
    if (reports_.due())
      reports_.report(steps_.copied);
    any = true;
    return {};
  }

  /// Publishes which chunks local peers may copy. The barrier at the end of the run confirms that they have copied
  /// them.
  void publish(bool &any) {
    for (MessageState &message : steps_.next(kPublish))
      for (; message.begun < message.chunks && steps_.dependenciesDone(message); any = true)
        message.progress->published.store(steps_.runs * message.chunks + (message.done = ++message.begun),
                                          std::memory_order_release);
    steps_.skipFinished(kPublish);
  }

  /// Copies at most kCopyBytes of the first message whose next chunk a local peer has published.
  void copyFromPeers(bool &any) {
    for (MessageState &message : steps_.next(kCopyFromPeer)) {
      if (message.done == message.chunks || !steps_.dependenciesDone(message) ||
          message.progress->published.load(std::memory_order_acquire) <= steps_.runs * message.chunks + message.done)
        continue;
      const uint64_t end = message.end(message.done), last = std::min(end, message.copied + kCopyBytes);
      message.packing.copy(message.copied, last, steps_.stream);
      message.copied = last;
      any = true;
      message.done += last == end;
      break;
    }
    steps_.skipFinished(kCopyFromPeer);
  }

  /// Fails if a local peer is lost that has not published the messages that this rank copies next, or not taken those
  /// that it copies.
  Status checkCopiedPeers() {
    if (Status status = exchange_.checkPeers(); !status.ok())
      return status;
    for (const MessageState &message : steps_.next(kCopyFromPeer))
      if (message.done < message.chunks)
        if (Status status = channel_.check(message.step->peer()); !status.ok())
          return std::move(status).withSuffix(messageText(false, message, message.done));
    return {};
  }

  std::string timeoutText() const {
    for (const Method method : {kReceive, kCopyFromPeer, kSend})
      for (size_t m = steps_.first[method]; m < steps_.messages[method].size(); ++m)
        if (const MessageState &message = steps_.messages[method][m];
            method == kCopyFromPeer ? message.done < message.chunks : message.begun > message.done)
          return "timed out" + messageText(method == kSend, message, message.done);
    return "timed out: no message is in flight, and the remaining steps could not start";
  }

  RunSteps &steps_;
  Channel &channel_;
  ChunkExchange exchange_;
  CopyReports reports_;
  std::unique_ptr<const FileCopies> files_;
};

class MessageTransport : public Transport {
public:
  MessageTransport(std::unique_ptr<Channel> channel, bool shortcut)
      : channel_(std::move(channel)), shortcut_(shortcut), bootstrap_(*channel_, 2 * kInFlight),
        runner_(steps_, *channel_, slots_) {
    channel_->reserve(2 * kInFlight + Bootstrap::kRequests);
  }
  ~MessageTransport() override {
    channel_.reset();
    if (owned_ && slots_.memory)
      munmap(slots_.memory, slots_.bytes);
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
    slots_.headBytes = arenaHeadBytes(*rank.segment);
    slots_.bytes =
        rank.segment->arena_bytes() - slots_.headBytes - (viewJobs_ ? viewJobs_->tailBytes() : 0) - rank.transformed;
    if (shortcut_)
      if (Status status = localPeers_.publish(rank, slots_.bytes); !status.ok())
        return status;
    const Result<std::map<uint32_t, PeerAddress>> localPeers =
        bootstrap_.exchangeAddresses(plan.digest(), localPeers_.address(), deadline);
    if (!localPeers.ok())
      return abandon(localPeers.status());
    for (const auto &[peer, address] : *localPeers)
      localPeers_.watch(peer, address);
    RunStepsBuilder builder(plan, rank, localPeers_, *localPeers, shortcut_, steps_);
    if (Status status = failTogether(builder.addReceives(), deadline); !status.ok())
      return status;
    Status status = builder.addSends();
    if (status.ok())
      status = mapSlots();
    localPeers_.closeFiles();
    if (status.ok())
      status = prepareChannel();
    if (status = failTogether(std::move(status), deadline); !status.ok())
      return status;
    builder.link();
    return {};
  }

  Status run(Deadline deadline) override {
    if (abandoned_)
      return abandonedEarlier();
    steps_.beginRun();
    runner_.reports().beginRun();
    localPeers_.beginRun(steps_.runs + 1);
    for (const uint32_t peer : informed_)
      channel_->tellRun(peer, steps_.runs + 1);
    if (!runViewJobs(ViewJobs::kBefore, deadline))
      return abandon(timedOut("timed out in the conversions before the first message"));
    if (Status status = runner_.run(deadline); !status.ok())
      return abandon(withNotBegun(std::move(status), steps_.runs + 1));
    ++steps_.runs;
    runner_.reports().report(steps_.copied);
    if (!runViewJobs(ViewJobs::kAfter, deadline))
      return abandon(timedOut("timed out in the conversions after the last message"));
    // The run is complete when all ranks are done.
    Status status = bootstrap_.barrier(deadline);
    return status.ok() ? status : abandon(withNotBegun(std::move(status), steps_.runs));
  }

  Result<uint64_t> watch(CopyWatch watch) override { return runner_.reports().set(std::move(watch)); }
  void copyThroughFiles(std::unique_ptr<const FileCopies> files) override {
    runner_.copyThroughFiles(std::move(files));
  }

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

  uint64_t bytes() const override { return steps_.bytes(); }
  BytesBy bytesBy() const override { return steps_.by; }

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

  /// Allocates the slots, if messages use them: in the block of local peers, or without one in anonymous memory.
  Status mapSlots() {
    if (slots_.bytes == 0 || (steps_.messages[kSend].empty() && steps_.messages[kReceive].empty()))
      return {};
    void *const memory = shortcut_
                             ? localPeers_.mapSlots()
                             : mmap(nullptr, slots_.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!memory || memory == MAP_FAILED)
      return failed("out of memory for an arena of " + std::to_string(slots_.bytes) + " bytes");
    slots_.memory = static_cast<std::byte *>(memory);
    std::memset(slots_.memory, 0, slots_.bytes); // page faults now, not in the first run
    return {};
  }

  /// Connects to the peers of all messages: a lost connection reveals that a peer has ended, also to a rank that copies
  /// out of its memory. Registers the memory of messages over the channel: the arena, and bound memory that is sent or
  /// received in place.
  Status prepareChannel() {
    Status status;
    std::vector<std::pair<std::byte *, std::byte *>> ranges; // begin and end
    if (slots_.memory)
      ranges.emplace_back(slots_.memory, slots_.memory + slots_.bytes);
    for (const auto &method : steps_.messages)
      for (const MessageState &message : method)
        if (status = channel_->connect(message.step->peer()); !status.ok())
          return status;
        else if (!localPeers_.watches(message.step->peer()))
          informed_.insert(message.step->peer());
    for (const Method method : {kReceive, kSend})
      for (const MessageState &message : steps_.messages[method])
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

  /// Adds to a timeout the peers that have not begun a run, as far as this rank knows.
  Status withNotBegun(Status status, uint64_t run) const {
    if (!status.timedOut())
      return status;
    constexpr size_t kShown = 8;
    std::vector<uint32_t> ranks = localPeers_.notBegun(run);
    for (const uint32_t peer : informed_)
      if (const std::optional<uint64_t> last = channel_->lastRunOf(peer); last && *last < run)
        ranks.push_back(peer);
    std::sort(ranks.begin(), ranks.end());
    std::string text;
    for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i)
      text += "; rank " + std::to_string(ranks[i]) + " has not begun the run";
    if (ranks.size() > kShown)
      text += "; nor have " + std::to_string(ranks.size() - kShown) + " more";
    return std::move(status).withSuffix(text);
  }

  std::unique_ptr<Channel> channel_;
  const bool shortcut_;
  Bootstrap bootstrap_;
  LocalPeers localPeers_;
  SlotMemory slots_;
  const ViewJobs *viewJobs_ = nullptr;
  RunSteps steps_;
  StepRunner runner_;
  std::set<uint32_t> informed_; // peers of messages that cannot see in memory that a run begins
  bool abandoned_ = false;
  bool owned_ = true; // no pending receive can write to the slots
};

} // namespace

std::unique_ptr<Transport> makeMessageTransport(std::unique_ptr<Channel> channel, bool shortcut) {
  return std::make_unique<MessageTransport>(std::move(channel), shortcut);
}

} // namespace reshard
