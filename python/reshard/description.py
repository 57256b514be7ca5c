# SPDX-License-Identifier: Apache-2.0
"""Writes the YAML of a model and a layout from the params of a live module, as a starting point for a job."""

from __future__ import annotations

import json
import math
import re
import struct
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from .compiler import run_compiler
from .dtypes import dtype_of, safetensors_name
from .errors import Error
from .live import axes_of, cuts_of, rule_of


@dataclass(frozen=True)
class _Described:
    shape: tuple[int, ...]  # of the unsharded tensor
    dtype: str
    rules: dict[int, dict[str, Any]]  # by dimension, as in a layout


def _yaml(rule: Mapping[str, Any]) -> str:
    """Returns a rule as YAML text: its axes, outermost first, then the options that differ from the default."""
    axis = rule["axis"] if isinstance(rule["axis"], str) else f"[{', '.join(rule['axis'])}]"
    more = [f"{key}: {value}" for key, value in rule.items() if key != "axis"]
    return "{" + ", ".join([f"axis: {axis}", *more]) + "}" if more else axis


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


def _describe(name: str, tensor: Any, axes: Mapping[str, int]) -> _Described:
    shape = list(tensor.shape)
    rules: dict[int, dict[str, Any]] = {}
    if hasattr(tensor, "placements"):
        mesh, over = tensor.device_mesh, sorted(cuts_of(name, tensor), key=lambda cut: cut[0])
        for dimension, cuts in groupby(over, key=lambda cut: cut[0]):
            axes_there = [axis for _, axis in cuts]
            names = [axes_of(mesh)[axis] for axis in axes_there]
            rules[dimension] = rule_of(names, [mesh.shape[axis] for axis in axes_there], shape[dimension])
    elif getattr(tensor, "tensor_model_parallel", False):
        # Megatron: experts are sharded over etp. Their gradients are not reduced over data parallel ranks: allreduce is
        # False.
        axis = "tp" if getattr(tensor, "allreduce", True) else "etp"
        if axis not in axes:
            raise Error(
                f"param {name!r} is tensor parallel, but the size of axis {axis!r} is unknown: pass it in "
                f"axes={{{axis!r}: SIZE}} (--axis={axis}=SIZE)"
            )
        stride = getattr(tensor, "partition_stride", 1)
        shape[tensor.partition_dim] *= axes[axis]
        rules[tensor.partition_dim] = {"axis": axis} | ({"stride": stride} if stride > 1 else {})
    return _Described(tuple(shape), dtype_of(name, tensor), rules)


def _model(tensors: Mapping[str, _Described]) -> str:
    """Returns the compiler's description of a checkpoint of these tensors. Only the checkpoint's header is written."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        dtype, itemsize = safetensors_name(tensor.dtype)
        end = offset + math.prod(tensor.shape) * itemsize
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with tempfile.TemporaryDirectory(prefix="reshard-") as folder:
        with open(Path(folder) / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + offset)  # a sparse file: the data is never written
        # Without the first line, a comment with the folder's name.
        return run_compiler([f"--describe={folder}"]).partition("\n")[2]


def _patterns(model: str) -> Iterable[tuple[str, re.Pattern[str]]]:
    """Yields each declared name of a described model with a regular expression for the tensor names that it matches."""
    for line in model.partition("tensors:\n")[2].splitlines():
        found = re.match(r'  (?:"((?:[^"\\]|\\.)*)"|([^\s:]+)): ', line)
        if found:
            declared = found[2] or re.sub(r"\\(.)", r"\1", found[1])
            yield (
                declared,
                re.compile(
                    "".join(
                        r"\d+" if part.startswith("{") else re.escape(part) for part in re.split(r"(\{\w+\})", declared)
                    )
                ),
            )


def _layout(model: str, tensors: Mapping[str, _Described]) -> list[str]:
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
        different = {json.dumps(tensor.rules): each for each, tensor in fit.items()}
        if len(different) > 1:
            raise Error(
                f"tensors {' and '.join(map(repr, different.values()))} have one tensor pattern "
                f"({declared!r}) but different shardings: one layout cannot express this"
            )
        rules = next(iter(fit.values())).rules if fit else {}
        if rules:
            lines.append(
                f"      {json.dumps(name)}: "
                f"{{{', '.join(f'{dimension}: {_yaml(rule)}' for dimension, rule in sorted(rules.items()))}}}"
            )
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
    tensors = {name: _describe(name, tensor, axes or {}) for name, tensor in named.items()}
    if not tensors:
        raise Error("the module has no params, expected at least one")
    model = _model(tensors)
    mesh = dict(axes or {}) | _mesh(named)
    shard = _layout(model, tensors)
    lines = [
        f"# Generated from the {len(tensors)} params of a live module, as a starting point. Name repeated numbers "
        "with `let`.",
        f"# The endpoint of a job is {{layout: {layout}, mesh: "
        f"{{{', '.join(f'{name}: {size}' for name, size in mesh.items())}}}}}",
        model + "layouts:",
        f"  {layout}:",
        "    params: same",
        *(["    shard:", *shard] if shard else []),
    ]
    return "\n".join(lines) + "\n"
