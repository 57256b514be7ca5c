# SPDX-License-Identifier: Apache-2.0
"""Refits between live PyTorch modules: plain, FSDP2, HSDP, tensor parallel, and their combinations.
In a trainer's loop:

    import reshard.torch
    for step in range(steps):
        train(trainer)                                       # DTensors in
        reshard.torch.refit(trainer, engine, timeout=60)     # DTensors out
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .agreement import Agreement, Statement
from .compiler import compile
from .coverage import check_coverage, persistent_buffers
from .errors import BindError, Error
from .executor import Executor
from .live import Side, from_json, job_of, part_of, to_json
from .plan import Plan


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the params and the persistent buffers of a module by name, tied names included.

    Modules of FSDP2 are resharded first, since only their shards are kept.
    """
    for each in module.modules():
        if hasattr(each, "reshard") and hasattr(each, "set_requires_gradient_sync"):  # FSDPModule
            each.reshard()
    return dict(module.named_parameters(remove_duplicate=False)) | persistent_buffers(module)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor on this rank: of a DTensor, its local shard."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for tensors in the same memory."""
    local = local_of(tensor)
    return (
        (local.data_ptr(), tuple(local.shape), local.stride(), local.dtype)
        if local.numel() and local.data_ptr()
        else (id(tensor),)
    )


def aliases_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns {name: first name} of the tensors that are in the memory of an earlier one (tied params)."""
    first: dict[tuple[Any, ...], str] = {}
    return {
        name: known for name, tensor in tensors.items() if (known := first.setdefault(_place(tensor), name)) != name
    }


def bind_module(
    executor: Executor,
    module: torch.nn.Module | Mapping[str, torch.Tensor],
    endpoint: str | int | None = None,
    rank: int | None = None,
    *,
    left: Sequence[str] = (),
) -> dict[str, str]:
    """Binds each param and each persistent buffer of a module to the plan's param of the same name, in place: of a
    DTensor, its local shard. Returns the tied names that were not bound, {name: bound name}.

    module: a module, or tensors by the names of the plan.
    endpoint, rank: as of ``Executor.bind``.
    left: globs of names that the plan does not cover and that keep their values. Each must match a name.

    Raises BindError, which names the rank and the param: for a param or buffer that neither the plan nor ``left``
    covers, for one that both cover, for a param of the plan that the module lacks, for a tied name that the plan has
    beside its first name, and for wrong dtypes, shapes, strides and devices as ``Executor.bind``. A param with a
    ``transform`` is covered, but not bound. Nothing is bound then, except tensors before one of wrong form.
    """
    tensors = module if isinstance(module, Mapping) else tensors_of(module)
    rank = executor.ranks[0] if rank is None and len(executor.ranks) == 1 else rank
    if rank is None:
        raise BindError(f"this process has {len(executor.ranks)} ranks: pass rank=… to select one of them")
    at = executor.plan.endpoint(endpoint, rank)
    params = executor.plan.params(rank, at.role)
    where = f"{at.role} rank {rank}"
    tied = aliases_of(tensors)
    for name in tensors:
        if name in params and tied.get(name) in params:
            raise BindError(
                f"{where} param {name!r}: found tied to {tied[name]!r}, which the plan "
                "has too; expected one of them in the plan"
            )
    planned = [name for name, param in params.items() if name in tensors or not param.transform]
    check_coverage(tensors, planned, left, where, tied)
    bound = {
        name: local_of(tensor) for name, tensor in tensors.items() if name in params and not params[name].transform
    }
    for name, tensor in bound.items():
        if tensor.device.type == "meta":
            raise BindError(
                f"{where} param {name!r}: found device meta, which has no memory; load or initialize the module first"
            )
    executor.bind(bound, at.role, rank)
    return {name: known for name, known in tied.items() if name not in params}


def side_of(module: torch.nn.Module | None) -> tuple[Side, dict[str, torch.Tensor]]:
    """Describes the tensors of a module on this rank; returns the tensors too. None: this rank has no such module."""
    if module is None:
        return Side({}), {}
    tensors = tensors_of(module)
    tied = aliases_of(tensors)
    return Side({name: part_of(name, tensor) for name, tensor in tensors.items() if name not in tied}, tied), tensors


_plans: dict[str, Plan] = {}  # by the job's text
_agreements: weakref.WeakKeyDictionary[Any, Agreement] = weakref.WeakKeyDictionary()
_alone = Agreement(None, 0, 1)
_jobs = itertools.count()
#: The sessions that are open, by the names of their jobs, and the names of those whose modules this rank has deleted.
#: They are closed when all ranks have deleted them, at the same time, since closing waits for the other ranks.
_open: dict[str, Session] = {}
_deleted: set[str] = set()


def agreement_of_job() -> Agreement:
    """Returns the rounds over the store of torch.distributed; of this process alone if it is not initialized."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return _alone
    group = torch.distributed.group.WORLD
    if group not in _agreements:
        store = torch.distributed.distributed_c10d._get_default_store()
        _agreements[group] = Agreement(store, torch.distributed.get_rank(), torch.distributed.get_world_size())
    return _agreements[group]


