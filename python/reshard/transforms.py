# SPDX-License-Identifier: Apache-2.0
"""Params with a transform of the caller (``transform: name``), as the transform's hooks see them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _library
from .dtypes import dtype_by_name, numpy_dtype, torch_dtype
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
        return (
            memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B")
            if self.nbytes
            else memoryview(bytearray())
        )

    def numpy(self) -> numpy.ndarray:
        """Returns a NumPy array that shares the memory. Only for device "cpu"."""
        import numpy

        return numpy.frombuffer(self.memory, numpy_dtype(self.dtype)).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """Returns a PyTorch tensor that shares the memory, on either device."""
        import torch

        if not self.nbytes:
            return torch.empty(self.shape, dtype=torch_dtype(self.dtype), device=self.device)
        bytes = (
            torch.frombuffer(self.memory, dtype=torch.uint8)
            if self.device == "cpu"
            else torch.as_tensor(self, device="cuda")
        )
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

    def numpy_pair() -> _Pair:
        import numpy

        return lambda values: -numpy.exp(values), lambda values: numpy.log(-values)

    torch_pair: _Pair = (lambda tensor: tensor.exp_().neg_(), lambda tensor: tensor.neg_().log_())
    return _hooks("neg_exp", tensors, "fp32", torch_pair, numpy_pair)


def minus_one(tensors: Mapping[str, Any]) -> dict[str, Callable[[Transformed], None]]:
    """Returns the hooks of ``transform: minus_one``: v is sent, the caller's tensor is v - 1. Megatron-Core stores the
    weights of norms so with ``layernorm_zero_centered_gamma``.

    tensors: as for ``neg_exp``, in bf16, fp16 or fp32. v is rounded to their dtype, then 1 is subtracted. A source
        sends the tensor's values plus 1. With device "cuda", a source must provide its own ``prepare_send``.
    """
    numpy_pair: _Pair = (lambda values: values - 1, lambda values: values + 1)
    torch_pair: _Pair = (lambda tensor: tensor.sub_(1), lambda tensor: tensor.add_(1))
    return _hooks("minus_one", tensors, "bf16 fp16 fp32", torch_pair, lambda: numpy_pair)


#: The function of the values and its inverse. Those of PyTorch work in place, those of NumPy return new arrays.
_Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def _hooks(
    name: str, tensors: Mapping[str, Any], dtypes: str, of_torch: _Pair, of_numpy: Callable[[], _Pair]
) -> dict[str, Callable[[Transformed], None]]:
    """The hooks of an element-wise function. dtypes: those that the caller's tensors may have."""

    def live(param: Transformed) -> Any:
        tensor = tensors.get(param.name)
        if tensor is None:
            raise Error(
                f"param {param.name!r} of transform {param.transform!r} is missing in the tensors given to {name}"
            )
        if tuple(tensor.shape) != param.shape or dtype_by_name(tensor.dtype) not in dtypes.split():
            raise Error(
                f"param {param.name!r}: found {dtype_by_name(tensor.dtype)} {list(tensor.shape)}, "
                f"expected {' or '.join(dtypes.split())} {list(param.shape)}"
            )
        return tensor.detach() if hasattr(tensor, "detach") else tensor

    def finalize(param: Transformed) -> None:
        tensor = live(param)
        if hasattr(tensor, "copy_"):  # on a GPU this is captured in a graph, so it must not allocate
            with _stream(param):
                of_torch[0](tensor.copy_(param.torch()))
        else:
            tensor[...] = of_numpy()[0](param.numpy().astype(tensor.dtype).astype("float32"))

    def prepare_send(param: Transformed) -> None:
        tensor = live(param)
        if param.device != "cpu":
            raise Error(
                f"param {param.name!r}: {name} cannot send from device {param.device}, expected cpu; pass your own "
                "prepare_send to set_transform"
            )
        if hasattr(tensor, "copy_"):
            param.torch().copy_(of_torch[1](tensor.float().clone()))
        else:
            param.numpy()[...] = of_numpy()[1](tensor.astype("float32"))

    return {"prepare_send": prepare_send, "finalize": finalize}


def _stream(param: Transformed) -> Any:
    """Returns a context in which PyTorch enqueues work on the hook's stream."""
    if param.device == "cpu":
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.ExternalStream(param.stream))
