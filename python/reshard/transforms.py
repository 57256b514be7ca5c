"""Params that stand behind a conversion of the caller's (``transform: name``), as its hooks see them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _library
from .dtypes import numpy_dtype
from .errors import Error

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True)
class Transformed:
    """An instance of a param, and its memory, which is the executor's and lives until that is closed. The same in every run."""

    transform: str
    name: str
    endpoint: int  #: 0 is the source
    rank: int
    dtype: str  #: as in the YAML: bf16, fp32, fp8_e4m3 …
    shape: tuple[int, ...]  #: of this rank's part, in elements; row-major without gaps
    nbytes: int
    device: str  #: of the memory: "cpu" or "cuda"
    address: int
    stream: int  #: with device "cuda" the cudaStream_t to enqueue on, else 0

    @property
    def memory(self) -> memoryview:
        """Its bytes, which may be written; of device "cpu"."""
        if self.device != "cpu":
            raise Error("the memory is a GPU's, expected to be used by __cuda_array_interface__ or by its address")
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B") if self.nbytes else memoryview(bytearray())

    def numpy(self) -> numpy.ndarray:
        """An array on its memory; of device "cpu"."""
        import numpy

        return numpy.frombuffer(self.memory, numpy_dtype(self.dtype)).reshape(self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Its bytes, for PyTorch and CuPy, which then view them as what they are; of device "cuda"."""
        if self.device != "cuda":
            raise AttributeError("the memory is the host's")
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}


def transformed(seen: _library.Transformed, device: str) -> Transformed:
    """What a hook is given."""
    return Transformed(
        transform=seen.transform.decode(),
        name=seen.name.decode(),
        endpoint=seen.endpoint,
        rank=seen.rank,
        dtype=seen.dtype.decode(),
        shape=tuple(seen.shape[: seen.dimensions]),
        nbytes=seen.bytes,
        device=device,
        address=seen.memory,
        stream=seen.stream or 0,
    )
