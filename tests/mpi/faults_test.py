# SPDX-License-Identifier: Apache-2.0
"""One rank of an MPI run is killed, stopped or delayed: the others must end in time, name the rank that they
waited for, and not report success; the next launch must work. The signal is raised at a call of MPI by the process
itself (trap/trap.c, preloaded), or sent at any time. RESHARD_BIN: the folder of the commands. faults_test.py
[--trials N] [--seed S]"""

import argparse
import contextlib
import os
import random
import re
import signal
import sys
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from commands import BIN, FolderTest
from launch import Launch

FIRST = 1
TRIALS = 200 if "RESHARD_FULL" in os.environ else 12
DEADLINE = 3.0
RANKS = 4
JOB = """version: 1
model:
  dtype: bf16
  index: {layer: 8}
  tensors:
    "l.{layer}.rows": {shape: [512, 512], shard: {0: tp}}
    "l.{layer}.columns": {shape: [512, 512], shard: {1: tp}}
source: {mesh: {tp: 2}}
target: {mesh: {tp: 1, dp: 3}, ranks: 1..3}
options: {staging: 64KiB, topology: {ranks_per_node: 1}}
"""
# (function, highest count). If the rank makes fewer calls, it gets no signal.
TRAPS = (
    ("MPI_Init_thread", 1),
    ("MPI_Comm_idup", 0),
    ("MPI_Irecv", 12),
    ("MPI_Isend", 12),
    ("MPI_Irecv", 400),
    ("MPI_Isend", 400),
    ("MPI_Test", 3000),
    ("MPI_Finalize", 1),
)


def start(folder, plan, *options, trap=None, deadline=DEADLINE):
    program = [
        BIN / "reshard-exec",
        plan,
        "--transport=mpi",
        "--synthesize",
        "--check",
        *([f"--timeout={deadline}"] if deadline else []),
        *options,
    ]
    environment = {"OMPI_MCA_btl": "self,vader"} | (
        {"RESHARD_TRAP": trap, "LD_PRELOAD": str(BIN / "trap.so")} if trap else {}
    )
    return Launch(folder, ["mpirun"], RANKS, program, environment)


def stopped_since(process):
    """Waits until a process is stopped or has ended. Returns the time; None if it did neither."""
    for _ in range(30000):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return time.monotonic()
        if state in "TtZ":
            return time.monotonic()
        time.sleep(0.002)
    return None


def trial(seed, work, plan, again=2):
    """One fault. Returns a description of the fault and its result, and a complaint; '' if all is right."""
    work.mkdir(exist_ok=True)
    rng = random.Random(seed)
    victim = rng.randrange(RANKS)
    action = rng.choice(("kill", "kill", "stop", "delay"))
    number = signal.SIGKILL if action == "kill" else signal.SIGSTOP
    options = ["--repeat=60", *rng.choice(([], ["--private-memory"], ["--no-local-shortcut"], ["--no-local-shortcut"]))]
    survivors = [rank for rank in range(RANKS) if rank != victim]
    inside = rng.random() < 0.7
    function, highest = rng.choice(TRAPS)
    count = rng.randint(0, highest)
    pause = rng.uniform(0, 1.5)
    where = f"{function} {count}" if inside else f"{pause:.2f} s"
    # A delayed run has enough time to complete, even on a busy machine.
    launch = start(
        work / str(seed),
        plan,
        *options,
        trap=f"{where} {int(number)} {victim}" if inside else None,
        deadline=30 if action == "delay" else DEADLINE,
    )
    try:
        process = launch.process(victim)
        if inside:
            hit = stopped_since(process)
            if hit is None:
                return where, "the run does not end"
        else:
            time.sleep(pause)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
            hit = time.monotonic()
        if action == "delay":
            time.sleep(rng.uniform(0.05, 0.5))
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        # 4 s more than the deadline, since the machine may be busy.
        ended = (
            launch.wait(60) if action == "delay" else launch.wait(DEADLINE + 4 - (time.monotonic() - hit), survivors)
        )
        texts = {rank: launch.read(f"out.{rank}") for rank in ended}
        if 126 in ended.values() and again:  # the shell could not start the program
            print(f"retry: {texts}", flush=True)
            return trial(seed, work / "again", plan, again - 1)
        what = f"{action} rank {victim} at {where}: {ended}"
        for rank, code in ended.items():
            details = f"{what}\n{rank}: {texts[rank]}\n{launch.read('out.mpirun')}"
            right = "bytes right" in texts[rank]
            if code is None:
                return what, f"did not end in time: {details}"
            if code not in (0, 3):
                return what, f"exit code {code}, expected 0 or 3: {details}"
            if right != (code == 0):
                return what, f"exit code and output disagree: {details}"
            if code == 3 and not re.search(r"timed out.*rank \d", texts[rank]):
                return what, f"the error names no rank: {details}"
            if code == 3 and action == "delay":
                return what, f"failed although the delayed rank continued: {details}"
        return what, ""
    finally:
        launch.end()


@unittest.skipIf("RESHARD_SMALL" in os.environ, "deadlines mean nothing under sanitizers")
class Faults(FolderTest):
    def setUp(self):
        super().setUp()
        self.plan = self.folder / "plan"
        self.write("job.yaml", JOB)
        self.call("reshard-compile job.yaml -o", self.plan)

    def test_no_process_calls_finalize(self):
        """MPI_Finalize waits for all processes, and one has ended."""
        traps = "MPI_Isend 3 9 0,MPI_Finalize 0 9 2"
        launch = start(self.folder / "killed", self.plan, "--repeat=60", trap=traps, deadline=10)
        self.addCleanup(launch.end)
        self.assertEqual(launch.wait(60, [0, 2]), {0: 137, 2: 3}, launch.texts())

    def test_faults_of_one_rank(self):
        failed = completed = 0
        with ThreadPoolExecutor(3) as pool:  # a fault mostly waits
            for what, complaint in pool.map(
                lambda seed: trial(seed, self.folder, self.plan), range(FIRST, FIRST + TRIALS)
            ):
                print(what, flush=True)
                self.assertEqual(complaint, "", complaint)
                failed += ": {" in what and "3" in re.findall(r": (\d)", what)
                completed += "3" not in re.findall(r": (\d)", what)
        print(f"{TRIALS} faults: {failed} runs failed in time, {completed} completed")
        self.assertGreater(failed, TRIALS // 4)
        launch = start(self.folder / "again", self.plan, deadline=30)
        self.addCleanup(launch.end)
        self.assertEqual(set(launch.wait(60).values()), {0})

    def test_exit_inside_mpi(self):
        """Open MPI calls _exit if a peer is lost in MPI_Init: with a deadline the process lives until then, to print
        its error; without one it ends at once."""
        for deadline, ranks in ((DEADLINE, range(RANKS)), (None, [1])):
            with self.subTest(deadline=deadline):
                launch = start(
                    self.folder / f"ended{deadline}", self.plan, trap="MPI_Init_thread 0 0 1", deadline=deadline
                )
                self.addCleanup(launch.end)
                self.assertEqual(set(launch.wait(30, ranks).values()), {3})
                for rank in ranks if deadline else ():
                    self.assertIn("timed out in MPI_Init", launch.read(f"out.{rank}"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--seed", type=int, default=1)
    arguments, rest = parser.parse_known_args()
    TRIALS, FIRST = arguments.trials, arguments.seed
    unittest.main(argv=[sys.argv[0], *rest])
