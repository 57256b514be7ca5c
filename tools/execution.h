// One run of reshard-exec, from options to exit code.
#pragma once

#include "tools/common.h"

#include <cstdint>
#include <string>

namespace reshard::tools {

struct ExecutionOptions {
  std::string plan, source, target, transport = "threads", device = "cpu", report, trace;
  bool synthesize = false, check = false, checkReplicas = false;
  std::string allow; // "extra": tensors of the source's files that the plan does not know are left where they are
  uint64_t seed = 0, repeat = 1;
  unsigned threads = 0; // 0: all cores
  double timeout = 0;   // 0: none
  bool noLocalShortcut = false;
  uint64_t memory = 0; // bytes that may be resident; 0: no limit
  std::string copy;    // the folder of a model, whose files other than weights go beside those of written checkpoints
  uint64_t shardBytes = 0; // of a written checkpoint's file; 0: as Hugging Face cuts them
};

/// Prints messages on stderr, the table on stdout, writes report and trace; returns the exit code.
int execute(const ExecutionOptions &options);

} // namespace reshard::tools
