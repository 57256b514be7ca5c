// Transport `threads`: all ranks in one process. prepare() pairs operand k of every send with operand k of its receive and cuts the
// copies into chunks; run() lets all cores pull chunks. Nothing is staged. A message that passes on what others brought comes in a
// later wave than they, what a rank copied in a later one than all copies; between waves all cores wait for each other.

#include "executor/copies.h"
#include "executor/transport.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <thread>

namespace reshard {
namespace {

using namespace schema;

/// A run that moves more than this finds nothing of it in the caches the next time.
constexpr uint64_t kStreamBytes = 64 << 20;

class ThreadsTransport : public Transport {
public:
  explicit ThreadsTransport(unsigned threads) : threads_(threads ? threads : std::max(1u, std::thread::hardware_concurrency())) {}

  ~ThreadsTransport() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread &worker : workers_)
      worker.join();
  }

  std::string prepare(const Plan &plan, const std::vector<LocalRank> &ranks, Deadline, bool &) override {
    const uint64_t messages = plan.manifest().messages();
    struct End {
      const LocalRank *rank = nullptr;
      const Step *step = nullptr;
    };
    std::vector<End> sends(messages), receives(messages);
    for (const LocalRank &rank : ranks)
      for (const Step *step : *rank.segment->steps()) {
        if (step->kind() == StepKind::send || step->kind() == StepKind::recv) {
          End &end = (step->kind() == StepKind::send ? sends : receives)[step->message()];
          if (end.step)
            return "message " + std::to_string(step->message()) + " has two ends of one kind";
          end = {&rank, step};
        } else {
          for (uint32_t i = 0; i < step->output_count(); ++i) {
            const Operand *input = step->kind() == StepKind::copy ? rank.segment->operands()->Get(step->first_input() + i) : nullptr;
            if (std::string error = copies_.add(rank, input, rank, *rank.segment->operands()->Get(step->first_output() + i)); !error.empty())
              return error;
          }
        }
      }
    for (uint64_t m = 0; m < messages; ++m) {
      const End &send = sends[m], &receive = receives[m];
      if (!send.step && !receive.step)
        continue;
      if (!send.step || !receive.step) {
        const End &one = send.step ? send : receive;
        return "message " + std::to_string(m) + " of rank " + std::to_string(one.rank->rank) + " needs rank " +
               std::to_string(one.step->peer()) + ", which is not in this process; transport 'threads' needs all ranks of the plan";
      }
      if (send.step->peer() != receive.rank->rank || receive.step->peer() != send.rank->rank || send.step->round() != receive.step->round() ||
          send.step->input_count() != receive.step->output_count())
        return "message " + std::to_string(m) + " differs between rank " + std::to_string(send.rank->rank) + " and rank " +
               std::to_string(receive.rank->rank);
    }
    std::vector<uint32_t> waves(messages);
    if (std::string error = findWaves(plan, ranks, waves); !error.empty())
      return error;
    std::vector<uint64_t> order(messages);
    std::iota(order.begin(), order.end(), uint64_t{0});
    std::stable_sort(order.begin(), order.end(), [&](uint64_t a, uint64_t b) { return waves[a] < waves[b]; });
    uint32_t wave = 0;
    for (uint64_t m : order) {
      const End &send = sends[m], &receive = receives[m];
      if (!send.step)
        continue;
      if (waves[m] > wave) {
        wave = waves[m];
        waveEnds_.push_back(copies_.size());
      }
      for (uint32_t i = 0; i < send.step->input_count(); ++i)
        if (std::string error = copies_.add(*send.rank, send.rank->segment->operands()->Get(send.step->first_input() + i), *receive.rank,
                                    *receive.rank->segment->operands()->Get(receive.step->first_output() + i));
            !error.empty())
          return error;
    }
    waveEnds_.push_back(copies_.size());
    for (unsigned t = 1; t < std::min<uint64_t>(threads_, std::max<size_t>(1, copies_.size())); ++t)
      workers_.emplace_back([this] { work(); });
    return {};
  }

