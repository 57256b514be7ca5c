# SPDX-License-Identifier: Apache-2.0
"""What each mesh rank of a compiled layout holds, from the compiler's layout IR, and its comparison with recordings."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product as combinations
from operator import mul
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reshard.compiler import run_compiler
from reshard.errors import Error

from .checkpoint import Tensors
from .elements import Box, Constant, ElementMap, Loop, Tensor, differences, make_box, row_steps
from .patterns import Pattern as _Pattern
from .recording import Axes, RecordedParam, Recording, mesh_size

_CHUNK = 1 << 20  # positions of chunk c begin at c * _CHUNK (kModelChunkStride in ir/ir.h)
_BLOCK = re.compile(r"\[(\d+):(\d+)(?: step (\d+) x (\d+))? -> (\d+)(?: step (\d+))?\]")
_PARAM = re.compile(r'  param \$\d+ "(.*?)" (\w+)(?: storage (\w+))?(.*?) \[((?:[\d, ]|\(.*?\) \[.*?\])*)\](.*)')


def blocks_of(text: str) -> list[tuple[int, int, int]]:
    """(first logical position, number, first local position) of an index map: `[0:2 step 4 x 2 -> 0
    step 2] [9:10 -> 4]`."""
    found = []
    for begin, end, step, count, to, to_step in _BLOCK.findall(text):
        for i in range(int(count or 1)):
            found.append((int(begin) + i * int(step or 0), int(end) - int(begin), int(to) + i * int(to_step or 0)))
    return found


def _values(text: str) -> dict[int, int]:
    return {begin + i: to + i for begin, count, to in blocks_of(text) for i in range(count)}


class CompiledEndpoint:
    """One endpoint of the layout IR."""

    def __init__(self, patterns: Sequence[_Pattern]):
        self._patterns = patterns
        self._axes: dict[str, tuple[int, int]] = {}
        self._shardings: dict[str, tuple[str, list[str]]] = {}
        self._placed: dict[str, str] = {}
        self._params: list[tuple[str, list[str]]] = []

    def read(self, line: str) -> None:
        """One line of the IR."""
        if found := re.match(r"  axis (\w+) (\d+) stride (\d+)", line):
            self._axes[found[1]] = (int(found[2]), int(found[3]))
        elif found := re.match(r"  sharding #(\d+) over \((.*?)\)(?: unit \d+)? \|(.*)", line):
            self._shardings[found[1]] = (found[2], found[3].split("|"))
        elif found := re.match(r"  placement (\w+) #(\d+)", line):
            self._placed[found[1]] = found[2]
        elif line.startswith("  param $"):
            self._params.append((line, []))
        elif line.startswith("    "):
            self._params[-1][1].append(line)

    def _coordinate(self, axes: str, rank: int) -> int:
        return Axes(self._axes).coordinate(filter(None, axes.split(", ")), rank)

    def _at(self, sharding: str, rank: int) -> str:
        axes, maps = self._shardings[sharding]
        return maps[self._coordinate(axes, rank)]

    def params(self, rank: int) -> dict[str, RecordedParam | str]:
        """{name: param} of a mesh rank; in place of a param that is no plain array, the reason."""
        result: dict[str, RecordedParam | str] = {}
        for line, parts in self._params:
            found = _PARAM.match(line)
            if found is None:
                raise Error(f"unexpected line of the layout IR: {line.strip()}")
            name, dtype, storage, form, shape, rest = found.groups()
            if any(
                self._coordinate(axis, rank) not in map(int, numbers.split(", "))
                for axis, numbers in re.findall(r" at (\w+) \[([\d, ]+)\]", rest)
            ):
                continue
            variables = re.findall(r" for (\w+) #(\d+)", rest)
            transform = re.search(r' transform "(\w+)"', rest)
            lengths = tuple(
                int(even or uneven.split(", ")[self._coordinate(axes, rank)])
                for axes, uneven, even in re.findall(r"\((.*?)\) \[(.*?)\]|(\d+)", shape)
            )
            for values in combinations(*(_values(self._at(sharding, rank)) for _, sharding in variables)):
                full = {variable: value for (variable, _), value in zip(variables, values)}
                if form.strip() or transform:
                    result[self._name(name, full, rank)] = f"transform {transform[1]}" if transform else "quantized"
                else:
                    result[self._name(name, full, rank)] = self._param(storage or dtype, lengths, parts, full, rank)
        return result

    def arrays(self, rank: int) -> dict[str, RecordedParam]:
        """Those of the params of a mesh rank that are plain arrays."""
        return {name: param for name, param in self.params(rank).items() if isinstance(param, RecordedParam)}

    def _name(self, name: str, values: Mapping[str, int], rank: int) -> str:
        for variable, value in values.items():
            position = _values(self._at(self._placed[variable], rank))[value]
            for suffix, number in (("", value), (".local", position % _CHUNK), (".chunk", position // _CHUNK)):
                name = name.replace("{%s%s}" % (variable, suffix), str(number))
        return name

    def _param(
        self, dtype: str, shape: tuple[int, ...], parts: Sequence[str], values: Mapping[str, int], rank: int
    ) -> RecordedParam:
        elements = ElementMap(shape)
        for part in parts:
            dimensions = re.findall(r"#(\d+) -> (\w+)", part)
            pattern = re.match(r"    holds %(\d+)", part)
            if pattern:
                held = self._patterns[int(pattern[1])]
                into = [-1 if dimension == "name" else int(dimension) for _, dimension in dimensions]
                elements.boxes += _tensor_boxes(
                    held, self._choices(held, dimensions, values, rank), into, dtype, len(elements.frame)
                )
            else:
                where = [
                    blocks_of(self._at(sharding, rank)) for sharding, dimension in dimensions if dimension != "name"
                ]
                for blocks in combinations(*where):
                    elements.boxes.append(
                        make_box(tuple(to for _, _, to in blocks), tuple(n for _, n, _ in blocks), Constant(0.0))
                    )
        elements.merge()
        return RecordedParam(dtype, shape, elements.boxes)

    def _choices(
        self, pattern: _Pattern, dimensions: Sequence[tuple[str, str]], values: Mapping[str, int], rank: int
    ) -> list[list[tuple[int, int, int]]]:
        """The blocks of each dimension of a tensor pattern: its index variables, one value each, and the tensor's."""
        if len({dimension for _, dimension in dimensions if dimension != "name"}) < sum(
            dimension != "name" for _, dimension in dimensions
        ):
            raise Error(f"tensor {pattern.name} is in a flat buffer, which cannot be compared")
        result = []
        for index, (sharding, dimension) in enumerate(dimensions):
            if dimension == "name":
                result.append([(values[pattern.variables[index]], 1, 0)])
                continue
            blocks = blocks_of(self._at(sharding, rank))
            result.append(
                [(begin + i, 1, to + i) for begin, n, to in blocks for i in range(n)]
                if index < len(pattern.variables)
                else blocks
            )
        return result


