# SPDX-License-Identifier: Apache-2.0
"""Runs a loader under PyTorch on tensors without memory and records which element of the checkpoint each element of a
param is from.

PyTorch itself keeps the storage, the strides and the offset of every view, also on the meta device, so that views need
no code here. Operations that make or change elements do: those that only move elements are recorded exactly; all others
mark their result as computed, with the operation and the tensors of the checkpoint that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from reshard.dtypes import dtype_by_name, torch_dtype
from reshard.errors import Error

from .elements import Computed, Constant, ElementMap, Loop, Origin, Tensor

aten = torch.ops.aten
#: Operations that fill a new tensor with one value: the value, or the index of its argument.
_FILLED = {aten.zeros: 0, aten.zeros_like: 0, aten.new_zeros: 0, aten.ones: 1, aten.ones_like: 1, aten.new_ones: 1}
_FILLED_WITH = {aten.full: 1, aten.full_like: 1, aten.new_full: 2}
_EMPTY = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}
#: Operations in place that change the shape of a tensor and not its elements.
_RESHAPED = {aten.t_, aten.transpose_, aten.squeeze_, aten.unsqueeze_, aten.swapaxes_, aten.swapdims_}
_RESHAPED |= {aten.as_strided_, aten.detach_}
_UNKNOWN = "a value that is not from the checkpoint"


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _loops(tensor: torch.Tensor, other: Sequence[int]) -> list[Loop]:
    return [Loop(n, step, there) for n, step, there in zip(tensor.shape, tensor.stride(), other)]


def _outside(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides and dtype on the meta device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class Recorder(TorchDispatchMode):
    """Records the element map of every storage that checkpoint tensors or params use. Operations that write to them are
    not executed, so that the params' own values, if they have memory, stay. Works in the thread
    that entered it only."""

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[int, ElementMap] = {}
        self._params: set[int] = set()
        self._held: dict[int, tuple[torch.UntypedStorage, torch.dtype]] = {}  # keeps addresses from being used again

    # --- storages

    def _track(self, tensor: torch.Tensor, contents: ElementMap | None = None) -> ElementMap:
        """The map of a tensor's storage. A new one is in the tensor's shape, if the tensor is all of its storage."""
        key = _key(tensor)
        if key not in self._maps:
            storage = tensor.untyped_storage()
            count = storage.nbytes() // tensor.itemsize
            whole = tensor.storage_offset() == 0 and tensor.is_contiguous() and tensor.numel() == count
            self._maps[key] = contents or ElementMap(tensor.shape if whole else (count,))
            self._held[key] = (storage, tensor.dtype)
        return self._maps[key]

    def _tracked(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and _key(tensor) in self._maps

    def _derived(self, tensor: torch.Tensor) -> bool:
        """Whether operations on a tensor are recorded and not executed: it has no memory, belongs to a param, or holds
        elements of the checkpoint. A loader's own tables, with memory and values, are none of these."""
        key = _key(tensor)
        if key not in self._maps or key in self._params or tensor.is_meta:
            return key in self._maps
        return any(box.origin.tensors for box in self._maps[key].boxes)

    def _map(self, tensor: torch.Tensor) -> ElementMap | None:
        """The map of a tracked tensor's storage; None if the tensor has another dtype of other size than its storage
        was filled with, so that its elements are not those of the map."""
        if not self._tracked(tensor):  # its values are not from the checkpoint
            self._track(tensor)
            self._maps[_key(tensor)] = ElementMap.filled(self._maps[_key(tensor)].shape, Computed(_UNKNOWN))
        found = self._maps[_key(tensor)]
        return found if self._held[_key(tensor)][1].itemsize == tensor.itemsize else None

    def checkpoint_tensor(self, name: str, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of the checkpoint, on the meta device."""
        tensor = torch.empty(tuple(shape), dtype=torch_dtype(dtype), device="meta")
        self._track(tensor, ElementMap.filled(tensor.shape, Tensor(name)))
        return tensor

    def param(self, tensor: torch.Tensor) -> None:
        """Begins to record the elements of a param, which are unwritten first."""
        self._track(tensor)
        self._params.add(_key(tensor))

    def elements(self, tensor: torch.Tensor) -> ElementMap:
        """The element map of a param, in its own shape."""
        found = self._map(tensor)
        if found is None:
            return ElementMap.filled(tensor.shape, Computed("view.dtype", self._tensors(tensor)))
        return found.view(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _tensors(self, *tensors: torch.Tensor) -> tuple[str, ...]:
        """The names of the checkpoint tensors that are in the storages of these tensors."""
        boxes = [box for tensor in tensors if self._tracked(tensor) for box in self._maps[_key(tensor)].boxes]
        return tuple(sorted({name for box in boxes for name in box.origin.tensors}))

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        writes = [
            argument
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if not any(map(self._derived, tensors)):
            result = func(*args, **kwargs)
            if packet in _EMPTY or packet in _FILLED or packet in _FILLED_WITH:
                self._created(packet, args, kwargs, result)
            elif writes and any(map(self._tracked, tensors)):
                self._write(func, args, kwargs, writes)
            return result
        if packet is aten._unsafe_view or packet in _RESHAPED:
            return func(*args, **kwargs)
        if writes:
            return self._write(func, args, kwargs, writes)
        if any(argument.alias_info is not None for argument in func._schema.arguments):
            return func(*args, **kwargs)  # a view: it has the storage of its argument
        if packet in (aten._to_copy, aten.clone) or packet in (aten.cat, aten.stack):
            return self._moved(func, args, kwargs)
        return self._computed(func, args, kwargs, tensors)

    def _created(self, packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: torch.Tensor) -> None:
        """A new tensor that a loader may fill or read: one value, or unwritten."""
        if packet in _EMPTY:
            self._track(result)
            return
        if packet in _FILLED:
            value = _FILLED[packet]
        else:
            value = args[_FILLED_WITH[packet]] if len(args) > _FILLED_WITH[packet] else kwargs["fill_value"]
        whole = self._track(result)
        self._maps[_key(result)] = ElementMap.filled(whole.shape, Constant(float(value)))

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], writes: Sequence[Any]) -> Any:
        """Records an operation in place."""
        packet, target = func.overloadpacket, args[0] if args else None
        if packet is aten.copy_:
            self._copy(target, args[1])
        elif packet in (aten.fill_, aten.zero_) and not (len(args) > 1 and isinstance(args[1], torch.Tensor)):
            self._mark(target, Constant(float(args[1]) if len(args) > 1 else 0.0))
        else:
            tensors = self._tensors(
                *(each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor))
            )
            names = {argument.name: index for index, argument in enumerate(func._schema.arguments)}
            for argument in writes:
                value = kwargs.get(
                    argument.name, args[names[argument.name]] if names[argument.name] < len(args) else None
                )
                for each in tree_flatten(value)[0]:
                    if isinstance(each, torch.Tensor):
                        self._mark(each, Computed(str(packet), tensors))
        return kwargs.get("out", target) if func._schema.returns else None

    def _mark(self, tensor: torch.Tensor, origin: Origin) -> None:
        """All elements of a tensor get one origin."""
        found = self._map(tensor)
        if found is None:  # another dtype: what else is in this storage is not known any more
            self._maps[_key(tensor)] = ElementMap.filled(
                self._maps[_key(tensor)].shape, Computed("view.dtype", self._tensors(tensor))
            )
        else:
            found.write(tensor.storage_offset(), _loops(tensor, (0,) * tensor.dim()), origin)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """target.copy_(source), of any shapes that broadcast."""
        if not self._tracked(source):
            self._mark(target, Computed(_UNKNOWN))
            return
        into, origins = self._map(target), self._map(source)
        if into is None or origins is None:
            self._mark(target, Computed("view.dtype", self._tensors(source)))
            return
        source = source.expand(target.shape)
        parts = list(origins.read(source.storage_offset(), _loops(source, target.stride()), target.storage_offset()))
        for origin, origin_offset, start, loops in parts:
            into.write(start, loops, self._cast(origin, source.dtype, target.dtype), origin_offset)

    @staticmethod
    def _cast(origin: Origin | None, source: torch.dtype, target: torch.dtype) -> Origin | None:
        if source == target or not isinstance(origin, Tensor):
            return origin
        return Tensor(origin.name, (*origin.casts, dtype_by_name(target)))

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """An operation whose result consists of elements of its arguments: a copy, or several joined."""
        packet = func.overloadpacket
        outside = tree_map_only(torch.Tensor, _outside, args)
        result = func(
            *outside,
            **{**kwargs, **({"device": torch.device("meta"), "pin_memory": False} if packet is aten._to_copy else {})},
        )
        self._track(result)
        if packet in (aten._to_copy, aten.clone):
            self._copy(result, args[0])
            return result
        dimension = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(result.dim(), 1)
        begin = 0
        for index, each in enumerate(args[0]):
            if packet is aten.stack:
                self._copy(result.select(dimension, index), each)
            elif not (each.dim() == 1 and each.numel() == 0):  # torch.cat ignores such tensors
                self._copy(result.narrow(dimension, begin, each.shape[dimension]), each)
                begin += each.shape[dimension]
        return result

    def _computed(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Any:
        """Any other operation: its results are computed."""
        sources = self._tensors(*tensors)
        before = {box.origin for each in tensors if self._tracked(each) for box in self._maps[_key(each)].boxes}
        name = str(func.overloadpacket)
        if not func._schema.returns or any("Tensor" not in str(each.type) for each in func._schema.returns):
            raise Error(
                f"the loader reads values of {', '.join(sources) or 'a param'} ({name}), expected that it only moves "
                "them: record it by values (reshard_record.digits)"
            )
        outside = tree_map_only(torch.Tensor, _outside, (args, dict(kwargs)))
        try:
            if "device" in outside[1]:
                outside[1]["device"] = torch.device("meta")
            result = func(*outside[0], **outside[1])
        except (RuntimeError, NotImplementedError) as error:
            raise Error(
                f"the loader computes {name} of {', '.join(sources) or 'a param'}, which needs values: {error}"
            ) from error
        for each in tree_flatten(result)[0]:
            if isinstance(each, torch.Tensor):
                whole = self._track(each)
                self._maps[_key(each)] = ElementMap.filled(whole.shape, Computed(_chain(name, before), sources))
        return result


def _chain(name: str, before: Collection[Origin]) -> str:
    """The name of an operation, with that of the one whose result is all that it gets: "aten.neg of aten.exp"."""
    inner = next(iter(before)) if len(before) == 1 else None
    return f"{name} of {inner.op}" if isinstance(inner, Computed) and " of " not in inner.op else name


def record(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    params: Any,
    tensors: Mapping[str, tuple[str, Sequence[int]]],
) -> dict[str, tuple[str, tuple[int, ...], ElementMap]]:
    """Runs `load` on tensors without memory and returns {name: (dtype, shape, element map)} of the params.

    load: gets an iterable of (name, tensor).
    params: {name: tensor}, on any device, or a function that returns it; a function is called before and after `load`,
        for loaders that replace params.
    tensors: {name: (dtype, shape)} of the checkpoint.

    Raises Error if the loader reads values or fails, with the tensor that it was given last.
    """
    named = params if callable(params) else lambda: params
    recorder = Recorder()
    for name, param in named().items():
        if hasattr(param, "to_local"):
            raise Error(
                f"param {name} is a DTensor, which the recorder cannot follow: pass its to_local(), or describe its "
                "placements with reshard.describe"
            )
        recorder.param(param)
    checkpoint = [(name, recorder.checkpoint_tensor(name, dtype, shape)) for name, (dtype, shape) in tensors.items()]
    last = "none"

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal last
        for name, tensor in checkpoint:
            last = name
            yield name, tensor

    try:
        with torch.no_grad(), recorder:
            load(given())
    except Error:
        raise
    except Exception as error:
        raise Error(f"the loader failed after it was given tensor {last}: {type(error).__name__}: {error}") from error
    return {
        name: (dtype_by_name(param.dtype), tuple(param.shape), recorder.elements(param))
        for name, param in named().items()
    }
