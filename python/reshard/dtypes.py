# SPDX-License-Identifier: Apache-2.0
"""Names of the plan's dtypes in NumPy, ml_dtypes, PyTorch, JAX, DLPack, the buffer protocol and safetensors."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import Error

if TYPE_CHECKING:
    import numpy
    import torch

#: name in a plan: (name in NumPy, ml_dtypes, PyTorch and JAX; type code and bits in DLPack; format in the buffer
#: protocol)
_ROWS = {
    "bf16": ("bfloat16", (4, 16), None),
    "fp16": ("float16", (2, 16), "e"),
    "fp32": ("float32", (2, 32), "f"),
    "fp64": ("float64", (2, 64), "d"),
    "fp8_e4m3": ("float8_e4m3fn", (10, 8), None),
    "fp8_e5m2": ("float8_e5m2", (12, 8), None),
    "i8": ("int8", (0, 8), "b"),
    "i16": ("int16", (0, 16), "h"),
    "i32": ("int32", (0, 32), "i"),
    "i64": ("int64", (0, 64), "l"),
    "u8": ("uint8", (1, 8), "B"),
    "u16": ("uint16", (1, 16), "H"),
    "u32": ("uint32", (1, 32), "I"),
    "u64": ("uint64", (1, 64), "L"),
    "bool": ("bool", (6, 8), "?"),
}
#: All dtype names of plans.
DTYPES = tuple(_ROWS)
_BY_NAME = {row[0]: name for name, row in _ROWS.items()}
_BY_DLPACK = {row[1]: name for name, row in _ROWS.items()}
_BY_FORMAT = {row[2]: name for name, row in _ROWS.items() if row[2]} | {"q": "i64", "Q": "u64"}


def dtype_by_name(dtype: object) -> str:
    """Returns the plan's name of a dtype of NumPy, ml_dtypes, PyTorch or JAX, or the dtype's own name if plans have no
    such dtype."""
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    return _BY_NAME.get(name, name)


def dtype_of(name: str, tensor: Any) -> str:
    """Returns the plan's name of the dtype of a param; raises Error if plans have no such dtype."""
    dtype = dtype_by_name(tensor.dtype)
    if dtype not in DTYPES:
        raise Error(f"param {name!r}: dtype {dtype} is not supported, expected one of {', '.join(DTYPES)}")
    return dtype


def dtype_by_dlpack(code: int, bits: int, lanes: int) -> str:
    """Returns the plan's name of a DLPack dtype, or a description if plans have no such dtype."""
    return (
        _BY_DLPACK.get((code, bits), f"DLPack type code {code} with {bits} bits")
        if lanes == 1
        else f"DLPack vector of {lanes} lanes"
    )


def dtype_by_format(text: str) -> str:
    """Returns the plan's name of a buffer protocol format, or the format if plans have no such dtype."""
    return _BY_FORMAT.get(text.lstrip("@="), f"buffer format {text!r}")


def numpy_dtype(name: str) -> numpy.dtype:
    """Returns the NumPy dtype for a plan's dtype; from ``ml_dtypes`` if NumPy itself does not have it."""
    import numpy

    if _ROWS[name][2]:
        return numpy.dtype(_ROWS[name][0])
    import ml_dtypes

    extension: type = getattr(ml_dtypes, _ROWS[name][0])
    return numpy.dtype(extension)


def torch_dtype(name: str) -> torch.dtype:
    """Returns the PyTorch dtype for a plan's dtype."""
    import torch

    found: torch.dtype = getattr(torch, _ROWS[name][0])
    return found


def safetensors_name(name: str) -> tuple[str, int]:
    """Returns the dtype's name in a safetensors header, and the bytes of an element."""
    bits = _ROWS[name][1][1]
    special = {"bf16": "BF16", "bool": "BOOL", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}
    return special.get(name) or {"f": "F", "i": "I", "u": "U"}[name[0]] + str(bits), bits // 8


def safetensors_header(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> tuple[bytes, int]:
    """Returns the beginning of a safetensors file, up to the data of these tensors, {name: (dtype, shape)}, and the
    bytes of the data."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        stored, itemsize = safetensors_name(dtype)
        begin, end = end, end + math.prod(shape) * itemsize
        header[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, end
