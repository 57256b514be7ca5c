// What the options of reshard-exec mean for a plan: its folders, and whether they go together.
#pragma once

#include "executor/load.h"
#include "tools/execution.h"

#include <string>
#include <vector>

namespace reshard::tools {

/// The folder of the source's files: --source, else `storage` of the job's source; empty where neither is given.
std::string sourceFolder(const ExecutionOptions &options, const Plan &plan);

/// The folder to make: --target, else `storage` of the job's only target. Several targets appear together in one
/// folder, which only --target names. Empty where there is none.
std::string targetFolder(const ExecutionOptions &options, const Plan &plan);

/// Throws a Failure where options do not fit each other or the plan.
void checkOptions(const ExecutionOptions &options, const Plan &plan);

/// The hooks (schema::Param::refresh) or transforms that the plan's params name, each once.
std::vector<std::string> namesOf(const Plan &plan, const flatbuffers::String *(schema::Param::*name)() const);

} // namespace reshard::tools
