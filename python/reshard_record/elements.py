# SPDX-License-Identifier: Apache-2.0
"""Element maps: for each element of an array, where its value is from. Only index arithmetic; no arrays are allocated.

An array is a row of elements that a *frame* divides into dimensions. The map is a list of boxes of that frame that do
not overlap. Each box states an origin and, for each dimension, the step in the origin's elements. Views with other
dimensions are expressed by splitting frame dimensions, which divides boxes but changes no element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any, ClassVar

from reshard.errors import Error

#: A loop of a view whose step fits no dimension is divided into single positions, at most this many.
UNROLL = 65536
#: Boxes of one element map. More are refused, since the time to intersect them grows with their square.
BOXES = 200_000


@dataclass(frozen=True)
class Tensor:
    """Elements of a tensor of the checkpoint. casts: the dtypes to which the values were converted, in order."""

    name: str
    casts: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class Constant:
    """Elements that were filled with one value."""

    value: float

    tensors: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Computed:
    """Elements that an operation computed from these tensors of the checkpoint."""

    op: str
    tensors: tuple[str, ...] = ()


Origin = Any  # Tensor, Constant or Computed; each has the names of its tensors
Run = tuple[int, int]  # first position, number of positions
Runs = tuple[Run, ...]  # in local order


@dataclass(frozen=True)
class Loop:
    """One loop of a copy: `count` positions, at a step in this array and a step in the other one."""

    count: int
    step: int
    other: int = 0


@dataclass(frozen=True)
class Box:
    """Positions start[d] … start[d]+size[d]-1 of each frame dimension d. The element at start is element `offset` of
    the origin; one position further along d is `steps[d]` elements further. A step is 0 where it has no meaning: along
    a dimension of one position, and for origins other than tensors."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    origin: Origin
    offset: int = 0
    steps: tuple[int, ...] = ()

    def elements(self) -> int:
        return product(self.size)

    def part(self, dimension: int, start: int, size: int) -> Box:
        """The box with another interval, inside its own, along one dimension."""
        offset = self.offset + (start - self.start[dimension]) * self.steps[dimension]
        starts, sizes = _set(self.start, dimension, start), _set(self.size, dimension, size)
        return make_box(starts, sizes, self.origin, offset, self.steps)

    def without(self, dimension: int | None) -> Box:
        """The box without a dimension, of which it has one position."""
        start, size, steps = (without(values, dimension) for values in (self.start, self.size, self.steps))
        return Box(start, size, self.origin, self.offset, steps)


