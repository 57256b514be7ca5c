// Open MPI ends a process by _exit where a peer is lost in MPI_Init, which no handler of errors prevents. The process
// should end by itself instead: with its exit code, and after it has said at the deadline who is missing.
#pragma once

namespace reshard::tools {

/// What comes of a call of _exit by another thread than the main one: it ends the process; it ends it with kFailure; it
/// waits for the main thread.
enum class ExitPolicy { pass, fail, wait };

/// From now on; `pass` at first. To be another only while this process joins its peers, or leaves them.
void guardExits(ExitPolicy how);

/// _exit for any thread, whatever is held.
[[noreturn]] void endProcess(int code);

} // namespace reshard::tools
