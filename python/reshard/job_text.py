# SPDX-License-Identifier: Apache-2.0
"""The YAML of a job that a command makes, and the compiler's errors about it in the terms of the command's options."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .compiler import run_compiler
from .errors import CompileError
from .names import printable

_PLACE = re.compile(r"(?P<path>.+?):(?P<line>\d+):\d+: (?P<kind>error|warning|note): (?P<text>.*)")
_ORIGIN = re.compile(r".*  # (?P<option>--\S+|SOURCE|TARGET)(?P<value>=.*)?$")
_SHOWN = 160  # characters of a line of the job


class JobText:
    """The lines of a job. A line that an option made ends with a comment that names the option."""

    def __init__(self, *lines: str) -> None:
        self._lines = ["version: 1", *lines]

    def line(self, text: str, option: str) -> None:
        """A line that this option made."""
        self._lines.append(f"{text}  # {printable(option)}")

    def section(self, name: str, values: Mapping[str, Any], options: Mapping[str, str] = {}) -> None:
        """A map of the job, an entry a line. JSON is YAML. options: by key, the option that made the entry."""
        self._lines.append(f"{name}:")
        for key, value in values.items():
            origin = f"  # {printable(options[key])}" if key in options else ""
            self._lines.append(f"  {key}: {json.dumps(value)}{origin}")

    def comment(self, lines: Iterable[str]) -> None:
        """Puts comments before the job."""
        self._lines = [*(f"# {printable(line)}" for line in lines), *self._lines]

    @property
    def text(self) -> str:
        return "\n".join([*self._lines, ""])

    def _explained(self, error: str, path: Path) -> list[str]:
        """The errors of the compiler. One about the job names the option in place of a line of a file that will be
        gone; one about another file, such as a model, keeps its place and the line that it shows."""
        found: list[str] = []
        ours = False
        for line in error.splitlines():
            if not (place := _PLACE.fullmatch(line)):
                if not ours:
                    found.append(line.removeprefix("reshard-compile: error: "))
            elif place["path"] != str(path):
                ours = False
                found.append(line)
            else:
                ours = True
                number = int(place["line"])
                text = self._lines[number - 1].strip() if number <= len(self._lines) else ""
                made = _ORIGIN.fullmatch(text)
                option = f"{made['option']}{made['value'] or ''}: " if made else ""
                short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."  # names the tensor
                found.append(
                    ("" if place["kind"] == "error" else f"{place['kind']}: ")
                    + option
                    + place["text"]
                    + ("" if made or not text else f", in the job's line {short}")
                )
        return [line.replace(f"{path.parent}/", "") for line in found]

    def compile(self, folder: Path, *arguments: str, warn: Callable[[str], object] = warnings.warn) -> str:
        """Runs the compiler with the job, in a file of that folder, and returns its standard output. Raises
        CompileError, whose text has no command's name. warn: called with each warning about the plan."""
        path = folder / "job.yaml"
        path.write_text(self.text, "utf-8")
        try:
            return run_compiler([path, *arguments], warn)
        except CompileError as error:
            raise CompileError("\n".join(self._explained(str(error), path))) from None
