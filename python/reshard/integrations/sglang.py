# SPDX-License-Identifier: Apache-2.0
"""A weight loader of SGLang 0.5.23. The server permits it:

    --custom-weight-loader reshard.integrations.sglang.load

For each refit, between ``begin_weight_update`` and ``end_weight_update``, while the trainer's ranks run the plan:

    engine.update_weights_from_tensor(message(plan, rendezvous, rank_offset=2), load_format=LOADER)

SGLang calls ``load`` in each of its processes, which joins at the first call and moves the weights in place.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..errors import Error
from ..releases import check_release
from ._engine import Member

if TYPE_CHECKING:
    import torch

#: The names of its packages, and the tested releases.
PACKAGES, TESTED = ("sglang",), ("0.5.23",)
#: The ``load_format`` of ``update_weights_from_tensor``.
LOADER = "reshard.integrations.sglang.load"
_NAME = "reshard"  # of the only tensor of a message
#: Algorithms of speculative decoding that have no weights of their own.
_WITHOUT_DRAFT = ("NGRAM",)

#: The member of this process, and the options with which it has joined. SGLang keeps no state for a loader.
_joined: tuple[Member, dict[str, Any]] | None = None


def message(plan: str, rendezvous: str, *, rank_offset: int, **options: Any) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors of a request that starts a refit. Equal arguments continue with the same connections; other
    arguments, such as the rendezvous of a new job after a failure, leave the job and join another: the trainer closes
    its executors at the same time, because closing waits for the other processes.

    plan: the path of the plan file in the processes of SGLang.
    rank_offset: the world rank of SGLang's rank 0. Its ranks are numbered tensor parallel first, then pipeline
        parallel, then data parallel.
    options: ``transport``, ``device``, ``timeout``, ``left`` as of ``Member``.
    """
    import torch

    text = json.dumps({"plan": plan, "rendezvous": rendezvous, "rank_offset": rank_offset} | options)
    return [(_NAME, torch.tensor(list(text.encode()), dtype=torch.uint8))]


def _check_engine() -> None:
    """Raises Error for what a plan cannot state of an engine, now: experts in other slots than those of the loader, and
    the weights of a draft model."""
    from sglang.srt.runtime_context import get_exec, get_resources, get_spec

    moe, location = get_exec().moe, get_resources().expert_location_metadata
    unknown = "a plan does not know which expert is in which slot"
    options = {"enable_eplb": False, "init_expert_location": "trivial", "ep_num_redundant_experts": 0}
    for option, expected in options.items():
        if (found := getattr(moe, option)) != expected:
            raise Error(f"SGLang: found {option} {found!r}, expected {expected!r}: {unknown}")
    if location is not None:
        slots = location.physical_to_logical_map_cpu.tolist()
        moved = next((layer for layer, experts in enumerate(slots) if experts != list(range(len(experts)))), None)
        if moved is not None:
            raise Error(
                f"SGLang: found experts {slots[moved]} in the slots of layer {moved}, expected them in order: {unknown}"
            )
    if (algorithm := get_spec().speculative_algorithm) not in (None, *_WITHOUT_DRAFT):
        raise Error(
            f"SGLang: found speculative_algorithm {algorithm!r}, which has a draft model, expected none or "
            f"{' or '.join(_WITHOUT_DRAFT)}: a refit does not write its weights"
        )


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Takes part in one refit: SGLang calls it with the tensors of ``message``."""
    global _joined
    names = [name for name, _ in named_tensors]
    if names != [_NAME]:
        raise Error(
            f"SGLang: found tensors {names[:3]} in "
            "the request, expected those of reshard.integrations.sglang.message(…)"
        )
    try:
        _check_engine()
    except Error as error:
        if _joined:
            _joined[0].fail(error)
            _joined = None
        raise
    options = json.loads(bytes(named_tensors[0][1].tolist()))
    if _joined and _joined[1] != options:
        _joined[0].close()
        _joined = None
    if not _joined:
        check_release(PACKAGES, TESTED)
        rest = {name: value for name, value in options.items() if name not in ("plan", "rank_offset")}
        _joined = (Member(options["plan"], options["rank_offset"] + _rank(), model, **rest), options)
    try:
        _joined[0].run()
    except Error:
        _joined = None  # the next call joins again
        raise


def _rank() -> int:
    """Returns the rank of this process among those of all data parallel replicas."""
    from sglang.srt.runtime_context import get_parallel

    at = get_parallel()
    replica = getattr(at, "dp_rank", None) or 0
    return int((replica * at.pp_size + at.pp_rank) * at.tp_size + at.tp_rank)
