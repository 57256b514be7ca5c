# SPDX-License-Identifier: Apache-2.0
"""Runs functions in several processes, the ranks of a gloo job of torch.distributed, and what these functions check."""

import multiprocessing
import os
import queue
import socket
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta

from commands import BIN
from module import importable
from support import module_folder

#: Why the tests cannot run, or "".
MISSING = "" if (BIN / "libreshard_ucx.so").exists() else "transport ucx was not built"
#: Imported once, not in each process. Names that are not installed are ignored.
PRELOAD = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "megatron.core.models.gpt.gpt_model",
]


def _rank(function, folder, rank, world, port, results, arguments):
    import torch

    torch.set_num_threads(1)
    tempfile.tempdir = folder  # os._exit below deletes no temporary files
    importable(folder)
    try:
        store = torch.distributed.TCPStore(
            "127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=120), wait_for_workers=False
        )
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120)
        )
        function(rank, *arguments)
        torch.distributed.barrier()  # rank 0 serves the store
        results.put((rank, ""))
    except BaseException:
        results.put((rank, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        sys.stdout.flush()
        os._exit(0)  # after a failure, closing would wait for the other ranks


def run(function, folder, world, *arguments, timeout=300):
    """Calls function(rank, *arguments) on each rank. Returns {rank: its traceback, or "" after success}. The functions
    are those of a module that can be imported."""
    importable(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(function, str(folder), rank, world, port, results, arguments))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    found, ended = {}, {}
    ends = time.monotonic() + timeout
    while len(found) < world and time.monotonic() < ends:
        try:
            rank, text = results.get(timeout=1)
            found[rank] = text
            if text:  # the others may wait for it
                ends = min(ends, time.monotonic() + 60)
        except queue.Empty:
            for rank, process in enumerate(processes):
                if rank not in found and not process.is_alive():
                    ended[rank] = ended.get(rank, 0) + 1
                    if ended[rank] > 3:
                        found[rank] = f"ended with code {process.exitcode} and without a result"
    for process in processes:
        process.join(5)
        process.kill()
    return {rank: found.get(rank, f"no result in {timeout} s") for rank in range(world)}


def _in_turn(rank, functions):
    """Calls function(rank) of each function. Rank 0 prints their times."""
    for function in functions:
        begun = time.monotonic()
        function(rank)
        if rank == 0:
            print(f"  {function.__name__}: {time.monotonic() - begun:.1f} s", flush=True)


class RanksTest(unittest.TestCase):
    """Tests whose functions run on ranks. `folder`: a temporary folder for all tests of the class."""

    @classmethod
    def setUpClass(cls):
        cls.folder = module_folder(cls)

    def ranks(self, world, *functions):
        """Calls function(rank) of each function, one after the other, on each of `world` ranks."""
        found = run(_in_turn, self.folder, world, functions)
        self.assertEqual({rank: text for rank, text in found.items() if text}, {}, "\n".join(found.values()))


def same(found, expected):
    """Checks that two maps have equal names and tensors."""
    import torch

    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    for name, value in expected.items():
        assert torch.equal(found[name], value), (
            f"{name}: {(found[name] != value).sum()} of {value.numel()} elements differ"
        )


def refused(text, call):
    """Checks that a call raises reshard.Error with this text, and returns the error."""
    import reshard

    try:
        call()
    except reshard.Error as raised:
        assert text in str(raised), f"found {raised}, expected {text}"
        return raised
    raise AssertionError(f"no error, expected {text}")
