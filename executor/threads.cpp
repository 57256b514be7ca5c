// Transport `threads`: all ranks in one process. prepare() cuts the copies of all waves into chunks; run() lets all cores pull chunks.
// Nothing is staged. Between waves all cores wait for each other.

#include "executor/copies.h"
#include "executor/transport.h"
#include "executor/waves.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
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
    uint32_t last = 0;
    if (std::string error = forEachCopy(plan, ranks, [&](uint32_t wave, const LocalRank &from, const Operand *input, const LocalRank &to, const Operand &output) {
          if (wave > last)
            waveEnds_.push_back(copies_.size());
          last = wave;
          return copies_.add(from, input, to, output);
        });
        !error.empty())
      return error;
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
