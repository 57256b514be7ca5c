# SPDX-License-Identifier: Apache-2.0
"""Processes replace their plan over transport ucx: a source rank is killed, the plan is compiled again for the mesh
that is left, and the survivors continue with their memory and connections."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest

from commands import BIN, run, shared_folder
from launchers import environment

JOB = """version: 1
model: {dtype: fp32, tensors: {a: {shape: [1024, 64], shard: {0: tp}}, b: [64]}}
source: {mesh: {tp: 1, dp: 4}}
target: {mesh: {tp: 4}, ranks: 4..7}
"""
REPLACES = 20
SECONDS = 60  # of each wait, on a loaded machine
LIFE = 900  # seconds until a worker is killed, so that no wait for its answer is endless

WORKER = """
import os, sys
import numpy, reshard

def descriptors():
    paths = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    return {os.readlink(path) for path in paths if os.path.exists(path) or os.path.islink(path)}

rank, path, url = int(sys.argv[1]), sys.argv[2], sys.argv[3]
executor = reshard.Executor(path, rank, transport="ucx", rendezvous=url, join_timeout=%d)
held = {}

def bind():
    for side in executor.plan.endpoints:
        if executor.ranks[0] in side.ranks:
            params = executor.plan.params(executor.ranks[0], side.role)
            missing = {name: numpy.full(p.shape, -1, numpy.float32) for name, p in params.items() if name not in held}
            held.update(missing)
            executor.bind(missing, side.role)
            role, place = side.role, side.ranks.index(executor.ranks[0])
    executor.prepare()
    return role, place

role, place = bind()
values = numpy.arange(1024 * 64, dtype=numpy.float32).reshape(1024, 64)
print("ready", flush=True)
for line in sys.stdin:
    word, *words = line.split()
    try:
        if word == "run":
            version = int(words[0])
            if role == "source":
                held["a"][...] = values + version
                held["b"][...] = version
            executor.run(timeout=%d)
            expected = values[place * 256 : place * 256 + 256] + version
            good = role == "source" or (numpy.array_equal(held["a"], expected) and (held["b"] == version).all())
            print("run", "exact" if good else "wrong", executor.version, flush=True)
        elif word == "replace":
            executor.replace(words[0], int(words[1]), rendezvous=words[2] if len(words) > 2 else None)
            role, place = bind()
            print("replaced", *executor.ranks, flush=True)
        elif word == "descriptors":
            sockets = sorted(each for each in descriptors() if each.startswith("socket:"))
            print(len(os.listdir("/proc/self/fd")), *sockets, flush=True)
    except reshard.Error as error:
        print("error", str(error).replace(chr(10), " "), flush=True)
executor.close()
""" % (SECONDS, SECONDS)


@unittest.skipUnless((BIN / "libreshard_ucx.so").exists(), "transport ucx was not built")
class ReplaceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = shared_folder(cls)
        (cls.folder / "job.yaml").write_text(JOB)
        cls.compile("eight", cls.folder / "job.yaml")
        # Two plans for the seven ranks that are left when rank 1 of the source is lost.
        for name, ranks in (("seven", "3..6"), ("other", "[4, 3, 6, 5]")):
            cls.compile(name, f"--from={cls.folder / 'eight'}", "--set=source.mesh.dp=3", f"--set=target.ranks={ranks}")
        (cls.folder / "worker.py").write_text(WORKER)
        cls.environment = environment(cls.folder) | {"UCX_TLS": "tcp"}

    @classmethod
    def compile(cls, name, *arguments):
        run("reshard-compile", *arguments, "-o", cls.folder / name)

    def start(self, url):
        def worker(rank):
            process = subprocess.Popen(
                [sys.executable, self.folder / "worker.py", str(rank), self.folder / "eight", url],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.addCleanup(process.communicate)  # cleanups run in reverse order
            end = threading.Timer(LIFE, process.kill)
            end.start()
            self.addCleanup(end.cancel)
            self.addCleanup(process.kill)
            return process

        workers = [worker(rank) for rank in range(8)]
        self.assertEqual([process.stdout.readline().strip() for process in workers], ["ready"] * 8)
        return workers

    def tell(self, workers, *commands):
        """Sends each worker its command, or all of them one. Returns their answers."""
        for process, command in zip(workers, commands * len(workers) if len(commands) == 1 else commands, strict=True):
            process.stdin.write(command + "\n")
            process.stdin.flush()
        return [process.stdout.readline().strip() for process in workers]

    def replace(self, workers, plan, url=""):
        self.assertEqual(
            self.tell(workers, *[f"replace {self.folder / plan} {rank} {url}" for rank in range(len(workers))]),
            [f"replaced {rank}" for rank in range(len(workers))],
        )

    def assert_run(self, workers, number, completed):
        self.assertEqual(self.tell(workers, f"run {number}"), [f"run exact {completed}"] * len(workers))

    def lose(self, workers, rank):
        workers[rank].send_signal(signal.SIGKILL)
        workers[rank].wait()
        return [process for process in workers if process is not workers[rank]]

    def test_a_source_rank_is_lost_between_runs(self):
        workers = self.start("file://" + tempfile.mkdtemp(dir=self.folder))
        self.assert_run(workers, 1, 1)
        workers = self.lose(workers, 1)
        self.replace(workers, "seven")
        self.assert_run(workers, 2, 2)
        counts = []
        for number in range(REPLACES):
            before = [answer.split() for answer in self.tell(workers, "descriptors")]
            self.replace(workers, "other" if number % 2 == 0 else "seven")
            self.assert_run(workers, 3 + number, 3 + number)
            after = [answer.split() for answer in self.tell(workers, "descriptors")]
            counts.append([int(count) for count, *_ in after])
            for rank, (old, new) in enumerate(zip(before, after, strict=True)):
                self.assertTrue(set(old[1:]) & set(new[1:]), f"rank {rank} has no connection of the last plan")
        self.assertLessEqual(max(counts[-1]), max(counts[3]) + 2, counts)

    def test_a_source_rank_is_lost_in_a_run(self):
        workers = self.start("file://" + tempfile.mkdtemp(dir=self.folder))
        self.assert_run(workers, 1, 1)
        workers = self.lose(workers, 1)
        for answer in self.tell(workers, "run 2"):
            self.assertRegex(answer, "^error ")
        self.replace(workers, "seven")
        self.assert_run(workers, 3, 2)

    def test_the_rank_that_serves_the_store_is_lost(self):
        with socket.socket() as at:
            at.bind(("127.0.0.1", 0))
            port = at.getsockname()[1]
        workers = self.start(f"tcp://127.0.0.1:{port}")
        self.assert_run(workers, 1, 1)
        workers = self.lose(workers, 0)
        self.replace(workers, "seven", "file://" + tempfile.mkdtemp(dir=self.folder))
        self.assert_run(workers, 2, 2)

    def test_a_plan_that_cannot_be_opened_changes_nothing(self):
        workers = self.start("file://" + tempfile.mkdtemp(dir=self.folder))
        self.assert_run(workers, 1, 1)
        for answer in self.tell(workers, f"replace {self.folder / 'job.yaml'} 0"):
            self.assertRegex(answer, "^error .*not a plan")
        for answer in self.tell(workers, f"replace {self.folder / 'seven'} 7"):
            self.assertRegex(answer, "^error .*7")
        self.assert_run(workers, 2, 2)


if __name__ == "__main__":
    os.umask(0o077)
    unittest.main()
