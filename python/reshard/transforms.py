"""Params that stand behind a conversion of the caller's (``transform: name``), as its hooks see them."""

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

    def torch(self) -> torch.Tensor:
        """A tensor of PyTorch on its memory, of either device."""
        import torch

        if not self.nbytes:
            return torch.empty(self.shape, dtype=torch_dtype(self.dtype), device=self.device)
        bytes = torch.frombuffer(self.memory, dtype=torch.uint8) if self.device == "cpu" else torch.as_tensor(self, device="cuda")
        return bytes.view(torch_dtype(self.dtype)).view(self.shape)

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


def neg_exp(tensors: Mapping[str, Any]) -> dict[str, Callable[[Transformed], None]]:
    """The hooks of ``transform: neg_exp``: what moves is v, the caller's tensor is -exp(v) in fp32. So is Mamba's ``A`` in engines, of ``A_log``.

        executor.set_transform("neg_exp", **reshard.neg_exp(dict(model.named_parameters())))

    tensors: by the names of the params, of PyTorch or NumPy; others may be among them. As of ``bind``, they must not be moved or resized.

    A source gives log(-A) in the dtype that moves; with device "cuda" a source needs a ``prepare_send`` of your own.
    """

    def live(param: Transformed) -> Any:
        tensor = tensors.get(param.name)
        if tensor is None:
            raise Error(f"param {param.name!r} of the transform {param.transform!r} is not among the tensors given to neg_exp")
        if tuple(tensor.shape) != param.shape or str(tensor.dtype).rpartition(".")[2] != "float32":
            raise Error(f"param {param.name!r}: found {tensor.dtype} {list(tensor.shape)}, expected float32 {list(param.shape)}")
        return tensor.detach() if hasattr(tensor, "detach") else tensor

    def finalize(param: Transformed) -> None:
        tensor = live(param)
        if hasattr(tensor, "copy_"):  # on a GPU this is captured: nothing of its own may be allocated
            with _stream(param):
                tensor.copy_(param.torch()).exp_().neg_()
        else:
            import numpy

            tensor[...] = -numpy.exp(param.numpy().astype(numpy.float32))

    def prepare_send(param: Transformed) -> None:
        tensor = live(param)
        if param.device != "cpu":
            raise Error(f"param {param.name!r}: found device {param.device}, expected cpu, or a prepare_send of your own")
        if hasattr(tensor, "copy_"):
            param.torch().copy_(tensor.neg().log_())
        else:
            import numpy

            param.numpy()[...] = numpy.log(-tensor)

    return {"prepare_send": prepare_send, "finalize": finalize}


def _stream(param: Transformed) -> Any:
    """Where PyTorch enqueues what a hook does."""
    if param.device == "cpu":
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.ExternalStream(param.stream))
