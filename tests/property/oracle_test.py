# SPDX-License-Identifier: Apache-2.0
"""Tests of the oracle itself: the drawings of docs/yaml.md."""

import json
import math
import tempfile
import unittest

from oracle import Job
from schemes import Refused, Rule, chunks_of, rows_of


def params_by_mesh_rank(job: dict, endpoint: int = 1) -> list[dict]:
    """Names of elements ("t0", "z" for padding) by mesh rank and param."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(json.dumps({"version": 1, **job}))
        file.flush()
        parsed = Job(file.name)
    names = {0: "z"}
    for tensor in parsed.model.tensors.values():
        for values, base in tensor.base.items():
            for i in range(max(1, math.prod(tensor.shape))):
                names.setdefault(
                    base + i,
                    tensor.name.split(".")[-1]
                    + ".".join(["", *map(str, values)]) * bool(values)
                    + (":" if values else "")
                    + str(i),
                )
    return [
        {name: [names[x] for x in held.labels.reshape(-1).tolist()] for name, held in mesh_rank.items()}
        for mesh_rank in parsed.check()[endpoint]
    ]


def one(tensors: dict, param: dict, mesh: dict, **extra: object) -> list[list[str]]:
    model = {
        "dtype": "bf16",
        "tensors": tensors,
        "layouts": {"a": {"params": {n: {"holds": n} for n in tensors}}, "b": {"params": {"p": param}}},
        **extra,
    }
    return [
        mesh_rank["p"]
        for mesh_rank in params_by_mesh_rank(
            {"model": model, "source": {"layout": "a", "mesh": {}}, "target": {"layout": "b", "mesh": mesh}}
        )
    ]


class Drawings(unittest.TestCase):
    def test_schemes(self) -> None:
        for rule, n, k, expected in (
            (Rule([], "even"), 8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
            (Rule([], "chunk"), 10, 4, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]),
            (Rule([], "chunk"), 5, 4, [[0, 1], [2, 3], [4], []]),
            (Rule([], "balanced"), 10, 4, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),
            (Rule([], "vllm"), 10, 4, [[0, 1], [2, 3, 4], [5, 6, 7], [8, 9]]),
            (Rule([], "sglang"), 10, 4, [[0, 1], [2, 3], [4, 5, 6], [7, 8, 9]]),
            (Rule([], "round_robin"), 10, 4, [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]),
            (Rule([], "sizes", [3, 0, 5]), 8, 3, [[0, 1, 2], [], [3, 4, 5, 6, 7]]),
            (Rule([], "stride", 2), 8, 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
            (Rule([], "cyclic", 2), 9, 2, [[0, 1, 4, 5, 8], [2, 3, 6, 7]]),
            (Rule([], "blocks", [4, 2]), 6, 2, [[0, 1, 4], [2, 3, 5]]),
            (Rule([], "map", [[3, 0], [1, 2]]), 4, 2, [[3, 0], [1, 2]]),
            (Rule([], "even", unit=2), 7, 2, [[0, 1, 2, 3], [4, 5, 6]]),
            (Rule([], "chunk", unit=2), 9, 2, [[0, 1, 2, 3, 4, 5], [6, 7, 8]]),
            (Rule([], "even", unit=2, replicate=True), 4, 4, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        ):
            self.assertEqual([rows_of(rule, n, k, r, 1) for r in range(k)], expected, rule)
        for rule, n, k in (
            (Rule([], "even"), 7, 2),
            (Rule([], "stride", 2), 6, 2),
            (Rule([], "even", replicate=True), 3, 4),
        ):
            self.assertRaises(Refused, rows_of, rule, n, k, 0, 1)

    def test_packs(self) -> None:
        tp2 = {"tp": 2}
        self.assertEqual(
            one({"t": [5]}, {"holds": "t", "pad": {"0": 4}, "shard": {"0": "tp"}}, tp2),
            [["t0", "t1", "t2", "t3"], ["t4", "z", "z", "z"]],
        )
        glu = {"g": [4], "u": [4]}
        self.assertEqual(
            one(glu, {"concat": ["g", "u"], "shard": {"0": "tp"}}, tp2),
            [["g0", "g1", "u0", "u1"], ["g2", "g3", "u2", "u3"]],
        )
        self.assertEqual(
            one(glu, {"concat": ["g", "u"], "cut": "joined", "shard": {"0": "tp"}}, tp2),
            [["g0", "g1", "g2", "g3"], ["u0", "u1", "u2", "u3"]],
        )
        qkv = {"q": [4], "k": [2], "v": [2]}
        fused = {"interleave": {"groups": 2, "of": ["q", "k", "v"]}}
        self.assertEqual(
            one(qkv, {**fused, "shard": {"0": "tp"}}, tp2), [["q0", "q1", "k0", "v0"], ["q2", "q3", "k1", "v1"]]
        )
        nested = {"concat": [{"interleave": {"groups": 2, "of": ["q", "k"]}}, "b"], "shard": {"0": "tp"}}
        self.assertEqual(
            one({"q": [4], "k": [2], "b": [2]}, nested, tp2), [["q0", "q1", "k0", "b0"], ["q2", "q3", "k1", "b1"]]
        )
        chunked = {"concat": ["a", "b"], "shard": {"0": {"axis": "tp", "scheme": "chunk"}}}
        self.assertEqual(one({"a": [3], "b": [2]}, chunked, tp2), [["a0", "a1", "b0"], ["a2", "b1"]])
        columns = {"concat": {"dim": 1, "of": ["a", "b"]}, "shard": {"0": "tp"}}
        self.assertEqual(one({"a": [2, 2], "b": [2, 1]}, columns, tp2), [["a0", "a1", "b0"], ["a2", "a3", "b1"]])
        heads = {"concat": ["q", "k", "v"], "shard": {"0": {"axis": "tp", "unit": 2, "replicate": True}}}
        self.assertEqual(
            [" ".join(row) for row in one({"q": [8], "k": [4], "v": [4]}, heads, {"tp": 4})],
            ["q0 q1 k0 k1 v0 v1", "q2 q3 k0 k1 v0 v1", "q4 q5 k2 k3 v2 v3", "q6 q7 k2 k3 v2 v3"],
        )
        inside = {"interleave": {"groups": 2, "of": ["q", "k", "v"]}, "shard": {"0": {"axis": "tp", "unit": 1}}}
        self.assertEqual(
            [" ".join(row) for row in one({"q": [8], "k": [4], "v": [4]}, inside, {"tp": 4})],
            ["q0 q1 q2 q3", "k0 k1 v0 v1", "q4 q5 q6 q7", "k2 k3 v2 v3"],
        )
        self.assertRaises(Refused, one, {"q": [8], "k": [4], "v": [4]}, {**fused, "shard": {"0": "tp"}}, {"tp": 4})
        self.assertRaises(Refused, one, glu, {"concat": ["g", "u"], "pad": {"0": 16}, "shard": {"0": "tp"}}, tp2)

    def test_two_axes(self) -> None:
        for axes, expected in ((["dp", "tp"], [0, 1, 2, 3]), (["tp", "dp"], [0, 2, 1, 3])):
            rows = one({"t": [4]}, {"holds": "t", "shard": {"0": axes}}, {"tp": 2, "dp": 2})
            self.assertEqual(rows, [[f"t{i}"] for i in expected])

    def test_the_small_job(self) -> None:
        job = {
            "model": {
                "dtype": "bf16",
                "index": {"layer": 2},
                "tensors": {"l.{layer}.gate": [4, 1], "l.{layer}.up": [4, 1]},
                "layouts": {
                    "train": {
                        "place": {"layer": "pp"},
                        "params": {"d.{layer.local}.fc1": {"concat": ["gate", "up"], "shard": {"0": "tp"}}},
                    },
                    "serve": {
                        "params": {
                            "m.{layer}.gate_up": {"concat": ["gate", "up"], "cut": "joined", "shard": {"0": "tp"}}
                        }
                    },
                },
            },
            "source": {"layout": "train", "mesh": {"tp": 2, "pp": 2}},
            "target": {"layout": "serve", "mesh": {"tp": 2}, "ranks": "4..5"},
        }
        source, target = params_by_mesh_rank(job, 0), params_by_mesh_rank(job, 1)
        self.assertEqual(source[3], {"d.0.fc1": ["gate.1:2", "gate.1:3", "up.1:2", "up.1:3"]})
        self.assertEqual(target[1], {f"m.{i}.gate_up": [f"up.{i}:{n}" for n in range(4)] for i in range(2)})


class MoreDrawings(unittest.TestCase):
    """Pipelines, flat buffers, chunks, `where`, globs, `ignore` and `authority`."""

    def test_pipelines(self) -> None:
        for rule, n, k, expected in (
            ({"axis": "p", "interleave": "2"}, 8, 2, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
            ({"axis": "p", "sizes": ["1", "2", "2", "1"], "interleave": "2"}, 6, 2, [[[0], [3, 4]], [[1, 2], [5]]]),
            ({"axis": "p", "first": "2", "last": "1"}, 9, 4, [[[0, 1]], [[2, 3, 4]], [[5, 6, 7]], [[8]]]),
            ({"axis": "p", "first": "2", "interleave": "2"}, 8, 2, [[[0], [4]], [[1, 2, 3], [5, 6, 7]]]),
            ({"axis": "p", "embedding": "1", "loss": "1"}, 6, 4, [[[0]], [[1, 2]], [[3, 4]], [[5]]]),
            ({"axis": "p", "stages": "Ett|(t|)*2,m|L"}, 4, 5, [[[0, 1]], [[2]], [[3]], [[]], [[]]]),
            ({"axis": "p", "stages": "Et*3|t|t|tL"}, 6, 2, [[[0, 1, 2], [4]], [[3], [5]]]),
            ({"axis": "p", "pattern": "M*|-M|MM|*/MM"}, 7, 2, [[[0, 1], [4, 5]], [[2, 3], [6]]]),
        ):
            self.assertEqual([chunks_of(rule, n, k, r, {}) for r in range(k)], expected, rule)
        for rule, n, k in (
            ({"axis": "p", "first": "3"}, 6, 1),
            ({"axis": "p", "first": "3", "last": "2"}, 6, 4),
            ({"axis": "p", "embedding": "1"}, 6, 4),
            ({"axis": "p", "stages": "t|t|t"}, 3, 2),
        ):
            self.assertRaises(Refused, chunks_of, rule, n, k, 0, {})

    def test_flat(self) -> None:
        param = {"flat": {"of": ["a", "b"], "align": 4}, "pad": {"0": 3}, "shard": {"0": {"axis": "fsdp"}}}
        self.assertEqual(
            one({"a": [2, 3], "b": [1, 2]}, param, {"fsdp": 3}),
            [["a0", "a1", "a2", "a3"], ["a4", "a5", "z", "z"], ["b0", "b1", "z", "z"]],
        )

    def test_names_of_chunks(self) -> None:
        model = {
            "dtype": "bf16",
            "index": {"layer": 4},
            "tensors": {"l.{layer}.w": [1]},
            "layouts": {
                "a": {"params": {"l.{layer}": {"holds": "w"}}},
                "b": {
                    "place": {"layer": {"axis": "pp", "interleave": 2}},
                    "params": {"c{layer.chunk}.{layer.local}": {"holds": "w"}},
                },
            },
        }
        self.assertEqual(
            params_by_mesh_rank(
                {"model": model, "source": {"layout": "a", "mesh": {}}, "target": {"layout": "b", "mesh": {"pp": 2}}}
            ),
            [{"c0.0": ["w.0:0"], "c1.0": ["w.2:0"]}, {"c0.0": ["w.1:0"], "c1.0": ["w.3:0"]}],
        )

    def test_chunks_are_modules(self) -> None:
        model = {
            "dtype": "bf16",
            "let": {"head": 1},
            "index": {"layer": 4},
            "tensors": {"l.{layer}.w": [1], "e": [1]},
            "layouts": {
                "a": {"params": {"l.{layer}": {"holds": "w"}, "e": {"holds": "e"}}},
                "b": {
                    "place": {"layer": {"axis": "pp", "interleave": "v"}},
                    "switches": {"v": 1},
                    "chunks": "m{layer.chunk}.",
                    "params": {
                        "{layer.local}": {"holds": "w"},
                        "e": {"holds": "e", "at": {"pp": ["first", "head * last"]}},
                    },
                },
            },
        }
        job = {"model": model, "source": {"layout": "a", "mesh": {}}, "target": {"layout": "b", "mesh": {"pp": 2}}}
        self.assertEqual(
            params_by_mesh_rank(job),
            [{"0": ["w.0:0"], "1": ["w.1:0"], "e": ["e0"]}, {"0": ["w.2:0"], "1": ["w.3:0"], "e": ["e0"]}],
        )
        job["target"]["switches"] = {"v": 2}
        self.assertEqual(
            params_by_mesh_rank(job),
            [
                {"m0.0": ["w.0:0"], "m1.0": ["w.2:0"], "m0.e": ["e0"]},
                {"m0.0": ["w.1:0"], "m1.0": ["w.3:0"], "m1.e": ["e0"]},
            ],
        )
        job["target"]["mesh"] = {}
        self.assertEqual(
            params_by_mesh_rank(job),
            [
                {
                    "m0.0": ["w.0:0"],
                    "m0.1": ["w.1:0"],
                    "m1.0": ["w.2:0"],
                    "m1.1": ["w.3:0"],
                    "m0.e": ["e0"],
                    "m1.e": ["e0"],
                }
            ],
        )
        del model["layouts"]["b"]["params"]["e"]["at"]
        self.assertRaises(Refused, params_by_mesh_rank, job)

    def test_rename(self) -> None:
        model = {
            "dtype": "bf16",
            "index": {"layer": 2},
            "tensors": {"m.{layer}.w": [1], "m.e": [1], "head": [1]},
            "layouts": {
                "a": {"params": "same", "shard": {"m.e": {}, "*": {"0": {"axis": "tp", "scheme": "chunk"}}}},
                "b": {"extend": "a", "rename": {"": "x.", "m.": "y.m."}},
                "c": {"extend": "b", "rename": {"m.": None, "": "z."}, "params": {"head": None}},
            },
        }
        job = {"model": model, "source": {"layout": "a", "mesh": {}}, "target": {"layout": "b", "mesh": {}}}
        self.assertEqual(
            params_by_mesh_rank(job),
            [{"y.m.0.w": ["w.0:0"], "y.m.1.w": ["w.1:0"], "y.m.e": ["e0"], "x.head": ["head0"]}],
        )
        job["target"] = {"layout": "c", "mesh": {}, "ignore": "z.m.e"}
        self.assertEqual(params_by_mesh_rank(job), [{"z.m.0.w": ["w.0:0"], "z.m.1.w": ["w.1:0"]}])
        model["layouts"]["c"]["rename"]["head"] = "h"
        self.assertRaises(Refused, params_by_mesh_rank, job)

    def test_the_source_holds_each_tensor_of_a_target(self) -> None:
        """Also if no mesh rank of the target has elements of it. A param needs a piece of a tensor, also if
        `only` leaves it out."""
        pieces = {"pieces": [{"shape": ["1"], "of": [{"zeros": True, "size": ["1"]}]}]}
        layouts = {
            "a": {"params": {"x": {"holds": "x"}}},
            "b": {
                "params": {
                    "x": {"holds": "x"},
                    "y": {"holds": "y", "at": {"tp": 1}, "shard": {"0": {"axis": "tp", "scheme": "chunk"}}},
                }
            },
            "c": {"params": {"x": {"holds": "x"}, "y": pieces}},
        }
        job = {
            "model": {"dtype": "bf16", "tensors": {"x": [1], "y": [1]}, "layouts": layouts},
            "source": {"layout": "a", "mesh": {}},
        }
        for layout, only, expected in (
            ("b", ["*"], "no source holds the tensor"),
            ("b", ["x"], None),
            ("c", ["x"], "no piece of a tensor"),
        ):
            job["target"] = {"layout": layout, "mesh": {"tp": 2}, "only": only}
            if expected:
                self.assertRaisesRegex(Refused, expected, params_by_mesh_rank, job)
            else:
                self.assertEqual(params_by_mesh_rank(job), [{"x": ["x0"]}] * 2)

    def test_where_and_globs(self) -> None:
        model = {
            "dtype": "bf16",
            "let": {"last": 1, "no": 0},
            "index": {"layer": 3},
            "tensors": {"l.{layer}.w": [2], "l.{last}.x": [2], "gone": {"shape": [2], "when": "no"}},
            "layouts": {
                "a": {"params": "same", "shard": {"*.w": {"0": "tp"}, "*": {}}},
                "b": {
                    "params": {
                        "m.{layer}": {"holds": "w", "where": {"layer": {"pattern": "M-M", "is": "M"}}},
                        "x": {"holds": "l.{last}.x"},
                        "g": {"holds": "gone"},
                    }
                },
                "c": {"extend": "b", "params": {"x": None}},
            },
        }
        job = {
            "model": model,
            "source": {"layout": "a", "mesh": {"tp": 2}},
            "target": {"layout": "b", "mesh": {}, "ignore": "x"},
        }
        self.assertEqual(
            params_by_mesh_rank(job, 0),
            [
                {"l.0.w": ["w.0:0"], "l.1.w": ["w.1:0"], "l.2.w": ["w.2:0"], "l.1.x": ["x0", "x1"]},
                {"l.0.w": ["w.0:1"], "l.1.w": ["w.1:1"], "l.2.w": ["w.2:1"], "l.1.x": ["x0", "x1"]},
            ],
        )
        expected = [{"m.0": ["w.0:0", "w.0:1"], "m.2": ["w.2:0", "w.2:1"]}]
        self.assertEqual(params_by_mesh_rank(job), expected)
        job["target"] = {"layout": "c", "mesh": {}}
        self.assertEqual(params_by_mesh_rank(job), expected)
        job["source"]["authority"] = {"tp": 0}
        self.assertRaises(Refused, params_by_mesh_rank, job)


if __name__ == "__main__":
    unittest.main()
