# SPDX-License-Identifier: Apache-2.0
"""The oracle: computes what every param of every mesh rank must hold, element by element, from the rules of
docs/yaml.md. It shares no code with the compiler. It builds each global param as an array of labels, by
concatenating, interleaving, stacking and padding label arrays, and selects the positions of each mesh rank.

The label of padding is 0; that of an element is 1 + its number among all elements of all tensors."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field

import numpy as np
import yaml

from inherit import extended, fits, renamed
from schemes import Rule, chunks_of, evaluate, need, read_rule, rows_of

ITEM = {
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "fp64": 8,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "i8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "u64": 8,
    "bool": 1,
}
# The parser of libyaml, where PyYAML has it, is ten times as fast. Both keep scalars as text.
LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
PLACEHOLDER = re.compile(r"\{([a-z_0-9]+)(\.local|\.chunk)?\}")


# --------------------------------------------------------------------------------------------------------------- model


@dataclass
class Tensor:
    name: str
    variables: list[str]
    shape: list[int]
    dtype: str
    exists: dict[str, list[int]]
    shard: dict
    tied: str | None = None
    absent: bool = False
    base: dict[tuple[int, ...], int] = field(default_factory=dict)  # first label of each combination of values


class Model:
    def __init__(self, node: dict) -> None:
        self.let: dict[str, int] = {}
        for name, text in node.get("let", {}).items():
            self.let[name] = evaluate(text, self.let)
        self.index = {name: evaluate(text, self.let) for name, text in node.get("index", {}).items()}
        self.placement, self.layouts = node.get("place", {}), extended(node.get("layouts", {}), node["tensors"])
        self.tensors: dict[str, Tensor] = {}
        self.labels = 1
        self.dtype_of: list[tuple[int, str]] = []
        for name, declared in node["tensors"].items():
            declared = {"shape": declared} if isinstance(declared, list) else declared
            name = self.literal(name)
            variables = [match[1] for match in PLACEHOLDER.finditer(name)]
            exists = {variable: self.existing(declared, variable) for variable in variables}
            self.tensors[name] = Tensor(
                name,
                variables,
                [evaluate(x, self.let) for x in declared.get("shape", [])],
                declared.get("dtype", node.get("dtype", "")),
                exists,
                declared.get("shard", {}),
                declared.get("tied"),
                "when" in declared and evaluate(declared["when"], self.let) == 0,
            )
        for tensor in self.tensors.values():
            if tensor.tied is not None or tensor.absent:
                continue
            for values in itertools.product(*(tensor.exists[v] for v in tensor.variables)):
                tensor.base[values] = self.labels
                self.labels += math.prod(tensor.shape)
        for tensor in self.tensors.values():
            if tensor.tied is not None:
                other = self.find(tensor.tied)
                need(tensor.absent or not other.absent, "tied to an absent tensor")
                tensor.shape, tensor.dtype, tensor.exists = other.shape, other.dtype, other.exists
                tensor.shard = tensor.shard or other.shard
                order = [other.variables.index(v) for v in tensor.variables]
                tensor.base = {tuple(values[i] for i in order): base for values, base in other.base.items()}

    def literal(self, name: str) -> str:
        """Replaces `{n}` of a `let` name by its value."""
        return PLACEHOLDER.sub(
            lambda m: str(self.let[m[1]]) if not m[2] and m[1] not in self.index and m[1] in self.let else m[0], name
        )

    def existing(self, declared: dict, variable: str) -> list[int]:
        """The values of an index variable that `where` selects."""
        where = declared.get("where", {}).get(variable)
        if where is None:
            return list(range(self.index[variable]))
        if isinstance(where, dict):
            kinds = where["pattern"].split("/")[0].replace("|", "").replace(" ", "")
            need(len(kinds) == self.index[variable], "pattern")
            return [i for i, kind in enumerate(kinds) if kind in "".join(where["is"])]
        return self.ranges(where)

    def ranges(self, node: object) -> list[int]:
        values = set()
        for part in node if isinstance(node, list) else [node]:
            first, _, last = part.partition("..")
            low = evaluate(first, self.let)
            values |= set(range(low, (evaluate(last, self.let) if last else low) + 1))
        return sorted(values)

    def find(self, reference: str) -> Tensor:
        reference = self.literal(reference)
        if reference in self.tensors:
            return self.tensors[reference]
        fits = [tensor for name, tensor in self.tensors.items() if name.endswith("." + reference)]
        need(len(fits) == 1, f"{reference} fits {len(fits)} tensors")
        return fits[0]


# ----------------------------------------------------------------------------------------------------------- endpoints


@dataclass
class Held:
    """A param of one mesh rank: labels in its local shape, and the tensors' dtype."""

    labels: np.ndarray
    whole: np.ndarray  # the same matrices, not sharded in their last two dimensions
    dtype: str


