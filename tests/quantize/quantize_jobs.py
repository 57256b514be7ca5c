# SPDX-License-Identifier: Apache-2.0
"""Random jobs with matrices that can be quantized: jobs of the property test with wide columns, and models sharded as
engines do and in other ways."""

from __future__ import annotations

import itertools
import json
import random

import generate
from commands import job_of

FLOATS = ["fp32", "bf16", "fp16"]
LAYOUTS = {
    "mxfp8": "swizzled",
    "block_fp8": "",
    "nvfp4": "swizzled",
    "block_fp8_ue8m0": "packed",
    "mxfp4": "swizzled",
    "int4": "",
}  # besides plain
FORMATS = list(LAYOUTS)
# Every combination that a test must cover.
VARIANTS = [
    (form, by, layout)
    for form, by in itertools.product(FORMATS, ["", "receiver", "sender"])
    for layout in dict.fromkeys(["", LAYOUTS[form]])
]


def quantize_dict(variant: tuple[str, str, str]) -> dict:
    form, by, layout = variant
    return {"format": form} | ({"by": by} if by else {}) | ({"scale_layout": layout} if layout else {})


def quantize_node(rng: random.Random, variant: tuple[str, str, str]) -> object:
    """The YAML of a combination, sometimes with names for scales."""
    form, node = variant[0], quantize_dict(variant)
    if rng.random() < 0.3:
        node["scale"] = rng.choice(["{name}_sf", "scales.{name}"])
    if form == "nvfp4" and rng.random() < 0.3:
        node["tensor_scale"] = "{name}.global"
    if rng.random() < 0.2:
        node["codes"] = "{name}_codes"
    if form == "mxfp4" and rng.random() < 0.5:
        node["codes_shape"] = "blocks"
    return form if node == {"format": form} and rng.random() < 0.7 else node


def leaf(pack: object) -> str:
    """The first tensor of a pack."""
    while not isinstance(pack, str):
        kind = next(key for key in ("holds", "concat", "interleave", "of") if key in pack)
        pack = pack[kind]
        pack = pack["of"] if isinstance(pack, dict) else pack
        pack = pack[0] if isinstance(pack, list) else pack
    return pack


def widen(rng: random.Random, node: dict) -> dict:
    """Changes a job of the property test: tensors of two or more dimensions become floats, 32 times as wide, with 32
    times wider units."""
    node = json.loads(json.dumps(node))
    model, dtypes = node["model"], {}
    for name, tensor in model["tensors"].items():
        if len(tensor.get("shape", [])) >= 2:
            tensor["shape"][-1] *= 32
            unit = name.rsplit(".", 2)[-2]
            tensor["dtype"] = dtypes.setdefault(unit, rng.choice(FLOATS) if rng.random() < 0.85 else tensor["dtype"])
    for number, layout in enumerate(model["layouts"].values()):
        for param in layout["params"].values() if layout["params"] != "same" else []:
            if param is None or "flat" in param:
                continue
            name = leaf(param)
            dimensions = next(
                (
                    len(t.get("shape", []))
                    for full, t in model["tensors"].items()
                    if full == name or full.endswith("." + name)
                ),
                0,
            )
            if dimensions < 2:
                continue
            d = 0 if "permute" in param else dimensions - 1
            stack = param.get("stack")
            if stack and (stack.get("dim", 0) if isinstance(stack, dict) else 0) <= d:
                d += 1
            if str(d) in param.get("pad", {}):
                param["pad"][str(d)] *= 32
            if str(d) in param.get("shard", {}):
                rule = param["shard"][str(d)]
                rule = rule if isinstance(rule, dict) else {"axis": rule, "scheme": "even"}
                counted = {"sizes", "blocks", "map"} & rule.keys()
                if ("interleave" not in param or "unit" in rule) and (
                    counted or rng.random() < (0.5 if number == 0 else 0.95)
                ):
                    rule["unit"] = rule.get("unit", 1) * 32
                param["shard"][str(d)] = rule
    return node


