# SPDX-License-Identifier: Apache-2.0
"""A job from what vLLM knows: the source endpoint from a trainer's WeightSource, which states mesh and placements, and
the target endpoint from the engine's ParallelConfig. It does not import vLLM.

    source = DTensorModuleSource(module, num_trainer_ranks=2)      # vllm.distributed.weight_transfer.m2n_source
    Path("refit.yaml").write_text(job_of("model.yaml", source, llm.llm_engine.vllm_config.parallel_config))
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import Error
from ..flow import endpoint_of

#: vLLM's placement code of a mesh axis that replicates; other codes are the dimension that the axis shards.
_REPLICATE = -1
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # a layer or an expert in a name
_EXTEND = re.compile(r"""^(?:\{\s*)?extend:\s*["']?([^"',}#\n]+)""", re.MULTILINE)  # the file that a model extends
_DEPTH = 16  # of models that extend others (docs/yaml.md)
_Rule = dict[int, str]  #: {dimension: the mesh axis that shards it}


class Param(Protocol):
    """vLLM's ``M2NParamMeta``."""

    name: str
    placements: Sequence[int] | None


class Source(Protocol):
    """vLLM's ``M2NWeightSource``."""

    def mesh(self) -> Any: ...

    def metadata(self) -> Iterable[Param]: ...


def _rule(param: Param, axes: Sequence[str]) -> _Rule:
    """Returns how the mesh axes shard a param."""
    rule: _Rule = {}
    for axis, dimension in zip(axes, param.placements or (), strict=bool(param.placements)):
        if dimension == _REPLICATE:
            continue
        if dimension in rule:
            raise Error(
                f"source param {param.name!r}: found dimension "
                f"{dimension} sharded by two mesh axes, expected at most one"
            )
        rule[dimension] = axis
    return rule


def _globs(rules: dict[str, _Rule]) -> dict[str, _Rule]:
    """Returns rules by globs, in which `*` is in the place of the numbers of layers and experts."""
    globs: dict[str, _Rule] = {}
    for name, rule in rules.items():
        if rule:
            globs.setdefault(_NUMBER.sub("*", name), rule)
    longest_first = sorted(globs, key=lambda glob: len(glob.replace("*", "")), reverse=True)  # the first match applies
    globs = {glob: globs[glob] for glob in longest_first}
    for name, rule in rules.items():
        glob = next((glob for glob in globs if fnmatch.fnmatchcase(name, glob)), None)
        if glob and globs[glob] != rule:
            raise Error(
                f"source param {name!r}: found shards {rule}, expected {globs[glob]} as of other params {glob!r}"
            )
    return globs


def source_of(source: Source, layout: str = "hf") -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the layout and the endpoint of a trainer, for ``model.layouts.trainer`` and ``source`` of a job.

    source: its params have the names that ``layout`` has.
    layout: the model's layout that has these params, however sharded: "hf" for the names of the checkpoint, "fsdp2" for
        modules of transformers.

    Raises Error if a param is sharded in a way that a layout cannot state.
    """
    mesh = source.mesh()
    axes = [f"axis{i}" for i in range(len(mesh.dims))]
    globs = _globs({param.name: _rule(param, axes) for param in source.metadata()})
    shard = {
        glob: {str(dimension): {"axis": axis, "scheme": "chunk"} for dimension, axis in rule.items()}
        for glob, rule in globs.items()
    }
    fastest_first = dict(reversed(list(zip(axes, mesh.dims, strict=True))))  # vLLM's mesh is in row-major order
    ranks = list(range(mesh.start_rank, mesh.start_rank + math.prod(mesh.dims)))
    endpoint = {"layout": "trainer", "mesh": fastest_first, "ranks": ranks}
    return {
        "extend": layout,
        "axes": [*axes, "fsdp"],
        "shard": shard,
    }, endpoint  # layout fsdp2 has rules that name fsdp


def target_of(parallel: Any, first: int, layout: str = "vllm", recorded: bool = False) -> dict[str, Any]:
    """Returns the endpoint of an engine.

    parallel: vLLM's ParallelConfig.
    first: the world rank of worker 0.
    layout, recorded: as ``engine_layout`` returns them.
    """
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if parallel.data_parallel_size > 1:
        raise Error(
            f"target: found data_parallel_size {parallel.data_parallel_size}, expected 1; "
            "write the endpoint of other engines by hand"
        )
    mesh: dict[str, Any] = {"tp": tp, "pp": pp}
    if parallel.enable_expert_parallel or not recorded:  # the library's layouts cut experts along an axis of their own
        mesh["views"] = [{"ep" if parallel.enable_expert_parallel else "etp": tp, "pp": pp}]
    return {"layout": layout, "mesh": mesh, "ranks": list(range(first, first + tp * pp))}


def engine_layout(model: str | os.PathLike[str], parallel: Any) -> tuple[str, bool]:
    """Returns the name of the layout of a vLLM engine in a model file, and whether reshard-record has written it, into
    this file or into one that it extends. Any other model has layout "vllm".

    Raises Error if that layout was recorded for an engine of other sizes.
    """
    path = Path(model)
    for _ in range(_DEPTH):
        text = path.read_text()
        if endpoint := endpoint_of(text, str(path)):
            _check_mesh(path, endpoint, parallel)
            return str(endpoint["layout"]), True
        if not (extended := _EXTEND.search(text)):
            break
        path = path.parent / extended[1].strip()
    return "vllm", False


def _check_mesh(path: Path, endpoint: dict[str, Any], parallel: Any) -> None:
    """Compares the mesh for which a layout was recorded, if it is for one only, with the engine's."""
    if (mesh := endpoint.get("mesh")) is None:
        return
    tp, pp, experts = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.enable_expert_parallel
    found = {"tp": tp, "pp": pp, "expert parallel": bool(experts and tp > 1)}
    recorded = {name: mesh.get(name, 1) for name in ("tp", "pp")}
    recorded["expert parallel"] = any(view.get("ep", 1) > 1 for view in mesh.get("views", ()))
    for size, expected in recorded.items():
        if found[size] != expected:
            raise Error(
                f"{path}: found an engine with {size} {found[size]}, expected {expected}, with which the layout was "
                "recorded; record it again"
            )


def job_of(model: str | os.PathLike[str], source: Source, parallel: Any, layout: str = "hf") -> str:
    """Returns the job that refits an engine, as JSON, which is YAML. The workers have the ranks after the trainer's.

    model: the path of a model file: one of the library, or one that reshard-record has written, whose layout is taken.
    source, layout: as of ``source_of``.
    parallel: vLLM's ParallelConfig.
    """
    trainer, endpoint = source_of(source, layout)
    target = target_of(parallel, endpoint["ranks"][-1] + 1, *engine_layout(model, parallel))
    extended = {"extend": str(Path(model).resolve()), "layouts": {"trainer": trainer}}
    return json.dumps({"version": 1, "model": extended, "source": endpoint, "target": target}, indent=1)
