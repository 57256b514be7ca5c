# SPDX-License-Identifier: Apache-2.0
"""Layouts that are inferred from recordings, without PyTorch: the recordings are those of compiled layouts, of which
the values that a plan moves are checked once."""

from __future__ import annotations

import contextlib
import io
import json
import re
import unittest

from record_support import ROOT, elements, expand, recording, temporary_folder

import numpy

import reshard
from reshard_record.command import run
from reshard_record.compiled import compare, compile_layout
from reshard_record.infer import mesh_text
from reshard_record.recording import mesh_size
from reshard_record.schemes import Axes, Rule, compiled_runs, find_rule

MODEL = """\
dtype: fp32
index: {{layer: 5, expert: 8}}
tensors:
  "m.layers.{{layer}}.q": [16, 6]
  "m.layers.{{layer}}.k": [4, 6]
  "m.layers.{{layer}}.v": [4, 6]
  "m.layers.{{layer}}.gate": [12, 6]
  "m.layers.{{layer}}.up": [12, 6]
  "m.layers.{{layer}}.down": [6, 12]
  "m.layers.{{layer}}.experts.{{expert}}.up": {{shape: [4, 6], where: {{layer: 1..4}}}}
  "m.layers.{{layer}}.experts.{{expert}}.gate": {{shape: [4, 6], where: {{layer: 1..4}}}}
  "m.layers.{{layer}}.experts.{{expert}}.down": {{shape: [6, 4], where: {{layer: 1..4}}}}
  embed: [26, 6]
  norm: {{shape: [6], dtype: bf16}}
  scale: []
layouts:
  hf: {{params: same}}
  wanted:
    {place}
    params:
{params}
"""
#: (mesh, place, params)
CASES = {
    "plain": (
        {"tp": 2},
        "",
        {
            "a": "{holds: embed, shard: {0: tp}}",
            "b.{layer}": '{holds: "{layer}.down", shard: {1: tp}}',
            "n": "{holds: norm}",
            "s": "{holds: scale}",
        },
    ),
    "padding": (
        {"tp": 4},
        "",
        {"a": "{holds: embed, shard: {0: tp}, pad: {0: 64}}", "h": "{holds: embed, pad: {0: 16}}"},
    ),
    "replicated heads": (
        {"tp": 4},
        "",
        {"qkv.{layer}": "{concat: [q, k, v], shard: {0: {axis: tp, unit: 2, replicate: true}}}"},
    ),
    "one head": (
        {"tp": 4},
        "",
        {"qkv.{layer}": "{concat: [q, k, v], shard: {0: {axis: tp, unit: 4, replicate: true}}}"},
    ),
    "gate and up": ({"tp": 3, "dp": 2}, "", {"{layer}.gu": '{concat: ["{layer}.gate", "{layer}.up"], shard: {0: tp}}'}),
    "two axes": (
        {"tp": 2, "dp": 2},
        "",
        {
            "{layer}.g": '{holds: "{layer}.gate", shard: {0: [dp, tp]}}',
            "{layer}.d": '{holds: "{layer}.down", shard: {0: dp, 1: tp}}',
        },
    ),
    "joined": ({"tp": 2}, "", {"{layer}.gu": '{concat: ["{layer}.gate", "{layer}.up"], cut: joined, shard: {0: tp}}'}),
    "columns": (
        {"tp": 2},
        "",
        {
            "{layer}.x": '{concat: {dim: 1, of: ["{layer}.gate", {permute: [1, 0], of: "{layer}.down"}]}, shard: {0: '
            "tp}}"
        },
    ),
    "transposed": ({"tp": 2}, "", {"{layer}.t": '{holds: "{layer}.gate", permute: [1, 0], shard: {1: tp}}'}),
    "interleaved": ({"tp": 2}, "", {"{layer}.qkv": "{interleave: {groups: 4, of: [q, k, v]}, shard: {0: tp}}"}),
    "stack": (
        {"tp": 2},
        "",
        {
            "{layer}.w13": '{stack: expert, concat: ["{expert}.gate", "{expert}.up"], shard: {1: tp}}',
            "{layer}.w2": '{stack: {index: expert, dim: 1}, holds: "{expert}.down", shard: {2: tp}}',
        },
    ),
    "experts over ep": (
        {"tp": 2, "dp": 2, "views": [{"ep": 4}]},
        "place: {expert: {axis: ep, scheme: round_robin}}",
        {"{layer}.w2": '{stack: expert, holds: "{expert}.down"}', "{layer}.q": "{holds: q, shard: {0: tp}}"},
    ),
    "one expert a rank": ({"ep": 8}, "place: {expert: ep}", {"{layer}.w2": '{stack: expert, holds: "{expert}.down"}'}),
    "local experts": ({"ep": 4}, "place: {expert: ep}", {"{layer}.{expert.local}.w": '{holds: "{expert}.down"}'}),
    "stages": (
        {"tp": 2, "pp": 2},
        "place: {layer: {axis: pp, scheme: vllm}}",
        {
            "h.{layer.local}.q": "{holds: q, shard: {0: tp}}",
            "e": "{holds: embed, at: {pp: first}}",
            "n": "{holds: norm, at: {pp: last}}",
            "h.{layer.local}.w": '{stack: expert, holds: "{expert}.down"}',
        },
    ),
    "chunks": (
        {"fsdp": 4},
        "",
        {
            "{layer}.q": "{holds: q, shard: {0: {axis: fsdp, scheme: chunk}}}",
            "e": "{holds: embed, shard: {0: {axis: fsdp, scheme: chunk}}}",
        },
    ),
    "cast": (
        {"tp": 2},
        "",
        {"n": "{holds: norm, dtype: fp32}", "e": "{holds: embed, dtype: bf16, convert: rne, shard: {0: tp}}"},
    ),
    "some layers": ({"tp": 1}, "", {"{layer}.q": "{holds: q, where: {layer: 1..3}}"}),
    "sizes": ({"tp": 3}, "", {"e": "{holds: embed, shard: {0: {axis: tp, sizes: [3, 20, 3]}}}"}),
    "strides": ({"tp": 2}, "", {"{layer}.e": '{holds: "{layer}.q", shard: {0: {axis: tp, stride: 4}}}'}),
}


