# SPDX-License-Identifier: Apache-2.0
"""Records a loader by values, where it leaves PyTorch: NumPy, C++, files. The loader runs several times on checkpoints
whose values are one digit each of the number of the element. The digits that a param then has state which elements it
holds."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.dtypes import dtype_by_name, numpy_dtype, safetensors_header
from reshard.errors import Error

from .checkpoint import tensors_of
from .elements import Box, Computed, Constant, ElementMap, Tensor, make_box, product
from .recording import RecordedParam, Recording, mesh_size

#: The digits that a dtype holds exactly; 256 where it is not listed. All are powers of two.
_DIGITS = {"fp8_e4m3": 16, "fp8_e5m2": 8, "i8": 128, "bool": 2}
#: Bits of a hash of the element number that further passes compare; a computed value does not have them.
_CHECK_BITS = 16
_COMPUTED = Computed("an operation whose results are not values of the checkpoint")


def _hash(numbers: Any, check: int) -> Any:
    """A number that differs for neighboring element numbers (splitmix64)."""
    import numpy

    with numpy.errstate(over="ignore"):
        z = numbers.astype(numpy.uint64) + numpy.uint64(0x9E3779B97F4A7C15) * numpy.uint64(check + 1)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        return (z ^ (z >> numpy.uint64(27))) >> numpy.uint64(16)


class _Numbers:
    """The numbers of all elements of a checkpoint, from 1. Number 0 is none: zeros are padding."""

    def __init__(self, tensors: Mapping[str, tuple[str, Sequence[int]]]):
        self.tensors = tensors
        self.base = min((_DIGITS.get(dtype, 256) for dtype, _ in tensors.values()), default=256)
        self.first: dict[str, int] = {}
        self.total = 1
        for name, (_, shape) in tensors.items():
            self.first[name] = self.total
            self.total += product(shape)
        self.passes = 1
        while self.base**self.passes < self.total:
            self.passes += 1
        self.checks = -(-_CHECK_BITS // (self.base.bit_length() - 1))  #: passes after those of the digits

    def digit(self, numbers: Any, which: int) -> Any:
        """The digit of pass `which`; passes after the last digit are those of the hash."""
        import numpy

        if which < self.passes:
            return numbers // self.base**which % self.base
        return numpy.where(numbers == 0, 0, _hash(numbers, which - self.passes) % numpy.uint64(self.base)).astype(
            numpy.int64
        )

    def checkpoint(self, which: int) -> Iterator[tuple[str, Any]]:
        """(name, NumPy array) of each tensor in a pass."""
        import numpy

        for name, (dtype, shape) in self.tensors.items():
            numbers = numpy.arange(self.first[name], self.first[name] + product(shape), dtype=numpy.int64)
            yield name, self.digit(numbers, which).astype(numpy_dtype(dtype)).reshape(tuple(shape))


def _values(array: Any) -> tuple[str, Any]:
    """(dtype, values as fp64) of an array of NumPy or PyTorch."""
    import numpy

    dtype = dtype_by_name(array.dtype)
    if hasattr(array, "detach"):
        array = array.detach().to("cpu").double().numpy()
    return dtype, numpy.asarray(array).astype(numpy.float64)


def _runs(numbers: Any, tensors: Any) -> Iterator[tuple[int, int, int]]:
    """(first position, number of positions, step) of the runs of a row: consecutive elements of
    one tensor at one step."""
    import numpy

    steps = numpy.diff(numbers)
    inside = steps[numpy.diff(tensors) == 0]
    usual = 0
    if inside.size:
        found, counts = numpy.unique(inside, return_counts=True)
        usual = int(found[counts.argmax()])
    breaks = numpy.flatnonzero((steps != usual) | (numpy.diff(tensors) != 0)) + 1
    begins = [0, *breaks.tolist(), len(numbers)]
    for begin, end in itertools.pairwise(begins):
        if end > begin:
            yield begin, end - begin, usual


def _boxes(numbers: Any, bad: Any, names: Sequence[str], first: Any, dtype: str) -> list[Box]:
    """The boxes of a param. numbers: of its elements; bad: whether an element is no number; first: of each tensor."""
    import numpy

    shape = numbers.shape or (1,)
    if not product(shape):
        return []
    tensors = numpy.searchsorted(first, numbers, side="right") - 1
    tensors = numpy.where(bad, -2, numpy.where(numbers == 0, -1, tensors)).reshape(-1, shape[-1])
    rows = numpy.where(bad, 0, numbers).reshape(-1, shape[-1])
    result = ElementMap(shape)
    for row, leading in enumerate(numpy.ndindex(*shape[:-1])):
        for begin, count, step in _runs(rows[row], tensors[row]):
            tensor = int(tensors[row][begin])
            start, size = (*leading, begin), (*(1 for _ in leading), count)
            if tensor < 0:
                result.boxes.append(make_box(start, size, Constant(0.0) if tensor == -1 else _COMPUTED))
            else:
                offset = int(rows[row][begin]) - int(first[tensor])
                result.boxes.append(
                    make_box(start, size, Tensor(names[tensor], (dtype,)), offset, (*(0 for _ in leading), step))
                )
    result.merge()
    return result.boxes


def record_values(
    *,
    load: Callable[[Iterable[tuple[str, Any]]], Mapping[str, Any]],
    checkpoint: str | os.PathLike[str] | Mapping[str, tuple[str, Any]],
    mesh: Mapping[str, Any],
    rank: int = 0,
) -> Recording:
    """Records a loader by the values of its params, which need memory. The loader runs once for each
    digit of the number of elements (5 times for 10^12 elements of bf16) and then, to recognize computed
    values, twice (bf16) or more.

    load: a function of an iterable of (name, NumPy array) that returns {name: array} of its params, of NumPy or
        PyTorch. A loader of files calls `write_checkpoint`.
    checkpoint, mesh, rank: as for `reshard_record.record`.

    Values that are no elements of the checkpoint are in `recording.params[name].computed`. Elements that the loader
    does not write cannot be recognized: it must fill them with zeros, which are padding.
    """
    import numpy

    if not 0 <= rank < mesh_size(mesh):
        raise Error(f"rank {rank} is not in mesh {dict(mesh)}, expected 0 to {mesh_size(mesh) - 1}")
    tensors = tensors_of(checkpoint)
    numbers = _Numbers(tensors)
    decoded: dict[str, Any] = {}
    bad: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for which in range(numbers.passes + numbers.checks):
        params = load(numbers.checkpoint(which))
        if which and params.keys() != decoded.keys():
            raise Error(
                f"pass {which} of the loader returned other params than "
                f"pass 0: {', '.join(sorted(params.keys() ^ decoded.keys())[:4])}"
            )
        for name, array in params.items():
            dtypes[name], values = _values(array)
            if which == 0:
                decoded[name], bad[name] = numpy.zeros(values.shape, numpy.int64), numpy.zeros(values.shape, bool)
            if values.shape != decoded[name].shape:
                raise Error(
                    f"param {name} has shape {list(values.shape)} in pass {which}, {list(decoded[name].shape)} in "
                    "pass 0"
                )
            digits = numpy.nan_to_num(values, nan=-1.0, posinf=-1.0, neginf=-1.0).clip(-1, numbers.base)
            bad[name] |= (digits != digits.round()) | (digits < 0) | (digits >= numbers.base)
            if which < numbers.passes:
                decoded[name] += digits.astype(numpy.int64) * numbers.base**which
            else:
                bad[name] |= digits != numbers.digit(decoded[name], which)
    recording = Recording(rank, dict(mesh), tensors)
    filled = [name for name, (_, shape) in tensors.items() if product(shape)]
    first = numpy.array([numbers.first[name] for name in filled], numpy.int64)
    for name, found in decoded.items():
        wrong = bad[name] | (found >= numbers.total)
        boxes = _boxes(found, wrong, filled, first, dtypes[name])
        recording.params[name] = RecordedParam.of(dtypes[name], found.shape, boxes, tensors)
    return recording


def write_checkpoint(folder: str | os.PathLike[str], tensors: Iterable[tuple[str, Any]]) -> None:
    """Writes (name, NumPy array) as `model.safetensors` to a folder, for loaders that read files."""
    arrays = dict(tensors)
    header, _ = safetensors_header({name: (dtype_by_name(each.dtype), each.shape) for name, each in arrays.items()})
    with open(Path(folder) / "model.safetensors", "wb") as file:
        file.write(header)
        for array in arrays.values():
            file.write(array.tobytes())
