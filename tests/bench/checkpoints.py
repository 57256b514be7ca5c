#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints converted by reshard beside cp, on the same files: each format, saved by four ranks, to safetensors,
safetensors to each format, and some without safetensors; between DCP and safetensors also beside PyTorch. Prints
a table: seconds, peak resident memory, and medians of ratios over the rounds. checkpoints.py [GB] [ROUNDS];
needs six times GB of disk.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/bench/checkpoints.py

PyTorch's way is dcp.load into empty tensors and safetensors' save_file, and load_file and dcp.save. Each way is a
process of its own; its time is that of the conversion without imports. reshard's is that of reshard-compile and
reshard-exec, from start to end. The source is in the page cache, except in the rows "cold", for which its pages are
dropped before each run of reshard and of cp. The other sources are not, because together they can be larger than
memory. reshard and `cp and sync` wait until their files are on the device; `reshard --no-sync`, PyTorch and cp do not.
Rounds alternate the order; each run begins after a sync."""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from commands import BIN, run

OURS = {"reshard": (), "reshard --no-sync": ("--no-sync",)}
#: Each with what of OURS it is compared.
PEERS = {"PyTorch": "reshard", "cp": "reshard --no-sync", "cp and sync": "reshard"}
#: Each with the folder of its source, and the format of its target.
WAYS = {
    "DCP to safetensors": ("dcp", "safetensors"),
    "safetensors to DCP": ("hf", "dcp"),
    "DCP safetensors to safetensors": ("dcp-safetensors", "safetensors"),
    "safetensors to DCP safetensors": ("hf", "dcp-safetensors"),
    "torch.save to safetensors": ("torch-save", "safetensors"),
    "safetensors to torch.save": ("hf", "torch-save"),
    "torch_dist to safetensors": ("megatron", "safetensors"),
    "safetensors to torch_dist": ("hf", "megatron"),
    "DCP to torch_dist": ("dcp", "megatron"),
    "torch_dist to DCP": ("megatron", "dcp"),
    "torch.save to DCP": ("torch-save", "dcp"),
    "DCP to DCP safetensors": ("dcp", "dcp-safetensors"),
}
WITH_PYTORCH = list(WAYS)[:2]
CHUNKS, ROWS, COLUMNS = 4, 4096, 4096  # each tensor has 32 MiB of bf16


def names(gigabytes):
    return [f"layers.{i}.weight" for i in range(int(gigabytes * 1e9 / (2 * ROWS * COLUMNS)))]


def create(folder, gigabytes):
    """A checkpoint in each format, whose tensors each have four chunks, as four ranks of FSDP2 save them."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=save_rank, args=(rank, str(folder), gigabytes)) for rank in range(CHUNKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0


