# SPDX-License-Identifier: Apache-2.0
"""The params of each mesh rank of each endpoint of a job, parsed from the layout IR (--emit=layout)."""

import itertools
import re
import subprocess
from functools import lru_cache
from pathlib import Path

CHUNK = 1 << 20  # positions of chunk c begin at c * CHUNK (kModelChunkStride in ir/ir.h)
TRANSFORM_DTYPES = {"neg_exp": "fp32", "minus_one": "bf16"}


@lru_cache
def index_map(text):
    """{from: to} of an index map of the IR: `[0:2 step 4 x 2 -> 0 step 2] [9:10 -> 4]`. The
    caller must not change it."""
    values = {}
    for begin, end, step, count, to, to_step in re.findall(
        r"\[(\d+):(\d+)(?: step (\d+) x (\d+))? -> (\d+)(?: step (\d+))?\]", text
    ):
        for i in range(int(count or 1)):
            for j in range(int(end) - int(begin)):
                values[int(begin) + i * int(step or 0) + j] = int(to) + i * int(to_step or 0) + j
    return values


class Endpoint:
    """An endpoint of the IR: axes, shardings, placement, and the lines of its params."""

    def __init__(self, role):
        self.role, self.axes, self.shardings, self.placed, self.lines = role, {}, {}, {}, []

    def coordinate(self, axes, mesh_rank):
        """The combined coordinate over axes (outermost first)."""
        result = 0
        for axis in filter(None, axes.split(", ")):
            size, stride = self.axes[axis]
            result = result * size + mesh_rank // stride % size
        return result

    def at(self, sharding, mesh_rank):
        axes, lists = self.shardings[sharding]
        return index_map(lists[self.coordinate(axes, mesh_rank)])  # most shardings, as of rows, are never asked for

    def params(self, mesh_rank):
        """{name: (shape, dtype)} on a mesh rank. The dtype is that in memory; with a transform, that which its hook
        produces."""
        result = {}
        for name, shape, dtype, _ in self.instances(mesh_rank):
            assert name not in result, name
            result[name] = (shape, dtype)
        return result

    def instances(self, mesh_rank):
        """(name, shape, dtype, {variable: value}) of each param instance on a mesh rank."""
        for line in self.lines:
            name, dtype, stored, shape, rest = re.match(
                r'  param \$\d+ "(.*?)" (\w+)(?: storage (\w+))? \[((?:[\d, ]|\(.*?\) \[.*?\])*)\](.*)', line
            ).groups()
            if any(
                self.coordinate(axis, mesh_rank) not in map(int, numbers.split(", "))
                for axis, numbers in re.findall(r" at (\w+) \[([\d, ]+)\]", rest)
            ):
                continue
            transformed = (
                TRANSFORM_DTYPES[transform[1]] if (transform := re.search(r' transform "(\w+)"', rest)) else None
            )
            lengths = []
            for axes, uneven, even in re.findall(r"\((.*?)\) \[(.*?)\]|(\d+)", shape):
                lengths.append(int(even or uneven.split(", ")[self.coordinate(axes, mesh_rank)]))
            variables = re.findall(r" for (\w+) #(\d+)", rest)
            for values in itertools.product(*(self.at(sharding, mesh_rank) for _, sharding in variables)):
                full = name
                for (variable, _), value in zip(variables, values):
                    position = self.at(self.placed[variable], mesh_rank)[value]
                    for suffix, number in (("", value), (".local", position % CHUNK), (".chunk", position // CHUNK)):
                        full = full.replace("{%s%s}" % (variable, suffix), str(number))
                yield (
                    full,
                    lengths,
                    transformed or stored or dtype,
                    {variable: value for (variable, _), value in zip(variables, values)},
                )


def endpoints(binaries, job, folder, sets=()):
    """{role: Endpoint} of a job's text; `sets`: overrides."""
    path = Path(folder) / "job.yaml"
    path.write_text(job)
    command = [binaries / "reshard-compile", path, "--emit=layout", *(f"--set={each}" for each in sets)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result, last = {}, None
    for line in done.stdout.splitlines():
        line = line.split(" //")[0]
        if line.startswith("endpoint"):
            last = Endpoint(re.match(r'endpoint "(.*?)"', line)[1])
            result[last.role] = last
        elif last and (found := re.match(r"  axis (\w+) (\d+) stride (\d+)", line)):
            last.axes[found[1]] = (int(found[2]), int(found[3]))
        elif last and (found := re.match(r"  sharding #(\d+) over \((.*?)\)(?: unit \d+)? \|(.*)", line)):
            last.shardings[found[1]] = (found[2], found[3].split("|"))
        elif last and (found := re.match(r"  placement (\w+) #(\d+)", line)):
            last.placed[found[1]] = found[2]
        elif last and line.startswith("  param $"):
            last.lines.append(line)
    return result
