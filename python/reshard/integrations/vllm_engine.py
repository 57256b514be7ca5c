# SPDX-License-Identifier: Apache-2.0
"""The weight-transfer engine "reshard" of a vLLM worker, and its trainer's side in vLLM's own vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ..agreement import Agreement, Statement
from ..errors import Error, RunError
from ..executor import Executor, check_rendezvous
from ..plan import Plan
from ..releases import check_release
from ._engine import check_given, check_slots, reported
from .vllm import PACKAGES, TESTED
from .vllm_landing import Landing
from .vllm_trainer import Trainer


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What a worker needs to join the refits of a job.

    plan: the path of the plan, which each worker can read.
    rendezvous: the URL at which the processes find each other.
    rank_offset: the world rank of worker 0; None: the first rank of the plan's target. Worker i has
        ``rank_offset + i``: tensor parallel ranks first, then pipeline stages, then data parallel ranks.
    left: globs of live params that the plan does not cover and that keep their values.
    transport: "ucx", or another transport of ``Executor`` that connects processes.
    timeout: seconds to join, and for each update that states none.
    job: a name, if several jobs use one rendezvous.
    pull: in pull mode an update pulls the newest version, and waits for no trainer that is late.
    """

    plan: str
    rendezvous: str
    rank_offset: int | None = None
    left: list[str] = field(default_factory=list)
    transport: str = "ucx"
    timeout: float = 300
    job: str | None = None
    pull: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One update.

    timeout: seconds; None: that of InitInfo.
    min_version: in pull mode, the least version that the update shall pull.
    check: compare the engine's memory with the trainer's by digests, as the trainer does in this update.
    allow_undigested: with ``check``, permit params that cannot be compared, since they are quantized.
    """

    timeout: float | None = None
    min_version: int = 0
    check: bool = False
    allow_undigested: bool = False


#: Methods of speculative decoding that have no weights of their own.
_WITHOUT_DRAFT = ("ngram", "ngram_gpu", "suffix")


def check_engine(vllm_config: Any, model: torch.nn.Module) -> None:
    """Raises Error for what a plan cannot state of an engine, now: experts in other slots than those of the loader, and
    the weights of a draft model."""
    check_slots(model, vllm_config.parallel_config.enable_eplb)
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _WITHOUT_DRAFT:
        raise Error(
            f"found speculative decoding by {speculative.method!r} with draft model {speculative.model!r}, expected "
            f"none: a refit does not write its weights; without a draft model are {', '.join(_WITHOUT_DRAFT)}"
        )


def agreement_of_workers(parallel: Any) -> Agreement:
    """Returns the rounds of agreement among the workers of one engine. parallel: vLLM's ParallelConfig."""
    if parallel.world_size == 1:
        return Agreement(None, 0, 1)
    store = torch.distributed.distributed_c10d._get_default_store()
    return Agreement(
        torch.distributed.PrefixStore(f"reshard/engine/{parallel.data_parallel_index}", store),
        parallel.rank,
        parallel.world_size,
    )


def _outcome(statements: Sequence[Statement]) -> Statement:
    """Merges the outcomes of one update on all workers. Weights are torn also if only some of the workers have the new
    ones."""
    errors = [each["error"] for each in statements if each["error"]]
    return {
        "errors": errors,
        "torn": bool(errors) and (len(errors) < len(statements) or any(each["torn"] for each in statements)),
    }