def rule(rng: random.Random, lengths: list[int], k: int, aligned: bool) -> object:
    """A sharding of rows or columns over tp, of size k, for entries of these lengths; aligned: mostly at block
    boundaries."""
    unit = rng.choice([16, 32, 32, 32, 64, 128]) if aligned and rng.random() < 0.8 else rng.choice([1, 1, 8, 24])
    if rng.random() < 0.5 and all(-(-n // unit) % k == 0 for n in lengths):
        return {"axis": "tp", "unit": unit}
    scheme = rng.choice(["chunk", "balanced", "balanced", "cyclic" if not aligned else "chunk"])
    return (
        {"axis": "tp", "cyclic": rng.choice([1, 2])} | {"unit": unit}
        if scheme == "cyclic"
        else {"axis": "tp", "scheme": scheme, "unit": unit}
    )


def mesh(rng: random.Random, limit: int) -> dict:
    while True:
        sizes = {
            "tp": rng.choice([1, 2, 2, 3, 4]),
            "pp": rng.choice([1, 1, 2]),
            "ep": rng.choice([1, 1, 2]),
            "dp": rng.choice([1, 1, 2]),
        }
        axes = [axis for axis in sizes if sizes[axis] > 1] or ["tp"]
        rng.shuffle(axes)
        size = 1
        for axis in axes:
            size *= sizes[axis]
        if size <= limit:
            return {axis: sizes[axis] for axis in axes}


class Weights:
    """A model's tensors: attention, a dense and an expert feed-forward part, an embedding."""

    def __init__(self, rng: random.Random) -> None:
        self.hidden, self.ffn = rng.choice([64, 96, 128, 160, 192, 256]), rng.choice([96, 128, 160, 192, 288])
        self.groups = rng.choice([1, 2, 4])
        self.query, self.key = self.groups * rng.choice([16, 32, 64]), self.groups * rng.choice([8, 16, 32])
        self.expert, self.vocab = rng.choice([32, 96, 128, 144]), rng.choice([100, 130, 256])
        dtype = [rng.choice(FLOATS) for _ in range(4)]
        shapes = {
            "q": ([self.query, self.hidden], 0),
            "k": ([self.key, self.hidden], 0),
            "v": ([self.key, self.hidden], 0),
            "o": ([self.hidden, self.query], 0),
            "gate": ([self.ffn, self.hidden], 1),
            "up": ([self.ffn, self.hidden], 1),
            "down": ([self.hidden, self.ffn], 1),
            "e.{expert}.gate": ([self.expert, self.hidden], 2),
            "e.{expert}.up": ([self.expert, self.hidden], 2),
            "e.{expert}.down": ([self.hidden, self.expert], 2),
        }
        self.tensors = {
            f"l.{{layer}}.{name}": {"shape": shape, "dtype": dtype[group]} for name, (shape, group) in shapes.items()
        }
        self.tensors |= {
            "embed": {"shape": [self.vocab, self.hidden], "dtype": dtype[3]},
            "l.{layer}.norm": {"shape": [self.hidden], "dtype": "bf16"},
            "l.{layer}.ids": {"shape": [8, 32], "dtype": "i32"},
        }
        self.index = {"layer": rng.choice([1, 2, 3]), "expert": rng.choice([2, 3])}

    def layout(self, rng: random.Random, tp: int, local: bool, aligned: bool) -> dict:
        """A layout that is sharded over `k` ranks; local: names have local layer numbers."""
        cut = lambda *lengths: rule(rng, list(lengths), tp, aligned)
        layer = "h.{layer.local}." if local else "h.{layer}."
        params: dict = {}
        packed = rng.random()
        if packed < 0.4:
            params[layer + "qkv"] = {
                "interleave": {"groups": self.groups, "of": ["q", "k", "v"]},
                "shard": {
                    "0": "tp" if self.groups % tp == 0 and rng.random() < 0.5 else cut(self.query + 2 * self.key)
                },
            }
        elif packed < 0.7:
            params[layer + "qkv"] = {"concat": ["q", "k", "v"], "shard": {"0": cut(self.query, self.key)}}
        else:
            params |= {
                layer + name: {"holds": name, "shard": {str(d): cut([length, self.hidden][d])}}
                for name, length, d in (
                    ("q", self.query, 0),
                    ("k", self.key, rng.randint(0, 1)),
                    ("v", self.key, rng.randint(0, 1)),
                )
            }
        params[layer + "o"] = {"holds": "o", "shard": {"1": cut(self.query)}}
        if rng.random() < 0.3:
            params[layer + "o"] = {"holds": "o", "permute": [1, 0], "shard": {"0": cut(self.query)}}
        if rng.random() < 0.6:
            params[layer + "fc1"] = {"concat": ["l.{layer}.gate", "l.{layer}.up"], "shard": {"0": cut(self.ffn)}}
            if rng.random() < 0.4:
                params[layer + "fc1"] |= {"cut": "joined", "shard": {"0": cut(2 * self.ffn)}}
        else:
            for name in ("gate", "up"):
                params[layer + name] = {
                    "holds": f"l.{{layer}}.{name}",
                    "shard": {"1": cut(self.hidden)} if rng.random() < 0.5 else {"0": cut(self.ffn)},
                }
        params[layer + "fc2"] = (
            {"holds": "l.{layer}.down", "shard": {"1": cut(self.ffn)}}
            if rng.random() < 0.8
            else {"holds": "l.{layer}.down"}
        )
        if rng.random() < 0.7:
            params[layer + "w13"] = {
                "stack": "expert",
                "concat": ["e.{expert}.gate", "e.{expert}.up"],
                "shard": {"1": cut(self.expert)},
            }
            params[layer + "w2"] = {"stack": "expert", "holds": "e.{expert}.down", "shard": {"2": cut(self.expert)}}
            if rng.random() < 0.3:
                params[layer + "w2"] |= {"permute": [1, 0], "shard": {"1": cut(self.expert)}}
        else:
            for name, d in (("gate", 0), ("up", 0), ("down", 1)):
                params[f"{layer}e{{expert}}.{name}"] = {
                    "holds": f"e.{{expert}}.{name}",
                    "shard": {str(d): cut(self.expert)},
                }
        params["embed"] = {"holds": "embed", "shard": {"0": cut(self.vocab)}}
        if rng.random() < 0.5:
            multiple = rng.choice([32, 64, 128])
            params["embed"] |= {"pad": {"0": multiple}, "shard": {"0": cut(self.vocab + -self.vocab % multiple)}}
        params |= {
            layer + "norm": {"holds": "norm"},
            layer + "ids": {"holds": "ids", "shard": {"1": "tp"}} if 32 % tp == 0 else {"holds": "ids"},
        }
        placement = {"layer": {"axis": "pp", "scheme": "balanced"}, "expert": {"axis": "ep", "scheme": "balanced"}}
        return {"axes": ["tp", "pp", "ep", "dp"], "place": placement, "params": params}


def size(axes: dict) -> int:
    result = 1
    for one in axes.values():
        result *= one
    return result


def own(rng: random.Random) -> tuple[dict, Weights]:
    """A job from a trainer to one or two engines."""
    weights = Weights(rng)
    source, engines = mesh(rng, 8), [mesh(rng, 6) for _ in range(rng.choice([1, 1, 2]))]
    layouts = {"train": weights.layout(rng, source.get("tp", 1), rng.random() < 0.5, rng.random() < 0.3)}
    targets = []
    for number, axes in enumerate(engines):
        layouts[f"serve{number}"] = weights.layout(rng, axes.get("tp", 1), rng.random() < 0.5, rng.random() < 0.8)
        first = rng.choice([0, size(source), rng.randrange(size(source))])
        targets.append({"layout": f"serve{number}", "mesh": axes, "ranks": list(range(first, first + size(axes)))})
    node = job_of(
        {"index": weights.index, "tensors": weights.tensors, "layouts": layouts},
        {"layout": "train", "mesh": source},
        targets if len(targets) > 1 else targets[0],
    )
    if rng.random() < 0.12:
        layouts["train"] = {"params": "same"}
        node["source"] = {"storage": "checkpoint", "layout": "train"}
    elif rng.random() < 0.06:
        del targets[0]["ranks"]
        targets[0] |= {"storage": "files"}
    node["options"] = rng.choice([{}, {}, {"topology": {"ranks_per_node": 2}}, {"staging": 16384}])
    return exchanging(node), weights


def exchanging(node: dict) -> dict:
    """A job with an exchange if it reads files, with a random number of its own: the other jobs do not change."""
    if "storage" in node["source"]:
        node["options"] = node["options"] | {"exchange": random.Random(repr(node)).choice(generate.EXCHANGES)}
    return node


def generated(rng: random.Random, seed: int) -> dict:
    """A job of the property test without explicit params, whose boxes cannot be widened; widened."""
    while True:
        node, _, _ = generate.generate(rng, generate.CELLS[seed * 37 % len(generate.CELLS)])
        if '"pieces"' not in json.dumps(node):
            break
    node = widen(rng, node)
    node["options"] = rng.choice([{}, {"topology": {"ranks_per_node": 2}}, {"staging": 16384}])
    return exchanging(node)


def lists(rng: random.Random, count: int, ranks: int) -> list[list[int]]:
    """A list of values for each rank; some may be empty, but not all."""
    result: list[list[int]] = [[] for _ in range(ranks)]
    for value in range(count):
        for rank in result:
            if rng.random() < 0.35:
                rank.append(value)
    if not any(result):
        result[rng.randrange(ranks)].append(rng.randrange(count))
    return result


def gaps(rng: random.Random) -> dict:
    """A source that holds some elements once, some in several params and some not at all, and targets that need
    elements that it holds."""
    rows, columns, experts = rng.choice([8, 12, 20]), rng.choice([32, 64, 96]), rng.randint(1, 3)
    unit, tp, ep = rng.choice([2, 4]), rng.choice([1, 2, 3]), rng.choice([1, 2])
    mesh: dict = {"tp": tp, "ep": ep} | ({"dp": 2} if rng.random() < 0.3 else {})
    if rng.random() < 0.3:
        mesh["views"] = [{"all": size(mesh)}]
    stacked = rng.random() < 0.6
    params: dict = {}
    held_by = rng.choice([1, 1, 2])
    for number in range(held_by):
        axis = rng.choice(["tp", "tp", "all"]) if "views" in mesh else "tp"
        ranks = mesh["views"][0]["all"] if axis == "all" else tp
        param: dict = {
            "holds": ["w.{e}", "h.{e}"][number],
            "shard": {"0": {"axis": axis, "map": lists(rng, rows // unit, ranks), "unit": unit}},
        }
        if number == 1 and rng.random() < 0.5:
            param["shard"] = {"1": {"axis": "tp", "scheme": "balanced"}}
        if "dp" in mesh and rng.random() < 0.4:
            param["at"] = {"dp": rng.choice(["first", "last"])}
        name = f"p{number}"
        if stacked:
            param["stack"] = {"index": "e", "dim": rng.choice([0, 1, 2])}
            param["shard"] = {
                str(int(d) + (param["stack"]["dim"] <= int(d))): rule for d, rule in param["shard"].items()
            }
        else:
            name += ".{e}"
        params[name] = param
    source = {"params": params, "place": {"e": {"axis": "ep", "scheme": "balanced"}}}
    # The target holds what the first param holds, with the same sharding.
    first = next(iter(params.values()))
    dimension = first["stack"]["dim"] if stacked else -1
    rule = first["shard"]["1" if dimension == 0 else "0"]
    serve = {"holds": "w.{e}", "shard": {"0": rule}}
    target = {"params": {"t.{e}": serve, "n": {"holds": "n"}}}
    if rng.random() < 0.5:
        dim = rng.choice([0, 1])
        target = {
            "params": {
                "t": {"holds": "w.{e}", "stack": {"index": "e", "dim": dim}, "shard": {str(1 - dim): rule}},
                "n": {"holds": "n"},
            }
        }
    params["n"] = {"holds": "n"}
    tensors = {"w.{e}": {"shape": [rows, columns]}, "h.{e}": {"tied": "w.{e}"}, "n": {"shape": [4]}}
    node = job_of(
        {
            "dtype": rng.choice(FLOATS),
            "index": {"e": experts},
            "tensors": tensors,
            "layouts": {"s": source, "t": target},
        },
        {"layout": "s", "mesh": mesh},
        {"layout": "t", "mesh": mesh, "quantize": quantize_node(rng, rng.choice(VARIANTS))},
    )
    if "dp" in mesh and not any("at" in param for param in params.values()) and rng.random() < 0.4:
        node["source"]["authority"] = {"dp": "first"}
    return node
