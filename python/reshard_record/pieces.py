# SPDX-License-Identifier: Apache-2.0
"""States a param by its pieces on each mesh rank (docs/yaml.md, section 6), where no scheme gives its positions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.flow import Name, Word, flow

from .elements import Box, Constant, Tensor, row_steps, without
from .patterns import Member, Pattern, ranges
from .recording import RecordedParam
from .structure import Refused, _dtype, _permutation

#: Pieces of a param, at most (kMaxPieces in compiler/frontend/frontend.h).
MOST = 4096


@dataclass(frozen=True)
class _Piece:
    """A piece; lists are by dimension of the param. pattern: None for zeros."""

    pattern: Pattern | None
    permute: tuple[int, ...]
    start: tuple[int, ...]
    step: tuple[int, ...]
    size: tuple[int, ...]
    to: tuple[int, ...]

    def yaml(self, shape: Sequence[int]) -> dict[str, Any]:
        """The keys of the YAML that differ from their defaults. shape: of the tensor, in the param's dimensions."""
        keys: dict[str, Any] = {"of": Name(self.pattern.name)} if self.pattern else {"zeros": Word("true")}
        if list(self.permute) != sorted(self.permute):
            keys["permute"] = list(self.permute)
        if any(self.start):
            keys["from"] = list(self.start)
        if any(step != 1 for step in self.step):
            keys["step"] = list(self.step)
        if not self.pattern or any(
            (n - 1 - start) // step + 1 != size for n, start, step, size in zip(shape, self.start, self.step, self.size)
        ):
            keys["size"] = list(self.size)
        if any(self.to):
            keys["to"] = list(self.to)
        return keys


