# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the real packages, and the packages on checkpoints that reshard wrote: torch.distributed.checkpoint
and HuggingFaceStorageWriter, saved by 1, 2 and 4 gloo ranks from DTensors with even and uneven shards, torch.save, and
Megatron-Core's torch_dist. The bytes at the places that the listing names are those of the tensors; a job reads them as
its source; a job's target in each format is loaded by PyTorch, whole and by 2 and 3 ranks with shards of their own.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/frameworks/checkpoint_formats_test.py
"""

import importlib.util
import json
import multiprocessing
import sys
import unittest
from pathlib import Path

from commands import FolderTest, job_of, run

MISSING = [name for name in ("torch", "megatron.core") if importlib.util.find_spec(name.split(".")[0]) is None]
DEADLINE = 300  # seconds for the ranks of a case


def values():
    """The tensors of every case: several dtypes, odd lengths, a scalar, an empty tensor."""
    import torch

    torch.manual_seed(0)
    return {
        "layers.0.weight": torch.randn(7, 5),
        "layers.0.bias": torch.randn(9).to(torch.bfloat16),
        "table": torch.arange(24).reshape(4, 3, 2),
        "half": torch.randn(6, 4).to(torch.float16),
        "scale": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "codes": torch.arange(16, dtype=torch.uint8).reshape(4, 4).view(torch.float8_e4m3fn),
    }


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
            state["half"] = ShardedTensor.from_rank_offsets(
                "half", weight[rank * rows : (rank + 1) * rows].contiguous(), (0, rank, parts), replica_id=0
            )
        dist_checkpointing.save(state | {"iteration": 3}, f"{folder}/saved")
    else:
        mesh = init_device_mesh("cpu", (world,))
        axes = {"layers.0.weight": Shard(0), "layers.0.bias": Shard(0), "table": Shard(1), "half": Shard(1)}
        state = {
            name: distribute_tensor(tensor, mesh, [axes[name]]) if name in axes else tensor
            for name, tensor in tensors.items()
        }
        if kind == "hf":
            from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

            dcp.save(state, storage_writer=HuggingFaceStorageWriter(f"{folder}/saved", save_distributed=True))
        else:
            dcp.save(
                {"model": state, "step": 17, "optimizer": {"param_groups": [{"lr": 0.1}]}},
                checkpoint_id=f"{folder}/saved",
            )
    dist.barrier()
    dist.destroy_process_group()


def sets():
    """Shapes for every pair of test_pairs: lengths that the ranks divide, that they do not, fewer rows
    than ranks, many dtypes."""
    import torch

    torch.manual_seed(1)
    shapes = {
        "even": ((8, 4), (16,), (4, 8, 2)),
        "uneven": ((7, 5), (9,), (5, 3, 3)),
        "short": ((1, 3), (2, 2), (3,), ()),
    }
    found = {
        name: {f"layers.{i}.weight": torch.randn(shape) for i, shape in enumerate(each)}
        for name, each in shapes.items()
    }
    return found | {"dtypes": {name: tensor for name, tensor in values().items() if tensor.numel()}}


#: By number of ranks: the ways to shard a tensor.
SHARDINGS = {1: ("plain", "rows"), 2: ("rows", "columns", "replicate"), 4: ("rows", "columns", "hsdp", "grid")}
#: FSDP2 of a linear layer, by number of ranks, and its widths.
MODULES = {2: ("fsdp2",), 4: ("hsdp", "tp")}
WIDTHS = ((4, 8), (5, 7), (3, 2))
#: What each loads of ours. PyTorch does not distribute a full state dict over the strided shards of FSDP2
#: over tensor parallelism.
LOADED = {"fsdp2": ("dcp", "torch-save"), "hsdp": ("dcp", "torch-save"), "tp": ("dcp",)}


def placed(tensors, world, sharding):
    """The tensors as DTensors."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2) if sharding in ("hsdp", "grid") else (world,))

    def place(tensor):
        if sharding == "plain" or not tensor.dim() or tensor.dtype.itemsize == 1:  # gloo has no float8
            return tensor.clone()
        last = Shard(tensor.dim() - 1)
        return distribute_tensor(
            tensor,
            mesh,
            {
                "rows": [Shard(0)],
                "columns": [last],
                "replicate": [Replicate()],
                "hsdp": [Replicate(), Shard(0)],
                "grid": [Shard(0), last],
            }[sharding],
        )

    return {name: place(tensor) for name, tensor in tensors.items()}


