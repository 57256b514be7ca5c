// SPDX-License-Identifier: Apache-2.0
// Texts that are made from the table of a command's flags: its help, its manual page, and the completions of shells.
#pragma once

#include "command/options.h"

#include <string>

namespace reshard::tools {

/// What --help prints.
std::string helpOf(const Command &command);

/// A manual page for man: `reshard-exec --manual >reshard-exec.1`.
std::string manualOf(const Command &command);

/// The shells whose completions --completion prints.
constexpr const char *kShells[] = {"bash", "zsh", "fish"};

/// The completion script of a shell: names of flags, and files for their values and for arguments.
std::string completionOf(const Command &command, const std::string &shell);

} // namespace reshard::tools
