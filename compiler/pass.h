// SPDX-License-Identifier: Apache-2.0
// The pass registry: passes.def lists the passes in their default order, compile.cpp runs them. Each pass is one file
// and one line of passes.def.
#pragma once

#include "ir/ir.h"

#include "llvm/Support/Error.h"

#include <vector>

namespace reshard {

/// A pass changes the module in place. Its error names tensor, param and endpoint.
using PassFunction = llvm::Error (*)(ir::Module &);

struct PassInfo {
  const char *name; // as on the command line
  ir::Level level;  // the level of the module after it
  PassFunction run;
  const char *help; // one line
};

/// All passes, in default order.
const std::vector<PassInfo> &passes();

#define PASS(name, level, function, help) llvm::Error function(ir::Module &module);
#include "compiler/passes.def"
#undef PASS

} // namespace reshard