def module(kind, widths):
    """FSDP2 of two linear layers: the module, and its weights before."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(2)
    found = torch.nn.Sequential(torch.nn.Linear(*widths), torch.nn.Linear(*reversed(widths)))
    whole = {name: tensor.clone() for name, tensor in found.state_dict().items()}
    mesh = (
        init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        if kind == "fsdp2"
        else init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    )
    if kind == "tp":
        parallelize_module(found, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        mesh = mesh["dp"]
    return fully_shard(found, mesh=mesh), whole


def start(rank, world, folder):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"  # of Megatron-Core


def end():
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def megatron_state(tensors, rank, world):
    """Each tensor cut over all ranks if they divide its rows, else whole."""
    from megatron.core.dist_checkpointing import ShardedTensor

    state = {}
    for name, tensor in tensors.items():
        if tensor.dim() and tensor.shape[0] % world == 0:
            state[name] = ShardedTensor.from_rank_offsets(
                name, tensor.chunk(world)[rank].contiguous(), (0, rank, world)
            )
        else:
            state[name] = ShardedTensor.from_rank_offsets(name, tensor.clone(), replica_id=rank)
    return state


def saves_pairs(rank, world, folder):
    """One rank saves every set of tensors, sharded in every way, in every format: folders FORMAT/WORLD/SHARDING/SET."""
    import torch
    import torch.distributed.checkpoint as dcp
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    start(rank, world, folder)

    def save(state, sharding, name, formats):
        path = lambda format: Path(folder) / format / str(world) / sharding / name
        path("torch").mkdir(parents=True, exist_ok=True)
        torch.save(state, path("torch") / f"model_world_size_{world}_rank_{rank}.pt")
        for format in formats:
            writer = (
                {"storage_writer": HuggingFaceStorageWriter(path(format), save_distributed=True)}
                if format == "hf"
                else {"checkpoint_id": path(format)}
            )
            dcp.save(state, **writer)

    for name, tensors in sets().items():
        for sharding in SHARDINGS[world]:
            save(placed(tensors, world, sharding), sharding, name, ("dcp", "hf"))
        if world < 4:
            path = Path(folder) / "megatron" / str(world) / "rows" / name
            if rank == 0:
                path.mkdir(parents=True)
            torch.distributed.barrier()
            dist_checkpointing.save(megatron_state(tensors, rank, world), str(path))
    for kind in MODULES.get(world, ()):
        for widths in WIDTHS:
            save(module(kind, widths)[0].state_dict(), kind, f"{widths[0]}-{widths[1]}", ("dcp",))
    end()


def saves_fsdp1(rank, world, folder):
    """One rank of FSDP1 saves its part, and rank 0 the whole state. The second layer has fewer rows
    than there are ranks."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    start(rank, world, folder)
    torch.manual_seed(3)
    found = FSDP(
        torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2, bias=False)),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    (Path(folder) / "ranks").mkdir(exist_ok=True)
    with FSDP.state_dict_type(found, StateDictType.SHARDED_STATE_DICT):
        torch.save(found.state_dict(), f"{folder}/ranks/model_world_size_{world}_rank_{rank}.pt")
    with FSDP.state_dict_type(found, StateDictType.FULL_STATE_DICT):
        state = found.state_dict()
    if rank == 0:
        torch.save(state, f"{folder}/full.pt")
    end()


