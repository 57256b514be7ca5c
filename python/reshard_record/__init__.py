# SPDX-License-Identifier: Apache-2.0
"""Records a layout from a framework's own loader.

params = dict(model.named_parameters())
recording = reshard_record.record(load=model.load_weights, params=params, checkpoint=FOLDER, mesh={"tp": 4}, rank=r)
recording.save(f"rank-{r}.json")                             # on every rank
layout = reshard_record.merge(["rank-0.json", …])         # once
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from reshard.errors import Error

from .checkpoint import tensors_of
from .generalize import General, generalize
from .infer import Layout, merge
from .recording import RecordedParam, Recording, mesh_size

__all__ = ["General", "Layout", "RecordedParam", "Recording", "generalize", "merge", "record"]


def record(
    *,
    load: Callable[[Iterable[tuple[str, Any]]], Any],
    params: Any,
    checkpoint: str | os.PathLike[str] | Mapping[str, tuple[str, Any]],
    mesh: Mapping[str, Any],
    rank: int = 0,
) -> Recording:
    """Runs a PyTorch loader on tensors without memory and returns where each element of each param is from. Neither
    the checkpoint's values nor those of the params are read or written.

    load: a function of an iterable of (name, tensor), such as ``model.load_weights``. It must run in this thread.
    params: {name: tensor}, on the meta device or any other, or a function that returns it, for loaders that replace
        params.
    checkpoint: a folder with safetensors files, of which only the headers are read, or {name: (dtype, shape)}.
    mesh: the mesh of the ranks, as in the YAML: ``{"tp": 4}``.
    rank: this process's mesh rank.

    Raises Error if the loader reads values. Elements that it computes are no error: they are in
    ``recording.params[name].computed``, with the operation.
    """
    from .provenance import record as run

    if not 0 <= rank < mesh_size(mesh):
        raise Error(f"rank {rank} is not in mesh {dict(mesh)}, expected 0 to {mesh_size(mesh) - 1}")
    tensors = tensors_of(checkpoint)
    found = run(load, params, tensors)
    recorded = {
        name: RecordedParam.of(dtype, shape, elements.in_shape(), tensors)
        for name, (dtype, shape, elements) in found.items()
    }
    return Recording(rank, dict(mesh), tensors, recorded)
