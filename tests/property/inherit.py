# SPDX-License-Identifier: Apache-2.0
"""Part of the oracle: globs, and layouts that extend others (docs/yaml.md, sections 1 and 6)."""

from __future__ import annotations

import re

from schemes import need


def fits(glob: str, name: str) -> bool:
    """Section 1: `*` matches any characters, `?` exactly one."""
    return (
        re.fullmatch("".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in glob), name, re.DOTALL)
        is not None
    )


def renamed(params: dict, beginnings: dict) -> dict:
    """`rename`: of the beginnings that a name has, the longest is replaced; each must be the longest of some name."""
    result, used = {}, set()
    for name, param in params.items():
        fitting = sorted((each for each in beginnings if name[: len(each)] == each), key=len)
        if fitting:
            used.add(fitting[-1])
            name = beginnings[fitting[-1]] + name[len(fitting[-1]) :]
        need(name != "", "'rename' leaves no name")
        need(name not in result, "one name twice after 'rename'")
        result[name] = param
    need(used == set(beginnings), "an entry of 'rename' applies to no param")
    return result


def joined(base: dict, own: dict) -> dict:
    """Merges two maps: an existing key keeps its position and gets the new value, a new key is appended, null (here
    read as text) removes."""
    whole = {**base, **own}
    return {key: value for key, value in whole.items() if value not in ("null", "~", "")}


def extended(layouts: dict, tensors: dict) -> dict:
    """The layouts of a model with these tensors, merged with the layouts that they extend, which are defined before
    them."""
    result: dict = {}
    for name, layout in layouts.items():
        if "extend" in layout:
            base = result[layout["extend"]]
            whole = {**base, **{key: value for key, value in layout.items() if key != "extend"}}
            for key in ("place", "switches"):
                whole[key] = joined(base.get(key, {}), layout.get(key, {}))
            if "rename" in base or "rename" in layout:
                whole["rename"] = {**base.get("rename", {}), **layout.get("rename", {})}
                whole["rename"] = {
                    key: value for key, value in whole["rename"].items() if value not in ("null", "~", None)
                }
            if isinstance(layout.get("params"), dict):
                inherited = {each: {"holds": each} for each in tensors} if base["params"] == "same" else base["params"]
                whole["params"] = joined(inherited, layout["params"])
            layout = whole
        result[name] = layout
    return result
