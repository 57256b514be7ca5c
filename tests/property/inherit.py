"""Globs, and layouts that extend others (docs/yaml.md, sections 1 and 6). Part of the oracle."""

from __future__ import annotations

import re


def fits(glob: str, name: str) -> bool:
    """Section 1: `*` any characters, `?` one."""
    return re.fullmatch("".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in glob), name, re.DOTALL) is not None


def joined(base: dict, own: dict) -> dict:
    """Entry by entry: the same key replaces in its place, a new one comes last, null (here read as text) removes."""
    whole = {**base, **own}
    return {key: value for key, value in whole.items() if value not in ("null", "~", "")}


def extended(layouts: dict, tensors: dict) -> dict:
    """Layouts of a model of these tensors, with what they extend (each stands above)."""
    result: dict = {}
    for name, layout in layouts.items():
        if "extend" in layout:
            base = result[layout["extend"]]
            whole = {**base, **{key: value for key, value in layout.items() if key != "extend"}}
            for key in ("place", "switches"):
                whole[key] = joined(base.get(key, {}), layout.get(key, {}))
            if isinstance(layout.get("params"), dict):
                inherited = {each: {"holds": each} for each in tensors} if base["params"] == "same" else base["params"]
                whole["params"] = joined(inherited, layout["params"])
            layout = whole
        result[name] = layout
    return result
