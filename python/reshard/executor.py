"""Runs a plan on tensors."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import _library
from ._library import error_of, library
from .errors import BindError, Error
from .memory import Memory, memory_of
from .plan import Endpoint, Param, Plan
from .transforms import Transformed, transformed


def _address(stream: Any) -> int:
    """The cudaStream_t of a stream."""
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("cuda_stream", "ptr"):  # PyTorch's, CuPy's
        if hasattr(stream, name):
            return int(getattr(stream, name))
    raise Error(f"found {type(stream).__name__}, expected a stream of PyTorch or CuPy, or an address")


def _seconds(timeout: float | None) -> float:
    """For the library, where 0 is no deadline."""
    if timeout is not None and not timeout > 0:
        raise Error(f"found a deadline of {timeout} seconds, expected more than 0, or None")
    return timeout or 0


class Executor:
    """The ranks of this process: ``bind`` their tensors, ``prepare`` once, then ``run`` as often as weights move.

    One thread at a time; calls let other threads run. A context manager: ``close`` at the end.

    plan: a Plan, or the path of one.
    rank: the world rank, or several; None: every rank of the plan, or with a transport between processes this process's own.
    transport: "threads" (all ranks in this process), "mpi" (one in each process), "nccl" (likewise, with device "cuda").
    device: where tensors are, "cpu" or "cuda".
    threads: workers of this process; 0: all cores.
    join_timeout: seconds that opening, ``prepare`` and ``close`` wait for other processes; None: for ever.
    no_local_shortcut: messages even where a peer's memory could be reached directly.
    communicator: of "nccl", the address of a ncclComm_t that stays the caller's.
    unique_id_file: of "nccl" without a communicator: the new file by which processes find each other.
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str],
        rank: int | Iterable[int] | None = None,
        *,
        transport: str = "threads",
        device: str = "cpu",
        threads: int = 0,
        join_timeout: float | None = None,
        no_local_shortcut: bool = False,
        communicator: int | None = None,
        unique_id_file: str | os.PathLike[str] | None = None,
    ):
        self.plan = plan if isinstance(plan, Plan) else Plan.open(plan)
        self.device = device
        self._bound: list[Memory] = []  # what the library points to
        self._hooks: list[Any] = []
        self._raised: BaseException | None = None  # by a hook
        self._handle = ctypes.c_void_p()
        ranks = list(rank) if isinstance(rank, Iterable) else [] if rank is None else [rank]
        options = _library.Options(
            transport.encode(),
            device.encode(),
            threads,
            _seconds(join_timeout),
            no_local_shortcut,
            communicator,
            os.fsencode(unique_id_file) if unique_id_file else None,
        )
        numbers = None if rank is None else (ctypes.c_uint32 * len(ranks))(*ranks)
        path = os.fsencode(self.plan.path)
        status = library.reshard_open(path, numbers, len(ranks), ctypes.byref(options), ctypes.byref(self._handle))
        self._collected = weakref.finalize(self, library.reshard_close, self._handle)
        self._collected.atexit = False  # there _close_all
        _executors[next(_numbers)] = self
        try:
            self._check(status)
        except Error:
            self.close()
            raise

    @property
    def ranks(self) -> tuple[int, ...]:
        """The world ranks of this process."""
        count = ctypes.c_size_t()
        return tuple(library.reshard_ranks(self._open(), ctypes.byref(count))[: count.value])

    def bind(self, tensors: Mapping[str, Any], endpoint: str | int | None = None, rank: int | None = None) -> None:
        """Binds tensors by the names of the plan. They are kept alive until ``close``, and must not be moved or resized.

        tensors: of PyTorch, NumPy, CuPy, JAX (sources only), or with the buffer protocol. dtype, shape and device must be the
            plan's, elements row-major without gaps. Several calls may bind some each; prepare says what is missing.
        endpoint: "source", "target" … or a number; may be left out where the rank is part of one endpoint only.
        rank: the world rank, or of a storage endpoint the number of a file; may be left out where this process has one rank.

        Raises BindError, which says what was found and expected; tensors that stand before the wrong one are bound.
        """
        if rank is None:
            own = self.ranks
            if len(own) != 1:
                raise BindError(f"this process has {len(own)} ranks, expected rank=… to say which")
            rank = own[0]
        at = self.plan.endpoint(endpoint, rank)
        params = self.plan.params(rank, at.role)
        for name, tensor in tensors.items():
            where = f"{at.role} {'file' if at.storage else 'rank'} {rank} param {name!r}"
            try:
                memory = memory_of(tensor)
                if name in params and not params[name].transform:  # of which the library says that it is not bound
                    self._compare(memory, params[name], at)
            except BindError as wrong:
                raise BindError(f"{where}: {wrong}") from None
            expected = params[name].nbytes if name in params else 0  # of an unknown name the library says which is near
            self._check(library.reshard_bind(self._open(), at.number, rank, name.encode(), memory.address or None, expected))
            self._bound.append(memory)

    def _compare(self, memory: Memory, param: Param, endpoint: Endpoint) -> None:
        if memory.dtype != param.dtype:
            raise BindError(f"found dtype {memory.dtype}, expected {param.dtype}")
        if memory.shape != param.shape:
            raise BindError(f"found shape {list(memory.shape)}, expected {list(param.shape)}")
        if not memory.contiguous:
            raise BindError(f"found strides {list(memory.strides or ())} of shape {list(memory.shape)}, expected row-major without gaps")
        if memory.device.partition(":")[0] != self.device:
            raise BindError(f"found device {memory.device}, expected {self.device}")
        if memory.readonly and endpoint.number > 0:
            raise BindError("found read-only memory, expected a target that may be written")

    def set_hook(self, name: str, hook: Callable[[int], object]) -> None:
        """Sets what is called with the rank after each run, for params that the plan marks ``refresh: name``. What it raises, ``run`` raises."""

        def call(_user: int, _name: bytes, rank: int) -> int:
            try:
                hook(rank)
                return 0
            except BaseException as raised:
                self._raised = raised
                return 1

        kept = _library.HOOK(call)
        self._check(library.reshard_set_hook(self._open(), name.encode(), kept, None))
        self._hooks.append(kept)

    def set_transform(
        self,
        name: str,
        prepare_send: Callable[[Transformed], object] | None = None,
        prepare_receive: Callable[[Transformed], object] | None = None,
        finalize: Callable[[Transformed], object] | None = None,
    ) -> None:
        """Sets your own conversion for params that the plan marks ``transform: name``, which nobody binds. What a hook raises, ``run`` raises.

        Each is called once a run for each such param of each rank of this process; with device "cuda" instead once in ``prepare``, where it enqueues
        its work on ``param.stream``, as a part of every run.

        prepare_send: fills ``param.memory`` before anything is sent; params of the source need it.
        prepare_receive: is called before anything is received.
        finalize: takes ``param.memory`` over when all bytes are there, before hooks of ``refresh``; params of a target need it.
        """

        def kept(hook: Callable[[Transformed], object] | None) -> Any:
            def call(_user: int, param: Any) -> int:
                try:
                    hook(transformed(param.contents, self.device))  # type: ignore[misc]
                    return 0
                except BaseException as raised:
                    self._raised = raised
                    return 1

            return _library.TRANSFORM_HOOK(call) if hook else _library.TRANSFORM_HOOK()

        hooks = _library.Transform(kept(prepare_send), kept(prepare_receive), kept(finalize), None)
        self._check(library.reshard_set_transform(self._open(), name.encode(), ctypes.byref(hooks)))
        self._hooks.append(hooks)

    def prepare(self) -> None:
        """Checks that everything is bound and nothing overlaps, agrees with the other processes, allocates what runs need."""
        self._check(library.reshard_prepare(self._open()))

    def run(self, stream: Any = None, timeout: float | None = None) -> None:
        """Moves every byte.

        Without a stream it returns when all are there; with device "cuda" what writes the sources must be done before.
        timeout: seconds; None: no deadline.
        stream: with device "cuda", a stream of PyTorch, CuPy or another library, or a cudaStream_t's address. Then the refit is enqueued there, or made part of
            the graph that is being captured there, and the call returns: nobody waits, so there is no ``timeout``, and ``state`` and ``version`` stay as they are.

        Raises TimeoutError or RunError: then ``state`` is "torn", until a later run completes.
        """
        if stream is None:
            self._check(library.reshard_run(self._open(), _seconds(timeout)))
        elif timeout is None:
            self._check(library.reshard_enqueue(self._open(), _address(stream)))
        else:
            raise Error("found a stream and a timeout, expected one of them: nobody waits for what is on a stream")

    def all_reduce_min(self, value: int) -> int:
        """The least ``value`` of all processes. Every process of the run must call it."""
        result = ctypes.c_int64()
        self._check(library.reshard_all_reduce_min(self._open(), value, ctypes.byref(result)))
        return result.value

    @property
    def version(self) -> int:
        """How many runs have completed."""
        return int(library.reshard_version(self._open()))

    @property
    def state(self) -> str:
        """Of the targets: "empty", "complete", or "torn" (a run failed part way: do not use them)."""
        return _library.STATES[library.reshard_target_state(self._open())]

    @property
    def nbytes(self) -> int:
        """Bytes that a run moves, padding included."""
        return int(library.reshard_bytes(self._open()))

    @property
    def bytes_by(self) -> dict[str, int]:
        """Bytes that a run moves to the ranks of this process, by method; known after ``prepare``.

        "local": copied within the process. "shared_memory": out of the memory of another process of its host. "messages": received as messages.
        "messages_inside_host": the part of "messages" from processes of its host, because their memory cannot be mapped.
        """
        return {method: int(library.reshard_bytes_by(self._open(), number)) for number, method in enumerate(_library.METHODS)}

    def close(self) -> None:
        """Lets go of everything that is bound. May be called twice."""
        if self._handle:
            self._collected.detach()
            library.reshard_close(self._handle)
            self._handle = ctypes.c_void_p()
        self._bound.clear()
        self._hooks.clear()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        if raised is None:  # else peers may be in a run, and would be waited for
            self.close()

    def _open(self) -> ctypes.c_void_p:
        if not self._handle:
            raise Error("the executor is closed")
        return self._handle

    def _check(self, status: int) -> None:
        raised, self._raised = self._raised, None
        if status:
            raise error_of(status, library.reshard_error(self._handle)) from raised


#: In the order in which they were opened.
_executors: weakref.WeakValueDictionary[int, Executor] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@atexit.register
def _close_all() -> None:
    """Closes what is still open, but not after an exception that ends the process: peers may be in a run, and would be waited for. Their launcher ends them."""
    if not hasattr(sys, "last_value"):
        for executor in list(_executors.values()):
            executor.close()
