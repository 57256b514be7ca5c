# SPDX-License-Identifier: Apache-2.0
"""The YAML of recorded layouts: a few lines in block style, everything below them in flow style."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import Error

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[][{},:]|[^][{},:"]+)')
_INTEGER = re.compile(r"-?\d+")
#: Begins a comment of a recorded model with the endpoint that has its layout; of one for all sizes, without the mesh.
ENDPOINT = "# The endpoint of a job is "


class Name(str):
    """A text that is written in quotes: a name of a tensor or a param."""


class Word(str):
    """A text that is written as it is: a keyword, a range, an expression, or YAML in flow style."""


def flow(value: Any) -> str:
    """A value in flow style."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(key)}: {flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(flow, value)) + "]"
    return json.dumps(value) if isinstance(value, Name) else str(value)


def rule_text(rule: Mapping[str, Any]) -> Word:
    """A rule of `shard` or `place`: one without options is written as its axis, or the list of its axes."""
    return Word(flow(rule["axis"] if len(rule) == 1 else rule))


def write(model: Mapping[str, Any]) -> str:
    """A model file. Tensors, layouts, and in a layout the params, have a line each."""
    lines = []
    for key, value in model.items():
        if key == "tensors":
            lines += [f"{key}:", *(f"  {flow(name)}: {flow(each)}" for name, each in value.items())]
        elif key == "layouts":
            lines.append(f"{key}:")
            for name, layout in value.items():
                lines += _layout(name, layout)
        else:
            lines.append(f"{key}: {flow(value)}")
    return "\n".join(lines) + "\n"


def _layout(name: str, layout: Mapping[str, Any]) -> list[str]:
    if not isinstance(layout["params"], Mapping):
        return [f"  {name}: {flow(layout)}"]
    lines = [f"  {name}:"]
    for key, value in layout.items():
        if key == "params" and value:
            lines += ["    params:", *(f"      {flow(param)}: {flow(keys)}" for param, keys in value.items())]
        else:
            lines.append(f"    {key}: {flow(value)}")
    return lines


def endpoint_of(text: str, where: str) -> dict[str, Any] | None:
    """The endpoint that a recorded model states, or None. where: the file's name, for errors."""
    line = next((line[len(ENDPOINT) :] for line in text.splitlines() if line.startswith(ENDPOINT)), None)
    return None if line is None else read(f"endpoint: {line}", where)["endpoint"]


def _value(tokens: list[str]) -> Any:
    """Takes one value from the front of the tokens."""
    token = tokens.pop(0)
    if token == "{":
        found: dict[Any, Any] = {}
        while tokens[0] != "}":
            key = _value(tokens)
            if tokens.pop(0) != ":":
                raise ValueError
            found[key] = _value(tokens)
            if tokens[0] == ",":
                tokens.pop(0)
        tokens.pop(0)
        return found
    if token == "[":
        items: list[Any] = []
        while tokens[0] != "]":
            items.append(_value(tokens))
            if tokens[0] == ",":
                tokens.pop(0)
        tokens.pop(0)
        return items
    if token[0] == '"':
        return Name(json.loads(token))
    token = token.strip()
    return int(token) if _INTEGER.fullmatch(token) else Word(token)


def read(text: str, where: str) -> dict[str, Any]:
    """The model of a file that `write` wrote. where: the file's name, for errors."""
    root: dict[Any, Any] = {}
    maps = [root]  # by the depth of indentation
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            depth = (len(line) - len(line.lstrip())) // 2
            tokens = _TOKEN.findall(line.strip())
            key = _value(tokens)
            if tokens.pop(0) != ":":
                raise ValueError
            value = _value(tokens) if tokens else {}
            if tokens:
                raise ValueError
            maps[depth][key] = value
            maps[depth + 1 :] = [value]
        except (ValueError, IndexError, TypeError) as error:
            raise Error(f"{where}:{number}: {line.strip()!r} is no line that reshard-record writes") from error
    return root
