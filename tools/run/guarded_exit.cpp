// SPDX-License-Identifier: Apache-2.0
#include "tools/run/guarded_exit.h"

#include "command/common.h"

#include <atomic>
#include <sys/syscall.h>
#include <unistd.h>

namespace reshard::tools {

using namespace command;

namespace {
std::atomic<ExitPolicy> others = ExitPolicy::pass;
}

void guardExits(ExitPolicy how) { others = how; }

void endProcess(int code) {
  for (;;)
    syscall(SYS_exit_group, code);
}

void exitByPolicy(int code) {
  if (gettid() == getpid()) // the main thread, or a forked child
    endProcess(code);
  while (others == ExitPolicy::wait)
    usleep(1000);
  endProcess(others == ExitPolicy::fail ? kFailure : code);
}

} // namespace reshard::tools
