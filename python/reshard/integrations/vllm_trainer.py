# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of a refit of vLLM. It does not import vLLM.

trainer = Trainer("refit.rplan", module, LLMClient(llm) if rank == 0 else None, rank=rank, rendezvous=url)
for batch in batches:
    step(module, batch)
    trainer.refit(timeout=60)       # on every trainer rank
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..coverage import check_coverage
from ..errors import Error, TimeoutError
from ..executor import Executor, check_rendezvous, fail_open
from ..plan import Plan
from ._engine import reported

#: Seconds in which the engine's error, if it is the cause why this process has not joined, is there too.
_CAUSE_SECONDS = 10.0


class Client(Protocol):
    """Calls all workers of an engine; vLLM's ``VLLMWeightSyncClient``. vLLM has clients for HTTP and Ray."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class LLMClient:
    """The client of a ``vllm.LLM`` in this process."""

    def __init__(self, llm: Any):
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.collective_rpc("init_weight_transfer_engine", args=(init_info,))

    def start_weight_update(self) -> None:
        self._llm.collective_rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._llm.collective_rpc("update_weights", args=(update_info,))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.collective_rpc("finish_weight_update")
        self._llm.reset_prefix_cache()  # its keys and values are those of the old weights


class _Call:
    """A call in a thread of its own, while this one takes part in the refit."""

    def __init__(self, function: Callable[[], None]):
        self._function = function
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._call, daemon=True)
        self._thread.start()

    def _call(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error

    def raise_error(self, seconds: float) -> None:
        """Raises the exception of the call, if it ends with one in this time."""
        self._thread.join(seconds)
        if self._error:
            raise self._error

    def wait(self, seconds: float) -> None:
        """Waits for the end of the call. Raises its exception, or TimeoutError if it does not end in this time."""
        self.raise_error(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"trainer: the engine did not answer within {seconds:g} s")


def shards_of(module: Any, params: Mapping[str, Any], left: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the tensors of a trainer's module by the names of the plan: of a DTensor, its local shard.

    module: a PyTorch module, of which params and persistent buffers are sent, or tensors by name.
    params: those of the plan for this rank.
    left: globs of names of the module that are not sent. Each must match one.

    Raises BindError for a tensor that neither the plan nor ``left`` covers, for one that both cover, and for a param of
    the plan that the module lacks. Of tied names, those of the plan are sent.
    """
    tied: Mapping[str, str] = {}
    if isinstance(module, Mapping):
        live: Mapping[str, Any] = module
    else:
        from ..torch import aliases_of, tensors_of

        live = tensors_of(module)
        tied = aliases_of(live)
    check_coverage(live, params, left, "trainer", tied)
    shards = {name: tensor.detach() for name, tensor in live.items() if name in params}
    return {name: tensor.to_local() if hasattr(tensor, "to_local") else tensor for name, tensor in shards.items()}


