// SPDX-License-Identifier: Apache-2.0
// Transport `threads`: all ranks in one process. prepare() cuts the copies of all dependency levels into chunks; in
// run() all worker threads take chunks from a common counter. Nothing is staged. All threads wait for each other at the
// end of each level.

#include "executor/memory/chunked_copies.h"
#include "executor/memory/view_jobs.h"
#include "executor/transports/dependency_levels.h"
#include "executor/transports/transport.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace reshard {
namespace {

using namespace schema;

/// If a run moves more than this, nothing of it is in the caches in the next run, and streaming stores are faster.
constexpr uint64_t kStreamedRunBytes = 64 << 20;

class ThreadsTransport : public Transport {
public:
  explicit ThreadsTransport(unsigned threads)
      : threads_(threads ? threads : std::max(1u, std::thread::hardware_concurrency())) {}

  ~ThreadsTransport() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread &worker : workers_)
      worker.join();
  }

  Status prepare(const Plan &plan, const std::vector<LocalRank> &ranks, Deadline) override {
    uint32_t last = 0;
    auto add = [&](uint32_t level, const LocalRank &from, const Operand *input, const LocalRank &to,
                   const Operand *output) -> Status {
      if (level > last)
        levelEnds_.push_back(copies_.size());
      last = level;
      if (output)
        return copies_.add(from, input, to, *output);
      copies_.addReduce(to, input->buffer());
      return {};
    };
    if (Status status = forEachCopy(plan, ranks, add); !status.ok())
      return status;
    levelEnds_.push_back(copies_.size());
    addWork(ranks);
    const auto count = std::min<uint64_t>(threads_, std::max<size_t>(1, levelEnds_.back()));
    positions_ = std::make_unique<Position[]>(count);
    for (uint64_t t = 1; t < count; ++t)
      workers_.emplace_back([this, t] { work(positions_[t].next); });
    return {};
  }

  Result<uint64_t> watch(CopyWatch watch) override { return reports_.set(std::move(watch)); }
  void copyThroughFiles(std::unique_ptr<const FileCopies> files) override { files_ = std::move(files); }

  Status run(Deadline deadline) override {
    deadline_ = deadline;
    expired_ = failed_ = false;
    next_ = 0;
    reports_.beginRun();
    for (size_t end : levelEnds_) {
      {
        std::lock_guard lock(mutex_);
        next_ = std::min<size_t>(next_, levelEnd_); // each thread has counted one past the end of the level before
        levelEnd_ = end;
        busy_ = workers_.size();
        ++ticket_;
      }
      wake_.notify_all();
      runChunks(positions_[0].next);
      std::unique_lock lock(mutex_);
      done_.wait(lock, [this] { return busy_ == 0; });
    }
    if (failed_)
      return failure_;
    if (expired_)
      return timedOut("timed out: not all copies were done");
    reports_.report(copies_.size());
    return {};
  }

  uint64_t bytes() const override { return copies_.bytes(); }

private:
  /// A job of a rank's quantized views.
  struct Work {
    const ViewJobs *viewJobs;
    ViewJobs::JobSet set;
    size_t job;
  };

  /// Jobs of quantized views are levels of their own, before and after those of copies.
  void addWork(const std::vector<LocalRank> &ranks) {
    auto add = [&](ViewJobs::JobSet set) {
      const size_t known = work_.size();
      for (const LocalRank &rank : ranks)
        for (size_t job = 0; rank.viewJobs && job < rank.viewJobs->size(set); ++job)
          work_.push_back({rank.viewJobs, set, job});
      return work_.size() > known;
    };
    if (add(ViewJobs::kBefore)) {
      before_ = work_.size();
      for (size_t &end : levelEnds_)
        end += before_;
      levelEnds_.insert(levelEnds_.begin(), before_);
    }
    if (add(ViewJobs::kAfter))
      levelEnds_.push_back(work_.size() + copies_.size());
  }

  /// Runs chunks of the level until none is left. `position`: of this thread. It is at most the chunk that the thread
  /// has begun, so all chunks before the least position are done.
  void runChunks(std::atomic<size_t> &position) {
    while (true) {
      position = next_.load();
      const size_t i = next_.fetch_add(1);
      if (i >= levelEnd_)
        break;
      if (failed_)
        return;
      if (passed(deadline_)) {
        expired_ = true;
        return;
      }
      if (i < before_)
        work_[i].viewJobs->run(ViewJobs::kBefore, work_[i].job);
      else if (i - before_ < copies_.size()) {
        if (!copy(i - before_))
          return;
      } else if (const Work &work = work_[i - copies_.size()]; true)
        work.viewJobs->run(work.set, work.job);
      if (&position == &positions_[0].next && reports_.due())
        report();
    }
    position = SIZE_MAX;
  }

  /// Returns false if a file could not be written.
  bool copy(size_t chunk) {
    const bool stream = copies_.bytes() >= kStreamedRunBytes;
    if (reports_.skips(chunk))
      return true;
    Status status;
    if (files_)
      status = copies_.run(chunk, stream, *files_);
    else
      copies_.run(chunk, stream);
    reports_.copied();
    if (status.ok())
      return true;
    const std::lock_guard lock(mutex_);
    if (!failed_)
      failure_ = std::move(status);
    failed_ = true;
    return false;
  }

  /// Reports how many copies are done. Called by the thread that runs the plan, between two of its chunks.
  void report() {
    positions_[0].next = SIZE_MAX;
    size_t done = std::min<size_t>(next_, levelEnd_); // first: chunks that begin later are not below it
    for (size_t t = 0; t <= workers_.size(); ++t)
      done = std::min<size_t>(done, positions_[t].next);
    reports_.report(std::min(done - std::min(done, before_), copies_.size()));
  }

  void work(std::atomic<size_t> &position) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stop_ || ticket_ != seen; });
      if (stop_)
        return;
      seen = ticket_;
      lock.unlock();
      runChunks(position);
      lock.lock();
      if (--busy_ == 0)
        done_.notify_all();
    }
  }

  /// The next chunk of a thread, or one before it; SIZE_MAX if the thread has none. On a cache line of its own.
  struct alignas(64) Position {
    std::atomic<size_t> next{SIZE_MAX};
  };

  const unsigned threads_;
  ChunkedCopies copies_;
  CopyReports reports_{copies_};
  std::unique_ptr<const FileCopies> files_;
  std::unique_ptr<Position[]> positions_; // by thread; the first runs the plan
  std::vector<Work> work_;                // before_ jobs before the copies, then the jobs after them
  size_t before_ = 0;
  std::vector<size_t> levelEnds_; // ends in the sequence: jobs before, chunks of copies, jobs after

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  bool stop_ = false;
  uint64_t ticket_ = 0;
  size_t busy_ = 0;
  std::atomic<size_t> next_{0};
  size_t levelEnd_ = 0;
  std::atomic<bool> expired_{false}, failed_{false};
  Status failure_; // the first error of a run
  Deadline deadline_;
};

} // namespace

std::unique_ptr<Transport> makeThreadsTransport(unsigned threads) {
  return std::make_unique<ThreadsTransport>(threads);
}

} // namespace reshard
