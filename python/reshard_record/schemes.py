# SPDX-License-Identifier: Apache-2.0
"""Finds the sharding rule of the YAML (docs/yaml.md, section 5) that gives each rank the
positions that were recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from reshard.errors import Error

from .elements import product

Run = tuple[int, int]  # first position, number of positions
Runs = tuple[Run, ...]  # in local order


def joined(runs: Sequence[Run]) -> Runs:
    """The runs without empty ones; runs that continue each other are one."""
    result: list[Run] = []
    for start, count in runs:
        if count and result and sum(result[-1]) == start:
            result[-1] = (result[-1][0], result[-1][1] + count)
        elif count:
            result.append((start, count))
    return tuple(result)


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh, views included: {name: (size, stride)}."""

    axes: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, mesh: Mapping[str, Any]) -> Axes:
        """The axes of a mesh as in the YAML. The first axis varies fastest."""
        found: dict[str, tuple[int, int]] = {}
        size = product([n for axis, n in mesh.items() if axis != "views"])
        for view in ({axis: n for axis, n in mesh.items() if axis != "views"}, *mesh.get("views", ())):
            stride = 1
            for axis, n in view.items():
                if found.setdefault(axis, (n, stride)) != (n, stride):
                    raise Error(f"mesh {dict(mesh)}: axis {axis} differs between two views")
                stride *= n
            if stride != size:
                raise Error(f"mesh {dict(mesh)}: view {view} has {stride} mesh ranks, expected {size}")
        return cls(found)

    def size(self, names: Sequence[str]) -> int:
        return product([self.axes[name][0] for name in names])

    def coordinate(self, names: Sequence[str], rank: int) -> int:
        """The combined coordinate of a mesh rank over axes, outermost first."""
        result = 0
        for name in names:
            size, stride = self.axes[name]
            result = result * size + rank // stride % size
        return result

    def choices(self) -> Iterator[tuple[str, ...]]:
        """Axes of more than one rank, and their ordered pairs, without pairs that overlap in other views."""
        names = [name for name, (size, _) in self.axes.items() if size > 1]
        yield from ((name,) for name in names)
        for pair in permutations(names, 2):
            (size, stride), (other_size, other_stride) = (self.axes[name] for name in pair)
            if stride * size <= other_stride or other_stride * other_size <= stride:
                yield pair


@dataclass(frozen=True)
class Rule:
    """A rule of `shard` or `place`."""

    axes: tuple[str, ...]
    scheme: str = "even"
    value: Any = None  #: of a scheme with a value, as `sizes`
    unit: int = 1
    replicate: bool = False

    def yaml(self) -> str:
        """The rule as YAML in flow style."""
        axis = self.axes[0] if len(self.axes) == 1 else f"[{', '.join(self.axes)}]"
        if self == Rule(self.axes):
            return axis
        value = (
            f", {self.scheme}: {self.value}"
            if self.value is not None
            else ""
            if self.scheme == "even"
            else f", scheme: {self.scheme}"
        )
        return (
            "{axis: "
            + axis
            + value
            + (f", unit: {self.unit}" if self.unit > 1 else "")
            + (", replicate: true" if self.replicate else "")
            + "}"
        )

    def runs(self, n: int, ranks: int) -> list[Runs] | None:
        """The positions of each combined coordinate of `ranks`, for n positions; None if the rule does not apply."""
        units = -(-n // self.unit)
        if self.replicate and ranks > units > 0:
            if ranks % units:
                return None
            found: list[Sequence[Run]] | None = [[(r * units // ranks, 1)] for r in range(ranks)]
        else:
            found = _units(self.scheme, self.value, units, ranks)
        if found is None:
            return None
        return [
            joined([(a * self.unit, min((a + c) * self.unit, n) - a * self.unit) for a, c in each]) for each in found
        ]


def _units(scheme: str, value: Any, n: int, k: int) -> list[Sequence[Run]] | None:
    """Section 5: the units of each of k ranks, of n."""
    q, m = divmod(n, k)
    if scheme == "even":
        return [[(r * q, q)] for r in range(k)] if m == 0 else None
    if scheme == "chunk":
        c = -(-n // k)
        return [[(min(r * c, n), min((r + 1) * c, n) - min(r * c, n))] for r in range(k)]
    if scheme == "balanced":
        return [[(r * q + min(r, m), q + (r < m))] for r in range(k)]
    if scheme == "vllm":
        return [[(r * q + min(max(r - (k - 1 - m), 0), m), q + (k - 1 - m <= r < k - 1))] for r in range(k)]
    if scheme == "sglang":
        return [[(r * q + max(r - (k - m), 0), q + (r >= k - m))] for r in range(k)]
    if scheme == "round_robin":
        return [[(i, 1) for i in range(r, n, k)] for r in range(k)]
    if scheme == "sizes":
        return [[(sum(value[:r]), value[r])] for r in range(k)] if len(value) == k and sum(value) == n else None
    if scheme == "stride":
        length, rest = divmod(n, k * value)
        return [[((i * k + r) * length, length) for i in range(value)] for r in range(k)] if rest == 0 else None
    if scheme == "blocks":
        if sum(value) != n or any(length % k for length in value):
            return None
        return [[(sum(value[:i]) + r * length // k, length // k) for i, length in enumerate(value)] for r in range(k)]
    raise ValueError(scheme)


def _candidates(axes: tuple[str, ...], k: int, parts: Sequence[tuple[int, Sequence[Runs]]]) -> Iterator[Rule]:
    """Rules to try for parts of (n, runs by coordinate), the most common first."""
    for scheme in ("even", "balanced", "chunk", "vllm", "sglang", "round_robin"):
        yield Rule(axes, scheme)
    units = sorted(
        {
            n // len(set(runs))
            for n, runs in parts
            if len(set(runs)) < k and n % len(set(runs)) == 0 and n >= len(set(runs))
        }
    )
    for unit in units:
        for scheme in ("even", "balanced", "chunk"):
            yield Rule(axes, scheme, unit=unit, replicate=True)
    counts = {len(each) for _, runs in parts for each in runs}
    for count in sorted(counts - {0, 1}):
        if all(n % (k * count) == 0 for n, _ in parts):
            yield Rule(axes, "stride", count)
    if len(parts) == 1:
        ((_, runs),) = parts
        yield Rule(axes, "sizes", [sum(count for _, count in each) for each in runs])
        if len(counts) == 1:
            yield Rule(axes, "blocks", [k * count for _, count in runs[0]])


def find_rule(axes: Axes, parts: Sequence[tuple[int, Mapping[int, Runs]]]) -> Rule | None:
    """The rule that gives each mesh rank its runs, for all parts: (n, {mesh rank: runs}). None if no rule does."""
    for names in axes.choices():
        k = axes.size(names)
        by_coordinate = []
        for n, runs in parts:
            found: dict[int, Runs] = {}
            if (
                any(found.setdefault(axes.coordinate(names, rank), each) != each for rank, each in runs.items())
                or len(found) != k
            ):
                break
            by_coordinate.append((n, [found[r] for r in range(k)]))
        else:
            for rule in _candidates(names, k, by_coordinate):
                if all(rule.runs(n, k) == runs for n, runs in by_coordinate):
                    return rule
    return None
