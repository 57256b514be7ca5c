# SPDX-License-Identifier: Apache-2.0
"""Jobs from vLLM's own description of a trainer and an engine: live modules of transformers, sharded by FSDP2 and HSDP
over 2, 3 and 4 ranks, in vLLM's DTensorModuleSource, to engines of several sizes by vLLM's ParallelConfig. Every byte
that such a job moves to a worker is compared with a plan from whole tensors.

    make test-engines

One process acts as each trainer rank in turn, over PyTorch's fake process group: FSDP2 shards
params without messages."""

import json
import types
import unittest

import torch
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import ParallelConfig
from vllm.distributed.weight_transfer.m2n_common import REPLICATE, M2NMesh, M2NParamMeta
from vllm.distributed.weight_transfer.m2n_source import DTensorModuleSource

import support


def sharded(at, name, shape, rank):
    """The source of one rank, with its local shards; ranks in a mesh of this shape."""
    world = torch.Size(shape).numel()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        torch.manual_seed(0)
        module = support.live(support.config(name, at / "config.json"), "cpu")
        mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in module.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        source = DTensorModuleSource(module, world)
        stated = types.SimpleNamespace(mesh=source.mesh, metadata=source.metadata)
        return stated, {name: tensor.detach().clone() for name, tensor in source}
    finally:
        torch.distributed.destroy_process_group()


def moved(plan, sources):
    """The params of all workers."""
    import reshard

    target = plan.endpoints[1]
    found = {
        rank: {
            name: torch.zeros(param.shape, dtype=reshard.dtypes.torch_dtype(param.dtype))
            for name, param in plan.params(rank, "target").items()
        }
        for rank in target.ranks
    }
    with reshard.Executor(plan, threads=1) as executor:
        for rank, tensors in enumerate(sources):
            executor.bind(tensors, "source", rank)
        for rank, tensors in found.items():
            executor.bind(tensors, "target", rank)
        executor.prepare()
        executor.run(timeout=60)
    return list(found.values())


def stated(*placements, name="model.layers.{}.mlp.up_proj.weight", mesh=(2, 2)):
    """A source of one param in several layers with these placements."""
    params = [M2NParamMeta(name.format(layer), torch.bfloat16, (8, 8), each) for layer, each in enumerate(placements)]
    return types.SimpleNamespace(mesh=lambda: M2NMesh(mesh, 0), metadata=lambda: params)


class SourceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = support.module_folder(cls)

    def check(self, name, shape, engine, layout="hf"):
        import reshard
        from reshard.integrations.vllm_source import job_of

        at = self.folder / f"{name}.{'x'.join(map(str, shape))}"
        at.mkdir()
        support.model(at, name)
        at = at / name
        ranks = [sharded(at, name, shape, rank) for rank in range(torch.Size(shape).numel())]
        jobs = {job_of(at / "model.yaml", source, engine, layout) for source, _ in ranks}
        self.assertEqual(len(jobs), 1, "all ranks state one job")
        (at / "job.yaml").write_text(job := jobs.pop())
        _, whole = sharded(at, name, (1,), 0)
        (at / "whole.yaml").write_text(
            json.dumps(
                json.loads(job)
                | {"model": "model.yaml", "source": {"layout": "fsdp2", "mesh": {"fsdp": 1}, "ranks": [0]}}
            )
        )
        found, expected = (
            moved(reshard.compile(at / "job.yaml"), [tensors for _, tensors in ranks]),
            moved(reshard.compile(at / "whole.yaml"), [whole]),
        )
        self.assertEqual(len(found), engine.world_size)
        for rank, tensors in enumerate(expected):
            self.assertEqual(found[rank].keys(), tensors.keys())
            self.assertEqual(
                [name for name, tensor in tensors.items() if not torch.equal(tensor, found[rank][name])], []
            )
        self.assertTrue(any(tensor.any() for tensor in expected[0].values()))

    def test_fsdp2(self):
        self.check("qwen3-8b", (2,), ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp"))

    def test_uneven_shards_to_stages(self):
        self.check("llama3-8b", (3,), ParallelConfig(pipeline_parallel_size=2, distributed_executor_backend="mp"))

    def test_hsdp(self):
        self.check("qwen3-8b", (2, 2), ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp"))

    def test_experts(self):
        """transformers fuses the experts of a layer, which layout fsdp2 has."""
        self.check(
            "qwen3-30b-a3b",
            (2,),
            ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True, distributed_executor_backend="mp"),
            "fsdp2",
        )

    def test_axes(self):
        """vLLM's mesh is in row-major order, and a job's first axis is the fastest."""
        from reshard.integrations.vllm_source import source_of

        layout, endpoint = source_of(stated((0, REPLICATE), (0, REPLICATE), mesh=(3, 2)))
        self.assertEqual(list(endpoint["mesh"].items()), [("axis1", 2), ("axis0", 3)])
        self.assertEqual(
            layout["shard"], {"model.layers.*.mlp.up_proj.weight": {"0": {"axis": "axis0", "scheme": "chunk"}}}
        )
        self.assertEqual(
            source_of(stated((0, 1)))[0]["shard"],
            {
                "model.layers.*.mlp.up_proj.weight": {
                    "0": {"axis": "axis0", "scheme": "chunk"},
                    "1": {"axis": "axis1", "scheme": "chunk"},
                }
            },
        )
        self.assertEqual(source_of(stated(None))[0]["shard"], {})

    def test_refusals(self):
        import reshard
        from reshard.integrations.vllm_source import source_of, target_of

        for source, text in (
            (stated((0, 0)), r"'model.layers.0.mlp.up_proj.weight': found dimension 0 sharded by two mesh axes"),
            (
                stated((0, REPLICATE), (1, REPLICATE)),
                r"'model.layers.1.mlp.up_proj.weight': found shards {1: 'axis0'}, expected {0: 'axis0'}",
            ),
            (
                stated((0, REPLICATE), None),
                r"'model.layers.1.mlp.up_proj.weight': found shards {}, expected {0: 'axis0'}",
            ),
        ):
            self.assertRaisesRegex(reshard.Error, text, source_of, source)
        with self.assertRaisesRegex(reshard.Error, "found data_parallel_size 2, expected 1"):
            target_of(ParallelConfig(data_parallel_size=2, distributed_executor_backend="mp"), 2)


if __name__ == "__main__":
    unittest.main()