class Trainer:
    """The part of one trainer rank in the refits of a vLLM engine.

    plan: the path of a plan whose target is the engine.
    module: the trainer's module, or its tensors by name. Its tensors are sent in place, and must keep their addresses.
    client: calls the engine, on one trainer rank; None on the others.
    rank: the world rank of this process.
    rendezvous: a URL that all processes reach ("tcp://host:port", "file:///folder").
    left: globs of params of the module that are not sent.
    engine_left: globs of the engine's params that keep their values.
    transport, device: as of ``Executor``.
    timeout: seconds that joining and each refit wait for other processes.
    pull: pull mode, for a plan whose target has ``replicas``: a lost engine ends no job, and ``attach`` adds another.
    synchronize: in pull mode with several trainer ranks: waits for all of them, such as
        torch.distributed.barrier. No rank may release its weights before the engine has them.
    """

    def __init__(
        self,
        plan: str,
        module: Any,
        client: Client | None,
        *,
        rank: int,
        rendezvous: str,
        left: Sequence[str] = (),
        engine_left: Sequence[str] = (),
        transport: str = "ucx",
        device: str = "cpu",
        timeout: float = 300,
        pull: bool = False,
        synchronize: Callable[[], object] | None = None,
    ):
        job: dict[str, Any] = {"rendezvous": rendezvous, "transport": transport, "device": device}
        check_rendezvous(**job, join_timeout=timeout)
        self._client, self._timeout, self._synchronize = client, timeout, synchronize
        self._info: dict[str, Any] = {"plan": plan, "rendezvous": rendezvous, "transport": transport}
        self._info |= {"left": list(engine_left), "timeout": timeout, "pull": pull}
        opened = Plan.open(plan)
        if pull and not synchronize and len(opened.endpoints[0].ranks) > 1:
            raise Error(
                "trainer: found pull mode and several trainer ranks, expected synchronize, which waits for all of them"
            )
        shards = shards_of(module, opened.params(rank), left)  # before the engine waits for this process
        engine_rank = opened.endpoints[1].ranks[0]
        joined = threading.Event()  # or this process has failed to, which the engine is not the cause of

        def init(client: Client) -> None:
            try:
                client.init_weight_transfer_engine(self._info)
            except BaseException as raised:
                if not pull and not joined.is_set():  # all trainer ranks wait for the engine
                    fail_open(raised, engine_rank, **job, join_timeout=timeout)
                raise

        call = _Call(lambda: init(client)) if client else None
        waits = f"for the other trainer ranks and the engine's workers at {rendezvous}"
        try:
            with reported(f"trainer rank {rank}", waits):
                self.executor = Executor(opened, rank, **job, join_timeout=timeout, pull=pull)
            try:
                self.executor.bind(shards)
                self.executor.prepare()
            except BaseException as raised:
                self.executor._give_up(raised)
                self.executor.close()
                raise
        except Error:
            joined.set()
            if call:
                call.raise_error(min(timeout, _CAUSE_SECONDS))
            raise
        if call:
            call.wait(timeout)

    def attach(self, client: Client | None) -> None:
        """In pull mode: takes another engine in place of the one before, for example after its restart. Raises its
        error. With None, refits update no engine until the next call."""
        self._client = client
        if client:
            _Call(lambda: client.init_weight_transfer_engine(self._info)).wait(self._timeout)

    def refit(self, timeout: float | None = None, *, check: bool = False, allow_undigested: bool = False) -> int:
        """Sends the present weights; returns the number of refits. Every trainer rank calls it.

        timeout: seconds; None: that of the constructor.
        check: compare what arrives in the memory of the engine's workers with the trainer's weights,
            by digests. If they differ, the error names the tensors.
        allow_undigested: with ``check``, permit params that cannot be compared, since they are quantized.

        Raises reshard.Error within twice the timeout: the deadline of the refit, then that of the engine's answer. The
        engine's own error has precedence, since it is the cause. In pull mode the trainer can continue: the next refit
        sends later weights.
        """
        seconds = timeout or self._timeout
        update = {"timeout": seconds, "check": check, "allow_undigested": allow_undigested}
        if self._info["pull"]:
            return self._publish(update, seconds)
        call = self._update(update)
        try:
            self.executor.run(timeout=seconds, check=check, allow_undigested=allow_undigested)
        except Error:
            call.raise_error(seconds)
            raise
        call.wait(seconds)
        return self.executor.version

    def _publish(self, update: dict[str, Any], seconds: float) -> int:
        version = self.executor.version + 1
        self.executor.publish(version, check=update["check"])
        try:
            self._update(update | {"min_version": version}).wait(seconds)
        finally:
            try:
                if self._synchronize:
                    self._synchronize()
            finally:
                self.executor.release(seconds)
        return version

    def _update(self, info: dict[str, Any]) -> _Call:
        """Starts an update of the engine."""

        def update() -> None:
            if client := self._client:
                client.start_weight_update()
                client.update_weights(info)
                client.finish_weight_update()

        return _Call(update)

    def close(self) -> None:
        """Leaves the job. The engine keeps its weights."""
        self.executor.close()
