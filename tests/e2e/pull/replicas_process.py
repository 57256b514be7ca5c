# SPDX-License-Identifier: Apache-2.0
"""One process of replicas_test.py: a rank of the source, or of a replica. The content of each weight follows from the
version, the name and the position, so the bytes of each version are known.

    replicas_process.py PLAN RENDEZVOUS RANK MODEL

Reads commands from standard input, one in a line, and answers each with one line of JSON; exits when the input ends.

    publish V           fills the weights with version V and publishes it, with digests
    spoil V             overwrites part of the published weights with version V: the control of the checker
    release SECONDS     releases, and overwrites the weights, which are this process's again
    pull V SECONDS      pulls version V or a later one, and compares the weights with the version that was returned
    pull V SECONDS check    the pull compares digests, too
    check               compares the weights with the version that this process holds
    replicas, stats     what the executor knows; what the process uses
    leave               closes the executor
"""

import json
import math
import os
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CHUNK = 1 << 16  # elements that are compared at a time
GARBAGE = 0xA5  # bytes of the source's memory between versions


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    shard: int | None  # the dimension that is divided over tp; None: replicated
    dtype: str = "u32"  # fp32: cast to fp16 on the target


MODELS = {
    "small": {
        "layers.0.up": Tensor((96, 40), 0),
        "layers.1.up": Tensor((96, 40), 0),
        "layers.0.down": Tensor((40, 96), 1),
        "layers.1.down": Tensor((40, 96), 1),
        "norm": Tensor((333,), None),
        "head": Tensor((64, 24), 0, "fp32"),
    },
    "medium": {  # 64 MiB
        "up": Tensor((6144, 1024), 0),
        "down": Tensor((1024, 6144), 1),
        "norm": Tensor((65536,), None),
        "head": Tensor((2048, 2016), 0, "fp32"),
    },
}
SOURCES, REPLICA = 4, 2  # ranks of the source and of a replica


def job(model: str) -> str:
    """The text of the job of a model."""
    tensors = []
    for name, tensor in MODELS[model].items():
        shard = "" if tensor.shard is None else f", shard: {{{tensor.shard}: tp}}"
        tensors.append(f"    {name}: {{shape: {list(tensor.shape)}, dtype: {tensor.dtype}{shard}}}\n")
    return (
        "version: 1\nmodel:\n  dtype: u32\n  tensors:\n" + "".join(tensors) + f"source: {{mesh: {{tp: {SOURCES}}}}}\n"
        f"target: {{mesh: {{tp: {REPLICA}}}, dtype: fp16, convert: rne, replicas: 8}}\n"
    )


def mixed(numbers, salt):
    """A hash of each number, 32 bits."""
    words = numbers.astype(np.uint32) * np.uint32(0x9E3779B1) + np.uint32(salt)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words ^= words >> np.uint32(shift)
        words *= np.uint32(factor)
    return words ^ words >> np.uint32(16)


