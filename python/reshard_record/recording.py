# SPDX-License-Identifier: Apache-2.0
"""What one rank's loader did: for each param its shape, its dtype and the boxes of its elements. Saved as JSON, so that
each rank records alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

from reshard.errors import Error

from .checkpoint import Tensors
from .elements import Box, Computed, Constant, Tensor, product

_VERSION = 1
_KINDS = {"tensor": Tensor, "constant": Constant, "computed": Computed}
#: dtype: the dtypes that hold all its values.
_WIDER = {
    "bf16": ("fp32", "fp64"),
    "fp16": ("fp32", "fp64"),
    "fp32": ("fp64",),
    "fp8_e4m3": ("bf16", "fp16", "fp32", "fp64"),
    "fp8_e5m2": ("bf16", "fp16", "fp32", "fp64"),
}
#: dtypes to which plans cast, as PyTorch does.
_CASTS = ("fp32", "bf16", "fp16")


@dataclass
class RecordedParam:
    """One param of one rank. Elements in no box are those that the loader did not write."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[Box]  #: in the dimensions of the shape (a scalar: one dimension); sorted, merged, without overlaps

    @classmethod
    def of(cls, dtype: str, shape: Sequence[int], boxes: Sequence[Box], tensors: Tensors) -> RecordedParam:
        """The param with these boxes. Conversions that differ from one cast of the tensor's values are computed."""
        return cls(
            dtype,
            tuple(shape),
            [Box(box.start, box.size, _cast(box.origin, tensors), box.offset, box.steps) for box in boxes],
        )

    @property
    def unwritten(self) -> int:
        """The number of elements that the loader did not write."""
        return product(self.shape) - sum(box.elements() for box in self.boxes)

    @property
    def tensors(self) -> set[str]:
        """The names of the tensors from which the elements are moved or computed."""
        return {name for box in self.boxes for name in box.origin.tensors}

    @property
    def computed(self) -> list[Computed]:
        """The operations that computed elements, with the tensors that they read."""
        return sorted({box.origin for box in self.boxes if isinstance(box.origin, Computed)}, key=str)


def _cast(origin: Any, tensors: Tensors) -> Any:
    """The origin with at most one cast. Values that pass through a dtype that rounds them, and casts that plans do not
    have (integers, to fp8), are computed."""
    if not isinstance(origin, Tensor) or not origin.casts:
        return origin
    own, last = tensors[origin.name][0], origin.casts[-1]
    exact = (own, *_WIDER.get(own, ()))
    if any(each not in exact for each in origin.casts[:-1]) or (
        last != own and (own not in _WIDER or last not in _CASTS)
    ):
        return Computed(f"conversion to {', '.join(origin.casts)}", (origin.name,))
    return Tensor(origin.name, () if last == own else (last,))


@dataclass
class Recording:
    """What the loader of one rank did."""

    rank: int  #: mesh rank
    mesh: dict[str, Any]  #: as in an endpoint of the YAML
    tensors: Tensors  #: of the checkpoint: {name: (dtype, shape)}
    params: dict[str, RecordedParam] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the recording as JSON."""
        content = {"reshard-recording": _VERSION, "rank": self.rank, "mesh": self.mesh, "tensors": self.tensors}
        params = {name: _to_json(param) for name, param in self.params.items()}
        Path(path).write_text(json.dumps(content | {"params": params}))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Recording:
        """Reads a recording that `save` wrote."""
        try:
            found = json.loads(Path(path).read_text())
            if found["reshard-recording"] != _VERSION:
                raise Error(f"{path}: a recording of version {found['reshard-recording']}, expected {_VERSION}")
            tensors = {name: (dtype, tuple(shape)) for name, (dtype, shape) in found["tensors"].items()}
            params = {name: _from_json(param) for name, param in found["params"].items()}
            return cls(found["rank"], found["mesh"], tensors, params)
        except (KeyError, ValueError, TypeError) as error:
            raise Error(f"{path}: not a recording: {type(error).__name__} {error}") from error


def _to_json(param: RecordedParam) -> dict[str, Any]:
    origins = {origin: number for number, origin in enumerate(dict.fromkeys(box.origin for box in param.boxes))}
    kinds = {cls: kind for kind, cls in _KINDS.items()}
    return {
        "dtype": param.dtype,
        "shape": param.shape,
        "origins": [[kinds[type(origin)], asdict(origin)] for origin in origins],
        "boxes": [[box.start, box.size, origins[box.origin], box.offset, box.steps] for box in param.boxes],
    }


def _from_json(found: Mapping[str, Any]) -> RecordedParam:
    origins = [
        _KINDS[kind](**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})
        for kind, fields in found["origins"]
    ]
    boxes = [
        Box(tuple(start), tuple(size), origins[origin], offset, tuple(steps))
        for start, size, origin, offset, steps in found["boxes"]
    ]
    return RecordedParam(found["dtype"], tuple(found["shape"]), boxes)


def in_order(recordings: Iterable[Recording | str | os.PathLike[str]]) -> list[Recording]:
    """The recordings of all mesh ranks in order. Raises Error if some are missing or they disagree on the mesh or the
    checkpoint."""
    found = sorted(
        (each if isinstance(each, Recording) else Recording.open(each) for each in recordings),
        key=lambda each: each.rank,
    )
    if not found:
        raise Error("no recordings, expected one for each mesh rank")
    size = mesh_size(found[0].mesh)
    if [each.rank for each in found] != list(range(size)):
        raise Error(
            f"recordings of ranks {[each.rank for each in found]}, expected those of ranks 0 to {size - 1} of mesh "
            f"{found[0].mesh}"
        )
    for each in found:
        if each.mesh != found[0].mesh or each.tensors != found[0].tensors:
            raise Error(
                f"the recordings of ranks 0 and {each.rank} have different "
                f"{'meshes' if each.mesh != found[0].mesh else 'checkpoints'}"
            )
    return found


def mesh_size(mesh: Mapping[str, Any]) -> int:
    """The number of mesh ranks of a mesh: the product of its axes, which are those of the first view."""
    return product([size for axis, size in mesh.items() if axis != "views"])


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh, views included: {name: (size, stride)}."""

    axes: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, mesh: Mapping[str, Any]) -> Axes:
        """The axes of a mesh as in the YAML. The first axis varies fastest."""
        found: dict[str, tuple[int, int]] = {}
        size = mesh_size(mesh)
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

    def coordinate(self, names: Iterable[str], rank: int) -> int:
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
