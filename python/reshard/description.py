"""A model with a layout, written from the params of a live module: a start for a job that nobody wants to write from an empty file."""

from __future__ import annotations

import json
import math
import re
import struct
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .compiler import run_compiler
from .dtypes import DTYPES, dtype_by_name, safetensors_name
from .errors import Error

#: A dimension's rule, as in the YAML: axes outermost first, then what is not the default.
Rule = str


@dataclass(frozen=True)
class _Described:
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str
    rules: dict[int, Rule]  # by dimension


def _rule(axes: list[str], **more: object) -> Rule:
    named = axes[0] if len(axes) == 1 else f"[{', '.join(axes)}]"
    return "{" + ", ".join([f"axis: {named}", *(f"{key}: {value}" for key, value in more.items())]) + "}" if more else named


def _chunks(rows: int, parts: int) -> list[int]:
    """The lengths that torch.chunk gives, with zeros for the parts that it leaves out."""
    longest = -(-rows // parts)
    return [max(0, min(longest, rows - part * longest)) for part in range(parts)]


def _by_placements(name: str, tensor: Any) -> dict[int, Rule]:
    """DTensor: cut by torch.chunk over each mesh dimension in turn; strided ones, FSDP's over tensor parallel ones, come last.

    Where the parts of several axes differ, ``sizes`` has the length of each."""
    mesh = tensor.device_mesh
    axes = list(mesh.mesh_dim_names or (f"axis{i}" for i in range(len(mesh.shape))))
    order: dict[int, list[int]] = {}
    strided: dict[int, list[int]] = {}
    for i, placement in enumerate(tensor.placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise Error(f"param {name!r}: found placement {placement} on axis {axes[i]!r}, expected Shard or Replicate")
        (strided if kind == "_StridedShard" else order).setdefault(placement.dim % len(tensor.shape), []).append(i)
    rules = {}
    for dimension in sorted({*order, *strided}):
        over = order.get(dimension, []) + strided.get(dimension, [])
        if len(over) == 1:
            rules[dimension] = _rule([axes[over[0]]], scheme="chunk")
            continue
        sizes = [tensor.shape[dimension]]
        for i in over:  # each part of the axes before is cut again
            sizes = [length for part in sizes for length in _chunks(part, mesh.shape[i])]
        uneven = {"sizes": sizes} if len(set(sizes)) > 1 else {}
        rules[dimension] = _rule([axes[i] for i in over], **uneven)
    return rules


def _mesh(named: Mapping[str, Any]) -> dict[str, int]:
    """The axes of the ranks that DTensors lie on, ours in order: some param has all of them, others those on which they are not replicated."""
    meshes = {}
    for name, tensor in named.items():
        if hasattr(tensor, "placements"):
            found = tensor.device_mesh
            meshes[tuple(zip(found.mesh_dim_names or (f"axis{i}" for i in range(len(found.shape))), found.shape))] = name
    whole = max(meshes, key=len, default=())
    for mesh, name in meshes.items():
        rest = iter(whole)
        if not all(axis in rest for axis in mesh):  # a part of it, in its order
            texts = [str(dict(each)) for each in (mesh, whole)]
            raise Error(f"params {name!r} and {meshes[whole]!r} are on meshes {texts[0]} and {texts[1]}, expected one that has the axes of all")
    return dict(reversed(whole))  # the last of DTensor's axes varies fastest, the first of ours


def _describe(name: str, tensor: Any, axes: Mapping[str, int]) -> _Described:
    shape = list(tensor.shape)
    rules: dict[int, Rule] = {}
    if hasattr(tensor, "placements"):
        rules = _by_placements(name, tensor)
    elif getattr(tensor, "tensor_model_parallel", False):
        # Megatron: experts, which data parallel ranks do not average, have an axis of their own.
        axis = "tp" if getattr(tensor, "allreduce", True) else "etp"
        if axis not in axes:
            raise Error(f"param {name!r} is tensor parallel, expected the size of axis {axis!r}")
        stride = getattr(tensor, "partition_stride", 1)
        shape[tensor.partition_dim] *= axes[axis]
        rules[tensor.partition_dim] = _rule([axis], stride=stride) if stride > 1 else _rule([axis])
    dtype = dtype_by_name(tensor.dtype)
    if dtype not in DTYPES:
        raise Error(f"param {name!r}: found dtype {dtype}, expected one of {', '.join(DTYPES)}")
    return _Described(tuple(shape), dtype, rules)


def _model(tensors: Mapping[str, _Described]) -> str:
    """The model that the compiler describes: of a checkpoint of these tensors, of which there is the header alone."""
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
            file.truncate(8 + len(text) + offset)  # no byte of it is written
        return run_compiler([f"--describe={folder}"]).partition("\n")[2]  # less the comment that names the folder


def _patterns(model: str) -> Iterable[tuple[str, re.Pattern[str]]]:
    """The declared names of a described model, and what names each stands for."""
    for line in model.partition("tensors:\n")[2].splitlines():
        found = re.match(r'  (?:"((?:[^"\\]|\\.)*)"|([^\s:]+)): ', line)
        if found:
            declared = found[2] or re.sub(r"\\(.)", r"\1", found[1])
            yield declared, re.compile("".join(r"\d+" if part.startswith("{") else re.escape(part) for part in re.split(r"(\{\w+\})", declared)))


def _layout(model: str, tensors: Mapping[str, _Described]) -> list[str]:
    """The rules of `shard:`, one line for each declared name that has any."""
    declared = list(_patterns(model))
    exact = {name for name, _ in declared}
    lines = []
    for name, pattern in declared:
        fit = {name: tensors[name]} if name in tensors else {each: t for each, t in tensors.items() if each not in exact and pattern.fullmatch(each)}
        different = {json.dumps(tensor.rules): each for each, tensor in fit.items()}
        if len(different) > 1:
            raise Error(f"{' and '.join(map(repr, different.values()))} are of one pattern but cut in different ways, which one layout cannot say")
        rules = next(iter(fit.values())).rules if fit else {}
        if rules:
            lines.append(f"      {json.dumps(name)}: {{{', '.join(f'{dimension}: {rule}' for dimension, rule in sorted(rules.items()))}}}")
    return lines


def describe(module: Any, *, layout: str = "live", axes: Mapping[str, int] | None = None) -> str:
    """The YAML of a model and of the layout that a live module has it in.

    module: a module, or anything with ``named_parameters()``, or a mapping from names to tensors: those of one rank.
    layout: the layout's name.
    axes: sizes of Megatron's axes ("tp", "etp"); the mesh of a DTensor says its own.

    DTensor's placements and Megatron's attributes (``tensor_model_parallel``, ``partition_dim``, ``partition_stride``) become rules; tensors that
    have neither are whole. With pipeline stages a rank describes its own layers only. Raises Error where a placement cannot be said.
    """
    named = module if isinstance(module, Mapping) else dict(module.named_parameters())
    tensors = {name: _describe(name, tensor, axes or {}) for name, tensor in named.items()}
    if not tensors:
        raise Error("found no params, expected a module that has some")
    model = _model(tensors)
    mesh = dict(axes or {}) | _mesh(named)
    shard = _layout(model, tensors)
    lines = [
        f"# From the {len(tensors)} params of a live module: a start. Name the numbers with `let`; a job's endpoint is",
        f"# {{layout: {layout}, mesh: {{{', '.join(f'{name}: {size}' for name, size in mesh.items())}}}}}",
        model + "layouts:",
        f"  {layout}:",
        "    params: same",
        *(["    shard:", *shard] if shard else []),
    ]
    return "\n".join(lines) + "\n"