class Engine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives weights in place; see ``vllm_landing`` for those that vLLM repacks.

    If an update fails on one worker, it fails on all. The error says whether the weights of the engine are those of the
    version before or torn. The next update that completes mends torn weights. After a failure, call
    ``init_weight_transfer_engine`` to join again.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        check_release(PACKAGES, TESTED)
        super().__init__(config, vllm_config, device, model)
        self._executor: Executor | None = None
        self._landing: Landing | None = None
        self._timeout = InitInfo.timeout
        self._pull = False
        self._landed = False  # an update has arrived that is not repacked yet
        self._torn = False  # the last update has left the weights of this engine torn
        self._agreement = agreement_of_workers(self.parallel_config)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the job. A second call leaves the first job. If the plan does not fit on one worker, or cannot state
        the engine, all workers raise an error at once."""
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        failure: Exception | None = None
        job: dict[str, Any] = {"rendezvous": init_info.rendezvous, "transport": init_info.transport}
        job |= {"device": self.device.type, "join_timeout": init_info.timeout}
        try:
            check_rendezvous(**job)
            check_engine(self.vllm_config, self.model)
            plan = Plan.open(init_info.plan)
            offset = plan.endpoints[1].ranks[0] if init_info.rank_offset is None else init_info.rank_offset
            landing = Landing(plan, offset + worker, self.model, self.model_config.dtype, init_info.left)
        except Exception as raised:
            failure = raised
        self._agreement({}, lambda _: {}, init_info.timeout, failure)  # before joining, which waits for the others
        waits = f"for the trainer's ranks and the other workers at {init_info.rendezvous}"
        with reported(f"vLLM worker with world rank {offset + worker}", waits):
            executor = Executor(plan, offset + worker, job=init_info.job, pull=init_info.pull, **job)
        try:
            landing.bind(executor)
            executor.prepare()
        except BaseException as raised:
            executor._give_up(raised)
            executor.close()
            raise
        self._executor, self._landing, self._timeout, self._pull = executor, landing, init_info.timeout, init_info.pull

    def _joined(self) -> tuple[Executor, Landing]:
        if self._executor is None or self._landing is None:
            raise Error("found an update before init_weight_transfer_engine, expected it first")
        return self._executor, self._landing

    def start_weight_update(self) -> None:
        """Does nothing. An error is raised by ``receive_weights``, since vLLM ends an update if that fails."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives one update. Raises reshard.Error by the deadline, on all workers if it fails on one; a worker that
        does not answer delays the error by ``timeout`` at most."""
        timeout = update_info.timeout or self._timeout
        where = f"vLLM worker {self.parallel_config.rank}"
        failure: Exception | None = None
        try:
            executor, landing = self._joined()
            where = f"vLLM worker with world rank {executor.ranks[0]}"
            self._receive(executor, landing, update_info, timeout)
        except Exception as error:
            failure = error
        torn = self._torn or self._executor is not None and self._executor.state == "torn"
        mine = {"error": f"{where}: {failure}" if failure else "", "torn": torn}
        try:
            outcome = self._agreement(mine, _outcome, timeout)
        except Error as error:  # some worker has ended or is late
            outcome = {"errors": [mine["error"] or f"{where}: {error}"], "torn": True}
        self._landed, self._torn = not outcome["errors"], outcome["torn"]
        if outcome["errors"]:
            state = "torn; pause the engine until an update completes" if self._torn else "those of the version before"
            kind = type(failure) if isinstance(failure, Error) else RunError
            raise kind(f"{mine['error'] or '; '.join(outcome['errors'])}; the weights are {state}") from failure

    def _receive(self, executor: Executor, landing: Landing, info: UpdateInfo, timeout: float) -> None:
        check_engine(self.vllm_config, self.model)  # vLLM can change them while it serves
        moved = list(landing.moved())
        if moved:
            raise RunError(
                f"vLLM has moved {len(moved)} bound params, such as {moved[0]!r}; "
                "expected the addresses at init_weight_transfer_engine"
            )
        if self._pull:
            executor.pull(info.min_version, timeout, check=info.check, allow_undigested=info.allow_undigested)
        else:
            executor.run(timeout=timeout, check=info.check, allow_undigested=info.allow_undigested)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Parses and receives one update; vLLM's own also synchronizes an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Repacks what has landed beside the live params."""
        _, landing = self._joined()
        if self._landed:
            landing.process()
        self._landed = False

    def shutdown(self) -> None:
        """Leaves the job. The weights stay."""
        if self._executor:
            self._executor.close()
        self._executor = self._landing = None


@dataclass
class TrainerInfo(TrainerInitInfo):
    """Arguments of ``vllm_trainer.Trainer``. ``module``: the trainer's module, or its tensors by name; None: the local
    shards of the WeightSource, which must be live tensors, as those of vLLM's DTensorModuleSource."""

    backend: ClassVar[str] = "reshard"

    plan: str
    rendezvous: str
    module: Any = None
    options: dict[str, Any] = field(default_factory=dict)


class TrainerEngine(TrainerWeightTransferEngine[TrainerInfo]):
    """``Trainer`` behind vLLM's interface. Every trainer rank sends its own shards."""

    init_info_cls = TrainerInfo

    @classmethod
    def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: Any = None) -> TrainerEngine:
        check_given(init_info.rendezvous, init_info.options)  # before the source gives its tensors
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        module = init_info.module
        if module is None:
            if source is None:
                raise Error("trainer: found neither a module nor a WeightSource, expected one")
            module = dict(source)
        engine.trainer = Trainer(
            init_info.plan,
            module,
            client if init_info.is_sender else None,
            rank=init_info.rank,
            rendezvous=init_info.rendezvous,
            **init_info.options,
        )
        return engine

    trainer: Trainer

    def send_weights(self) -> None:
        self.trainer.refit()

    def shutdown(self) -> None:
        self.trainer.close()
