# SPDX-License-Identifier: Apache-2.0
"""The weight loader for SGLang: SGLang's own WeightUpdater calls it in two processes (tp 2), a third process is the
trainer, every value is compared. SGLang cannot be imported without its GPU kernels, so the files in REAL run as they
are in the release, and the others are empty stand-ins.

    scripts/trainers_env.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/engines/sglang_test.py"""

import ast
import importlib.abc
import importlib.metadata
import importlib.util
import json
import multiprocessing
import sys
import time
import traceback
import types
import unittest
from importlib.machinery import ModuleSpec
from pathlib import Path

from documents import example, trainers
from module import importable
from support import module_folder

trainers()
REAL = (
    "sglang.srt.arg_groups.prefill_buffer_ceiling",
    "sglang.srt.environ",
    "sglang.srt.model_executor.model_runner_components.weight_updater",
    "sglang.srt.runtime_context",
    "sglang.srt.weight_sync.tensor_bucket",
)
JOB = """version: 1
model:
  dtype: bf16
  index: {layer: 2}
  tensors:
    "layers.{layer}.up": {shape: [8, 6], shard: {0: tp}}
    "layers.{layer}.down": {shape: [6, 8], shard: {1: tp}}
    norm: {shape: [6]}
source: {mesh: {}}
target: {mesh: {tp: 2}, ranks: [1, 2]}
"""
SHAPES = {"layers.0.up": (8, 6), "layers.1.up": (8, 6), "layers.0.down": (6, 8), "layers.1.down": (6, 8), "norm": (6,)}
SPLIT = {"up": 0, "down": 1}