def loads_pairs(rank, world, folder):
    """One rank loads what reshard wrote of every set (folders FORMAT/SET), sharded in every way."""
    import torch
    import torch.distributed.checkpoint as dcp
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    start(rank, world, folder)
    local = lambda tensor: getattr(tensor, "to_local", lambda: tensor)().contiguous().reshape(-1).view(torch.uint8)
    for name, tensors in sets().items():
        zeros = {each: torch.zeros_like(tensor) for each, tensor in tensors.items()}
        for sharding in SHARDINGS[world]:
            for format in ("dcp", "dcp-safetensors"):
                state, path = placed(zeros, world, sharding), f"{folder}/{format}/{name}"
                dcp.load(
                    state,
                    **(
                        {"checkpoint_id": path}
                        if format == "dcp"
                        else {"storage_reader": HuggingFaceStorageReader(path)}
                    ),
                )
                for each, tensor in placed(tensors, world, sharding).items():
                    assert torch.equal(local(state[each]), local(tensor)), (format, name, sharding, each)
        found = dist_checkpointing.load(megatron_state(zeros, rank, world), f"{folder}/megatron/{name}")
        for each, tensor in megatron_state(tensors, rank, world).items():
            assert torch.equal(local(found[each]), local(tensor.data)), ("megatron", name, each)
    end()


def loads_modules(rank, world, folder):
    """Modules of FSDP2, HSDP and FSDP2 over tensor parallelism load what reshard wrote (folders FORMAT/SET): shards of
    DCP, and a full state dict."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    start(rank, world, folder)
    for kind in MODULES[world]:
        for widths in WIDTHS:
            found, whole = module(kind, widths)
            name = f"{widths[0]}-{widths[1]}"
            for format in LOADED[kind]:
                with torch.no_grad():
                    for param in found.parameters():
                        param.zero_()
                if format == "dcp":
                    state = found.state_dict()
                    dcp.load(state, checkpoint_id=f"{folder}/dcp/{name}")
                    found.load_state_dict(state)
                else:
                    set_model_state_dict(
                        found,
                        torch.load(f"{folder}/torch-save/{name}/model.pt"),
                        options=StateDictOptions(full_state_dict=True),
                    )
                for each, param in found.named_parameters():
                    assert torch.equal(param.full_tensor(), whole[each]), (kind, format, name, each)
    end()


def saves_objects(rank, world, folder):
    """Megatron-Core's objects of each rank and of all, beside a tensor."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject

    start(rank, world, folder)
    objects = {
        "state": ShardedObject("layers._extra_state", {"rank": rank, "amax": torch.arange(3) + rank}, (world,), (rank,))
    }
    dist_checkpointing.save(
        megatron_state({"weight": torch.arange(8.0)}, rank, world) | objects | {"iteration": 3, "args": {"lr": 0.5}},
        f"{folder}/saved",
    )
    end()


