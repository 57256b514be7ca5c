# SPDX-License-Identifier: Apache-2.0
"""Runs commands in tests, with a deadline and an expected exit code, in a temporary folder. RESHARD_BIN: the folder of
the built commands."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("RESHARD_BIN", ROOT / "build/release")).resolve()
# Allows root and more processes than cores; shared memory only.
MPI_ENVIRONMENT = os.environ | {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_btl": "self,vader",
    "TSAN_OPTIONS": f"suppressions={ROOT}/tests/mpi/tsan.supp",
}
# MPI does not free all its memory; tests/conformance checks for our leaks.
MPIRUN = MPI_ENVIRONMENT | {"ASAN_OPTIONS": "detect_leaks=0"}
CONVERT = (sys.executable, "-c", "from reshard.commands import convert; convert()")
DEADLINE = 1800  # seconds; sanitizers and large jobs are slow


def words_of(*command: object) -> list[str]:
    """The words of a command. The first argument may be several words, separated as in a shell; a name that begins with
    reshard- is a built command."""
    first, *others = command
    words = [*(shlex.split(first) if isinstance(first, str) else [str(first)]), *map(str, others)]
    if words[0].startswith("reshard-"):
        words[0] = str(BIN / words[0])
    return words


def run(
    *command: object, code: int | None = 0, timeout: float = DEADLINE, **options: object
) -> subprocess.CompletedProcess:
    """Runs a command (words_of) and captures its output as text. Raises AssertionError with the output unless the exit
    code is `code`; None accepts any."""
    words = words_of(*command)
    done = subprocess.run(words, timeout=timeout, **{"capture_output": True, "text": True} | options)
    if code is not None and done.returncode != code:
        raise AssertionError(
            f"{' '.join(words)}: exit code {done.returncode}, expected {code}\n{done.stdout}{done.stderr}"
        )
    return done


def limited(seconds: int, *command: object, **options: object) -> subprocess.CompletedProcess:
    """run() within so many seconds of CPU time, and 30 times as many under the sanitizers (RESHARD_SMALL). For what a
    quadratic algorithm does in minutes and a right one in a fraction of a second."""
    limit = seconds * (30 if "RESHARD_SMALL" in os.environ else 1)
    return run(f"bash -c 'ulimit -t {limit}; exec \"$@\"' -", *words_of(*command), **options)


def mpirun(ranks: int, *command: object, **options: object) -> subprocess.CompletedProcess:
    """run() of so many processes, which end after 100 s: mpirun may hang if one of them fails early."""
    return run(f"timeout -k10 100 mpirun -n {ranks}", *words_of(*command), **{"env": MPIRUN} | options)


def job_of(model: object, source: object, target: object, **more: object) -> dict[str, object]:
    """A job; `more` has further keys."""
    return {"version": 1, "model": model, "source": source, "target": target} | more


def shared_folder(case: type[unittest.TestCase], **options: object) -> Path:
    """A temporary folder for all tests of a class, removed after them: for setUpClass. `options`: those of
    tempfile.TemporaryDirectory."""
    folder = tempfile.TemporaryDirectory(**options)
    case.addClassCleanup(folder.cleanup)
    return Path(folder.name)


class FolderTest(unittest.TestCase):
    """A test with a temporary folder, self.folder, which is removed after it. Paths of its methods begin there."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def call(self, *command: object, **options: object) -> subprocess.CompletedProcess:
        """run() in the folder."""
        return run(*command, cwd=self.folder, **options)

    def job(self, model: object, source: object = "{mesh: {}}", target: object = "{mesh: {}}", **more: object) -> None:
        """Writes job.yaml. Each argument is a text of YAML or another value; `more` has further keys."""
        keys = job_of(model, source, target, **more).items()
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in keys}
        self.write("job.yaml", "".join(f"{key}: {text}\n" for key, text in texts.items()))

    def prints(self, expected: str, *command: object, **options: object) -> str:
        """Runs a command whose output must have a text. Returns the output."""
        text = self.call(*command, **options).stdout
        self.assertIn(expected, text)
        return text

    def fails(self, expected: str, *command: object, code: int = 2, **options: object) -> str:
        """Runs a command that must end with an exit code, and with a text in its errors. Returns the errors."""
        text = self.call(*command, code=code, **options).stderr
        self.assertIn(expected, text)
        return text

    def write(self, name: str, text: str) -> None:
        """Writes a file, and makes the folder that it is in."""
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def save_checkpoint(self, folder: str, arrays: dict) -> None:
        """Saves arrays in a folder's model.safetensors."""
        from safetensors.numpy import save_file

        (self.folder / folder).mkdir(parents=True, exist_ok=True)
        save_file(arrays, self.folder / folder / "model.safetensors")

    def json(self, name: str) -> Any:
        """The value in a JSON file."""
        return json.loads((self.folder / name).read_text())

    def listing(self, path: object, *options: str) -> Any:
        """What reshard-inspect prints of a plan or a checkpoint, as JSON."""
        return json.loads(self.call("reshard-inspect", path, *options, "--format=json").stdout)

    def same_file(self, one: str, other: str) -> None:
        self.assertEqual((self.folder / one).read_bytes(), (self.folder / other).read_bytes())

    def names(self, folder: str = ".") -> list[str]:
        """The sorted names in a folder."""
        return sorted(path.name for path in (self.folder / folder).iterdir())
