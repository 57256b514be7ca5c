# SPDX-License-Identifier: Apache-2.0
"""The buckets of Megatron-Core's distributed optimizer, as a model file.

In a checkpoint of `distrib_optim_sharding_type: dp_reshardable` the optimizer's state lies in flat buckets, those of
each model parallel rank (tensor parallel rank, pipeline stage). The order of the params in them is that of the live
buffers. Experts have an optimizer of their own, whose model parallel ranks are those of expert parallelism."""

from __future__ import annotations

import json
from typing import Any

import torch
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model

from ..errors import Error

#: Elements to whose multiple each param of a bucket begins (_ParamAndGradBuffer).
_ALIGN = 64
_STATES = ("param", "exp_avg", "exp_avg_sq")


def _aligned(position: int) -> int:
    return -(-position // _ALIGN) * _ALIGN


def _names(model: Any) -> dict[torch.nn.Parameter, str]:
    """Returns the name of each param of this rank: of a list of chunks, as torch.nn.ModuleList(chunks) has it."""
    chunks = model if isinstance(model, (list, tuple)) else [model]
    prefixes = [f"{i}." for i in range(len(chunks))] if len(chunks) > 1 else [""]
    return {
        param: prefix + name
        for prefix, chunk in zip(prefixes, chunks, strict=True)
        for name, param in unwrap_model(chunk).named_parameters()
    }


def _bucket(buffer: Any, index: int, names: dict[torch.nn.Parameter, str]) -> dict[str, Any]:
    """Returns the params of a bucket in order, as [name, shape], and whether its end is aligned too."""
    bucket, begin, position, params = buffer.buckets[index], buffer.bucket_indices[index][0], 0, []
    for param in sorted(bucket.params_list, key=lambda each: buffer.param_index_map[each][0]):
        start, end, _ = buffer.param_index_map[param]
        if start - begin != _aligned(position):
            raise Error(
                f"buckets: '{names[param]}' begins at element {start - begin} of its bucket, "
                f"expected {_aligned(position)}"
            )
        position = end - begin
        params.append([names[param], list(param.shape)])
    if bucket.numel_unpadded not in (position, _aligned(position)):
        raise Error(f"buckets: bucket {index} has {bucket.numel_unpadded} elements, expected {position}")
    return {"params": params, "aligned": bucket.numel_unpadded != position}


def _recorded(optimizer: Any, model: Any) -> dict[str, tuple[int, dict[str, Any]]]:
    """Returns what this process has of each distributed optimizer, by the beginning of its keys in the checkpoint: the
    model parallel rank, and the buckets by the end of their key."""
    found = getattr(optimizer, "chained_optimizers", [optimizer])
    if not found or not all(isinstance(each, DistributedOptimizer) for each in found):
        raise Error(
            "buckets: expected instances of DistributedOptimizer, "
            f"found {', '.join(type(each).__name__ for each in found) or 'none'}"
        )
    names, recorded = _names(model), {}
    for position, each in enumerate(found):
        buckets = {}
        for number, (buffer, ranges) in enumerate(zip(each.buffers, each.gbuf_ranges, strict=True)):
            for dtype in ranges:
                for index in range(len(buffer.buckets)):
                    buckets[f"gbuf_idx_{number}.dtype_{dtype}.bucket_idx_{index}"] = _bucket(buffer, index, names)
        recorded[f"chained_{position}." if len(found) > 1 else ""] = each.data_parallel_group_idx, buckets
    return recorded


def _alike(every: list[dict[str, tuple[int, dict[str, Any]]]]) -> list[tuple[str, list[int], dict[str, Any]]]:
    """Returns the buckets of all processes: the beginning of their keys, and the model parallel ranks that
    have them. Ranks of a tensor parallel group have the same buckets, and so do data parallel ranks, which
    have one model parallel rank."""
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for rank, recorded in enumerate(every):
        for prefix, (group, buckets) in recorded.items():
            if groups.setdefault((prefix, group), buckets) != buckets:
                raise Error(
                    f"buckets: those of rank {rank} differ from those of another rank in "
                    f"model parallel rank {group}, expected the same"
                )
    alike: dict[tuple[str, str], list[int]] = {}
    for (prefix, group), buckets in sorted(groups.items()):
        alike.setdefault((prefix, json.dumps(buckets)), []).append(group)
    return [(prefix, ranks, json.loads(text)) for (prefix, text), ranks in alike.items()]


def buckets_model(optimizer: Any, model: Any) -> str:
    """Returns the text of a model file for the optimizer's state in a checkpoint of `dp_reshardable`. Every rank calls
    it and gets the same text.

    Its tensors are the params of each model parallel rank as that rank holds them, `RANK.NAME`, with the states
    `param`, `exp_avg` and `exp_avg_sq`. Layout `buckets` has the names of the checkpoint; layout `ranks` has, on each
    mesh rank of axis `rank`, `0.NAME.STATE`: a folder of rank files that a layout `megatron` of the library reads. The
    mesh ranks are the ranks of the smallest data parallel size, in their order: the model parallel ranks, or, with
    experts, those that have other experts too.

    optimizer: of `get_megatron_optimizer`. model: the module or the list of its chunks.
    Raises Error if the buckets are not as Megatron-Core 0.16.1 makes them."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, _recorded(optimizer, model))
    held = [{prefix: group for prefix, (group, _) in recorded.items()} for recorded in every]
    mesh = [each for i, each in enumerate(held) if each not in held[:i]]
    index, place, tensors, flats, locals_ = {}, {}, {}, {}, {}
    for number, (prefix, ranks, buckets) in enumerate(_alike(every)):
        variable = f"ranks{number}"
        index[variable] = max(ranks) + 1
        place[variable] = {
            "axis": "rank",
            "map": [[group] if (group := each.get(prefix)) in ranks else [] for each in mesh],
        }
        for key, bucket in buckets.items():
            flats[f"{prefix}optimizer.distributed.dp_group_idx_{{{variable}}}.{key}"] = {
                "flat": {"of": [f"{{{variable}}}.{name}" for name, _ in bucket["params"]], "align": _ALIGN},
                **({"pad": {"0": _ALIGN}} if bucket["aligned"] else {}),
            }
            for name, shape in bucket["params"]:
                tensors[f"{{{variable}}}.{name}"] = {"shape": shape, "where": {variable: ranks}}
                locals_[f"{{{variable}.local}}.{name}"] = {"holds": f"{{{variable}}}.{name}"}
    states = {"optimizer": "{param}.{state}"}
    own = {"axes": ["rank"], "place": place} | states | {"params": locals_}
    layouts = {"buckets": states | {"params": flats}, "ranks": own}
    head = {"dtype": "fp32", "optimizer": dict.fromkeys(_STATES, "fp32"), "index": index}
    return json.dumps(head | {"tensors": tensors, "layouts": layouts}, indent=1) + "\n"
