// SPDX-License-Identifier: Apache-2.0
// The first phase of reshard-exec: the options and their plan, which all other phases read.
#pragma once

#include "executor/load/load.h"
#include "tools/run/execution.h"
#include "tools/run/memory.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace reshard::tools {

/// What took how long, for --trace.
class Trace {
public:
  /// An activity that ends now. `begin`: a time of command::now().
  void add(const std::string &name, double begin) { activities_.push_back({name, begin, command::now()}); }
  std::string text() const;

private:
  struct Timed {
    std::string name;
    double begin, end;
  };

  double start_ = command::now();
  std::vector<Timed> activities_;
};

struct PlannedRun {
  explicit PlannedRun(const ExecutionOptions &options);
  /// Throws Failure if the plan is damaged, or if the options contradict it or each other.
  void open();
  /// Does work within the deadline of --timeout. `what`: the work, as the error of the deadline has it, "the check";
  /// `line`: its progress line; `traced`: its name in the trace, or null.
  void inTime(const char *what, const char *line, const char *traced,
              const std::function<void(command::ProgressLine &)> &work);

  const ExecutionOptions &options;
  const unsigned threads;
  std::unique_ptr<Plan> plan; // null until it is open
  /// The folder of the source's files: --source, else `storage` of the job's source; the folder to create: --target,
  /// else `storage` of the job's only target. Empty: none is given.
  std::string source, target;
  Trace trace;
};

/// Does the work for each mesh rank of `memory`.
void forEachRank(const Memory &memory, command::ProgressLine &progress,
                 const std::function<void(const verify::MeshRankMemory &)> &work);

/// The distinct names of hooks (schema::Param::refresh) or transforms in the plan's params, sorted.
std::vector<std::string> callbackNames(const Plan &plan, const flatbuffers::String *(schema::Param::*name)() const);

} // namespace reshard::tools
