# SPDX-License-Identifier: Apache-2.0
"""Kills a process at one of its system calls.

    system_calls.py PROCESS COUNT SECONDS

Traces all threads of the process (ptrace), prints "tracing", and sends SIGKILL when the COUNTth system call from then
on begins; after SECONDS at the latest. Exit code 1: the process cannot be traced."""

import contextlib
import ctypes
import os
import signal
import sys

SYSCALL, SEIZE, INTERRUPT = 24, 0x4206, 0x4207  # of <sys/ptrace.h>
OPTIONS = 1 | 8  # mark the stops of system calls; trace new threads
ALL = 0x40000000  # __WALL: wait for threads too
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def ptrace(request, thread, data=0):
    return LIBC.ptrace(request, thread, None, data) == 0


def attach(process):
    """Traces the threads of a process. Returns whether there is one."""
    traced = [thread for thread in map(int, os.listdir(f"/proc/{process}/task")) if ptrace(SEIZE, thread, OPTIONS)]
    for thread in traced:
        ptrace(INTERRUPT, thread)
    return bool(traced)


def kill_at(process, count):
    """Continues the threads from system call to system call. Returns when all have ended."""
    inside = set()  # threads that have begun a system call
    with contextlib.suppress(ChildProcessError):  # no thread is left
        while True:
            thread, status = os.waitpid(-1, ALL)
            if not os.WIFSTOPPED(status):
                continue
            stop, event = os.WSTOPSIG(status), status >> 16
            if stop == signal.SIGTRAP | 0x80:
                if thread not in inside:
                    count -= 1
                    if count == 0:
                        os.kill(process, signal.SIGKILL)
                inside ^= {thread}
            ours = stop == signal.SIGTRAP | 0x80 or event
            ptrace(SYSCALL, thread, 0 if ours else stop)


def main():
    process, count, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

    def kill(*_):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    try:
        attached = attach(process)
    except FileNotFoundError:  # the process has ended
        attached = False
    print("tracing" if attached else f"process {process} cannot be traced", flush=True)
    if not attached:
        sys.exit(1)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    kill_at(process, count)


if __name__ == "__main__":
    main()
