# SPDX-License-Identifier: Apache-2.0
"""Commands beside backends that simulate a GPU (tests/executor/fake_backend.cpp). RESHARD_BIN: the folder of the
commands."""

import shutil
import tempfile
from pathlib import Path

from commands import BIN, run

FOLDER = tempfile.TemporaryDirectory()  # removed when this process ends


def copy_with_backends(folder, program="reshard-exec", backends=("cuda",)):
    """Copies a program and fake backends to a folder; returns the program's path. The program loads backends from its
    own folder."""
    for backend in backends:
        shutil.copy(BIN / "tests" / "fake_backend.so", Path(folder) / f"libreshard_{backend}.so")
    return Path(shutil.copy(BIN / program, folder))


PROGRAM = copy_with_backends(FOLDER.name)


def difference_on_device(plan, source, target):
    """Runs a plan from files again on the simulated device. Returns '' if it writes the same files as in `target`, else
    an error text."""
    device = Path(f"{target}-device")
    done = run(PROGRAM, plan, "--device=cuda", f"--source={source}", f"--target={device}", "--check", code=None)
    if done.returncode != 0:
        return f"on the device: exit {done.returncode}: {done.stdout}{done.stderr}"
    files = {
        folder: {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (Path(target), device)
    }
    shutil.rmtree(device)
    expected, found = files.values()
    different = [str(name) for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    return f"the run on the device wrote different files: {different}" if different else ""
