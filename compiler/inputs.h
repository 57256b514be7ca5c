// SPDX-License-Identifier: Apache-2.0
// The job from which a plan was compiled. The plan holds it, so that it can be compiled again with changes.
#pragma once

#include "base/yaml/diagnostics.h"
#include "compiler/frontend/allowed.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace reshard {

struct CompileOptions;
namespace schema {
struct JobInput;
}

struct JobInputs {
  /// Path and text: the job, then the files that it names. A path is the one by which the compiler looks for the file
  /// if the job is in the current folder.
  std::vector<std::pair<std::string, std::string>> files;
  std::vector<std::string> overrides; // --set
  Allowed allowed;
  bool relabel = false, megatron = false;
};

/// The inputs of a job that was read; `job` is its file in `diagnostics`. nullopt if a plan cannot hold them: they are
/// larger than schema/limits.h allows, two files have one path, or the plan also depends on --keep or --passes.
std::optional<JobInputs> inputsOf(const Diagnostics &diagnostics, uint32_t job, const CompileOptions &options);

/// The inputs that a plan holds; nullopt if it holds none.
std::optional<JobInputs> inputsOf(const schema::JobInput *stored);

} // namespace reshard
