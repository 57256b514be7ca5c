# SPDX-License-Identifier: Apache-2.0
"""Infers how one param is made of tensors, from what each mesh rank holds: a stack, a pack, and the sharding of each
dimension. An inference is a proposal; the compiler's result is compared with the recording afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reshard.dtypes import DTYPES

from .elements import Box, Constant, Runs, Tensor, joined, product, row_steps
from .patterns import Member, Pattern
from .recording import _WIDER, Axes, RecordedParam
from .schemes import Rule, find_rule

#: Multiples to try for padding, after which the padded length itself is stated.
_MULTIPLES = (64, 128, 256, 512, 32, 16, 8)


class Refused(Exception):
    """The grammar, or this inference, cannot state what was recorded."""


@dataclass(frozen=True)
class Part:
    """A box of one tensor pattern in a param: the interval of each param dimension, and the
    tensor's positions there."""

    pattern: Pattern
    start: tuple[int, ...]
    size: tuple[int, ...]
    runs: tuple[Runs, ...]


@dataclass
class Held:
    """What a mesh rank holds of a param: its shape without the stack's dimension, and its parts."""

    shape: tuple[int, ...]
    parts: list[Part]
    slots: list[int] = field(default_factory=list)  #: values of the stacked variable, by slot

    def used(self, dimension: int) -> int:
        """The length of a dimension without padding."""
        return max((part.start[dimension] + part.size[dimension] for part in self.parts), default=0)


@dataclass
class Structure:
    """How a param is made of tensors, as keys of the YAML in flow style."""

    keys: dict[str, str]
    stack: int | None  #: the dimension of the stack
    held: dict[int, Held]  #: by mesh rank


def shown(positions: Mapping[int, Runs]) -> str:
    """The positions of mesh ranks, for a message."""
    return ", ".join(f"rank {rank} {[f'{a}:{a + c}' for a, c in runs]}" for rank, runs in positions.items())


def _sliced(param: RecordedParam, dimension: int, position: int) -> list[Box]:
    """The boxes at one position of a dimension, without that dimension."""
    found = []
    for box in param.boxes:
        if box.start[dimension] <= position < box.start[dimension] + box.size[dimension]:
            found.append(box.part(dimension, position, 1).without(dimension))
    return found


def _stack_dimension(params: Sequence[RecordedParam], value: Callable[[Box], int]) -> int:
    """The dimension whose slots hold one value of the stacked variable each."""
    for dimension in range(len(params[0].shape)):
        for param in params:
            slots: dict[int, int] = {}
            tensors = [box for box in param.boxes if isinstance(box.origin, Tensor)]
            if any(
                box.size[dimension] != 1 or slots.setdefault(box.start[dimension], value(box)) != value(box)
                for box in tensors
            ):
                break
            if len(slots) != param.shape[dimension] or len(set(slots.values())) != len(slots):
                break
        else:
            return dimension
    raise Refused("no dimension has one index value in each position")


def _permutation(boxes: Sequence[Box], shape: Sequence[int]) -> list[int]:
    """The dimension of a tensor that lies along each dimension of a param, from the steps of all its boxes."""
    steps, found = row_steps(shape), [-1] * len(shape)
    for box in boxes:
        if len(box.size) != max(len(shape), 1):
            raise Refused(
                f"a param of {len(box.size)} dimensions holds a tensor of {len(shape)} dimensions: it was reshaped"
            )
        for d, (size, step) in enumerate(zip(box.size, box.steps)):
            if size == 1:
                continue
            k = next((k for k, each in enumerate(steps) if each <= abs(step) and step % each == 0 and shape[k] > 1), -1)
            if k < 0 or found[d] not in (-1, k):
                raise Refused(f"dimension {d} is no dimension of the tensor of shape {list(shape)}: it was reshaped")
            found[d] = k
    rest = [k for k in range(len(shape)) if k not in found]
    if len(set(found) - {-1}) != sum(k >= 0 for k in found):
        raise Refused(f"two dimensions are one dimension of the tensor of shape {list(shape)}: it was reshaped")
    return [k if k >= 0 else rest.pop(0) for k in found]


def _located(box: Box, pattern: Pattern, permutation: Sequence[int]) -> Part:
    """A box with the tensor's positions along each of the param's dimensions."""
    steps, runs = row_steps(pattern.shape), []
    for d, k in enumerate(permutation):
        first, count = box.offset // steps[k] % pattern.shape[k], box.size[d]
        every = box.steps[d] // steps[k] if count > 1 else 1
        if not 0 <= first + every * (count - 1) < pattern.shape[k]:
            raise Refused(f"a row of tensor {pattern.name} continues in the next one: it was reshaped")
        runs.append(joined([(first, count)] if every == 1 else [(first + every * i, 1) for i in range(count)]))
    return Part(pattern, box.start, box.size, tuple(runs))


