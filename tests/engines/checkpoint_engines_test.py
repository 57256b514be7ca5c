# SPDX-License-Identifier: Apache-2.0
"""The checkpoint engines for verl and NeMo-RL: the real registries and base classes make them, two trainer ranks refit
two engine ranks over transport ucx, and every value is compared. The ranks are threads of this process.

    scripts/trainers_env.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/engines/checkpoint_engines_test.py"""

import asyncio
import sys
import tempfile
import unittest
from pathlib import Path

from documents import example, trainers
from module import importable

FOLDER = tempfile.TemporaryDirectory()
importable(FOLDER.name)
trainers()

import ray
import torch
import yaml

import reshard

ray.util.get_node_ip_address = lambda: "127.0.0.1"  # no cluster of Ray runs
JOB = """version: 1
model:
  dtype: bf16
  index: {layer: 2}
  tensors:
    "layers.{layer}.up": {shape: [8, 6]}
    "layers.{layer}.norm": {shape: [6]}
    embed: {shape: [10, 6]}
source: {mesh: {dp: 2}}
target: {mesh: {dp: 2}, ranks: [2, 3]}
"""
SHAPES = {"layers.0.up": (8, 6), "layers.1.up": (8, 6), "layers.0.norm": (6,), "layers.1.norm": (6,), "embed": (10, 6)}
LIVE: list[dict] = []  # the live tensors of the trainer ranks, in the order in which they join


def live():
    return LIVE.pop(0)


def weights_of(step):
    torch.manual_seed(step)
    return {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}


def job():
    path = Path(FOLDER.name) / "job.yaml"
    path.write_text(JOB)
    return str(path)


async def together(*calls):
    """The results of blocking calls and coroutines that wait for each other; exceptions are results."""
    return await asyncio.gather(
        *(call if asyncio.iscoroutine(call) else asyncio.to_thread(call) for call in calls), return_exceptions=True
    )


class Refits:
    """Tests of an engine. A subclass defines make, join, send, receive, finish and options."""

    def setUp(self):
        self.plan = reshard.compile(job())
        LIVE.clear()

    def made(self, engines):
        """Closes the engines after the test, all at once, since each waits for the others."""

        def close():
            sides = [engine._side for engine in engines if engine._side and engine._side.member]
            self.check(asyncio.run(together(*(side.member.close for side in sides))))

        self.addCleanup(close)
        return engines

    def check(self, results):
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def step(self, engines, weights, sent=None):
        """One refit. Returns what the two engine ranks received, or raises."""

        async def refit():
            self.check(await together(*self.join(engines)))
            senders = [self.send(engine, iter((sent or weights).items())) for engine in engines[:2]]
            return await together(*senders, *(self.receive(engine) for engine in engines[2:]))

        results = asyncio.run(refit())
        self.finish(engines)
        return results

    def expect(self, received, weights):
        self.assertEqual(sorted(received), sorted(weights))
        for name, tensor in weights.items():
            self.assertTrue(torch.equal(received[name], tensor), name)

    def test_steps(self):
        engines = self.make()
        for step in range(5):
            weights = weights_of(step)
            results = self.step(engines, weights)
            self.check(results)
            for received in results[2:]:
                self.expect(received, weights)
        self.assertFalse(torch.equal(weights_of(3)["embed"], results[2]["embed"]))  # the control: another step differs

    def test_live_trainer(self):
        """Live tensors are moved, and the framework's generator is not read."""
        weights = weights_of(1)
        LIVE.extend({name: tensor.clone() for name, tensor in weights.items()} for _ in range(2))
        engines = self.make(live="checkpoint_engines_test:live")
        results = self.step(engines, weights, sent={"not read": torch.zeros(1)})
        self.check(results)
        for received in results[2:]:
            self.expect(received, weights)

    def test_failures(self):
        """A tensor that is missing, unknown or of another shape is an error on every rank; the next refit works."""
        engines = self.make()
        weights = weights_of(0)
        missing = {name: tensor for name, tensor in weights.items() if name != "embed"}
        for sent, text in (
            (missing, "rank 0: the trainer did not send 1 params of the plan, such as 'embed'"),
            (
                weights | {"other": torch.zeros(1)},
                "rank 0: the trainer sends 'other', which the plan does not have on this rank",
            ),
            (
                weights | {"embed": torch.zeros(9, 6)},
                r"rank 0 param 'embed': found shape \(9, 6\), expected \(10, 6\) as in the plan",
            ),
        ):
            results = self.step(engines, weights, sent=sent)
            self.assertRegex(str(results[0]), text)
            for result in results:
                self.assertIsInstance(result, reshard.Error)
            results = self.step(engines, weights)
            self.check(results)
            self.expect(results[3], weights)