def loads_objects(rank, world, folder):
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject
    from megatron.core.dist_checkpointing.validation import StrictHandling

    start(rank, world, folder)
    state = megatron_state({"weight": torch.zeros(8)}, rank, world) | {
        "state": ShardedObject("layers._extra_state", None, (world,), (rank,))
    }
    found = dist_checkpointing.load(state, f"{folder}/ours", strict=StrictHandling.RAISE_ALL)
    assert torch.equal(found["weight"], torch.arange(8.0).chunk(world)[rank])
    assert found["state"]["rank"] == rank and torch.equal(found["state"]["amax"], torch.arange(3) + rank)
    assert found["iteration"] == 3 and found["args"] == {"lr": 0.5}, found
    assert dist_checkpointing.load_common_state_dict(f"{folder}/ours")["iteration"] == 3
    end()


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
    place = lambda name, tensor: distribute_tensor(tensor, mesh, [axes[name]]) if name in axes else tensor.clone()
    state = {name: place(name, torch.zeros_like(tensor)) for name, tensor in wanted.items()}
    reader = (
        {"storage_reader": HuggingFaceStorageReader(f"{folder}/{kind}")}
        if kind == "dcp-safetensors"
        else {"checkpoint_id": f"{folder}/{kind}"}
    )
    dcp.load(state, **reader)
    bits = lambda tensor: getattr(tensor, "to_local", lambda: tensor)().contiguous().reshape(-1).view(torch.uint8)
    for name, tensor in wanted.items():
        assert torch.equal(bits(state[name]), bits(place(name, tensor))), name
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

    def move(self, source, prefix, target, names, values=values, options=("--allow=extra",)):
        """Compiles and runs a job from the checkpoint `source`, whose names begin with `prefix`."""
        dtypes = {
            "torch.float32": "fp32",
            "torch.bfloat16": "bf16",
            "torch.float16": "fp16",
            "torch.int64": "i64",
            "torch.float8_e4m3fn": "fp8_e4m3",
        }
        tensors = {
            name: {"shape": list(values()[name].shape), "dtype": dtypes[str(values()[name].dtype)]} for name in names
        }
        layouts = {"plain": {"params": "same"}, "saved": {"params": {prefix + name: {"holds": name} for name in names}}}
        job = job_of(
            {"tensors": tensors, "layouts": layouts},
            {"layout": "saved", "storage": str(source)},
            {"layout": "plain", "storage": target},
        )
        self.write("job.yaml", json.dumps(job))
        self.call("reshard-compile job.yaml -o p.rplan")
        self.call("reshard-exec p.rplan --check", *options)

    def test_jobs(self):
        import torch
        from safetensors.torch import load_file

        for kind, worlds, prefix, names in (
            ("dcp", (1, 2, 4), "model.", list(values())),
            ("hf", (1, 2, 4), "", list(values())),
            ("megatron", (1, 2), "", ["half", "layers.0.bias"]),
        ):
            for world in worlds:
                with self.subTest(kind=kind, world=world):
                    out = self.folder / f"out-{kind}-{world}"
                    self.move(self.saved(kind, world), prefix, str(out), names)
                    found = load_file(out / "model.safetensors")
                    self.assertEqual(sorted(found), sorted(names))
                    for name in names:
                        self.assertEqual(found[name].dtype, values()[name].dtype)
                        self.assertTrue(
                            torch.equal(
                                found[name].reshape(-1).view(torch.uint8),
                                values()[name].contiguous().reshape(-1).view(torch.uint8),
                            ),
                            name,
                        )

    def test_written_checkpoints(self):
        import torch

        torch.save(values(), self.folder / "x.pt")
        for kind in ("dcp", "dcp-safetensors", "torch-save"):
            self.move(self.folder / "x.pt", "", {"folder": str(self.folder / kind), "format": kind}, list(values()))
        found = torch.load(self.folder / "torch-save/model.pt")
        self.assertEqual(list(found), list(values()))
        for name, tensor in values().items():
            self.assertEqual((found[name].dtype, found[name].shape), (tensor.dtype, tensor.shape))
            self.assertTrue(
                torch.equal(
                    found[name].reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
                ),
                name,
            )
        for kind in ("dcp", "dcp-safetensors"):
            for world in (1, 2, 3):
                with self.subTest(kind=kind, world=world):
                    self.run_ranks(world, loads, str(self.folder), kind)

    def test_one_process(self):
        """PyTorch's formats both ways, without ranks: the part that `make test` runs."""
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

        tensors = {name: tensor for name, tensor in values().items() if tensor.numel()}
        torch.save(tensors, self.folder / "torch-save-saved")
        dcp.save(tensors, checkpoint_id=self.folder / "dcp-saved", no_dist=True)
        dcp.save(
            tensors,
            storage_writer=HuggingFaceStorageWriter(str(self.folder / "dcp-safetensors-saved"), save_distributed=True),
            no_dist=True,
        )
        for source, target in (("torch-save", "dcp"), ("dcp", "dcp-safetensors"), ("dcp-safetensors", "torch-save")):
            with self.subTest(source=source, target=target):
                self.move(
                    self.folder / f"{source}-saved",
                    "",
                    {"folder": str(self.folder / target), "format": target},
                    list(tensors),
                )
                if target == "torch-save":
                    found = torch.load(self.folder / target / "model.pt")
                else:
                    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
                    reader = (
                        {"checkpoint_id": self.folder / target}
                        if target == "dcp"
                        else {"storage_reader": HuggingFaceStorageReader(str(self.folder / target))}
                    )
                    dcp.load(found, no_dist=True, **reader)
                self.equal(found, tensors)
        dcp_to_torch_save(self.folder / "dcp", self.folder / "whole.pt")
        self.equal(torch.load(self.folder / "whole.pt"), tensors)

    def equal(self, found, wanted):
        import torch

        self.assertEqual(sorted(found), sorted(wanted))
        for name, tensor in wanted.items():
            self.assertEqual((found[name].dtype, found[name].shape), (tensor.dtype, tensor.shape), name)
            self.assertTrue(
                torch.equal(
                    found[name].reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
                ),
                name,
            )

    def test_pairs(self):
        """At least 200 pairs of a format and a sharding, with several sets of shapes: what the packages wrote, jobs
        read; what jobs wrote, the packages load."""
        import torch
        from safetensors.torch import load_file

        read = loaded = 0
        wanted = sets()
        torch.manual_seed(2)
        for widths in WIDTHS:  # as module(), whose seed is the same for all
            torch.manual_seed(2)
            layers = torch.nn.Sequential(torch.nn.Linear(*widths), torch.nn.Linear(*reversed(widths)))
            wanted[f"{widths[0]}-{widths[1]}"] = layers.state_dict()
        (self.folder / "theirs").mkdir()
        for world in SHARDINGS:
            self.run_ranks(world, saves_pairs, str(self.folder / "theirs"))
            (self.folder / "theirs/store").unlink(missing_ok=True)
        for path in sorted((self.folder / "theirs").glob("*/*/*/*")):
            with self.subTest(path=path.relative_to(self.folder)):
                tensors = wanted[path.name]
                out = self.folder / "read" / str(read)
                out.parent.mkdir(exist_ok=True)
                self.move(path, "", str(out), list(tensors), lambda tensors=tensors: tensors)
                self.equal(load_file(out / "model.safetensors"), tensors)
                read += 1
        plain = [(f"theirs/dcp/1/plain/{name}", name, ("dcp", "dcp-safetensors", "megatron")) for name in sets()]
        modules = [(f"theirs/dcp/2/fsdp2/{a}-{b}", f"{a}-{b}", ("dcp", "torch-save")) for a, b in WIDTHS]
        for number, (source, name, formats) in enumerate(plain + modules):
            for format in formats:
                (self.folder / "ours" / format).mkdir(parents=True, exist_ok=True)
                target = {"folder": str(self.folder / "ours" / format / name), "format": format} | (
                    {"chunk": 64} if format in ("dcp", "megatron") else {}
                )
                shards = number % 2 == 0 and format != "torch-save"
                self.move(
                    self.folder / source,
                    "",
                    target,
                    list(wanted[name]),
                    lambda name=name: wanted[name],
                    ("--allow=extra", *(["--max-shard-size=16"] if shards else [])),
                )
                if shards:
                    self.assertGreater(
                        len(
                            list(Path(target["folder"]).glob("*.distcp"))
                            + list(Path(target["folder"]).glob("*.safetensors"))
                        ),
                        1,
                    )
        for world, shardings in SHARDINGS.items():
            self.run_ranks(world, loads_pairs, str(self.folder / "ours"))
            (self.folder / "ours/store").unlink(missing_ok=True)
            loaded += len(sets()) * (2 * len(shardings) + 1)
        for world, kinds in MODULES.items():
            self.run_ranks(world, loads_modules, str(self.folder / "ours"))
            (self.folder / "ours/store").unlink(missing_ok=True)
            loaded += len(WIDTHS) * sum(len(LOADED[kind]) for kind in kinds)
        print(f"{read} pairs read, {loaded} pairs loaded", file=sys.stderr)
        self.assertGreaterEqual(read + loaded, 200)

    def test_megatron_objects(self):
        """Conversions keep what Megatron-Core stores beside tensors: its own load misses nothing.
        DCP's load reads it too."""
        import torch

        (self.folder / "saved").mkdir()
        self.run_ranks(2, saves_objects, str(self.folder))
        (self.folder / "store").unlink(missing_ok=True)
        weight = {"weight": torch.arange(8.0)}
        for format, target in (("megatron", "ours"), ("dcp", "dcp")):
            self.move(
                self.folder / "saved",
                "",
                {"folder": str(self.folder / target), "format": format},
                ["weight"],
                lambda: weight,
                (),
            )
        self.run_ranks(2, loads_objects, str(self.folder))
        import torch.distributed.checkpoint as dcp

        state = {"weight": torch.zeros(8), "layers._extra_state/shard_1_2": None, "common.pt": None}
        dcp.load(state, checkpoint_id=self.folder / "dcp", no_dist=True)
        self.assertTrue(torch.equal(state["weight"], weight["weight"]))
        self.assertEqual(state["common.pt"]["iteration"], 3)
        self.assertEqual(state["layers._extra_state/shard_1_2"][0]["rank"], 1)

    def compare(self, path, wanted, prefix=""):
        """The listing of `path`, whose tensors have the bytes of `wanted`."""
        import torch

        found = json.loads(run("reshard-inspect", path, "--format=json").stdout)
        self.assertEqual(sorted(found["tensors"]), sorted(prefix + name for name in wanted))
        for name, tensor in wanted.items():
            entry = found["tensors"][prefix + name]
            self.assertEqual(entry["shape"], list(tensor.shape), name)
            bits = torch.zeros((*tensor.shape, tensor.element_size()), dtype=torch.uint8)
            for chunk in entry["chunks"]:
                file = Path(path) / chunk["file"] if chunk["file"] else Path(path)
                data = bytearray(file.read_bytes()[chunk["begin"] : chunk["begin"] + chunk["bytes"]])
                box = tuple(slice(at, at + length) for at, length in zip(chunk["offsets"], chunk["lengths"]))
                if data:
                    bits[box] = torch.frombuffer(data, dtype=torch.uint8).reshape(
                        *chunk["lengths"], tensor.element_size()
                    )
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

    def test_fsdp1(self):
        """ShardedTensors of all ranks, and a full state dict, whose tensors have attributes."""
        import torch

        for world in (2, 3):
            with self.subTest(world=world):
                folder = self.folder / str(world)
                folder.mkdir()
                self.run_ranks(world, saves_fsdp1, str(folder))
                torch.manual_seed(3)
                whole = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2, bias=False)).state_dict()
                self.compare(folder / "ranks", whole)
                self.compare(folder / "full.pt", whole)

    def test_torch_save(self):
        import torch

        tensors = values()
        module = torch.nn.Linear(5, 3)
        torch.save(
            {"model": tensors, "step": 3, "linear": module.state_dict(), "parameter": module.weight},
            self.folder / "x.pt",
        )
        wanted = {f"model.{name}": tensor for name, tensor in tensors.items()}
        wanted |= {
            "linear.weight": module.weight.detach(),
            "linear.bias": module.bias.detach(),
            "parameter": module.weight.detach(),
        }
        found = self.compare(self.folder / "x.pt", wanted)
        self.assertEqual((found["format"], list(found["objects"])), ("torch.save", ["step"]))

    def resave(self, tensors, source):
        """A file of torch.save through a job to another one, which PyTorch loads."""
        self.write(
            "job.yaml",
            json.dumps(
                job_of(
                    tensors | {"layouts": {"same": {"params": "same"}}},
                    {"layout": "same", "storage": str(source)},
                    {"layout": "same", "storage": {"folder": str(self.folder / "out"), "format": "torch-save"}},
                )
            ),
        )
        self.call("reshard-compile job.yaml -o p.rplan")
        self.call("reshard-exec p.rplan --check --memory=1GiB")

    def test_tensors_that_are_not_their_elements(self):
        """What PyTorch saves with more than its elements, shape and strides is refused by name; what it resolves is
        read."""
        import torch

        ones, complex_ = torch.ones(3), torch.ones(3, dtype=torch.complex64)
        parameter = torch.nn.Parameter(ones.clone())
        parameter.attribute = 1
        negative = (
            "argument {} (metadata) sets 'neg': its elements are not stored themselves, but their negatives; "
            "save tensor.resolve_neg()"
        )
        v2 = negative.format("7 of 'torch._utils._rebuild_tensor_v2'")
        v3 = negative.format("8 of 'torch._utils._rebuild_tensor_v3'")
        cases = [
            (v2, complex_.conj().imag),
            (v2, torch._neg_view(ones)),
            (v2, torch.nn.Parameter(torch._neg_view(ones))),
            (v3, torch._neg_view(ones.to(torch.float8_e4m3fn))),
            ("Complex", complex_.conj()),
            ("_rebuild_qtensor", torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)),
            ("_rebuild_sparse_tensor", torch.eye(3).to_sparse()),
            ("_rebuild_sparse_tensor", torch.eye(3).to_sparse_csr()),
            ("_rebuild_nested_tensor", torch.nested.nested_tensor([ones])),
            ("_rebuild_meta_tensor_no_storage", torch.ones(3, device="meta")),
        ]
        for expected, tensor in cases:
            with self.subTest(expected):
                torch.save({"a": tensor}, self.folder / "x.pt")
                self.fails(expected, "reshard-inspect x.pt")
        for tensor in (
            complex_.conj().imag.resolve_neg(),
            parameter,
            torch.ones(3, requires_grad=True),
            ones.to(torch.float8_e5m2),
            torch.nn.Buffer(ones),
        ):
            torch.save({"a": tensor.contiguous()}, self.folder / "x.pt")
            self.prints("  a  ", "reshard-inspect x.pt")

    def test_archives_of_many_tensors(self):
        """More than the 65,535 members that a zip archive has without its 64-bit records."""
        import torch

        count = 70_000
        torch.save({f"w{i}": torch.tensor([i, 7 * i], dtype=torch.int32) for i in range(count)}, self.folder / "x.pt")
        self.resave({"dtype": "i32", "index": {"i": count}, "tensors": {"w{i}": [2]}}, self.folder / "x.pt")
        found = torch.load(self.folder / "out/model.pt")
        self.assertEqual(len(found), count)
        self.assertTrue(all(found[f"w{i}"].tolist() == [i, 7 * i] for i in range(count)))

    def test_archives_of_more_than_4_gib(self):
        """Lengths and places that need 64 bits."""
        import torch

        tensors = {"large": torch.arange((1 << 30) + 3, dtype=torch.int32), "small": torch.arange(5, dtype=torch.int32)}
        torch.save(tensors, self.folder / "x.pt")
        self.resave(
            {"dtype": "i32", "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()}},
            self.folder / "x.pt",
        )
        (self.folder / "x.pt").unlink()
        found = torch.load(self.folder / "out/model.pt", mmap=True)
        self.assertEqual(list(found), list(tensors))
        for name, tensor in tensors.items():
            self.assertTrue(torch.equal(found[name], tensor), name)


if __name__ == "__main__":
    unittest.main()
