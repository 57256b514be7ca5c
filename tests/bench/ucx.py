#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Transport ucx beside its peers: the cases of bench-mpi with four processes, on one host and on two simulated hosts
that exchange messages over TCP, with memory that the processes of a host share and with private memory. Prints the
tables of docs/performance.md. ucx.py BENCH-MPI [REGEX OF CASES [REGEX OF PLACES]]

Each case is a launch of its own. Open MPI sometimes fails to connect its processes; such a launch is repeated. An error
of bench-mpi itself is final. The other cases run nevertheless; the exit status is 1 if a case has no result."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import hosts
from launch import ENVIRONMENT

ATTEMPTS = 3
SECONDS = 600  # of an attempt
RANKS = 4
ROUNDS = {"one host": 11, "two hosts": 3}  # TCP is slower, and all processes share the cores
COLUMNS = ("ucx_GB/s", "ucx_ratio_to_best", "ucx_ratio_to_ours")
OWN_ERROR = re.compile(r"^bench-mpi: rank \d+: .*", re.MULTILINE)


def cases(bench):
    """The names of all cases."""
    listed = subprocess.run(
        [bench, "--benchmark_list_tests"],
        env=os.environ | ENVIRONMENT,
        check=True,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return listed.stdout.split()


def run(command):
    """The counters of a case, or an error; and whether another attempt may succeed."""
    try:
        done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None, f"no result within {SECONDS} s", True
    if own := OWN_ERROR.search(done.stderr):
        return None, own[0], False
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip(" -")]
        return None, f"exit status {done.returncode}: {' '.join(lines[:4])}", True
    if "{" not in done.stdout:
        return None, f"no result: {done.stdout.strip()}", True
    return json.loads(done.stdout[done.stdout.index("{") :])["benchmarks"][0], "", False


def measure(command, name, where):
    """The counters of a case; None, with the reason on standard error, if it has no result."""
    for attempt in range(1, ATTEMPTS + 1):
        counters, error, again = run(
            [*command, f"--benchmark_filter=^{name.split('/')[0]}/", "--benchmark_format=json"]
        )
        if counters:
            return counters
        print(f"ucx.py: {name}, {where}, attempt {attempt}: {error}", file=sys.stderr)
        if not again:
            return None
    return None


def places(bench, stack):
    """The commands that launch a case, by place; and what cannot be measured."""
    found, failed = {"one host": ["mpirun", "-n", str(RANKS), bench]}, []
    if missing := hosts.Hosts.missing():
        failed = [f"two hosts ({missing})"]
    else:
        two = stack.enter_context(hosts.Hosts(2, Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        # The hosts share a kernel: UCX must not use the memory or the devices of the other one.
        ucx = ["env", "UCX_TLS=tcp", "UCX_NET_DEVICES=net0"]
        found["two hosts"] = [*two.mpirun(RANKS), "-n", str(RANKS), *ucx, bench]
    return {
        f"{where}, {memory} memory": [*command, f"--rounds={ROUNDS[where]}", *flags]
        for where, command in found.items()
        for memory, flags in (("shared", ()), ("private", ("--private-memory",)))
    }, failed


def main():
    bench = Path(sys.argv[1]).resolve()
    wanted, where_wanted = (*sys.argv[2:4], "", "")[:2]
    selected = [name for name in cases(bench) if re.search(wanted, name)]
    with contextlib.ExitStack() as stack:
        commands, failed = places(bench, stack)
        for where, command in commands.items():
            if not re.search(where_wanted, where):
                continue
            print(f"\n| {where} | {' | '.join(COLUMNS)} |\n|---|{len(COLUMNS) * '---:|'}")
            for name in selected:
                counters = measure(command, name, where)
                values = [f"{counters[column]:.2f}" if counters else "failed" for column in COLUMNS]
                print(f"| {name.split('/')[0]} | {' | '.join(values)} |", flush=True)
                failed += [] if counters else [f"{name.split('/')[0]} on {where}"]
    if failed:
        sys.exit(f"ucx.py: no result: {', '.join(failed)}")


if __name__ == "__main__":
    main()
