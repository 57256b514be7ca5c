// SPDX-License-Identifier: Apache-2.0
// The report of reshard-inspect about a checkpoint.
#pragma once

#include <optional>
#include <string>

namespace reshard::analysis {

/// Whether a path is a folder, or a file of safetensors or torch.save; false: a plan, or a file that is too short to
/// tell or cannot be opened, whose errors are those of a plan. Nothing: a file that is neither.
std::optional<bool> isCheckpoint(const std::string &path);

/// Prints the tensors and objects of a checkpoint on stdout, as text or JSON. `glob`: only those whose names match,
/// with all their chunks; empty: all. Returns the exit code, or throws Failure.
int inspectCheckpoint(const std::string &path, const std::string &glob, bool json);

} // namespace reshard::analysis
