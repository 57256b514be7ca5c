# SPDX-License-Identifier: Apache-2.0
"""Params whose positions no scheme states: loaders with irregular positions are recorded, the layout states their
pieces, and a plan moves to each rank the bytes that the loader puts there."""

from __future__ import annotations

import contextlib
import io
import re
import unittest

from record_support import elements, recording, temporary_folder

import numpy

import reshard
from reshard_record.command import run
from reshard_record.compiled import compare, compile_layout
from reshard_record.digits import record_values
from reshard_record.infer import mesh_text
from reshard_record.recording import mesh_size

WHOLE = slice(None)
TENSORS = {
    "w": ("fp32", (12, 6)),
    "x": ("fp32", (7, 6)),
    "t": ("fp32", (6, 12)),
    "n": ("fp32", (9,)),
    **{f"layers.{i}.{name}": ("fp32", (8, 3)) for i in range(3) for name in "qk"},
    **{
        f"layers.{i}.experts.{e}.{name}": ("fp32", (2, 3))
        for i in range(2)
        for e in range(4)
        for name in ("up", "gate")
    },
}


def uneven_blocks(tensors, rank):
    """Blocks of different lengths, in another order than that of the tensor; a rank without any."""
    return {"p": tensors["w"][[[10, 11, 3], [], [0, 1, 2, 4, 5, 6, 7, 8, 9], [9, 5, 1]][rank]]}


def strides(tensors, rank):
    """Every third row and every second column, and the rest."""
    rest = [row for row in range(12) if row % 3]
    return {"p": tensors["w"][0::3, 1::2] if rank == 0 else tensors["w"][rest], "q": tensors["n"][rank::4]}


def patchwork(tensors, rank):
    """Boxes of two tensors, one of them transposed, and zeros."""
    result = numpy.zeros((6, 9), numpy.float32)
    result[:4, :5] = tensors["w"][2 * rank : 2 * rank + 4, :5]
    result[1:6, 5:8] = tensors["x"][rank : rank + 5, 3:]
    result[4:, :3] = tensors["t"][:3, 4 + rank : 6 + rank].T
    return {"p": result}


def diagonal(tensors, rank):
    """Parts of rows that begin in other columns, a row twice, and a row backwards."""
    w = tensors["w"]
    return {"p": numpy.stack([w[2, rank : 3 + rank], w[5, 3:], w[5, 3:], w[7, 5:2:-1]])}


def layers(tensors, rank):
    """The same positions in each layer, and a scheme beside them."""
    return {
        f"h.{i}.qk": numpy.concatenate(
            [tensors[f"layers.{i}.k"][3 * rank : 3 + 5 * rank], tensors[f"layers.{i}.q"][4 * (1 - rank) :][:4]]
        )
        for i in range(3)
    } | {f"h.{i}.q": tensors[f"layers.{i}.q"][4 * rank : 4 * rank + 4] for i in range(3)}


def layers_that_differ(tensors, rank):
    """Other positions in each layer."""
    return {
        f"h.{i}.q": tensors[f"layers.{i}.q"][numpy.roll(numpy.arange(8), 3 * i + 1)[4 * rank :][: 4 + rank]]
        for i in range(3)
    }


def experts(tensors, rank):
    """Experts in any order, one of them twice, as an engine places them that balances their load."""
    slots = [[3, 0, 1], [2, 1]][rank]
    return {
        f"h.{i}.w13": numpy.stack(
            [
                numpy.concatenate([tensors[f"layers.{i}.experts.{e}.gate"], tensors[f"layers.{i}.experts.{e}.up"]])
                for e in slots
            ]
        )
        for i in range(2)
    }