class Shard:
    """The weight of one tensor that a rank holds. Each element differs between any two versions; of a tensor that is
    cast, between versions whose distance is not a multiple of 1024."""

    def __init__(self, name, tensor, rank, ranks, numpy_dtype):
        begin, end = [0, 0], [tensor.shape[0], math.prod(tensor.shape[1:])]
        if tensor.shard is not None:
            part = end[tensor.shard] // ranks
            begin[tensor.shard], end[tensor.shard] = rank * part, (rank + 1) * part
        shape = [last - first for first, last in zip(begin, end)][: len(tensor.shape)]
        self.name = name
        self.array = np.zeros(shape, numpy_dtype)
        salt = zlib.crc32(name.encode())
        self._rows = mixed(np.arange(begin[0], end[0]), salt)
        self._columns = mixed(np.arange(begin[1], end[1]), salt ^ 0xFFFFFFFF)
        self._step = max(1, CHUNK // len(self._columns))

    def chunks(self, version):
        """Yields parts of the array, the position of their first row, and what they hold in this version."""
        array = self.array.reshape(len(self._rows), len(self._columns))
        key = np.uint32(version * 0x9E3779B1 & 0xFFFFFFFF)
        for begin in range(0, len(self._rows), self._step):
            words = (self._rows[begin : begin + self._step] ^ key)[:, None] ^ self._columns
            if array.dtype != np.uint32:  # numbers that fp16 represents exactly
                words = (words & np.uint32(1023)).astype(array.dtype)
            yield array[begin : begin + self._step], begin, words

    def fill(self, version):
        for part, _, expected in self.chunks(version):
            part[...] = expected

    def difference(self, version):
        """ "" if the array holds this version, else where and how it differs first."""
        for part, begin, expected in self.chunks(version):
            wrong = part.view(np.uint8) != expected.view(np.uint8)
            if wrong.any():
                row, column = np.argwhere(wrong)[0].tolist()
                column //= part.dtype.itemsize
                return (
                    f"{self.name}[{begin + row}, {column}]: found {part[row, column]}, expected "
                    f"{expected[row, column]} of version {version}; {wrong.sum()} bytes of this chunk differ"
                )
        return ""


def shards(model, rank, ranks, params):
    """The weights of a mesh rank of the source or of a replica."""
    return [Shard(name, tensor, rank, ranks, params[name].numpy_dtype) for name, tensor in MODELS[model].items()]


class Worker:
    def __init__(self, path, rendezvous, rank, model):
        import reshard

        self.errors = reshard.Error, reshard.TimeoutError
        plan = reshard.Plan.open(path)
        self.executor = reshard.Executor(
            plan, rank, transport="ucx", rendezvous=rendezvous, pull=True, join_timeout=20, threads=1
        )
        source = rank < SOURCES
        mesh_rank = rank if source else (rank - SOURCES) % REPLICA
        self.shards = shards(model, mesh_rank, SOURCES if source else REPLICA, plan.params(rank))
        self.executor.bind({each.name: each.array for each in self.shards})
        self.executor.prepare()

    def difference(self, version):
        return next((found for each in self.shards if (found := each.difference(version))), "")

    def publish(self, version):
        for each in self.shards:
            each.fill(int(version))
        self.executor.publish(int(version), check=True)
        return {}

    def spoil(self, version):
        for each in self.shards:
            part, _, expected = next(each.chunks(int(version)))
            part[-1] = expected[-1]
        return {}

    def release(self, seconds):
        begin = time.monotonic()
        try:
            self.executor.release(float(seconds))
            late = ""
        except self.errors[1] as error:
            late = str(error)
        took = time.monotonic() - begin
        for each in self.shards:
            each.array.view(np.uint8).fill(GARBAGE)
        return {"seconds": took, "late": late}

    def pull(self, least, seconds, check=""):
        try:
            version = self.executor.pull(int(least), float(seconds), check=bool(check))
        except self.errors[1] as error:
            return self.check() | {"late": str(error)}
        found = self.check()
        if (found["version"], found["state"]) != (version, "complete") or version < int(least):
            found["torn"] = f"pull({least}) returned {version}, but the executor has {found}"
        return found

    def check(self):
        """The version, the state and, if that is complete, what differs from the version."""
        version, state = self.executor.version, self.executor.state
        return {"version": version, "state": state, "torn": self.difference(version) if state == "complete" else ""}

    def replicas(self):
        return {"replicas": [[each.replica, each.ranks, each.state, each.version] for each in self.executor.replicas()]}

    def stats(self):
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": int(status["Threads"]),
            "kilobytes": int(status["VmRSS"].split()[0]),
        }

    def leave(self):
        self.executor.close()
        return {}


def main():
    path, rendezvous, rank, model = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX writes its warnings to standard output
    worker = Worker(path, rendezvous, int(rank), model)
    answer = {"ready": True}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        words = sys.stdin.readline().split()
        if not words:
            os._exit(0)  # the test has ended: peers may not exist any more
        try:
            answer = getattr(worker, words[0])(*words[1:])
        except worker.errors[0] as error:
            answer = {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