def product(numbers: Sequence[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def joined(runs: Sequence[Run]) -> Runs:
    """The runs without empty ones; runs that continue each other are one."""
    result: list[Run] = []
    for start, count in runs:
        if count and result and sum(result[-1]) == start:
            result[-1] = (result[-1][0], result[-1][1] + count)
        elif count:
            result.append((start, count))
    return tuple(result)


def row_steps(shape: Sequence[int]) -> tuple[int, ...]:
    """The steps of a row-major array of this shape."""
    return tuple(accumulate([1, *reversed(shape[1:])], mul))[::-1] if shape else ()


def without(values: Sequence[int], dimension: int | None) -> tuple[int, ...]:
    """The values of all dimensions but one. None: of all."""
    return tuple(value for d, value in enumerate(values) if d != dimension)


def _set(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def make_box(
    start: tuple[int, ...], size: tuple[int, ...], origin: Origin, offset: int = 0, steps: tuple[int, ...] = ()
) -> Box:
    """A box, with 0 for the offset and the steps that have no meaning."""
    if not isinstance(origin, Tensor):
        return Box(start, size, origin, 0, (0,) * len(size))
    return Box(start, size, origin, offset, tuple(0 if n == 1 else step for n, step in zip(size, steps)))


def intersection(a: Box, b: Box) -> Box | None:
    """The part of `a` that lies in `b`."""
    for dimension in range(len(a.size)):
        start = max(a.start[dimension], b.start[dimension])
        end = min(a.start[dimension] + a.size[dimension], b.start[dimension] + b.size[dimension])
        if start >= end:
            return None
    for dimension in range(len(a.size)):
        start = max(a.start[dimension], b.start[dimension])
        end = min(a.start[dimension] + a.size[dimension], b.start[dimension] + b.size[dimension])
        if (start, end - start) != (a.start[dimension], a.size[dimension]):
            a = a.part(dimension, start, end - start)
    return a


def difference(a: Box, b: Box) -> list[Box]:
    """The parts of `a` that do not lie in `b`."""
    if intersection(a, b) is None:
        return [a]
    result = []
    for dimension in range(len(a.size)):
        start, end = a.start[dimension], a.start[dimension] + a.size[dimension]
        inner_start, inner_end = max(start, b.start[dimension]), min(end, b.start[dimension] + b.size[dimension])
        if start < inner_start:
            result.append(a.part(dimension, start, inner_start - start))
        if inner_end < end:
            result.append(a.part(dimension, inner_end, end - inner_end))
        a = a.part(dimension, inner_start, inner_end - inner_start)
    return result


@dataclass(frozen=True)
class _Aligned:
    """A part of a view that is one box of the frame: the first position of each dimension, the loop of each dimension
    (None: one position), loops that stay on one position, and the offset in the other array."""

    start: tuple[int, ...]
    loops: tuple[Loop | None, ...]
    repeated: tuple[Loop, ...]
    other: int

    def region(self) -> Box:
        return Box(
            self.start, tuple(loop.count if loop else 1 for loop in self.loops), Constant(0), 0, (0,) * len(self.start)
        )


class ElementMap:
    """The origins of the elements of a row-major array. Elements in no box are *unwritten*."""

    def __init__(self, shape: Sequence[int]):
        self.shape = tuple(shape)  #: of the array
        #: the dimensions in which the boxes are stated; their product is that of the shape
        self.frame = list(shape) or [1]
        self.boxes: list[Box] = []

    @classmethod
    def filled(cls, shape: Sequence[int], origin: Origin) -> ElementMap:
        """The map of an array that has one origin: the whole tensor in its own order, or one constant."""
        result = cls(shape)
        if product(result.frame):
            result.boxes = [make_box((0,) * len(result.frame), tuple(result.frame), origin, 0, row_steps(result.frame))]
        return result

    def split(self, dimension: int, inner: int) -> None:
        """Splits a frame dimension of n positions into two, of n / inner and of inner positions."""
        if self.frame[dimension] % inner:
            raise ValueError(f"{inner} does not divide {self.frame[dimension]}")
        self.frame[dimension : dimension + 1] = [self.frame[dimension] // inner, inner]
        self.boxes = [part for box in self.boxes for part in _split_box(box, dimension, inner)]

    def _fit(self, loops: Sequence[Loop]) -> list[Loop]:
        """Splits frame dimensions until each loop has the step of a dimension. Loops for which that is impossible are
        returned: they must be unrolled."""
        unfit = []
        for loop in loops:
            if loop.count == 1 or loop.step == 0:
                continue
            steps = row_steps(self.frame)
            dimension = next((d for d, step in enumerate(steps) if step <= loop.step and self.frame[d] > 1), None)
            if dimension is None or loop.step % steps[dimension]:
                unfit.append(loop)
                continue
            inner = loop.step // steps[dimension]
            if inner == 1:
                continue
            if self.frame[dimension] % inner:
                unfit.append(loop)
            else:
                self.split(dimension, inner)
        return unfit

    def _align(self, offset: int, other: int, loops: Sequence[Loop]) -> Iterator[_Aligned]:
        """Divides a view into boxes of the frame."""
        loops = [loop for loop in loops if loop.count != 1]
        if any(loop.count == 0 for loop in loops):
            return
        for loop in self._fit(loops):
            rest = [each for each in loops if each is not loop]
            if loop.count > UNROLL:
                raise Error(
                    f"a view with {loop.count} positions at step {loop.step} does not fit an "
                    f"array of shape {list(self.shape)}"
                )
            for i in range(loop.count):
                yield from list(self._align(offset + i * loop.step, other + i * loop.other, rest))
            return
        yield from self._carry(offset, other, loops)

    def _carry(self, offset: int, other: int, loops: Sequence[Loop]) -> Iterator[_Aligned]:
        """As _align, for loops that have the steps of dimensions: divides those that continue in the next row."""
        loops = [loop for loop in loops if loop.count != 1]
        steps = row_steps(self.frame)
        start = tuple(offset // step % n for step, n in zip(steps, self.frame))
        found: list[Loop | None] = [None] * len(steps)
        repeated = []
        for loop in sorted(loops, key=lambda each: each.step):
            if loop.step == 0:
                repeated.append(loop)
                continue
            dimension = max(d for d, step in enumerate(steps) if step == loop.step and self.frame[d] > 1)
            room = self.frame[dimension] - start[dimension]
            if loop.count <= room and found[dimension] is None:
                found[dimension] = loop
                continue
            if found[dimension] is not None:
                raise Error(f"a view of an array of shape {list(self.shape)} has two loops with step {loop.step}")
            rest = [each for each in loops if each is not loop]
            for first, more in _rows(loop, start[dimension], self.frame[dimension]):
                yield from self._carry(offset + first * loop.step, other + first * loop.other, [*rest, *more])
            return
        yield _Aligned(start, tuple(found), tuple(repeated), other)

    def write(
        self, offset: int, loops: Sequence[Loop], origin: Origin | None, origin_offset: int = 0, *, fresh: bool = False
    ) -> None:
        """Replaces the elements of a view. `loops`: its loops, with the steps in the origin as `other`. None: the
        elements are unwritten afterwards. fresh: they are unwritten before, which saves a search for them."""
        if any(loop.count > 1 and loop.step == 0 for loop in loops):
            raise Error(f"several values are written to one element of an array of shape {list(self.shape)}")
        for part in list(self._align(offset, origin_offset, loops)):
            region = part.region()
            if not fresh:
                self.boxes = [rest for box in self.boxes for rest in difference(box, region)]
            if origin is not None:
                steps = tuple(loop.other if loop else 0 for loop in part.loops)
                self.boxes.append(make_box(region.start, region.size, origin, part.other, steps))
            if len(self.boxes) > BOXES:
                raise Error(f"an array of shape {list(self.shape)} consists of more than {BOXES} boxes")

    def read(
        self, offset: int, loops: Sequence[Loop], other: int = 0
    ) -> Iterator[tuple[Origin | None, int, int, list[Loop]]]:
        """Yields the origins of a view's elements: (origin, offset in the origin, offset in the other array, loops with
        `step` in the other array and `other` in the origin). The origin is None where elements are unwritten."""
        for part in list(self._align(offset, other, loops)):
            region = part.region()
            found = [common for box in self.boxes if (common := intersection(box, region)) is not None]
            for common in found:
                yield (common.origin, common.offset, *_other_side(part, common))
            missing = [region] if sum(common.elements() for common in found) < region.elements() else []
            for common in found if missing else ():
                missing = [rest for each in missing for rest in difference(each, common)]
            for rest in missing:
                yield (None, 0, *_other_side(part, rest))

    def view(self, shape: Sequence[int], steps: Sequence[int], offset: int) -> ElementMap:
        """The map of a view of the array, as an array of its own."""
        result = ElementMap(shape)
        for origin, origin_offset, start, loops in self.read(
            offset, [Loop(n, *each) for n, each in zip(shape, zip(steps, row_steps(shape)))]
        ):
            if origin is not None:
                result.write(start, loops, origin, origin_offset, fresh=True)
        result.merge()
        return result

    def unwritten(self) -> int:
        """The number of unwritten elements."""
        return product(self.frame) - sum(box.elements() for box in self.boxes)

    def merge(self) -> None:
        """Joins boxes that continue each other, and sorts them."""
        for dimension in reversed(range(len(self.frame))):
            self.boxes.sort(key=lambda box: (_set(box.start, dimension, 0), box.start[dimension]))
            merged: list[Box] = []
            for box in self.boxes:
                joined = merged and _join(merged[-1], box, dimension)
                if joined:
                    merged[-1] = joined
                else:
                    merged.append(box)
            self.boxes = merged
        self.boxes.sort(key=lambda box: box.start)

    def in_shape(self) -> list[Box]:
        """The boxes in the dimensions of the array's shape. A box of the frame that is several boxes of the shape is
        divided."""
        result = ElementMap(self.shape)
        for box in self.boxes:
            steps = row_steps(self.frame)
            loops = [Loop(n, step, other) for n, step, other in zip(box.size, steps, box.steps)]
            _write_whole(result, sum(map(mul, box.start, steps)), loops, box)
        result.merge()
        return result.boxes


def _write_whole(target: ElementMap, offset: int, loops: list[Loop], box: Box) -> None:
    """Writes a box to a map whose frame must not be split: a loop inside a dimension is unrolled."""
    steps = row_steps(target.frame)
    loops = sorted(loops, key=lambda each: each.step)
    for loop in loops:
        if loop.count > 1 and loop.step not in [step for step, n in zip(steps, target.frame) if n > 1]:
            break
    else:
        target.write(offset, loops, box.origin, box.offset, fresh=True)
        return
    inside = next(d for d, step in enumerate(steps) if step <= loop.step and target.frame[d] > 1)
    rest = [each for each in loops if each is not loop]
    inner = next((each for each in rest if each.count > 1 and each.step == steps[inside]), None)
    if (
        inner and inner.count * inner.step == loop.step and inner.count * inner.other == loop.other
    ):  # they continue each other
        joined = Loop(inner.count * loop.count, inner.step, inner.other)
        _write_whole(target, offset, [*(each for each in rest if each is not inner), joined], box)
        return
    if loop.count > UNROLL:
        raise Error(f"an array of shape {list(target.shape)} is filled in {loop.count} parts at step {loop.step}")
    for i in range(loop.count):
        _write_whole(target, offset + i * loop.step, rest, replace(box, offset=box.offset + i * loop.other))


def _split_box(box: Box, dimension: int, inner: int) -> Iterator[Box]:
    """The parts of a box after its dimension was split into rows of `inner` positions."""
    loop = Loop(box.size[dimension], 1, box.steps[dimension])
    for first, loops in _rows(loop, box.start[dimension] % inner, inner):
        row, column = divmod(box.start[dimension] + first, inner)
        counts = [1, 1]
        steps = [0, 0]
        for each in loops:
            counts[each.step == 1], steps[each.step == 1] = each.count, each.other
        start = (*box.start[:dimension], row, column, *box.start[dimension + 1 :])
        size = (*box.size[:dimension], *counts, *box.size[dimension + 1 :])
        every = (*box.steps[:dimension], *steps, *box.steps[dimension + 1 :])
        yield make_box(start, size, box.origin, box.offset + first * loop.other, every)


def _rows(loop: Loop, start: int, length: int) -> Iterator[tuple[int, list[Loop]]]:
    """Divides a loop that begins at position `start` of a row of `length` positions, where it continues in later rows:
    the rest of the first row, whole rows, the begin of the last. Yields (first position of the loop, loops)."""
    position = min(length - start, loop.count) if start or loop.count < length else 0
    if position:
        yield 0, [replace(loop, count=position)]
    rows = (loop.count - position) // length
    if rows:
        yield position, [Loop(rows, loop.step * length, loop.other * length), replace(loop, count=length)]
    position += rows * length
    if position < loop.count:
        yield position, [replace(loop, count=loop.count - position)]


def _other_side(part: _Aligned, box: Box) -> tuple[int, list[Loop]]:
    """The offset and the loops in the other array of a view's part, for a box inside the part."""
    offset, loops = part.other, []
    for dimension, loop in enumerate(part.loops):
        if loop:
            offset += (box.start[dimension] - part.start[dimension]) * loop.other
            loops.append(Loop(box.size[dimension], loop.other, box.steps[dimension]))
    return offset, loops + [Loop(loop.count, loop.other, 0) for loop in part.repeated]


def _join(a: Box, b: Box, dimension: int) -> Box | None:
    """The union of two boxes, if b continues a along the dimension."""
    if a.origin != b.origin or a.start[dimension] + a.size[dimension] != b.start[dimension]:
        return None
    for d in range(len(a.size)):
        if d != dimension and (a.start[d], a.size[d], a.steps[d]) != (b.start[d], b.size[d], b.steps[d]):
            return None
    step = 0
    if isinstance(a.origin, Tensor):
        step, rest = divmod(b.offset - a.offset, a.size[dimension])
        if rest or any(box.size[dimension] > 1 and box.steps[dimension] != step for box in (a, b)):
            return None
    return replace(
        a, size=_set(a.size, dimension, a.size[dimension] + b.size[dimension]), steps=_set(a.steps, dimension, step)
    )


def differences(a: Sequence[Box], b: Sequence[Box]) -> Iterator[tuple[Box | None, Box | None]]:
    """Yields (box of a, box of b) for parts in which the origins of two lists of boxes, in one frame, differ. None:
    unwritten."""
    same = {*a} & {*b}  # most are, and the rest takes the product of both lists
    a, b = [box for box in a if box not in same], [box for box in b if box not in same]
    missing = list(b)
    for box in a:
        rest = [box]
        for other in b:
            common = intersection(box, other)
            if common is None:
                continue
            rest = [each for part in rest for each in difference(part, common)]
            missing = [each for part in missing for each in difference(part, common)]
            there = intersection(other, common)
            if common != there:
                yield common, there
        for part in rest:
            yield part, None
    for part in missing:
        yield None, part
