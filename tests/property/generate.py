# SPDX-License-Identifier: Apache-2.0
"""Random jobs for the property test. Each job covers one cell of the table scheme × pack × mesh relation × side, one
of the least covered so far, and has other features at random. The oracle decides whether the job is valid."""

from __future__ import annotations

import itertools
import math
import random

SCHEMES = ["even", "chunk", "balanced", "vllm", "sglang", "round_robin", "sizes", "stride", "cyclic", "blocks", "map"]
PACKS = ["holds", "concat", "joined", "interleave", "nested", "stack", "flat"]
EXCHANGES = ["auto", "nodes", "p2p", "broadcast", "gather-rounds"]
# Features of jobs with several targets and with files, each of which the test must cover.
TARGET_FEATURES = [
    "files and ranks as targets",
    "algorithm megatron",
    "group",
    "target in chunks",
    "pieces in chunks",
    *(f"exchange {each}" for each in EXCHANGES),
    *(f"ranks {each}" for each in ("equal", "nested", "permuted", "overlapping", "disjoint")),
]
RELATIONS = ["collocated", "disjoint", "overlapping", "storage"]
SIDES = ["source", "target"]
# `sizes`, `blocks` and `map` cannot be used with a concat that is sharded entry by entry (docs/yaml.md, section 6),
# as `concat` and `nested` are. A flat buffer is sharded into contiguous ranges only.
IMPOSSIBLE = {(scheme, pack) for scheme in ("sizes", "blocks", "map") for pack in ("concat", "nested")} | {
    (scheme, "flat") for scheme in ("round_robin", "stride", "cyclic", "blocks", "map")
}
CELLS = [cell for cell in itertools.product(SCHEMES, PACKS, RELATIONS, SIDES) if cell[:2] not in IMPOSSIBLE]
DTYPES = [
    "bf16",
    "fp16",
    "fp32",
    "fp64",
    "fp8_e4m3",
    "fp8_e5m2",
    "i8",
    "i16",
    "i32",
    "i64",
    "u8",
    "u16",
    "u32",
    "u64",
    "bool",
]