def _tensor_boxes(
    pattern: _Pattern, choices: Sequence[Sequence[tuple[int, int, int]]], into: Sequence[int], dtype: str, count: int
) -> Iterator[Box]:
    """The boxes of a tensor pattern in a param of `count` dimensions. into: the param's dimension of each dimension of
    the pattern, -1 for a variable of the name."""
    steps, variables = row_steps(pattern.shape), pattern.variables
    casts = () if dtype == pattern.dtype else (dtype,)
    for chosen in combinations(*choices):
        start, size, step, offset, name = [0] * count, [1] * count, [0] * count, 0, pattern.name
        for index, (begin, n, to) in enumerate(chosen):
            own = index - len(variables)  # the tensor's dimension; negative for variables
            if own < 0:
                name = name.replace("{%s}" % variables[index], str(begin))
            else:
                offset += begin * steps[own]
            if into[index] >= 0:
                start[into[index]], size[into[index]], step[into[index]] = to, n, steps[own] if own >= 0 else 0
        yield make_box(tuple(start), tuple(size), Tensor(name, casts), offset, tuple(step))


@dataclass
class Compiled:
    """Both endpoints of a job from a checkpoint to a layout."""

    source: CompiledEndpoint
    target: CompiledEndpoint

    @property
    def tensors(self) -> Tensors:
        """The tensors of the checkpoint."""
        return {name: (param.dtype, param.shape) for name, param in self.source.arrays(0).items()}


def compile_layout(model: str, layout: str, mesh: str, more: str = "", source: str = "hf") -> Compiled:
    """Compiles a layout of a model. model: the path of a model file, or YAML of several lines; mesh: YAML in flow
    style; more: further keys of the endpoint; source: the layout of the checkpoint."""
    with TemporaryDirectory(prefix="reshard-") as folder:
        path = Path(folder) / "model.yaml" if "\n" in model else Path(model).resolve()
        if "\n" in model:
            path.write_text(model)
        job = Path(folder) / "job.yaml"
        job.write_text(
            f"version: 1\nmodel: {json.dumps(str(path))}\nsource: {{layout: {source}, storage: checkpoint}}\n"
            f"target: {{layout: {layout}, mesh: {mesh}{more}}}\n"
        )
        lines = run_compiler([job, "--emit=layout"]).splitlines()
    patterns: list[_Pattern] = []
    endpoints: list[CompiledEndpoint] = []
    for line in (each.split(" //")[0] for each in lines):
        if found := re.match(r'tensor %\d+ "(.*?)" (\w+) \[(.*?)\](.*)', line):
            shape = tuple(int(n) for n in found[3].split(", ")) if found[3] else ()
            patterns.append(_Pattern(found[1], tuple(re.findall(r"for (\w+) ", found[4])), found[2], shape))
        elif line.startswith("endpoint"):
            endpoints.append(CompiledEndpoint(patterns))
        elif endpoints:
            endpoints[-1].read(line)
    return Compiled(*endpoints)


