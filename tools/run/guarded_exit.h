// SPDX-License-Identifier: Apache-2.0
// Controls calls of _exit by other threads. Open MPI calls _exit if a peer is lost in MPI_Init, and no error handler
// prevents that. This process must instead exit with its own code, after it has named the missing ranks at the
// deadline.
#pragma once

namespace reshard::tools {

/// What a call of _exit by a thread other than the main thread does: it ends the process with its code (pass) or with
/// kFailure (fail), or it blocks until the main thread ends the process (wait).
enum class ExitPolicy { pass, fail, wait };

/// Sets the policy; initially `pass`. Use another policy only while this process joins or leaves its peers.
void guardExits(ExitPolicy how);

/// Ends the process immediately, from any thread and with any locks held.
[[noreturn]] void endProcess(int code);

/// What the policy says of a call of _exit. reshard-exec replaces libc's _exit by it.
[[noreturn]] void exitByPolicy(int code);

} // namespace reshard::tools
