# SPDX-License-Identifier: Apache-2.0
"""Runs the compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ._library import PREFIX
from .errors import CompileError, Error
from .plan import Plan


_WARNING = "reshard-compile: warning: "


def run_compiler(arguments: Sequence[str | os.PathLike[str]], warn: Callable[[str], object] = warnings.warn) -> str:
    """Runs reshard-compile and returns its standard output. Raises CompileError. warn: called with each warning about the plan."""
    done = subprocess.run([PREFIX / "bin" / "reshard-compile", *arguments], capture_output=True, encoding="utf-8",
                          errors="backslashreplace")
    if done.returncode:
        raise CompileError(done.stderr.rstrip() or f"reshard-compile exited with code {done.returncode} and printed no error")
    for line in done.stderr.splitlines():
        if line.startswith(_WARNING):
            warn(line.removeprefix(_WARNING))
    return done.stdout


def _assignments(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _assignments(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={value if isinstance(value, str) else json.dumps(value)}"


def compile(job: str | os.PathLike[str], *, output: str | os.PathLike[str] | None = None, flags: Sequence[str] = (), **overrides: Any) -> Plan:
    """Compiles a job into a plan and proves it. The same job gives the same plan in every process.

    job: the path of a job file.
    output: the path of the plan file; None: a temporary file that is deleted together with the Plan.
    flags: further options of ``reshard-compile``, such as ``--allow=missing``; ``--verify-seconds=S``, since a proof that takes
        longer than 10 s ends with a warning (of Python's ``warnings``); or ``--no-verify``.
    overrides: values that replace those of the job, like ``--set``: ``source={"mesh": {"tp": 4}}``, or
        ``**{"source.mesh.tp": 4}``.

    Raises CompileError, also if the plan is wrong: then there is no file.
    """
    folder = "" if output else tempfile.mkdtemp(prefix="reshard-")
    path = Path(output) if output else Path(folder) / (Path(job).stem + ".rplan")
    try:
        run_compiler([job, "-o", path, *flags, *(f"--set={assignment}" for assignment in _assignments(overrides))])
        plan = Plan.open(path)
    except Error:
        if folder:
            shutil.rmtree(folder)
        raise
    if folder:
        weakref.finalize(plan, shutil.rmtree, folder)
    return plan