#: {loader: (mesh, params that are stated by pieces)}
LOADERS = {
    uneven_blocks: ({"tp": 4}, {"p"}),
    strides: ({"tp": 2}, {"p", "q"}),
    patchwork: ({"dp": 1, "tp": 2}, {"p"}),
    diagonal: ({"tp": 2}, {"p"}),
    layers: ({"tp": 2}, {"h.0.qk", "h.1.qk", "h.2.qk"}),
    layers_that_differ: ({"tp": 2}, {"h.0.q", "h.1.q", "h.2.q"}),
    experts: ({"ep": 2}, {"h.0.w13", "h.1.w13"}),
}


def recordings(load, mesh):
    """The recordings of all mesh ranks. load: a function of {name: array} and the mesh rank."""
    return [
        record_values(
            load=lambda weights, rank=rank: load(dict(weights), rank), checkpoint=TENSORS, mesh=mesh, rank=rank
        )
        for rank in range(mesh_size(mesh))
    ]


def moved(model, layout, mesh, tensors):
    """The params of each mesh rank after a run of a plan from the checkpoint's tensors."""
    ranks = mesh_size(mesh)
    with temporary_folder() as folder:
        (folder / "model.yaml").write_text(model)
        (folder / "job.yaml").write_text(
            f"version: 1\nmodel: model.yaml\nsource: {{layout: hf, mesh: {{}}}}\n"
            f"target: {{layout: {layout}, mesh: {mesh_text(mesh)}, ranks: 1..{ranks}}}\n"
        )
        plan = reshard.compile(folder / "job.yaml")
        held = {name: tensors[name] for name in plan.params(0, "source")}
        with reshard.Executor(plan, threads=1) as executor:
            executor.bind(held, "source", 0)
            targets = [
                {
                    name: numpy.full(param.shape, 7, param.numpy_dtype)
                    for name, param in plan.params(1 + rank, "target").items()
                }
                for rank in range(ranks)
            ]
            for rank, each in enumerate(targets):
                executor.bind(each, "target", 1 + rank)
            executor.prepare()
            executor.run(timeout=60)
    return targets


