# SPDX-License-Identifier: Apache-2.0
"""One model of several recorded sizes: a loader in NumPy of a decoder with experts, recorded at two sizes; the model
that is made of them is that of the loader at a third size too."""

from __future__ import annotations

import contextlib
import io
import json
import types
import unittest

from record_support import ROOT, documented, recording, temporary_folder

import numpy

import reshard
from reshard import flow
from reshard_record.command import run
from reshard_record.compiled import as_recordings, compare, compile_layout
from reshard_record.digits import record_values
from reshard_record.expressions import Keys
from reshard_record.infer import mesh_text

SIZES = {
    "small": {
        "num_hidden_layers": 3,
        "hidden_size": 14,
        "attention": {"num_heads": 6, "num_kv_heads": 1, "head_dim": 4},
        "intermediate_size": 22,
        "vocab_size": 50,
        "num_experts": 5,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
        "layer_types": ["full", "sliding", "full"],
        "bos_token_id": 14,
    },
    "large": {
        "num_hidden_layers": 5,
        "hidden_size": 18,
        "attention": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 6},
        "intermediate_size": 28,
        "vocab_size": 64,
        "num_experts": 3,
        "first_k_dense_replace": 2,
        "tie_word_embeddings": True,
        "layer_types": ["full", "sliding", "sliding", "full", "sliding"],
        "bos_token_id": 18,
    },
    "third": {
        "num_hidden_layers": 4,
        "hidden_size": 20,
        "attention": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 10},
        "intermediate_size": 32,
        "vocab_size": 70,
        "num_experts": 2,
        "first_k_dense_replace": 3,
        "tie_word_embeddings": False,
        "layer_types": ["sliding", "full", "full", "sliding"],
        "bos_token_id": 1,
    },
}


def checkpoint(c):
    """{name: (dtype, shape)} of a size."""
    a, hidden, ffn = c["attention"], c["hidden_size"], c["intermediate_size"]
    shapes = {"embed": (c["vocab_size"], hidden)} | (
        {} if c["tie_word_embeddings"] else {"head": (c["vocab_size"], hidden)}
    )
    for layer in range(c["num_hidden_layers"]):
        at = f"layers.{layer}."
        shapes |= {
            at + "q": (a["num_heads"] * a["head_dim"], hidden),
            at + "k": (a["num_kv_heads"] * a["head_dim"], hidden),
            at + "v": (a["num_kv_heads"] * a["head_dim"], hidden),
            at + "norm": (hidden,),
            at + "q_norm": (a["head_dim"],),
        }
        if c["layer_types"][layer] == "sliding":
            shapes[at + "sink"] = (a["num_heads"],)
        for each in (
            [f"{at}mlp."]
            if layer < c["first_k_dense_replace"]
            else [f"{at}experts.{e}." for e in range(c["num_experts"])]
        ):
            shapes |= {each + "gate": (ffn, hidden), each + "up": (ffn, hidden), each + "down": (hidden, ffn)}
    shapes[f"layers.{c['num_hidden_layers']}.predict"] = (hidden, 2 * hidden)  # the loader leaves it out
    return {name: ("bf16", shape) for name, shape in shapes.items()}


def loaded(c, tp, rank, t):
    """The params of a rank of the loader: heads over tp, key heads replicated, the vocabulary padded to 64."""
    d, kv = c["attention"]["head_dim"], c["attention"]["num_kv_heads"]

    def rows(array, axis=0):
        return numpy.split(array, tp, axis)[rank]

    def kv_rows(array):
        return rows(array) if kv >= tp else array[rank * kv // tp * d :][:d]

    def vocabulary(array):
        return rows(numpy.concatenate([array, numpy.zeros((-len(array) % 64, array.shape[1]), array.dtype)]))

    params = {"embed": vocabulary(t["embed"])} | ({"head": vocabulary(t["head"])} if "head" in t else {})
    for layer in range(c["num_hidden_layers"]):
        at = f"layers.{layer}."
        params[f"h.{layer}.qkv"] = numpy.concatenate([rows(t[at + "q"]), kv_rows(t[at + "k"]), kv_rows(t[at + "v"])])
        params |= {f"h.{layer}.{name}": t[at + name] for name in ("norm", "q_norm")}
        if at + "sink" in t:
            params[f"h.{layer}.sink"] = rows(t[at + "sink"])
        experts = (
            [at + "mlp."]
            if layer < c["first_k_dense_replace"]
            else [f"{at}experts.{e}." for e in range(c["num_experts"])]
        )
        w13 = numpy.stack([numpy.concatenate([rows(t[each + "gate"]), rows(t[each + "up"])]) for each in experts])
        w2 = numpy.stack([rows(t[each + "down"], 1) for each in experts])
        if layer < c["first_k_dense_replace"]:
            params |= {f"h.{layer}.gate_up": w13[0], f"h.{layer}.down": w2[0]}
        else:
            params |= {f"h.{layer}.w13": w13, f"h.{layer}.w2": w2}
    return params


def recorded(name, tp=2):
    c = SIZES[name]
    return [
        record_values(
            load=lambda weights, rank=rank: loaded(c, tp, rank, dict(weights)),
            checkpoint=checkpoint(c),
            mesh={"tp": tp},
            rank=rank,
        )
        for rank in range(tp)
    ]


def of_size(yaml, config, folder):
    """The model of one size."""
    (folder / "model.yaml").write_text(yaml)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "size.yaml").write_text("extend: model.yaml\nconfig: config.json\n")
    return str(folder / "size.yaml")


