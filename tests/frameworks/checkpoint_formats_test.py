# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the real packages, and the packages on checkpoints that reshard wrote: torch.distributed.checkpoint and HuggingFaceStorageWriter, saved
by 1, 2 and 4 gloo ranks from DTensors with even and uneven shards, torch.save, and Megatron-Core's torch_dist.
The bytes at the places that the listing names are those of the tensors; a job reads them as its source; a job's target
in each format is loaded by PyTorch, whole and by 2 and 3 ranks with shards of their own.

    scripts/frameworks.sh && . build/frameworks/env.sh
    RESHARD_BIN=build/release $RESHARD_FRAMEWORKS_PYTHON tests/frameworks/checkpoint_formats_test.py
"""

import importlib.util
import json
import multiprocessing
import os
import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("lib",)]

from commands import FolderTest, run  # noqa: E402

MISSING = [name for name in ("torch", "megatron.core") if importlib.util.find_spec(name.split(".")[0]) is None]
DEADLINE = 300  # seconds for the ranks of a case


def values():
    """The tensors of every case: several dtypes, odd lengths, a scalar, an empty tensor."""
    import torch

    torch.manual_seed(0)
    return {"layers.0.weight": torch.randn(7, 5), "layers.0.bias": torch.randn(9).to(torch.bfloat16), "table": torch.arange(24).reshape(4, 3, 2),
            "half": torch.randn(6, 4).to(torch.float16), "scale": torch.tensor(2.5), "none": torch.zeros(0, 3),
            "codes": torch.arange(16, dtype=torch.uint8).reshape(4, 4).view(torch.float8_e4m3fn)}


def saves(rank, world, folder, kind):
    """One rank of a case."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    tensors = values()
    if kind == "megatron":
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import ShardedTensor

        torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"
        weight, bias = tensors["half"], tensors["layers.0.bias"]
        rows = weight.shape[0] // world if weight.shape[0] % world == 0 else weight.shape[0]
        parts = weight.shape[0] // rows
        state = {"bias": ShardedTensor.from_rank_offsets("layers.0.bias", bias, replica_id=rank)}
        if rank < parts:
            state["half"] = ShardedTensor.from_rank_offsets("half", weight[rank * rows:(rank + 1) * rows].contiguous(), (0, rank, parts), replica_id=0)
        dist_checkpointing.save(state | {"iteration": 3}, f"{folder}/saved")
    else:
        mesh = init_device_mesh("cpu", (world,))
        axes = {"layers.0.weight": Shard(0), "layers.0.bias": Shard(0), "table": Shard(1), "half": Shard(1)}
        state = {name: distribute_tensor(tensor, mesh, [axes[name]]) if name in axes else tensor for name, tensor in tensors.items()}
        if kind == "hf":
            from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

            dcp.save(state, storage_writer=HuggingFaceStorageWriter(f"{folder}/saved", save_distributed=True))
        else:
            dcp.save({"model": state, "step": 17, "optimizer": {"param_groups": [{"lr": 0.1}]}}, checkpoint_id=f"{folder}/saved")
    dist.barrier()
    dist.destroy_process_group()


