# SPDX-License-Identifier: Apache-2.0
"""The memory of a tensor of any library, through DLPack (PyTorch, NumPy, CuPy, JAX), NumPy's array interface (for the
dtypes of ml_dtypes and for read-only arrays, which DLPack does not support), or the buffer protocol."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .dtypes import dtype_by_dlpack, dtype_by_format, dtype_by_name
from .errors import BindError


@dataclass(frozen=True)
class Memory:
    """The address, shape and type of a tensor's elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  #: in elements; None: row-major without gaps
    dtype: str  #: the plan's name, or a description if plans have no such dtype
    device: str  #: "cpu", "cuda:0" …
    readonly: bool
    owner: object  #: keeps the memory alive

    @property
    def contiguous(self) -> bool:
        """Row-major without gaps."""
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides or ())):
            if length != 1 and stride != expected and 0 not in self.shape:
                return False
            expected *= length
        return True


class _Tensor(ctypes.Structure):  # DLTensor
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

#: DLDeviceType to device; pinned memory (3) counts as cpu, managed memory (13) as cuda.
_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}


def _by_dlpack(tensor: Any) -> Memory:
    # Not consumed: the capsule releases the tensor when it is deleted.
    capsule = tensor.__dlpack__()
    found = _Tensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    device = _DEVICES.get(found.device_type, f"DLPack device type {found.device_type}")
    return Memory(
        address=(found.data or 0) + found.byte_offset,
        shape=tuple(found.shape[: found.ndim]),
        strides=tuple(found.strides[: found.ndim]) if found.strides else None,
        dtype=dtype_by_dlpack(found.code, found.bits, found.lanes),
        device=f"{device}:{found.device_id}" if device == "cuda" else device,
        readonly=False,
        owner=capsule,
    )


def _strides(of_bytes: Sequence[int] | None, itemsize: int) -> tuple[int, ...] | None:
    return (
        None if of_bytes is None else tuple(stride // itemsize if stride % itemsize == 0 else -1 for stride in of_bytes)
    )


def _by_array_interface(array: Any) -> Memory:
    interface = array.__array_interface__
    address, readonly = interface["data"]
    dtype = array.dtype
    name = dtype_by_name(dtype) if dtype.isnative else f"{dtype} of foreign byte order"
    return Memory(
        address, tuple(interface["shape"]), _strides(interface["strides"], dtype.itemsize), name, "cpu", readonly, array
    )


def _by_buffer(buffer: Any) -> Memory:
    view = memoryview(buffer)
    # ctypes.from_buffer gives the address, but only of a writable buffer.
    if view.readonly:
        raise BindError("found a read-only buffer, expected a writable one, or a NumPy array of it (numpy.frombuffer)")
    address = ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes and view.contiguous else 0
    strides = _strides(view.strides, view.itemsize)
    return Memory(address, view.shape or (), strides, dtype_by_format(view.format), "cpu", False, view)


def memory_of(tensor: Any) -> Memory:
    """Returns the memory of a tensor. Raises BindError if the object is not a tensor."""
    if getattr(tensor, "requires_grad", False):
        # The same memory; DLPack does not export tensors that require gradients.
        tensor = tensor.detach()
    if hasattr(tensor, "__dlpack__"):
        try:
            return _by_dlpack(tensor)
        except (BufferError, TypeError, ValueError, RuntimeError) as refused:
            if not hasattr(tensor, "__array_interface__"):
                raise BindError(f"DLPack cannot export this tensor: {refused}") from refused
    if hasattr(tensor, "__array_interface__"):
        return _by_array_interface(tensor)
    try:
        return _by_buffer(tensor)
    except TypeError:
        raise BindError(
            f"found {type(tensor).__name__}, expected a tensor: an "
            "object with DLPack support, a NumPy array, or a buffer"
        ) from None