def partition(rng: random.Random, total: int, parts: int, multiple: int = 1) -> list[int]:
    """`parts` numbers ≥ 0 with the given sum, each a multiple of `multiple`."""
    cuts = sorted(rng.randint(0, total // multiple) for _ in range(parts - 1))
    return [(b - a) * multiple for a, b in itertools.pairwise([0, *cuts, total // multiple])]


def as_list(value: object) -> list:
    return value if isinstance(value, list) else [value]


class Side:
    """One endpoint under construction: its mesh, its layout and the placement of index variables."""

    def __init__(self, rng: random.Random, name: str, variables: dict[str, int], mesh_ranks_limit: int) -> None:
        self.rng, self.name = rng, name
        self.layout: dict = {"params": {}}
        self.node: dict = {}
        self.features: set[str] = set()
        self.chunked: set[str] = set()  # variables placed in virtual stages
        self.modules = ""  # the one of these that `chunks` names
        if rng.random() < 0.12:
            shape = {"tp": rng.choice([1, 2, 3]), "pp": rng.choice([1, 2]), "dp": rng.choice([1, 2]), "ep": 1, "etp": 1}
            total = shape["tp"] * shape["dp"]
            shape["ep"] = rng.choice([d for d in range(1, total + 1) if total % d == 0])
            if rng.random() < 0.3:
                shape["order"] = rng.choice(["tp-cp-ep-dp-pp", "tp-ep-dp-cp-pp", "dp-ep-tp-cp-pp"])
            self.node["mesh"] = {"megatron": shape}
            self.axes = {axis: shape[axis] for axis in ("tp", "dp", "pp", "ep")}
            self.groups = [["tp", "dp", "pp"], ["ep", "pp"]]
            self.mesh_ranks = total * shape["pp"]
            self.features.add("megatron")
        else:
            while True:
                sizes = [rng.choice([1, 2, 2, 3, 4]) for _ in range(rng.randint(1, 3))]
                self.mesh_ranks = math.prod(sizes)
                if self.mesh_ranks <= mesh_ranks_limit:
                    break
            names = rng.sample(["tp", "pp", "dp", "ep", "x"], len(sizes))
            self.axes = dict(zip(names, sizes))
            mesh: dict = dict(self.axes)
            self.groups = [list(names)]
            if rng.random() < 0.2 and self.mesh_ranks > 1:
                mesh["views"] = [{"all": self.mesh_ranks}]
                self.axes["all"] = self.mesh_ranks
                self.groups.append(["all"])
                self.features.add("views")
            if rng.random() < 0.15 and self.mesh_ranks > 1:
                # The same mesh ranks, factorized in another order. Params sharded over axes of both views may be
                # valid or not.
                others = rng.sample(sizes, len(sizes))
                if rng.random() < 0.3:
                    others[:2] = [math.prod(others[:2])]
                view = {f"v{i}": size for i, size in enumerate(others)}
                mesh.setdefault("views", []).append(view)
                self.axes.update(view)
                self.groups.append(list(names) + list(view))
                self.features.add("views")
            self.node["mesh"] = mesh
        self.group = rng.choice(self.groups)
        placement = {}
        free = list(self.group)
        for variable, size in variables.items():
            if free and rng.random() < 0.55:
                axis = free.pop(rng.randrange(len(free)))
                placement[variable] = self.pipeline(variable, axis, self.axes[axis], size) or self.placement_rule(
                    axis, self.axes[axis], size
                )
        self.placed = {variable: axis for variable, (axis, _) in placement.items()}
        self.layout["place"] = {variable: rule for variable, (_, rule) in placement.items()}
        if not self.layout["place"]:
            del self.layout["place"]
        if self.chunked and rng.random() < 0.5:
            self.modules = rng.choice(sorted(self.chunked))
            self.layout["chunks"] = rng.choice(["m{%s.chunk}.", "{%s.chunk}.", "m{%s.chunk}"]) % self.modules
            self.features.add("chunks")
        if rng.random() < 0.15:
            self.layout["rename"] = {"": rng.choice(["m.", "language_model."])}
            self.features.add("rename")
        if rng.random() < 0.3:
            self.layout["axes"] = sorted(set(self.axes) | {"absent", "cp", "etp", "edp"})

    def ranks_of_stages(self, at: dict) -> list[int]:
        """The mesh ranks of virtual ranks that are the first or the last of the axis of `modules`; none if `at` has
        other axes or the mesh has views."""
        if len(at) > 1 or len(self.groups) > 1:
            return []
        (axis, stages), strides = (
            *at.items(),
            math.prod(
                self.axes[before] for before in itertools.takewhile(lambda each: each not in at, self.node["mesh"])
            ),
        )
        last = self.axes[axis] - 1
        return [
            rank
            for rank in range(self.mesh_ranks)
            if rank // strides % (last + 1) in {0 if stage in ("first", 0) else last for stage in as_list(stages)}
        ]

    def pipeline(self, variable: str, axis: str, k: int, n: int) -> tuple[str, object] | None:
        """A random one of Megatron's rules that distribute layers over stages; None if it does not fit."""
        rng = self.rng
        kind = rng.choice(["", "", "interleave", "ends", "counted", "stages", "pattern"])
        v = rng.choice([1, 1, 2, 2, 3])
        rule: dict = {"axis": axis}
        if kind == "interleave":
            if n % (k * v) != 0 or rng.random() < 0.5:
                rule["scheme"] = rng.choice(["balanced", "vllm", "sglang", "chunk", "round_robin"])
            rule["interleave"] = v
        elif kind == "ends" and k > 1:
            first, last = rng.randint(0, n // 2), rng.randint(0, n // 2)
            keys = rng.choice([["first"], ["last"], ["first", "last"]])
            rule.update(
                {"first": first} if keys[0] == "first" else {}, **({"last": last} if keys[-1] == "last" else {})
            )
            rest, others = n - rule.get("first", 0) - rule.get("last", 0), k - len(keys)
            if rest != 0 if others == 0 else rest % others != 0:
                return None
            if v > 1 and all(
                x % v == 0 for x in (rule.get("first", 0), rule.get("last", 0), rest // others if others else 0)
            ):
                rule["interleave"] = v
            else:
                v = 1
        elif kind == "counted":
            counts = [
                (e, z)
                for e in (0, 1)
                for z in (0, 1)
                if (e or z) and (n + e + z) % (k * v) == 0 and (n + e + z) // (k * v) >= e + z
            ]
            if not counts:
                return None
            rule["embedding"], rule["loss"] = rng.choice(counts)
            if v > 1:
                rule["interleave"] = v
        elif kind in ("stages", "pattern"):
            sizes = partition(rng, n, k * v)
            if kind == "pattern":
                rule["pattern"] = "|".join(
                    "".join(rng.choice("M*-") for _ in range(size)) for size in sizes
                ) + rng.choice(["", "/MM"])
            else:
                text = ["E"] + ["t" * size if size < 2 or rng.random() < 0.5 else f"t*{size}" for size in sizes]
                text[1:2] = [text[0] + text[1]]
                rule["stages"] = "|".join(text[1:]) + rng.choice(["L", ",mL"])
        else:
            return None
        if v > 1:
            self.chunked.add(variable)
        self.features.add(f"pipeline {kind}")
        return axis, rule

    def placement_rule(self, axis: str, k: int, n: int) -> tuple[str, object]:
        rng = self.rng
        kind = rng.choice(["even", "sizes", "balanced", "vllm", "sglang", "round_robin", "map", "chunk", "cyclic"])
        if kind == "even" and n % k == 0:
            return axis, axis
        if kind == "sizes":
            return axis, {"axis": axis, "sizes": partition(rng, n, k)}
        if kind == "map":
            return axis, {"axis": axis, "map": self.lists(n, k)}
        if kind == "cyclic":
            return axis, {"axis": axis, "cyclic": rng.randint(1, 2)}
        return axis, {"axis": axis, "scheme": kind if kind != "even" else "balanced"}

    def lists(self, n: int, k: int) -> list[list[int]]:
        """Lists of values by rank. Each value is in at least one list; some are in several."""
        rng = self.rng
        values = list(range(n))
        rng.shuffle(values)
        lists: list[list[int]] = [[] for _ in range(k)]
        for value in values:
            lists[rng.randrange(k)].append(value)
        for row in lists:
            for value in range(n):
                if value not in row and rng.random() < 0.15:
                    row.append(value)
        return lists

    def rule(self, scheme: str, axes: list[str], n: int) -> dict:
        """A rule for a dimension of n rows."""
        rng = self.rng
        k = math.prod(self.axes[axis] for axis in axes)
        rule: dict = {"axis": axes if len(axes) > 1 or rng.random() < 0.1 else axes[0]}
        unit = rng.choice([1, 1, 1, 1, 2, 3])
        if unit > 1:
            rule["unit"] = unit
            self.features.add("unit")
        count = -(-n // unit)
        if scheme == "sizes":
            rule["sizes"] = partition(rng, count, k)
        elif scheme == "blocks":
            rule["blocks"] = partition(rng, count, rng.randint(1, 3), k)
        elif scheme == "map":
            rule["map"] = self.lists(count, k)
            if self.name == "target" and rng.random() < 0.2 and count:
                row = rng.choice(rule["map"])
                row.append(rng.randrange(count))
                self.features.add("repeat")
        elif scheme == "stride":
            rule["stride"] = rng.choice([s for s in (1, 2, 3, 4) if count % (k * s) == 0] or [1])
        elif scheme == "cyclic":
            rule["cyclic"] = rng.randint(1, 3)
        else:
            rule["scheme"] = scheme
            if rng.random() < 0.2:
                rule["replicate"] = True
                self.features.add("replicate")
        if len(rule) == 2 and rule.get("scheme") == "even" and rng.random() < 0.5:
            return rule["axis"]
        return rule


class Unit:
    """Tensors that are packed together. Their shapes differ in dimension `dim` only."""

    def __init__(
        self, rng: random.Random, number: int, variables: dict[str, int], wanted: int, with_variable: bool
    ) -> None:
        self.number = number
        names = [v for v in variables if rng.random() < 0.5]
        if with_variable and not names:
            names = [rng.choice(list(variables))]
        rng.shuffle(names)
        self.variables = names
        self.rank = rng.choice([1, 2, 2, 2, 3])
        self.dim = rng.choice([0, 0, self.rank - 1])
        self.dtype = rng.choice(DTYPES)
        self.groups = rng.choice([1, 2, 2, 3, 4])
        shape = [rng.choice([1, 2, 4, 6, 12]) for _ in range(self.rank)]
        self.tensors: dict[str, dict] = {}
        where = {}
        for variable in names:
            if rng.random() < 0.2:
                first = rng.randrange(variables[variable])
                where[variable] = f"{first}..{rng.randint(first, variables[variable] - 1)}"
        for i in range(max(wanted, rng.choice([1, 1, 2, 3]))):
            own = list(shape)
            own[self.dim] = self.groups * rng.choice([1, 2, 3, 4, 6]) if rng.random() < 0.95 else 0
            name = "".join(f"{v}s.{{{v}}}." for v in names) + f"u{number}.{'qkvw'[i]}"
            declared: dict = {"shape": own, "dtype": self.dtype}
            if where:
                declared["where"] = where
            self.tensors[name] = declared

    def length(self, d: int) -> int:
        shapes = [declared["shape"] for declared in self.tensors.values()]
        return sum(s[d] for s in shapes) if d == self.dim else shapes[0][d]


def flat_of(rng: random.Random, unit: Unit, names: list[str], entries: list) -> dict:
    """A flat buffer of all tensors of a unit. The caller removes `length`, which is not a YAML key."""
    align = rng.choice([1, 1, 2, 3, 4, 8])
    of, lengths = list(entries), [math.prod(unit.tensors[name]["shape"]) for name in names]
    if len(of) > 1 and rng.random() < 0.3:
        kind = (
            {"concat": {"dim": unit.dim, "of": of[:2]}}
            if rng.random() < 0.5
            else {"interleave": {"groups": unit.groups, "dim": unit.dim, "of": of[:2]}}
        )
        of[:2], lengths[:2] = [kind], [sum(lengths[:2])]
    if len(unit.tensors[names[-1]]["shape"]) == 2 and len(of) == len(entries) and rng.random() < 0.3:
        of[-1] = {"permute": [1, 0], "of": of[-1]}
    total = 0
    for length in lengths:
        total += -total % align + length
    if rng.random() < 0.15:
        of.insert(
            rng.randrange(len(of) + 1),
            rng.choice([{"of": of[0], "when": "1 - 1"} if isinstance(of[0], str) else of[0], "gone"]),
        )
        if of.count(of[0]) > 1 and not isinstance(of[0], str):
            of.pop()
    return {"flat": of if align == 1 and rng.random() < 0.5 else {"of": of, "align": align}, "length": total}


def pieces_of(
    rng: random.Random, unit: Unit, names: list[str], stacks: list[tuple[int, int]], ranks: list[int], target: bool
) -> dict:
    """An explicit param of some tensors of a unit: runs of rows of dimension `dim`, some of them cut along another
    dimension, in any order on any mesh rank of `ranks`. stacks: (dimension, number of values) of each stacked variable,
    in ascending order."""
    runs: list[tuple[str, int, int, int]] = []  # tensor, first row, step, number
    for name in names:
        n, first = unit.tensors[name]["shape"][unit.dim], 0
        while first < n:
            count = rng.randint(1, n - first)
            if count % 2 == 0 and rng.random() < 0.4:
                runs += [(name, first + i, 2, count // 2) for i in range(2)]
            else:
                runs.append((name, first, 1, count))
            first += count
    rng.shuffle(runs)
    held: dict[int, list] = {rank: [] for rank in ranks}
    for run in runs:
        for rank in {rng.choice(ranks) for _ in range(rng.choice([1, 1, 2]))}:
            held[rank].append(run)
    transposed = unit.rank == 2 and rng.random() < 0.4
    order = [1, 0] if transposed else list(range(unit.rank))
    along = order.index(unit.dim)
    groups = []
    for rank, rows in held.items():
        lengths = [list(unit.tensors[names[0]]["shape"])[d] for d in order]
        of: list[dict] = []
        begin = 0
        for name, first, step, count in rows:
            start, steps, size, to = [0] * unit.rank, [1] * unit.rank, list(lengths), [0] * unit.rank
            start[along], steps[along], size[along], to[along] = first, step, count, begin
            other = next((d for d in range(unit.rank) if d != along and size[d] > 1), None)
            halves = [(start, size, to)]
            if other is not None and rng.random() < 0.4:
                cut = rng.randint(1, size[other] - 1)
                low, high = list(size), list(size)
                low[other], high[other] = cut, size[other] - cut
                halves = [
                    (start, low, to),
                    ([*start[:other], cut, *start[other + 1 :]], high, [*to[:other], cut, *to[other + 1 :]]),
                ]
            of += [
                {"of": name, "from": a, "step": steps, "size": n, "to": b} | ({"permute": order} if transposed else {})
                for a, n, b in halves
            ]
            begin += count
        lengths[along] = begin
        if target and rng.random() < 0.3:
            lengths[along] += 1
            zeros = [1 if d == along else n for d, n in enumerate(lengths)]
            if all(zeros):
                of.append({"zeros": True, "size": zeros, "to": [begin if d == along else 0 for d in range(unit.rank)]})
        for dim, values in stacks:
            lengths.insert(dim, values)
            for piece in of:
                for key, value in (("from", 0), ("step", 1), ("size", values), ("to", 0)):
                    if key in piece:
                        piece[key] = [*piece[key][:dim], value, *piece[key][dim:]]
        rng.shuffle(of)
        groups.append({"ranks": [rank], "shape": lengths, "of": of})
    return {"pieces": groups}


def pack_of(rng: random.Random, unit: Unit, pack: str) -> tuple[list[dict], list[str]]:
    """Params that hold all tensors of a unit, with the given pack if possible, and the kind of each."""
    names = list(unit.tensors)
    suffix = {
        name: name.rsplit(".", 2)[-2] + "." + name.rsplit(".", 1)[-1] if rng.random() < 0.5 else name for name in names
    }
    entries: list[object] = [suffix[name] for name in names]
    if pack == "flat":
        return [flat_of(rng, unit, names, entries)], ["flat"]
    body = lambda kind, of: {kind: of if unit.dim == 0 and kind == "concat" else {"dim": unit.dim, "of": of}}
    if pack == "stack":
        pack = rng.choice(["holds", "concat", "joined", "interleave"])
    if pack == "holds" or len(names) == 1:
        params = []
        for entry in entries:
            param: dict = {"holds": entry}
            if unit.rank == 2 and rng.random() < 0.3:
                param["permute"] = [1, 0]
            params.append(param)
        return params, ["holds"] * len(params)
    if pack == "interleave":
        return [{"interleave": {"groups": unit.groups, "dim": unit.dim, "of": entries}}], ["interleave"]
    if pack == "nested" and len(names) >= 3:
        inner = {"interleave": {"groups": unit.groups, "dim": unit.dim, "of": entries[:2]}}
        if rng.random() < 0.4:
            outer = [body("concat", entries[:2]), *entries[2:]]
            return [{"interleave": {"groups": unit.groups, "dim": unit.dim, "of": outer}}], ["nested"]
        return [body("concat", [inner, *entries[2:]])], ["nested"]
    param = body("concat", entries)
    if pack == "joined":
        param["cut"] = "joined"
    return [param], ["joined" if pack == "joined" else "concat"]


def generate(rng: random.Random, cell: tuple[str, str, str, str]) -> tuple[dict, set[tuple], set[str]]:
    """A job as a map, the cells that it covers, and its other features. The job may be invalid."""
    scheme, pack, relation, side_name = cell
    variables = {"layer": rng.randint(1, 6)} | (
        {"expert": rng.randint(2, 5)} if rng.random() < 0.6 or pack == "stack" else {}
    )
    limit = rng.choice([4, 8, 8, 12])
    targets = 2 if rng.random() < 0.08 else 1
    sides = [Side(rng, "source", variables, limit)] + [Side(rng, "target", variables, limit) for _ in range(targets)]
    wanted = {"concat": 2, "joined": 2, "interleave": 2, "nested": 3}.get(pack, 1)
    units = [
        Unit(rng, i, variables, wanted if i == 0 else 1, pack == "stack" and i == 0) for i in range(rng.randint(1, 3))
    ]
    cells: set[tuple] = set()
    features: set[str] = set()
    model: dict = {"let": {"off": 0}, "index": variables, "tensors": {}, "layouts": {}}
    model["tensors"]["gone"] = {"shape": [4], "dtype": "bf16", "when": "off"}
    for unit in units:
        model["tensors"].update(unit.tensors)
    scalar = rng.random() < 0.15
    if scalar:
        model["tensors"]["scale.{layer}"] = {"shape": [], "dtype": "fp32"}
        features.add("scalar")
    tied = None
    if rng.random() < 0.15:
        tied = rng.choice(list(model["tensors"]))
        model["tensors"]["alias." + tied] = {"tied": tied}
        features.add("tied")

    for s, side in enumerate(sides):
        for unit in units:
            forced = unit.number == 0 and side.name == side_name
            if s > 0 and not forced and rng.random() < 0.1:
                continue
            own_pack = pack if forced else rng.choice(PACKS)
            stack = unit.variables[0] if own_pack == "stack" and unit.variables else None
            # A second one, with random numbers of their own: those of the other jobs do not change.
            more = random.Random(f"{side.name} {unit.number} {unit.variables} {side.mesh_ranks} {list(unit.tensors)}")
            second = unit.variables[1] if stack and len(unit.variables) > 1 and more.random() < 0.5 else None
            params, kinds = pack_of(rng, unit, own_pack)
            for i, (param, kind) in enumerate(zip(params, kinds)):
                name = f"p{unit.number}.{i}"
                for variable in unit.variables:
                    if variable not in (stack, second):
                        local = rng.choice(["", ".local"])
                        name += f".{variable}{{{variable}{local}}}"
                        if variable in side.chunked and side.modules != variable and (local or rng.random() < 0.3):
                            name += f".c{{{variable}.chunk}}"
                shape = [unit.length(d) for d in range(unit.rank)]
                if kind == "holds":
                    shape = list(list(unit.tensors.values())[i]["shape"])
                    shape = shape[::-1] if "permute" in param else shape
                if kind == "flat":
                    shape = [param.pop("length")]
                stacks: list[tuple[int, int]] = []
                if stack:
                    dim = rng.choice([0, 0, rng.randint(0, unit.rank)])
                    param["stack"] = stack if dim == 0 else {"index": stack, "dim": dim}
                    stacks.append((dim, variables[stack]))
                if second:
                    other = more.choice([d for d in range(unit.rank + 2) if d != dim])
                    param["stack"] = [param["stack"], second if other == 1 else {"index": second, "dim": other}]
                    stacks = sorted([(dim, variables[stack]), (other, variables[second])])
                    features.add("two stacks")
                for d, _ in stacks:
                    shape.insert(d, 0)
                stacked = [d for d, _ in stacks]
                along = unit.dim if kind == "flat" else [d for d in range(len(shape)) if d not in stacked][unit.dim]
                free = [a for a in side.group if a not in {side.placed.get(v) for v in unit.variables}]
                rng.shuffle(free)
                order = [d for d in range(len(shape)) if d not in stacked]
                if kind != "flat":
                    order.sort(key=lambda d: d != along)
                if kind == "holds":
                    rng.shuffle(order)
                for n, d in enumerate(order):
                    length = shape[d]
                    if rng.random() < 0.15 and (kind != "concat" and kind != "nested"):
                        multiple = rng.choice([2, 3, 4])
                        param.setdefault("pad", {})[str(d)] = multiple
                        length += -length % multiple
                        features.add("pad")
                    if not free or (not forced and rng.random() < 0.3) or (n > 0 and rng.random() < 0.6):
                        continue
                    axes = [free.pop()] + ([free.pop()] if free and rng.random() < 0.25 else [])
                    own = (
                        scheme
                        if forced and n == 0
                        else rng.choice(["even", "chunk", "balanced", "sizes"] if kind == "flat" else SCHEMES)
                    )
                    param.setdefault("shard", {})[str(d)] = side.rule(own, axes, length)
                    rule = param["shard"][str(d)]
                    if isinstance(rule, dict) and rng.random() < 0.04:
                        rule["when"] = rng.choice(["1", "1 - 1"])
                        features.add("rule when")
                    cells.add((own, "stack" if stack else kind, relation, side.name))
                    if len(axes) > 1:
                        features.add("several axes")
                if len(param.get("shard", {})) > 1:
                    features.add("several dimensions")
                rules = list(param.get("shard", {}).values()) + [
                    side.placed[v] for v in unit.variables if v in side.placed
                ]
                used = [axis for rule in rules for axis in as_list(rule["axis"] if isinstance(rule, dict) else rule)]
                if len({axis.startswith("v") for axis in used}) > 1:
                    features.add(f"{side.name} over several views")
                if rng.random() < 0.08 and s > 0 and free:
                    axis = free[0]
                    param["at"] = {axis: rng.choice(["first", "last", 0, list(range(side.axes[axis]))])}
                    features.add("at")
                if side.modules and side.modules not in unit.variables:
                    axis = side.placed[side.modules]
                    last = side.axes[axis] * rng.choice([1, 2, 2]) - 1
                    param.setdefault("at", {})[axis] = rng.choice(
                        ["first", "last", "last - first", last, [0, last], ["last", "first"]]
                    )
                if rng.random() < 0.06:
                    param["when"] = (
                        "on and tp >= 1" if "tp" in side.axes and "tp" in side.layout.get("axes", ["tp"]) else "on"
                    )
                    side.layout["switches"] = {"on": True}
                    features.add("when")
                if s > 0 and rng.random() < 0.05:
                    param["refresh"] = "after"
                    features.add("refresh")
                split = [v for v in unit.variables if variables[v] > 1]
                if split and rng.random() < 0.1:
                    variable = rng.choice(split)
                    cut = rng.randint(1, variables[variable] - 1)
                    low, high = (
                        ({"layer": f"0..{cut - 1}"}, {"layer": f"{cut}..{variables['layer'] - 1}"})
                        if variable == "layer"
                        else (
                            {variable: list(range(cut))},
                            {variable: {"pattern": "." * cut + "x" * (variables[variable] - cut), "is": "x"}},
                        )
                    )
                    side.layout["params"][name + ".low"] = {**param, "where": low}
                    side.layout["params"][name + ".high"] = {**param, "where": high}
                    features.add("where")
                else:
                    # Pieces, with random numbers of their own: those of the other jobs do not change.
                    own = random.Random(f"{side.name} {name} {param} {side.mesh_ranks}")
                    ranks = (
                        side.ranks_of_stages(param["at"])
                        if side.modules and side.modules not in unit.variables
                        else []
                        if side.modules
                        else list(range(side.mesh_ranks))
                    )
                    placed = any(v in side.placed for v in unit.variables if v not in (stack, second))
                    if not forced and kind != "flat" and ranks and not placed and own.random() < 0.3:
                        whole = list(unit.tensors) if kind != "holds" else [list(unit.tensors)[i]]
                        kept = {
                            key: param[key] for key in (["stack"] if stack else []) + (["at"] if side.modules else [])
                        }
                        param = pieces_of(own, unit, whole, stacks, ranks, side.name == "target") | kept
                        features.add("pieces in chunks" if side.modules else "pieces")
                    side.layout["params"][name] = param
        if scalar and (s == 0 or rng.random() < 0.8):
            name = "scale{layer}" if rng.random() < 0.7 else "scale"
            side.layout["params"][name] = {"holds": "scale.{layer}"} | ({} if "{" in name else {"stack": "layer"})
        if tied and rng.random() < 0.7:
            names = [match for match in ("layer", "expert") if "{" + match + "}" in tied]
            side.layout["params"]["alias" + "".join(f".{{{v}}}" for v in names)] = {"holds": "alias." + tied}
        if rng.random() < 0.06:
            features.add("no layout")
        else:
            side.node["layout"] = f"l{s}"
            finish_layout(rng, side, s, model, features)
        features |= side.features

        add_selection(rng, side, s, model, features)

    assign_ranks(rng, sides, relation, features)
    job: dict = {
        "version": 1,
        "model": model,
        "source": sides[0].node,
        "target": [side.node for side in sides[1:]] if targets > 1 else sides[1].node,
    }
    if targets > 1:
        features.add("several targets")
    options: dict = {}
    if rng.random() < 0.25:
        options["staging"] = rng.choice(["2KiB", "4KiB", 3000])
        features.add("staging")
    if rng.random() < 0.25:
        options["topology"] = {"ranks_per_node": rng.randint(1, 4)}
        features.add("nodes")
        if rng.random() < 0.5:
            options["topology"]["nics"] = {
                "per_node": rng.randint(1, options["topology"]["ranks_per_node"]),
                "rate": "1MB/s",
                "latency": "1ns",
            }
            features.add("few NICs")
    if options:
        job["options"] = options
    if rng.random() < 0.1 and relation != "storage" and "replicas" not in features:
        job["world"] = 40
        features.add("idle")
    for side in sides:
        if "layout" not in side.node:
            cells = {c for c in cells if c[3] != side.name}
    if "replicas" not in features:
        add_targets(job, sides, cells, features)
    return job, cells, features


def add_targets(job: dict, sides: list[Side], cells: set[tuple], features: set[str]) -> None:
    """Adds to some jobs targets in files and on equal, nested, overlapping and other ranks, and options for files. It
    has random numbers of its own: those of the other jobs do not change. The algorithm is an option of the compiler,
    and therefore a feature."""
    rng = random.Random(repr(job))
    files = any("storage" in side.node for side in sides)
    if rng.random() < (0.3 if files else 0.7):
        return
    sizes = {name: rng.choice([1, 2, 2, 3, 4]) for name in rng.sample(["x", "dp"], rng.choice([1, 2, 2]))}
    model, source = job["model"], sides[0]
    model["layouts"]["whole"] = {
        "params": "same",
        "axes": list(sizes),
        "shard": {"*": {"0": {"axis": next(iter(sizes)), "scheme": rng.choice(["chunk", "balanced", "round_robin"])}}},
    }
    if files and all(cell[3] == "target" for cell in cells) and rng.random() < 0.4:
        source.node = job["source"] = {"layout": "whole", "storage": "checkpoint"}
    targets = [side.node for side in sides[1:]]
    rank_lists = [ranks_of(side.node, side.mesh_ranks) for side in sides if "storage" not in side.node] or [[0, 1, 2]]
    for _ in range(rng.choice([1, 1, 2, 3])):
        like = rng.choice(sides[1:])
        target, size = (
            {key: value for key, value in like.node.items() if key not in ("ranks", "storage")},
            like.mesh_ranks,
        )
        if "layout" not in target or rng.random() < 0.5:
            target, size = {"layout": "whole", "mesh": sizes}, math.prod(sizes.values())
        if rng.random() < 0.25:
            target["storage"] = "files"
            if target["layout"] == "whole" and rng.random() < 0.5:
                target = {"layout": "whole", "storage": "checkpoint"}
        else:
            target["ranks"], kind = ranks_beside(rng, rng.choice(rank_lists), size)
            rank_lists.append(target["ranks"])
            features.add(f"ranks {kind}")
        targets.insert(rng.randrange(len(targets) + 1), target)
    job["target"] = targets
    on_ranks = [target for target in targets if "storage" not in target]
    features |= {"several targets"} | ({"files and ranks as targets"} if 0 < len(on_ranks) < len(targets) else set())
    options = job.setdefault("options", {})
    read = "storage" in source.node and len(on_ranks) > 0
    if "storage" in source.node:
        options["exchange"] = rng.choice(EXCHANGES)
        features |= {f"exchange {options['exchange']}"} if read else set()
    if read or ("storage" not in source.node and len(on_ranks) < len(targets)):
        if rng.random() < 0.5:
            features.add("algorithm megatron")
        axes = [
            axis
            for node in (on_ranks if read else [source.node])
            for axis in node["mesh"]
            if axis not in ("views", "megatron")
        ]
        if axes and (read or "algorithm megatron" in features) and rng.random() < 0.3:
            options["group"] = rng.choice(axes)
            features.add("group")
    if rng.random() < 0.3:
        options.setdefault("topology", {"ranks_per_node": rng.randint(1, 3)})
        features.add("nodes")


def ranks_of(node: dict, mesh_ranks: int) -> list[int]:
    """The world ranks of an endpoint's mesh ranks."""
    ranks = node.get("ranks", f"0..{mesh_ranks - 1}")
    first, _, last = ranks.partition("..") if isinstance(ranks, str) else ("", "", "")
    return list(range(int(first), int(last) + 1)) if first else ranks


def ranks_beside(rng: random.Random, ranks: list[int], count: int) -> tuple[list[int], str]:
    """World ranks for a target beside an endpoint on `ranks`, and how the two lists differ."""
    others = [rank for rank in range(40) if rank not in ranks]
    kind = rng.choice(["equal", "equal", "permuted", "overlapping", "overlapping", "overlapping", "disjoint"])
    result = [] if kind == "disjoint" else ranks[:count]
    result += others[: count - len(result)]
    if kind == "permuted":
        rng.shuffle(result)
    if kind == "overlapping" and count > 1:
        for i in rng.sample(range(count), rng.randint(1, count - 1)):
            result[i] = next(rank for rank in others if rank not in result)
    return result, "nested" if kind == "equal" and count != len(ranks) else kind


def finish_layout(rng: random.Random, side: Side, s: int, model: dict, features: set[str]) -> None:
    """Adds the layout to the model: unchanged, replaced by `params: same`, or as one that extends another."""
    kind = rng.random()
    if kind < 0.06:
        free = [axis for axis in side.group if axis not in side.placed.values()]
        globs: dict = {}
        if free:
            rule = lambda: {"axis": rng.choice(free), "scheme": rng.choice(["chunk", "balanced", "round_robin"])}
            if any(name.endswith(".q") for name in model["tensors"]) and rng.random() < 0.5:
                globs["*.q"] = rng.choice([{}, {"0": rule()}])
            globs["*u?.*" if rng.random() < 0.5 and "*.q" not in globs else "*"] = {"0": rule()}
        layout = {"params": "same", "shard": globs}
        layout.update({key: side.layout[key] for key in ("place", "axes") if key in side.layout})
        if len(model["tensors"]) % 2:
            first = next(iter(model["tensors"]))
            model["layouts"][f"same{s}"] = layout
            layout = {"extend": f"same{s}", "params": {first: {"holds": first}}}
            features.add("extend same")
        model["layouts"][f"l{s}"] = layout
        side.same = True
        features.add("params: same")
    elif kind < 0.14 and side.layout["params"]:
        changed = rng.choice(list(side.layout["params"]))
        base = {**side.layout, "params": dict(side.layout["params"])}
        base["params"][changed] = {
            key: value for key, value in base["params"][changed].items() if key not in ("shard", "pad")
        }
        base["params"]["junk"] = {"holds": next(name for name in model["tensors"] if name != "gone")}
        model["layouts"][f"base{s}"] = base
        own = {"extend": f"base{s}", "params": {changed: side.layout["params"][changed], "junk": None}}
        if "place" in base and rng.random() < 0.5:
            own["place"] = base.pop("place")
        model["layouts"][f"l{s}"] = own
        features.add("extend")
    else:
        model["layouts"][f"l{s}"] = side.layout


def add_selection(rng: random.Random, side: Side, s: int, model: dict, features: set[str]) -> None:
    """`only` and `ignore` on targets, `authority` on a source."""
    names = (
        list(side.layout["params"])
        if "layout" in side.node and not getattr(side, "same", False)
        else list(model["tensors"])
    )
    if "layout" in side.node:
        names = [side.layout.get("rename", {}).get("", "") + name for name in names]
    if s > 0 and len(names) > 1 and rng.random() < 0.08:
        one = rng.choice(names)
        glob = one[:-1] + "?" if rng.random() < 0.5 else one.split("{")[0] + "*"
        side.node[rng.choice(["only", "ignore"])] = glob if rng.random() < 0.5 else [glob]
        features.add("only, ignore")
    if s == 0 and rng.random() < 0.1 and len(side.groups) == 1:
        axis = rng.choice(side.group)
        side.node["authority"] = {axis: rng.choice(["first", "last", rng.randrange(side.axes[axis])])}
        features.add("authority")


def assign_ranks(rng: random.Random, sides: list[Side], relation: str, features: set[str]) -> None:
    """Chooses the world ranks, or the storage, of the endpoints."""
    source = sides[0]
    if relation == "storage":
        chosen = rng.choice([source, sides[1], None])
        for side in [chosen] if chosen else [source, sides[1]]:
            if rng.random() < 0.4:
                side.node["storage"] = f"files-{side.name}"
            else:
                side.node["storage"] = "checkpoint"
        return
    for side in sides[1:]:
        if relation == "disjoint":
            offset = source.mesh_ranks + rng.randint(0, 2)
        elif relation == "overlapping":
            offset = rng.randint(1, max(1, source.mesh_ranks - 1))
        else:
            continue
        ranks = list(range(offset, offset + side.mesh_ranks))
        if rng.random() < 0.3:
            rng.shuffle(ranks)
            features.add("permuted ranks")
            side.node["ranks"] = ranks
        else:
            side.node["ranks"] = f"{ranks[0]}..{ranks[-1]}"
            # Engine replicas, without another random number: those of the other jobs do not change.
            if relation == "disjoint" and len(sides) == 2 and (source.mesh_ranks + side.mesh_ranks) % 3 == 0:
                features.add("replicas")
                side.node["replicas"] = offset
                if offset == source.mesh_ranks:
                    del side.node["ranks"]