def loads(rank, world, folder, kind):
    """One rank that loads what reshard wrote, into shards that are cut in another way than those of saves()."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{kind}-{world}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    axes = {"layers.0.weight": Shard(1), "table": Shard(0), "half": Shard(0)}
    wanted = {name: tensor for name, tensor in values().items() if kind == "dcp" or tensor.numel()}
    place = {name: lambda tensor, axis=axes.get(name): distribute_tensor(tensor, mesh, [axis]) if axis else tensor.clone() for name in wanted}
    state = {name: place[name](torch.zeros_like(tensor)) for name, tensor in wanted.items()}
    reader = {"storage_reader": HuggingFaceStorageReader(f"{folder}/{kind}")} if kind == "dcp-safetensors" else {"checkpoint_id": f"{folder}/{kind}"}
    dcp.load(state, **reader)
    bits = lambda tensor: getattr(tensor, "to_local", lambda: tensor)().contiguous().reshape(-1).view(torch.uint8)  # noqa: E731
    for name, tensor in wanted.items():
        assert torch.equal(bits(state[name]), bits(place[name](tensor))), name
    dist.barrier()
    dist.destroy_process_group()


@unittest.skipIf(MISSING, f"NOT TESTED: {', '.join(MISSING)} missing; see tests/frameworks")
class CheckpointFormats(FolderTest):
    def run_ranks(self, world, function, *arguments):
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=function, args=(rank, world, *arguments)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(DEADLINE)
            rank.kill()
        self.assertEqual([rank.exitcode for rank in ranks], [0] * world)

    def saved(self, kind, world):
        folder = self.folder / f"{kind}-{world}"
        (folder / "saved").mkdir(parents=True)
        self.run_ranks(world, saves, str(folder), kind)
        return folder / "saved"

    def move(self, source, prefix, target, names):
        """Compiles and runs a job from the checkpoint `source`, whose names begin with `prefix`."""
        dtypes = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.int64": "i64", "torch.float8_e4m3fn": "fp8_e4m3"}
        tensors = {name: {"shape": list(values()[name].shape), "dtype": dtypes[str(values()[name].dtype)]} for name in names}
        layouts = {"plain": {"params": "same"}, "saved": {"params": {prefix + name: {"holds": name} for name in names}}}
        job = {"version": 1, "model": {"tensors": tensors, "layouts": layouts}, "source": {"layout": "saved", "storage": str(source)},
               "target": {"layout": "plain", "storage": target}}
        (self.folder / "job.yaml").write_text(json.dumps(job))
        run("reshard-compile", self.folder / "job.yaml", "-o", self.folder / "p.rplan")
        run("reshard-exec", self.folder / "p.rplan", "--check", "--allow=extra")

    def test_jobs(self):
        from safetensors.torch import load_file

        import torch

        for kind, worlds, prefix, names in (("dcp", (1, 2, 4), "model.", list(values())), ("hf", (1, 2, 4), "", list(values())),
                                            ("megatron", (1, 2), "", ["half", "layers.0.bias"])):
            for world in worlds:
                with self.subTest(kind=kind, world=world):
                    out = self.folder / f"out-{kind}-{world}"
                    self.move(self.saved(kind, world), prefix, str(out), names)
                    found = load_file(out / "model.safetensors")
                    self.assertEqual(sorted(found), sorted(names))
                    for name in names:
                        self.assertEqual(found[name].dtype, values()[name].dtype)
                        self.assertTrue(torch.equal(found[name].reshape(-1).view(torch.uint8), values()[name].contiguous().reshape(-1).view(torch.uint8)), name)

    def test_written_checkpoints(self):
        import torch

        torch.save(values(), self.folder / "x.pt")
        for kind in ("dcp", "dcp-safetensors", "torch-save"):
            self.move(self.folder / "x.pt", "", {"folder": str(self.folder / kind), "format": kind}, list(values()))
        found = torch.load(self.folder / "torch-save/model.pt")
        self.assertEqual(list(found), list(values()))
        for name, tensor in values().items():
            self.assertEqual((found[name].dtype, found[name].shape), (tensor.dtype, tensor.shape))
            self.assertTrue(torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)), name)
        for kind in ("dcp", "dcp-safetensors"):
            for world in (1, 2, 3):
                with self.subTest(kind=kind, world=world):
                    self.run_ranks(world, loads, str(self.folder), kind)

    def compare(self, path, wanted, prefix=""):
        """The listing of `path`, whose tensors have the bytes of `wanted`."""
        import torch

        found = json.loads(run("reshard-inspect", path, "--format=json").stdout)
        self.assertEqual(sorted(found["tensors"]), sorted(prefix + name for name in wanted))
        for name, tensor in wanted.items():
            entry = found["tensors"][prefix + name]
            self.assertEqual(entry["shape"], list(tensor.shape), name)
            bits = torch.zeros(tensor.shape + (tensor.element_size(),), dtype=torch.uint8)
            for chunk in entry["chunks"]:
                file = Path(path) / chunk["file"] if chunk["file"] else Path(path)
                data = bytearray(file.read_bytes()[chunk["begin"]:chunk["begin"] + chunk["bytes"]])
                box = tuple(slice(at, at + length) for at, length in zip(chunk["offsets"], chunk["lengths"]))
                if data:
                    bits[box] = torch.frombuffer(data, dtype=torch.uint8).reshape(*chunk["lengths"], tensor.element_size())
            own = tensor.contiguous().reshape(-1).view(torch.uint8).reshape(bits.shape) if tensor.numel() else bits
            self.assertTrue(torch.equal(bits, own), name)
        return found

    def test_dcp(self):
        for world in (1, 2, 4):
            with self.subTest(world=world):
                found = self.compare(self.saved("dcp", world), values(), "model.")
                self.assertEqual(found["format"], "DCP")
                self.assertEqual(sorted(found["objects"]), ["optimizer.param_groups.0.lr", "step"])
                self.assertEqual(len(found["tensors"]["model.layers.0.weight"]["chunks"]), min(world, 4))

    def test_dcp_safetensors(self):
        for world in (1, 2, 4):
            with self.subTest(world=world):
                wanted = {name: tensor for name, tensor in values().items() if tensor.numel()}
                found = self.compare(self.saved("hf", world), wanted | {"none": values()["none"]})
                self.assertEqual(found["format"], "DCP safetensors")

    def test_megatron(self):
        for world in (1, 2):
            with self.subTest(world=world):
                path = self.saved("megatron", world)
                found = self.compare(path, {name: values()[name] for name in ("half", "layers.0.bias")})
                self.assertEqual(found["format"], "Megatron torch_dist")
                self.assertIn("common.pt", found["objects"])

    def test_torch_save(self):
        import torch

        tensors = values()
        module = torch.nn.Linear(5, 3)
        torch.save({"model": tensors, "step": 3, "linear": module.state_dict(), "parameter": module.weight}, self.folder / "x.pt")
        wanted = {f"model.{name}": tensor for name, tensor in tensors.items()}
        wanted |= {"linear.weight": module.weight.detach(), "linear.bias": module.bias.detach(), "parameter": module.weight.detach()}
        found = self.compare(self.folder / "x.pt", wanted)
        self.assertEqual((found["format"], list(found["objects"])), ("torch.save", ["step"]))


if __name__ == "__main__":
    unittest.main()
