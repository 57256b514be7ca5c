// The pass registry: passes.def lists the passes in their default order, compile.cpp runs them. Each pass is one file
// and one line of passes.def.
#pragma once

#include "ir/ir.h"

#include <string>
#include <vector>

namespace reshard {

/// A pass changes the module in place. It returns an error text that names tensor, param and endpoint, or nothing.
using PassFunction = std::string (*)(ir::Module &);

struct PassInfo {
  const char *name; // as on the command line
  ir::Level level;  // the level of the module after it
  PassFunction run;
  const char *help; // one line
};

/// All passes, in default order.
const std::vector<PassInfo> &passes();

#define PASS(name, level, function, help) std::string function(ir::Module &module);
#include "compiler/passes.def"
#undef PASS

} // namespace reshard
