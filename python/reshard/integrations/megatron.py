# SPDX-License-Identifier: Apache-2.0
"""Refits between live models of Megatron-Core.

``swap`` plans and moves the weights with reshard. ``ReshardCopyService`` moves what Megatron-Core has planned:

    swap_model_weights(trainer, engine, refit_method=ReshardCopyService(timeout=60))
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.resharding.copy_services.base import CopyService
from megatron.core.utils import unwrap_model

from ..agreement import Statement
from ..errors import Error
from ..live import Part, Side, part_of
from ..torch import Session, aliases_of, refit_described, session_of, tensors_of

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
#: The number of an expert in a name: of SequentialMLP, and of grouped experts of Transformer Engine.
_EXPERT = re.compile(r"(?<=\.experts\.)(local_experts\.|linear_fc[12]\.(?:weight|bias))(\d+)")


def _chunks(model: Any) -> list[Any]:
    """Returns the model chunks of this rank: one, or those of the virtual stages."""
    return (
        []
        if model is None
        else [unwrap_model(each) for each in (model if isinstance(model, (list, tuple)) else [model])]
    )


def _layers(chunk: torch.nn.Module) -> dict[str, str]:
    """Returns {prefix of a layer on this rank: its prefix in the whole model}."""
    found = {}
    for name, module in chunk.named_modules():
        number, (parent, _, last) = getattr(module, "layer_number", None), name.rpartition(".")
        if isinstance(number, int) and last.isdigit():
            found[name + "."] = f"{parent}.{number - 1}."
    return found


def _ranks(chunk: Any, *names: str) -> tuple[int, ...]:
    """Returns the ranks of the first of these process groups that the chunk has."""
    groups = (getattr(chunk.pg_collection, name, None) for name in names)
    group = next((each for each in groups if each is not None), None)
    return (torch.distributed.get_rank(),) if group is None else tuple(torch.distributed.get_process_group_ranks(group))


def _name(name: str, chunk: Any, layers: Mapping[str, str]) -> str:
    """Returns the name of a param in the whole model: with the number of its layer and of its expert there."""
    prefix = max((each for each in layers if name.startswith(each)), key=len, default="")
    name = layers.get(prefix, "") + name[len(prefix) :]
    experts, group = chunk.config.num_moe_experts, _ranks(chunk, "ep")
    if experts and len(group) > 1:
        first = group.index(torch.distributed.get_rank()) * (experts // len(group))
        name = _EXPERT.sub(lambda found: f"{found[1]}{first + int(found[2])}", name)
    if name == _OUTPUT and getattr(chunk, "share_embeddings_and_output_weights", False):
        return _EMBEDDING  # the last stage's copy
    return name


def _part(name: str, tensor: torch.Tensor, chunk: Any) -> Part:
    """Describes a param by the attributes that Megatron-Core's layers set, and by its process groups."""
    groups = ("expt_tp", "tp") if ".experts." in name else ("tp",)
    part = part_of(name, tensor, lambda: ("", _ranks(chunk, *groups)))
    if (
        chunk.config.gated_linear_unit
        and ".linear_fc1." in name
        and not getattr(chunk.config, "moe_mlp_glu_interleave_size", None)
    ):  # each rank has its part of the gate, then of the up projection; experts do not state it
        part = replace(part, cuts=tuple(replace(cut, stride=2) for cut in part.cuts))
    return replace(part, padded=bool(part.cuts) and name in (_EMBEDDING, _OUTPUT))


def _named(model: Any) -> Iterator[tuple[str, torch.Tensor, Any]]:
    for chunk in _chunks(model):
        if getattr(chunk, "pg_collection", None) is None:
            raise Error(
                f"found {type(chunk).__name__} without pg_collection, expected a model of Megatron-Core 0.16 or later"
            )
        layers = _layers(chunk)
        tensors = tensors_of(chunk)
        tied = aliases_of(tensors)
        for name, tensor in tensors.items():
            if name not in tied:
                yield _name(name, chunk, layers), tensor, chunk


def side_of(model: Any) -> tuple[Side, dict[str, torch.Tensor]]:
    """Describes the params and persistent buffers of a model on this rank, by their names in the whole model."""
    parts: dict[str, Part] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor, chunk in _named(model):
        if name in tensors:
            raise Error(f"param {name!r}: this rank has it twice, expected once")
        parts[name], tensors[name] = _part(name, tensor, chunk), tensor
    return Side(parts), tensors


