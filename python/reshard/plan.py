# SPDX-License-Identifier: Apache-2.0
"""Reads a compiled plan."""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _library
from ._library import error_of, library, text_for
from .dtypes import numpy_dtype
from .errors import Error

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True)
class Summary:
    """The sizes of a plan. Bytes are sums over all ranks, except ``arena_bytes``."""

    digest: str  #: 32 hexadecimal digits; plans with equal digests are equal
    compiler: str  #: name and version of the compiler that wrote the plan
    model: str
    plan_bytes: int  #: size of the file
    world: int  #: number of ranks
    endpoints: int
    rounds: int
    messages: int
    transfers: int
    target_bytes: int  #: bytes of all targets
    local_bytes: int  #: those of them that are copied from the same rank
    remote_bytes: int  #: those that other ranks send
    storage_bytes: int  #: those that are read from files or written to files
    arena_bytes: int  #: maximum over all ranks of the bytes that ``Executor.prepare`` allocates


@dataclass(frozen=True)
class Param:
    """What a rank holds under one name, in row-major order without gaps."""

    name: str
    dtype: str  #: as in the YAML: bf16, fp32, fp8_e4m3 …
    shape: tuple[int, ...]  #: of this rank's shard, in elements
    nbytes: int
    refresh: str  #: the name of the hook that is called after each run, or ""
    #: The name of the transform that provides its memory, or ""; params with a transform are not bound.
    transform: str = ""

    @property
    def numpy_dtype(self) -> numpy.dtype:
        """The dtype for NumPy. bf16 and fp8 are those of ``ml_dtypes``, which must be installed."""
        return numpy_dtype(self.dtype)


@dataclass(frozen=True)
class Endpoint:
    """One side of a job: the source or a target."""

    number: int  #: 0 is the source
    role: str  #: "source", "target", "target.0" …
    layout: str
    storage: bool  #: True if its members are files, not ranks
    #: World ranks; numbers of files if ``storage``. Of a target with ``replicas``: those of replica 0; rank ``i`` of
    #: replica ``k`` has world rank ``ranks[0] + k * len(ranks) + i``.
    ranks: tuple[int, ...]


class Plan:
    """A compiled plan. Thread-safe.

    ``Plan.open(path)`` opens a file that ``reshard-compile`` wrote; ``reshard.compile`` compiles a job.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._handle = ctypes.c_void_p()
        status = library.reshard_plan_open(text_for(os.fsencode(path), "plan"), ctypes.byref(self._handle))
        weakref.finalize(self, library.reshard_plan_close, self._handle)
        if status:
            raise error_of(status, library.reshard_plan_error(self._handle))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Plan:
        """Opens a plan file. Raises PlanError if it is missing or invalid."""
        return cls(path)

    def __repr__(self) -> str:
        return f"<Plan {self.path!r}, digest {self.summary.digest}>"

    @property
    def summary(self) -> Summary:
        """The sizes of the plan."""
        found = _library.Summary()
        library.reshard_plan_summary(self._handle, ctypes.byref(found))
        values: dict[str, Any] = {name: getattr(found, name) for name, *_ in found._fields_ if name != "size"}
        texts = {name: value.decode() for name, value in values.items() if isinstance(value, bytes)}
        return Summary(**values | texts)

    @property
    def world(self) -> int:
        """The number of ranks of the plan."""
        return self.summary.world

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All endpoints: the source, then the targets."""
        result = []
        for number in range(self.summary.endpoints):
            found = _library.Endpoint()
            library.reshard_plan_endpoint(self._handle, number, ctypes.byref(found))
            ranks = tuple(found.ranks[: found.rank_count])
            result.append(Endpoint(number, found.role.decode(), found.layout.decode(), bool(found.storage), ranks))
        return tuple(result)

    def endpoint(self, which: str | int | None, rank: int) -> Endpoint:
        """Returns the endpoint with this role or number; with None, the only one that contains the rank (or file).
        Raises Error if none or several do."""
        endpoints = self.endpoints
        if which is None:
            fit = [endpoint for endpoint in endpoints if self._params(rank, endpoint) is not None]
            if len(fit) != 1:
                roles = ", ".join(endpoint.role for endpoint in fit)
                raise Error(
                    f"rank {rank} is in several endpoints ({roles}): pass endpoint=…"
                    if fit
                    else f"rank {rank} is in no endpoint of the plan, which has {self.world} ranks"
                )
            return fit[0]
        for endpoint in endpoints:
            if which in (endpoint.role, endpoint.number):
                return endpoint
        raise Error(
            f"the plan has no endpoint {which!r}, expected one of {', '.join(endpoint.role for endpoint in endpoints)}"
        )

    def params(self, rank: int, endpoint: str | int | None = None) -> dict[str, Param]:
        """Returns the params that a rank (in a storage endpoint: a file) holds, by name, in the plan's order, including
        those with a ``transform``.

        ``endpoint``: a role or a number; optional if the rank is in one endpoint only.
        """
        at = self.endpoint(endpoint, rank)
        found = self._params(rank, at)
        if found is None:
            raise Error(f"{at.role} has no {'file' if at.storage else 'rank'} {rank}")
        result = {}
        for param in found:
            texts = (param.name, param.dtype, param.refresh, param.transform)
            name, dtype, refresh, transform = (text.decode() for text in texts)
            result[name] = Param(name, dtype, tuple(param.shape[: param.dimensions]), param.bytes, refresh, transform)
        return result

    def _params(self, rank: int, at: Endpoint) -> list[_library.Param] | None:
        """The params of a rank or file of an endpoint; None if the endpoint does not have it."""
        if not 0 <= rank < 2**32:  # ctypes would pass its last 32 bits
            return None
        found, count = ctypes.POINTER(_library.Param)(), ctypes.c_size_t()
        status = library.reshard_plan_params(
            self._handle, at.number, int(rank), ctypes.sizeof(_library.Param), ctypes.byref(found), ctypes.byref(count)
        )
        if status > 1:
            raise error_of(status, b"out of memory")
        return None if status else found[: count.value]
