// SPDX-License-Identifier: Apache-2.0
// The progress line of a run that writes files: bytes, rate, time left, the tensor that is written.
#pragma once

#include "command/common.h"
#include "executor/memory/copy_progress.h"
#include "tools/run/memory.h"

#include <map>
#include <string>

namespace reshard::tools {

class RunProgress {
public:
  /// `target`: the memory that the run writes.
  RunProgress(const Plan &plan, const Memory &target);
  void at(const CopyProgress &progress);

private:
  std::map<const std::byte *, std::string> tensors_; // by the begin of their memory
  command::ProgressLine line_{"copy"};
  bool begun_ = false;
  double begin_ = 0;              // time of the first call in a run
  uint64_t first_ = 0, last_ = 0; // bytes at the first and the last call in a run
};

/// "1.2 GiB of 3.4 GiB, 512.0 MiB/s, 5 s left"; without the rate and the time if no time has passed.
std::string progressText(uint64_t done, uint64_t all, uint64_t moved, double seconds);

} // namespace reshard::tools
