# SPDX-License-Identifier: Apache-2.0
"""Records a live Megatron-Core model from its own `sharded_state_dict()`, which states for each param of a rank the
part of which tensor of the distributed checkpoint it is. Nothing is loaded or sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product as combinations
from typing import Any

from reshard.dtypes import dtype_by_name
from reshard.errors import Error

from . import record
from .checkpoint import Tensors
from .recording import Recording


def _pieces(value: Any) -> Iterator[Any]:
    """The ShardedTensors of an entry; those of a factory are views of its param (gate and up of one `linear_fc1`)."""
    if hasattr(value, "build"):
        yield from _pieces(value.build())
    elif hasattr(value, "global_offset") and hasattr(value, "prepend_axis_num"):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _pieces(each)


def _entries(state: Mapping[str, Any]) -> Iterator[tuple[str, Any, list[Any]]]:
    """(name of a param, param, its pieces). Objects that are no tensors (`_extra_state`) are left out."""
    for name, value in state.items():
        pieces = list(_pieces(value))
        for each in pieces:
            if each.flattened_range is not None:
                raise Error(
                    f"{name}: found a flattened range of {each.key}, which has no position in "
                    "the tensor; expected the state of a model, not of an optimizer"
                )
        if pieces and value.data is not None:
            yield name, value.data, pieces


def _tensor(name: str, key: str, numbers: tuple[int, ...]) -> str:
    """The name of one tensor of a key that stacks the layers and the experts: the key with their numbers, at the places
    where the param's name has numbers (decoder.layers.0), else at its end."""
    words, components = name.split("."), key.split(".")
    places = [i for i, word in enumerate(words) if word.isdigit()]
    fits = len(places) == len(numbers)
    for number, place in zip(numbers, places):
        # local_experts, experts
        fits = fits and place <= len(components) and words[place - 1].endswith(components[place - 1])
        components.insert(place, str(number))
    return ".".join(components if fits else [key, *map(str, numbers)])


def tensors_of_state(state: Mapping[str, Any]) -> Tensors:
    """The tensors of the distributed checkpoint that the state of one rank names: {name: (dtype, shape)}. Axes that
    stack layers and experts become numbers in the names. A checkpoint has those of all ranks."""
    result: Tensors = {}
    for name, _, pieces in _entries(state):
        for piece in pieces:
            stacked = piece.prepend_axis_num
            for numbers in combinations(*map(range, piece.global_shape[:stacked])):
                result[_tensor(name, piece.key, numbers)] = (
                    dtype_by_name(piece.dtype),
                    tuple(piece.global_shape[stacked:]),
                )
    return result


def record_state(
    state: Mapping[str, Any], *, checkpoint: Mapping[str, tuple[str, Any]], mesh: Mapping[str, Any], rank: int
) -> Recording:
    """Returns where each element of a rank's params is in the distributed checkpoint.

    state: of `model.sharded_state_dict()`.
    checkpoint: the tensors of all ranks: the results of `tensors_of_state`, joined.
    mesh, rank: as for `reshard_record.record`.
    """
    entries = list(_entries(state))

    def load(weights: Any) -> None:
        tensors = dict(weights)
        for name, _, pieces in entries:
            for piece in pieces:
                stacked = piece.prepend_axis_num
                part = tensors[_tensor(name, piece.key, tuple(piece.global_offset[:stacked]))]
                for dimension, (begin, count) in enumerate(zip(piece.global_offset[stacked:], piece.local_shape)):
                    part = part.narrow(dimension, begin, count)
                piece.data.copy_(part)

    return record(
        load=load, params={name: param for name, param, _ in entries}, checkpoint=checkpoint, mesh=mesh, rank=rank
    )
