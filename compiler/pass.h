// SPDX-License-Identifier: Apache-2.0
// The pass registry: passes.def lists the passes in their default order, compile.cpp runs them. Each pass is one file
// and one line of passes.def.
#pragma once

#include "compiler/schedule/rank_schedules.h"
#include "ir/ir.h"

#include "llvm/Support/Error.h"

#include <memory>
#include <vector>

namespace reshard {

/// What passes change: the module, and from the pass `schedule` on the schedules of its ranks, which refer to it.
struct Lowering {
  ir::Module module;
  std::unique_ptr<RankSchedules> ranks;
};

struct PassInfo {
  const char *name; // as on the command line
  ir::Level level;  // the level of the module after it
  /// Its error names tensor, param and endpoint.
  llvm::Error (*run)(Lowering &);
  /// Whether a module already has the result of the pass: IR text that was printed after a pass continues with the
  /// next one.
  bool (*done)(const ir::Module &);
  bool onRequest;   // runs only if an option asks for it
  const char *help; // one line
};

/// All passes, in default order.
const std::vector<PassInfo> &passes();

// The passes change the module; passes of ranks also change their schedules.
#define PASS(name, level, function, ...) llvm::Error function(ir::Module &module);
#define RANKS_PASS(name, level, function, ...)                                                                         \
  llvm::Error function(ir::Module &module, std::unique_ptr<RankSchedules> &ranks);
#include "compiler/passes.def"
#undef PASS
#undef RANKS_PASS

} // namespace reshard
