# SPDX-License-Identifier: Apache-2.0
"""The Python module of this tree, with the commands and libraries of the build tree, for the tests of
reshard_record."""

from __future__ import annotations

import atexit
import contextlib
import io
import re
import shutil
import tempfile
from pathlib import Path

from commands import ROOT
from module import importable

_prefix = Path(tempfile.mkdtemp(prefix="reshard-record-"))
atexit.register(shutil.rmtree, _prefix)
importable(_prefix)

import numpy

import reshard_record as recording
from reshard_record import elements

__all__ = ["ROOT", "documented", "elements", "expand", "recording", "temporary_folder"]


@contextlib.contextmanager
def temporary_folder():
    """A temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def documented(index):
    """(printed, shown) of program number `index` of those of docs/record.md that are shown with what they print, run in
    a temporary folder."""
    text = (ROOT / "docs" / "record.md").read_text()
    blocks = re.findall(r"```python\n((?:(?!```).)*)```\n\n```\n(.*?)```", text, re.DOTALL)
    program, shown = blocks[index]
    with temporary_folder() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "docs/record.md", "exec"), {"__name__": "__main__"})
    return printed.getvalue(), shown


def expand(param, first):
    """The element numbers of a param, 0 for constant zeros."""
    result = numpy.full(param.shape or (1,), -1)
    for box in param.boxes:
        at = tuple(slice(start, start + size) for start, size in zip(box.start, box.size))
        assert (result[at] == -1).all(), "boxes overlap"
        if isinstance(box.origin, elements.Constant):
            result[at] = box.origin.value
        else:
            result[at] = (
                first[box.origin.name]
                + box.offset
                + sum(
                    numpy.arange(n).reshape([-1] + [1] * (len(box.size) - 1 - d)) * step
                    for d, (n, step) in enumerate(zip(box.size, box.steps))
                )
            )
    return result.reshape(param.shape)
