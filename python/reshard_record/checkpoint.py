# SPDX-License-Identifier: Apache-2.0
"""Names, dtypes and shapes of the tensors of a checkpoint, from the headers of its safetensors files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.dtypes import DTYPES, safetensors_name
from reshard.errors import Error

Tensors = dict[str, tuple[str, tuple[int, ...]]]
_BY_NAME = {safetensors_name(name)[0]: name for name in DTYPES}
_HEADER_BYTES = 100 << 20  # the limit of the format


def _header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file."""
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= _HEADER_BYTES:
            raise Error(f"{path}: not a safetensors file: the header has {length} bytes, expected 2 to {_HEADER_BYTES}")
        text = file.read(length)
    return _json(path, text)


def _json(path: Path, text: bytes) -> dict[str, Any]:
    """The object that a JSON text has."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise Error(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Error(f"{path}: JSON of type {type(found).__name__}, expected an object")
    return found


def tensors_of(checkpoint: str | os.PathLike[str] | Mapping[str, tuple[str, Any]]) -> Tensors:
    """Returns {name: (dtype, shape)}, sorted by name.

    checkpoint: a folder with safetensors files, of which only the headers are read, or {name: (dtype, shape)}.
    """
    if isinstance(checkpoint, Mapping):
        for name, (dtype, _) in checkpoint.items():
            if dtype not in DTYPES:
                raise Error(f"tensor {name} has dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
        return {name: (dtype, tuple(shape)) for name, (dtype, shape) in sorted(checkpoint.items())}
    folder = Path(checkpoint)
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.exists():
        weights = _json(index, index.read_bytes()).get("weight_map")
        if not isinstance(weights, dict):
            raise Error(f"{index}: no map weight_map")
        files = sorted({folder / name for name in weights.values()})
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise Error(f"{missing[0]}: no such file, which {index.name} names")
    if not files:
        raise Error(f"{folder}: no safetensors files, expected model.safetensors or model.safetensors.index.json")
    tensors: Tensors = {}
    for path in files:
        for name, entry in _header(path).items():
            if name == "__metadata__":
                continue
            if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
                raise Error(f"{path}: the entry of tensor {name} has no shape")
            if entry.get("dtype") not in _BY_NAME:
                raise Error(
                    f"{path}: tensor {name} has dtype {entry.get('dtype')}, expected one of {', '.join(_BY_NAME)}"
                )
            if name in tensors:
                raise Error(f"{path}: tensor {name} is also in another file")
            tensors[name] = (_BY_NAME[entry["dtype"]], tuple(entry["shape"]))
    return dict(sorted(tensors.items()))
