# SPDX-License-Identifier: Apache-2.0
"""SGLang's own model classes and loaders, recorded without memory on every rank of several meshes: the inferred layouts
give every element of the recordings, and plans with them move the bytes that SGLang's loader puts into real tensors.

    scripts/trainers_env.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/engines/record_sglang_test.py"""

from __future__ import annotations

import contextlib
import tempfile
import unittest
from pathlib import Path

from documents import trainers

trainers()
from record_support import recording

import torch

import record_test
import reshard
from reshard_record import sglang
from reshard_record.command import run
from reshard_record.compiled import compare, compile_layout
from reshard_record.engine import Engine
from reshard_record.infer import mesh_text

#: Meshes of each model: (tp, pp, expert parallel).
MESHES = {
    "qwen3-0.6b": [(1, 1, False), (2, 1, False), (4, 1, False)],
    "llama3-8b": [(2, 1, False), (2, 2, False)],
    "qwen2.5-7b": [(2, 1, False)],
    "qwen3-30b-a3b": [(2, 1, False), (4, 1, False), (2, 1, True)],
    "mixtral-8x7b": [(2, 1, False)],
    "gpt-oss-120b": [(2, 1, False)],
    "glm-4.5": [(2, 1, False)],
}


class RecordSglang(unittest.TestCase):
    model = record_test.Record.model
    moved = staticmethod(record_test.Record.moved)

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)

    def test_inferred(self):
        count = 0
        for name, meshes in MESHES.items():
            at, _, checkpoint = self.model(name)
            for mesh in meshes:
                with self.subTest(model=name, mesh=mesh):
                    found = list(sglang.recordings(at, Engine(*mesh), checkpoint))
                    layout = recording.merge(found)
                    self.assertEqual((layout.refused, layout.differences, layout.left), ({}, [], {}), layout.yaml)
                    self.assertEqual(
                        compare(compile_layout(layout.yaml, "recorded", mesh_text(layout.mesh)), found), []
                    )
                    count += sum(len(one.params) for one in found)
        self.assertGreater(count, 700)
        print(f"{count} params of {len(MESHES)} models")

    def test_refit(self):
        """A layout without a line by hand: a plan moves the bytes that SGLang's loader puts into real tensors."""
        for name in ("qwen3-0.6b", "qwen3-30b-a3b", "gpt-oss-120b"):
            with self.subTest(model=name):
                at, _, checkpoint = self.model(name)
                weights = {
                    tensor: torch.randn(shape).to(reshard.dtypes.torch_dtype(dtype))
                    for tensor, (dtype, shape) in checkpoint.items()
                }
                layout = recording.merge(sglang.recordings(at, Engine(2), checkpoint))
                (at / "model.yaml").write_text(layout.yaml)
                (at / "job.yaml").write_text(
                    f"version: 1\nmodel: model.yaml\nsource: {{layout: hf, mesh: {{}}}}\n"
                    f"target: {{layout: recorded, mesh: {mesh_text(layout.mesh)}, ranks: 1..2}}\n"
                )
                moved = self.moved(reshard.compile(at / "job.yaml"), weights)
                for rank, module in sglang.modules(at, Engine(2), contextlib.nullcontext):
                    with torch.no_grad():
                        module.load_weights(iter([(tensor, value.clone()) for tensor, value in weights.items()]))
                    loaded = dict(module.named_parameters())
                    self.assertEqual(sorted(loaded), sorted(moved[rank]))
                    self.assertEqual([each for each in loaded if not torch.equal(loaded[each], moved[rank][each])], [])

    def test_command(self):
        at, _, checkpoint = self.model("llama3-8b")
        record_test.save_file(
            {name: torch.empty(shape, dtype=torch.bfloat16) for name, (_, shape) in checkpoint.items()},
            at / "model.safetensors",
        )
        written = self.folder / "x.yaml"
        self.assertEqual(run(["sglang", "--model", str(at), "--tp", "2", "-o", str(written)]), 0)
        self.assertIn("# reshard-record sglang --model llama3-8b --tp 2", written.read_text())
        self.assertEqual(run(["--check", str(written)]), 0)
        text = written.read_text()
        written.write_text(
            text.replace('down_proj.weight", shard: {1: tp}}', 'down_proj.weight", shard: {1: {axis: tp, stride: 2}}}')
        )
        self.assertNotEqual(written.read_text(), text)
        self.assertEqual(run(["--check", str(written)]), 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
