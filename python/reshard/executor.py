# SPDX-License-Identifier: Apache-2.0
"""Runs a plan on tensors."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import fnmatch
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import POINTER
from dataclasses import dataclass
from typing import Any

from . import _library
from ._library import error_of, flag_for, library, number_for, text_for
from ._waiting import Signals
from .errors import BindError, Error, PlanError, RunError
from .memory import Memory, memory_of
from .plan import Endpoint, Param, Plan
from .rendezvous import store_of
from .transforms import Allocated, Transformed, transformed

#: The greatest number of 64 bits.
_MOST = 2**64 - 1


def _address(stream: Any) -> int:
    """Returns the address of a stream's cudaStream_t."""
    if isinstance(stream, int):
        return number_for(stream, "stream", 0, _MOST)
    if hasattr(stream, "__cuda_stream__"):
        return number_for(stream.__cuda_stream__()[1], "stream", 0, _MOST)
    for name in ("cuda_stream", "ptr"):  # PyTorch's, CuPy's
        if hasattr(stream, name):
            return number_for(getattr(stream, name), "stream", 0, _MOST)
    raise Error(
        f"stream: found {type(stream).__name__}, expected a stream of PyTorch or CuPy, or the address of a cudaStream_t"
    )


def _replaced(plan: Plan) -> PlanError:
    return PlanError(
        f"'{plan.path}' was replaced since this Plan was opened: it had the digest {plan.summary.digest}; open it again"
    )


def _seconds(timeout: float | None) -> float:
    """Converts a timeout for the library, where 0 means no deadline."""
    if timeout is not None and not timeout > 0:
        raise Error(f"timeout: found {timeout} seconds, expected more than 0, or None for no deadline")
    return timeout or 0


def _secret(secret: str | None) -> bytes | None:
    """Returns a secret for the library; None: that of the environment."""
    if secret is None:
        return None
    found = text_for(secret, "secret") if "\0" not in secret else b""
    if not found:
        raise Error(
            "secret: found an empty text, or one with NUL characters, expected 1 to 4096 bytes, or None for "
            "the one in RESHARD_SECRET"
        )
    return found


def _ranks(rank: int | Iterable[int] | None) -> tuple[Any, int]:
    """Returns the array of the library and its length; None, 0 for None."""
    if rank is None:
        return None, 0
    ranks = [number_for(each, "rank", 0, 2**32 - 1) for each in (rank if isinstance(rank, Iterable) else [rank])]
    return (ctypes.c_uint32 * len(ranks))(*ranks), len(ranks)


@dataclass(frozen=True)
class Replica:
    """What the source knows about one engine replica in pull mode."""

    replica: int  #: its number, from 0
    ranks: int  #: how many of its ranks are connected
    #: "pulling", "complete" (all its ranks hold ``version``), or "lost" (a process of it has ended or is unreachable)
    state: str
    version: int  #: the version that it holds or pulls; of a lost replica, the one that it pulled last


@dataclass(frozen=True)
class TensorDigest:
    """The digest of a tensor that an endpoint holds."""

    dtype: str  #: in memory
    shape: tuple[int, ...]
    #: 32 hexadecimal digits, those of ``reshard-digest`` for files with the same elements; None: the endpoint does not
    #: hold all elements
    digest: str | None