class Pieces(unittest.TestCase):
    def setUp(self):
        generator = numpy.random.default_rng(5)
        self.tensors = {
            name: generator.standard_normal(shape).astype(numpy.float32) for name, (_, shape) in TENSORS.items()
        }

    def same(self, model, load, mesh):
        """The params that are not as the loader puts them."""
        targets = moved(model, "recorded", mesh, self.tensors)
        wrong = []
        for rank, target in enumerate(targets):
            loaded = load(self.tensors, rank)
            self.assertEqual(sorted(loaded), sorted(target))
            wrong += [(rank, name) for name, array in loaded.items() if not numpy.array_equal(array, target[name])]
        return wrong

    def test_a_plan_moves_what_the_loader_loads(self):
        for load, (mesh, explicit) in LOADERS.items():
            with self.subTest(loader=load.__name__):
                layout = recording.merge(recordings(load, mesh))
                self.assertEqual((layout.refused, layout.differences, layout.left), ({}, [], {}), layout.yaml)
                self.assertTrue(layout.exact)
                self.assertEqual(set(layout.explicit), explicit, layout.yaml)
                self.assertEqual(self.same(layout.yaml, load, mesh), [], layout.yaml)

    def test_control(self):
        """A wrong number in one piece: the comparison names the elements, and other bytes are moved."""
        for load, wrong, right in (
            (uneven_blocks, "from: [4, 0], size: [6, 6]", "from: [3, 0], size: [6, 6]"),
            (patchwork, "step: [1, 1], ", ""),
            (strides, "from: [0, 1], step: [3, 2]", "from: [1, 0], step: [3, 2]"),
        ):
            mesh, _ = LOADERS[load]
            found = recordings(load, mesh)
            text = recording.merge(found).yaml
            if load is patchwork:
                wrong, right = re.search(r'of: "x", from: \[0, 3\]', text)[0], 'of: "x", from: [2, 3]'
            self.assertIn(wrong, text)
            other = text.replace(wrong, right)
            lines = compare(compile_layout(other, "recorded", mesh_text(mesh)), found)
            self.assertTrue(lines)
            self.assertRegex(
                lines[0],
                r"rank \d: p: elements \[.*\]: the loader puts [wxt] from element \d+ by steps .*, the layout [wxt] "
                r"from element \d+",
            )
            self.assertTrue(self.same(other, load, mesh))

    def test_keys(self):
        """The pieces of each rank, once for ranks with the same ones, and only keys that differ from their defaults."""
        text = recording.merge(recordings(patchwork, {"tp": 2})).yaml
        self.assertIn("{zeros: true, size: [2, 2], to: [4, 3]}", text)
        self.assertIn('{of: "t", permute: [1, 0], from: [4, 0], size: [2, 3], to: [4, 0]}', text)
        text = recording.merge(recordings(experts, {"ep": 2})).yaml
        self.assertIn(
            '"h.{layer}.w13": {stack: expert, pieces: [{ranks: 0, shape: [3, 4, 3], of: [{of: '
            '"layers.{layer}.experts.{expert}.gate", from: [3, 0, 0]}, ',
            text,
        )
        self.assertIn(
            '{of: "layers.{layer}.experts.{expert}.gate", size: [2, 2, 3], to: [1, 0, 0]}', text
        )  # experts 0 and 1 in one piece
        text = recording.merge(recordings(lambda tensors, rank: {"p": tensors["w"][[5, 3]]}, {"tp": 3})).yaml
        self.assertIn('"p": {pieces: [{ranks: 0..2, shape: [2, 6], of: ', text)
        text = recording.merge(recordings(layers_that_differ, {"tp": 2})).yaml
        self.assertIn('"layers.1.q": [8, 3]', text)
        self.assertIn('"layers.{layer}.k": [8, 3]', text)

    def test_refused(self):
        """What has no pieces stays refused, with the reason."""
        many = numpy.random.default_rng(1).permutation(9000)
        cases = {
            "; it has more than 4096 pieces$": (
                lambda tensors, rank: {"p": tensors["long"][many]},
                {"long": ("fp32", (9000,))},
            ),
            "reshaped": (lambda tensors, rank: {"p": tensors["w"].reshape(8, 3, 3)}, {"w": ("fp32", (12, 6))}),
        }
        for why, (load, tensors) in cases.items():
            found = record_values(load=lambda weights, load=load: load(dict(weights), 0), checkpoint=tensors, mesh={})
            layout = recording.merge([found])
            self.assertEqual(list(layout.refused), ["p"])
            self.assertRegex(layout.refused["p"], why)
            self.assertEqual((layout.explicit, layout.exact), ({}, False))

    def test_ranks_that_no_axis_distinguishes(self):
        found = [
            recording.Recording(
                rank,
                {"tp": 2, "dp": 2},
                {"w": ("fp32", (4, 6))},
                {
                    "p": recording.RecordedParam(
                        "fp32", (2, 6), [elements.Box((0, 0), (2, 6), elements.Tensor("w"), 6, (6, 1))]
                    )
                }
                if rank in (0, 3)
                else {},
            )
            for rank in range(4)
        ]
        self.assertRegex(recording.merge(found).refused["p"], "no scheme gives|no axis distinguishes")

    def test_command(self):
        found = recordings(uneven_blocks, {"tp": 4})
        with temporary_folder() as folder:
            files = [str(folder / f"{each.rank}.json") for each in found]
            for each, path in zip(found, files):
                each.save(path)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
                code = run(["merge", *files, "-o", str(folder / "x.yaml")])
            self.assertEqual(code, 0, errors.getvalue())
            self.assertIn("1 params that the layout states by pieces, since no scheme fits", errors.getvalue())
            self.assertIn(
                "# pieces: p: no scheme gives the ranks these positions of dimension 0", (folder / "x.yaml").read_text()
            )
            with contextlib.redirect_stdout(io.StringIO()):
                self.assertEqual(run(["merge", *files, "--check", str(folder / "x.yaml"), "--tp", "4"]), 0)


if __name__ == "__main__":
    unittest.main()
