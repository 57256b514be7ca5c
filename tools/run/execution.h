// SPDX-License-Identifier: Apache-2.0
// One run of reshard-exec, from options to exit code.
#pragma once

#include "base/renames.h"
#include "command/common.h"
#include "executor/interfaces/transport_traits.h"
#include "tools/run/carried.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace reshard::tools {

struct ExecutionOptions {
  std::string plan, source, target, report, trace;
  std::string transport = transports().front().name, device = transports().front().device; // both known
  bool synthesize = false, check = false, checkReplicas = false;
  std::string allow; // "extra": tensors in the source's files that the plan does not use are ignored, and objects that
                     // the target cannot hold
  Renames renames;   // for tensors in the source's files
  ObjectRules objects; // without allowExtra, which `allow` states
  uint64_t seed = 0, repeat = 1;
  unsigned threads = 0;         // 0: all cores
  double timeout = 0;           // 0: none
  std::optional<uint32_t> rank; // this process's; no value: the transport finds it
  std::string rendezvous, job;  // empty: none
  bool insecure = false;
  bool noLocalShortcut = false, privateMemory = false;
  uint64_t memory = 0;     // limit of resident bytes; 0: none
  std::string copy;        // a model's folder; its files other than weights are copied into written checkpoints
  bool noSync = false;     // do not wait until written files are on their device
  bool resume = false;     // continue the run that left an unfinished target
  uint64_t shardBytes = 0; // largest file of a written checkpoint, in bytes; 0: 5 GB, as Hugging Face
  std::vector<std::string> notSynthesized; // the errors of given options that are wrong beside --synthesize

  /// What holds for the transport on each of its devices.
  const TransportTraits &traits() const { return *findTransport(transport); }
};

/// Prints errors on stderr and the result on stdout; writes the report and the trace. Returns the exit code.
int execute(const ExecutionOptions &options);

} // namespace reshard::tools