class Executor:
    """Executes a plan for the ranks of this process: ``bind`` their tensors, ``prepare`` once, then ``run`` for every
    refit.

    Not thread-safe; calls release the global interpreter lock. A context manager that calls ``close`` at the end.
    Signals are handled while a call waits; if a handler raises, as that of Ctrl-C does, the call ends as at its
    deadline and raises the same. Hooks must not call their executor, except for its properties. In a process that was
    forked from the executor's every call raises Error, and ``close`` has no effect.

    plan: a Plan, or the path of a plan file.
    rank: one world rank or several; None: every rank of the plan, or the rank of this process if the transport connects
        processes.
    transport: "threads" (all ranks in this process), or one that connects processes (one rank per process), as
        ``reshard-exec --help`` lists them.
    device: the device of the tensors, "cpu" or "cuda".
    threads: worker threads of this process; 0: one per core.
    join_timeout: seconds that opening, ``prepare`` and ``close`` wait for other processes; None: no limit.
    no_local_shortcut: send messages even if a peer's memory could be accessed directly.
    communicator: for "nccl", the address of an ncclComm_t, which the caller still owns.
    rendezvous: for transports that have one, how the processes find each other without a common launcher: a URL
        ("tcp://host:port", which rank 0 serves; "file:///folder"; "env://", the variables of torchrun, srun or mpirun),
        or an object with ``set(key, value)`` and ``get(key)``, such as a store of torch.distributed.
    job: a name that the processes have in common, if several jobs use one rendezvous.
    secret: a secret that the processes have in common, 1 to 4096 bytes; None: the environment variable RESHARD_SECRET.
    insecure: without a secret, accept processes of other machines and users.
    pull: pull mode, for a transport that has it and a plan whose target has ``replicas``: a process of the source calls
        ``publish`` and ``release``, one of an engine replica calls ``pull``, in place of ``run``. Processes join and
        leave at any time; opening and ``prepare`` wait for no other process.
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
        rendezvous: Any = None,
        job: str | None = None,
        secret: str | None = None,
        insecure: bool = False,
        pull: bool = False,
    ):
        self.device = device
        #: The bound memory, which must stay alive, and its bytes: by role, rank (or file) and name.
        self._bound: dict[tuple[str, int, str], tuple[Memory, int]] = {}
        self._hooks: list[Any] = []
        #: The memory of ``allocate``: its owner and its view, by role, rank and name.
        self._allocated: dict[tuple[str, int, str], tuple[Any, Allocated]] = {}
        self._landed: list[tuple[str, Callable[[dict[str, Allocated]], object]]] = []  # globs and hooks of on_landed
        #: Calls of run without a stream; not the version, which differs between processes after a hook failed.
        self._runs = 0
        self._stale = False  # a hook of on_landed has failed since the last complete run
        self._raised: BaseException | None = None  # the exception of a hook
        self._signals = Signals()
        self._process = os.getpid()
        self._calling = ""  # the call in progress, whose hooks must not make another
        self._ends: float | None = None  # its deadline for the caller's store, of time.monotonic
        self._join_timeout = join_timeout
        self._handle = ctypes.c_void_p()
        options = _library.Options(
            transport=text_for(transport, "transport"),
            device=text_for(device, "device"),
            threads=number_for(threads, "threads", 0, 2**32 - 1),
            join_seconds=_seconds(join_timeout),
            no_local_shortcut=flag_for(no_local_shortcut, "no_local_shortcut"),
            insecure=flag_for(insecure, "insecure"),
            communicator=None if communicator is None else number_for(communicator, "communicator", 0, _MOST),
            job=text_for(job, "job") if job else None,
            secret=_secret(secret),
            pull=flag_for(pull, "pull"),
            interrupted=self._signals.asked,
        )
        if isinstance(rendezvous, str):
            options.rendezvous = text_for(rendezvous, "rendezvous")
        elif rendezvous is not None:
            store = store_of(rendezvous, self._fail, self._left)
            self._hooks.append(store)
            options.store = ctypes.pointer(store)
        numbers, count = _ranks(rank)
        path = text_for(os.fsencode(plan.path if isinstance(plan, Plan) else plan), "plan")
        with self._in("open", join_timeout):
            status = library.reshard_open(path, numbers, count, ctypes.byref(options), ctypes.byref(self._handle))
        self._collected = weakref.finalize(self, library.reshard_close, self._handle)
        self._collected.atexit = False  # at exit, _close_all closes it
        _executors[next(_numbers)] = self
        try:
            self._check(status)
            # Opened last: the library tells the other processes of the job why a plan cannot be opened.
            self.plan = plan if isinstance(plan, Plan) else Plan.open(plan)
            self._check_opened(self.plan)
        except BaseException:
            self.close()
            raise

    def replace(
        self,
        plan: Plan | str | os.PathLike[str],
        rank: int | Iterable[int] | None = None,
        *,
        rendezvous: str | None = None,
    ) -> None:
        """Between runs, replaces the plan, for example because the trainer has lost a node and has another mesh now.
        All processes of the new plan call it; then ``bind`` what is missing, ``prepare`` and ``run``.

        Kept are hooks, transforms, ``state`` and ``version``; the tensors of params that have the same endpoint, name
        and size in both plans; and with transport "ucx" their registrations and the connections to processes that are
        in both plans. Other tensors are released. If it fails, the old plan stays.

        rank: the world rank, or several, that this process has in the new plan, in the order of ``ranks``, whose
            tensors they take over; None: every rank of the plan, or with transport "ucx" the present one.
        rendezvous: a URL; None: the store that is open. That of "tcp://host:port" ends with the process that was rank 0
            when it was opened.
        """
        new = plan if isinstance(plan, Plan) else Plan.open(plan)
        before = self.ranks
        numbers, count = _ranks(rank)
        url = None if rendezvous is None else text_for(rendezvous, "rendezvous")
        if Plan.open(new.path).summary.digest != new.summary.digest:
            raise _replaced(new)
        self._call("replace", library.reshard_replace, text_for(os.fsencode(new.path), "plan"), numbers, count, url)
        files = {at.role for at in self.plan.endpoints if at.storage}
        self.plan = new
        try:
            self._check_opened(new)
        except PlanError:  # the file was replaced since the look above
            self.close()
            raise
        follows = dict(zip(before, self.ranks))
        moved = {
            (role, at if role in files else follows.get(at, -1), name): bound
            for (role, at, name), bound in self._bound.items()
        }
        self._bound = {key: bound for key, bound in moved.items() if self._has(*key, bound[1])}
        self._allocated = self._allocated_in_new_plan()

    def _check_opened(self, plan: Plan) -> None:
        """Fails if the library has opened another plan than this one, by whose dtypes and shapes ``bind`` checks."""
        if library.reshard_opened_digest(self._handle).decode() != plan.summary.digest:
            raise _replaced(plan)

    def _allocated_in_new_plan(self) -> dict[tuple[str, int, str], tuple[Any, Allocated]]:
        """Returns the memory of ``allocate`` that is still bound, with its ranks in the new plan."""
        views = {view.address: (owner, view) for owner, view in self._allocated.values()}
        kept = {}
        for (role, rank, name), (memory, _) in self._bound.items():
            if memory.address in views:
                owner, view = views[memory.address]
                at, shape = self.plan.endpoint(role, rank), self.plan.params(rank, role)[name].shape
                view = dataclasses.replace(view, endpoint=at.number, rank=rank, shape=shape)
                kept[role, rank, name] = owner, view
        return kept

    def _has(self, role: str, rank: int, name: str, nbytes: int) -> bool:
        """Whether the plan has a param of that size."""
        held = any(at.role == role and rank in at.ranks for at in self.plan.endpoints)
        params = self.plan.params(rank, role) if held else {}
        return name in params and params[name].nbytes == nbytes

    @property
    def ranks(self) -> tuple[int, ...]:
        """The world ranks of this process."""
        count = ctypes.c_size_t()
        return tuple(library.reshard_ranks(self._open(), ctypes.byref(count))[: count.value])

    def bind(self, tensors: Mapping[str, Any], endpoint: str | int | None = None, rank: int | None = None) -> None:
        """Binds tensors to the plan's params by name. The executor keeps them alive until ``close``; they must not be
        moved or resized.

        tensors: tensors of PyTorch, NumPy, CuPy, JAX (sources only), or buffers. dtype, shape and device must match the
            plan; elements are row-major without gaps. Several calls may bind some tensors each; ``prepare`` reports
            missing ones.
        endpoint: "source", "target" … or a number; optional if the rank is in one endpoint only.
        rank: the world rank, or for a storage endpoint the number of a file; optional if this process has one rank.

        Raises BindError, which states what was found and what was expected. Tensors before the wrong one stay bound.
        """
        if rank is None:
            own = self.ranks
            if len(own) != 1:
                raise BindError(
                    f"this process has {len(own)} ranks: pass rank=… to select one of "
                    f"{', '.join(map(str, own[:8]))}{' …' if len(own) > 8 else ''}"
                )
            rank = own[0]
        at = self.plan.endpoint(endpoint, rank)
        params = self.plan.params(rank, at.role)
        for name, tensor in tensors.items():
            where = f"{at.role} {'file' if at.storage else 'rank'} {rank} param {name!r}"
            try:
                memory = memory_of(tensor)
                # For a transformed param, the library reports the error.
                if name in params and not params[name].transform:
                    self._compare(memory, params[name], at)
            except BindError as wrong:
                raise BindError(f"{where}: {wrong}") from None
            # For an unknown name, the library suggests a similar one.
            expected = params[name].nbytes if name in params else 0
            address = number_for(memory.address, f"{where}: address", 0, _MOST) or None
            self._call("bind", library.reshard_bind, at.number, rank, text_for(name, "param"), address, expected)
            self._bound[at.role, rank, name] = (memory, expected)

    def allocate(self, name: str, endpoint: str | int | None = None, rank: int | None = None) -> Allocated:
        """Allocates host memory for a param and binds it: for a param that the framework stores in another form than
        the plan, for example repacked for a kernel. ``on_landed`` gives it to the caller after each run.

        The executor owns the memory until ``close``, or until ``replace`` to a plan without the param. Must be called
        before ``prepare``, like ``bind``, whose arguments it has. Only for device "cpu".

        Raises BindError if the rank has no such param, or one with a ``transform``, whose memory the executor has
        already.
        """
        if rank is None and len(self.ranks) == 1:
            rank = self.ranks[0]
        if rank is None:
            raise BindError(
                f"param {name!r}: this process has {len(self.ranks)} ranks: pass rank=… to select one of them"
            )
        at = self.plan.endpoint(endpoint, rank)
        param = self.plan.params(rank, at.role).get(name)
        if param is None or param.transform or self.device != "cpu":
            found = (
                "device " + self.device
                if self.device != "cpu"
                else f"transform {param.transform!r}"
                if param
                else "no such param"
            )
            raise BindError(
                f"{at.role} rank {rank} param {name!r}: found {found}, expected a param in "
                "host memory without a transform"
            )
        owner = (ctypes.c_ubyte * (param.nbytes + 63))()
        address = (ctypes.addressof(owner) + 63) // 64 * 64
        bound = text_for(name, "param"), address if param.nbytes else None, param.nbytes
        self._call("allocate", library.reshard_bind, at.number, rank, *bound)
        memory = Memory(address, param.shape, None, param.dtype, "cpu", False, owner)
        self._bound[at.role, rank, name] = (memory, param.nbytes)
        view = Allocated(name, at.number, rank, param.dtype, param.shape, param.nbytes, address)
        self._allocated[at.role, rank, name] = (owner, view)
        return view

    def on_landed(self, group: str, hook: Callable[[dict[str, Allocated]], object]) -> None:
        """Sets a hook for the params of ``allocate`` whose names match a glob, such as "model.layers.3.*". Each ``run``
        and each ``pull`` of a new version calls it with these params by name, for each rank of this process, after the
        last byte has arrived and after the hooks of ``refresh``. Hooks are called in the plan's order of the first
        param of their groups.

        If a hook raises, ``run`` raises RunError and calls no further hook; ``state`` is "torn" until a later run
        completes. A glob that matches no allocated param is a RunError too. A run on a stream calls no hook.
        """
        self._landed.append((group, hook))

    def _land(self, what: str) -> None:
        """Calls the hooks of on_landed."""
        with self._in(what):
            self._call_landed()

    def _call_landed(self) -> None:
        self._stale = bool(self._landed)
        calls = []
        for group, hook in self._landed:
            by_rank: dict[tuple[str, int], dict[str, Allocated]] = {}
            for (role, rank, name), (_, view) in self._allocated.items():
                if fnmatch.fnmatchcase(name, group):
                    by_rank.setdefault((role, rank), {})[name] = view
            if not by_rank:
                raise RunError(f"on_landed: no allocated param matches {group!r}; call allocate for it before prepare")
            for (role, rank), found in by_rank.items():
                order = {name: number for number, name in enumerate(self.plan.params(rank, role))}
                landed = {name: found[name] for name in sorted(found, key=order.__getitem__)}
                calls.append((order[next(iter(landed))], role, rank, group, hook, landed))
        for _, role, rank, group, hook, landed in sorted(calls, key=lambda call: call[0]):
            try:
                hook(landed)
            except Exception as raised:
                raise RunError(f"{role} rank {rank}: the hook of on_landed({group!r}) failed: {raised}") from raised
        self._stale = False

    def _compare(self, memory: Memory, param: Param, endpoint: Endpoint) -> None:
        if memory.dtype != param.dtype:
            raise BindError(f"found dtype {memory.dtype}, expected {param.dtype}")
        if memory.shape != param.shape:
            raise BindError(f"found shape {list(memory.shape)}, expected {list(param.shape)}")
        if not memory.contiguous:
            raise BindError(
                f"found strides {list(memory.strides or ())} for shape {list(memory.shape)}, expected row-major "
                "without gaps: pass a contiguous tensor"
            )
        if memory.device.partition(":")[0] != self.device:
            raise BindError(f"found device {memory.device}, expected {self.device}")
        if memory.readonly and endpoint.number > 0:
            raise BindError("found read-only memory, expected writable memory for a target")

    def set_hook(self, name: str, hook: Callable[[int], object]) -> None:
        """Sets the hook for params with ``refresh: name``: it is called with the rank after each run. ``run`` raises
        the hook's exceptions as RunError."""

        def call(_user: int, _name: bytes, rank: int) -> int:
            try:
                hook(rank)
                return 0
            except BaseException as raised:
                self._raised = raised
                return 1

        kept = _library.HOOK(call)
        self._call("set_hook", library.reshard_set_hook, text_for(name, "hook"), kept, None)
        self._hooks.append(kept)

    def set_transform(
        self,
        name: str,
        prepare_send: Callable[[Transformed], object] | None = None,
        prepare_receive: Callable[[Transformed], object] | None = None,
        finalize: Callable[[Transformed], object] | None = None,
    ) -> None:
        """Sets your own conversion for params with ``transform: name``, which are not bound. ``run`` raises the hooks'
        exceptions as RunError.

        Each hook is called once per run for each such param of each rank of this process. With device "cuda", it is
        called once in ``prepare`` instead, and enqueues its work on ``param.stream``; the executor repeats this work in
        every run.

        prepare_send: fills ``param.memory`` before anything is sent; required for params of the source.
        prepare_receive: called before anything is received.
        finalize: takes over ``param.memory`` when all bytes have arrived, before hooks of ``refresh``; required for
            params of a target.
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

        hooks = _library.Transform(
            prepare_send=kept(prepare_send), prepare_receive=kept(prepare_receive), finalize=kept(finalize)
        )
        self._call("set_transform", library.reshard_set_transform, text_for(name, "transform"), ctypes.byref(hooks))
        self._hooks.append(hooks)

    def prepare(self) -> None:
        """Checks that all params are bound and that none overlap, connects to the other processes, and allocates the
        memory that runs need."""
        self._call("prepare", library.reshard_prepare)

    def run(
        self,
        stream: Any = None,
        timeout: float | None = None,
        *,
        check: bool | int = False,
        first_index: bool = False,
        changed: bool = False,
        allow_undigested: bool = False,
    ) -> None:
        """Moves all bytes of the plan.

        Without a stream, returns when all bytes have arrived. With device "cuda", GPU work that writes the sources must
        be complete before the call.
        timeout: seconds; None: no deadline.
        stream: with device "cuda", a stream of PyTorch, CuPy or another library, or the address of a cudaStream_t. The
            refit is enqueued on it, or added to the graph that is being captured on it, and the call returns at once.
            It does not wait, so ``timeout`` and ``check`` are not allowed, and ``state`` and ``version`` do not change.
        check: compare the digests of the targets, every replica included, with those of the source. True: in this run;
            a number n: in each n-th call. All processes pass the same values. If a target
            differs, every process raises RunError, which names the tensors and the ranks, and the targets are torn.
            Source replicas must be equal.
        first_index: with ``check``, the error states the first wrong index of the first wrong tensor.
        changed: with ``check``, a source that is equal to that of the last checked run raises Error; nothing is moved.
        allow_undigested: with ``check``, permit target params that cannot be compared, since they or their sources are
            quantized or transformed (``undigested``); otherwise they raise Error.

        Raises TimeoutError or RunError; ``state`` is then "torn" until a later run completes.
        """
        if check < 0 or (stream is not None and check) or (not check and (first_index or changed or allow_undigested)):
            raise Error(
                f"run: found check={check}, expected True or a number of runs for options of a check, and no check of "
                "a run on a stream"
            )
        flags = {"first_index": first_index, "changed": changed, "allow_undigested": allow_undigested}
        checks = {name: flag_for(value, name) for name, value in flags.items()}
        if stream is None:
            self._free("run")
            self._runs += 1
            given = ctypes.byref(_library.Check(**checks)) if check and self._runs % check == 0 else None
            self._call("run", library.reshard_run, _seconds(timeout), given, seconds=timeout)
            self._land("run")
        elif timeout is None:
            self._call("run", library.reshard_enqueue, _address(stream))
        else:
            raise Error("run: found a stream and a timeout, expected only one of them; a run on a stream does not wait")

    def digest(
        self, endpoint: str | int = "source", *, allow_undigested: bool = False, timeout: float | None = None
    ) -> dict[str, TensorDigest]:
        """Returns the digests of the tensors that an endpoint holds now, by name: the same in every layout, on every
        number of ranks. Elements that several ranks hold count once; padding does not count.

        Every process must call it, after ``prepare``. All params of the endpoint must be bound.
        endpoint: "source", "target" … or a number.
        allow_undigested: permit params without a digest, which are quantized or transformed (``undigested``); otherwise
            they raise Error.
        timeout: seconds; None: no deadline.
        """
        at = self.plan.endpoint(endpoint, -1)
        found, count = POINTER(_library.TensorDigest)(), ctypes.c_size_t()
        result = ctypes.sizeof(_library.TensorDigest), ctypes.byref(found), ctypes.byref(count)
        allowed = flag_for(allow_undigested, "allow_undigested")
        self._call("digest", library.reshard_digest, at.number, allowed, _seconds(timeout), *result, seconds=timeout)
        return {
            each.tensor.decode(): TensorDigest(
                each.dtype.decode(), tuple(each.shape[: each.dimensions]), each.digest.decode() or None
            )
            for each in found[: count.value]
        }

    @property
    def undigested(self) -> tuple[str, ...]:
        """The params without a digest in the last ``digest``, checked ``run`` or checked
        ``pull``: "target param 'x'"."""
        count = ctypes.c_size_t()
        names = library.reshard_undigested(self._open(), ctypes.byref(count))
        return tuple(name.decode() for name in names[: count.value])

    def all_reduce_min(self, value: int) -> int:
        """Returns the minimum of the ``value`` arguments of all processes. Every process must call it (an
        all-reduce)."""
        result = ctypes.c_int64()
        number = number_for(value, "value", -(2**63), 2**63 - 1)
        self._call("all_reduce_min", library.reshard_all_reduce_min, number, ctypes.byref(result))
        return result.value

    def publish(self, version: int, *, check: bool = False) -> None:
        """Pull mode, of a rank of the source: offers the bound tensors to the engines as ``version``, and waits for
        none. They must not change until ``release`` returns.

        version: greater than 0 and than all versions that this process has published.
        check: compute the digests that a ``pull`` with ``check`` compares: the call reads the tensors once, before it
            offers the version. All ranks of the source pass the same.

        Engine replicas can pull the version when all ranks of the source have published it. Raises Error if a version
        is published already.
        """
        self._call("publish", library.reshard_publish, number_for(version, "version", 0, _MOST), bool(check))

    def release(self, timeout: float | None = None) -> None:
        """Pull mode, of a rank of the source: ends the publication. The bound tensors may change when it returns, and
        also when it raises TimeoutError.

        From now on no engine begins to read the version. Waits for the engines that are reading it.
        timeout: seconds; None: no deadline. At the deadline, engines that are still reading lose the version: they
            discard what they have read. TimeoutError names them.

        Raises Error if no version is published.
        """
        self._call("release", library.reshard_release, _seconds(timeout), seconds=timeout)

    def pull(
        self, min_version: int = 0, timeout: float | None = None, *, check: bool = False, allow_undigested: bool = False
    ) -> int:
        """Pull mode, of a rank of an engine replica: waits for a published version of at least ``min_version``, writes
        it to the bound tensors and returns its number. All ranks of a replica must call it; they obtain the same
        version.

        Returns at once if the replica holds the newest version already. If the source releases the version during the
        pull, the pull is repeated with a later one.
        timeout: seconds; None: no deadline.
        check: compare digests of the tensors with those of the source ranks that hold them, also if this rank holds the
            version already. If they differ, RunError names the tensors, ``state`` is "torn", no engine reads from this
            rank, and the next ``pull`` moves all bytes again, from the source. All ranks of the replica should check. A
            version that was published without ``check`` is a RunError, before anything is moved.
        allow_undigested: with ``check``, permit target params that cannot be compared, since they or their sources are
            quantized or transformed (``undigested``); otherwise they raise Error.

        Raises TimeoutError, which names what the pull has waited for, or RunError. ``state`` is then "torn" if the pull
        has written to the tensors, else as before; the next ``pull`` continues.
        """
        if allow_undigested and not check:
            raise Error("pull: found allow_undigested without check")
        executor, version = self._open(), ctypes.c_uint64()
        pulls = library.reshard_pulls(executor)
        least = number_for(min_version, "version", 0, _MOST)
        allowed = flag_for(allow_undigested, "allow_undigested")
        given = ctypes.byref(_library.Check(allow_undigested=allowed)) if check else None
        self._call(
            "pull", library.reshard_pull, least, _seconds(timeout), given, ctypes.byref(version), seconds=timeout
        )
        if library.reshard_pulls(executor) != pulls or self._stale:
            self._land("pull")
        return version.value

    def replicas(self) -> list[Replica]:
        """Pull mode: the engine replicas that have pulled, in ascending order. Asks the source's rank 0, at most for
        ``join_timeout``; rank 0 forgets them when its process ends."""
        size, count = ctypes.sizeof(_library.Replica), ctypes.c_size_t()
        found = (_library.Replica * 0)()
        while True:  # until the list has not grown since the last call
            self._call("replicas", library.reshard_replicas, found, size, len(found), ctypes.byref(count))
            if count.value <= len(found):
                break
            found = (_library.Replica * count.value)()
        return [
            Replica(each.replica, each.ranks, _library.REPLICA_STATES[each.state], each.version)
            for each in found[: count.value]
        ]

    @property
    def version(self) -> int:
        """The number of completed runs; in pull mode, the version that was published or pulled last."""
        return int(library.reshard_version(self._open()))

    @property
    def state(self) -> str:
        """The state of the targets: "empty", "complete", or "torn" (a run failed while it wrote them: do not use
        them)."""
        found = _library.STATES[library.reshard_target_state(self._open())]
        return "torn" if self._stale and found == "complete" else found

    @property
    def nbytes(self) -> int:
        """Bytes that a run moves, padding included."""
        return int(library.reshard_bytes(self._open()))

    @property
    def bytes_by(self) -> dict[str, int]:
        """The bytes that a run moves to the ranks of this process, by method. Known after ``prepare``.

        "local": copied within the process. "shared_memory": out of the memory of another process of its host.
        "messages": received as messages.
        "messages_inside_host": the part of "messages" from processes of its host, because their memory cannot be
        mapped.
        """
        return {
            method: int(library.reshard_bytes_by(self._open(), number))
            for number, method in enumerate(_library.METHODS)
        }

    def close(self) -> None:
        """Closes the executor and releases all bound memory. A second call has no effect, nor has one in a process that
        was forked from the executor's. In a hook of the executor it raises Error."""
        self._free("close")
        if self._handle:
            self._collected.detach()
            library.reshard_close(self._handle)
            self._handle = ctypes.c_void_p()
        self._bound.clear()
        self._allocated.clear()
        self._landed.clear()
        self._hooks.clear()
        self._check(0)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, _: object, raised: BaseException | None, *__: object) -> None:
        if raised is None:  # after an exception, close might wait for peers that are still in a run
            self.close()
        else:
            self._give_up(raised)

    def _give_up(self, raised: BaseException) -> None:
        """Before ``prepare``: tells the processes that wait for this one there why it will not come."""
        if self._handle:
            library.reshard_fail(self._handle, reason_of(raised))

    def _open(self) -> ctypes.c_void_p:
        if self._process != os.getpid():
            raise Error(
                f"process {self._process} opened the executor, and this is process {os.getpid()}, which was forked "
                "from it: only the process that opened an"
                " executor can use it; open one here, or start this process in another way (multiprocessing: 'spawn')"
            )
        if not self._handle:
            raise Error("the executor is closed: open a new one")
        return self._handle

    def _free(self, what: str) -> None:
        """Fails inside a hook."""
        if self._calling and self._process == os.getpid():
            raise Error(
                f"{what} during {self._calling} of the same executor: a hook must not call its executor; call "
                f"{what} after {self._calling}"
            )

    @contextmanager
    def _in(self, what: str, seconds: float | None = None) -> Iterator[None]:
        """Marks a call in progress; at most ``seconds`` for the caller's store."""
        self._free(what)
        self._calling, self._ends = what, None if seconds is None else time.monotonic() + seconds
        try:
            with self._signals.watched():
                yield
        finally:
            self._calling = ""

    def _left(self) -> float | None:
        """The seconds that the call in progress has left; None: no limit."""
        return None if self._ends is None else self._ends - time.monotonic()

    def _call(self, what: str, function: Any, *arguments: Any, seconds: float | None = None) -> None:
        """Calls the library. seconds: at most for the caller's store; None: the ``join_timeout``."""
        executor = self._open()
        with self._in(what, seconds or self._join_timeout):
            status = function(executor, *arguments)
        self._check(status)

    def _fail(self, raised: BaseException) -> None:
        """Keeps an exception, which the call in progress raises as the cause of its own."""
        self._raised = raised

    def _check(self, status: int) -> None:
        raised, self._raised = self._raised, None
        signaled, self._signals.raised = self._signals.raised, None
        error = error_of(status, library.reshard_error(self._handle)) if status else None
        if signaled:
            self._stale, self._signals.lost = self._stale or self._signals.lost, False
            raise signaled from error
        if raised and not isinstance(raised, Exception):  # KeyboardInterrupt, SystemExit
            raise raised from error
        if error:
            raise error from raised