def _plan_of(job: str) -> Plan:
    """Compiles a job, once for each text."""
    if job not in _plans:
        with tempfile.TemporaryDirectory(prefix="reshard-") as folder:
            path = Path(folder) / "refit.yaml"
            path.write_text(job)
            _plans[job] = compile(path)
    return _plans[job]


class Session:
    """An executor that all ranks open for one job, and open again when the job or the address of a tensor changes."""

    def __init__(self) -> None:
        self.executor: Executor | None = None
        self._name = ""
        self._digest = ""  # of this rank's statement and addresses, when the executor was opened

    def run(
        self,
        state: Callable[[], tuple[Statement, Sequence[Mapping[str, torch.Tensor]]]],
        job: Callable[[Sequence[Statement]], str],
        timeout: float,
    ) -> None:
        """Runs the job. All ranks call it; an error of one is raised on all.

        state: returns this rank's statement, and its local tensors of the source and of the target, by the names of the
            plan; further tensors are ignored.
        job: called on rank 0 with the statements of all ranks, if one has changed; returns the YAML of the job.
        timeout: seconds for each wait.
        """
        agreement = agreement_of_job()
        failure: Exception | None = None
        statement: Statement = {}
        tensors: Sequence[Mapping[str, torch.Tensor]] = ()
        digest = ""
        try:
            statement, tensors = state()
            addresses = [[(name, tensor.data_ptr()) for name, tensor in each.items()] for each in tensors]
            digest = hashlib.sha256(json.dumps([statement, addresses]).encode()).hexdigest()
        except Exception as raised:
            failure = raised

        def merge(statements: Sequence[Statement]) -> Statement:
            deleted = sorted(set.intersection(*(set(each["deleted"]) for each in statements)))
            known = [each["state"] is None for each in statements]
            if any(known):
                return {"close": deleted, "again": not all(known)}
            text = job([each["state"] for each in statements])
            _plan_of(text)  # raises CompileError on all ranks
            return {"close": deleted, "job": text, "name": f"refit-{next(_jobs)}", "secret": secrets.token_hex(16)}

        def ask(state: Statement | None) -> Statement:
            answer = agreement({"state": state, "deleted": sorted(_deleted)}, merge, timeout, failure)
            for name in answer["close"]:
                _open[name].close()
            return answer

        answer = ask(None if self.executor and digest == self._digest else statement)
        if answer.get("again"):  # another rank has changed
            answer = ask(statement)
        if "job" in answer:
            self.close()
            self._together(agreement, timeout, lambda: self._open(agreement, answer, tensors, timeout))
            self._together(agreement, timeout, lambda: self._opened.prepare())
            self._digest = digest
        self._together(agreement, timeout, lambda: self._opened.run(timeout=timeout))

    @property
    def _opened(self) -> Executor:
        assert self.executor
        return self.executor

    def _open(
        self, agreement: Agreement, answer: Statement, tensors: Sequence[Mapping[str, torch.Tensor]], timeout: float
    ) -> None:
        """Opens the executor of this rank and binds its tensors. The secret keeps other jobs out."""
        plan = _plan_of(answer["job"])
        self._name = answer["name"]
        _open[self._name] = self
        devices = {tensor.device.type for each in tensors for tensor in each.values()} or {"cpu"}
        if devices != {"cpu"}:
            raise Error(
                f"found tensors on devices {sorted(devices)}, expected all on cpu; for GPUs open an "
                "Executor with transport nccl and call bind_module"
            )
        among: dict[str, Any] = {"transport": "ucx", "rendezvous": agreement.store}
        among |= {"job": answer["name"], "secret": answer["secret"]}
        self.executor = Executor(plan, agreement.rank, join_timeout=timeout, **among if agreement.world > 1 else {})
        for at, held in zip(plan.endpoints, tensors):
            if agreement.rank in at.ranks:
                planned = plan.params(agreement.rank, at.role)
                self.executor.bind(
                    {name: tensor for name, tensor in held.items() if name in planned}, at.role, agreement.rank
                )

    def _together(self, agreement: Agreement, timeout: float, call: Callable[[], None]) -> None:
        """Calls a function on all ranks. If it fails on one, all close the executor and raise."""
        failure: Exception | None = None
        try:
            call()
        except Exception as raised:
            failure = raised
        except BaseException:  # of a signal: the other ranks end at their deadlines
            self.close()
            raise
        try:
            agreement({}, lambda _: {}, 2 * timeout, failure)  # longer than the deadlines of the call itself
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the executor. The next run opens another one."""
        executor, self.executor, self._digest = self.executor, None, ""
        _open.pop(self._name, None)
        _deleted.discard(self._name)
        if executor:
            executor.close()


_sessions: dict[tuple[int, int], Session] = {}


def session_of(source: Any, target: Any) -> Session:
    """Returns the session of two modules. It is closed when both modules, or one of them, have been deleted on all
    ranks."""
    key = (id(source), id(target))

    def delete() -> None:
        session = _sessions.pop(key, None)
        if session and session.executor:
            _deleted.add(session._name)

    if key not in _sessions:
        _sessions[key] = Session()
        for module in (source, target):
            if module is not None:
                weakref.finalize(module, delete)
    return _sessions[key]


#: Describes a module of a framework on this rank: its side, and its tensors by the names of the side.
Describe = Callable[[Any], tuple[Side, dict[str, torch.Tensor]]]


def refit_described(
    session: Session,
    modules: tuple[Any, Any],
    describe: Describe,
    left: Sequence[str],
    convert: str | None,
    timeout: float,
) -> None:
    """The refit of any framework: ``describe`` states how it holds its modules."""

    def state() -> tuple[Statement, Sequence[Mapping[str, torch.Tensor]]]:
        sides = [describe(module) for module in modules]
        tensors = [{name: local_of(tensor) for name, tensor in each.items()} for _, each in sides]
        return {"sides": [to_json(side) for side, _ in sides], "left": list(left), "convert": convert}, tensors

    def job(statements: Sequence[Statement]) -> str:
        for rank, each in enumerate(statements):
            for what in ("left", "convert"):
                if each[what] != statements[0][what]:
                    raise Error(
                        f"found {what} {each[what]} on rank {rank}, expected {statements[0][what]} as on rank 0"
                    )
        source, target = ([from_json(each["sides"][side]) for each in statements] for side in range(2))
        return job_of(source, target, statements[0]["left"], statements[0]["convert"])

    session.run(state, job, timeout)


def refit(
    source: torch.nn.Module | None,
    target: torch.nn.Module | None,
    *,
    left: Sequence[str] = (),
    convert: str | None = None,
    timeout: float = 600,
) -> None:
    """Writes the values of one module to another, which has the same names and another distribution over the ranks of
    a job of torch.distributed. Without torch.distributed, both modules are in this process.

    All ranks of the job call it, with the same modules in the same order. The first call describes both modules,
    compiles the plan, connects the ranks and binds the tensors in place; later calls only run the plan, unless a tensor
    has moved.

    source, target: modules in host memory whose params and persistent buffers are DTensors (Shard, _StridedShard,
        Replicate) or plain tensors, which are whole on each rank; None on a rank without the module.
    left: globs of names that are not moved; each must match a name of the source or the target.
    convert: "rne": values may be rounded to the target's dtype, to nearest, ties to even; one beyond its range is an
        error. With "saturate" it becomes the largest value, with "inf" infinite.
    timeout: seconds for each wait: for the other ranks, for the connections, and for the run. An error of one rank
        reaches the others within twice this time.

    Raises Error (CompileError, BindError, RunError, TimeoutError) on all ranks if it fails on one. After a failure in
    the run, the target's values are undefined until a later call completes. The next call begins anew. A rank that
    calls only after the others have given up raises their error, and then takes part in the next call.
    """
    refit_described(session_of(source, target), (source, target), side_of, left, convert, timeout)
