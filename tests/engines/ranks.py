# SPDX-License-Identifier: Apache-2.0
"""Runs a function in several processes, the ranks of a gloo job of torch.distributed."""

import multiprocessing
import os
import queue
import re
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "frameworks"))
from support import ROOT, module  # noqa: E402


#: Imported once, not in each process. Names that are not installed are ignored.
PRELOAD = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers.models.llama.modeling_llama", "megatron.core.models.gpt.gpt_model"]


def programs(framework):
    """The Python programs of a framework's section in docs/integrations.md."""
    section = re.search(rf"^## {framework}$(.*?)(?=^## |\Z)", (ROOT / "docs" / "integrations.md").read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r"```python\n(.*?)```", section[1], re.DOTALL)


def _rank(function, folder, rank, world, port, results, arguments):
    import torch

    torch.set_num_threads(1)
    module(folder)
    try:
        store = torch.distributed.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=120), wait_for_workers=False)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
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
    module(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    results = context.Queue()
    processes = [context.Process(target=_rank, args=(function, str(folder), rank, world, port, results, arguments)) for rank in range(world)]
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