class Endpoint:
    def __init__(self, job: Job, node: dict, role: str) -> None:
        self.job, self.role, self.model = job, role, job.model
        self.storage = "storage" in node
        self.directory = node.get("storage")
        self.axes: dict[str, tuple[int, int]] = {}
        mesh = node.get("mesh", {})
        self.mesh_ranks = 1
        self.checkpoint = self.storage and not mesh
        for view in self.views(mesh):
            stride = 1
            for axis, size in view:
                if axis in self.axes and size > 1:
                    need(self.axes[axis] == (size, stride), f"axis {axis} disagrees")
                self.axes[axis] = (size, stride)
                stride *= size
            need(self.mesh_ranks in (1, stride) or not self.axes, "views differ")
            self.mesh_ranks = stride
        self.layout = self.model.layouts[node["layout"]] if "layout" in node else None
        ranks = node.get("ranks")
        if self.storage or ranks is None:
            first = 1 + max(job.endpoints[0].ranks) if "replicas" in node else 0
            self.ranks = list(range(first, first + self.mesh_ranks))
        else:
            self.ranks = self.model.ranges(ranks) if isinstance(ranks, str) else [int(r) for r in ranks]
        need(len(self.ranks) == self.mesh_ranks, "ranks")
        self.node = node

    def views(self, mesh: dict) -> list[list[tuple[str, int]]]:
        number = lambda text: evaluate(text, self.model.let)
        if "megatron" in mesh:
            shape = {name: number(text) for name, text in mesh["megatron"].items() if name != "order"}
            size = {name: shape.get(name, 1) for name in ("tp", "cp", "ep", "dp", "pp", "etp")}
            order = mesh["megatron"].get("order", "tp-cp-ep-dp-pp").split("-")
            order += [name for name in ("tp", "cp", "ep", "dp", "pp") if name not in order]
            total = size["tp"] * size["cp"] * size["dp"] * size["pp"]
            inner = size["etp"] * size["ep"] * size["pp"]
            need(total % inner == 0, "edp")
            size["edp"] = total // inner
            dense = [(name, size[name]) for name in order if name != "ep"]
            expert = [
                ({"tp": "etp", "dp": "edp"}.get(name, name), size[{"tp": "etp", "dp": "edp"}.get(name, name)])
                for name in order
                if name != "cp"
            ]
            return [dense, expert]
        first = [(name, number(size)) for name, size in mesh.items() if name != "views"]
        return [first] + [[(name, number(size)) for name, size in view.items()] for view in mesh.get("views", [])]

    def names(self) -> dict[str, int]:
        names = dict(self.model.let)
        listed = self.layout.get("axes") if self.layout else None
        for axis in listed if listed is not None else {axis for e in self.job.endpoints for axis in e.axes}:
            names[axis] = self.axes.get(axis, (1, 1))[0]
        if self.layout:
            for name, value in {**self.layout.get("switches", {}), **self.node.get("switches", {})}.items():
                names[name] = evaluate(value, {})
        return names

    def coordinate(self, mesh_rank: int, axes: list[str]) -> tuple[int, int]:
        """The combined coordinate over several axes, outermost first, and the number of coordinates."""
        r, k = 0, 1
        for axis in axes:
            size, stride = self.axes.get(axis, (1, 1))
            r, k = r * size + mesh_rank // stride % size, k * size
        return r, k

    def rules(self) -> dict:
        rules = {
            **(self.layout.get("place", {}) if self.layout else self.model.placement),
            **self.node.get("place", {}),
        }
        kept = lambda rule: (
            not isinstance(rule, dict) or "when" not in rule or evaluate(rule["when"], self.names()) != 0
        )
        return {variable: rule for variable, rule in rules.items() if kept(rule)}

    def chunks(self, variable: str, mesh_rank: int) -> list[list[int]]:
        """The values of a variable on a mesh rank (docs/yaml.md: V_x), by chunk (one without virtual stages):
        ascending, or in the order of a map."""
        rules = self.rules()
        if variable not in rules:
            return [list(range(self.model.index[variable]))]
        node = rules[variable]
        axes = node["axis"] if isinstance(node, dict) else node
        r, k = self.coordinate(mesh_rank, axes if isinstance(axes, list) else [axes])
        chunks = chunks_of(node, self.model.index[variable], k, r, self.names())
        return chunks if isinstance(node, dict) and "map" in node else [sorted(chunk) for chunk in chunks]

    def values(self, variable: str, mesh_rank: int) -> list[int]:
        return [value for chunk in self.chunks(variable, mesh_rank) for value in chunk]

    def placed(self, variable: str) -> bool:
        return variable in self.rules()

    def admits(self, rules: dict, mesh_rank: int) -> bool:
        """Whether a mesh rank has the coordinates that `at` or `authority` requires."""
        for axis, wanted in rules.items():
            if self.coordinate(mesh_rank, [axis])[0] not in self.allowed(wanted, self.axes.get(axis, (1, 1))[0]):
                return False
        return True

    def allowed(self, wanted: object, size: int) -> list[int]:
        """The coordinates of an axis of that size that `at` or `authority` lists."""
        names = {**self.names(), "first": 0, "last": size - 1}
        allowed = [evaluate(x, names) for x in (wanted if isinstance(wanted, list) else [wanted])]
        need(all(0 <= x < size for x in allowed), "coordinates")
        return allowed

    def modules(self) -> tuple[str, str, int, int] | None:
        """`chunks` of the layout, if a rank has several: the variable, its axis, the number of ranks and of chunks."""
        if not self.layout or "chunks" not in self.layout:
            return None
        variable = PLACEHOLDER.search(self.layout["chunks"])[1]
        chunks = len(self.chunks(variable, 0))
        if chunks == 1:
            return None
        node = self.rules()[variable]
        axes = node["axis"] if isinstance(node["axis"], list) else [node["axis"]]
        need(len(axes) == 1, "one axis")
        return variable, axes[0], self.axes.get(axes[0], (1, 1))[0], chunks

    def declared(self) -> dict[str, dict]:
        """The params of the layout that `only` and `ignore` select, with the sharding rules of its globs."""
        if not self.layout:
            declared = {name: {"holds": name, "shard": tensor.shard} for name, tensor in self.model.tensors.items()}
        elif self.layout["params"] == "same":
            declared = {name: {"holds": name} for name in self.model.tensors}
        else:
            declared = {self.model.literal(name): param for name, param in self.layout["params"].items()}
        for param in declared.values():  # also of those that `only` leaves out
            need(
                "pieces" not in param or any("of" in piece for group in param["pieces"] for piece in group["of"]),
                "no piece of a tensor",
            )
        globs = self.layout.get("shard", {}) if self.layout else {}
        used = set()
        for name, param in declared.items():
            held = self.model.find(param["holds"]) if globs and "holds" in param and "stack" not in param else None
            scalar = held is not None and not held.absent and held.shape == []
            fitting = [
                glob for glob in globs if fits(glob, name) and not (scalar and globs[glob] and set(glob) & set("*?"))
            ]
            if "shard" not in param and fitting:
                declared[name] = {**param, "shard": globs[fitting[0]]}
                used.add(fitting[0])
        need(used == set(globs), "a glob of 'shard' applies to no param")
        if self.layout and "rename" in self.layout:
            declared = renamed(declared, self.layout["rename"])
        chosen = {}
        for key in ("only", "ignore"):
            value = self.node.get(key, [])
            chosen[key] = value if isinstance(value, list) else [value]
            need(
                all(any(fits(glob, name) for name in declared) for glob in chosen[key]),
                f"a glob of '{key}' fits nothing",
            )
        return {
            name: param
            for name, param in declared.items()
            if (not chosen["only"] or any(fits(glob, name) for glob in chosen["only"]))
            and not any(fits(glob, name) for glob in chosen["ignore"])
        }

    def present(self) -> list[Param]:
        """The params that `when` does not leave out."""
        return [
            Param(self, name, param)
            for name, param in self.declared().items()
            if "when" not in param or evaluate(param["when"], self.names()) != 0
        ]

    def params(self, mesh_rank: int) -> dict[str, Held]:
        result: dict[str, Held] = {}
        for param in self.present():
            for full, held in param.at(mesh_rank).items():
                need(full not in result, f"two params {full}")
                result[full] = held
        return result


