# SPDX-License-Identifier: Apache-2.0
"""Params with a transform of the caller (``transform: name``), as the transform's hooks see them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _library
from .dtypes import numpy_dtype, torch_dtype
from .errors import Error

if TYPE_CHECKING:
    import numpy
    import torch


class _View:
    """Memory that the executor owns, as an instance of a param."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    device: str
    address: int

    @property
    def memory(self) -> memoryview:
        """The bytes, writable. Only for device "cpu"."""
        if self.device != "cpu":
            raise Error(f"param {self.name!r} is in GPU memory: use torch(), __cuda_array_interface__ or address")
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B") if self.nbytes else memoryview(bytearray())

    def numpy(self) -> numpy.ndarray:
        """Returns a NumPy array that shares the memory. Only for device "cpu"."""
        import numpy

        return numpy.frombuffer(self.memory, numpy_dtype(self.dtype)).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """Returns a PyTorch tensor that shares the memory, on either device."""
        import torch

        if not self.nbytes:
            return torch.empty(self.shape, dtype=torch_dtype(self.dtype), device=self.device)
        bytes = torch.frombuffer(self.memory, dtype=torch.uint8) if self.device == "cpu" else torch.as_tensor(self, device="cuda")
        return bytes.view(torch_dtype(self.dtype)).view(self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes, for PyTorch and CuPy; view them as the param's dtype and shape. Only for device "cuda"."""
        if self.device != "cuda":
            raise AttributeError(f"param {self.name!r} is in host memory: use memory, numpy() or torch()")
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}


@dataclass(frozen=True)
class Transformed(_View):
    """An instance of a param and its memory. The executor owns the memory; the address stays the same until the
    executor is closed."""

    transform: str
    name: str
    endpoint: int  #: 0 is the source
    rank: int
    dtype: str  #: as in the YAML: bf16, fp32, fp8_e4m3 …
    shape: tuple[int, ...]  #: of this rank's shard, in elements; row-major without gaps
    nbytes: int
    device: str  #: of the memory: "cpu" or "cuda"
    address: int
    stream: int  #: the cudaStream_t to enqueue on if the device is "cuda", else 0


@dataclass(frozen=True)
class Allocated(_View):
    """A param in memory that ``Executor.allocate`` has allocated, in host memory. The address stays the same until the
    executor is closed."""

    name: str
    endpoint: int  #: 0 is the source
    rank: int
    dtype: str  #: as in the YAML
    shape: tuple[int, ...]  #: of this rank's shard, in elements; row-major without gaps
    nbytes: int
    address: int
    device: str = "cpu"


def transformed(seen: _library.Transformed, device: str) -> Transformed:
    """Converts the C struct that a hook receives."""
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


def neg_exp(tensors: Mapping[str, Any]) -> dict[str, Callable[[Transformed], None]]:
    """Returns the hooks of ``transform: neg_exp``: v is sent, the caller's tensor is -exp(v) in fp32. Engines store
    Mamba's ``A`` so, from ``A_log``.

        executor.set_transform("neg_exp", **reshard.neg_exp(dict(model.named_parameters())))

    tensors: tensors of PyTorch or NumPy by the names of their params; further tensors are ignored. As with ``bind``,
        they must not be moved or resized.

    A source sends log(-A) in the dtype of the plan. With device "cuda", a source must provide its own ``prepare_send``.
    """

    def live(param: Transformed) -> Any:
        tensor = tensors.get(param.name)
        if tensor is None:
            raise Error(f"param {param.name!r} of transform {param.transform!r} is missing in the tensors given to neg_exp")
        if tuple(tensor.shape) != param.shape or str(tensor.dtype).rpartition(".")[2] != "float32":
            raise Error(f"param {param.name!r}: found {tensor.dtype} {list(tensor.shape)}, expected float32 {list(param.shape)}")
        return tensor.detach() if hasattr(tensor, "detach") else tensor

    def finalize(param: Transformed) -> None:
        tensor = live(param)
        if hasattr(tensor, "copy_"):  # on a GPU this is captured in a graph, so it must not allocate
            with _stream(param):
                tensor.copy_(param.torch()).exp_().neg_()
        else:
            import numpy

            tensor[...] = -numpy.exp(param.numpy().astype(numpy.float32))

    def prepare_send(param: Transformed) -> None:
        tensor = live(param)
        if param.device != "cpu":
            raise Error(f"param {param.name!r}: neg_exp cannot send from device {param.device}, expected cpu; pass your own prepare_send to set_transform")
        if hasattr(tensor, "copy_"):
            param.torch().copy_(tensor.neg().log_())
        else:
            import numpy

            param.numpy()[...] = numpy.log(-tensor)

    return {"prepare_send": prepare_send, "finalize": finalize}


def _stream(param: Transformed) -> Any:
    """Returns a context in which PyTorch enqueues work on the hook's stream."""
    if param.device == "cpu":
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.ExternalStream(param.stream))