def save_rank(rank, folder, gigabytes):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"  # of Megatron-Core
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=CHUNKS)
    mesh = init_device_mesh("cpu", (CHUNKS,))
    local = {name: torch.randn(ROWS // CHUNKS, COLUMNS, dtype=torch.bfloat16) for name in names(gigabytes)}
    state = {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in local.items()}
    if rank == 0:
        for format in ("torch-save", "megatron"):
            Path(folder, format).mkdir()
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(f"{folder}/dcp-safetensors", save_distributed=True))
    torch.save(state, f"{folder}/torch-save/model_world_size_{CHUNKS}_rank_{rank}.pt")
    dist_checkpointing.save(
        {name: ShardedTensor.from_rank_offsets(name, tensor, (0, rank, CHUNKS)) for name, tensor in local.items()},
        f"{folder}/megatron",
    )
    dist.destroy_process_group()


def peer(way, source, target, gigabytes):
    """One conversion by PyTorch, in this process. Prints seconds and peak memory."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file

    begin, base = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if way == "DCP to safetensors":
        state = {name: torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16) for name in names(gigabytes)}
        dcp.load(state, checkpoint_id=source, no_dist=True)
        Path(target).mkdir()
        save_file(state, f"{target}/model.safetensors")
    else:
        dcp.save(load_file(f"{source}/model.safetensors"), checkpoint_id=target, no_dist=True)
    print(json.dumps([time.monotonic() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base]))


def ours(source, target, format, gigabytes, *options):
    """One conversion by reshard. Returns seconds and peak memory of the larger process, in KiB."""
    job = Path(f"{target}.yaml")
    job.write_text(
        json.dumps(
            {
                "version": 1,
                "model": {
                    "dtype": "bf16",
                    "index": {"layer": len(names(gigabytes))},
                    "tensors": {"layers.{layer}.weight": [ROWS, COLUMNS]},
                    "layouts": {"same": {"params": "same"}},
                },
                "source": {"layout": "same", "storage": str(source)},
                "target": {"layout": "same", "storage": {"folder": str(target), "format": format}},
            }
        )
    )
    begin = time.monotonic()
    run("reshard-compile", job, "-o", f"{target}.rplan")
    report = f"{target}.json"
    run(
        "reshard-exec", f"{target}.rplan", f"--report={report}", "--memory=1GiB", "--allow=extra", *options
    )  # torch_dist has common.pt
    seconds = time.monotonic() - begin
    return seconds, json.loads(Path(report).read_text())["peak_rss_bytes"] / 1024


def drop(folder):
    """Drops the pages of a folder's files. Pages that are not on the device yet would stay."""
    os.sync()
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def only(folder, source):
    """Reads the files of one source into the page cache, and drops those of the others."""
    for other in {each for each, _ in WAYS.values()} - {source}:
        drop(folder / other)
    for path in (folder / source).iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def copied(source, target, sync):
    """A copy by cp, and if asked the wait until it is on the device. Returns seconds, and 0 for its memory."""
    begin = time.monotonic()
    subprocess.run(["cp", "-r", source, target], check=True)
    if sync:
        subprocess.run(["sync", "-f", target], check=True)
    return time.monotonic() - begin, 0


def measured(name, way, source, out, format, gigabytes):
    """One run, which begins without written pages that are not on the device."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    if name in OURS:
        return ours(source, out, format, gigabytes, *OURS[name])
    if name.startswith("cp"):
        return copied(source, out, name != "cp")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--peer", way, source, out, str(gigabytes)],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main():
    gigabytes, rounds = float(sys.argv[1]) if len(sys.argv) > 1 else 4, int(sys.argv[2]) if len(sys.argv) > 2 else 5
    folder = Path(tempfile.mkdtemp(prefix="reshard-checkpoints-", dir=os.environ.get("TMPDIR", "/var/tmp")))
    try:
        create(folder, gigabytes)
        ours(folder / "dcp", folder / "hf", "safetensors", gigabytes)
        results = {}
        for turn in range(rounds):
            for way, (source, format) in WAYS.items():
                only(folder, source)
                for cold in (False, True):
                    names = [*OURS, *(peer for peer in PEERS if peer != "PyTorch" or not cold and way in WITH_PYTORCH)]
                    for name in names if turn % 2 else reversed(names):
                        if cold:
                            drop(folder / source)
                        result = measured(name, way, folder / source, folder / "out", format, gigabytes)
                        results.setdefault((f"{way}, cold" if cold else way, name), []).append(result)
        columns = [*OURS, *PEERS, *(f"{peer} ÷ {own}" for peer, own in PEERS.items()), "memory: reshard", "PyTorch"]
        print(f"| {gigabytes:g} GB, {BIN.name} | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
        median = statistics.median
        for way in (*WAYS, *(f"{way}, cold" for way in WAYS)):
            runs = {name: results.get((way, name), []) for name in (*OURS, *PEERS)}
            seconds = [f"{median(s for s, _ in each):.2f} s" if each else "" for each in runs.values()]
            ratios = [
                f"{median(b / a for (a, _), (b, _) in zip(runs[own], runs[peer])):.2f}" if runs[peer] else ""
                for peer, own in PEERS.items()
            ]
            memory = [
                f"{median(m for _, m in runs[name]) / 2**20:.2f} GiB" if runs[name] else ""
                for name in ("reshard", "PyTorch")
            ]
            print("| " + " | ".join([way, *seconds, *ratios, *memory]) + " |")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]))
    else:
        main()
