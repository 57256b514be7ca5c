"""A plan, asked what it says."""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _library
from ._library import error_of, library
from .dtypes import numpy_dtype
from .errors import Error

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True)
class Summary:
    """The sizes of a plan; bytes are of all ranks together, but for ``arena_bytes``."""

    digest: str  #: 32 hexadecimal digits: plans of one digest are one plan
    compiler: str  #: what wrote it
    model: str
    plan_bytes: int  #: of the file
    world: int  #: ranks
    endpoints: int
    rounds: int
    messages: int
    transfers: int
    target_bytes: int  #: what all targets hold
    local_bytes: int  #: of these from the same rank
    remote_bytes: int  #: … from others
    storage_bytes: int  #: … read from files or written to them
    arena_bytes: int  #: what ``Executor.prepare`` allocates on the rank that needs most


@dataclass(frozen=True)
class Param:
    """What a rank holds under one name: row-major, without gaps."""

    name: str
    dtype: str  #: as in the YAML: bf16, fp32, fp8_e4m3 …
    shape: tuple[int, ...]  #: of this rank's part, in elements
    nbytes: int
    refresh: str  #: the hook that is called after each run, "" where there is none
    transform: str = ""  #: the transform that has its memory, so that nobody binds it; "" where there is none

    @property
    def numpy_dtype(self) -> numpy.dtype:
        """The dtype for NumPy. bf16 and fp8 are those of ``ml_dtypes``, which must be installed."""
        return numpy_dtype(self.dtype)


@dataclass(frozen=True)
class Endpoint:
    """The source or a target."""

    number: int  #: 0 is the source
    role: str  #: "source", "target", "target.0" …
    layout: str
    storage: bool  #: files, not ranks
    ranks: tuple[int, ...]  #: world ranks, or numbers of files


class Plan:
    """A compiled plan. Any number of threads may ask it.

    ``Plan.open(path)`` reads one that ``reshard-compile`` wrote; ``reshard.compile`` makes one.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._handle = ctypes.c_void_p()
        status = library.reshard_plan_open(os.fsencode(path), ctypes.byref(self._handle))
        weakref.finalize(self, library.reshard_plan_close, self._handle)
        if status:
            raise error_of(status, library.reshard_plan_error(self._handle))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Plan:
        """Opens a plan file. Raises PlanError where it is none."""
        return cls(path)

    def __repr__(self) -> str:
        return f"<Plan {self.path!r}, digest {self.summary.digest}>"

    @property
    def summary(self) -> Summary:
        """Its sizes."""
        found = _library.Summary()
        library.reshard_plan_summary(self._handle, ctypes.byref(found))
        values: dict[str, Any] = {name: getattr(found, name) for name, *_ in found._fields_}
        texts = {name: value.decode() for name, value in values.items() if isinstance(value, bytes)}
        return Summary(**values | texts)

    @property
    def world(self) -> int:
        """How many ranks it is for."""
        return self.summary.world

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The source, then the targets."""
        result = []
        for number in range(self.summary.endpoints):
            found = _library.Endpoint()
            library.reshard_plan_endpoint(self._handle, number, ctypes.byref(found))
            ranks = tuple(found.ranks[: found.rank_count])
            result.append(Endpoint(number, found.role.decode(), found.layout.decode(), bool(found.storage), ranks))
        return tuple(result)

    def endpoint(self, which: str | int | None, rank: int) -> Endpoint:
        """The endpoint of a role or a number; with None the only one that a rank (or file) is part of. Raises Error where there is none, or several."""
        endpoints = self.endpoints
        if which is None:
            fit = [endpoint for endpoint in endpoints if rank in endpoint.ranks]
            if len(fit) != 1:
                roles = " and ".join(endpoint.role for endpoint in fit) or "no endpoint"
                raise Error(f"rank {rank} is in {roles}, expected endpoint=… to say which" if fit else f"rank {rank} is in no endpoint of the plan")
            return fit[0]
        for endpoint in endpoints:
            if which in (endpoint.role, endpoint.number):
                return endpoint
        raise Error(f"there is no endpoint {which!r}, expected one of {', '.join(endpoint.role for endpoint in endpoints)}")

    def params(self, rank: int, endpoint: str | int | None = None) -> dict[str, Param]:
        """What a rank (or, of a storage endpoint, a file) holds, by name, in the plan's order: what is bound, and what has a ``transform``.

        ``endpoint``: a role or a number; it may be left out where the rank is part of one endpoint only.
        """
        at = self.endpoint(endpoint, rank)
        found, count = ctypes.POINTER(_library.Param)(), ctypes.c_size_t()
        if status := library.reshard_plan_params(self._handle, at.number, rank, ctypes.byref(found), ctypes.byref(count)):
            raise error_of(status, f"{at.role} has no {'file' if at.storage else 'rank'} {rank}".encode() if status == 1 else b"out of memory")
        result = {}
        for param in found[: count.value]:
            name = param.name.decode()
            result[name] = Param(name, param.dtype.decode(), tuple(param.shape[: param.dimensions]), param.bytes, param.refresh.decode(), param.transform.decode())
        return result
