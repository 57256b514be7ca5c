# SPDX-License-Identifier: Apache-2.0
"""Processes that no launcher started find each other and run a plan over transport ucx: reshard-exec, once per rank."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.commands import BIN

JOB = "version: 1\nmodel: {dtype: bf16, tensors: {w: {shape: [4096, 64], shard: {0: tp}}}}\nsource: {mesh: {tp: %d, dp: %d}}\ntarget: {mesh: {tp: 8}}\n"
LAUNCHERS = re.compile(r"^(RESHARD_SECRET|RESHARD_PORT|RANK|WORLD_SIZE|LOCAL_.*|MASTER_.*|TORCHELASTIC.*|OMPI_.*|PMI.*|SLURM_.*)$")
WORLD = 8


def free_port():
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        return at.getsockname()[1]


@unittest.skipUnless((BIN / "libreshard_ucx.so").exists(), "transport ucx was not built")
class RendezvousTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.folder = Path(cls.temporary.name)
        cls.plan, cls.other = cls.compile("plan", 4, 2), cls.compile("other", 2, 4)
        cls.random = random.Random(1)

    @classmethod
    def compile(cls, name, tp, dp):
        (cls.folder / f"{name}.yaml").write_text(JOB % (tp, dp))
        subprocess.run([BIN / "reshard-compile", cls.folder / f"{name}.yaml", "-o", cls.folder / name], check=True, capture_output=True)
        return cls.folder / name

    def start(self, rank, url, *options, plan=None, environment=None, timeout=30):
        clean = {name: value for name, value in os.environ.items() if not LAUNCHERS.match(name)}
        command = [BIN / "reshard-exec", plan or self.plan, "--transport=ucx", f"--rendezvous={url}", "--synthesize", "--check", f"--timeout={timeout}", *options]
        command += [] if rank is None else [f"--rank={rank}"]
        process = subprocess.Popen(command, env=clean | (environment or {}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.kill)
        return process

    def outputs(self, processes, seconds=60):
        end = time.monotonic() + seconds
        return [(*process.communicate(timeout=max(0.1, end - time.monotonic())), process.returncode) for process in processes]

    def assert_exact(self, processes):
        for out, err, code in self.outputs(processes):
            self.assertEqual((code, err), (0, ""), out)
            self.assertRegex(out, r"rank \d: [1-9]\d* bytes right")

    def assert_failed(self, processes, *patterns, seconds=30):
        for (out, err, code), pattern in zip(self.outputs(processes, seconds), patterns):
            self.assertEqual(code, 3, out + err)
            self.assertRegex(err, r"^reshard-exec: error: [^\n]*" + pattern)
            self.assertEqual(err.count("\n"), 1, err)

    def test_any_order_and_delay(self):
        shared = self.folder / "shared"
        shared.mkdir()
        for attempt in range(2):  # the second finds the files of the first
            for url in (f"tcp://127.0.0.1:{free_port()}", f"file://{shared}"):
                with self.subTest(url=url, attempt=attempt):
                    processes = []
                    for rank in self.random.sample(range(WORLD), WORLD):
                        time.sleep(self.random.random() * 0.1)
                        processes.append(self.start(rank, url, environment={"RESHARD_SECRET": "a secret"} if attempt else None))
                    self.assert_exact(processes)

    def test_variables_of_launchers(self):
        port = free_port()
        torch = lambda rank: {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1)}
        slurm = lambda rank: {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(WORLD), "SLURM_NNODES": "1", "RESHARD_PORT": str(port)}
        for launcher in (torch, slurm):
            self.assert_exact([self.start(None, "env://", environment=launcher(rank)) for rank in range(WORLD)])
        done = self.outputs([self.start(None, "env://", environment={"RANK": "1"})])[0]
        self.assertEqual((done[1], done[2]), ("reshard-exec: error: rendezvous 'env://': found RANK=1, expected WORLD_SIZE beside RANK\n", 3))

    def test_a_wrong_secret(self):
        url, secret = f"tcp://127.0.0.1:{free_port()}", {"RESHARD_SECRET": "right"}
        processes = [self.start(rank, url, environment={"RESHARD_SECRET": "wrong"} if rank == 3 else secret, timeout=4) for rank in range(WORLD)]
        missing = "rank 3 has not joined; rank 0's store refused 1 client that did not have its secret"
        self.assert_failed(processes, *(missing if rank != 3 else "has another secret" for rank in range(WORLD)))

    def test_another_plan(self):
        url = f"tcp://127.0.0.1:{free_port()}"
        processes = [self.start(rank, url, plan=self.other if rank == 3 else self.plan, timeout=4) for rank in range(WORLD)]
        self.assert_failed(processes, *(f"\\(rank {0 if rank == 3 else 3} has opened plan [0-9a-f]{{32}}, rank {3 if rank == 3 else 0} has opened plan [0-9a-f]{{32}}" for rank in range(WORLD)))

    def test_a_duplicate_rank(self):
        url = f"tcp://127.0.0.1:{free_port()}"
        processes = [self.start(rank, url) for rank in (0, 1, 2)]
        time.sleep(0.5)
        processes.append(self.start(2, url))
        self.assert_failed(processes, *4 * ["two processes have joined as rank 2: process \\d+ on host [^,]+, and process \\d+"])

    def test_the_port_is_in_use(self):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            url = f"tcp://127.0.0.1:{other.getsockname()[1]}"
            self.assert_failed([self.start(0, url, timeout=4)], "another process uses the port")
            self.assert_failed([self.start(1, url, timeout=2)], "timed out waiting for the store at")

    def test_rank_zero_ends(self):
        url = f"tcp://127.0.0.1:{free_port()}"
        processes = [self.start(rank, url) for rank in (0, 1, 2)]
        time.sleep(1)
        processes[0].send_signal(signal.SIGKILL)
        processes[0].communicate()
        self.assert_failed(processes[1:], *2 * ["lost the store at 127.0.0.1:\\d+: .*rank 0 may have ended"])

    def test_bad_urls(self):
        for url, text in (("udp://a:1", "rendezvous 'udp://a:1': found the scheme 'udp', expected tcp://host:port, file:///folder or env://"),
                          ("tcp://a", "rendezvous 'tcp://a': found 'a', expected host:port"), ("file:///no/such", "'/no/such' is not a folder"),
                          ("tcp://no-such-host.invalid:1", "host 'no-such-host.invalid'"), ("tcp://192.0.2.1:1", "needs a secret")):
            done = self.outputs([self.start(0, url, timeout=20)])[0]
            self.assertIn(done[2], (2, 3))
            self.assertIn(text, done[1])


if __name__ == "__main__":
    unittest.main()