def reason_of(raised: BaseException) -> bytes:
    """Returns an exception as a reason for the library."""
    text = str(raised) if isinstance(raised, Error) else f"{type(raised).__name__}: {raised}"
    return text.encode(errors="replace").replace(b"\0", b"?")


def transports() -> list[str]:
    """The names of the transports that connect processes, on device "cpu"."""
    names = (library.reshard_transport(b"cpu", index) for index in itertools.count())
    return [name.decode() for name in itertools.takewhile(bool, names)]


def _job_options(
    rendezvous: str, transport: str, device: str, join_timeout: float | None, **more: Any
) -> _library.Options:
    """Returns the options of a process of a job for the library."""
    return _library.Options(
        transport=text_for(transport, "transport"),
        device=text_for(device, "device"),
        rendezvous=text_for(rendezvous, "rendezvous"),
        join_seconds=_seconds(join_timeout),
        **more,
    )


def check_rendezvous(
    rendezvous: str,
    *,
    transport: str = "ucx",
    device: str = "cpu",
    join_timeout: float | None = None,
    secret: str | None = None,
    insecure: bool = False,
) -> None:
    """Checks these arguments of ``Executor`` without waiting for another process, for a program that starts something
    long before, such as an engine. Raises the Error that opening would raise: for the form of a URL, for the folder of
    file:/// (made if its parent exists), for the variables of env://, for a host that needs a secret."""
    more = {"secret": _secret(secret), "insecure": flag_for(insecure, "insecure")}
    options = _job_options(rendezvous, transport, device, join_timeout, **more)
    text = ctypes.create_string_buffer(1 << 14)
    status = library.reshard_check_options(ctypes.byref(options), text, len(text))
    if status:
        raise error_of(status, text.value.decode(errors="replace").encode())  # a long text may be cut


def fail_open(
    raised: BaseException, rank: int, *, rendezvous: str, transport: str, device: str, join_timeout: float | None = None
) -> None:
    """Tells the processes that wait for a rank to open its Executor why it will not: they raise its error at once.
    Returns when they know, but after 5 seconds or ``join_timeout`` at the latest."""
    numbers, _ = _ranks(rank)
    options = _job_options(rendezvous, transport, device, join_timeout)
    # Its own error changes nothing: `raised` is the cause.
    library.reshard_fail_open(numbers, ctypes.byref(options), reason_of(raised))


#: All open executors, in the order in which they were opened.
_executors: weakref.WeakValueDictionary[int, Executor] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@atexit.register
def _close_all() -> None:
    """Closes all open executors at exit. After an uncaught exception, close might wait for peers that are still in a
    run: their launcher ends them. Those that wait in ``prepare`` are told the exception."""
    for executor in list(_executors.values()):
        if executor._process != os.getpid():
            continue  # a forked process leaves those of the other to it
        if (raised := getattr(sys, "last_value", None)) is None:
            executor.close()
        else:
            executor._give_up(raised)