class Param:
    """One declaration of a layout."""

    def __init__(self, endpoint: Endpoint, name: str, node: dict) -> None:
        self.endpoint, self.name, self.node = endpoint, name, node
        self.environment = endpoint.names()
        self.model = endpoint.model
        self.pack = {
            key: node[key] for key in ("holds", "concat", "interleave", "permute", "flat", "pieces") if key in node
        }
        stack = node.get("stack")
        entries = stack if isinstance(stack, list) else [stack] if stack else []
        #: {dimension of the param: the index variable that it stacks}, in ascending order
        self.stacks = dict(
            sorted(
                (int(entry.get("dim", i)), entry["index"]) if isinstance(entry, dict) else (i, entry)
                for i, entry in enumerate(entries)
            )
        )
        need(
            len(self.stacks) == len(entries) == len(set(self.stacks.values())),
            "one dimension for each stacked variable",
        )
        self.variables = [match[1] for match in PLACEHOLDER.finditer(name) if match[2] != ".chunk"]
        rules = node.get("shard", {})
        self.shard = {
            d: rule
            for d, rule in rules.items()
            if not isinstance(rule, dict) or "when" not in rule or evaluate(rule["when"], self.environment) != 0
        }

    def flat_entries(self) -> list:
        """The entries of a flat buffer that are present."""
        body = self.pack["flat"]
        present = []
        for entry in body if isinstance(body, list) else body["of"]:
            if isinstance(entry, dict) and "when" in entry and evaluate(entry["when"], self.environment) == 0:
                continue
            entry = {key: value for key, value in entry.items() if key != "when"} if isinstance(entry, dict) else entry
            entry = entry["of"] if isinstance(entry, dict) and set(entry) == {"of"} else entry
            leaf = self.leaf(entry)
            if not (leaf and self.model.find(leaf[0]).absent):
                present.append(entry)
        return present

    def build_flat(self, values: dict[str, int]) -> np.ndarray:
        """The entries in row-major order, each at a multiple of `align`."""
        body = self.pack["flat"]
        align = evaluate(body["align"], self.environment) if isinstance(body, dict) and "align" in body else 1
        need(align >= 1, "align")
        whole: list[int] = []
        for entry in self.flat_entries():
            labels = self.build(entry, values)
            need(labels.ndim > 0, "a scalar in a flat buffer")
            whole += [0] * (-len(whole) % align)
            whole += labels.reshape(-1).tolist()
        return np.array(whole, dtype=np.int64)

    def tensors(self, pack: object) -> list[Tensor]:
        if isinstance(pack, str):
            return [self.model.find(pack)]
        if "holds" in pack:
            return [self.model.find(pack["holds"])]
        if "flat" in pack:
            return [t for entry in self.flat_entries() for t in self.tensors(entry)]
        if "pieces" in pack:
            names = [piece["of"] for group in pack["pieces"] for piece in group["of"] if "of" in piece]
            need(bool(names), "no piece of a tensor")
            return [self.model.find(name) for name in names]
        if "concat" in pack or "interleave" in pack:
            return [t for entry in self.entries(pack)[2] for t in self.tensors(entry)]
        return [self.model.find(pack["of"])]

    def entries(self, pack: dict) -> tuple[str, int, list]:
        kind = "concat" if "concat" in pack else "interleave"
        body = pack[kind]
        if isinstance(body, list):
            return kind, 0, body
        return kind, int(body.get("dim", "0")), body["of"]

    def leaf(self, pack: object) -> tuple[str, list[int] | None] | None:
        if isinstance(pack, str):
            return pack, None
        if "holds" in pack:
            return pack["holds"], [int(d) for d in pack["permute"]] if "permute" in pack else None
        if "permute" in pack:
            return pack["of"], [int(d) for d in pack["permute"]]
        return None

    def build(self, pack: object, values: dict[str, int]) -> np.ndarray:
        """The labels of a pack for given index values: steps 1 and 2 of docs/yaml.md."""
        if isinstance(pack, dict) and "flat" in pack:
            return self.build_flat(values)
        leaf = self.leaf(pack)
        if leaf:
            tensor = self.model.find(leaf[0])
            base = tensor.base[tuple(values[v] for v in tensor.variables)]
            labels = np.arange(base, base + math.prod(tensor.shape)).reshape(tensor.shape)
            return labels.transpose(leaf[1]) if leaf[1] is not None else labels
        kind, d, entries = self.entries(pack)
        arrays = [self.build(entry, values) for entry in entries]
        need(all(a.ndim == arrays[0].ndim for a in arrays) and d < arrays[0].ndim, "dimensions differ")
        for other in range(arrays[0].ndim):
            need(other == d or all(a.shape[other] == arrays[0].shape[other] for a in arrays), "lengths differ")
        if kind == "concat":
            return np.concatenate(arrays, axis=d)
        groups = evaluate(pack["interleave"]["groups"], self.environment)
        need(groups >= 1 and all(a.shape[d] % groups == 0 for a in arrays), "groups do not divide")
        split = [np.split(a, groups, axis=d) for a in arrays]
        return np.concatenate([each[g] for g in range(groups) for each in split], axis=d)

    def shape(self, pack: object) -> list[int]:
        leaf = self.leaf(pack)
        if leaf:
            shape = self.model.find(leaf[0]).shape
            return [shape[d] for d in leaf[1]] if leaf[1] is not None else list(shape)
        _, d, entries = self.entries(pack)
        shapes = [self.shape(entry) for entry in entries]
        return [sum(s[i] for s in shapes) if i == d else shapes[0][i] for i in range(len(shapes[0]))]

    def group_rows(self, pack: dict) -> int:
        groups = evaluate(pack["interleave"]["groups"], self.environment)
        d = self.entries(pack)[1]
        return max(1, sum(self.shape(entry)[d] // groups for entry in self.entries(pack)[2]))

    def cut(self, pack: object, d: int, n: int, rule: Rule, r: int, k: int, joined: bool, padded: bool) -> list[int]:
        """cut(pack, d, n) of step 5 of docs/yaml.md."""
        if "flat" in pack:
            return rows_of(rule, n, k, r, 1)
        leaf = self.leaf(pack)
        along = not leaf and self.entries(pack)[1] == d
        if along and "interleave" in pack:
            return rows_of(rule, n, k, r, self.group_rows(pack))
        if leaf or joined:
            return rows_of(rule, n, k, r, 1)
        if along:
            need(rule.scheme not in ("sizes", "blocks", "map") and not padded, "needs cut: joined")
            held, offset = [], 0
            for entry in self.entries(pack)[2]:
                length = self.shape(entry)[d]
                held += [offset + p for p in self.cut(entry, d, length, rule, r, k, False, False)]
                offset += length
            return held
        cuts = [self.cut(entry, d, n, rule, r, k, False, padded) for entry in self.entries(pack)[2]]
        need(all(c == cuts[0] for c in cuts), "entries are cut differently")
        return cuts[0]

    def at(self, mesh_rank: int) -> dict[str, Held]:
        endpoint = self.endpoint
        tensors = self.tensors(self.pack)
        if not tensors or all(tensor.absent for tensor in tensors):
            return {}
        need(not any(tensor.absent for tensor in tensors), "some tensors are absent, some are not")
        narrowed = lambda tensor: {
            v: [x for x in tensor.exists[v] if x in self.model.existing(self.node, v)] for v in tensor.variables
        }
        exists = narrowed(tensors[0])
        for tensor in tensors:
            need(set(tensor.variables) == set(self.variables) | set(self.stacks.values()), "variables")
            need(narrowed(tensor) == exists and tensor.dtype == tensors[0].dtype, "some but not all")
        self.check(mesh_rank, exists)
        rules, prefixes = dict(self.node.get("at", {})), [""]
        if modules := endpoint.modules():
            variable, axis, ranks, chunks = modules
            need(f"{{{variable}.chunk}}" not in self.name and variable not in self.stacks.values(), "chunks")
            prefixes = [endpoint.layout["chunks"]]
            if variable not in self.variables:
                need(axis in rules, "in no chunk")
                stages = sorted(set(endpoint.allowed(rules.pop(axis), ranks * chunks)))
                r = endpoint.coordinate(mesh_rank, [axis])[0]
                prefixes = [PLACEHOLDER.sub(str(stage // ranks), prefixes[0]) for stage in stages if stage % ranks == r]
        if not endpoint.admits(rules, mesh_rank):
            return {}
        held = {v: endpoint.values(v, mesh_rank) for v in exists}
        for v in self.variables:
            need(len(set(held[v])) == len(held[v]), "a value twice in a name")
        result = {}
        for values in itertools.product(*([x for x in held[v] if x in exists[v]] for v in self.variables)):
            fixed = dict(zip(self.variables, values))
            for prefix in prefixes:
                full = PLACEHOLDER.sub(
                    lambda m: str(self.number(m[1], m[2], fixed[m[1]], mesh_rank)), prefix + self.name
                )
                need(full not in result, "one name twice")
                result[full] = Held(*self.local(mesh_rank, fixed, exists, held), tensors[0].dtype)
        return result

    def check(self, mesh_rank: int, exists: dict[str, list[int]]) -> None:
        """A rule must fit its dimension, even if the param exists for no index value."""
        if "flat" in self.pack or "pieces" in self.pack:
            return
        shape = self.shape(self.pack)
        for d, variable in self.stacks.items():
            shape.insert(d, len(exists[variable]))
        for d, node in self.shard.items():
            need(int(d) < len(shape), "no such dimension")
            m = evaluate(self.node["pad"][d], self.environment) if d in self.node.get("pad", {}) else 1
            rule, n = read_rule(node, self.environment), shape[int(d)] + -shape[int(d)] % m
            r, k = self.endpoint.coordinate(mesh_rank, rule.axes)
            if int(d) in self.stacks:
                rows_of(rule, n, k, r, 1)
            else:
                self.cut(
                    self.pack,
                    self.in_pack(int(d)),
                    n,
                    rule,
                    r,
                    k,
                    self.node.get("cut") == "joined",
                    d in self.node.get("pad", {}),
                )

    def in_pack(self, d: int) -> int:
        """The dimension of the pack that is dimension `d` of the param."""
        return d - sum(stacked < d for stacked in self.stacks)

    def stacked(
        self,
        leaf: object,
        fixed: dict[str, int],
        values: dict[str, list[int]],
        exists: dict[str, list[int]],
        done: int = 0,
    ) -> np.ndarray:
        """The array of a pack with its stacked dimensions: one slot for each of `values`. Slots of values that do not
        exist have no labels."""
        if done == len(self.stacks):
            return (
                self.build(leaf, fixed)
                if all(fixed[variable] in exists[variable] for variable in self.stacks.values())
                else np.full(self.shape(leaf), -1)
            )
        d, variable = list(self.stacks.items())[done]
        slots = [self.stacked(leaf, {**fixed, variable: value}, values, exists, done + 1) for value in values[variable]]
        if not slots:
            shape = self.shape(leaf)
            for later, other in list(self.stacks.items())[done + 1 :]:
                shape.insert(later - done - 1, len(values[other]))
            shape.insert(d - done, 0)
            return np.zeros(shape, dtype=np.int64)
        return np.stack(slots, axis=d - done)

    def number(self, variable: str, suffix: str | None, value: int, mesh_rank: int) -> int:
        """The number that replaces a placeholder."""
        chunks = self.endpoint.chunks(variable, mesh_rank)
        chunk = next(c for c, values in enumerate(chunks) if value in values)
        return {None: value, ".local": sorted(chunks[chunk]).index(value), ".chunk": chunk}[suffix]

    def explicit(self, mesh_rank: int, fixed: dict[str, int], exists: dict[str, list[int]]) -> np.ndarray:
        """The labels of an explicit param: each piece is copied into a box of elements that no other piece has."""
        ranks = lambda group: self.model.ranges(group["ranks"]) if "ranks" in group else range(self.endpoint.mesh_ranks)
        groups = [group for group in self.pack["pieces"] if mesh_rank in ranks(group)]
        need(len(groups) == 1, "pieces of a mesh rank")
        numbers = lambda node: [evaluate(x, self.model.let) for x in node]
        shape = numbers(groups[0]["shape"])
        result = np.full(shape, -1, dtype=np.int64)
        for piece in groups[0]["of"]:
            to = numbers(piece.get("to", ["0"] * len(shape)))
            if "of" in piece:
                leaf = {"of": piece["of"], "permute": piece["permute"]} if "permute" in piece else piece["of"]
                whole = self.stacked(
                    leaf,
                    fixed,
                    {variable: list(range(self.model.index[variable])) for variable in self.stacks.values()},
                    exists,
                )
                need(whole.ndim == len(shape), "dimensions")
                begin, step = (
                    numbers(piece.get("from", ["0"] * len(shape))),
                    numbers(piece.get("step", ["1"] * len(shape))),
                )
                part = whole[tuple(slice(a, None, b) for a, b in zip(begin, step))]
                size = numbers(piece["size"]) if "size" in piece else list(part.shape)
                need(all(0 < n <= have for n, have in zip(size, part.shape)), "beyond the tensor")
                part = part[tuple(slice(n) for n in size)]
                need(bool((part != -1).all()), "a value that does not exist")
            else:
                size = numbers(piece["size"])
                part = np.zeros(size, dtype=np.int64)
            at = tuple(slice(a, a + n) for a, n in zip(to, size))
            need(
                all(a + n <= length for a, n, length in zip(to, size, shape)) and bool((result[at] == -1).all()),
                "overlapping pieces",
            )
            result[at] = part
        need(bool((result != -1).all()), "elements without a piece")
        return result

    def local(
        self, mesh_rank: int, fixed: dict[str, int], exists: dict[str, list[int]], held: dict[str, list[int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        if "pieces" in self.pack:
            labels = self.explicit(mesh_rank, fixed, exists)
            return labels, labels
        whole = self.stacked(self.pack, fixed, exists, exists)
        padding = [(0, 0)] * whole.ndim
        for d, multiple in self.node.get("pad", {}).items():
            m = evaluate(multiple, self.environment)
            padding[int(d)] = (0, -whole.shape[int(d)] % m)
        padded = np.pad(whole, padding) if whole.ndim else whole
        positions = []
        for d in range(whole.ndim):
            stack = self.stacks.get(d)
            rule_node = self.shard.get(str(d))
            if stack and self.endpoint.placed(stack):
                need(rule_node is None and padding[d] == (0, 0), "a placed stack takes neither shard nor pad")
                positions.append([exists[stack].index(v) for v in held[stack] if v in exists[stack]])
            elif rule_node is None:
                positions.append(list(range(padded.shape[d])))
            else:
                rule = read_rule(rule_node, self.environment)
                r, k = self.endpoint.coordinate(mesh_rank, rule.axes)
                if stack:
                    positions.append(rows_of(rule, padded.shape[d], k, r, 1))
                else:
                    positions.append(
                        self.cut(
                            self.pack,
                            self.in_pack(d),
                            padded.shape[d],
                            rule,
                            r,
                            k,
                            self.node.get("cut") == "joined",
                            str(d) in self.node.get("pad", {}),
                        )
                    )
        whole = padded
        for d, rows in enumerate(positions):
            padded = np.take(padded, np.array(rows, dtype=np.int64), axis=d)
            whole = padded if d == len(positions) - 3 else whole
        return padded, whole


class Job:
    def __init__(self, path: str) -> None:
        with open(path, encoding="utf-8") as file:
            node = yaml.load(file, Loader=LOADER)
        self.model = Model(node["model"])
        targets = node["target"]
        self.endpoints: list[Endpoint] = []
        self.endpoints.append(Endpoint(self, node["source"], "source"))
        if isinstance(targets, list):
            self.endpoints += [Endpoint(self, target, f"target.{i}") for i, target in enumerate(targets)]
        else:
            self.endpoints.append(Endpoint(self, targets, "target"))

    def check(self) -> list[list[dict[str, Held]]]:
        """All params by endpoint and mesh rank. Refuses a job that section 10 of docs/yaml.md refuses."""
        held = [[endpoint.params(mesh_rank) for mesh_rank in range(endpoint.mesh_ranks)] for endpoint in self.endpoints]
        source = self.endpoints[0]
        at_source = {
            label
            for mesh_rank, params in enumerate(held[0])
            if source.admits(source.node.get("authority", {}), mesh_rank)
            for h in params.values()
            for label in np.unique(h.labels).tolist()
        }
        for endpoint in held[1:]:
            for params in endpoint:
                for h in params.values():
                    need(set(np.unique(h.labels).tolist()) - {0} <= at_source, "no source holds it")
        for endpoint in self.endpoints[1:]:  # also a param that no mesh rank has elements of
            for tensor in {
                id(tensor): tensor for param in endpoint.present() for tensor in param.tensors(param.pack)
            }.values():
                labels = (
                    []
                    if tensor.absent
                    else [
                        label for base in tensor.base.values() for label in range(base, base + math.prod(tensor.shape))
                    ]
                )
                need(not labels or not at_source.isdisjoint(labels), "no source holds the tensor")
        for tensor in self.model.tensors.values():
            size = math.prod(tensor.shape)
            if tensor.tied is None:
                labels = [label for base in tensor.base.values() for label in range(base, base + size)]
                missing = [label for label in labels if label not in at_source]
                need(not missing or len(missing) == len(labels), "the source leaves elements on no rank")
        return held