def swap(
    source: Any, target: Any, *, left: Sequence[str] = (), convert: str | None = None, timeout: float = 600
) -> None:
    """Writes the weights of one model to another, which has another tensor, pipeline or expert parallelism over the
    ranks of torch.distributed. All ranks call it. The first call plans and binds; later calls only run the plan.

    source, target: models of Megatron-Core with a ``pg_collection``, wrapped or not; with virtual stages the list of
        chunks; None on a rank without the model. Params and persistent buffers (the router's expert_bias) are moved.
    left: globs of names in the whole model that are not moved, such as ``decoder.layers.3.*``.
    convert: "rne": values may be rounded to the target's dtype; "saturate", "inf": also beyond its range.
    timeout: seconds for each wait.

    The padding of the vocabulary may differ; the rows that only the target has become zero. A tied output layer is
    moved as the embedding. Raises the errors of ``reshard.torch.refit``, on all ranks.
    """
    first = [_chunks(model)[0] if model is not None else None for model in (source, target)]
    refit_described(session_of(*first), (source, target), side_of, left, convert, timeout)


class ReshardCopyService(CopyService):
    """Sends and receives what Megatron-Core has planned: ``refit_method`` of ``swap_model_weights``. The first run
    compiles a plan of the messages; later runs of the same messages only run it.

    timeout: seconds for each wait. ``run`` raises the errors of ``reshard.torch.refit``, on all ranks, and names
    messages that only one side has submitted.
    """

    def __init__(self, timeout: float = 600):
        self.timeout = timeout
        self._session = Session()
        self._staged: dict[str, torch.Tensor] = {}  # Megatron-Core gives other memory in each run
        self._clear()

    def _clear(self) -> None:
        self._sends: dict[str, torch.Tensor] = {}
        self._receives: dict[str, torch.Tensor] = {}

    def _submit(
        self, into: dict[str, torch.Tensor], tensor: torch.Tensor, ends: tuple[int, int], task: int | None
    ) -> None:
        prefix = f"{ends[0]}.{ends[1]}."
        number = f"task{task}" if task is not None else str(sum(name.startswith(prefix) for name in into))
        if prefix + number in into:
            raise Error(
                f"rank {torch.distributed.get_rank()}: task {task} from rank {ends[0]} to rank {ends[1]} is submitted "
                "twice"
            )
        if tensor.numel():
            into[prefix + number] = tensor

    def submit_send(self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None) -> None:
        self._submit(self._sends, src_tensor, (torch.distributed.get_rank(), dest_rank), task_id)

    def submit_recv(self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None) -> None:
        self._submit(self._receives, dest_tensor, (src_rank, torch.distributed.get_rank()), task_id)

    def submit_send_with_id(self, task_id: int, src_tensor: torch.Tensor, dest_rank: int) -> None:
        self.submit_send(src_tensor, dest_rank, task_id)

    def submit_recv_with_id(self, task_id: int, dest_tensor: torch.Tensor, src_rank: int) -> None:
        self.submit_recv(dest_tensor, src_rank, task_id)

    def _state(self) -> tuple[Statement, Sequence[Mapping[str, torch.Tensor]]]:
        """Copies what is sent to the staged memory, which is bound."""
        sides = []
        for role, tensors in (("send", self._sends), ("receive", self._receives)):
            staged = {}
            for name, tensor in tensors.items():
                size = tensor.numel() * tensor.element_size()
                key = f"{role} {name}"
                if key not in self._staged or self._staged[key].numel() != size:
                    self._staged[key] = torch.empty(size, dtype=torch.uint8, device=tensor.device)
                staged[name] = self._staged[key]
            sides.append(staged)
        for name, tensor in self._sends.items():
            sides[0][name].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        return {
            role: {name: tensor.numel() for name, tensor in side.items()}
            for role, side in zip(("sends", "receives"), sides)
        }, sides

    @staticmethod
    def _job(statements: Sequence[Statement]) -> str:
        """Returns the job of all messages: each is a tensor of bytes on one rank of each side."""
        sends, receives = (
            {name: size for each in statements for name, size in each[role].items()} for role in ("sends", "receives")
        )
        for name in sends.keys() | receives.keys():
            if sends.get(name) != receives.get(name):
                source, target, number = name.split(".")
                found = [f"{side.get(name)} bytes" if name in side else "none" for side in (sends, receives)]
                raise Error(
                    f"message {number} from rank {source} to rank {target}: found {found[0]} submitted to send and "
                    f"{found[1]} to receive, expected the same"
                )
        layouts: dict[str, Any] = {}
        for number, role in enumerate(("source", "target")):
            layouts[role] = {
                "params": {name: {"holds": name, "at": {"rank": int(name.split(".")[number])}} for name in sends}
            }
        tensors = {name: {"shape": [size], "dtype": "u8"} for name, size in sends.items()}
        ends = {role: {"layout": role, "mesh": {"rank": len(statements)}} for role in layouts}
        return json.dumps({"version": 1, "model": {"tensors": tensors, "layouts": layouts}, **ends}, indent=1)

    def run(self) -> None:
        try:
            self._session.run(self._state, self._job, self.timeout)
            with torch.no_grad():
                for name, tensor in self._receives.items():
                    tensor.copy_(self._staged[f"receive {name}"].view(tensor.dtype).view(tensor.shape))
        finally:
            self._clear()

    def close(self) -> None:
        """Closes the executor and releases the staged memory."""
        self._session.close()
        self._staged.clear()
