# SPDX-License-Identifier: Apache-2.0
"""Transport ucx with another UCX than the system's: that of the wheel libucx-cu12, which RESHARD_UCX_ROOT names.

scripts/frameworks.sh && . build/frameworks/env.sh
. build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/frameworks/ucx_test.py"""

import os
import re
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

import hosts
import launchers
from commands import BIN, ROOT, run, shared_folder

UCX = Path(os.environ.get("RESHARD_UCX_WHEEL", "missing"))
VERSION = re.search(r"libucx-cu12==([\d.]+)", (ROOT / "scripts" / "frameworks.sh").read_text())[1]
MISSING = (
    "transport ucx was not built"
    if not (BIN / "libreshard_ucx.so").exists()
    else ""
    if UCX.is_dir()
    else "RESHARD_UCX_WHEEL is not a folder: run scripts/frameworks.sh and build/frameworks/env.sh"
)
NO_HOSTS = hosts.Hosts.missing()
JOB = """version: 1
model: {dtype: bf16, index: {layer: 4}, tensors: {
  "l.{layer}.rows": {shape: [1536, 768], shard: {0: tp}},
  "l.{layer}.columns": {shape: [1536, 768], shard: {1: tp}},
  norm: {shape: [777], dtype: fp32}}}
source: {mesh: {tp: %d}}
target: {mesh: {tp: %d}}
"""
OPEN = """
import ctypes, sys
import reshard
ctypes.CDLL(sys.argv[1])
reshard.Executor(sys.argv[2], 0, transport="ucx", rendezvous=sys.argv[3], join_timeout=1)
"""


@unittest.skipIf(MISSING, MISSING)
class SecondUcx(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = shared_folder(cls)
        cls.environment = launchers.environment(cls.folder)
        cls.environment |= {"RESHARD_UCX_ROOT": str(UCX), "RESHARD_SECRET": "second"}

    def compile(self, source, target):
        (self.folder / "job.yaml").write_text(JOB % (source, target))
        run("reshard-compile", self.folder / "job.yaml", "-o", self.folder / "plan")
        return self.folder / "plan"

    def command(self, plan, rank, url, *options):
        return [
            BIN / "reshard-exec",
            plan,
            "--transport=ucx",
            f"--rank={rank}",
            f"--rendezvous={url}",
            "--synthesize",
            "--check",
            "--timeout=60",
            *options,
        ]

    def check(self, source, target, url, *options, inside=lambda rank: [], more=()):
        """Runs a job with one process for each rank. All bytes must be right, and each process must have used the
        wheel's UCX."""
        plan = self.compile(source, target)
        environment = self.environment | {"UCX_LOG_LEVEL": "info"} | dict(more)
        ranks = range(max(source, target))
        processes = [
            subprocess.Popen(
                [*inside(rank), *self.command(plan, rank, url, *options)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in ranks
        ]
        for process in processes:
            self.addCleanup(process.kill)
        for rank, process in zip(ranks, processes):
            output, _ = process.communicate(timeout=120)
            self.assertEqual(process.returncode, 0, output)
            self.assertIn(f"Version {VERSION} (loaded from {UCX}/lib/libucp.so.0)", output)
            if rank < target:
                self.assertRegex(output, rf"(?m)^ +rank {rank}: \d+ bytes right$")

    def test_one_host(self):
        for source, target, *options in ((1, 2), (3, 2), (2, 4), (2, 4, "--no-local-shortcut"), (4, 2, "--repeat=20")):
            with self.subTest(source=source, target=target, options=options):
                self.check(source, target, f"tcp://127.0.0.1:{launchers.free_port()}", *options)

    @unittest.skipIf(NO_HOSTS, f"several hosts cannot be simulated: {NO_HOSTS}")
    def test_two_hosts(self):
        with hosts.Hosts(2, self.folder) as made:
            tcp = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "net0"}  # the hosts share a kernel, which UCX would notice
            url = f"tcp://{made.address(0)}:29600"
            for source, target, *options in ((1, 2), (2, 3), (2, 4, "--repeat=20"), (4, 2)):
                with self.subTest(source=source, target=target):
                    self.check(source, target, url, *options, inside=lambda rank: made.inside(rank % 2), more=tcp)

    def refused(self, root):
        """The error of a process with this RESHARD_UCX_ROOT."""
        command = self.command(self.compile(1, 2), 0, f"file://{self.folder}")
        return run(*command, code=3, env=self.environment | {"RESHARD_UCX_ROOT": str(root)}).stderr

    def test_folders_that_cannot_be_used(self):
        library = self.folder / "bad" / "lib" / "libucp.so.0"
        root, end = library.parents[1], "; expected a folder with lib/libucp.so.0 of UCX 1.13 or a later 1.x\n"
        start = f"reshard-exec: error: backend 'ucx': RESHARD_UCX_ROOT={root}: {library}: "
        self.assertEqual(self.refused(root), f"{start}cannot open shared object file: No such file or directory{end}")
        library.parent.mkdir(parents=True)
        library.write_text("no library")
        self.assertEqual(self.refused(root), f"{start}file too short{end}")
        # Without its other libraries, libucp is loaded with the system's.
        shutil.copy(UCX / "lib" / "libucp.so.0", library)
        self.assertRegex(self.refused(root), f"^{re.escape(start)}undefined symbol: \\w+{re.escape(end)}$")

    def test_a_process_that_has_loaded_another_ucx(self):
        program = self.folder / "open.py"
        program.write_text(OPEN)
        for library in ("libucp.so.0", "libucs.so.0"):
            with self.subTest(library):
                command = sys.executable, program, library, self.compile(1, 2), f"file://{self.folder}"
                error = run(*command, code=1, env=self.environment).stderr
                self.assertRegex(
                    error,
                    rf"RunError: backend 'ucx': RESHARD_UCX_ROOT={UCX}: found '/\S+/{library}', "
                    rf"which this process has already loaded, expected '{UCX}/lib/{library}'; open the "
                    "executor before other users of UCX, or unset the variable\n$",
                )


if __name__ == "__main__":
    unittest.main()
