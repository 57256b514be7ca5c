# SPDX-License-Identifier: Apache-2.0
"""What the plug-ins of trainers and engines have in common: one process's part in refits."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ..dtypes import torch_dtype
from ..errors import Error, RunError
from ..executor import Executor, check_rendezvous, fail_open

if TYPE_CHECKING:
    import torch

    #: Live tensors by name, or the module that has them.
    Live: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor]


def imported(path: str) -> Any:
    """Returns the function ``MODULE:FUNCTION``."""
    module, colon, name = path.partition(":")
    if not colon:
        raise Error(f"live: found {path!r}, expected MODULE:FUNCTION")
    return getattr(importlib.import_module(module), name)


def free_address(host: str) -> str:
    """Returns a rendezvous URL of this machine with a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"


def check_given(rendezvous: str | None, options: Mapping[str, Any]) -> None:
    """Checks a rendezvous URL, if it is given, with the options of a Member or a Trainer, before anything starts."""
    if rendezvous is not None:
        check_rendezvous(rendezvous, **{name: options[name] for name in ("transport", "device") if name in options})


#: Seconds after which a wait is reported, and reported again.
REPORT_SECONDS = 20.0


@contextlib.contextmanager
def reported(who: str, waits: str) -> Iterator[None]:
    """A context that prints a line to stderr while it takes long. Before the deadline, nothing else tells a user which
    process waits, and for what.

    who: names the process.
    waits: what it waits for, as "for the other processes at file:///shared".
    """
    begin, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(REPORT_SECONDS):
            print(f"reshard: {who} has waited {time.monotonic() - begin:.0f} s {waits}", file=sys.stderr, flush=True)

    threading.Thread(target=report, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def check_slots(model: torch.nn.Module, eplb: bool = False) -> None:
    """Raises Error if vLLM's layers of a model say that experts are, or may come, in other slots than those of the
    loader: a plan does not know which expert is in which slot. eplb: whether the engine has EPLB (expert parallel load
    balancing)."""
    for layer in model.modules():
        if eplb or getattr(layer, "eplb_state", None) is not None:
            raise Error(
                "found enable_eplb, expected it off: vLLM moves experts to other slots while it serves, which a plan "
                "does not know"
            )
        if (strategy := getattr(layer, "expert_placement_strategy", "linear")) != "linear":
            raise Error(
                f"found expert_placement_strategy {strategy!r}, expected linear: a plan does not know which expert is "
                "in which slot"
            )


class Member:
    """The part of one process in the refits of a job: an executor whose params are bound.

    plan: the path of a plan file, equal in all processes.
    rank: the world rank of this process.
    tensors: the live tensors of this rank, bound in place; None: ``landing``, new tensors by the names of the plan.
    rendezvous: the URL at which the processes find each other.
    transport, device: as of ``Executor``.
    timeout: seconds that joining and each run wait for other processes.
    left: globs of live names that the plan does not cover.
    """

    def __init__(
        self,
        plan: str,
        rank: int,
        tensors: Live | None = None,
        *,
        rendezvous: str,
        transport: str = "ucx",
        device: str = "cpu",
        timeout: float = 300,
        left: Sequence[str] = (),
    ):
        job: dict[str, Any] = {"rendezvous": rendezvous, "transport": transport, "device": device}
        check_rendezvous(**job, join_timeout=timeout)
        from ..torch import bind_module

        self.rank = rank
        self.timeout = timeout
        self._failed = ""  # the error of a run
        self._module = None if tensors is None or isinstance(tensors, Mapping) else tensors
        try:
            self._check()
        except Error as raised:
            fail_open(raised, rank, **job, join_timeout=timeout)
            raise
        with reported(f"rank {rank}", f"for the other processes of the job at {rendezvous}"):
            self.executor = Executor(plan, rank, **job, join_timeout=timeout)
        try:
            self.landing = _landing(self.executor, rank) if tensors is None else {}
            self._tensors = self.landing if tensors is None else tensors
            bind_module(self.executor, self._tensors, left=left)
            self.executor.prepare()
        except BaseException as raised:
            self.executor._give_up(raised)
            self.executor.close()
            raise
        self._addresses = self._now()

    def _check(self) -> None:
        if self._module is not None:
            check_slots(self._module)

    def _now(self) -> dict[str, int]:
        """Returns the present addresses of the tensors by name."""
        from ..torch import local_of, tensors_of

        tensors = self._tensors if isinstance(self._tensors, Mapping) else tensors_of(self._tensors)
        return {name: local_of(tensor).data_ptr() for name, tensor in tensors.items()}

    def run(self) -> int:
        """Takes part in one refit and returns the number of refits.

        After a failure the weights of a target rank are torn, and each later call raises RunError; a new Member joins
        again.
        """
        if self._failed:
            raise RunError(f"rank {self.rank}: an earlier refit failed ({self._failed}); join again")
        try:
            self._check()  # the framework may have changed it
            now = self._now()
            moved = sorted(name for name, address in self._addresses.items() if now.get(name) != address)
            if moved:
                raise RunError(
                    f"rank {self.rank}: the framework has replaced {len(moved)} bound params, such as {moved[0]!r}; "
                    "expected the addresses of the first refit"
                )
            self.executor.run(timeout=self.timeout)
        except Error as error:
            self.fail(error)
            raise
        return self.executor.version

    def fail(self, error: BaseException) -> None:
        """Leaves the job because of an error of this process, which the other processes notice."""
        self._failed = str(error) or type(error).__name__
        self.executor.close()

    def close(self) -> None:
        self.executor.close()


def _landing(executor: Executor, rank: int) -> dict[str, torch.Tensor]:
    import torch

    params = executor.plan.params(rank)
    return {
        name: torch.zeros(param.shape, dtype=torch_dtype(param.dtype), device=executor.device)
        for name, param in params.items()
    }


class CheckpointSide:
    """What the checkpoint engines of verl and NeMo-RL have in common: a Member that stays from refit to refit.

    plan: the path of a plan file. Trainer ranks have its world ranks from 0 on, engine ranks follow.
    live: ``MODULE:FUNCTION``, called once in each process of this side, returns its live tensors by the names of the
        plan, or their module: they are moved in place, and the framework's full tensors are neither read nor written.
        None: ``send`` copies the framework's full tensors to landing memory, and ``receive`` returns those that have
        arrived: each process needs memory for all params of its rank in the plan.
    rendezvous: a URL; None: the first trainer rank chooses a port.
    transport, device, timeout: as of ``Member``.
    """

    def __init__(self, plan: str, live: str | None = None, rendezvous: str | None = None, **options: Any):
        check_given(rendezvous, options)
        self._plan = plan
        self._live: Callable[[], Live] | None = imported(live) if live else None
        self._rendezvous = rendezvous
        self._options = options
        self.member: Member | None = None

    def offer(self, host: str) -> str:
        """Returns a rendezvous URL that this process would serve as world rank 0: another one for each attempt to join,
        since another process may have taken the port of the last."""
        return self._rendezvous or free_address(host)

    def join(self, rank: int, rendezvous: str) -> None:
        """Joins the job with a world rank, unless this process is in it."""
        if self.member and self.member.rank != rank:
            raise Error(f"rank {self.member.rank}: found rank {rank} in a later refit, expected the rank of the first")
        if not self.member:
            live = self._live() if self._live else None
            self.member = Member(self._plan, rank, live, rendezvous=rendezvous, **self._options)

    def _joined(self) -> Member:
        if not self.member:
            raise Error("found a refit before the process group was initialized, expected init_process_group first")
        return self.member

    async def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Sends the live tensors, or without them the framework's full tensors."""
        member = self._joined()
        try:
            if not self._live:
                await _fill(member, weights)
        except BaseException as error:
            self.member = None
            await asyncio.to_thread(member.fail, error)  # it waits for other processes, which this loop may run
            raise
        await self._run(member)

    async def receive(self) -> list[tuple[str, torch.Tensor]]:
        """Receives; returns the full tensors that have arrived by name, none if they are live."""
        member = self._joined()
        await self._run(member)
        return list(member.landing.items())

    async def _run(self, member: Member) -> None:
        run = asyncio.create_task(asyncio.to_thread(member.run))  # the actor of Ray still answers
        try:
            await asyncio.shield(run)
        except BaseException as error:
            self.member = None  # the next refit joins again
            await asyncio.shield(asyncio.create_task(_leave(member, run, error)))
            raise


async def _leave(member: Member, run: asyncio.Task[int], error: BaseException) -> None:
    """Closes the executor after its run. A canceled run continues in its thread until its deadline at the latest, and
    only one thread may use an executor."""
    await asyncio.gather(run, return_exceptions=True)
    await asyncio.to_thread(member.fail, error)


async def _fill(member: Member, weights: Any) -> None:
    """Copies full tensors to landing memory. Raises Error for a name or shape that the plan does not have."""
    missing = set(member.landing)

    def copy(name: str, tensor: torch.Tensor) -> None:
        to = member.landing.get(name)
        if to is None:
            raise Error(f"rank {member.rank}: the trainer sends {name!r}, which the plan does not have on this rank")
        if to.shape != tensor.shape:
            raise Error(
                f"rank {member.rank} param {name!r}: found shape {tuple(tensor.shape)}, expected {tuple(to.shape)} as "
                "in the plan"
            )
        to.copy_(tensor.detach())
        missing.discard(name)

    if hasattr(weights, "__aiter__"):
        async for name, tensor in weights:
            copy(name, tensor)
    else:
        for name, tensor in weights:
            copy(name, tensor)
    if missing:
        raise Error(
            f"rank {member.rank}: the trainer did not send {len(missing)} params of the plan, such as {min(missing)!r}"
        )
