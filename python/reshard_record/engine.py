# SPDX-License-Identifier: Apache-2.0
"""Replacements for the processes of an engine that is recorded: its sizes, process groups that state rank and size and
send nothing, and params without memory."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from reshard.coverage import persistent_buffers

from . import record
from .checkpoint import tensors_of
from .recording import Recording


def group(rank: int, size: int) -> types.SimpleNamespace:
    """The attributes of a process group that constructors and loaders read."""
    import torch

    ranks = types.SimpleNamespace(rank=lambda: rank, size=lambda: size)
    return types.SimpleNamespace(
        rank_in_group=rank,
        world_size=size,
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        rank=rank,
        local_rank=0,
        ranks=list(range(size)),
        device_group=ranks,
        cpu_group=ranks,
        unique_name="stand-in",
        device=torch.device("cpu"),
    )


def meta_values() -> Any:
    """A context in which new tensors of floating-point dtypes are on the meta device. Tables of integers, as that of
    the local experts, keep their values, which constructors and loaders read."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

    class MetaValues(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if (
                func in _device_constructors()
                and kwargs.get("device") is None
                and (kwargs.get("dtype") or torch.get_default_dtype()).is_floating_point
            ):
                kwargs["device"] = "meta"
            if func is torch.Tensor.to and args[0].is_meta:  # stays there, whatever device a constructor moves it to
                dtypes = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.dtype)]
                return func(args[0], *dtypes) if dtypes else args[0]
            return func(*args, **kwargs)

    return MetaValues()


@dataclass(frozen=True)
class Engine:
    """The sizes and the dtype of an engine, as vLLM's options."""

    tp: int = 1
    pp: int = 1
    expert_parallel: bool = False
    dtype: str = "bfloat16"

    @property
    def mesh(self) -> dict[str, Any]:
        """The mesh of its ranks: {tp, pp}, and with expert_parallel the view {ep: tp, pp}."""
        return {"tp": self.tp, "pp": self.pp} | (
            {"views": [{"ep": self.tp, "pp": self.pp}]} if self.expert_parallel else {}
        )


def params_of(module: Any, own: Collection[str] = ()) -> dict[str, Any]:
    """Returns what a loader fills of a module: its params and persistent buffers, each under its first name. own: as of
    `persistent_buffers`."""
    found, seen = dict(module.named_parameters()), set[int]()
    for name, buffer in persistent_buffers(module, own).items():
        if id(buffer) not in seen:
            seen.add(id(buffer))
            found[name] = buffer
    return found


def recordings_of(
    modules: Iterable[tuple[int, Any]],
    load: Callable[[Any, Any], None],
    model: str | os.PathLike[str],
    engine: Engine,
    checkpoint: Any,
    own: Collection[str] = (),
) -> Iterator[Recording]:
    """Yields the recording of each module of an engine's ranks. load: loads weights into a module; checkpoint: None
    stands for `model`; own: as of `params_of`."""
    tensors = tensors_of(model if checkpoint is None else checkpoint)
    for rank, module in modules:
        yield record(
            load=partial(load, module),
            params=partial(params_of, module, own),
            checkpoint=tensors,
            mesh=engine.mesh,
            rank=rank,
        )
