# SPDX-License-Identifier: Apache-2.0
"""Executors in processes of multiprocessing, or in threads of one process, find each other over stores of
torch.distributed, as they are, and over stores of the caller, and run a plan over transport ucx.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/frameworks/torch_stores_test.py"""

import contextlib
import multiprocessing
import os
import queue
import socket
import tempfile
import threading
import traceback
import unittest
from datetime import timedelta
from pathlib import Path

from commands import BIN
from module import importable
from support import module_folder

try:
    import torch
    from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

    MISSING = "" if (BIN / "libreshard_ucx.so").exists() else "transport ucx was not built"
except ImportError as error:
    MISSING = f"{error}: run scripts/frameworks.sh and build/frameworks/env.sh"

JOB = """
version: 1
model: {dtype: fp32, tensors: {w: {shape: [64, 48], shard: {0: tp}}}}
source: {mesh: {tp: 4}}
target: {mesh: {dp: 2, tp: 2}}
"""
WORLD, ROWS = 4, 64
SECONDS = 240  # to wait for a result; the processes import PyTorch first


class FolderStore:
    """A store of the caller: set and get only."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def path(self, key):
        return self.folder / key.replace("/", "%")

    def set(self, key, value):
        part = self.path(key).with_suffix(f".{os.getpid()}")
        part.write_bytes(value)
        part.rename(self.path(key))

    def get(self, key):
        return self.path(key).read_bytes() if self.path(key).exists() else None


class BrokenStore(FolderStore):
    def set(self, key, value):
        raise ConnectionError("the store has ended")


def store_of(kind, place, rank):
    if kind == "tcp":
        return TCPStore(
            "127.0.0.1", int(place), WORLD, rank == 0, timeout=timedelta(seconds=60), wait_for_workers=False
        )
    if kind == "file":
        return FileStore(f"{place}/torch", WORLD)
    if kind == "prefix":
        return PrefixStore("trainer", PrefixStore("refit", store_of("file", place, rank)))
    if kind == "hash":
        return place
    return {
        "url": lambda: f"file://{place}",
        "folder": lambda: FolderStore(place),
        "broken": lambda: BrokenStore(place),
    }[kind]()


def refit(folder, plan, kind, place, rank, options, results, done):
    """One rank: refits twice, and reports what is wrong. `place`: where the store is; of kind "hash", the store."""
    importable(folder)
    import reshard

    try:
        store = store_of(kind, place, rank)
        expected = torch.arange(ROWS * 48, dtype=torch.float32).reshape(ROWS, 48)
        executor = reshard.Executor(plan, rank, transport="ucx", rendezvous=store, join_timeout=20, **options)
        source, target = torch.zeros(ROWS // 4, 48), torch.zeros(ROWS // 2, 48)
        executor.bind({"w": source}, "source")
        executor.bind({"w": target}, "target")
        executor.prepare()
        for step in range(2):
            source.copy_(expected[rank * 16 : rank * 16 + 16] + step)
            executor.run(timeout=20)
            if not torch.equal(target, expected[rank // 2 * 32 : rank // 2 * 32 + 32] + step):
                raise ValueError(f"step {step}: wrong values")
        executor.close()
        results.put((rank, ""))
    except BaseException:
        results.put((rank, traceback.format_exc()))
    done.wait(60)  # rank 0's TCPStore serves the others


@unittest.skipIf(MISSING, MISSING)
class RendezvousTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = module_folder(cls)
        import reshard

        job = cls.folder / "job.yaml"
        job.write_text(JOB)
        cls.plan = reshard.compile(job, output=job.with_suffix(".rplan")).path

    def results(self, kind, place, **options):
        """Runs `refit` in a process for each rank. Returns {rank: its traceback, or "" after success}."""
        context = multiprocessing.get_context("spawn")
        results, done = context.Queue(), context.Event()
        arguments = [(self.folder, self.plan, kind, place, rank, options, results, done) for rank in range(WORLD)]
        processes = [context.Process(target=refit, args=each) for each in arguments]
        for process in processes:
            process.start()
        found = self.collect(results, done)
        for process in processes:
            process.join(60)
            process.kill()
        return found

    def collect(self, results, done):
        """Waits for the result of each rank, then ends the ranks."""
        found = {}
        with contextlib.suppress(queue.Empty):
            while len(found) < WORLD:
                rank, text = results.get(timeout=SECONDS)
                found[rank] = text
        done.set()
        return {
            rank: found.get(rank, f"no result {SECONDS} s after that of another rank, or after the start")
            for rank in range(WORLD)
        }

    def test_stores(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for kind in ("tcp", "file", "prefix", "folder", "url"):
            options = {"secret": "a secret", "job": "again"} if kind == "prefix" else {}
            with self.subTest(kind=kind), tempfile.TemporaryDirectory() as folder:
                self.assertEqual(
                    self.results(kind, str(port) if kind == "tcp" else folder, **options),
                    dict.fromkeys(range(WORLD), ""),
                )

    def test_threads_over_a_hash_store(self):
        """HashStore is in the memory of one process, so the ranks are its threads."""
        results, done, store = queue.Queue(), threading.Event(), HashStore()
        arguments = [(self.folder, self.plan, "hash", store, rank, {}, results, done) for rank in range(WORLD)]
        threads = [threading.Thread(target=refit, args=each, daemon=True) for each in arguments]
        for thread in threads:
            thread.start()
        self.assertEqual(self.collect(results, done), dict.fromkeys(range(WORLD), ""))
        self.assertGreater(store.num_keys(), WORLD)  # a hello of each rank, and the roster
        for thread in threads:
            thread.join(60)

    def test_the_exception_of_a_store_is_the_cause(self):
        with tempfile.TemporaryDirectory() as folder:
            for text in self.results("broken", folder).values():
                self.assertRegex(
                    text,
                    r"(?s)ConnectionError: the store has ended.*direct cause.*RunError: .*the caller's store could "
                    r"not set 'reshard/-/",
                )


if __name__ == "__main__":
    unittest.main()
