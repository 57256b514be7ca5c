# SPDX-License-Identifier: Apache-2.0
"""Records what an engine does to its params after its loader has filled them: which are left as they are, which hold
the same elements in another order, and which hold values that were computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .digits import record_values
from .elements import Constant, ElementMap, Tensor, product
from .recording import RecordedParam

UNCHANGED, PERMUTED, COMPUTED, EMPTIED, REMOVED = "unchanged", "permuted", "computed", "emptied", "removed"
#: Dtypes whose values are given in fp32, since NumPy alone lacks bf16; they hold the digits too.
_AS_FP32 = ("bf16", "fp16")


@dataclass(frozen=True)
class Change:
    """What became of a param."""

    #: UNCHANGED; PERMUTED: its elements, casts of them and zeros as padding; COMPUTED: other values;
    #: EMPTIED: no elements are left; REMOVED
    kind: str
    of: tuple[str, ...] = ()  #: the loaded params whose elements it has
    param: RecordedParam | None = None  #: the origins of its elements, in the loaded params


def _change(name: str, param: RecordedParam, loaded: Mapping[str, tuple[str, Any]]) -> Change:
    of = tuple(sorted(param.tensors))
    if not product(param.shape) and product(loaded.get(name, ("", ()))[1]):
        return Change(EMPTIED, of, param)
    moved = any(isinstance(box.origin, Tensor) for box in param.boxes)
    if any(not isinstance(box.origin, (Tensor, Constant)) for box in param.boxes) or (param.boxes and not moved):
        return Change(COMPUTED, of, param)
    casts = (param.dtype,) if param.dtype in _AS_FP32 else ()
    same = (
        loaded.get(name) == (param.dtype, param.shape)
        and param.boxes == ElementMap.filled(param.shape, Tensor(name, casts)).in_shape()
    )
    return Change(UNCHANGED if same else PERMUTED, of, param)


def changes(
    loaded: Mapping[str, tuple[str, Any]], process: Callable[[Iterable[tuple[str, Any]]], Mapping[str, Any]]
) -> dict[str, Change]:
    """Returns what became of each param, by name; of params that exist only before or after, too. Engines repack in
    C++, so that they are recorded by values, in memory.

    loaded: {name: (dtype, shape)} of the params as the loader fills them.
    process: a function of an iterable of (name, NumPy array). It fills the params of a new module with these values,
        processes them, and returns {name: tensor} of the module's params. It is called several times.
    """
    given = {name: ("fp32" if dtype in _AS_FP32 else dtype, shape) for name, (dtype, shape) in loaded.items()}
    found = record_values(load=process, checkpoint=given, mesh={}).params
    result = {name: _change(name, param, loaded) for name, param in found.items()}
    return {name: result.get(name, Change(REMOVED)) for name in {**loaded, **result}}
