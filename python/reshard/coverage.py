# SPDX-License-Identifier: Apache-2.0
"""The check that the plan and ``left`` cover each tensor of a module once. Persistent buffers count as its params."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from .errors import BindError


def persistent_buffers(module: Any, own: Collection[str] = ()) -> dict[str, Any]:
    """Returns the persistent buffers of a PyTorch module by name, tied names included.

    own: last parts of the names of buffers that a framework has for itself, which are left out.
    """
    found = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        for leaf, buffer in each._buffers.items():
            if buffer is not None and leaf not in each._non_persistent_buffers_set and leaf not in own:
                found[f"{prefix}.{leaf}" if prefix else leaf] = buffer
    return found


def matched(names: Iterable[str], left: Sequence[str], where: str) -> set[str]:
    """Returns the names that the globs ``left`` match. Raises BindError for a glob that matches none.

    where: names the rank or the endpoints in the error.
    """
    known = list(names)
    for glob in left:
        if not fnmatch.filter(known, glob):
            raise BindError(f"{where}: left: {glob!r} matches no param or buffer")
    return {name for name in known if any(fnmatch.fnmatchcase(name, glob) for glob in left)}


def check_coverage(
    names: Collection[str],
    planned: Collection[str],
    left: Sequence[str],
    where: str,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Checks that the plan and ``left`` cover each tensor of a module once, and that the module
    has each param of the plan.

    names: of the module's tensors, tied names included.
    planned: the params that the plan has for this rank and that the module must have.
    left: globs of names that the plan does not cover.
    where: names the rank in the errors.
    tied: {name: first name} of the names that are in the memory of an earlier one. One name in the
        plan covers all.

    Raises BindError, which names the first tensor at fault.
    """
    kept, tied = matched(names, left, where), tied or {}
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(tied.get(name, name), []).append(name)
    for name in planned:
        if name not in names:
            raise BindError(f"{where} param {name!r}: the plan has it, but not the module")
    for group in groups.values():
        moved = any(name in planned for name in group)
        for name in group:
            if name in kept and name in planned:
                raise BindError(f"{where} param {name!r}: found in left and in the plan, expected one of them")
            if name not in kept and not moved:
                raise BindError(
                    f"{where} param {name!r}: the module has it, but not the plan; expected it in the plan or in "
                    "left=[…]"
                )
