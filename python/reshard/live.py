# SPDX-License-Identifier: Apache-2.0
"""The job of a refit between live modules, from what each rank states about its own tensors.

Each rank states a ``Part`` for each of its tensors: the shape of the unsharded tensor, its dtype, and the groups of
ranks that cut it. ``job_of`` combines the statements of all ranks into one job; ``reshard-describe`` writes those of
one rank. It needs neither PyTorch nor any framework.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .coverage import matched
from .dtypes import dtype_of
from .errors import Error

#: A mesh axis: its stride in mesh ranks, and its size.
Axis = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """A group of ranks that divides one dimension of a tensor."""

    dimension: int
    ranks: tuple[int, ...]  #: the world ranks of the group, in the order of their parts
    stride: int = 0  #: 0: parts as of torch.chunk; else the rule ``stride`` of a layout (Megatron's partition_stride)
    axis: str = field(default="", compare=False)  #: the framework's name of the group; other ranks do not need it


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor."""

    shape: tuple[int, ...]  #: of the unsharded tensor
    dtype: str  #: as in the YAML
    cuts: tuple[Cut, ...] = ()  #: in the order in which they apply; none: the rank holds the whole tensor
    #: Dimension 0 ends with padding, so its length may differ between source and target (Megatron's vocabulary).
    padded: bool = False


@dataclass(frozen=True)
class Side:
    """The tensors of one module on one rank."""

    parts: Mapping[str, Part]
    #: Further names of a tensor, each with the name in ``parts``.
    aliases: Mapping[str, str] = field(default_factory=dict)


def axes_of(mesh: Any) -> list[str]:
    """Returns the names of the axes of a DeviceMesh: its own, or axis0, axis1, ..."""
    return list(mesh.mesh_dim_names or (f"axis{i}" for i in range(len(mesh.shape))))


def _cuts_of(name: str, tensor: Any) -> Iterator[Cut]:
    """Yields the cuts of a DTensor. Strided placements (FSDP over tensor parallelism) are applied last. Raises Error if
    a placement cannot be expressed."""
    mesh, placements = tensor.device_mesh, tensor.placements
    for i, placement in sorted(enumerate(placements), key=lambda each: type(each[1]).__name__ == "_StridedShard"):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise Error(
                f"param {name!r}: placement {placement} on mesh axis {axes_of(mesh)[i]!r} is not "
                "supported, expected Shard or Replicate"
            )
        dimension = placement.dim % len(tensor.shape)
        if kind == "_StridedShard":
            later = [j for j in range(i + 1, len(placements)) if getattr(placements[j], "dim", None) == placement.dim]
            expected = math.prod(mesh.shape[j] for j in later)
            if placement.split_factor != expected:
                raise Error(
                    f"param {name!r}: found split factor {placement.split_factor}, expected {expected}, "
                    f"the ranks of later mesh axes on dimension {dimension}"
                )
        at = tuple(slice(None) if j == i else where for j, where in enumerate(mesh.get_coordinate()))
        yield Cut(dimension, tuple(mesh.mesh[at].tolist()), axis=axes_of(mesh)[i])


def part_of(name: str, tensor: Any, group: Callable[[], tuple[str, Sequence[int]]] | None = None) -> Part:
    """Describes a tensor of this rank: a DTensor by its mesh and placements. A plain tensor is whole.

    group: the name and the ranks of the group that cuts a tensor of Megatron-Core, whose attributes do not state them.
        None: these attributes are not looked at.
    """
    shape, cuts = list(tensor.shape), tuple[Cut, ...]()
    if hasattr(tensor, "placements"):
        cuts = tuple(_cuts_of(name, tensor))
    elif group and getattr(tensor, "tensor_model_parallel", False):
        axis, ranks = group()
        dimension = int(getattr(tensor, "partition_dim", 0))
        shape[dimension] *= len(ranks)
        cuts = (Cut(dimension, tuple(ranks), int(getattr(tensor, "partition_stride", 1)), axis),)
    return Part(tuple(shape), dtype_of(name, tensor), cuts)