class Verl(Refits, unittest.TestCase):
    def make(self, live=None):
        from verl.checkpoint_engine import CheckpointEngineRegistry
        from verl.utils.import_utils import import_external_libs
        from verl.workers.config import CheckpointEngineConfig

        config = CheckpointEngineConfig(
            **yaml.safe_load(example("verl", "yaml"))["actor_rollout_ref"]["rollout"]["checkpoint_engine"]
        )
        import_external_libs(config.custom_backend_module)
        options = config.engine_kwargs[config.backend] | {
            "plan": self.plan.path,
            "timeout": 60,
            "actor_live": live,
            "bucket_size": 1 << 20,
        }
        actors = [CheckpointEngineRegistry.new(config.backend, is_master=rank == 0, **options) for rank in range(2)]
        return self.made(actors + [CheckpointEngineRegistry.new(config.backend, **options) for _ in range(2)])

    def join(self, engines):
        metadata = [engine.prepare() for engine in engines]
        groups = type(engines[0]).build_topology(2, 2, metadata)
        arguments = [{key: values[i] for key, values in group.items()} for group in groups for i in range(2)]
        return [
            lambda engine=engine, each=each: engine.init_process_group(**each)
            for engine, each in zip(engines, arguments)
        ]

    def send(self, engine, weights):
        return engine.send_weights((pair for pair in weights), global_steps=1)

    async def receive(self, engine):
        self.assertEqual(engine.wire_format, "named_tensors")
        return {name: tensor.clone() async for name, tensor in engine.receive_weights(global_steps=1)}

    def finish(self, engines):
        for engine in engines:
            engine.finalize()


class NemoRl(Refits, unittest.TestCase):
    def make(self, live=None):
        from nemo_rl.utils.checkpoint_engines.base import create_checkpoint_engine

        generation = yaml.safe_load(example("NeMo-RL", "yaml"))["policy"]["generation"]
        path = generation["refit_transport"]
        options = generation["refit_cfg"][path] | {
            "plan": self.plan.path,
            "timeout": 60,
            "policy_live": live,
            "release_after_refit": False,
        }
        return self.made(
            [create_checkpoint_engine(path, bucket_size_bytes=1 << 20, engine_kwargs=dict(options)) for _ in range(4)]
        )

    def join(self, engines):
        self.metadata = getattr(self, "metadata", None) or [engine.prepare() for engine in engines]
        sizes = {"train_world_size": 2, "rollout_world_size": 2, "metadata": self.metadata}
        policy = [
            lambda rank=rank: engines[rank].init_policy_process_group(worker_rank=rank, **sizes) for rank in range(2)
        ]
        return policy + [
            lambda rank=rank: engines[2 + rank].init_rollout_process_group(rollout_rank=rank, **sizes)
            for rank in range(2)
        ]

    def send(self, engine, weights):
        return engine.send_weights(pair for pair in weights)

    async def receive(self, engine):
        return {name: tensor.clone() async for batch in engine.receive_weight_batches() for name, tensor in batch}

    def finish(self, engines):
        pass

    def test_release_after_refit(self):
        """NeMo-RL calls finalize after each refit; the next one joins again."""
        engines = self.make()
        for step in range(2):
            results = self.step(engines, weights_of(step))
            self.check(results)
            self.expect(results[2], weights_of(step))
            self.check(asyncio.run(together(*(engine.finalize for engine in engines))))

    def test_live_generation(self):
        """Live tensors of the generation's workers are written in place, and no batch is yielded."""
        held = [{name: torch.zeros(shape).bfloat16() for name, shape in SHAPES.items()} for _ in range(2)]
        LIVE.extend(held)
        engines = self.make()
        for engine in engines[2:]:
            engine._live["generation"] = "checkpoint_engines_test:live"
        results = self.step(engines, weights_of(7))
        self.check(results)
        self.assertEqual(results[2:], [{}, {}])
        for each in held:
            self.expect(each, weights_of(7))


if __name__ == "__main__":
    sys.modules["checkpoint_engines_test"] = sys.modules["__main__"]
    unittest.main(verbosity=2)
