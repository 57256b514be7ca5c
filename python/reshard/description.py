# SPDX-License-Identifier: Apache-2.0
"""Writes the YAML of a model and a layout from the params of a live module, as a starting point for a job."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .compiler import run_compiler
from .dtypes import safetensors_header
from .errors import Error
from .flow import ENDPOINT, Word, flow, rule_text
from .live import Part, axes_of, part_of, shard_of


def _mesh(named: Mapping[str, Any]) -> dict[str, int]:
    """Returns the mesh of all DTensors, in reshard's axis order.

    At least one param must be on the whole mesh; the meshes of the others must be subsets of its axes, in the same
    order."""
    meshes = {}
    for name, tensor in named.items():
        if hasattr(tensor, "placements"):
            found = tensor.device_mesh
            meshes[tuple(zip(axes_of(found), found.shape))] = name
    whole = max(meshes, key=len, default=())
    for mesh, name in meshes.items():
        rest = iter(whole)
        if not all(axis in rest for axis in mesh):  # not a subsequence of the whole mesh
            texts = [str(dict(each)) for each in (mesh, whole)]
            raise Error(
                f"params {name!r} and {meshes[whole]!r} are on different meshes, {texts[0]} and {texts[1]}: "
                "expected one mesh with the axes of all params"
            )
    return dict(reversed(whole))  # DTensor's last axis varies fastest; in reshard the first one does


def _group(name: str, tensor: Any, axes: Mapping[str, int]) -> tuple[str, range]:
    """Returns the axis of a tensor of Megatron. Experts are sharded over etp: their gradients are not reduced over data
    parallel ranks, allreduce is False. This rank does not know the others of its group, but how many they are."""
    axis = "tp" if getattr(tensor, "allreduce", True) else "etp"
    if axis not in axes:
        raise Error(
            f"param {name!r} is tensor parallel, but the size of axis {axis!r} is unknown: pass it in "
            f"axes={{{axis!r}: SIZE}} (--axis={axis}=SIZE)"
        )
    return axis, range(axes[axis])


def _model(tensors: Mapping[str, Part]) -> str:
    """Returns the compiler's description of a checkpoint of these tensors. Only the checkpoint's header is written."""
    header, data = safetensors_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    with tempfile.TemporaryDirectory(prefix="reshard-") as folder:
        with open(Path(folder) / "model.safetensors", "wb") as file:
            file.write(header)
            file.truncate(len(header) + data)  # a sparse file: the data is never written
        # Without the first line, a comment with the folder's name.
        return run_compiler([f"--describe={folder}"]).partition("\n")[2]


def _patterns(model: str) -> Iterable[tuple[str, re.Pattern[str]]]:
    """Yields each declared name of a described model with a regular expression for the tensor names that it matches."""
    for line in model.partition("tensors:\n")[2].splitlines():
        found = re.match(r'  (?:"((?:[^"\\]|\\.)*)"|([^\s:]+)): ', line)
        if found:
            declared = found[2] or re.sub(r"\\(.)", r"\1", found[1])
            parts = re.split(r"(\{\w+\})", declared)
            expressions = (r"\d+" if part.startswith("{") else re.escape(part) for part in parts)
            yield declared, re.compile("".join(expressions))


def _rules(name: str, tensor: Part) -> dict[int, Word]:
    """Returns the sharding rules of a tensor by dimension."""
    shard = shard_of([(cut, cut.axis) for cut in tensor.cuts], tensor.shape, f"param {name!r}")
    return {dimension: rule_text(rule) for dimension, rule in shard.items()}


def _layout(model: str, tensors: Mapping[str, Part]) -> list[str]:
    """Returns the lines of `shard:`, one for each declared name that has sharding rules."""
    declared = list(_patterns(model))
    exact = {name for name, _ in declared}
    lines = []
    for name, pattern in declared:
        fit = (
            {name: tensors[name]}
            if name in tensors
            else {each: t for each, t in tensors.items() if each not in exact and pattern.fullmatch(each)}
        )
        rules = {each: _rules(each, tensor) for each, tensor in fit.items()}
        different = {flow(rule): each for each, rule in rules.items()}
        if len(different) > 1:
            raise Error(
                f"tensors {' and '.join(map(repr, different.values()))} have one tensor pattern "
                f"({declared!r}) but different shardings: one layout cannot express this"
            )
        if any(rules.values()):
            lines.append(f"      {json.dumps(name)}: {next(iter(different))}")
    return lines


def describe(module: Any, *, layout: str = "live", axes: Mapping[str, int] | None = None) -> str:
    """Returns the YAML of the model and the layout of a live module.

    module: a module, any object with ``named_parameters()``, or a mapping from names to tensors; the tensors of one
        rank.
    layout: the name of the layout.
    axes: sizes of Megatron's axes ("tp", "etp"). DTensors have their own mesh.

    DTensor's placements and Megatron's attributes (``tensor_model_parallel``, ``partition_dim``, ``partition_stride``)
    become sharding rules; tensors without either are replicated. With pipeline stages, the description of a rank
    contains only its own layers. Raises Error if a placement cannot be expressed.
    """
    named = module if isinstance(module, Mapping) else dict(module.named_parameters())
    if braced := next((name for name in named if "{" in name or "}" in name), None):
        raise Error(f"param {braced!r}: a brace in a name is not supported")
    tensors = {name: part_of(name, tensor, partial(_group, name, tensor, axes or {})) for name, tensor in named.items()}
    if not tensors:
        raise Error("the module has no params, expected at least one")
    model = _model(tensors)
    mesh = dict(axes or {}) | _mesh(named)
    shard = _layout(model, tensors)
    lines = [
        f"# Generated from the {len(tensors)} params of a live module, as a starting point. Name repeated numbers "
        "with `let`.",
        ENDPOINT + flow({"layout": layout, "mesh": mesh}),
        model + "layouts:",
        f"  {layout}:",
        "    params: same",
        *(["    shard:", *shard] if shard else []),
    ]
    return "\n".join(lines) + "\n"