def as_recordings(compiled: Compiled, mesh: Mapping[str, Any]) -> list[Recording]:
    """The recordings of a loader that does what a compiled layout states."""
    tensors = compiled.tensors
    return [Recording(rank, dict(mesh), tensors, compiled.target.arrays(rank)) for rank in range(mesh_size(mesh))]


def _through(param: RecordedParam, source: Mapping[str, RecordedParam | str]) -> RecordedParam:
    """A recorded param with the model's tensors as origins, in place of the checkpoint's params that hold them."""
    names = {box.origin.name for box in param.boxes if isinstance(box.origin, Tensor)}
    other = {
        name: held
        for name in names
        if isinstance(held := source.get(name), RecordedParam) and held.boxes != _itself(name, held)
    }
    if not other:
        return param
    result = ElementMap(param.shape)
    result.boxes = [box for box in param.boxes if not isinstance(box.origin, Tensor) or box.origin.name not in other]
    for box in param.boxes:
        if not isinstance(box.origin, Tensor) or box.origin.name not in other:
            continue
        whole = ElementMap(other[box.origin.name].shape)
        whole.boxes = other[box.origin.name].boxes
        begin = sum(map(mul, box.start, row_steps(result.frame)))
        for origin, offset, start, loops in whole.read(
            box.offset, [Loop(*each) for each in zip(box.size, box.steps, row_steps(param.shape))], begin
        ):
            if origin is not None:
                of = Tensor(origin.name, box.origin.casts) if isinstance(origin, Tensor) else origin
                result.write(start, loops, of, offset, fresh=True)
    return RecordedParam(param.dtype, param.shape, result.in_shape())


def _itself(name: str, param: RecordedParam) -> list[Box]:
    return ElementMap.filled(param.shape, Tensor(name)).in_shape()


def compare(compiled: Compiled, recordings: Sequence[Recording], ignored: Collection[str] = ()) -> list[str]:
    """The differences between a compiled layout and recordings, as lines of text. Elements that a loader does not write
    may be padding of the layout, and the layout may lack a param on a rank where it holds nothing of the checkpoint.
    ignored: params that the layout need not have at all."""
    lines = []
    source = compiled.source.params(0)
    for recording in recordings:
        target = compiled.target.params(recording.rank)
        for name in sorted({*target, *recording.params}):
            one, other = recording.params.get(name), target.get(name)
            if other is None and one is not None and (name in ignored or not one.tensors):
                continue
            lines += [
                f"rank {recording.rank}: {name}: {text}"
                for text in _param_differences(one and _through(one, source), other)
            ]
    return lines


def _param_differences(one: RecordedParam | None, other: RecordedParam | str | None) -> Iterator[str]:
    """one: recorded; other: compiled."""
    if one is None or other is None:
        yield f"only in the {'recording' if one else 'layout'}"
    elif isinstance(other, str):
        yield f"the layout states a param with {other}, which a recording cannot show"
    elif (one.dtype, one.shape) != (other.dtype, other.shape):
        yield f"the loader's param is {one.dtype} {list(one.shape)}, the layout's {other.dtype} {list(other.shape)}"
    else:
        for a, b in differences(one.boxes, other.boxes):
            box = a or b
            if box is None or (a is None and b is not None and b.origin == Constant(0.0)):
                continue
            where = ", ".join(f"{start}:{start + size}" for start, size in zip(box.start, box.size))
            yield f"elements [{where}]: the loader puts {describe(a)}, the layout {describe(b)}"


def describe(box: Box | None) -> str:
    """A box's origin in words."""
    if box is None:
        return "nothing"
    if isinstance(box.origin, Tensor):
        return f"{box.origin.name} from element {box.offset} by steps {list(box.steps)}"
    return (
        f"the constant {box.origin.value}"
        if isinstance(box.origin, Constant)
        else f"a result of {box.origin.op} of {', '.join(box.origin.tensors) or 'other values'}"
    )
