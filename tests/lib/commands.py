# SPDX-License-Identifier: Apache-2.0
"""Runs commands in tests, with a deadline and an expected exit code, in a temporary folder. RESHARD_BIN: the folder of
the built commands."""

from __future__ import annotations

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("RESHARD_BIN", ROOT / "build/release")).resolve()
DEADLINE = 1800  # seconds; sanitizers and large jobs are slow


def run(
    *command: object, code: int | None = 0, timeout: float = DEADLINE, **options: object
) -> subprocess.CompletedProcess:
    """Runs a command (a name that begins with reshard- is a built one) and captures its output as text. Raises
    AssertionError with the output unless the exit code is `code`; None accepts any."""
    words = [str(word) for word in command]
    if words[0].startswith("reshard-"):
        words[0] = str(BIN / words[0])
    done = subprocess.run(words, timeout=timeout, **{"capture_output": True, "text": True} | options)
    if code is not None and done.returncode != code:
        raise AssertionError(
            f"{' '.join(words)}: exit code {done.returncode}, expected {code}\n{done.stdout}{done.stderr}"
        )
    return done


def limited(seconds: int, *command: object, **options: object) -> subprocess.CompletedProcess:
    """run() within so many seconds of CPU time, and 30 times as many under the sanitizers (RESHARD_SMALL). For what a
    quadratic algorithm does in minutes and a right one in a fraction of a second."""
    words = [BIN / str(command[0]), *command[1:]] if str(command[0]).startswith("reshard-") else command
    return run(
        "bash",
        "-c",
        f'ulimit -t {seconds * (30 if "RESHARD_SMALL" in os.environ else 1)}; exec "$@"',
        "-",
        *words,
        **options,
    )


def shared_folder(case: type[unittest.TestCase], **options: object) -> Path:
    """A temporary folder for all tests of a class, removed after them: for setUpClass. `options`: those of
    tempfile.TemporaryDirectory."""
    folder = tempfile.TemporaryDirectory(**options)
    case.addClassCleanup(folder.cleanup)
    return Path(folder.name)


class FolderTest(unittest.TestCase):
    """A test with a temporary folder, self.folder, which is removed after it."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
