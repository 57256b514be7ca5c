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

from ._library import PREFIX, text_for
from ._waiting import Helper
from .errors import CompileError, Error
from .plan import Plan

_WARNING = "reshard-compile: warning: "


def run_compiler(arguments: Sequence[str | os.PathLike[str]], warn: Callable[[str], object] = warnings.warn) -> str:
    """Runs reshard-compile and returns its standard output. Raises CompileError. warn: called with each warning about
    the plan."""
    texts = [os.fsdecode(text_for(os.fsencode(argument), "argument of reshard-compile")) for argument in arguments]
    process = subprocess.Popen(
        [PREFIX / "bin" / "reshard-compile", *texts],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="backslashreplace",
    )
    try:
        # In another thread: after Ctrl-C this module's wait for a process goes on for 0.25 s.
        output, errors = Helper()(process.communicate)
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        raise CompileError(
            errors.rstrip() or f"reshard-compile exited with code {process.returncode} and printed no error"
        )
    for line in errors.splitlines():
        if line.startswith(_WARNING):
            warn(line.removeprefix(_WARNING))
    return str(output)


def _assignments(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _assignments(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={value if isinstance(value, str) else json.dumps(value)}"


def compile(
    job: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    flags: Sequence[str] = (),
    **overrides: Any,
) -> Plan:
    """Compiles a job into a plan and proves it. The same job gives the same plan in every process.

    job: the path of a job file.
    output: the path of the plan file; None: a temporary file that is deleted together with the Plan.
    flags: further options of ``reshard-compile``, such as ``--allow=missing``; ``--verify-seconds=S``, since a proof
    that takes
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
        weakref.finalize(plan, _remove, folder, os.getpid())
    return plan


def _remove(folder: str, process: int) -> None:
    """Deletes the folder of a plan, but not when a forked process ends: the other one still has the plan."""
    if process == os.getpid():
        shutil.rmtree(folder)
