# SPDX-License-Identifier: Apache-2.0
"""Tests of the installed reshard.describe, on fake modules, and on a live one if PyTorch is available. Run by
package_test.py, like module_test.py."""

import subprocess
import sys
import unittest
from pathlib import Path

import numpy

import reshard
from module_test import has


class Mesh:
    """A fake mesh of PyTorch, of which this process is rank 0."""

    def __init__(self, **axes):
        self.mesh_dim_names, self.shape = tuple(axes), tuple(axes.values())
        self.mesh = numpy.arange(numpy.prod(self.shape)).reshape(self.shape)

    def get_coordinate(self):
        return [0] * len(self.shape)


class Placement:
    def __init__(self, dim=None):
        self.dim = dim


class Shard(Placement):
    pass


class _StridedShard(Placement):
    def __init__(self, dim=None, split_factor=4):  # of the mesh's last axis
        super().__init__(dim)
        self.split_factor = split_factor


class Replicate(Placement):
    pass


class Partial(Placement):
    pass


class Parameter:
    """A fake parameter with the attributes of PyTorch, DTensor and Megatron that describe reads."""

    def __init__(self, shape, placements=(), dtype="torch.bfloat16", **attributes):
        self.shape, self.dtype = shape, dtype
        if placements:
            self.placements, self.device_mesh = placements, Mesh(fsdp=2, tp=4)
        vars(self).update(attributes)


class Module:
    def __init__(self, parameters):
        self.parameters = parameters

    def named_parameters(self):
        yield from self.parameters.items()


