"""What every param of every rank must hold, straight from the text of docs/yaml.md, element by element. Shares nothing with the
planner: it builds the finished global param as an array of labels by concatenating, interleaving, stacking and padding label arrays,
and takes the positions of each place from it.

A label is 0 for padding, else 1 + the element's number among all elements of all tensors."""

from __future__ import annotations

import ast
import itertools
import math
import re
from dataclasses import dataclass, field

import numpy as np
import yaml

ITEM = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8_e4m3": 1, "fp8_e5m2": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8,
        "u8": 1, "u16": 2, "u32": 4, "u64": 8, "bool": 1}
PLACEHOLDER = re.compile(r"\{([a-z_0-9]+)(\.local)?\}")


class Refused(Exception):
    """What the document calls an error."""


def need(condition: bool, why: str) -> None:
    if not condition:
        raise Refused(why)


def evaluate(text: str, names: dict[str, int]) -> int:
    """Section 4, expressions."""
    def value(node: ast.AST) -> int:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=bool(v) | int(v)):
                return int(v)
            case ast.Name(id="true"):
                return 1
            case ast.Name(id="false"):
                return 0
            case ast.Name(id=name):
                need(name in names, f"unknown name {name}")
                return names[name]
            case ast.UnaryOp(op=ast.USub(), operand=x):
                return -value(x)
            case ast.UnaryOp(op=ast.Not(), operand=x):
                return int(not value(x))
            case ast.BoolOp(op=ast.And(), values=xs):
                return int(all([value(x) != 0 for x in xs]))
            case ast.BoolOp(op=ast.Or(), values=xs):
                return int(any([value(x) != 0 for x in xs]))
            case ast.Compare(left=a, ops=[op], comparators=[b]):
                x, y = value(a), value(b)
                return int({ast.Eq: x == y, ast.NotEq: x != y, ast.Lt: x < y, ast.LtE: x <= y, ast.Gt: x > y, ast.GtE: x >= y}[type(op)])
            case ast.Call(func=ast.Name(id="ceil"), args=[a, b]):
                x, m = value(a), value(b)
                need(x >= 0 and m > 0, "ceil")
                return -(-x // m) * m
            case ast.BinOp(left=a, op=op, right=b):
                x, y = value(a), value(b)
                if isinstance(op, ast.Div):
                    need(y != 0 and x % y == 0, "division")
                    return x // y
                return {ast.Add: x + y, ast.Sub: x - y, ast.Mult: x * y}[type(op)]
        raise Refused(f"not an expression: {text}")
    return value(ast.parse(text.strip(), mode="eval"))


# ------------------------------------------------------------------------------------------------------------- schemes


@dataclass
class Rule:
    axes: list[str]
    scheme: str = "even"
    argument: object = None
    unit: int | None = None
    replicate: bool = False


def read_rule(node: object, names: dict[str, int]) -> Rule:
    if isinstance(node, (str, list)):
        return Rule(node if isinstance(node, list) else [node])
    axes = node["axis"]
    rule = Rule(axes if isinstance(axes, list) else [axes])
    rule.scheme = node.get("scheme", "even")
    for scheme in ("sizes", "blocks"):
        if scheme in node:
            rule.scheme, rule.argument = scheme, [evaluate(x, names) for x in node[scheme]]
    for scheme in ("stride", "cyclic"):
        if scheme in node:
            rule.scheme, rule.argument = scheme, evaluate(node[scheme], names)
    if "map" in node:
        rule.scheme, rule.argument = "map", [[evaluate(x, names) for x in row] for row in node["map"]]
    if "unit" in node:
        rule.unit = evaluate(node["unit"], names)
    rule.replicate = node.get("replicate") == "true"
    return rule


def units_of(rule: Rule, n: int, k: int, r: int) -> list[int]:
    """The table of section 5: the units that rank r of k holds, in local order."""
    everything = list(range(n))
    if rule.replicate and k > n > 0:
        need(k % n == 0, f"{n} units do not divide {k} ranks")
        return [r * n // k]
    match rule.scheme:
        case "even":
            need(n % k == 0, f"{k} does not divide {n}")
            return everything[r * (n // k):(r + 1) * (n // k)]
        case "chunk":
            c = math.ceil(n / k)
            return everything[r * c:(r + 1) * c]
        case "balanced":
            lengths = [n // k + (1 if i < n % k else 0) for i in range(k)]
            return everything[sum(lengths[:r]):sum(lengths[:r + 1])]
        case "round_robin":
            return everything[r::k]
        case "sizes":
            need(len(rule.argument) == k and sum(rule.argument) == n and min(rule.argument) >= 0, "sizes")
            return everything[sum(rule.argument[:r]):sum(rule.argument[:r + 1])]
        case "stride":
            s = rule.argument
            need(s >= 1 and n % (k * s) == 0, "stride")
            length = n // (k * s)
            segments = [everything[i * length:(i + 1) * length] for i in range(k * s)]
            return [x for segment in segments[r::k] for x in segment]
        case "cyclic":
            blocks = [everything[i:i + rule.argument] for i in range(0, n, rule.argument)]
            return [x for block in blocks[r::k] for x in block]
        case "blocks":
            need(sum(rule.argument) == n, "blocks")
            held, start = [], 0
            for length in rule.argument:
                need(length % k == 0, "blocks")
                held += everything[start:start + length][r * (length // k):(r + 1) * (length // k)]
                start += length
            return held
        case "map":
            need(len(rule.argument) == k and all(0 <= x < n for row in rule.argument for x in row), "map")
            return list(rule.argument[r])
    raise Refused(f"unknown scheme {rule.scheme}")


def rows_of(rule: Rule, n: int, k: int, r: int, default_unit: int) -> list[int]:
    unit = rule.unit if rule.unit is not None else default_unit
    need(unit >= 1, "unit")
    count = math.ceil(n / unit)
    return [row for u in units_of(rule, count, k, r) for row in range(u * unit, min((u + 1) * unit, n))]


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
    base: dict[tuple[int, ...], int] = field(default_factory=dict)  # first label of each combination of values


class Model:
    def __init__(self, node: dict) -> None:
        self.let: dict[str, int] = {}
        for name, text in node.get("let", {}).items():
            self.let[name] = evaluate(text, self.let)
        self.index = {name: evaluate(text, self.let) for name, text in node.get("index", {}).items()}
        self.place, self.layouts = node.get("place", {}), node.get("layouts", {})
        self.tensors: dict[str, Tensor] = {}
        self.labels = 1
        self.dtype_of: list[tuple[int, str]] = []
        for name, declared in node["tensors"].items():
            declared = {"shape": declared} if isinstance(declared, list) else declared
            variables = [match[1] for match in PLACEHOLDER.finditer(name)]
            exists = {}
            for variable in variables:
                where = declared.get("where", {}).get(variable)
                exists[variable] = list(range(self.index[variable])) if where is None else self.ranges(where)
            self.tensors[name] = Tensor(name, variables, [evaluate(x, self.let) for x in declared.get("shape", [])],
                                        declared.get("dtype", node.get("dtype", "")), exists, declared.get("shard", {}), declared.get("tied"))
        for tensor in self.tensors.values():
            if tensor.tied is not None:
                continue
            for values in itertools.product(*(tensor.exists[v] for v in tensor.variables)):
                tensor.base[values] = self.labels
                self.labels += math.prod(tensor.shape)
        for tensor in self.tensors.values():
            if tensor.tied is not None:
                other = self.find(tensor.tied)
                tensor.shape, tensor.dtype, tensor.exists = other.shape, other.dtype, other.exists
                tensor.shard = tensor.shard or other.shard
                order = [other.variables.index(v) for v in tensor.variables]
                tensor.base = {tuple(values[i] for i in order): base for values, base in other.base.items()}

    def ranges(self, node: object) -> list[int]:
        values = set()
        for part in node if isinstance(node, list) else [node]:
            first, _, last = part.partition("..")
            low = evaluate(first, self.let)
            values |= set(range(low, (evaluate(last, self.let) if last else low) + 1))
        return sorted(values)

    def find(self, reference: str) -> Tensor:
        if reference in self.tensors:
            return self.tensors[reference]
        fits = [tensor for name, tensor in self.tensors.items() if name.endswith("." + reference)]
        need(len(fits) == 1, f"{reference} fits {len(fits)} tensors")
        return fits[0]


# ----------------------------------------------------------------------------------------------------------- endpoints


@dataclass
class Held:
    """A param of one place: labels in its local shape, and the tensors' dtype."""
    labels: np.ndarray
    dtype: str


class Endpoint:
    def __init__(self, job: "Job", node: dict, role: str) -> None:
        self.job, self.role, self.model = job, role, job.model
        self.storage = "storage" in node
        self.directory = node.get("storage")
        self.axes: dict[str, tuple[int, int]] = {}
        mesh = node.get("mesh", {})
        self.places = 1
        self.checkpoint = self.storage and not mesh
        for view in self.views(mesh):
            stride = 1
            for axis, size in view:
                if axis in self.axes and size > 1:
                    need(self.axes[axis] == (size, stride), f"axis {axis} disagrees")
                self.axes[axis] = (size, stride)
                stride *= size
            need(self.places in (1, stride) or not self.axes, "views differ")
            self.places = stride
        self.layout = self.model.layouts[node["layout"]] if "layout" in node else None
        ranks = node.get("ranks")
        if self.storage or ranks is None:
            self.ranks = list(range(self.places))
        else:
            self.ranks = self.model.ranges(ranks) if isinstance(ranks, str) else [int(r) for r in ranks]
        need(len(self.ranks) == self.places, "ranks")
        self.node = node

    def views(self, mesh: dict) -> list[list[tuple[str, int]]]:
        number = lambda text: evaluate(text, self.model.let)  # noqa: E731
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
            expert = [({"tp": "etp", "dp": "edp"}.get(name, name), size[{"tp": "etp", "dp": "edp"}.get(name, name)]) for name in order if name != "cp"]
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

    def coordinate(self, place: int, axes: list[str]) -> tuple[int, int]:
        """The combined coordinate over several axes, outermost first, and how many there are."""
        r, k = 0, 1
        for axis in axes:
            size, stride = self.axes.get(axis, (1, 1))
            r, k = r * size + place // stride % size, k * size
        return r, k

    def values(self, variable: str, place: int) -> list[int]:
        """V_x(place), and whether x is placed."""
        rules = {**(self.layout.get("place", {}) if self.layout else self.model.place), **self.node.get("place", {})}
        if variable not in rules:
            return list(range(self.model.index[variable]))
        rule = read_rule(rules[variable], self.names())
        r, k = self.coordinate(place, rule.axes)
        held = rows_of(rule, self.model.index[variable], k, r, 1)
        return held if rule.scheme == "map" else sorted(held)

    def placed(self, variable: str) -> bool:
        return variable in {**(self.layout.get("place", {}) if self.layout else self.model.place), **self.node.get("place", {})}

    def params(self, place: int) -> dict[str, Held]:
        if self.layout:
            declared = self.layout["params"]
        else:
            declared = {name: {"holds": name, "shard": tensor.shard} for name, tensor in self.model.tensors.items()}
        result: dict[str, Held] = {}
        for name, param in declared.items():
            if "when" in param and evaluate(param["when"], self.names()) == 0:
                continue
            for full, held in Param(self, name, param).at(place).items():
                need(full not in result, f"two params {full}")
                result[full] = held
        return result


class Param:
    """One declaration of a layout."""

    def __init__(self, endpoint: Endpoint, name: str, node: dict) -> None:
        self.endpoint, self.name, self.node = endpoint, name, node
        self.environment = endpoint.names()
        self.model = endpoint.model
        self.pack = {key: node[key] for key in ("holds", "concat", "interleave", "permute") if key in node}
        stack = node.get("stack")
        self.stack = stack["index"] if isinstance(stack, dict) else stack
        self.stack_dim = int(stack.get("dim", "0")) if isinstance(stack, dict) else 0
        self.variables = [match[1] for match in PLACEHOLDER.finditer(name)]

    def tensors(self, pack: object) -> list[Tensor]:
        if isinstance(pack, str):
            return [self.model.find(pack)]
        if "holds" in pack:
            return [self.model.find(pack["holds"])]
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
        """The labels of a pack for given index values: steps 1 and 2."""
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
        pieces = [np.split(a, groups, axis=d) for a in arrays]
        return np.concatenate([piece[g] for g in range(groups) for piece in pieces], axis=d)

    def shape(self, pack: object) -> list[int]:
        leaf = self.leaf(pack)
        if leaf:
            shape = self.model.find(leaf[0]).shape
            return [shape[d] for d in leaf[1]] if leaf[1] is not None else list(shape)
        kind, d, entries = self.entries(pack)
        shapes = [self.shape(entry) for entry in entries]
        return [sum(s[i] for s in shapes) if i == d else shapes[0][i] for i in range(len(shapes[0]))]

    def group_rows(self, pack: dict) -> int:
        groups = evaluate(pack["interleave"]["groups"], self.environment)
        d = self.entries(pack)[1]
        return max(1, sum(self.shape(entry)[d] // groups for entry in self.entries(pack)[2]))

    def cut(self, pack: object, d: int, n: int, rule: Rule, r: int, k: int, joined: bool, padded: bool) -> list[int]:
        """cut(pack, d, n) of step 5."""
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

    def at(self, place: int) -> dict[str, Held]:
        endpoint = self.endpoint
        tensors = self.tensors(self.pack)
        exists = {v: tensors[0].exists[v] for v in tensors[0].variables}
        for tensor in tensors:
            need(set(tensor.variables) == set(self.variables) | ({self.stack} if self.stack else set()), "variables")
            need(all(tensor.exists[v] == exists[v] for v in tensor.variables) and tensor.dtype == tensors[0].dtype, "some but not all")
        for axis, wanted in self.node.get("at", {}).items():
            size = endpoint.axes.get(axis, (1, 1))[0]
            spell = {"first": 0, "last": size - 1}
            allowed = [spell[x] if x in spell else evaluate(x, self.environment) for x in (wanted if isinstance(wanted, list) else [wanted])]
            need(all(0 <= x < size for x in allowed), "at")
            if endpoint.coordinate(place, [axis])[0] not in allowed:
                return {}
        held = {v: endpoint.values(v, place) for v in exists}
        for v in self.variables:
            need(len(set(held[v])) == len(held[v]), "a value twice in a name")
        result = {}
        for values in itertools.product(*([x for x in held[v] if x in exists[v]] for v in self.variables)):
            fixed = dict(zip(self.variables, values))
            full = PLACEHOLDER.sub(lambda m: str(sorted(held[m[1]]).index(fixed[m[1]]) if m[2] else fixed[m[1]]), self.name)
            need(full not in result, "one name twice")
            result[full] = Held(self.local(place, fixed, exists, held), tensors[0].dtype)
        return result

    def local(self, place: int, fixed: dict[str, int], exists: dict[str, list[int]], held: dict[str, list[int]]) -> np.ndarray:
        if self.stack:
            slots = [self.build(self.pack, {**fixed, self.stack: value}) for value in exists[self.stack]]
            shape = self.shape(self.pack)
            shape.insert(self.stack_dim, 0)
            whole = np.stack(slots, axis=self.stack_dim) if slots else np.zeros(shape, dtype=np.int64)
        else:
            whole = self.build(self.pack, fixed)
        padding = [(0, 0)] * whole.ndim
        for d, multiple in self.node.get("pad", {}).items():
            m = evaluate(multiple, self.environment)
            padding[int(d)] = (0, -whole.shape[int(d)] % m)
        padded = np.pad(whole, padding) if whole.ndim else whole
        positions = []
        for d in range(whole.ndim):
            inner = d - (1 if self.stack and d > self.stack_dim else 0)
            is_stack = bool(self.stack) and d == self.stack_dim
            rule_node = self.node.get("shard", {}).get(str(d))
            if is_stack and self.endpoint.placed(self.stack):
                need(rule_node is None and padding[d] == (0, 0), "a placed stack takes neither shard nor pad")
                positions.append([exists[self.stack].index(v) for v in held[self.stack] if v in exists[self.stack]])
            elif rule_node is None:
                positions.append(list(range(padded.shape[d])))
            else:
                rule = read_rule(rule_node, self.environment)
                r, k = self.endpoint.coordinate(place, rule.axes)
                if is_stack:
                    positions.append(rows_of(rule, padded.shape[d], k, r, 1))
                else:
                    positions.append(self.cut(self.pack, inner, padded.shape[d], rule, r, k, self.node.get("cut") == "joined", str(d) in self.node.get("pad", {})))
        for d, rows in enumerate(positions):
            padded = np.take(padded, np.array(rows, dtype=np.int64), axis=d)
        return padded


class Job:
    def __init__(self, path: str) -> None:
        with open(path, encoding="utf-8") as file:
            node = yaml.load(file, Loader=yaml.BaseLoader)
        self.model = Model(node["model"])
        targets = node["target"]
        self.endpoints: list[Endpoint] = []
        self.endpoints.append(Endpoint(self, node["source"], "source"))
        if isinstance(targets, list):
            self.endpoints += [Endpoint(self, target, f"target.{i}") for i, target in enumerate(targets)]
        else:
            self.endpoints.append(Endpoint(self, targets, "target"))

    def check(self) -> list[list[dict[str, Held]]]:
        """All params by endpoint and place; refuses what section 10 refuses."""
        held = [[endpoint.params(place) for place in range(endpoint.places)] for endpoint in self.endpoints]
        at_source = {label for params in held[0] for h in params.values() for label in np.unique(h.labels).tolist()}
        for endpoint in held[1:]:
            for params in endpoint:
                for h in params.values():
                    need(set(np.unique(h.labels).tolist()) - {0} <= at_source, "no source holds it")
        for tensor in self.model.tensors.values():
            size = math.prod(tensor.shape)
            if tensor.tied is None:
                labels = [label for base in tensor.base.values() for label in range(base, base + size)]
                missing = [label for label in labels if label not in at_source]
                need(not missing or len(missing) == len(labels), "the source leaves elements on no rank")
        return held