class Stand(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of sglang: those of REAL in the installed release, empty ones for the others."""

    def __init__(self):
        self.site = Path(importlib.metadata.distribution("sglang").locate_file("")).resolve()

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != "sglang":
            return None
        if name in REAL:
            return importlib.util.spec_from_file_location(name, self.site / (name.replace(".", "/") + ".py"))
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module):
        module.__getattr__ = lambda name: type(
            name, (), {"__init__": lambda *_, **__: None, "__bool__": lambda _: False}
        )


def function_of(path, name):
    """One function of a source file of the release, without the rest of the file."""
    tree = ast.parse(path.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    namespace = {"importlib": importlib}
    exec(compile(ast.Module([found], []), str(path), "exec"), namespace)
    return namespace[name]


def updater(model, rank):
    """SGLang's WeightUpdater of a process with tp rank `rank` of 2, started with --custom-weight-loader."""
    stand = Stand()
    sys.meta_path.insert(0, stand)
    importlib.import_module("sglang.srt.utils").dynamic_import = function_of(
        stand.site / "sglang/srt/utils/common.py", "dynamic_import"
    )
    runtime_context = importlib.import_module("sglang.srt.runtime_context")
    weight_updater = importlib.import_module("sglang.srt.model_executor.model_runner_components.weight_updater")
    runtime_context.get_parallel()._stamp.update(tp_rank=rank, tp_size=2, pp_rank=0, pp_size=1, dp_rank=None)
    configure(runtime_context)
    weight_updater.get_model = lambda: types.SimpleNamespace(weight_cache_mode="off")
    return weight_updater.WeightUpdater(
        tp_rank=rank,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders=["reshard.integrations.sglang.load"],
        get_model=lambda: model,
        update_model_fields=None,
        recapture_cuda_graph=None,
        get_model_runner=None,
    )


def configure(runtime_context, **changed):
    """Publishes SGLang's options, as its server does: the defaults, and those that are changed."""
    options = {
        "enable_eplb": False,
        "init_expert_location": "trivial",
        "ep_num_redundant_experts": 0,
        "speculative_algorithm": None,
    } | changed
    bags = {path: runtime_context._ConfigBag(path) for path in ("exec", "exec.moe", "spec")}
    for name, value in options.items():
        bags["spec" if name.startswith("spec") else "exec.moe"]._set(name, value)
    bags["exec"]._set_sub("moe", bags["exec.moe"])
    runtime_context.get_context()._config_bags = {name: bags[name] for name in ("exec", "spec")}


def shard(name, tensor, rank):
    split = SPLIT.get(name.split(".")[-1])
    return tensor if split is None else tensor.chunk(2, split)[rank].contiguous()


def runtime_context():
    return sys.modules["sglang.srt.runtime_context"]


def engine(folder, rank, pipe):
    """A process of the engine: answers each request with its weights or with the error."""
    importable(folder)
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Module()
    for layer in range(2):
        at = model
        for name in ("layers", str(layer)):
            if not hasattr(at, name):
                at.add_module(name, torch.nn.Module())
            at = getattr(at, name)
        at.up, at.down = (
            torch.nn.Parameter(torch.zeros(4, 6).bfloat16()),
            torch.nn.Parameter(torch.zeros(6, 4).bfloat16()),
        )
    model.norm = torch.nn.Parameter(torch.zeros(6).bfloat16())
    updates = updater(model, rank)
    while request := pipe.recv():
        act, tensors, load_format = request
        if act == "replace":  # as a repacking of the weights does
            model.norm = torch.nn.Parameter(model.norm.detach().clone())
        elif act == "add":
            model.extra = torch.nn.Parameter(torch.zeros(1))
        elif act == "buffer":
            model.register_buffer("table", torch.zeros(1))
        elif act == "rebalance":  # as SGLang's EPLB does while the server runs
            slots = torch.tensor([[0, 1, 2, 3], [0, 2, 1, 3]])
            runtime_context().get_resources().expert_location_metadata = types.SimpleNamespace(
                physical_to_logical_map_cpu=slots
            )
        elif act:
            configure(runtime_context(), **json.loads(act))
        try:
            done = updates.update_weights_from_tensor(
                [(name, torch.tensor(values, dtype=torch.uint8)) for name, values in tensors], load_format
            )
            pipe.send((done, {name: param.float().tolist() for name, param in model.named_parameters()}))
        except Exception:
            pipe.send((traceback.format_exc(), None))


class Loader(unittest.TestCase):
    def setUp(self):
        self.folder = path = module_folder(type(self))
        import reshard

        (path / "job.yaml").write_text(JOB)
        self.plan = reshard.compile(path / "job.yaml", output=path / "refit.rplan").path
        context = multiprocessing.get_context("spawn")
        self.pipes, processes = [], []
        for rank in range(2):
            mine, its = context.Pipe()
            processes.append(context.Process(target=engine, args=(str(self.folder), rank, its), daemon=True))
            processes[-1].start()
            self.pipes.append(mine)
        self.addCleanup(
            lambda: [pipe.send(None) for pipe in self.pipes] and [process.join(60) for process in processes]
        )

    def update(self, job, member=None, act="", other=None):
        """The request of docs/integrations.md to both processes while the trainer runs. Returns their answers, and the
        trainer's error. other: another load format."""

        class Engine:
            def update_weights_from_tensor(_, request, load_format):
                for pipe in self.pipes:
                    pipe.send((act, [(name, tensor.tolist()) for name, tensor in request], other or load_format))

        text = (
            example("SGLang", "python")
            .replace("/shared/refit.rplan", self.plan)
            .replace("tcp://trainer:29500", self.url(job))
        )
        exec(text.replace("rank_offset=8", "rank_offset=1, timeout=120"), {"engine": Engine()})
        error = None
        if member:
            try:
                member().run()
            except Exception as raised:
                error = raised
        for pipe in self.pipes:
            self.assertTrue(pipe.poll(400), "no answer of the engine")
        return [pipe.recv() for pipe in self.pipes], error

    def url(self, job):
        (at := self.folder / f"store{job}").mkdir(exist_ok=True)
        return f"file://{at}"

    def test_refits(self):
        import torch

        from reshard.integrations._engine import Member

        weights = {name: torch.zeros(shape).bfloat16() for name, shape in SHAPES.items()}
        members = {}

        def trainer(job):
            def member():
                for old in [each for each in members if each != job]:
                    members.pop(old).close()  # as the engine's processes do
                if job not in members:
                    members[job] = Member(self.plan, 0, weights, rendezvous=self.url(job), timeout=120)
                return members[job]

            return member

        def right(answers):
            for rank, (done, held) in enumerate(answers):
                self.assertEqual(done, (True, "Success"))
                for name, tensor in weights.items():
                    self.assertEqual(held[name], shard(name, tensor, rank).float().tolist(), f"rank {rank} {name}")

        for step in range(5):
            torch.manual_seed(step)
            for tensor in weights.values():
                tensor.copy_(torch.randn(tensor.shape))
            answers, error = self.update(1, trainer(1))
            self.assertIsNone(error)
            right(answers)
        self.assertNotEqual(answers[0][1]["layers.0.up"], answers[1][1]["layers.0.up"])  # the control: ranks differ

        answers, _ = self.update(1, other="other.load")
        self.assertIn("NotImplementedError: Unknown load_format=other.load", answers[0][0])

        answers, error = self.update(1, trainer(1), act="replace")
        self.assertIsNotNone(error)
        for rank, (text, _) in enumerate(answers):
            self.assertIn(
                f"rank {rank + 1}: the framework has replaced 1 bound params, such as 'norm'; "
                "expected the addresses of the first refit",
                text,
            )
        answers, error = self.update(2, trainer(2))  # a new job
        self.assertIsNone(error)
        right(answers)

        for job, (act, text) in enumerate((("buffer", "param 'table'"), ("add", "param 'extra'")), start=3):
            answers, error = self.update(job, trainer(job), act=act)
            self.assertIsNotNone(error)
            for rank, (found, _) in enumerate(answers):
                self.assertIn(f"target rank {rank + 1} {text}: the module has it, but not the plan", found)

    def test_engines_that_a_plan_cannot_state(self):
        """They are refused at the first refit and at a later one."""
        import torch

        from reshard.integrations._engine import Member

        slots = "a plan does not know which expert is in which slot"
        refused = {
            '{"enable_eplb": true}': f"SGLang: found enable_eplb True, expected False: {slots}",
            '{"init_expert_location": "locations.json"}': "SGLang: found init_expert_location 'locations.json', "
            f"expected 'trivial': {slots}",
            '{"ep_num_redundant_experts": 2}': f"SGLang: found ep_num_redundant_experts 2, expected 0: {slots}",
            '{"speculative_algorithm": "EAGLE3"}': "SGLang: found speculative_algorithm 'EAGLE3', which has a draft "
            "model, expected none or NGRAM",
            "rebalance": f"SGLang: found experts [0, 2, 1, 3] in the slots of layer 1, expected them in order: {slots}",
        }
        weights = {name: torch.ones(shape).bfloat16() for name, shape in SHAPES.items()}
        for act, text in list(refused.items())[:-1]:
            for found, _ in self.update(1, act=act)[0]:
                self.assertIn(text, found)
        members = []
        answers, error = self.update(
            1,
            lambda: members.append(Member(self.plan, 0, weights, rendezvous=self.url(1), timeout=120)) or members[0],
            act='{"speculative_algorithm": "NGRAM"}',
        )
        self.assertEqual((error, [done for done, _ in answers]), (None, [(True, "Success")] * 2))
        begin = time.monotonic()
        answers, error = self.update(1, lambda: members[0], act="rebalance")
        self.assertIsNotNone(error)
        self.assertLess(time.monotonic() - begin, 60, "the trainer is told at once, not at its deadline")
        for found, _ in answers:
            self.assertIn(refused["rebalance"], found)


if __name__ == "__main__":
    unittest.main(verbosity=2)
