# SPDX-License-Identifier: Apache-2.0
"""Part of the oracle: expressions, schemes and pipelines, that is, which rank holds which of n units (docs/yaml.md,
sections 4 and 5)."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass


class Refused(Exception):
    """The job violates a rule of docs/yaml.md."""


def need(condition: bool, why: str) -> None:
    if not condition:
        raise Refused(why)


def evaluate(text: str, names: dict[str, int]) -> int:
    """The value of an expression (section 4)."""

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
                return int(all(value(x) != 0 for x in xs))
            case ast.BoolOp(op=ast.Or(), values=xs):
                return int(any(value(x) != 0 for x in xs))
            case ast.Compare(left=a, ops=[op], comparators=[b]):
                x, y = value(a), value(b)
                return int(
                    {ast.Eq: x == y, ast.NotEq: x != y, ast.Lt: x < y, ast.LtE: x <= y, ast.Gt: x > y, ast.GtE: x >= y}[
                        type(op)
                    ]
                )
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
    """The units that rank r of k holds, in local order (the table of section 5)."""
    everything = list(range(n))
    if rule.replicate and k > n > 0:
        need(k % n == 0, f"{n} units do not divide {k} ranks")
        return [r * n // k]
    match rule.scheme:
        case "even":
            need(n % k == 0, f"{k} does not divide {n}")
            return everything[r * (n // k) : (r + 1) * (n // k)]
        case "chunk":
            c = math.ceil(n / k)
            return everything[r * c : (r + 1) * c]
        case "balanced":
            lengths = [n // k + (1 if i < n % k else 0) for i in range(k)]
            return everything[sum(lengths[:r]) : sum(lengths[: r + 1])]
        case "vllm" | "sglang":
            lengths = [n // k for _ in range(k)]
            for i in range(1, n % k + 1):
                lengths[-i - (rule.scheme == "vllm")] += 1
            return everything[sum(lengths[:r]) : sum(lengths[: r + 1])]
        case "round_robin":
            return everything[r::k]
        case "sizes":
            need(len(rule.argument) == k and sum(rule.argument) == n and min(rule.argument) >= 0, "sizes")
            return everything[sum(rule.argument[:r]) : sum(rule.argument[: r + 1])]
        case "stride":
            s = rule.argument
            need(s >= 1 and n % (k * s) == 0, "stride")
            length = n // (k * s)
            blocks = [everything[i * length : (i + 1) * length] for i in range(k * s)]
            return [x for block in blocks[r::k] for x in block]
        case "cyclic":
            blocks = [everything[i : i + rule.argument] for i in range(0, n, rule.argument)]
            return [x for block in blocks[r::k] for x in block]
        case "blocks":
            need(sum(rule.argument) == n, "blocks")
            held, start = [], 0
            for length in rule.argument:
                need(length % k == 0, "blocks")
                held += everything[start : start + length][r * (length // k) : (r + 1) * (length // k)]
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


# ----------------------------------------------------------------------------------------------------------- pipelines


def expand(stages: str) -> str:
    """Expands the repetitions of a pipeline-layout string: groups from the innermost outwards, then letters."""
    text = stages.replace(",", "").replace(" ", "")
    while "(" in text:
        text = re.sub(r"\(([^()]*)\)(?:\*(\d+))?", lambda m: m[1] * int(m[2] or 1), text)
    return re.sub(r"([^*])\*(\d+)", lambda m: m[1] * int(m[2]), text)


def stage_sizes(node: dict, n: int, k: int, v: int, names: dict[str, int]) -> list[int] | None:
    """The number of values of each of the k·v virtual ranks, for rules with `embedding`, `loss`, `first` or `last`;
    else None."""
    number = lambda key: evaluate(node[key], names) if key in node else 0
    if "embedding" in node or "loss" in node:
        total = n + number("embedding") + number("loss")
        need(total % (k * v) == 0, "embedding and loss")
        sizes = [total // (k * v)] * (k * v)
        sizes[0] -= number("embedding")
        sizes[-1] -= number("loss")
        return sizes
    if "first" in node or "last" in node:
        need(k > 1, "one rank")
        ranks: list[int | None] = [None] * k
        if "first" in node:
            ranks[0] = number("first")
        if "last" in node:
            ranks[-1] = number("last")
        rest, others = n - sum(x for x in ranks if x is not None), sum(x is None for x in ranks)
        need(rest == 0 if others == 0 else rest >= 0 and rest % others == 0, "first and last")
        whole = [rest // others if x is None else x for x in ranks]
        need(all(x % v == 0 for x in whole), "interleave")
        return [x // v for x in whole] * v
    return None


def chunks_of(node: object, n: int, k: int, r: int, names: dict[str, int]) -> list[list[int]]:
    """The values of rank r of k, by chunk, each in local order."""
    if not isinstance(node, dict):
        return [rows_of(read_rule(node, names), n, k, r, 1)]
    sizes, v = None, evaluate(node["interleave"], names) if "interleave" in node else 1
    need(v >= 1, "interleave")
    if "stages" in node:
        sizes = [stage.count(node.get("count", "t")) for stage in expand(node["stages"]).split("|")]
    elif "pattern" in node:
        sizes = [len(stage) for stage in node["pattern"].split("/")[0].replace(" ", "").split("|")]
    if sizes is not None:
        need(len(sizes) % k == 0, "stages")
        v = len(sizes) // k
    else:
        sizes = stage_sizes(node, n, k, v, names)
    if sizes is not None:
        need(sum(sizes) == n and min(sizes) >= 0, "sizes of stages")
        starts = [sum(sizes[:j]) for j in range(k * v)]
        return [list(range(starts[j], starts[j] + sizes[j])) for j in range(r, k * v, k)]
    rule = read_rule(node, names)
    return [rows_of(rule, n, k * v, j, 1) for j in range(r, k * v, k)]