def recordings(model, layout, mesh):
    """The recordings of a loader that does what a layout states."""
    compiled = compile_layout(model, layout, mesh_text(mesh))
    tensors = {name: (param.dtype, param.shape) for name, param in compiled.source.params(0).items()}
    return [
        recording.Recording(rank, dict(mesh), tensors, compiled.target.params(rank)) for rank in range(mesh_size(mesh))
    ]


def text(place, params):
    return MODEL.format(
        place=place, params="\n".join(f"      {json.dumps(name)}: {keys}" for name, keys in params.items())
    )


class Infer(unittest.TestCase):
    def test_every_construct(self):
        for name, (mesh, place, params) in CASES.items():
            with self.subTest(case=name):
                found = recordings(text(place, params), "wanted", mesh)
                layout = recording.merge(found)
                self.assertEqual((layout.refused, layout.differences, layout.left), ({}, [], {}), layout.yaml)
                self.assertEqual(compare(compile_layout(layout.yaml, "recorded", mesh_text(mesh)), found), [])
                self.assertEqual(len(layout.yaml.rpartition("    params:\n")[2].splitlines()), len(params), layout.yaml)

    def test_library(self):
        """Layouts of the library at meshes of different kinds: the same elements again, without the library's YAML."""
        count = 0
        config = json.dumps(
            {
                "hidden_size": 256,
                "num_hidden_layers": 7,
                "vocab_size": 1000,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "intermediate_size": 512,
                "moe_intermediate_size": 128,
                "num_experts": 8,
                "num_local_experts": 8,
                "tie_word_embeddings": False,
            }
        )
        meshes = {
            "vllm": [{"tp": 1}, {"tp": 4, "pp": 2}, {"tp": 2, "pp": 3, "views": [{"ep": 2, "pp": 3}]}],
            "sglang": [{"tp": 2, "pp": 2}],
            "fsdp2": [{"fsdp": 3}],
            "megatron-local": [{"tp": 2, "pp": 7}],
        }
        with temporary_folder() as folder:
            (folder / "config.json").write_text(config)
            for name in ("llama3-8b", "qwen3-30b-a3b", "qwen2.5-7b", "mixtral-8x7b"):
                model = f"extend: {ROOT / 'examples/models' / (name + '.yaml')}\nconfig: {folder / 'config.json'}\n"
                for layout, each in meshes.items():
                    for mesh in each:
                        with self.subTest(model=name, layout=layout, mesh=mesh):
                            found = recordings(model, layout, mesh)
                            inferred = recording.merge(found)
                            self.assertEqual(
                                (inferred.refused, inferred.differences, inferred.left), ({}, [], {}), inferred.yaml
                            )
                            count += sum(len(one.params) for one in found)
        self.assertGreater(count, 3000)

    def test_compiled_elements_are_those_that_a_plan_moves(self):
        mesh, place, params = (
            {"tp": 2, "pp": 2},
            CASES["stages"][1],
            CASES["stages"][2] | CASES["stack"][2] | CASES["interleaved"][2] | CASES["padding"][2],
        )
        model = text(place, {name.replace("{layer}", "{layer.local}"): keys for name, keys in params.items()})
        found = recordings(model, "wanted", mesh)
        with temporary_folder() as folder:
            (folder / "model.yaml").write_text(model)
            (folder / "job.yaml").write_text(
                f"version: 1\nmodel: model.yaml\nsource: {{layout: hf, mesh: {{}}}}\n"
                f"target: {{layout: wanted, mesh: {mesh_text(mesh)}, ranks: 1..4}}\n"
            )
            plan = reshard.compile(folder / "job.yaml")
            source, first, begin = {}, {}, 0
            for name, param in plan.params(0, "source").items():
                count = int(numpy.prod(param.shape))
                source[name], first[name] = (
                    numpy.arange(begin, begin + count, dtype=param.numpy_dtype).reshape(param.shape),
                    begin,
                )
                begin += count
            with reshard.Executor(plan, threads=1) as executor:
                executor.bind(source, "source", 0)
                targets = [
                    {
                        name: numpy.full(param.shape, 7, param.numpy_dtype)
                        for name, param in plan.params(1 + rank, "target").items()
                    }
                    for rank in range(4)
                ]
                for rank, each in enumerate(targets):
                    executor.bind(each, "target", 1 + rank)
                executor.prepare()
                executor.run(timeout=60)
            for each, target in zip(found, targets):
                self.assertEqual(sorted(each.params), sorted(target))
                for name, param in each.params.items():
                    if param.dtype == "fp32":
                        self.assertEqual(param.unwritten, 0)
                        numpy.testing.assert_array_equal(expand(param, first), target[name], name)

    # --- what cannot be stated, and wrong recordings

    def recorded(self, mesh, params, tensors):
        """Recordings of params given as {rank: {name: (shape, boxes)}}."""
        return [
            recording.Recording(
                rank,
                mesh,
                tensors,
                {name: recording.RecordedParam("fp32", shape, boxes) for name, (shape, boxes) in each.items()},
            )
            for rank, each in enumerate(params)
        ]

    def test_refused_by_name(self):
        tensors = {"w": ("fp32", (4, 6)), "x": ("fp32", (4, 6))}
        whole = elements.ElementMap.filled((4, 6), elements.Tensor("x")).in_shape()
        cases = {
            "computed by aten.exp of w": (
                (4, 6),
                [elements.Box((0, 0), (4, 6), elements.Computed("aten.exp", ("w",)), 0, (0, 0))],
            ),
            "reshaped": ((24,), [elements.Box((0,), (24,), elements.Tensor("w"), 0, (1,))]),
            "does not write 12 of 24": (
                (4, 6),
                [
                    elements.Box((1, 0), (1, 6), elements.Tensor("w"), 0, (6, 1)),
                    elements.Box((3, 0), (1, 6), elements.Tensor("w"), 6, (6, 1)),
                ],
            ),
            "filled with 3": (
                (4, 6),
                [
                    elements.Box((0, 0), (2, 6), elements.Tensor("w"), 0, (6, 1)),
                    elements.Box((2, 0), (2, 6), elements.Constant(3.0), 0, (0, 0)),
                ],
            ),
        }
        for why, param in cases.items():
            with self.subTest(why=why):
                layout = recording.merge(
                    self.recorded({}, [{"p": param, "other": ((4, 6), whole), "left": ((3,), [])}], tensors)
                )
                self.assertEqual(list(layout.refused), ["p"])
                self.assertIn(why, layout.refused["p"])
                self.assertEqual((list(layout.left), layout.differences, layout.exact), (["left"], [], False))
                self.assertIn('"other": {holds: "x"}', layout.yaml)

    def test_transform_by_hand(self):
        """The reason of a param that is -exp of a tensor, by two ranks or by one, has the line to add."""
        whole = elements.ElementMap.filled((4, 6), elements.Tensor("x")).in_shape()
        stated = '{holds: "w.{i}.log"%s, transform: neg_exp}'
        for mesh, length, op, keys in (
            ({"tp": 2}, 2, "aten.neg of aten.exp", stated % ", shard: {0: tp}"),
            ({}, 4, "aten.neg of aten.exp", stated % ""),
            ({"tp": 2}, 3, "aten.neg of aten.exp", ""),
            ({}, 4, "aten.neg", ""),
        ):
            tensors = {f"w.{i}.log": ("bf16", (4,)) for i in range(2)} | {"x": ("fp32", (4, 6))}
            params = {
                f"m.{i}.A": (
                    (length,),
                    [elements.Box((0,), (length,), elements.Computed(op, (f"w.{i}.log",)), 0, (0,))],
                )
                for i in range(2)
            }
            layout = recording.merge(
                self.recorded(mesh, [params | {"other": ((4, 6), whole)}] * (2 if mesh else 1), tensors)
            )
            self.assertEqual(sorted(layout.refused), ["m.0.A", "m.1.A"])
            for name, why in layout.refused.items():
                variable = re.search(r"w\.({\w+})", layout.yaml)[1]
                hint = (
                    f'; add it to the layout by hand: "m.{variable}.A": {keys.replace("{i}", variable)}' if keys else ""
                )
                self.assertTrue(why.endswith(f"computed by {op} of w.{name[2]}.log{hint}"), why)
            if keys:
                line = why.partition("by hand: ")[2]
                compiled = compile_layout(f"{layout.yaml}      {line}\n", "recorded", mesh_text(mesh))
                self.assertLessEqual(set(layout.refused), set(compiled.target.params(0)))

    def test_layers_that_differ(self):
        tensors = {f"layers.{i}.{name}": ("fp32", (4, 6)) for i in range(3) for name in "ab"}
        params = {
            f"layers.{i}.p": (
                (4, 6),
                elements.ElementMap.filled((4, 6), elements.Tensor(f"layers.{i}.{'aab'[i]}")).in_shape(),
            )
            for i in range(3)
        }
        layout = recording.merge(self.recorded({}, [params], tensors))
        self.assertEqual((layout.refused, layout.explicit, layout.differences), ({}, {}, []), layout.yaml)
        self.assertIn('"layers.2.p": {holds: "layers.2.b"}', layout.yaml)

    def test_comparison_finds_one_wrong_element(self):
        mesh, place, params = CASES["replicated heads"]
        found = recordings(text(place, params), "wanted", mesh)
        layout = recording.merge(found)
        box = found[2].params["qkv.3"].boxes[1]
        found[2].params["qkv.3"].boxes[1] = elements.Box(box.start, box.size, box.origin, box.offset + 1, box.steps)
        lines = compare(compile_layout(layout.yaml, "recorded", mesh_text(mesh)), found)
        self.assertEqual(len(lines), 1)
        self.assertRegex(
            lines[0],
            r"rank 2: qkv\.3: elements \[4:6, 0:6\]: the loader puts m\.layers\.3\.k from element 13 by steps \[6, "
            r"1\], the layout m\.layers\.3\.k from element 12",
        )
        del found[0].params["qkv.0"]
        found[1].params["more"] = found[1].params["qkv.0"]
        found[1].params["qkv.1"].dtype = "bf16"
        lines = compare(compile_layout(layout.yaml, "recorded", mesh_text(mesh)), found)
        self.assertEqual([line.split(":")[1].strip() for line in lines], ["qkv.0", "more", "qkv.1", "qkv.3"])

    def test_missing_and_contradicting_recordings(self):
        found = recordings(text("", CASES["plain"][2]), "wanted", {"tp": 2})
        with self.assertRaisesRegex(reshard.Error, r"recordings of ranks \[1\], expected those of ranks 0 to 1"):
            recording.merge(found[1:])
        found[0].tensors["w{0}"] = found[1].tensors["w{0}"] = next(iter(found[0].tensors.values()))
        with self.assertRaisesRegex(reshard.Error, r"tensor 'w\{0\}': a brace in a name is not supported"):
            recording.merge(found)
        found[1].tensors = {}
        self.assertRaisesRegex(reshard.Error, "ranks 0 and 1 have different checkpoints", recording.merge, found)
        with temporary_folder() as folder:
            (folder / "x.json").write_text("{}")
            self.assertRaisesRegex(reshard.Error, "x.json: not a recording", recording.merge, [folder / "x.json"])

    def test_command(self):
        """merge of saved recordings, and the check of a layout against recordings of another one."""
        mesh, place, params = CASES["replicated heads"]
        found = recordings(text(place, params), "wanted", mesh)
        with temporary_folder() as folder:
            files = [str(folder / f"rank-{each.rank}.json") for each in found]
            for each, path in zip(found, files):
                each.save(path)
                self.assertEqual(recording.Recording.open(path), each)
            written = folder / "a #b.yaml"  # a comment, if the job did not quote the path
            code, _, errors = self.command("merge", *files, "-o", written, "--layout", "live")
            self.assertEqual((code, errors), (0, "reshard-record: 5 params, exact\n"))
            code, out, _ = self.command("merge", *files, "--check", written, "--layout", "live", "--tp", "4")
            self.assertEqual(code, 0)
            self.assertIn("layout live is that of the loader: 20 params on 4 ranks", out)
            written.write_text(written.read_text().replace('.k", "m.layers.{layer}.v"]', '.v", "m.layers.{layer}.k"]'))
            code, out, errors = self.command("merge", *files, "--check", written, "--layout", "live", "--tp", "4")
            self.assertEqual(code, 1, errors)
            self.assertIn("40 differences between the loader and the layout", errors)
            self.assertIn("rank 0: qkv.0: elements [4:6, 0:6]: the loader puts m.layers.0.k from element 0", errors)
            found[1].params["qkv.0"].boxes.append(
                elements.Box((7, 0), (1, 6), elements.Computed("aten.exp", ("m.layers.0.q",)), 0, (0, 0))
            )
            found[1].save(files[1])
            code, out, errors = self.command("merge", *files)
            self.assertEqual(code, 1)
            self.assertIn("# not stated: qkv.0: rank 1: computed by aten.exp of m.layers.0.q", out)
            self.assertEqual(errors.splitlines()[-1], "reshard-record: 4 of 5 params, not exact")
            for arguments in (
                [],
                ["merge"],
                ["vllm"],
                ["merge", "--check", "none.yaml"],
                ["vllm", "x", "--model", "y"],
                ["merge", *files[1:]],
            ):
                self.assertEqual(self.command(*arguments)[0], 2, arguments)
            for arguments in (["merge", folder / "none.json"], ["merge", *files, "-o", folder / "none" / "x.yaml"]):
                code, _, errors = self.command(*arguments)
                self.assertEqual(code, 2, errors)
                self.assertRegex(errors, r"^reshard-record: error: .*No such file or directory: '.*/none")

    @staticmethod
    def command(*arguments):
        """(exit code, output, errors) of reshard-record."""
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
            code = run(list(map(str, arguments)))
        return code, out.getvalue(), errors.getvalue()

    def test_schemes(self):
        """Every scheme is found again, or one with the same positions."""
        axes = Axes.of({"tp": 4})
        for rule in (
            Rule(("tp",)),
            *(Rule(("tp",), scheme) for scheme in ("chunk", "balanced", "vllm", "sglang", "round_robin")),
            Rule(("tp",), "stride", 2),
            Rule(("tp",), "sizes", [1, 2, 3, 18]),
            Rule(("tp",), "blocks", [8, 16]),
            Rule(("tp",), unit=12, replicate=True),
        ):
            for n in (24, 26):
                compiled = list(compiled_runs([rule], [n], 4))
                self.assertTrue(compiled or n == 26, rule)  # some rules do not apply to 26
                for _, (runs,) in compiled:
                    found = find_rule(axes, [(n, dict(enumerate(runs)))])
                    self.assertIsNotNone(found, rule)
                    self.assertEqual(list(compiled_runs([found], [n], 4)), [(found, [runs])])

    def test_schemes_of_the_compiler(self):
        """The compiler says which ranks hold nothing, and refuses a rule alone, whatever other rules do."""
        rules = [Rule(("tp",)), Rule(("tp",), "chunk", unit=3, replicate=True), Rule(("tp",), "balanced")]
        self.assertEqual(
            list(compiled_runs(rules, [26], 4)),
            [
                (rules[1], [[((0, 9),), ((9, 9),), ((18, 8),), ()]]),
                (rules[2], [[((0, 7),), ((7, 7),), ((14, 6),), ((20, 6),)]]),
            ],
        )


if __name__ == "__main__":
    unittest.main()
