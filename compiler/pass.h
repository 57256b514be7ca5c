// The pass registry: passes.def lists them in their default order; compile.cpp runs them. A pass is one file and one
// line.
#pragma once

#include "ir/ir.h"

#include <string>
#include <vector>

namespace reshard {

/// A pass reads and refines the module in place; it returns an error text that names tensor, param and endpoint, or
/// nothing.
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
