# SPDX-License-Identifier: Apache-2.0
"""Finds the sharding rule of the YAML (docs/yaml.md, section 5) that gives each rank the
positions that were recorded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reshard.compiler import run_compiler
from reshard.errors import CompileError
from reshard.flow import rule_text

from .compiled import blocks_of
from .elements import Runs, joined
from .recording import Axes


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
        rule: dict[str, Any] = {"axis": self.axes[0] if len(self.axes) == 1 else self.axes}
        if self.value is not None:
            rule[self.scheme] = self.value
        elif self.scheme != "even":
            rule["scheme"] = self.scheme
        return rule_text(
            rule | ({"unit": self.unit} if self.unit > 1 else {}) | ({"replicate": "true"} if self.replicate else {})
        )


def compiled_runs(rules: Sequence[Rule], lengths: Sequence[int], ranks: int) -> Iterator[tuple[Rule, list[list[Runs]]]]:
    """Each rule that the compiler accepts, with the positions that it gives each combined coordinate of `ranks`, of
    each of the lengths. Positions are read when they are asked for: one by one, a vocabulary takes long."""
    head = ["version: 1", "source: {layout: cut, mesh: {r: %d}}" % ranks, "target: {layout: whole, mesh: {r: 1}}"]
    head += ["model:", "  layouts: {whole: {params: same}, cut: {params: same, shard: {"]
    kept = {i: replace(rule, axes=("r",)).yaml() for i, rule in enumerate(rules)}
    while kept:
        lines = [", ".join(f"t{i}_{j}: {{0: {rule}}}" for j in range(len(lengths))) + "," for i, rule in kept.items()]
        tensors = [f"    t{i}_{j}: {{shape: [{n}], dtype: bf16}}" for i in kept for j, n in enumerate(lengths)]
        with TemporaryDirectory(prefix="reshard-") as folder:
            path = Path(folder) / "job.yaml"
            path.write_text("\n".join([*head, *lines, "  }}}", "  tensors:", *tensors, ""]))
            try:
                text = run_compiler([path, "--emit=layout"]).partition('endpoint "target"')[0]
            except CompileError as error:
                places = re.findall(rf"^{re.escape(str(path))}:(\d+):\d+: error", str(error), re.MULTILINE)
                refused = {list(kept)[int(line) - len(head) - 1] for line in places}
                if not refused:
                    raise
                kept = {i: rule for i, rule in kept.items() if i not in refused}
                continue
        maps = dict(re.findall(r"  sharding #(\d+) over .*?\| (.*)", text))
        numbers = dict(re.findall(r'  param \$\d+ "(t\d+_\d+)".*\n    holds %\d+ #(\d+)', text))
        for i in kept:
            found = [[_runs(each) for each in maps[numbers[f"t{i}_{j}"]].split("|")] for j in range(len(lengths))]
            yield rules[i], [runs if len(runs) == ranks else runs * ranks for runs in found]  # one map: of all ranks
        return


def _runs(index_map: str) -> Runs:
    return joined([(first, n) for first, n, _ in sorted(blocks_of(index_map), key=lambda block: block[2])])


def _candidates(axes: tuple[str, ...], k: int, parts: Sequence[tuple[int, Sequence[Runs]]]) -> Iterator[Rule]:
    """Rules to try for parts of (n, runs by coordinate), the most common first."""
    for scheme in ("even", "balanced", "chunk", "vllm", "sglang", "round_robin"):
        yield Rule(axes, scheme)
    different = [(n, len(set(runs))) for n, runs in parts]
    units = sorted({n // count for n, count in different if count < k and n % count == 0 and n >= count})
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
            lengths, recorded = [n for n, _ in by_coordinate], [runs for _, runs in by_coordinate]
            for rule, given in compiled_runs(list(_candidates(names, k, by_coordinate)), lengths, k):
                if given == recorded:
                    return rule
    return None