def shard_of(cuts: Iterable[tuple[Cut, str]], shape: Sequence[int], where: str) -> dict[int, dict[str, Any]]:
    """Returns the sharding rules of a tensor of this shape by dimension, as in a layout: of its cuts, each with the
    name of its axis. where: names the tensor in the error of a dimension that no rule gives."""
    by_dimension: dict[int, list[tuple[Cut, str]]] = {}
    for cut, axis in cuts:
        by_dimension.setdefault(cut.dimension, []).append((cut, axis))
    return {dimension: _rule(found, shape[dimension], where) for dimension, found in sorted(by_dimension.items())}


def _rule(cuts: Sequence[tuple[Cut, str]], rows: int, where: str) -> dict[str, Any]:
    """Returns the rule of a dimension of ``rows`` rows, which torch.chunk splits over each axis in turn, or one axis in
    strides. If the parts over several axes have different lengths, ``sizes`` of the rule lists them."""
    axes, strides = [axis for _, axis in cuts], {cut.stride for cut, _ in cuts}
    if strides != {0}:
        if len(cuts) > 1:
            raise Error(
                f"{where}: {len(cuts)} groups cut one dimension in strides {sorted(strides)}, expected at most one "
                "group with a stride"
            )
        return {"axis": axes[0]} | ({"stride": max(strides)} if max(strides) > 1 else {})
    if len(axes) == 1:
        return {"axis": axes[0], "scheme": "chunk"}
    lengths = [rows]
    for cut, _ in cuts:  # each axis splits the parts of the axes before it
        size = len(cut.ranks)
        longest = [-(-part // size) for part in lengths]
        lengths = [max(0, min(c, n - i * c)) for n, c in zip(lengths, longest) for i in range(size)]
    return {"axis": axes} | ({"sizes": lengths} if len(set(lengths)) > 1 else {})


def to_json(side: Side) -> dict[str, Any]:
    """Returns a side as values of JSON. Groups of ranks that occur several times are listed once."""
    groups: dict[tuple[int, ...], int] = {}
    parts = {}
    for name, part in side.parts.items():
        cuts = [[cut.dimension, groups.setdefault(cut.ranks, len(groups)), cut.stride] for cut in part.cuts]
        parts[name] = [list(part.shape), part.dtype, cuts, part.padded]
    return {"groups": [list(ranks) for ranks in groups], "parts": parts, "aliases": dict(side.aliases)}


def from_json(value: Mapping[str, Any]) -> Side:
    """Returns the side that ``to_json`` has converted."""
    groups = [tuple(ranks) for ranks in value["groups"]]
    parts = {}
    for name, (shape, dtype, cuts, padded) in value["parts"].items():
        own = tuple(Cut(dimension, groups[group], stride) for dimension, group, stride in cuts)
        parts[name] = Part(tuple(shape), dtype, own, padded)
    return Side(parts, value["aliases"])


class _Endpoint:
    """The tensors of one module on all ranks: its mesh and the rules of its layout."""

    def __init__(self, role: str, sides: Sequence[Side]):
        self.role = role
        self.ranks = [rank for rank, side in enumerate(sides) if side.parts]
        if not self.ranks:
            raise Error(f"{role}: no rank has a param, expected at least one")
        self._number = {rank: number for number, rank in enumerate(self.ranks)}
        self.parts: dict[str, dict[int, Part]] = {}  # by name and world rank
        self.aliases: dict[str, str] = {}
        for rank, side in enumerate(sides):
            for name, part in side.parts.items():
                self.parts.setdefault(name, {})[rank] = part
            for alias, name in side.aliases.items():
                if self.aliases.setdefault(alias, name) != name:
                    raise Error(
                        f"{role} param {alias!r}: tied to {name!r} on rank {rank}, and to {self.aliases[alias]!r} on "
                        "a lower rank"
                    )
        self._axes: dict[Any, Axis | None] = {}
        self._present: dict[frozenset[int], tuple[Axis, list[int]]] = {}
        self._views: dict[tuple[Axis, ...], None] = {}

    def part(self, name: str) -> Part:
        """Returns the part of the first rank that holds the tensor. The others must state the same tensor."""
        held = self.parts[name]
        first, part = next(iter(held.items()))
        for rank, other in held.items():
            for what in ("shape", "dtype", "padded"):
                if getattr(other, what) != getattr(part, what):
                    raise Error(
                        f"{self.role} param {name!r}: found {what} {getattr(other, what)} on "
                        f"rank {rank}, expected {getattr(part, what)} as on rank {first}"
                    )
            if [(cut.dimension, len(cut.ranks), cut.stride) for cut in other.cuts] != [
                (cut.dimension, len(cut.ranks), cut.stride) for cut in part.cuts
            ]:
                raise Error(
                    f"{self.role} param {name!r}: ranks {first} and {rank} have different shardings, expected one"
                )
        return part

    def _axis(self, coordinates: Mapping[int, int], size: int) -> Axis | None:
        """Returns the axis on which each mesh rank has the given coordinate."""
        key = (tuple(coordinates.items()), size)
        if key not in self._axes:
            world = len(self.ranks)
            strides = [stride for stride in range(1, world // size + 1) if world % (stride * size) == 0]
            fit = (stride for stride in strides if all(at // stride % size == c for at, c in coordinates.items()))
            self._axes[key] = next(((stride, size) for stride in fit), None)
        return self._axes[key]

    def _presence(self, name: str) -> tuple[Axis, list[int]] | None:
        """Returns an axis and its coordinates on which the tensor is, or None if all ranks have it."""
        held = frozenset(self._number[rank] for rank in self.parts[name])
        world = len(self.ranks)
        if len(held) == world:
            return None
        if held not in self._present:
            axes = (
                (stride, size)
                for size in range(2, world + 1)
                if world % size == 0
                for stride in range(1, world // size + 1)
                if world % (stride * size) == 0
            )
            at = ((axis, sorted({number // axis[0] % axis[1] for number in held})) for axis in axes)
            # The last axis is that of all ranks, which fits always.
            self._present[held] = next(
                (axis, found) for axis, found in at if len(found) * (world // axis[1]) == len(held)
            )
        return self._present[held]

    def _cuts(self, name: str) -> Iterator[tuple[Cut, Axis]]:
        """Yields the cuts of a tensor with their axes."""
        held = self.parts[name]
        for j, cut in enumerate(self.part(name).cuts):
            size = len(cut.ranks)
            if size == 1:
                continue
            axis = self._axis({self._number[rank]: part.cuts[j].ranks.index(rank) for rank, part in held.items()}, size)
            if axis is None:
                raise Error(
                    f"{self.role} param {name!r}: group {list(cut.ranks)} cuts dimension "
                    f"{cut.dimension}, but the groups of all ranks are no axis "
                    f"of a mesh of ranks {self.ranks}; expected ranks at a constant distance, as in init_device_mesh"
                )
            yield cut, axis

    def _view(self, name: str, used: Iterable[Axis]) -> None:
        """Adds a view of the mesh that has the axes of a tensor."""
        view, product = [], 1
        for stride, size in sorted(set(used)):
            if stride % product:
                raise Error(f"{self.role} param {name!r}: its mesh axes overlap, expected axes of one mesh")
            if stride > product:
                view.append((product, stride // product))
            view.append((stride, size))
            product = stride * size
        rest = len(self.ranks) // product
        if len(self.ranks) % product:
            raise Error(
                f"{self.role} param {name!r}: its mesh has {product} ranks, expected a divisor of {len(self.ranks)}"
            )
        self._views[tuple(view + [(product, rest)] * (rest > 1))] = None

    def rules(self, name: str, shape: Sequence[int]) -> dict[str, Any]:
        """Returns ``shard`` and ``at`` of a param of a layout. shape: of the unsharded tensor, with padding."""
        cuts, presence = list(self._cuts(name)), self._presence(name)
        self._view(name, [axis for _, axis in cuts])
        if presence:
            self._view(name, [presence[0]])
        shard = shard_of([(cut, _name(axis)) for cut, axis in cuts], shape, f"{self.role} param {name!r}")
        return ({"shard": {str(dimension): rule for dimension, rule in shard.items()}} if shard else {}) | (
            {"at": {_name(presence[0]): presence[1]}} if presence else {}
        )

    def endpoint(self) -> dict[str, Any]:
        """Returns the endpoint of the job."""
        first, *views = [{_name(axis): axis[1] for axis in view} for view in self._views]
        return {"layout": self.role, "mesh": first | ({"views": views} if views else {}), "ranks": self.ranks}


def _name(axis: Axis) -> str:
    return f"axis{axis[0]}x{axis[1]}"


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(map(repr, found[:4])) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def _pairs(source: _Endpoint, target: _Endpoint, left: Sequence[str]) -> dict[str, str]:
    """Returns {name of a tensor in the target: its name in the source}. Tied names are resolved."""
    ends = (source, target)
    kept = matched({name for end in ends for name in (*end.parts, *end.aliases)}, left, "source and target")
    names: dict[str, set[str]] = {}
    for name in set(target.parts) | set(target.aliases):
        origin = source.aliases.get(name, name)
        if name not in kept and origin in source.parts:
            names.setdefault(target.aliases.get(name, name), set()).add(origin)
    lacking = [name for name in target.parts if name not in kept and name not in names]
    if lacking:
        raise Error(
            f"the source lacks {_listed(lacking)} of the target: name what the refit shall not write in left=[…]"
        )
    for name, origins in names.items():
        if len(origins) > 1:
            raise Error(
                f"target param {name!r} is tied to other names, but the source has different tensors for them: "
                f"{_listed(origins)}"
            )
    used = {origin for origins in names.values() for origin in origins}
    unused = [name for name in source.parts if name not in kept and name not in used]
    if unused:
        raise Error(f"the target lacks {_listed(unused)} of the source: name what the refit shall not read in left=[…]")
    return {name: next(iter(names[name])) for name in target.parts if name in names}


def job_of(
    sources: Sequence[Side], targets: Sequence[Side], left: Sequence[str] = (), convert: str | None = None
) -> str:
    """Returns the job that moves the tensors of one module to those of another, as JSON, which is YAML.

    sources, targets: the tensors of both modules, by world rank; empty on a rank without the module.
    left: globs of names that are not moved. Each must match a name of the source or the target.
    convert: "rne", "saturate" or "inf" if values may be rounded (docs/yaml.md, section 10).

    Raises Error if a tensor is only on one side, or if no layout expresses how the ranks hold it.
    """
    source, target = _Endpoint("source", sources), _Endpoint("target", targets)
    tensors: dict[str, Any] = {}
    params: dict[str, dict[str, Any]] = {"source": {}, "target": {}}
    for name, origin in _pairs(source, target, left).items():
        there, here = source.part(origin), target.part(name)
        if any(brace in name + origin for brace in "{}"):
            raise Error(f"param {name!r}: a brace in a name is not supported")
        shape = list(there.shape)
        padded = there.padded and here.padded
        if padded:
            shape[0] = min(there.shape[0], here.shape[0])
        if shape[padded:] != list(here.shape)[padded:]:
            raise Error(
                f"param {name!r}: found shape {list(here.shape)} in the target, expected {list(there.shape)} as in "
                "the source"
            )
        tensors[origin] = {"shape": shape, "dtype": there.dtype}
        for endpoint, own, part in ((source, origin, there), (target, name, here)):
            param = {"holds": origin} | endpoint.rules(own, part.shape)
            if padded and part.shape[0] != shape[0]:
                param["pad"] = {"0": part.shape[0]}
            params[endpoint.role][own] = param
        if here.dtype != there.dtype:
            params["target"][name] |= {"dtype": here.dtype} | ({"convert": convert} if convert else {})
    layouts = {role: {"params": each} for role, each in params.items()}
    job = {
        "version": 1,
        "model": {"tensors": tensors, "layouts": layouts},
        "source": source.endpoint(),
        "target": target.endpoint(),
        "world": len(sources),
    }
    return json.dumps(job, indent=1)
