// SPDX-License-Identifier: Apache-2.0
// The report of reshard-inspect about a checkpoint.
#pragma once

#include <string>

namespace reshard::report {

enum class FileKind { plan, checkpoint, unknown };

/// Guesses the kind of a file by its first bytes. A file that cannot be opened, or is too short to tell, counts as a
/// plan, so that the plan loader reports it.
FileKind fileKindOf(const std::string &path);

/// Prints the tensors and objects of a checkpoint on stdout, as text or JSON. `glob`: only those whose names match,
/// with all their chunks; empty: all. Returns the exit code, or throws Failure.
int inspectCheckpoint(const std::string &path, const std::string &glob, bool json);

} // namespace reshard::report
