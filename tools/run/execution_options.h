// SPDX-License-Identifier: Apache-2.0
// Interprets the options of reshard-exec for a plan: its folders, and whether the options are compatible.
#pragma once

#include "executor/load/load.h"
#include "reshard/reshard.h"
#include "tools/run/execution.h"

#include <string>
#include <vector>

namespace reshard::tools {

/// The folder of the source's files: --source, else `storage` of the job's source; empty if neither is given.
std::string sourceFolder(const ExecutionOptions &options, const Plan &plan);

/// The folder to create: --target, else `storage` of the job's only target. Several targets are written to one folder,
/// which only --target can name. Empty if neither is given.
std::string targetFolder(const ExecutionOptions &options, const Plan &plan);

/// An error, which is `invalid`, if the options contradict each other or the plan.
Status checkOptions(const ExecutionOptions &options, const Plan &plan);

/// The options of reshard_open, with texts of `options`.
reshard_options openOptions(const ExecutionOptions &options, unsigned threads);

/// The distinct names of hooks (schema::Param::refresh) or transforms in the plan's params, sorted.
std::vector<std::string> namesOf(const Plan &plan, const flatbuffers::String *(schema::Param::*name)() const);

} // namespace reshard::tools