def _held(
    params: Mapping[int, RecordedParam], members: Mapping[str, Member], stacked: str | None
) -> tuple[int | None, dict[int, Held], dict[Pattern, list[int]]]:
    """(dimension of the stack, what each mesh rank holds, permutation of each pattern)."""

    def member(box: Box) -> Member:
        return members[box.origin.name]

    dimension = _stack_dimension([*params.values()], lambda box: member(box).value(str(stacked))) if stacked else None
    layers: dict[int, list[Box]] = {}
    slots: dict[int, list[int]] = {}
    for rank, param in params.items():
        if dimension is None:
            layers[rank] = param.boxes
            continue
        each = [_sliced(param, dimension, slot) for slot in range(param.shape[dimension])]
        bare = [
            [replace(box, origin=member(box).pattern) if isinstance(box.origin, Tensor) else box for box in boxes]
            for boxes in each
        ]
        if any(one != bare[0] for one in bare):
            raise Refused("the slots of the stack differ")
        layers[rank] = each[0] if each else []
        slots[rank] = [
            next(member(box).value(str(stacked)) for box in boxes if isinstance(box.origin, Tensor)) for boxes in each
        ]
    of: dict[Pattern, list[Box]] = {}
    for boxes in layers.values():
        for box in boxes:
            if isinstance(box.origin, Constant) and box.origin.value != 0:
                raise Refused(f"elements are filled with {box.origin.value}")
            if isinstance(box.origin, Tensor):
                of.setdefault(member(box).pattern, []).append(box)
    permutations = {pattern: _permutation(boxes, pattern.shape) for pattern, boxes in of.items()}
    held = {}
    for rank, boxes in layers.items():
        shape = (
            params[rank].shape
            if dimension is None
            else (*params[rank].shape[:dimension], *params[rank].shape[dimension + 1 :])
        )
        parts = [
            _located(box, member(box).pattern, permutations[member(box).pattern])
            for box in boxes
            if isinstance(box.origin, Tensor)
        ]
        held[rank] = Held(shape, parts, slots.get(rank, []))
        if sum(product(part.size) for part in parts) != product([held[rank].used(d) for d in range(len(shape))]):
            raise Refused("some elements between those of tensors are zeros")
    return dimension, held, permutations


def _pack_dimension(held: Mapping[int, Held]) -> int:
    """The dimension along which the parts of a rank follow each other."""
    found = set()
    for each in held.values():
        if len(each.parts) > 1:
            found.add(
                tuple(
                    d for d in range(len(each.shape)) if len({(part.start[d], part.size[d]) for part in each.parts}) > 1
                )
            )
    if any(len(each) != 1 for each in found) or len(found) > 1:
        raise Refused("tensors are joined along several dimensions")
    return found.pop()[0] if found else 0


def _sequence(held: Held, dimension: int) -> list[tuple[Pattern, Runs]]:
    """The patterns along a dimension, in order, each with its positions."""
    result: list[tuple[Pattern, Runs]] = []
    for part in sorted(held.parts, key=lambda part: part.start[dimension]):
        if result and result[-1][0] == part.pattern:
            result[-1] = (part.pattern, joined([*result[-1][1], *part.runs[dimension]]))
        else:
            result.append((part.pattern, part.runs[dimension]))
    return result


def _order(sequences: Sequence[Sequence[Pattern]]) -> list[Pattern]:
    """The order of the entries of a concat of which each rank has some."""
    order: list[Pattern] = [*max(sequences, key=len)]
    for each in sequences:
        order += [pattern for pattern in each if pattern not in order]
    for each in sequences:
        if [pattern for pattern in order if pattern in each] != list(each):
            raise Refused("ranks have tensors in different orders")
    return order


