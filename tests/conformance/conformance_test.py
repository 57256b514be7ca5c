# SPDX-License-Identifier: Apache-2.0
"""One suite for every transport and device: all rows of the semantics table and random jobs of 2 to 8 ranks, many plans
in a launch, with every target byte checked with two seeds; then many runs, which must neither allocate nor grow.
RESHARD_BIN: the folder of the commands.

A new transport or device needs one more line in TARGETS."""

import copy
import json
import os
import random
import re
import tempfile
import unittest
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import fake_backend
import generate
import harness
import hosts
import mpi_test
import rows_test
from commands import BIN, MPI_ENVIRONMENT, ROOT, job_of, run, shared_folder

SMALL = "RESHARD_SMALL" in os.environ
UCX = (BIN / "libreshard_ucx.so").exists()
WORLDS = range(2, 9)
FULL = "RESHARD_FULL" in os.environ
JOBS = 504 if FULL else 42  # random jobs; equally many of each world
LARGE = 400_000  # plans of more target bytes run on several hosts in full alone: there many processes share two cores
EXCHANGES = ["auto", "nodes", "p2p", "broadcast", "gather-rounds"]


class Target(NamedTuple):
    """Transport, device and options with which plans run."""

    transport: str
    device: str
    options: tuple = ()
    hosts: int = 1

    def __str__(self):
        return " ".join(
            [self.transport, self.device, *self.options, *([f"on {self.hosts} hosts"] if self.hosts > 1 else [])]
        )


PRIVATE = ("--private-memory",)
# Slots are above the channel, so both transports use the same code: the quick mode runs all plans through them with ucx
# only, and mpi_test runs every kind of schedule with mpi. Plans on two hosts send messages too, so the quick mode needs
# no --no-local-shortcut.
TARGETS = [
    Target("threads", "cpu"),
    *(
        Target(name, "cpu", *more)
        for name in ("mpi", "ucx")
        for more in ((), (PRIVATE,), (("--no-local-shortcut",),), ((), 2))
        if FULL or (name, *more) != ("mpi", PRIVATE) and more != (("--no-local-shortcut",),)
    ),
    FOUR_HOSTS := Target("ucx", "cpu", (), 4),
    Target("threads", "cuda"),
]  # on the CPU device of tests/executor/fake_backend.cpp; on a GPU: tests/gpu/run.sh
# Source, target and options of plans that run many times, on few ranks.
OFTEN = [
    ({"mesh": {"tp": 2}}, {"mesh": {"tp": 4}}, {}),  # local, in place and packed
    ({"mesh": {"tp": 2}}, {"mesh": {"tp": 4}}, {"staging": 1024}),  # many chunks
    ({"mesh": {"tp": 1}}, {"mesh": {"tp": 1, "dp": 3}, "ranks": "1..3"}, {"topology": {"ranks_per_node": 1}}),  # chains
    ({"storage": "files"}, {"mesh": {"tp": 2, "dp": 2}}, {"exchange": "gather-rounds", "staging": 4096}),
]  # around a ring, chunk by chunk
OFTEN_WEIGHTS = {
    "dtype": "bf16",
    "tensors": {
        "rows": {"shape": [128, 64], "shard": {"0": "tp"}},
        "columns": {"shape": [128, 64], "shard": {"1": "tp"}},
        "norm": {"shape": [777], "dtype": "fp32"},
    },
}
# The program checks for leaks itself, before MPI_Finalize. The leak checker of GCC 12 misreads thread-local
# storage that begins 16 bytes after a page boundary, and crashes. With redzones of 256 bytes, the 36 bytes of
# libucs never begin there.
ENVIRONMENT = MPI_ENVIRONMENT | {
    "LSAN_OPTIONS": f"suppressions={ROOT}/tests/conformance/lsan.supp:print_suppressions=0",
    "ASAN_OPTIONS": f"{os.environ.get('ASAN_OPTIONS', '')}:redzone=256",
}


class Agreeing:
    """A report that satisfies every assertion of a row: tests/semantics checks the real ones."""

    def __getitem__(self, key):
        return self

    def __eq__(self, other):
        return True


