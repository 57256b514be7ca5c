// SPDX-License-Identifier: Apache-2.0
// The processes of a run, of which this is one: they join, agree on numbers, and fail together.
#pragma once

#include "reshard/reshard.h"
#include "tools/run/guarded_exit.h"
#include "tools/run/planned_run.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace reshard::tools {

/// The failure of another process.
struct PeerFailure : command::Failure {};

/// Without a transport that connects processes, this process is the only one and has all ranks. Errors of the executor
/// are thrown as Failure.
class Processes {
public:
  explicit Processes(const PlannedRun &run) : run_(run) {}
  /// Leaves the other processes.
  ~Processes();

  /// Opens the executor, which joins the other processes.
  void join();
  reshard_executor *executor() const { return executor_.get(); }
  /// The ranks of this process; empty: all.
  const std::vector<uint32_t> &ranks() const { return ranks_; }
  /// The rank of this process; 0 if it has all.
  uint32_t rank() const { return ranks_.empty() ? 0 : ranks_[0]; }
  /// Whether this process reports for all processes.
  bool first() const { return rank() == 0; }

  /// All-reduce min over all processes. Each value must be greater than INT64_MIN + 2^34. Throws PeerFailure if a
  /// process has failed. Does nothing while the others cannot be reached.
  int64_t allReduceMin(int64_t mine);
  /// Whether all processes pass the same number.
  bool agree(int64_t mine);
  /// The sum over all processes.
  uint64_t sum(uint64_t mine);
  /// Does a part of the run in which the other processes wait in prepare or run, and not in allReduceMin().
  void unreachable(const std::function<void()> &work);

  /// Waits until all processes have written their output, since the launcher kills all when the first one exits with an
  /// error. A process that is killed while it writes fails no other process.
  void finish();
  /// Reports a failure of this process to the others. Returns the code with which all processes exit.
  int fail(int code, const std::string &reason);

  /// Throws a failure of the executor, with `code`, or with that of its kind.
  void throwOnError(reshard_status status, std::optional<int> code = {}) const;

private:
  struct Close {
    void operator()(reshard_executor *executor) const { reshard_close(executor); }
  };

  reshard_options openOptions() const;
  /// With a deadline, other threads must not end the process: the main thread names the missing ranks first.
  ExitPolicy whileJoining() const { return run_.options.timeout > 0 ? ExitPolicy::wait : ExitPolicy::fail; }

  const PlannedRun &run_;
  std::unique_ptr<reshard_executor, Close> executor_;
  std::vector<uint32_t> ranks_;
  bool reachable_ = false; // the other processes will call allReduceMin() next
};

} // namespace reshard::tools