def one(n, cut=None, axis="tp", ranks=2):
    """The recordings of one tensor of n rows, cut on ranks, or whole on one."""
    ranks, cut = (ranks, cut) if cut else (1, lambda n, rank: slice(None))
    return [
        record_values(
            load=lambda weights, rank=rank: {"p": dict(weights)["w"][cut(n, rank)]},
            checkpoint={"w": ("bf16", (n, 3))},
            mesh={axis: ranks},
            rank=rank,
        )
        for rank in range(ranks)
    ]


class Generalize(unittest.TestCase):
    def test_two_sizes_give_a_third(self):
        found = recording.generalize([(recording.merge(recorded(name)), SIZES[name]) for name in ("small", "large")])
        self.assertEqual((found.kept, found.differences, found.exact), ({}, [], True), found.yaml)
        with temporary_folder() as folder:
            for name, tp in (("small", 2), ("large", 2), ("large", 4), ("third", 2)):
                with self.subTest(size=name, tp=tp):
                    wanted = recorded(name, tp)
                    compiled = compile_layout(
                        of_size(found.yaml, SIZES[name], folder), "recorded", mesh_text({"tp": tp})
                    )
                    self.assertEqual(compare(compiled, wanted), [], found.yaml)
                    self.assertEqual(as_recordings(compiled, {})[0].tensors, wanted[0].tensors)
        for line in (
            "index: {layer: num_hidden_layers, expert: num_experts}",
            '"layers.{layer}.q": [num_heads * head_dim, hidden_size]',
            '"head": {shape: [vocab_size, hidden_size], when: not tie_word_embeddings}',
            '"layers.{num_hidden_layers}.predict": [hidden_size, 2 * hidden_size]',
            "where: {layer: first_k_dense_replace..num_hidden_layers - 1}",
            'where: {layer: {pattern: $layer_types, is: ["sliding"]}}',
            "shard: {0: {axis: tp, unit: head_dim, replicate: true}}",
            '"embed": {holds: "embed", pad: {0: 64}, shard: {0: tp}}',
        ):
            self.assertIn(line, found.yaml)
        self.assertIn("4", found.ambiguous["head_dim"])  # a unit that one size alone has

    def test_numbers_without_an_expression_stay(self):
        """One dimension that follows no key: the first size's number, which the comparison with
        the second size shows."""
        layouts = [recording.merge(one(n)) for n in (7, 13)]
        found = recording.generalize([(layout, {"hidden_size": 4 + i}) for i, layout in enumerate(layouts)])
        self.assertEqual(found.kept, {"tensor w, shape, 0": "no expression of the configs has the values 7, 13"})
        self.assertIn('"w": [7, 3]', found.yaml)
        self.assertFalse(found.exact)
        self.assertEqual(
            [line.split(": ")[:2] for line in found.differences], [["size 1", "tensor w"], ["size 1", "rank 0"]]
        )

    def test_ambiguous_expressions(self):
        """The simplest expression is taken, the others are named; a further size decides."""
        configs = [
            {"inner": 8, "heads": 2, "head_dim": 4},
            {"inner": 18, "heads": 3, "head_dim": 6},
            {"inner": 18, "heads": 5, "head_dim": 4},
        ]
        layouts = [recording.merge(one(config["heads"] * config["head_dim"])) for config in configs]
        found = recording.generalize(list(zip(layouts, configs))[:2])
        self.assertIn('"w": [inner, 3]', found.yaml)
        self.assertIn("heads * head_dim", found.ambiguous["inner"])
        self.assertTrue(found.exact)
        found = recording.generalize(list(zip(layouts, configs)))
        self.assertIn('"w": [heads * head_dim, 3]', found.yaml)
        self.assertNotIn("heads * head_dim", found.ambiguous)
        self.assertTrue(found.exact)

    def test_equal_numbers_stay(self):
        found = recording.generalize([(recording.merge(one(3 * n)), {"rows": 3 * n, "columns": 3}) for n in (2, 3)])
        self.assertIn('"w": [rows, 3]', found.yaml)
        self.assertEqual(found.ambiguous["3"], ["columns"])

    def test_padding_that_one_size_has(self):
        """A multiple that one size alone shows stays a number, also if a key has its value."""

        def layout(n):
            load = lambda weights: {
                "p": numpy.concatenate([dict(weights)["w"], numpy.zeros((-n % 64, 3), numpy.float32)])
            }
            return recording.merge([record_values(load=load, checkpoint={"w": ("fp32", (n, 3))}, mesh={})])

        for sizes in ((50, 128), (128, 50)):
            found = recording.generalize([(layout(n), {"rows": n, "head_dim": 64}) for n in sizes])
            self.assertIn('"p": {holds: "w", pad: {0: 64}}', found.yaml)
            self.assertEqual(found.ambiguous["64"], ["head_dim"])
            self.assertTrue(found.exact)

    def test_params_stated_in_ways_that_exclude_each_other(self):
        """Even at one size, ceil at another: the compiler shows that the second way is right for both. Rows in turn at
        one size and in a block at the other are no one layout."""
        cut = lambda n, rank: slice(-(-n // 2) * rank, -(-n // 2) * (rank + 1))
        found = recording.generalize([(recording.merge(one(n, cut)), {"rows": n}) for n in (6, 7)])
        self.assertIn("scheme: ", found.yaml)
        self.assertTrue(found.exact)
        cut = lambda n, rank: slice(-(-n // 4) * rank, -(-n // 4) * (rank + 1))
        for sizes in ((7, 5), (5, 7)):  # balanced is tried first and is right for 7 rows alone
            found = recording.generalize([(recording.merge(one(n, cut, ranks=4)), {"rows": n}) for n in sizes])
            self.assertIn("scheme: chunk", found.yaml)
            self.assertTrue(found.exact)
        cut = lambda n, rank: slice(3 * rank, 3 * rank + 3) if n == 6 else slice(rank, None, 2)
        found = recording.generalize([(recording.merge(one(n, cut)), {"rows": n}) for n in (6, 8)])
        self.assertFalse(found.exact)
        self.assertTrue(
            all(line.startswith("size ") and ": p: " in line for line in found.differences), found.differences
        )

    def test_expressions(self):
        keys = Keys(
            [
                {"a": 6, "b": 4, "text": {"c": 10, "d": None, "a": 7}, "or": 100, "e": 15},
                {"a": 10, "b": 6, "text": {"c": 14, "d": 4, "a": 8}, "or": 1000, "e": 35},
            ],
            ["b"],
        )
        self.assertEqual(keys.keys, {"a": "a", "b_": "b", "c": "text.c", "a_": "text.a", "or_": "or", "e": "e"})
        for values, wanted in (
            ((6, 10), "a"),
            ((24, 60), "a * b_"),
            ((12, 20), "2 * a"),
            ((3, 5), "a / 2"),
            ((16, 24), "c + a"),
            ((60, 140), "a * c"),
            ((40, 84), "b_ * c"),
            ((4, 4), "a * c / e"),
            ((84, 200), "a * (c + b_)"),
        ):
            with self.subTest(values=values):
                found = keys.fits(values)
                self.assertTrue(
                    {wanted, " + ".join(reversed(wanted.split(" + "))), wanted.replace("(c + b_)", "(b_ + c)")}
                    & {*found},
                    found,
                )
        self.assertEqual(keys.fits((1234567, 7654321)), [])
        self.assertEqual(keys.fits((None, 8)), ["a_"])

    def test_yaml_is_read_as_it_is_written(self):
        for name in SIZES:
            written = recording.merge(recorded(name)).yaml
            self.assertEqual(flow.write(flow.read(written, name)), written)
        with self.assertRaisesRegex(reshard.Error, r"x.yaml:2: 'tensors: \[' is no line that reshard-record writes"):
            flow.read("dtype: bf16\ntensors: [\n", "x.yaml")

    def test_errors(self):
        one_size = recording.merge(one(4)), {"rows": 4}
        with self.assertRaisesRegex(reshard.Error, "1 layouts, expected those of two sizes or more"):
            recording.generalize([one_size])
        for other, why in (
            (recording.merge(one(6), "live"), "layouts 0 and 1 have name recorded and live, expected the same"),
            (recording.merge(one(6, axis="ep")), "layouts 0 and 1 have axes .tp. and .ep., expected the same"),
        ):
            self.assertRaisesRegex(reshard.Error, why, recording.generalize, [one_size, (other, {})])
        other = recording.merge(one(6))
        other.differences = ["rank 0: p"]
        with self.assertRaisesRegex(reshard.Error, "layout 1 differs from its recording: rank 0: p"):
            recording.generalize([one_size, (other, {})])
        with self.assertRaisesRegex(reshard.Error, "none.json: no config.json"):
            recording.generalize([(one_size[0], "none.json"), one_size])

    def test_command(self):
        with temporary_folder() as folder:
            for name in ("small", "large"):
                files = []
                for each in recorded(name):
                    files.append(str(folder / f"{name}-{each.rank}.json"))
                    each.save(files[-1])
                (folder / f"{name}-config.json").write_text(json.dumps(SIZES[name]))
                self.assertEqual(self.command("merge", *files, "-o", folder / f"{name}.yaml")[0], 0)
            layouts, configs = (
                [folder / "small.yaml", folder / "large.yaml"],
                [folder / "small-config.json", folder / "large-config.json"],
            )
            code, _, errors = self.command("generalize", *layouts, "--config", *configs, "-o", folder / "model.yaml")
            self.assertEqual((code, errors), (0, ""))
            self.assertIn("# ambiguous: head_dim, or ", (folder / "model.yaml").read_text())
            self.check_engines(folder)
            files = []
            for each in recorded("third"):
                files.append(str(folder / f"third-{each.rank}.json"))
                each.save(files[-1])
            at = of_size((folder / "model.yaml").read_text(), SIZES["third"], folder)
            self.assertEqual(self.command("merge", *files, "--check", at, "--tp", "2")[0], 0)
            layouts[1].write_text("# not stated: h.0.a: rank 0: computed by aten.neg of a\n" + layouts[1].read_text())
            code, out, errors = self.command("generalize", *layouts, "--config", *configs)
            self.assertEqual((code, "1 params that a layout cannot state" in errors), (1, True))
            self.assertIn("# not stated: size 1: h.0.a: rank 0: computed by aten.neg of a\n", out)
            code, out, errors = self.command("generalize", *layouts, "--config", configs[1], configs[0])
            self.assertEqual(code, 1)
            self.assertIn("values that stay those of the first layout", errors)
            self.assertIn("# not general: ", out)
            for arguments in (
                ["generalize", *layouts],
                ["generalize", *layouts, "--config", configs[0]],
                ["generalize", folder / "none.yaml"],
                ["generalize", configs[0], layouts[0], "--config", *configs],
                ["generalize", *layouts, "--check", layouts[0]],
            ):
                code, _, errors = self.command(*arguments)
                self.assertEqual(code, 2, errors)

    def check_engines(self, folder):
        """The layout of an engine is that of the recorded model, for one size or for all; of other models it is
        `vllm`."""
        from reshard.integrations.vllm_source import engine_layout, target_of

        def engine(tp, pp=1, experts=False):
            return types.SimpleNamespace(
                tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=1, enable_expert_parallel=experts
            )

        (folder / "sub").mkdir()
        (folder / "sub" / "one.yaml").write_text("{extend: ../model.yaml, config: ../small-config.json}\n")
        (folder / "two.yaml").write_text("extend: sub/one.yaml   # again\n")
        (folder / "library.yaml").write_text(f"extend: '{ROOT}/examples/models/qwen3-8b.yaml'\n")
        (folder / "loop.yaml").write_text("extend: loop.yaml\n")
        for model, sizes, layout in (
            ("small", (2,), "recorded"),
            ("model", (4, 2), "recorded"),
            ("two", (4,), "recorded"),
            ("library", (4,), "vllm"),
            ("loop", (1,), "vllm"),
        ):
            self.assertEqual(
                engine_layout(folder / f"{model}.yaml", engine(*sizes)), (layout, layout == "recorded"), model
            )
        self.assertEqual(
            target_of(engine(2), 1, "recorded", True),
            {"layout": "recorded", "mesh": {"tp": 2, "pp": 1}, "ranks": [1, 2]},
        )
        self.assertEqual(
            target_of(engine(2, 1, True), 1, "recorded", True)["mesh"],
            {"tp": 2, "pp": 1, "views": [{"ep": 2, "pp": 1}]},
        )
        self.assertEqual(target_of(engine(2), 1)["mesh"], {"tp": 2, "pp": 1, "views": [{"etp": 2, "pp": 1}]})
        for sizes, text in (
            ((4,), "small.yaml: found an engine with tp 4, expected 2, with which the layout was recorded"),
            ((2, 2), "found an engine with pp 2, expected 1"),
            ((2, 1, True), "found an engine with expert parallel True, expected False"),
        ):
            with self.assertRaisesRegex(reshard.Error, text):
                engine_layout(folder / "small.yaml", engine(*sizes))

    def test_document(self):
        printed, shown = documented(2)
        self.assertEqual(printed, shown)

    @staticmethod
    def command(*arguments):
        """(exit code, output, errors) of reshard-record."""
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
            code = run(list(map(str, arguments)))
        return code, out.getvalue(), errors.getvalue()


if __name__ == "__main__":
    unittest.main()