def rows():
    """(name, job) of all jobs of the semantics table that move something."""
    jobs = []

    def record(case, job, seed=1):
        jobs.append((f"{case.id().split('.')[-1]}-{len(jobs)}", copy.deepcopy(job)))
        return Agreeing()

    with mock.patch.object(harness.Case, "moved", record), mock.patch.object(harness.Case, "refused", lambda *_: None):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromModule(rows_test).run(result)
    assert result.wasSuccessful() and result.testsRun >= 49, result
    return jobs


def random_job(seed):
    node, _, _ = generate.generate(random.Random(seed), generate.CELLS[seed * 37 % len(generate.CELLS)])
    varied = ({}, {"topology": {"ranks_per_node": 2}}, {"staging": 4096})[seed % 3]
    if "storage" in node["source"]:
        varied = varied | {"exchange": EXCHANGES[seed % len(EXCHANGES)]}
    node["options"] = node.get("options", {}) | varied
    return f"seed-{seed}", node


def writes_files(job):
    return any("storage" in each for each in (job["target"] if isinstance(job["target"], list) else [job["target"]]))


class Plans:
    """Folders of compiled plans, by kind (the transports that can run them) and world."""

    def __init__(self, root):
        self.root = Path(root)
        self.bytes = defaultdict(list)  # folder -> target bytes of each plan
        self.omitted = Counter()

    def compile(self, named, may_fail=False):
        """Compiles a job into the root folder. Returns its report; None if it does not compile and `may_fail`."""
        name, job = named
        (self.root / f"{name}.yaml").write_text(json.dumps(job))
        done = run(
            f"reshard-compile {name}.yaml -o {name}.rplan --report={name}.json --jobs=1",
            code=None if may_fail else 0,
            cwd=self.root,
        )
        return json.loads((self.root / f"{name}.json").read_text()) if done.returncode == 0 else None

    def add(self, kind, name, report):
        if kind == "all" and report["bytes"]["target"] > LARGE and not FULL:
            kind = "large"
        folder = self.root / kind / str(report["world"])
        folder.mkdir(parents=True, exist_ok=True)
        (self.root / f"{name}.rplan").rename(folder / f"{name}.rplan")
        self.bytes[folder].append(report["bytes"]["target"])

    def add_all(self, pool, kind, named):
        for (name, _), report in zip(named, pool.map(self.compile, named)):
            self.add(kind, name, report)

    def add_rows(self, pool):
        named = rows()
        for (name, job), report in zip(named, pool.map(self.compile, named)):
            reason = "writes files" if writes_files(job) else "more than 8 ranks" if report["world"] > 8 else ""
            self.omitted[f"rows with a process for each rank: {reason}"] += bool(reason)
            self.add("one-process" if reason else "all", name, report)

    def add_random_jobs(self, pool):
        wanted = Counter({world: JOBS // len(WORLDS) for world in WORLDS})
        for first in range(1, 100 * JOBS, 32):
            named = [random_job(seed) for seed in range(first, first + 32)]
            for (name, job), report in zip(named, pool.map(lambda each: self.compile(each, may_fail=True), named)):
                reason = (
                    "does not compile"
                    if not report
                    else "writes files"
                    if writes_files(job)
                    else "no messages"
                    if report["messages"] == 0
                    else "more than 8 ranks"
                    if report["world"] > 8
                    else "enough jobs of its world"
                    if wanted[report["world"]] == 0
                    else ""
                )
                self.omitted[f"random jobs: {reason}"] += bool(reason)
                if not reason:
                    wanted[report["world"]] -= 1
                    self.add("all", name, report)
            if not +wanted:
                return
        raise AssertionError(f"too few random jobs: {+wanted} more are needed (world: jobs)")


class Conformance(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.plans = plans = Plans(shared_folder(cls, dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        cls.programs = {"cpu": BIN / "conformance", "cuda": fake_backend.copy_with_backends(plans.root, "conformance")}
        with ThreadPoolExecutor(2) as pool:
            plans.add_rows(pool)
            plans.add_random_jobs(pool)
            for kind, model, jobs in (("all", mpi_test.WEIGHTS, mpi_test.KINDS), ("often", OFTEN_WEIGHTS, OFTEN)):
                named = [
                    (f"{kind}-{n}", job_of(model, source, target, options=options))
                    for n, (source, target, options) in enumerate(jobs)
                ]
                plans.add_all(pool, kind, named)
        cls.targets = [target for target in TARGETS if target.transport != "ucx" or UCX]
        if not UCX:
            print("SKIPPED: transport ucx is not built")
        if missing := hosts.Hosts.missing():
            print(f"SKIPPED: several hosts cannot be simulated: {missing}")
            cls.targets = [target for target in cls.targets if target.hosts == 1]
        else:
            cls.hosts = {
                count: cls.enterClassContext(hosts.Hosts(count, plans.root))
                for count in {target.hosts for target in cls.targets if target.hosts > 1}
            }
        counts = Counter()
        for path, sizes in plans.bytes.items():
            counts[path.parent.name] += len(sizes)
        print(f"plans: {dict(counts)}; omitted:", flush=True)
        for reason, count in sorted((+plans.omitted).items()):
            print(f"{count:6} {reason}")

    def launch(self, target, folder, *options, processes=None):
        command = [
            self.programs[target.device],
            folder,
            f"--transport={target.transport}",
            f"--device={target.device}",
            *target.options,
            *options,
        ]
        if target.transport == "ucx":
            meeting = tempfile.TemporaryDirectory(dir=self.plans.root)
            self.addCleanup(meeting.cleanup)
            command.append(f"--rendezvous=file://{meeting.name}")
            if target.hosts > 1:  # they share a kernel, which UCX would notice
                command = ["env", "UCX_TLS=tcp", "UCX_NET_DEVICES=net0", *command]
        if target.transport != "threads":
            processes = processes or int(folder.name)
            command = [
                *(self.hosts[target.hosts].mpirun(processes) if target.hosts > 1 else ["mpirun"]),
                "-n",
                str(processes),
                *command,
            ]
        return run("timeout -k10 600", *command, code=None, env=ENVIRONMENT)

    def exact(self, target, kind, *options, seeds=2, worlds="*"):
        """Runs the plans of a kind, one launch for each world; all must be right. Returns the number of plans."""
        count = 0
        for folder in sorted(self.plans.root.glob(f"{kind}/{worlds}")):
            with self.subTest(str(target), kind=kind, world=folder.name):
                done = self.launch(target, folder, *options)
                sizes = self.plans.bytes[folder]
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertRegex(
                    done.stdout,
                    rf"(?m)^{len(sizes)} plans, {seeds * sum(sizes)} bytes right, 0 wrong$",
                    done.stdout + done.stderr,
                )
                count += len(sizes)
        return count

    def test_exact(self):
        for target in self.targets:
            if target == FOUR_HOSTS and not FULL:
                self.assertGreater(self.exact(target, "all", worlds="8"), JOBS // len(WORLDS))
                continue
            kinds = [
                "all",
                *(["large"] if target.hosts == 1 else []),
                *(["one-process"] if target.transport == "threads" else []),
            ]
            count = sum(self.exact(target, kind) for kind in kinds)
            self.assertGreater(count, JOBS + 49, str(target))
            print(f"{target}: {count} plans", flush=True)

    def test_runs_allocate_nothing_and_do_not_grow(self):
        for target in self.targets:
            if target.device != "cpu" or target == FOUR_HOSTS and not FULL:
                continue
            # Through slots, sender and receiver alternate for each small chunk: slow if they share a core with others.
            few = target.hosts > 1 or target.options == PRIVATE
            repeat = 200 if few and not FULL else 1000
            options = [f"--repeat={repeat}"] + (
                [] if SMALL else ["--count-allocations"]
            )  # sanitizers replace the allocator
            self.assertEqual(self.exact(target, "often", *options, seeds=3), len(OFTEN))

    def test_a_failed_run_is_reported_and_the_next_plan_runs(self):
        folder = self.plans.root / "often" / "4"
        for transport in ("mpi", "ucx") if UCX else ("mpi",):
            with self.subTest(transport):
                done = self.launch(Target(transport, "cpu"), folder, "--timeout=0.000001")
                self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                count = len(self.plans.bytes[folder])
                self.assertEqual(
                    len(set(re.findall(r"(?m)^(\S+): rank \d+: timed out", done.stdout))), count, done.stdout
                )
                self.assertRegex(done.stdout, rf"(?m)^{count} plans, 0 bytes right, {count} wrong$")

    def test_rejects_another_number_of_processes(self):
        done = self.launch(Target("mpi", "cpu"), self.plans.root / "often" / "4", processes=2)
        self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
        self.assertIn("the channel has 2 processes, expected 4, one for each rank of the plan", done.stdout)


if __name__ == "__main__":
    unittest.main()