  std::string run(Deadline deadline, bool &timedOut) override {
    deadline_ = deadline;
    expired_ = false;
    next_ = 0;
    for (size_t end : waveEnds_) {
      {
        std::lock_guard lock(mutex_);
        next_ = std::min<size_t>(next_, waveEnd_); // what cores took past the end of the wave before was nothing
        waveEnd_ = end;
        busy_ = workers_.size();
        ++generation_;
      }
      wake_.notify_all();
      pull();
      std::unique_lock lock(mutex_);
      done_.wait(lock, [this] { return busy_ == 0; });
    }
    timedOut = expired_;
    return timedOut ? "the deadline passed with copies left to do" : std::string();
  }

  uint64_t bytes() const override { return copies_.bytes(); }

private:
  /// How many messages must come one after the other before each: a send that reads a target comes after the receives that it waits
  /// for. A rank's steps are in the order of rounds and `after` names earlier ones, so one look at all steps by round is enough.
  static std::string findWaves(const Plan &plan, const std::vector<LocalRank> &ranks, std::vector<uint32_t> &waves) {
    struct At {
      uint32_t round;
      const LocalRank *rank;
      const Step *step;
    };
    std::vector<At> relays;
    for (const LocalRank &rank : ranks)
      for (const Step *step : *rank.segment->steps())
        if (step->kind() == StepKind::send)
          for (uint32_t i = 0; i < step->input_count(); ++i)
            if (!readsSource(plan, rank, *rank.segment->operands()->Get(step->first_input() + i))) {
              relays.push_back({step->round(), &rank, step});
              break;
            }
    std::stable_sort(relays.begin(), relays.end(), [](const At &a, const At &b) { return a.round < b.round; });
    for (const auto &[round, rank, step] : relays)
      for (uint32_t i = 0; i < step->after_count(); ++i) {
        const Step &before = *rank->segment->steps()->Get(rank->segment->after()->Get(step->first_after() + i));
        if (before.kind() == StepKind::copy)
          waves[step->message()] = std::max(waves[step->message()], 1u);
        if (before.kind() != StepKind::recv)
          continue;
        if (before.round() >= round)
          return "rank " + std::to_string(rank->rank) + " passes on in round " + std::to_string(round) + " what it gets in that round";
        waves[step->message()] = std::max(waves[step->message()], waves[before.message()] + 1);
      }
    return {};
  }

  static bool readsSource(const Plan &plan, const LocalRank &rank, const Operand &operand) {
    const auto *runs = rank.segment->buffers();
    auto run = std::upper_bound(runs->begin(), runs->end(), operand.buffer(),
                                [](uint32_t buffer, const BufferRun *r) { return buffer < r->first(); });
    return run != runs->begin() && (*--run)->endpoint() == 0 && plan.manifest().endpoints()->size() > 0;
  }

  void pull() {
    for (size_t i = next_.fetch_add(1, std::memory_order_relaxed); i < waveEnd_; i = next_.fetch_add(1, std::memory_order_relaxed)) {
      if (deadline_ && std::chrono::steady_clock::now() >= *deadline_) {
        expired_ = true;
        return;
      }
      copies_.run(i, copies_.bytes() >= kStreamBytes);
    }
  }

  void work() {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_)
        return;
      seen = generation_;
      lock.unlock();
      pull();
      lock.lock();
      if (--busy_ == 0)
        done_.notify_all();
    }
  }

  const unsigned threads_;
  Copies copies_;
  std::vector<size_t> waveEnds_; // into copies_

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  bool stop_ = false;
  uint64_t generation_ = 0;
  size_t busy_ = 0;
  std::atomic<size_t> next_{0};
  size_t waveEnd_ = 0;
  std::atomic<bool> expired_{false};
  Deadline deadline_;
};

} // namespace

std::byte *LocalRank::pointer(uint32_t buffer) const {
  const auto *list = segment->buffers();
  auto run = std::upper_bound(list->begin(), list->end(), buffer, [](uint32_t b, const BufferRun *r) { return b < r->first(); });
  if (run == list->begin())
    return nullptr;
  --run;
  const uint32_t within = buffer - (*run)->first();
  return within < (*run)->count() ? runs[run - list->begin()][within] : nullptr;
}

std::unique_ptr<Transport> makeThreadsTransport(unsigned threads) { return std::make_unique<ThreadsTransport>(threads); }

} // namespace reshard