class Describe(unittest.TestCase):
    def compiles(self, text, endpoint):
        """Compiles a plan from the described layout to a single rank. Returns the shapes of the params of rank 1."""
        Path("model.yaml").write_text(text)
        Path("described.yaml").write_text(
            f"version: 1\nmodel: model.yaml\nsource: {endpoint}\ntarget: {{layout: whole, mesh: {{}}, ranks: [8]}}\n"
        )
        with open("model.yaml", "a") as file:
            file.write("  whole:\n    params: same\n")
        plan = reshard.compile("described.yaml")
        return {name: param.shape for name, param in plan.params(1, "source").items()}

    def test_dtensor(self):
        parameters = {
            "embed.weight": Parameter((101, 16), (Shard(0),), dtype="torch.float32", device_mesh=Mesh(fsdp=2))
        }
        for layer in range(3):
            parameters[f"layers.{layer}.up.weight"] = Parameter((64, 16), (_StridedShard(0), Shard(0)))
            parameters[f"layers.{layer}.down.weight"] = Parameter((16, 64), (Shard(0), Shard(1)))
            parameters[f"layers.{layer}.norm.weight"] = Parameter((16,), (Replicate(), Replicate()))
        text = reshard.describe(Module(parameters))
        self.assertIn("{layout: live, mesh: {tp: 4, fsdp: 2}}", text)
        self.assertIn(
            """index: {layer: 3}
tensors:
  embed.weight: {shape: [101, 16], dtype: fp32}
  layers.{layer}.down.weight: [16, 64]
  layers.{layer}.norm.weight: [16]
  layers.{layer}.up.weight: [64, 16]
layouts:
  live:
    params: same
    shard:
      "embed.weight": {0: {axis: fsdp, scheme: chunk}}
      "layers.{layer}.down.weight": {0: {axis: fsdp, scheme: chunk}, 1: {axis: tp, scheme: chunk}}
      "layers.{layer}.up.weight": {0: [tp, fsdp]}
""",
            text,
        )
        shapes = self.compiles(text, "{layout: live, mesh: {tp: 4, fsdp: 2}}")
        self.assertEqual(
            (shapes["embed.weight"], shapes["layers.2.up.weight"], shapes["layers.0.down.weight"]),
            ((51, 16), (8, 16), (8, 16)),
        )

    def test_uneven_over_two_axes(self):
        """tp splits 10 rows into 3 3 3 1; fsdp splits each part in two: 2 1 2 1 2 1 1 0."""
        parameters = {
            "embed.weight": Parameter((10, 16), (_StridedShard(0), Shard(0))),
            "nested.weight": Parameter((10, 16), (Shard(0), Shard(0))),  # fsdp 5 5, then tp 2 2 1 0 of each
        }
        text = reshard.describe(parameters)
        self.assertIn('"embed.weight": {0: {axis: [tp, fsdp], sizes: [2, 1, 2, 1, 2, 1, 1, 0]}}', text)
        self.assertIn('"nested.weight": {0: {axis: [fsdp, tp], sizes: [2, 2, 1, 0, 2, 2, 1, 0]}}', text)
        shapes = self.compiles(text, "{layout: live, mesh: {tp: 4, fsdp: 2}}")
        self.assertEqual(shapes, {"embed.weight": (2, 16), "nested.weight": (2, 16)})  # rank 1: tp 1, fsdp 0

    @unittest.skipUnless(has("torch"), "no PyTorch")
    def test_torch_live_model(self):
        """FSDP2 over tensor parallelism: the shards of all PyTorch ranks, moved by the described layout, give the
        unsharded model."""
        import torch
        from torch import distributed, nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        from torch.testing._internal.distributed.fake_pg import FakeStore

        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16, bias=False), nn.LayerNorm(16)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.layers = nn.Embedding(101, 16), nn.ModuleList(Layer() for _ in range(2))
                self.head = nn.Linear(16, 101, bias=False)  # uneven over both axes

        def model():
            torch.manual_seed(0)
            return Model().to(torch.bfloat16)

        shards = []
        for rank in range(8):  # one after the other in this process, with a fake process group: no communication
            distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
            mesh, live = init_device_mesh("cpu", (2, 4), mesh_dim_names=("fsdp", "tp")), model()
            for layer in live.layers:
                parallelize_module(
                    layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None
                )
                fully_shard(layer, mesh=mesh["fsdp"])
            parallelize_module(live, mesh["tp"], {"head": ColwiseParallel()}, src_data_rank=None)
            fully_shard(live, mesh=mesh["fsdp"])
            shards.append({name: parameter.to_local().detach().clone() for name, parameter in live.named_parameters()})
            text = reshard.describe(live)
            distributed.destroy_process_group()
        self.assertIn("{layout: live, mesh: {tp: 4, fsdp: 2}}", text)
        self.compiles(text, "{layout: live, mesh: {tp: 4, fsdp: 2}}")
        executor = reshard.Executor(reshard.compile("described.yaml"))
        whole = {name: torch.zeros_like(parameter) for name, parameter in model().named_parameters()}
        for rank, tensors in enumerate([*shards, whole]):
            executor.bind({name: tensor.detach() for name, tensor in tensors.items()}, rank=rank)
        executor.prepare()
        executor.run()
        for name, parameter in model().named_parameters():
            self.assertTrue(torch.equal(whole[name], parameter), name)

    def test_megatron(self):
        parameters = {}
        for layer in range(2):
            parameters[f"layers.{layer}.fc1.weight"] = Parameter(
                (16, 16), tensor_model_parallel=True, partition_dim=0, partition_stride=2
            )
            parameters[f"layers.{layer}.experts.fc2.weight"] = Parameter(
                (16, 8), tensor_model_parallel=True, partition_dim=1, partition_stride=1, allreduce=False
            )
            parameters[f"layers.{layer}.norm.weight"] = Parameter((16,), tensor_model_parallel=False)
        text = reshard.describe(parameters, layout="trainer", axes={"tp": 4, "etp": 4})
        self.assertIn('"layers.{layer}.fc1.weight": {0: {axis: tp, stride: 2}}', text)
        self.assertIn('"layers.{layer}.experts.fc2.weight": {1: etp}', text)
        shapes = self.compiles(text, "{layout: trainer, mesh: {tp: 4, views: [{etp: 4}]}}")
        self.assertEqual(shapes, {name: parameter.shape for name, parameter in parameters.items()})
        self.assertRaisesRegex(
            reshard.Error,
            r"'layers.0.fc1.weight' is tensor parallel, but the size of axis 'tp' is unknown: pass it in "
            r"axes=\{'tp': SIZE\} \(--axis=tp=SIZE\)",
            reshard.describe,
            parameters,
        )

    def test_refusals(self):
        for parameters, message in (
            ({}, "no params"),
            (
                {"w": Parameter((8, 8), (Partial(), Replicate()))},
                "placement .* on mesh axis 'fsdp' is not supported, expected Shard or Replicate",
            ),
            (
                {"w": Parameter((8, 8), (_StridedShard(0, 2), Shard(0)))},
                "param 'w': found split factor 2, expected 4, the ranks of later mesh axes on dimension 0",
            ),
            (
                {"l.0.w": Parameter((8,), (Shard(0), Replicate())), "l.1.w": Parameter((8,), (Replicate(), Shard(0)))},
                "tensors 'l.0.w' and 'l.1.w' have one tensor pattern .* but different shardings",
            ),
            ({"w": Parameter((8,), dtype="torch.complex64")}, "dtype complex64"),
            ({"v": Parameter((8,)), "w{0}": Parameter((8,))}, r"param 'w\{0\}': a brace in a name is not supported"),
            (
                {
                    "a": Parameter((8,), (Shard(0), Replicate())),
                    "b": Parameter((8,), (Shard(0),), device_mesh=Mesh(ep=2)),
                },
                "params 'b' and 'a' are on different meshes, {'ep': 2} and {'fsdp': 2, 'tp': 4}: "
                "expected one mesh with the axes of all params",
            ),
        ):
            with self.subTest(message), self.assertRaisesRegex(reshard.Error, message):
                reshard.describe(parameters)

    def test_command(self):
        Path("mine.py").write_text(
            "import numpy\ndef model(): return {'a.0.w': numpy.zeros((2, 3)), 'a.1.w': numpy.zeros((2, 3))}\n"
        )
        done = subprocess.run(
            [Path(sys.executable).parent / "reshard-describe", "mine:model", "--layout=mine", "-o", "mine.yaml"],
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("a.{a}.w: [2, 3]\nlayouts:\n  mine:\n", Path("mine.yaml").read_text())
        refused = subprocess.run(
            [Path(sys.executable).parent / "reshard-describe", "mine:model", "--axis=tp"],
            capture_output=True,
            text=True,
        )
        self.assertEqual(refused.returncode, 2)


if __name__ == "__main__":
    unittest.main()
