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

/// Threads that take the items of a sequence from a common counter, one level of it after the other. The caller is the
/// first of them.
class LevelThreads {
public:
  LevelThreads() = default;
  LevelThreads(const LevelThreads &) = delete;
  LevelThreads &operator=(const LevelThreads &) = delete;
  ~LevelThreads() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread &worker : workers_)
      worker.join();
  }

  /// `run(item, first)` does an item, on the first thread or not. It returns false if its thread shall take no more
  /// items of the level.
  template <class Run> void start(size_t threads, Run run) {
    positions_ = std::make_unique<Position[]>(threads);
    for (size_t t = 1; t < threads; ++t)
      workers_.emplace_back([this, t, run] { work(positions_[t].next, run); });
  }
  /// Begins the sequence anew.
  void restart() { next_ = 0; }
  /// Does the items of the next level, up to `end`.
  template <class Run> void runLevel(size_t end, const Run &run) {
    {
      std::lock_guard lock(mutex_);
      next_ = std::min<size_t>(next_, levelEnd_); // each thread has counted one past the end of the level before
      levelEnd_ = end;
      busy_ = workers_.size();
      ++ticket_;
    }
    wake_.notify_all();
    takeItems(positions_[0].next, run);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }
  /// All items before it are done. The first thread calls it between two of its items.
  size_t done() {
    positions_[0].next = SIZE_MAX;
    size_t done = std::min<size_t>(next_, levelEnd_); // first: items that begin later are not below it
    for (size_t t = 0; t <= workers_.size(); ++t)
      done = std::min<size_t>(done, positions_[t].next);
    return done;
  }

private:
  /// The next item of a thread, or one before it; SIZE_MAX if the thread has none. On a cache line of its own.
  struct alignas(64) Position {
    std::atomic<size_t> next{SIZE_MAX};
  };

  /// Does items of the level until none is left. `position`: of this thread. It is at most the item that the thread has
  /// begun, so all items before the least position are done.
  template <class Run> void takeItems(std::atomic<size_t> &position, const Run &run) {
    while (true) {
      position = next_.load();
      const size_t item = next_.fetch_add(1);
      if (item >= levelEnd_)
        break;
      if (!run(item, &position == &positions_[0].next))
        return;
    }
    position = SIZE_MAX;
  }

  template <class Run> void work(std::atomic<size_t> &position, const Run &run) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stop_ || ticket_ != seen; });
      if (stop_)
        return;
      seen = ticket_;
      lock.unlock();
      takeItems(position, run);
      lock.lock();
      if (--busy_ == 0)
        done_.notify_all();
    }
  }

  std::unique_ptr<Position[]> positions_; // by thread
  std::vector<std::thread> workers_;      // all but the first
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  bool stop_ = false;
  uint64_t ticket_ = 0; // counts the levels
  size_t busy_ = 0;
  std::atomic<size_t> next_{0};
  size_t levelEnd_ = 0;
};

class ThreadsTransport : public Transport {
public:
  explicit ThreadsTransport(unsigned threads)
      : threads_(threads ? threads : std::max(1u, std::thread::hardware_concurrency())) {}

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
    levels_.start(count, [this](size_t item, bool first) { return runItem(item, first); });
    return {};
  }

  Result<uint64_t> watch(CopyWatch watch) override { return reports_.set(std::move(watch)); }
  void copyThroughFiles(std::unique_ptr<const FileCopies> files) override { files_ = std::move(files); }

  Status run(Deadline deadline) override {
    deadline_ = deadline;
    failure_ = {};
    ended_ = false;
    reports_.beginRun();
    levels_.restart();
    for (size_t end : levelEnds_)
      levels_.runLevel(end, [this](size_t item, bool first) { return runItem(item, first); });
    if (ended_)
      return failure_;
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

  /// Runs an item of the sequence, on the thread that runs the plan, `first`, or another one. Returns whether the run
  /// goes on.
  bool runItem(size_t item, bool first) {
    if (ended_)
      return false;
    if (passed(deadline_))
      return end(timedOut("timed out: not all copies were done"));
    if (item < before_)
      work_[item].viewJobs->run(ViewJobs::kBefore, work_[item].job);
    else if (item - before_ < copies_.size()) {
      if (Status status = copy(item - before_); !status.ok())
        return end(std::move(status));
    } else if (const Work &work = work_[item - copies_.size()]; true)
      work.viewJobs->run(work.set, work.job);
    if (first && reports_.due()) { // between two chunks of the thread
      const size_t done = levels_.done();
      reports_.report(std::min(done - std::min(done, before_), copies_.size()));
    }
    return true;
  }

  /// Fails if a file could not be written.
  Status copy(size_t chunk) {
    const bool stream = copies_.bytes() >= kStreamedRunBytes;
    Status status;
    if (reports_.skips(chunk))
      return status;
    if (files_)
      status = copies_.run(chunk, stream, *files_);
    else
      copies_.run(chunk, stream);
    reports_.copied();
    return status;
  }

  /// Ends the run with its first error; that of a file takes the place of a timeout.
  bool end(Status error) {
    const std::lock_guard lock(mutex_);
    if (!ended_ || failure_.timedOut())
      failure_ = std::move(error);
    ended_ = true;
    return false;
  }

  const unsigned threads_;
  ChunkedCopies copies_;
  CopyReports reports_{copies_};
  std::unique_ptr<const FileCopies> files_;
  std::vector<Work> work_; // before_ jobs before the copies, then the jobs after them
  size_t before_ = 0;
  std::vector<size_t> levelEnds_; // ends in the sequence: jobs before, chunks of copies, jobs after
  Deadline deadline_;
  std::atomic<bool> ended_{false}; // the run, by an error
  Status failure_;                 // its error
  std::mutex mutex_;               // guards failure_
  LevelThreads levels_;            // they end before the members above
};

} // namespace

std::unique_ptr<Transport> makeThreadsTransport(unsigned threads) {
  return std::make_unique<ThreadsTransport>(threads);
}

} // namespace reshard
