# SPDX-License-Identifier: Apache-2.0
"""A real vLLM on CPUs, refitted in place (see support.py to run this): all params, also those that older layouts
lacked, equal those of vLLM's own loader byte for byte, and the engine generates the same tokens. tp 1 and 2."""

import json
import os
import random
import socket
import subprocess
import sys
import time
import unittest
from fnmatch import fnmatch
from pathlib import Path

import support
from commands import shared_folder
from module import importable, python_path

HERE = Path(__file__).resolve().parent
NAMES = ["gpt-oss-120b", "glm-4.5", "nemotron-h-8b"]
#: Params that a layout without them leaves stale, and on which ranks: with etp, only the first rank has w2_bias; the
#: others have zeros.
STALE = {"gpt-oss-120b": "*.w2_bias", "glm-4.5": "*.mlp.gate.weight", "nemotron-h-8b": "*.mixer.A"}


def free_port():
    """A free port outside the range that the system assigns automatically."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise OSError("no free port")


class Refit(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = shared_folder(cls)
        importable(cls.folder)
        import reshard

        for name in NAMES:
            at = support.model(cls.folder, name)
            (at / "hf.yaml").write_text(
                "version: 1\nmodel: model.yaml\nsource: {layout: hf, mesh: {}}\ntarget: {layout: hf, mesh: {}}\n"
            )
            params = reshard.compile(at / "hf.yaml").params(0, "source")
            for seed, checkpoint in enumerate("AB"):
                support.checkpoint(at / checkpoint, params, seed)

    def engines(self, world):
        """The results of the ranks of an engine."""
        port = free_port()
        ranks = []
        for rank in range(world):
            environment = os.environ | {
                "PYTHONPATH": python_path(self.folder / "module"),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            with open(self.folder / f"log{world}.{rank}", "w") as log:
                ranks.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            HERE / "vllm_worker.py",
                            self.folder,
                            self.folder / f"{world}.{rank}.json",
                            *NAMES,
                        ],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            deadline = time.monotonic() + 900
            while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
                self.assertLess(time.monotonic(), deadline, "the engine took more than 15 minutes")
                time.sleep(1)
            for rank, process in enumerate(ranks):
                self.assertIn(process.poll(), (0, None), (self.folder / f"log{world}.{rank}").read_text()[-6000:])
        finally:
            for process in ranks:
                process.kill()
                process.wait()
            for each in range(2 * len(NAMES)):  # the engines' ports
                for left in Path("/dev/shm").glob(f"{port + 1 + each}-*"):
                    left.unlink()
        return [json.loads((self.folder / f"{world}.{rank}.json").read_text()) for rank in range(world)]

    def check(self, world):
        for rank, results in enumerate(self.engines(world)):
            for name in NAMES:
                with self.subTest(model=name, tp=world, rank=rank):
                    result = results[name]
                    self.assertGreater(result["params"], 20)
                    self.assertEqual(
                        result["wrong"], [], "params that differ from what vLLM's loader makes of the same checkpoint"
                    )
                    self.assertEqual(result["tokens found"], result["tokens wanted"])
                    zeros = [
                        each
                        for each in result["same before"]
                        if name == "gpt-oss-120b" and rank and fnmatch(each, STALE[name])
                    ]
                    self.assertEqual(
                        result["same before"], zeros, "checkpoints A and B must differ, or nothing is shown"
                    )
                    self.assertEqual(bool(zeros), name == "gpt-oss-120b" and rank > 0)
                    without = result["wrong without"]
                    self.assertEqual(bool(without), not zeros)
                    self.assertTrue(all(fnmatch(each, STALE[name]) for each in without), without)

    def test_tp1(self):
        self.check(1)

    def test_tp2(self):
        self.check(2)


if __name__ == "__main__":
    unittest.main()
