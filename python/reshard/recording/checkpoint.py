# SPDX-License-Identifier: Apache-2.0
"""Names, dtypes and shapes of the tensors of a checkpoint, from the headers of its safetensors files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..dtypes import DTYPES, safetensors_name
from ..errors import Error

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
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise Error(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise Error(f"{path}: the header is not a JSON object")
    return header


def tensors_of(checkpoint: str | os.PathLike[str] | Mapping[str, tuple[str, Any]]) -> Tensors:
    """Returns {name: (dtype, shape)}, sorted by name.

    checkpoint: a folder with safetensors files, of which only the headers are read, or {name: (dtype, shape)}.
    """
    if isinstance(checkpoint, Mapping):
        return {name: (dtype, tuple(shape)) for name, (dtype, shape) in sorted(checkpoint.items())}
    folder = Path(checkpoint)
    index = folder / "model.safetensors.index.json"
    files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()}) if index.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise Error(f"{folder}: no safetensors files, expected model.safetensors or model.safetensors.index.json")
    tensors: Tensors = {}
    for path in files:
        for name, entry in _header(path).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _BY_NAME:
                raise Error(f"{path}: tensor {name} has dtype {entry['dtype']}, expected one of {', '.join(_BY_NAME)}")
            if name in tensors:
                raise Error(f"{path}: tensor {name} is also in another file")
            tensors[name] = (_BY_NAME[entry["dtype"]], tuple(entry["shape"]))
    return dict(sorted(tensors.items()))
