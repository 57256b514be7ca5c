"""Commands beside what stands in for a GPU (tests/executor/stand_in.cpp). RESHARD_BIN: the folder of the commands."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

BIN = Path(os.environ["RESHARD_BIN"]).resolve()
FOLDER = tempfile.TemporaryDirectory()  # of this process, while it lasts


def stand_in(folder, program="reshard-exec", modules=("cuda",)):
    """A copy of a program in a folder, which finds its modules there."""
    for module in modules:
        shutil.copy(BIN / "tests" / "stand_in.so", Path(folder) / f"libreshard_{module}.so")
    return Path(shutil.copy(BIN / program, folder))


PROGRAM = stand_in(FOLDER.name)


def otherwise(plan, source, target):
    """Runs a plan from files again, on the device: '' where it writes what stands in `target`, or a complaint."""
    device = Path(f"{target}-device")
    done = subprocess.run([PROGRAM, plan, "--device=cuda", f"--source={source}", f"--target={device}", "--check"], capture_output=True, text=True)
    if done.returncode != 0:
        return f"on the device: exit {done.returncode}: {done.stdout}{done.stderr}"
    files = {folder: {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()} for folder in (Path(target), device)}
    shutil.rmtree(device)
    expected, found = files.values()
    unlike = [str(name) for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    return f"the device writes other files: {unlike}" if unlike else ""
