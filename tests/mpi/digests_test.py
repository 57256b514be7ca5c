# SPDX-License-Identifier: Apache-2.0
"""Digests and checked runs of the Python module in several processes, over MPI and over UCX: equal to reshard-digest of
a file with the same values; one wrong element of one rank fails the run on all ranks, which can run again."""

import json
import sys
import unittest

import numpy as np

from commands import BIN, FolderTest
from launch import ENVIRONMENT
from launchers import environment

JOB = """version: 1
model: {dtype: fp32, tensors: {w: {shape: [12, 5], shard: {0: tp}}, bias: [7]}}
source: {mesh: {tp: 2, dp: 3}}
target: {mesh: {tp: 6}}
"""
WORKER = """
import json, sys
import numpy, reshard

plan, transport = sys.argv[1:]
options = {"rendezvous": "env://"} if transport == "ucx" else {}
with reshard.Executor(plan, transport=transport, join_timeout=120, **options) as executor:
    rank, held = executor.ranks[0], {}
    for side in ("source", "target"):
        held[side] = {name: numpy.zeros(p.shape, p.numpy_dtype) for name, p in executor.plan.params(rank, side).items()}
        executor.bind(held[side], side)
    executor.prepare()
    rows, first = len(held["source"]["w"]), numpy.load("first.npy")[rank]  # the first row of its shard
    whole = numpy.arange(60, dtype=numpy.float32).reshape(12, 5)

    def fill(step):
        held["source"]["w"][...] = whole[first:first + rows] + step
        held["source"]["bias"][...] = numpy.arange(7) + step

    said = []
    def run(**arguments):
        try:
            executor.run(timeout=120, **arguments)
            said.append([executor.version, executor.state])
        except reshard.Error as error:
            said.append([executor.version, executor.state, type(error).__name__, str(error)])

    fill(0)
    run(check=True)
    digests = [
        {name: [each.dtype, each.shape, each.digest] for name, each in executor.digest(side, timeout=120).items()}
        for side in ("source", "target")
    ]
    if rank == 5:
        held["source"]["w"][rows - 1, 2] = -1  # this rank's replica, from which it copies
    run(check=True, first_index=True)
    fill(1)
    run(check=True, changed=True)
    run(check=True, changed=True)
    if rank == 5:
        held["source"]["bias"][3] = -1
    run(check=6)  # not the sixth call
    run(check=3)
    assert (held["target"]["w"] == whole[2 * int(numpy.load("order.npy")[rank]):][:2] + 1).all()
    with open(f"answer.{rank}", "w") as answer:
        json.dump([digests, said], answer)
"""


class Digests(FolderTest):
    def setUp(self):
        super().setUp()
        self.write("job.yaml", JOB)
        self.write("worker.py", WORKER)
        self.call("reshard-compile job.yaml -o plan")
        # The rows of each rank: the first axis of a mesh is the fastest one.
        np.save(self.folder / "first.npy", np.arange(6) % 2 * 6)
        np.save(self.folder / "order.npy", np.arange(6))
        self.save_checkpoint(
            "values", {"w": np.arange(60, dtype=np.float32).reshape(12, 5), "bias": np.arange(7, dtype=np.float32)}
        )
        self.files = json.loads(self.call("reshard-digest values --format=json").stdout)

    def check(self, transport):
        self.call(
            "mpirun -n 6",
            sys.executable,
            "worker.py",
            "plan",
            transport,
            timeout=600,
            env=environment(self.folder) | ENVIRONMENT,
        )
        answers = [self.json(f"answer.{rank}") for rank in range(6)]
        for digests, said in answers:
            self.assertEqual(
                digests,
                [{name: [each["dtype"], each["shape"], each["digest"]] for name, each in self.files.items()}] * 2,
            )
            self.assertEqual(said, answers[0][1])
        wrong = "the targets differ from the source after the run: tensor '{}' is wrong on target rank 5"
        self.assertEqual(
            answers[0][1],
            [
                [1, "complete"],
                [1, "torn", "RunError", wrong.format("w") + ", first at index [11, 2] on rank 5"],
                [2, "complete"],
                [
                    2,
                    "complete",
                    "Error",
                    "the source has not changed since the last run "
                    "that was checked: the digests of all its tensors are the same",
                ],
                [3, "complete"],
                [3, "torn", "RunError", wrong.format("bias")],
            ],
        )

    @unittest.skipUnless((BIN / "libreshard_mpi.so").exists(), "transport mpi is not built")
    def test_mpi(self):
        self.check("mpi")

    @unittest.skipUnless(
        (BIN / "libreshard_mpi.so").exists() and (BIN / "libreshard_ucx.so").exists(), "transport ucx is not built"
    )
    def test_ucx(self):
        self.check("ucx")


if __name__ == "__main__":
    unittest.main()