def _piece(box: Box, members: Mapping[str, Member], stacked: str | None, dimension: int | None) -> _Piece:
    """A recorded box as a piece. dimension: of the param in which the stacked variable's values are. Raises Refused."""
    rank = len(box.size)
    if isinstance(box.origin, Constant):
        if box.origin.value != 0:
            raise Refused(f"elements are filled with {box.origin.value}")
        return _Piece(None, (), (0,) * rank, (1,) * rank, box.size, box.start)
    if not isinstance(box.origin, Tensor):
        raise Refused("elements are computed")
    member = members[box.origin.name]
    shape = member.pattern.shape
    if dimension is not None and box.size[dimension] != 1:
        raise Refused("no dimension has one index value in each position")
    if len(box.size) - (dimension is not None) != len(shape):
        raise Refused(f"a param of {rank} dimensions holds tensors of {len(shape)} dimensions: they were reshaped")
    bare = box.without(dimension)
    permute = _permutation([bare], shape)
    start, step, steps = [], [], row_steps(shape)
    for d, k in enumerate(permute):
        start.append(bare.offset // steps[k] % shape[k])
        step.append(bare.steps[d] // steps[k] if bare.size[d] > 1 else 1)
        if step[-1] < 1:
            raise Refused(f"positions of tensor {member.pattern.name} are in descending order")
        if start[-1] + step[-1] * (bare.size[d] - 1) >= shape[k]:
            raise Refused(f"a row of tensor {member.pattern.name} continues in the next one: it was reshaped")
    if dimension is not None:
        start.insert(dimension, member.value(str(stacked)))
        step.insert(dimension, 1)
    return _Piece(member.pattern, tuple(permute), tuple(start), tuple(step), box.size, box.start)


def _cut(
    box: Box, members: Mapping[str, Member], stacked: str | None, dimension: int | None, found: list[_Piece]
) -> None:
    """Appends a recorded box as one piece, or as several: a recording joins positions at any distance, also backwards,
    which a piece has in the tensor's own dimensions only."""
    try:
        found.append(_piece(box, members, stacked, dimension))
    except Refused:
        longer = [d for d, size in enumerate(box.size) if size > 1]
        if (
            not longer
            or not isinstance(box.origin, Tensor)
            or len(box.size) - (dimension is not None) != len(members[box.origin.name].pattern.shape)
        ):
            raise
        along = max(longer, key=lambda d: (box.steps[d] <= 0, abs(box.steps[d])))
        if len(found) + box.size[along] > MOST:
            raise Refused(f"it has more than {MOST} pieces") from None
        for i in range(box.size[along]):
            _cut(box.part(along, box.start[along] + i, 1), members, stacked, dimension, found)


def _merged(pieces: Sequence[_Piece], dimension: int) -> list[_Piece]:
    """Joins pieces of consecutive index values at consecutive positions of the stack's dimension."""
    rows: dict[Any, list[_Piece]] = defaultdict(list)
    for piece in pieces:
        others = tuple(without(values, dimension) for values in (piece.start, piece.size, piece.to))
        rows[piece.pattern, piece.permute, piece.step, others].append(piece)
    result: list[_Piece] = []
    for row in rows.values():
        last: _Piece | None = None
        for piece in sorted(row, key=lambda each: each.to[dimension]):
            if (
                last
                and last.pattern
                and all(
                    getattr(last, key)[dimension] + last.size[dimension] == getattr(piece, key)[dimension]
                    for key in ("start", "to")
                )
            ):
                size = list(last.size)
                size[dimension] += piece.size[dimension]
                result[-1] = last = replace(last, size=tuple(size))
            else:
                result.append(piece)
                last = piece
    return sorted(result, key=lambda each: each.to)


def _of(
    params: Mapping[int, RecordedParam], members: Mapping[str, Member], stacked: str | None, dimension: int | None
) -> dict[int, list[_Piece]]:
    found: dict[int, list[_Piece]] = {}
    for rank, param in params.items():
        if len(param.boxes) > MOST:
            raise Refused(f"it has more than {MOST} pieces")
        found[rank] = []
        for box in param.boxes:
            _cut(box, members, stacked, dimension, found[rank])
    return {rank: _merged(each, dimension) for rank, each in found.items()} if dimension is not None else found


def pieces(
    params: Mapping[int, RecordedParam], members: Mapping[str, Member], sizes: Mapping[str, int], stacked: str | None
) -> dict[str, str]:
    """The keys of a param, in flow style. params: of one instance on each mesh rank that has it; members: {tensor name:
    member}; sizes: of the index variables; stacked: the variable of its tensors that is not in its
    name. Raises Refused."""
    for rank, param in params.items():
        if param.unwritten:
            raise Refused(f"rank {rank}: the loader does not write {param.unwritten} elements")
    first = next(iter(params.values()))
    if not first.shape:
        raise Refused("a scalar has no pieces")
    dimension: int | None = None
    if stacked is None:
        found = _of(params, members, None, None)
    else:
        for dimension in range(len(first.shape)):
            try:
                found = _of(params, members, stacked, dimension)
                break
            except Refused as refused:
                why = refused
        else:
            raise why
    if sum(map(len, found.values())) > MOST:
        raise Refused(f"it has more than {MOST} pieces")
    patterns = {piece.pattern for each in found.values() for piece in each if piece.pattern}
    if not patterns or len({pattern.dtype for pattern in patterns}) > 1:
        raise Refused("tensors of different dtypes are joined" if patterns else "no elements of tensors")
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank, each in found.items():
        groups[params[rank].shape, tuple(each)].append(rank)
    stated = []
    for (shape, each), ranks in groups.items():
        texts = []
        for piece in each:
            lengths = [piece.pattern.shape[k] for k in piece.permute] if piece.pattern else []
            if dimension is not None and piece.pattern:
                lengths.insert(dimension, sizes[str(stacked)])
            texts.append(piece.yaml(lengths))
        stated.append({"ranks": Word(ranges(ranks)), "shape": list(shape), "of": texts})
    keys = {"pieces": flow(stated)}
    if dimension is not None:
        keys = {"stack": str(stacked) if dimension == 0 else f"{{index: {stacked}, dim: {dimension}}}"} | keys
    return keys | _dtype(params, next(iter(patterns)).dtype)