class _Inference:
    """One param's structure."""

    def __init__(
        self,
        axes: Axes,
        held: Mapping[int, Held],
        permutations: Mapping[Pattern, Sequence[int]],
        moved: Callable[[int], int],
    ):
        self.axes, self.held, self.permutations, self.moved = axes, held, permutations, moved
        self.rules: dict[int, str] = {}
        self.pads: dict[int, int] = {}
        self.keys: dict[str, str] = {}

    def run(self) -> None:
        if len({pattern.dtype for pattern in self.permutations}) > 1:
            raise Refused("tensors of different dtypes are joined")
        pack = _pack_dimension(self.held)
        if not next(iter(self.held.values())).shape:
            self._holds(next(iter(self.permutations)))
            return
        for dimension in range(len(next(iter(self.held.values())).shape)):
            if dimension != pack:
                self._dimension(dimension, [(self._length(dimension), self._same(dimension))])
        sequences = {rank: _sequence(each, pack) for rank, each in self.held.items()}
        patterns = [[pattern for pattern, _ in each] for each in sequences.values()]
        if len(self.permutations) == 1:
            pattern = next(iter(self.permutations))
            self._holds(pattern)
            found = {rank: joined([run for _, runs in each for run in runs]) for rank, each in sequences.items()}
            self._dimension(pack, [(self._length(pack), found)])
        elif all(len(set(each)) == len(each) for each in patterns):
            self._concat(pack, sequences, _order(patterns))
        else:
            self._interleave(pack, sequences)

    def _length(self, dimension: int) -> int:
        lengths = {pattern.shape[permutation[dimension]] for pattern, permutation in self.permutations.items()}
        if len(lengths) > 1:
            raise Refused(
                f"tensors of {' and '.join(map(str, sorted(lengths)))} positions along dimension "
                f"{dimension} are joined along another one"
            )
        return lengths.pop()

    def _same(self, dimension: int) -> dict[int, Runs]:
        """The positions of each rank along a dimension that all its parts share. A rank that has
        only padding has none."""
        found = {rank: {part.runs[dimension] for part in each.parts} for rank, each in self.held.items() if each.parts}
        if any(len(each) > 1 for each in found.values()):
            raise Refused(f"joined tensors have different positions along dimension {dimension}")
        return {rank: each.pop() for rank, each in found.items()}

    def _entry(self, pattern: Pattern) -> str:
        name = json.dumps(pattern.name)
        permutation = list(self.permutations[pattern])
        return name if permutation == sorted(permutation) else f"{{permute: {permutation}, of: {name}}}"

    def _holds(self, pattern: Pattern) -> None:
        self.keys["holds"] = json.dumps(pattern.name)
        if list(self.permutations[pattern]) != sorted(self.permutations[pattern]):
            self.keys["permute"] = str(list(self.permutations[pattern]))

    def _concat(
        self, dimension: int, sequences: Mapping[int, Sequence[tuple[Pattern, Runs]]], order: Sequence[Pattern]
    ) -> None:
        of = f"[{', '.join(map(self._entry, order))}]"
        self.keys["concat"] = of if dimension == 0 else f"{{dim: {dimension}, of: {of}}}"
        lengths = [pattern.shape[self.permutations[pattern][dimension]] for pattern in order]
        entries = [
            (n, {rank: dict(each).get(pattern, ()) for rank, each in sequences.items()})
            for pattern, n in zip(order, lengths)
        ]
        try:
            self._dimension(dimension, entries)
        except Refused:
            begins = {pattern: sum(lengths[:i]) for i, pattern in enumerate(order)}
            whole = {
                rank: joined([(begins[pattern] + start, count) for pattern, runs in each for start, count in runs])
                for rank, each in sequences.items()
            }
            self._dimension(dimension, [(sum(lengths), whole)])
            self.keys["cut"] = "joined"

    def _interleave(self, dimension: int, sequences: Mapping[int, Sequence[tuple[Pattern, Runs]]]) -> None:
        """Groups of some rows of each tensor in turn."""
        order: list[Pattern] = list(dict.fromkeys(pattern for each in sequences.values() for pattern, _ in each))
        counts = [(pattern, sum(n for _, n in runs)) for each in sequences.values() for pattern, runs in each]
        widths = [min(count for pattern, count in counts if pattern == one) for one in order]
        lengths = [pattern.shape[self.permutations[pattern][dimension]] for pattern in order]
        groups = lengths[0] // widths[0]
        if any(n != width * groups for n, width in zip(lengths, widths)):
            raise Refused("tensors that alternate have groups of different numbers")
        found = {}
        for rank, each in sequences.items():
            numbers = []
            for i in range(0, len(each), len(order)):
                group = [(pattern, width, runs) for (pattern, runs), width in zip(each[i : i + len(order)], widths)]
                first = group[0][2][0][0] // widths[0]
                if [pattern for pattern, _, _ in group] != order or any(
                    runs != ((first * width, width),) for _, width, runs in group
                ):
                    raise Refused("tensors alternate in groups that differ")
                numbers.append((first, 1))
            found[rank] = joined(numbers)
        self.keys["interleave"] = f"{{groups: {groups}, of: [{', '.join(map(self._entry, order))}]" + (
            f", dim: {dimension}}}" if dimension else "}"
        )
        self._dimension(dimension, [(groups, found)])

    def _dimension(self, dimension: int, entries: Sequence[tuple[int, Mapping[int, Runs]]]) -> None:
        """The rule, and the padding, of a dimension: (n, {mesh rank: positions}) of each entry."""
        local = {rank: each.shape[dimension] for rank, each in self.held.items()}
        if any(local[rank] > self.held[rank].used(dimension) for rank in entries[0][1]):
            self._padded(dimension, entries, local)
            return
        if all(runs == joined([(0, n)]) for n, each in entries for runs in each.values()):
            return
        rule = find_rule(self.axes, entries)
        if rule is None:
            positions = "; ".join(f"of {n}: {shown(each)}" for n, each in entries)
            raise Refused(f"no scheme gives the ranks these positions of dimension {dimension}: {positions}")
        self.rules[dimension] = rule.yaml()

    def _padded(
        self, dimension: int, entries: Sequence[tuple[int, Mapping[int, Runs]]], local: Mapping[int, int]
    ) -> None:
        if (
            len(entries) > 1
            or len(set(local.values())) > 1
            or "interleave" in self.keys
            or "concat" in self.keys
            and dimension == 0
        ):
            raise Refused(f"dimension {dimension} has padding inside a pack, or of different lengths")
        (n, runs), length = entries[0], next(iter(local.values()))
        for names in ((), *self.axes.choices()):
            k = self.axes.size(names)
            begins = {rank: self.axes.coordinate(names, rank) * length for rank in runs}
            if k * length < n or any(
                runs[rank] != joined([(begin, min(length, n - begin))] if begin < n else [])
                for rank, begin in begins.items()
            ):
                continue
            total = k * length
            self.pads[dimension] = next((m for m in (*_MULTIPLES, k) if -(-n // m) * m == total), total)
            if names:
                self.rules[dimension] = Rule(names).yaml()
            return
        raise Refused(f"no even sharding of dimension {dimension} has this padding")

    def finish(self) -> dict[str, str]:
        """All keys of the param."""
        for key, values in (("pad", self.pads), ("shard", self.rules)):
            if values:
                self.keys[key] = (
                    "{" + ", ".join(f"{self.moved(d)}: {value}" for d, value in sorted(values.items())) + "}"
                )
        return self.keys


def structure(
    axes: Axes, params: Mapping[int, RecordedParam], members: Mapping[str, Member], stacked: str | None
) -> Structure:
    """The structure of a param. params: of one instance on each mesh rank that has it; members: {tensor name: member};
    stacked: the variable that the param stacks. Raises Refused."""
    for rank, param in params.items():
        if param.unwritten:
            raise Refused(
                f"rank {rank}: the loader does not write {param.unwritten} of {product(param.shape)} elements"
            )
    dimension, held, permutations = _held(params, members, stacked)
    if not permutations:
        raise Refused("no elements of tensors")
    of = next(iter(params.values()))
    if any(len(pattern.shape) != len(of.shape) - (dimension is not None) for pattern in permutations):
        raise Refused(
            f"a param of {len(of.shape)} dimensions holds tensors of "
            f"{', '.join(sorted({str(len(pattern.shape)) for pattern in permutations}))} dimensions: they were reshaped"
        )
    inference = _Inference(axes, held, permutations, lambda d: d + (dimension is not None and d >= dimension))
    inference.run()
    keys = inference.finish()
    if stacked:
        keys = {"stack": stacked if dimension == 0 else f"{{index: {stacked}, dim: {dimension}}}"} | keys
    return Structure(keys | _dtype(params, next(iter(permutations)).dtype), dimension, held)


def _dtype(params: Mapping[int, RecordedParam], tensors: str) -> dict[str, str]:
    """The keys for values in another dtype than the checkpoint's."""
    found = {param.dtype for param in params.values()}
    if len(found) > 1:
        raise Refused(f"ranks have different dtypes: {', '.join(sorted(found))}")
    dtype = found.pop()
    if dtype not in DTYPES:
        raise Refused(f"plans have no dtype {dtype}")
    if dtype == tensors:
        return {}
    return {"dtype": dtype} | ({} if dtype in _WIDER.get(tensors, ()) else {"convert": "rne"})
