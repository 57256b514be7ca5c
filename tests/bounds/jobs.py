# SPDX-License-Identifier: Apache-2.0
"""Random realistic jobs, for the distribution of the simulated time over the lower bound: models of the library cut to
a few layers, and plain matrices; the meshes of trainers and engines; collocated, separate and partly overlapping ranks;
replicas, several pools, quantized targets and casts; idle ranks; topologies of the examples and random ones; staging
limits. Every seed is a valid job."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from commands import ROOT

TOPOLOGIES = ROOT / "examples" / "topologies"
#: Models of the library: the layers that are kept, the number of experts, and what tensor parallel sizes must divide.
MODELS = {
    "llama3-8b": (4, 0, 8),
    "qwen3-8b": (4, 0, 8),
    "llama3-70b": (2, 0, 8),
    "qwen3-30b-a3b": (3, 128, 4),
    "qwen3-235b-a22b": (2, 128, 4),
    "glm-4.5": (4, 160, 8),
    "deepseek-v3": (4, 256, 128),
}
KINDS = ("plain", "partly overlapping ranks", "quantized or cast", "several pools")

Side = tuple[dict, int]  # an endpoint of the YAML without its ranks, and how many it has


def topology(rng: random.Random) -> object:
    """A file of the examples, or a random map."""
    if rng.random() < 0.75:
        names = ["h100x8", "h100x8", "h200x8", "gb200-nvl72", "gb200-nvl64", "ethernet-100g"]
        return str(TOPOLOGIES / f"{rng.choice(names)}.yaml")
    return random_topology(rng, [2, 4, 4, 8, 8, 16])


def random_topology(rng: random.Random, sizes: list[int]) -> dict:
    ranks = rng.choice(sizes)
    nics = rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    rate = rng.choice([12, 25, 50, 100])
    return {
        "ranks_per_node": ranks,
        "link": {"rate": f"{rate * rng.choice([2, 4, 9])}GB/s", "latency": rng.choice(["2us", "5us"])},
        "nics": {"per_node": nics, "rate": f"{rate}GB/s", "latency": rng.choice(["5us", "10us", "30us"])},
        "copy": {"rate": f"{rng.choice([600, 1300, 3200])}GB/s"},
    }


def megatron(rng: random.Random, layers: int, experts: int, divisor: int) -> Side:
    tp = min(2 ** rng.randint(0, 3), divisor)
    pp = rng.choice([p for p in (1, 1, 2, 4) if layers % p == 0])
    mesh = {"tp": tp, "pp": pp, "dp": rng.choice([1, 2, 2, 3, 4, 4, 6, 8])}
    place: dict = {"layer": {"axis": "pp", "sizes": [layers // pp] * pp}}
    if experts:
        mesh |= {"ep": rng.choice([n for n in (1, 2, 4, 8, 16, 32) if tp * mesh["dp"] % n == 0]), "etp": 1}
        place["expert"] = "ep"
    return {"layout": "megatron", "mesh": {"megatron": mesh}, "place": place}, tp * pp * mesh["dp"]


def fsdp2(rng: random.Random) -> Side:
    mesh = {"fsdp": rng.choice([2, 4, 8, 8, 16, 24, 32]), "dp": rng.choice([1, 1, 1, 2, 4])}
    return {"layout": "fsdp2", "mesh": mesh}, math.prod(mesh.values())


def engine(rng: random.Random, experts: int, divisor: int) -> Side:
    """An engine, or data parallel copies of it."""
    tp, dp = min(2 ** rng.randint(0, 3), divisor), rng.choice([1, 1, 2, 2, 3, 4, 5, 8, 12])
    mesh: dict = {"tp": tp, "dp": dp}
    if experts:
        whole = rng.random() < 0.5 and experts % (tp * dp) == 0
        mesh["views"] = [{"ep": tp * dp} if whole else {"etp": tp, "edp": dp}]
    return {"layout": rng.choice(["vllm", "vllm", "sglang"]), "mesh": mesh}, tp * dp


def library(rng: random.Random) -> tuple[dict, Side, Callable[[], Side]]:
    """A model, its source and a function that makes a target."""
    name = rng.choice(list(MODELS))
    layers, experts, divisor = MODELS[name]
    layers *= rng.choice([1, 1, 2])
    model = {"extend": str(ROOT / "examples" / "models" / f"{name}.yaml"), "let": {"layers": layers}}
    source = megatron(rng, layers, experts, divisor) if experts or rng.random() < 0.5 else fsdp2(rng)
    return model, source, lambda: engine(rng, experts, divisor)


def matrices(rng: random.Random, most: int, copies: list[int]) -> tuple[dict, Side, Callable[[], Side]]:
    """The same with plain matrices, for sides of at most `most` ranks. `copies`: how many copies a side may have."""
    layers = rng.choice([1, 1, 2, 3, 4, 6])
    cut = {"axis": ["tp", "fsdp"], "scheme": "balanced"}
    holds = {"holds": "w.{layer}"}
    rows, columns = (2 ** rng.randint(10, 14) * rng.choice([1, 3]) for _ in range(2))
    model = {
        "dtype": "bf16",
        "index": {"layer": layers},
        "tensors": {"w.{layer}": [rows, columns]},
        "layouts": {
            "rows": {"params": {"w.{layer}": holds | {"shard": {0: cut}}}},
            "columns": {"params": {"w.{layer}": holds | {"shard": {1: cut}}}},
            "stages": {
                "place": {"layer": {"axis": "pp", "scheme": "balanced"}},
                "params": {"w.{layer}": holds | {"shard": {0: cut}}},
            },
        },
    }

    def side() -> Side:
        while True:
            layout = rng.choice(["rows", "rows", "columns", "stages"])
            mesh = {"tp": rng.choice([1, 2, 3, 4, 8]), "fsdp": rng.choice([1, 1, 1, 2, 3, 4, 8])}
            if layout == "stages":
                mesh["pp"] = rng.randint(1, layers)
            mesh["dp"] = rng.choice(copies)
            if math.prod(mesh.values()) <= most:
                return {"layout": layout, "mesh": mesh}, math.prod(mesh.values())

    return model, side(), side


def job(seed: int) -> tuple[dict, str]:
    """A job, as the tree of its YAML, and its kind."""
    rng = random.Random(seed)
    if rng.random() < 0.45:
        model, source, target = matrices(rng, 256, [1, 1, 2, 2, 3, 4, 5, 7, 8, 12, 16])
    else:
        model, source, target = library(rng)
    relation = rng.choice(["after", "after", "after", "equal", "gap", "overlapping"])
    first = {
        "after": source[1],
        "equal": 0,
        "gap": source[1] + rng.randint(1, 12),
        "overlapping": rng.randint(1, source[1]),
    }[relation]
    targets = []
    for _ in range(rng.choice([1, 1, 1, 1, 1, 2, 3])):
        node, ranks = target()
        targets.append(node | {"ranks": f"{first}..{first + ranks - 1}"})
        last = first + ranks - 1
        first += ranks + rng.choice([0, 0, 0, 3])
    kind = KINDS[relation == "overlapping"]
    if len(targets) > 1:
        kind = KINDS[3]
    elif rng.random() < 0.2:
        kind = KINDS[2]
        targets[0] |= {"dtype": "fp32"} if rng.random() < 0.3 else {"quantize": rng.choice(["mxfp8", "block_fp8"])}
    world = max(source[1], last + 1) + rng.choice([0, 0, 0, 0, 0, 1, 4, 16])
    options = {"topology": topology(rng)} | ({"staging": rng.choice(["64MiB", "16MiB"])} if rng.random() < 0.3 else {})
    whole = {"version": 1, "model": model, "source": source[0], "target": targets, "world": world, "options": options}
    return whole | ({"target": targets[0]} if len(targets) == 1 else {}), kind


def small_job(seed: int, world: int = 12) -> dict:
    """A job of `world` ranks, of which some may be idle, on a random topology."""
    rng = random.Random(seed)
    model, source, target = matrices(rng, world // 2, [1, 1, 2, 3, 4, 5])
    targets, first = [], rng.choice([0, source[1], source[1], rng.randint(0, source[1])])
    while not targets or (first < world and rng.random() < 0.25):
        node, ranks = target()
        if first + ranks <= world:
            targets.append(node | {"ranks": f"{first}..{first + ranks - 1}"})
            first += ranks
    options = {"topology": random_topology(rng, [2, 3, 4, 4, 6, 8])}
    return {"version": 1, "model": model, "source": source[0], "target": targets, "world": world, "options": options}
